"""Part of a weight file in the user's cache: a file of the whole one's size with holes, and a list of what is in it.

    parts/SHA256         the bytes that are here, where the whole file has them
    parts/SHA256.json    which these are, and which files of the hub it is
    parts/SHA256.lock    of the one program that fetches more

The list is written after the bytes are on disk, so it never names one that is not there. No hole is ever read: whoever
reads asks first.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, Self

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # exported where mypy does not look

from swarm.base.errors import UnsupportedModel
from swarm.base.files import cache_folder, replace_file, strict_json
from swarm.files.parts.byte_ranges import ByteRange, ByteRanges
from swarm.protocol.manifest import SHA256

MAX_LIST_BYTES: Final = 4 << 20
"""Of the list of what is here."""
MAX_ORIGINS: Final = 32
"""Names on the hub that are kept of one file: the last ones."""
MAX_PARTS: Final = 256
"""Lists that are looked through where the hub does not answer."""
PROBE_BYTES: Final = 4 << 20
"""Size of a file that shows whether a folder keeps holes."""
BLOCK_BYTES: Final = 512
"""Unit of `st_blocks`."""
_VERSION: Final = 1

HubOrigin = tuple[str, str, str]
"""Hub id, commit and a file's name there."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """Part of one file.

    Attributes:
        digest: SHA-256 of the whole file.
    """

    digest: str
    size_bytes: int

    @classmethod
    def named(cls, origin: HubOrigin) -> Self | None:
        """The file that a name on the hub stood for when some of it was fetched; None where nothing was."""
        found = ((file, one) for file, one in _lists() if origin in one.origins)
        return next((cls(file.stem, one.size_bytes) for file, one in found), None)

    @property
    def data(self) -> Path:
        """The file with holes."""
        return parts_folder() / self.digest

    @property
    def is_here(self) -> bool:
        return bool(self.here().ranges)

    @contextmanager
    def locked(self, timeout_s: float | None = None) -> Iterator[None]:
        """Wait until no other program fetches more of it, and keep others from that.

        Raises:
            OSError: the cache cannot be written, or the time is over.
        """
        parts_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        with WeakFileLock(self.data.with_suffix(".lock"), timeout=timeout_s):
            yield

    def here(self) -> ByteRanges:
        found = _read(self._list)
        try:
            sizes = {self.data.stat().st_size, self.size_bytes}
        except OSError:
            return ByteRanges()
        return found.here if found is not None and sizes == {found.size_bytes} else ByteRanges()

    def check(self, needed: ByteRanges, model: str) -> None:
        """Refuse to have bytes read that are not here.

        Raises:
            UnsupportedModel: some of these are not.
        """
        lacking = needed.without(self.here())
        if lacking.ranges:
            what = f"{lacking.size_bytes} bytes from byte {lacking.ranges[0][0]} on are not here"
            raise UnsupportedModel(f"{model}: {self.data}: {what}; start again to fetch them")

    def prepare(self, origin: HubOrigin) -> None:
        """Make room for its bytes, without taking any; what is here of another size goes.

        Raises:
            OSError: the cache cannot be written.
        """
        if not self.here().ranges:
            self._list.unlink(missing_ok=True)  # first: a list never outlives its bytes
            self.data.unlink(missing_ok=True)
            with self.data.open("xb") as opened:
                opened.truncate(self.size_bytes)
            self.data.chmod(0o600)
        found = _read(self._list) or _Listed(self.size_bytes)
        if origin not in found.origins:
            self._write(replace(found, origins=(*found.origins, origin)[-MAX_ORIGINS:]))

    def note(self, ranges: Iterable[ByteRange]) -> None:
        """Add bytes that were written to the disk.

        Raises:
            OSError: the list cannot be written.
        """
        found = _read(self._list) or _Listed(self.size_bytes)
        self._write(replace(found, here=found.here.with_ranges(ranges)))

    def is_right(self) -> bool:
        """Whether a file that is here in full has the contents that its name says; reads all of it."""
        with self.data.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == self.digest

    @property
    def disk_bytes(self) -> int:
        """What it takes on the disk, its list apart; on a system that does not say so, its size."""
        try:
            found = self.data.stat()
        except OSError:
            return 0
        blocks: int | None = getattr(found, "st_blocks", None)
        return found.st_size if blocks is None else blocks * BLOCK_BYTES

    def forget(self) -> None:
        """Remove what is here; what another program has open goes when it is closed, or stays."""
        for path in (self._list, self.data):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                return

    @property
    def _list(self) -> Path:
        return self.data.with_suffix(".json")

    def _write(self, listed: _Listed) -> None:
        content = {
            "version": _VERSION,
            "size": listed.size_bytes,
            "here": listed.here.ranges,
            "origins": listed.origins,
        }
        replace_file(self._list, json.dumps(content).encode(), is_durable=True)


@dataclass(frozen=True, slots=True)
class _Listed:
    size_bytes: int
    here: ByteRanges = field(default_factory=ByteRanges)
    origins: tuple[HubOrigin, ...] = ()


def parts_folder() -> Path:
    """Where parts of files are kept; it may not be there."""
    return cache_folder() / "parts"


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A part that lies here.

    Attributes:
        origins: what the file is called on the hub, the name last used last; none where its list cannot be read.
        fetched_at: Unix seconds at which its list, or without one its bytes, changed last.
    """

    file: PartFile
    origins: tuple[HubOrigin, ...]
    fetched_at: float


