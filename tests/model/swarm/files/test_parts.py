"""Of a large file only the bytes of a span are fetched, and no hole is read: against a small hub on loopback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from huggingface_hub import constants
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # exported where mypy does not look

from client.draft.heads.files import read_tensors
from node.model.checkpoint import Checkpoint, check_disk, open_checkpoint
from node.model.loading import fetch
from node.model.span import dissect, load_span
from swarm.base.errors import HubError, ModelMismatch, NotEnoughSpace, UnsupportedModel
from swarm.base.layers import Span
from swarm.demo import DRAFT, TARGET
from swarm.files import tensor_files
from swarm.files.fingerprint import model_identity
from swarm.files.hub import Hub, find_model
from swarm.files.manifests import FileProof, WeightFiles, find_manifest
from swarm.files.parts import part_file, range_download
from swarm.files.parts.byte_ranges import ByteRanges
from swarm.files.parts.part_file import PartFile, parts_folder
from tests.fake_hub import MODEL, FakeHub, Repo
from tests.model.gguf_files import TinyGguf

FIRST, SECOND = Span(0, 1), Span(1, 2)
GAP = 64
one_format = pytest.mark.parametrize("single", ["gguf"], indirect=True)
"""For what is done with bytes, whatever they mean."""


@dataclass(frozen=True)
class Single:
    """A model in one file, on the hub and here."""

    name: str
    file: str
    local: Path
    hub: FakeHub
    repo: Repo

    @property
    def content(self) -> bytes:
        return self.repo.files[self.file]

    def asked(self) -> list[tuple[int, int]]:
        """Ranges that were asked for, without the beginnings that are read for a header."""
        found = [one.removeprefix("bytes=").split("-") for one in self.hub.ranges(self.file) if one]
        return [(int(start), int(end) + 1) for start, end in found if (start, end) not in HEADER_REQUESTS]


HEADER_REQUESTS = {("0", "100000"), ("0", "1048575")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = TinyGguf.of("llama", "llama", lambda *_: Kind.Q8_0)
    return made.write(tmp_path_factory.mktemp("tiny") / "Tiny-Q8_0.gguf")


@pytest.fixture(params=["safetensors", "gguf"])
def single(
    request: pytest.FixtureRequest, hub: FakeHub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Single:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(tensor_files, "MIN_SAVED_BYTES", 1000)
    monkeypatch.setattr(tensor_files, "GAP_BYTES", GAP)
    monkeypatch.setattr(range_download, "time", SimpleNamespace(sleep=lambda _: None))
    if request.param == "gguf":
        repo = hub.repos["org/Tiny-GGUF"] = Repo({tiny.name: tiny.read_bytes()})
        return Single("org/Tiny-GGUF:Q8_0", tiny.name, tiny, hub, repo)
    repo = hub.repos[MODEL] = Repo.of(TARGET)
    return Single(MODEL, "model.safetensors", TARGET, hub, repo)


def tensors_of(checkpoint: Checkpoint, span: Span) -> list[str]:
    return dissect(checkpoint.config).needed(checkpoint.weight_map, span)


def hub_of(checkpoint: Checkpoint) -> Hub:
    assert checkpoint.hub is not None
    return checkpoint.hub


def part_of(checkpoint: Checkpoint, single: Single) -> PartFile:
    part = hub_of(checkpoint).part_file(single.file)
    assert part is not None
    return part


def needed_by(checkpoint: Checkpoint, single: Single, span: Span) -> ByteRanges:
    return checkpoint.source.ranges(tensors_of(checkpoint, span))[single.file]


def assert_same(single: Single, checkpoint: Checkpoint, span: Span) -> None:
    ours = load_span(checkpoint, span, torch.float32)
    theirs = load_span(open_checkpoint(single.local), span, torch.float32)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def is_whole(checkpoint: Checkpoint, single: Single) -> bool:
    return (hub_of(checkpoint).folder / single.file).exists()


def test_only_the_bytes_of_a_span_are_asked_for_and_later_only_the_rest(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    needed = needed_by(checkpoint, single, SECOND)
    assert needed.size_bytes < 0.7 * len(single.content)
    planned = checkpoint.missing_bytes(tensors_of(checkpoint, SECOND))
    assert needed.size_bytes <= planned <= needed.size_bytes + GAP * len(needed.ranges)
    assert_same(single, checkpoint, SECOND)
    asked = ByteRanges.of(single.asked())
    assert asked.covers(needed)
    assert sum(end - start for start, end in single.asked()) == planned
    assert not is_whole(checkpoint, single)
    before = len(single.asked())
    again = open_checkpoint(single.name)
    assert again.missing_bytes(tensors_of(again, SECOND)) == 0
    assert_same(single, again, SECOND)
    assert len(single.asked()) == before, "what is here is asked for no more"
    both = Span(0, 2)
    rest = again.missing_bytes(tensors_of(again, both))
    assert_same(single, again, both)
    more = single.asked()[before:]
    assert sum(end - start for start, end in more) == rest
    assert not [one for one in more if not asked.without(ByteRanges.of([one])).covers(asked)], "nothing comes twice"


def test_the_file_on_disk_is_the_whole_ones_bytes_and_holes(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    checkpoint.fetch(tensors_of(checkpoint, SECOND))
    part = part_of(checkpoint, single)
    data, here = part.data.read_bytes(), part.here()
    assert len(data) == len(single.content)
    for start, end in here:
        assert data[start:end] == single.content[start:end]
    for start, end in ByteRanges.of([(0, len(data))]).without(here):
        assert not any(data[start:end])


def test_a_hole_is_never_read(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    checkpoint.fetch(tensors_of(checkpoint, SECOND))
    checkpoint.source.read(tensors_of(checkpoint, SECOND))
    with pytest.raises(UnsupportedModel, match=r"bytes from byte \d+ on are not here; start again to fetch them"):
        checkpoint.source.read(tensors_of(checkpoint, FIRST))
    part = part_of(checkpoint, single)
    listed = json.loads(part.data.with_suffix(".json").read_text())
    listed["here"] = [[start, end] if start == 0 else [start + 1, end] for start, end in listed["here"]]
    part.data.with_suffix(".json").write_text(json.dumps(listed))
    with pytest.raises(UnsupportedModel, match="are not here"):
        checkpoint.source.read(tensors_of(checkpoint, SECOND))


def test_its_identity_is_the_whole_files(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    source = WeightFiles.of(checkpoint.folder, checkpoint.hub, checkpoint.name)
    checkpoint.fetch(tensors_of(checkpoint, SECOND))
    manifest = find_manifest(source).manifest
    assert manifest is not None
    local = model_identity(open_checkpoint(single.local).folder, "other")
    assert model_identity(checkpoint.folder, checkpoint.name, manifest).fingerprint == local.fingerprint
    FileProof(source, manifest, "x")([single.file])
    other = find_manifest(WeightFiles.of(DRAFT, None, "draft")).manifest
    assert other is not None
    with pytest.raises(ModelMismatch, match="is not of x"):
        FileProof(source, other, "x")([single.file])


def test_without_the_hub_a_part_serves_and_lacks_what_it_lacks(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    checkpoint.fetch(tensors_of(checkpoint, SECOND))
    find_manifest(WeightFiles.of(checkpoint.folder, checkpoint.hub, checkpoint.name))
    single.hub.status = 503
    again = open_checkpoint(single.name)
    assert_same(single, again, SECOND)
    manifest = find_manifest(WeightFiles.of(again.folder, again.hub, again.name)).manifest
    assert manifest is not None
    FileProof(WeightFiles.of(again.folder, again.hub, again.name), manifest, "x")([single.file])
    with pytest.raises(HubError, match=f"{single.file}: .*is in trouble"):
        again.fetch(tensors_of(again, FIRST))


@one_format
def test_a_broken_answer_is_taken_up_where_it_broke(single: Single, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    checkpoint = open_checkpoint(single.name)
    needed = needed_by(checkpoint, single, SECOND)
    start, end = next(one for one in needed if one[1] - one[0] > 4000)
    single.repo.cut_after[single.file] = 3500
    hub_of(checkpoint).fetch_ranges(single.file, ByteRanges.of([(start, end)]))
    assert single.asked() == [(start, end), (start + 3000, end)]
    assert part_of(checkpoint, single).data.read_bytes()[start:end] == single.content[start:end]


@one_format
def test_short_answers_are_put_together(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    checkpoint.plan(tensors_of(checkpoint, SECOND))
    single.repo.range_bytes = 50_000
    assert_same(single, checkpoint, SECOND)
    assert len(single.asked()) >= needed_by(checkpoint, single, SECOND).size_bytes // 50_000 > 2


@one_format
def test_answers_without_a_byte_end_after_some_tries(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    tries: list[int] = []

    def broken(*_: object) -> None:
        tries.append(1)
        raise httpx.ReadError("gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_download.RangeDownload, "_check", broken)
        with pytest.raises(HubError, match="cannot be reached"):
            checkpoint.fetch(tensors_of(checkpoint, SECOND))
    assert len(tries) == range_download.TRIES
    assert_same(single, checkpoint, SECOND)


@one_format
@pytest.mark.parametrize("how", ["whole answers", "no version", "no TLS", "no holes"])
def test_else_the_file_is_fetched_whole_with_a_line(single: Single, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(single.name)
    said = {
        "whole answers": "the server sends whole files alone",
        "no version": "does not say which version",
        "no TLS": "not protected by TLS",
        "no holes": "",
    }[how]
    match how:
        case "whole answers":
            single.repo.sends_ranges = False
        case "no version":
            single.repo.says_version = False
            monkeypatch.setattr("tests.fake_hub._blob_id", lambda _: "")
        case "no TLS":
            monkeypatch.setattr(range_download, "_is_protected", lambda _: False)
        case _:
            monkeypatch.setattr(tensor_files, "keeps_holes", lambda: False)
    lines: list[str] = []
    checkpoint.fetch(tensors_of(checkpoint, SECOND), say=lines.append)
    assert is_whole(checkpoint, single)
    assert [line for line in lines if f"{single.file} is fetched whole" in line and said in line] or not said
    assert not part_of(checkpoint, single).data.exists()
    assert_same(single, checkpoint, SECOND)


def test_addresses_without_tls_are_told_from_others() -> None:
    url = httpx.URL
    plain = ["http://10.0.0.1/x", "http://mirror.example/x"]
    protected = ["https://mirror.example/x", "http://127.0.0.1:8/x", "http://[::1]/x", "http://localhost/x"]
    assert not any(range_download._is_protected(url(one)) for one in plain)
    assert all(range_download._is_protected(url(one)) for one in protected)


@one_format
@pytest.mark.parametrize("says_version", [True, False])
def test_a_file_that_changes_between_two_ranges_is_refused(single: Single, *, says_version: bool) -> None:
    checkpoint = open_checkpoint(single.name)
    single.repo.says_version = says_version
    middle = len(single.content) // 2
    single.repo.next_files[single.file] = single.content[:-1] + bytes([single.content[-1] ^ 1])
    with pytest.raises(HubError, match=f"{single.file}: the hub sends another file than it lists; run this again"):
        hub_of(checkpoint).fetch_ranges(single.file, ByteRanges.of([(0, 100), (middle, middle + 100)]))
    assert part_of(checkpoint, single).here() == ByteRanges.of([(0, 100)])


def test_a_file_of_another_size_is_refused(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    single.repo.says_version = False
    single.repo.files[single.file] += b"?"
    with pytest.raises(HubError, match="another file than it lists"):
        checkpoint.fetch(tensors_of(checkpoint, SECOND))


def test_a_file_that_is_here_in_full_is_proven_and_put_to_the_whole_ones(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    hub, half = hub_of(checkpoint), len(single.content) // 2
    hub.fetch_ranges(single.file, ByteRanges.of([(0, half)]))
    hub.fetch_ranges(single.file, ByteRanges.of([(0, len(single.content))]))
    assert single.asked() == [(0, half), (half, len(single.content))]
    assert (hub.folder / single.file).read_bytes() == single.content
    assert_same(single, checkpoint, Span(0, 2))
    assert not part_of(checkpoint, single).data.exists()


@one_format
@pytest.mark.parametrize("is_same_disk", [True, False])
def test_a_file_that_is_here_in_full_and_damaged_is_deleted(
    single: Single, *, is_same_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(single.name)
    hub, half = hub_of(checkpoint), len(single.content) // 2
    if not is_same_disk:
        monkeypatch.setattr("swarm.files.hub._linked", lambda *_: False)
    hub.fetch_ranges(single.file, ByteRanges.of([(0, half)]))
    with part_of(checkpoint, single).data.open("r+b") as data:
        data.write(b"?")
    with pytest.raises(HubError, match=f"{single.file} arrived damaged and was deleted"):
        hub.fetch_ranges(single.file, ByteRanges.of([(0, len(single.content))]))
    assert not part_of(checkpoint, single).is_here
    assert_same(single, checkpoint, SECOND)


@one_format
def test_a_part_on_another_disk_stays_when_it_is_full(single: Single, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.files.hub._linked", lambda *_: False)
    checkpoint = open_checkpoint(single.name)
    hub_of(checkpoint).fetch_ranges(single.file, ByteRanges.of([(0, len(single.content))]))
    assert not is_whole(checkpoint, single)
    assert_same(single, checkpoint, Span(0, 2))


def test_what_saves_little_is_fetched_whole(single: Single, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MIN_SAVED_BYTES", len(single.content))
    checkpoint = open_checkpoint(single.name)
    assert_same(single, checkpoint, SECOND)
    assert is_whole(checkpoint, single)


def test_what_is_here_serves_whatever_it_saves(single: Single, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(single.name)
    checkpoint.fetch(tensors_of(checkpoint, SECOND))
    monkeypatch.setattr(tensor_files, "MIN_SAVED_BYTES", 2 * len(single.content))
    assert_same(single, checkpoint, SECOND)
    assert not is_whole(checkpoint, single)


@one_format
def test_a_whole_file_takes_the_place_of_its_part(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    checkpoint.fetch(tensors_of(checkpoint, SECOND))
    assert part_of(checkpoint, single).data.exists()
    hub_of(checkpoint).fetch([single.file])
    before = len(single.hub.ranges(single.file))
    assert_same(single, checkpoint, FIRST)
    assert len(single.hub.ranges(single.file)) == before
    assert not part_of(checkpoint, single).data.exists()


def test_room_is_asked_for_what_is_fetched(single: Single, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(single.name)
    tensors = tensors_of(checkpoint, SECOND)
    needs = checkpoint.missing_bytes(tensors)
    assert needs < len(single.content)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needs))
    check_disk(checkpoint, SECOND, tensors)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needs - 1))
    with pytest.raises(NotEnoughSpace, match="of disk"):
        check_disk(checkpoint, SECOND, tensors)
    has = {True: 0, False: len(single.content)}
    monkeypatch.setattr(tensor_files, "free_disk", lambda folder: has[folder == parts_folder()])
    assert [one.ranges for one in checkpoint.plan(tensors)] == [None], "the other disk has room for the whole file"


@one_format
def test_a_full_disk_is_told(single: Single, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint = open_checkpoint(single.name)
    monkeypatch.setattr(range_download, "_write", full)
    with pytest.raises(NotEnoughSpace, match=r"the disk of .*own/canopy/parts is full; .* set XDG_CACHE_HOME"):
        checkpoint.fetch(tensors_of(checkpoint, SECOND))


def test_the_user_is_told_how_much_of_how_much(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    lines: list[str] = []
    fetch(checkpoint, dissect(checkpoint.config), SECOND, lines.append)
    assert [line for line in lines if line.startswith(f"of {single.file} only the bytes of these layers are fetched")]
    progress = [line for line in lines if line.startswith(f"fetching {single.file}: ")]
    assert 2 <= len(progress) <= 22
    lines.clear()
    fetch(checkpoint, dissect(checkpoint.config), SECOND, lines.append)
    assert not [line for line in lines if single.file in line]


@one_format
def test_two_that_want_one_file_fetch_each_byte_once(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    needs = checkpoint.missing_bytes(tensors_of(checkpoint, SECOND))
    names = tensors_of(checkpoint, SECOND)
    threads = [threading.Thread(target=open_checkpoint(single.name).fetch, args=(names,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(end - start for start, end in single.asked()) == needs
    assert_same(single, checkpoint, SECOND)


def test_a_borrowed_tensor_takes_no_whole_file(single: Single) -> None:
    name = "model.embed_tokens.weight"
    ours, theirs = read_tensors(single.name, [name]), read_tensors(single.local, [name])
    assert torch.equal(ours[name], theirs[name])
    assert sum(end - start for start, end in single.asked()) < 0.7 * len(single.content)


@one_format
@pytest.mark.parametrize("damage", [b"", b"{", b'{"version": 1, "size": 5, "here": [[0, 99]], "origins": []}'])
def test_a_list_that_cannot_be_read_means_that_nothing_is_here(single: Single, damage: bytes) -> None:
    checkpoint = open_checkpoint(single.name)
    checkpoint.fetch(tensors_of(checkpoint, SECOND))
    part_of(checkpoint, single).data.with_suffix(".json").write_bytes(damage)
    again = open_checkpoint(single.name)
    assert again.missing_bytes(tensors_of(again, SECOND)) > 0
    assert_same(single, again, SECOND)


@one_format
def test_a_list_without_its_file_means_that_nothing_is_here(single: Single) -> None:
    checkpoint = open_checkpoint(single.name)
    checkpoint.fetch(tensors_of(checkpoint, SECOND))
    part_of(checkpoint, single).data.unlink()
    assert_same(single, open_checkpoint(single.name), SECOND)


def test_a_killed_program_loses_one_piece_at_most(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a MiB in chunks of 64 KiB, the process killed while the answer stands still in the third piece."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    name, end, piece = "model.safetensors", (4 << 20) - 100, 1 << 20
    content = os.urandom(4 << 20)
    hub.repos[MODEL].files = {"config.json": b"{}", name: content}
    hub.repos[MODEL].stall_after[name] = 5 << 19
    code = (
        "from huggingface_hub import constants; from swarm.files.parts import range_download; "
        f"constants.DOWNLOAD_CHUNK_SIZE = {1 << 16}; range_download.PIECE_BYTES = {piece}; "
        "from swarm.files.hub import find_model; from swarm.files.parts.byte_ranges import ByteRanges; "
        f"find_model({MODEL!r})[1].fetch_ranges({name!r}, ByteRanges.of([(100, {end})]))"
    )
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": constants.HF_HUB_CACHE,
        "HF_HUB_OFFLINE": "0",
    }
    _, of_hub = find_model(MODEL)
    assert of_hub is not None
    part = of_hub.part_file(name)
    assert part is not None
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        assert hub.stalled.wait(30)
        while part.here().size_bytes < 2 * piece:
            assert process.poll() is None
        process.kill()
    hub.released.set()
    reached = 100 + 2 * piece
    assert part.here() == ByteRanges.of([(100, reached)])
    of_hub.fetch_ranges(name, ByteRanges.of([(100, end)]))
    assert hub.ranges(name) == [f"bytes=100-{end - 1}", f"bytes={reached}-{end - 1}"]
    assert part.data.read_bytes()[100:end] == content[100:end]


def test_a_disk_that_keeps_holes_is_told_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "holes"))
    assert part_file.keeps_holes()
    for status in (SimpleNamespace(st_blocks=part_file.PROBE_BYTES // part_file.BLOCK_BYTES), SimpleNamespace()):
        monkeypatch.setattr(part_file, "os", SimpleNamespace(fsync=os.fsync, fstat=lambda _, status=status: status))
        part_file._keeps_holes.cache_clear()
        assert not part_file.keeps_holes()
    part_file._keeps_holes.cache_clear()
