"""Models from the hub, with huggingface_hub's own code against a small hub on loopback."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import swarm.files.hub
from client.base.target import load_target
from node.model.checkpoint import Checkpoint, check_disk, open_checkpoint
from node.model.loading import progress_lines, stored_sizes
from node.model.span import dissect, load_span
from swarm.base.errors import HubError, NotEnoughSpace, UnsupportedModel
from swarm.base.layers import Span
from swarm.compute.ragged_batch import load_whole
from swarm.demo import TARGET
from swarm.files.hub import find_model
from tests.fake_hub import COMMIT, MODEL, FakeHub, Repo
from tests.model.quantised_models import gptq, save_quantised
from tests.model.tiny_models import tiny_model

TOKEN = "hf_secretsecretsecret"
SMALL = {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"}
POISON = b"import os, pathlib\npathlib.Path(os.environ['CANOPY_POISON']).touch()\n"


def span_tensors(checkpoint: Checkpoint, span: Span) -> list[str]:
    layout = dissect(checkpoint.config)
    return layout.needed(checkpoint.weight_map, span)


def a_shard(checkpoint: Checkpoint) -> str:
    return checkpoint.files(span_tensors(checkpoint, Span(2, 4)))[0]


def blobs(tmp_path: Path) -> set[str]:
    return {path.suffix for path in (tmp_path / "cache").glob("*/blobs/*")}


def test_a_node_downloads_the_files_of_its_layers_and_no_other(
    hub: FakeHub, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.tokens.add(TOKEN)
    checkpoint = open_checkpoint(MODEL)
    assert hub.fetched() == SMALL
    assert checkpoint.hub is not None
    assert (checkpoint.name, checkpoint.hub.commit) == (MODEL, COMMIT)
    model = load_span(checkpoint, Span(2, 4), torch.float32)
    needed = set(checkpoint.files(span_tensors(checkpoint, Span(2, 4))))
    assert 0 < len(needed) < len(set(checkpoint.weight_map.values()))
    assert hub.fetched() == SMALL | needed
    local = load_span(open_checkpoint(whole), Span(2, 4), torch.float32)
    for mine, theirs in zip(model.model.parameters(), local.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert {request.token for request in hub.requests if request.server == "hub"} == {f"Bearer {TOKEN}"}
    assert {request.token for request in hub.requests if request.server == "files"} == {None}, (
        "the token stays with the hub"
    )


def test_what_is_here_is_asked_for_no_more(hub: FakeHub) -> None:
    checkpoint = open_checkpoint(MODEL)
    checkpoint.fetch(span_tensors(checkpoint, Span(2, 4)))
    hub.requests.clear()
    again = open_checkpoint(MODEL)
    again.fetch(span_tensors(again, Span(2, 4)))
    assert [request.path for request in hub.requests] == [f"/api/models/{MODEL}"]


def test_a_client_downloads_no_weights(hub: FakeHub) -> None:
    target = load_target(MODEL)
    assert (target.name, target.num_layers) == (MODEL, 6)
    assert hub.fetched() == SMALL
    assert {request.server for request in hub.requests} == {"hub"}


def test_a_draft_is_downloaded_whole(hub: FakeHub, whole: Path) -> None:
    hub.repos[MODEL].files["onnx.py"] = POISON
    draft = load_whole(MODEL, torch.float32)
    assert draft.span == Span(0, 6)
    assert hub.fetched() == SMALL | {path.name for path in whole.glob("*.safetensors")}


def test_of_a_single_file_only_the_header_is_read(hub: FakeHub) -> None:
    hub.repos[MODEL].files = Repo.of(TARGET).files
    checkpoint = open_checkpoint(MODEL)
    assert checkpoint.weight_map == open_checkpoint(TARGET).weight_map
    assert hub.ranges("model.safetensors") == ["bytes=0-100000"]
    load_span(checkpoint, Span(2, 4), torch.float32)
    assert hub.ranges("model.safetensors") == ["bytes=0-100000", None]


def test_sizes_of_a_quantised_model_come_from_few_headers(hub: FakeHub, tmp_path: Path) -> None:
    model = save_quantised(tiny_model("llama"), gptq(), tmp_path / "model")
    hub.repos[MODEL].files |= Repo.of(model.folder).files
    here, there = open_checkpoint(model.folder), open_checkpoint(MODEL)
    layout = dissect(there.config)
    assert stored_sizes(there, layout) == stored_sizes(here, layout)
    asked = {request.path for request in hub.requests if request.path.endswith(".safetensors")}
    assert all(hub.ranges(Path(path).name)[0] is not None for path in asked), "no file is read whole"
    assert len(stored_sizes(there, layout)) == 6
    hub.repos[MODEL].statuses |= dict.fromkeys((Path(path).name for path in asked), 500)
    assert stored_sizes(open_checkpoint(MODEL), layout) == {}, "they are not known, and nothing fails"


def test_a_hub_that_says_no_digests_serves_through_huggingface_hub(hub: FakeHub) -> None:
    hub.repos[MODEL].lists_digests = False
    checkpoint = open_checkpoint(MODEL)
    checkpoint.fetch(span_tensors(checkpoint, Span(2, 4)))
    assert "HEAD" in {request.method for request in hub.requests}


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
            if self.tell() + len(data) > 20_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    patch.setattr(swarm.files.hub, "io", SimpleNamespace(BufferedWriter=io.BufferedWriter, FileIO=Full))


def test_a_full_disk_is_told_and_what_arrived_is_kept_for_the_next_run(
    hub: FakeHub, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    checkpoint = open_checkpoint(MODEL)
    shard = a_shard(checkpoint)
    with monkeypatch.context() as patch:
        fill_disk(patch)
        with pytest.raises(NotEnoughSpace, match=f"^{MODEL}: {shard}: the disk of .*cache is full; free") as caught:
            checkpoint.fetch(span_tensors(checkpoint, Span(2, 4)))
    assert "\n" not in str(caught.value)
    assert checkpoint.hub is not None
    size = (whole / shard).stat().st_size
    left = size - checkpoint.hub.missing_bytes([shard])
    assert 0 < left <= 20_000
    assert ".incomplete" in blobs(tmp_path)
    checkpoint.fetch(span_tensors(checkpoint, Span(2, 4)))
    assert hub.ranges(shard) == [None, f"bytes={left}-"]
    assert (checkpoint.folder / shard).read_bytes() == (whole / shard).read_bytes()
    assert blobs(tmp_path) == {""}


def test_a_broken_connection_is_taken_up_where_it_broke(
    hub: FakeHub, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    checkpoint = open_checkpoint(MODEL)
    shard = a_shard(checkpoint)
    hub.repos[MODEL].cut_after[shard] = 3500
    checkpoint.fetch(span_tensors(checkpoint, Span(2, 4)))
    assert hub.ranges(shard) == [None, "bytes=3000-"]
    assert (checkpoint.folder / shard).read_bytes() == (whole / shard).read_bytes()


def test_a_file_server_that_is_gone_is_told(hub: FakeHub) -> None:
    checkpoint = open_checkpoint(MODEL)
    hub.files_url = "http://127.0.0.1:1"
    shard = a_shard(checkpoint)
    with pytest.raises(HubError, match=rf"^{MODEL}: {shard}: 127\.0\.0\.1 cannot be reached \(.*refused.*\); check"):
        checkpoint.fetch(span_tensors(checkpoint, Span(2, 4)))


def test_a_file_that_arrives_damaged_is_deleted_and_fetched_again(hub: FakeHub) -> None:
    checkpoint = open_checkpoint(MODEL)
    shard = a_shard(checkpoint)
    good = hub.repos[MODEL].files[shard]
    for bad in (good[:-1] + b"?", good + b"?", good[:-1]):
        hub.repos[MODEL].files[shard] = bad
        with pytest.raises(HubError, match=f"^{MODEL}: {shard} arrived damaged and was deleted; run this again$"):
            checkpoint.fetch(span_tensors(checkpoint, Span(2, 4)))
    hub.repos[MODEL].files[shard] = good
    checkpoint.fetch(span_tensors(checkpoint, Span(2, 4)))
    assert (checkpoint.folder / shard).read_bytes() == good
    assert hub.ranges(shard) == [None] * 4


def test_a_hub_that_sends_without_end_does_not_fill_the_disk(hub: FakeHub) -> None:
    checkpoint = open_checkpoint(MODEL)
    shard = a_shard(checkpoint)
    hub.repos[MODEL].files[shard] += b"?" * 100_000
    here: list[int] = []
    with pytest.raises(HubError, match="arrived damaged"):
        checkpoint.fetch(
            span_tensors(checkpoint, Span(2, 4)), lambda _file, bytes_here, _total: here.append(bytes_here)
        )
    assert not here


def test_a_killed_download_goes_on_in_the_next_process(hub: FakeHub, tmp_path: Path) -> None:
    """Three of huggingface_hub's chunks of 10 MiB, the process killed within the third."""
    save_file({"filler": torch.arange(6 << 20, dtype=torch.int32)}, tmp_path / "model.safetensors")
    files = hub.repos[MODEL].files = {
        "config.json": b"{}",
        "model.safetensors": (tmp_path / "model.safetensors").read_bytes(),
    }
    hub.repos[MODEL].stall_after["model.safetensors"] = 21 << 20
    fetch = f"from swarm.files.hub import find_model; find_model({MODEL!r})[1].fetch(['model.safetensors'])"
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": constants.HF_HUB_CACHE,
        "HF_HUB_OFFLINE": "0",
    }
    with subprocess.Popen([sys.executable, "-c", fetch], env=environment) as process:
        assert hub.stalled.wait(30)
        partial = tmp_path / "cache" / "models--org--tiny" / "blobs"
        while not any(path.stat().st_size >= 20 << 20 for path in partial.glob("*.incomplete")):
            assert process.poll() is None
        process.kill()
    hub.released.set()
    folder, here = find_model(MODEL)
    assert here is not None
    here.fetch(["model.safetensors"])
    first, second = hub.ranges("model.safetensors")
    assert first is None
    assert second is not None
    assert int(second.removeprefix("bytes=").removesuffix("-")) >= 20 << 20
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_two_that_want_one_file_download_it_once(hub: FakeHub) -> None:
    checkpoint = open_checkpoint(MODEL)
    tensors = span_tensors(checkpoint, Span(2, 4))
    threads = [threading.Thread(target=checkpoint.fetch, args=(tensors,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(hub.ranges(file)) for file in checkpoint.files(tensors)] == [1] * len(checkpoint.files(tensors))


def test_too_little_disk_counts_only_what_is_not_here(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(MODEL)
    tensors = span_tensors(checkpoint, Span(2, 4))
    needs = checkpoint.missing_bytes(tensors)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needs - 1))
    with pytest.raises(NotEnoughSpace, match=r"layers 2…3 need .* of disk"):
        check_disk(checkpoint, Span(2, 4), tensors)
    assert checkpoint.hub is not None
    checkpoint.hub.fetch([a_shard(checkpoint)])
    check_disk(checkpoint, Span(2, 4), tensors)


def test_a_download_is_told_in_lines(hub: FakeHub) -> None:
    checkpoint = open_checkpoint(MODEL)
    lines: list[str] = []
    checkpoint.fetch(checkpoint.weight_map, progress_lines(lines.append))
    files = checkpoint.files(checkpoint.weight_map)
    assert [file for file in files if any(file in line for line in lines)] == files
    assert len(files) <= len(lines) <= len(files) + 21


def with_code(files: dict[str, bytes], name: str, model_type: str) -> None:
    content = json.loads(files[name])
    content |= {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]},
    }
    files |= {name: json.dumps(content).encode(), "own.py": POISON}


