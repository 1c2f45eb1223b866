"""Weight files are read once, and again when anything about them changed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

import swarm.files.file_digests
from swarm.base.errors import UnknownModel
from swarm.files.file_digests import digest_files, known_digests

CONTENT = b"weights" * 1_000


class Reads:
    """Counts the files that are read."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.progress: list[tuple[int, int]] = []

    def __call__(self, name: str, read: int, total: int) -> None:
        self.names.append(name)
        self.progress.append((read, total))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/canopy/digests.json"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(CONTENT)
    return tmp_path / "a.safetensors"


def known_digest(file: Path) -> str | None:
    return known_digests([file]).get(file)


def digest(file: Path, reads: Reads) -> str:
    return digest_files([file], reads)[file]


def test_a_file_is_read_once_by_all_programs(file: Path) -> None:
    reads = Reads()
    assert known_digest(file) is None
    assert digest(file, reads) == hashlib.sha256(CONTENT).hexdigest()
    assert reads.progress[-1] == (len(CONTENT), len(CONTENT))
    again = Reads()
    assert digest(file, again) == known_digest(file) == hashlib.sha256(CONTENT).hexdigest()
    assert again.names == []


def test_a_change_is_noticed_even_where_size_and_time_stay(file: Path) -> None:
    before = file.stat()
    digest(file, Reads())
    while (after := file.stat()).st_ctime_ns == before.st_ctime_ns:  # clocks of file systems tick in milliseconds
        with file.open("r+b") as opened:
            opened.write(b"W")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert known_digest(file) is None
    assert digest(file, Reads()) == hashlib.sha256(b"W" + CONTENT[1:]).hexdigest()


def test_another_file_in_its_place_is_another(file: Path, tmp_path: Path) -> None:
    digest(file, Reads())
    (tmp_path / "new").write_bytes(CONTENT[::-1])
    (tmp_path / "new").replace(file)
    assert digest(file, Reads()) == hashlib.sha256(CONTENT[::-1]).hexdigest()


def test_several_are_read_and_only_those_that_are_not_known(file: Path, tmp_path: Path) -> None:
    digest(file, Reads())
    others = [tmp_path / f"{number}.safetensors" for number in range(6)]
    for number, other in enumerate(others):
        other.write_bytes(bytes([number]) * 1_000)
    reads = Reads()
    found = digest_files([file, *others], reads)
    assert [found[other] for other in others] == [hashlib.sha256(bytes([n]) * 1_000).hexdigest() for n in range(6)]
    assert sorted(set(reads.names)) == sorted(other.name for other in others)


def test_a_blob_of_the_hubs_cache_is_known_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--tiny"
    (folder / "blobs").mkdir(parents=True)
    (folder / "snapshots/c0ffee").mkdir(parents=True)
    named = {}
    for name in ("ab" * 32, "ab" * 20, "cd" * 32 + ".incomplete"):
        (folder / "blobs" / name).write_bytes(CONTENT)
        link = folder / f"snapshots/c0ffee/{len(name)}.safetensors"
        link.symlink_to(Path("..", "..", "blobs", name))
        named[name] = link
    reads = Reads()
    assert digest(named["ab" * 32], reads) == "ab" * 32
    assert reads.names == []
    for name in ("ab" * 20, "cd" * 32 + ".incomplete"):
        assert digest(named[name], reads) == hashlib.sha256(CONTENT).hexdigest()
    (folder / "blobs" / ("ab" * 32)).rename(tmp_path / ("ab" * 32))
    named["ab" * 32].unlink()
    named["ab" * 32].symlink_to(tmp_path / ("ab" * 32))
    assert digest(named["ab" * 32], reads) == hashlib.sha256(CONTENT).hexdigest(), "anybody may name a file so"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"version": 2, "files": []}', b'{"version": 1, "files": [["a"]]}', b"[" * 100_000]
)
def test_what_was_kept_and_cannot_be_read_is_found_out_again(file: Path, cache: Path, content: bytes) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert digest(file, Reads()) == hashlib.sha256(CONTENT).hexdigest()
    assert known_digest(file) is not None


def test_a_cache_that_cannot_be_written_costs_time_alone(
    file: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_bytes(b"a file, where a folder should be")
    assert digest(file, Reads()) == hashlib.sha256(CONTENT).hexdigest()
    assert "are not kept" in caplog.text


def test_the_digests_that_are_kept_are_bounded(
    file: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm.files.file_digests, "FILES_KEPT", 2)
    (tmp_path / "b").write_bytes(b"b")
    (tmp_path / "c").write_bytes(b"c")
    digest_files([file, tmp_path / "b"])
    digest_files([tmp_path / "c"])
    assert [Path(entry[0]).name for entry in json.loads(cache.read_bytes())["files"]] == ["b", "c"]


def test_a_file_that_changes_while_it_is_read_is_refused(file: Path) -> None:
    def grow(name: str, read: int, total: int) -> None:
        with file.open("ab") as opened:
            opened.write(b"more")

    with pytest.raises(UnknownModel, match=r"a\.safetensors: changed while it was read"):
        digest_files([file], lambda *args: None if file.stat().st_size > len(CONTENT) else grow(*args))
    with pytest.raises(UnknownModel, match="No such file"):
        digest_files([file.with_name("gone")])