def kept_parts() -> list[KeptPart]:
    """All parts that lie here, those first that changed last."""
    found = []
    for data in parts_folder().glob("*"):
        if SHA256.fullmatch(data.name):
            listed = _read(data.with_suffix(".json")) or _Listed(0)
            changed = _written(data.with_suffix(".json")) or _written(data)
            found.append(KeptPart(PartFile(data.name, listed.size_bytes), listed.origins, changed))
    return sorted(found, key=lambda part: part.fetched_at, reverse=True)


def part_names(repo: str, commit: str) -> set[str]:
    """The files of a commit of which parts are here."""
    return {name for _, one in _lists() for other, at, name in one.origins if (other, at) == (repo, commit)}


def keeps_holes() -> bool:
    """Whether the disk of the cache keeps files with holes in less than their size.

    Where the system does not say what a file takes, as on Windows, it counts as one that does not.
    """
    folder = parts_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _keeps_holes(folder)
    except OSError:
        return False


@lru_cache(8)
def _keeps_holes(folder: Path) -> bool:
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.truncate(PROBE_BYTES)
        probe.seek(PROBE_BYTES - 1)
        probe.write(b"\1")
        probe.flush()
        os.fsync(probe.fileno())
        blocks: int | None = getattr(os.fstat(probe.fileno()), "st_blocks", None)
    return blocks is not None and blocks * BLOCK_BYTES < PROBE_BYTES // 2


def _lists() -> list[tuple[Path, _Listed]]:
    """What the lists say, those first that were written last."""
    files = sorted(parts_folder().glob("*.json"), key=_written, reverse=True)[:MAX_PARTS]
    found = ((file, _read(file)) for file in files if SHA256.fullmatch(file.stem))
    return [(file, one) for file, one in found if one is not None]


def _read(file: Path) -> _Listed | None:
    """What a list says; None where there is none that can be read."""
    try:
        with file.open("rb") as opened:
            content = strict_json(opened.read(MAX_LIST_BYTES))
        if content["version"] != _VERSION:
            return None
        size = int(content["size"])
        here = ByteRanges.of((int(start), int(end)) for start, end in content["here"])
        origins = tuple((str(repo), str(commit), str(name)) for repo, commit, name in content["origins"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if here.ranges and here.ranges[-1][1] > size else _Listed(size, here, origins)


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