@pytest.fixture
def no_code(hub: FakeHub, tmp_path: Path) -> Iterator[None]:
    yield
    assert "own.py" not in {Path(request.path).name for request in hub.requests}
    assert not list(tmp_path.rglob("own.py"))
    assert "own" not in sys.modules


LOADS = [open_checkpoint, load_target, lambda name: load_whole(name, torch.float32)]


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("load", LOADS, ids=["node", "target", "draft"])
def test_a_model_that_needs_its_own_code_is_refused(load: Callable[[str], object], hub: FakeHub) -> None:
    with_code(hub.repos[MODEL].files, "config.json", "own")
    with pytest.raises(
        UnsupportedModel, match=rf"^{MODEL}: needs code that comes with it \(config\.json\), .* never run"
    ):
        load(MODEL)


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("load", LOADS, ids=["node", "target", "draft"])
def test_code_beside_a_model_that_transformers_knows_is_left_alone(load: Callable[[str], object], hub: FakeHub) -> None:
    with_code(hub.repos[MODEL].files, "config.json", "llama")
    load(MODEL)


@pytest.mark.parametrize("load", LOADS, ids=["node", "target", "draft"])
@pytest.mark.parametrize("model_type", ["own", "llama"])
def test_code_in_a_folder_is_not_run_either(
    model_type: str, load: Callable[[Path], object], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = copied.with_name("ran")
    monkeypatch.setenv("CANOPY_POISON", str(marker))
    files = {"config.json": (copied / "config.json").read_bytes()}
    with_code(files, "config.json", model_type)
    for name, content in files.items():
        (copied / name).write_bytes(content)
    if model_type == "own":
        with pytest.raises(UnsupportedModel, match="never run"):
            load(copied)
    else:
        load(copied)
    assert not marker.exists()


@pytest.mark.usefixtures("no_code")
def test_a_tokenizer_that_needs_its_own_code_is_refused(hub: FakeHub) -> None:
    files = hub.repos[MODEL].files
    files["tokenizer_config.json"] = b'{"tokenizer_class": "Own"}'
    with_code(files, "tokenizer_config.json", "own")
    with pytest.raises(UnsupportedModel, match=rf"^{MODEL}: needs code that comes with it \(tokenizer_config\.json\)"):
        load_target(MODEL)


def test_a_truncated_weight_file_is_named(copied: Path) -> None:
    shard = copied / a_shard(open_checkpoint(copied))
    os.truncate(shard, shard.stat().st_size - 1)
    line = rf"{shard.name} cannot be read \(.*\); delete it and fetch it again"
    with pytest.raises(UnsupportedModel, match=line):
        load_span(open_checkpoint(copied), Span(2, 4), torch.float32)
    with pytest.raises(UnsupportedModel, match=r"cannot be read \(.*\); delete it and fetch it again"):
        load_whole(copied, torch.float32)
