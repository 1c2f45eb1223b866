"""One file from the hub into Hugging Face's cache: goes on where an earlier try ended, and is checked before it counts.

    blobs/DIGEST.incomplete ──▶ all bytes here, digest right ──▶ blobs/DIGEST ◀── snapshots/COMMIT/NAME, a link

huggingface_hub's own download starts an interrupted file afresh (huggingface_hub#4196); the places are the cache's own.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported where mypy does not look
    WeakFileLock,
    build_hf_headers,
    silent_tqdm,
)


class Damaged(Exception):
    """What arrived is not the file."""


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """Where a file of a snapshot goes; its digest (SHA-256 or git's blob id, empty if unknown) is its name there."""

    snapshot_path: Path
    digest: str
    size_bytes: int

    @property
    def blob(self) -> Path:
        """The file itself; equal files of several commits are one."""
        return self._cache / "blobs" / self.digest

    @property
    def partial(self) -> Path:
        """What there is of it while it is not complete."""
        return self.blob.with_name(f"{self.digest}.incomplete")

    @property
    def lock(self) -> Path:
        """Held by the one program that downloads it."""
        return self._cache.parent / ".locks" / self._cache.name / f"{self.digest}.lock"

    @property
    def _cache(self) -> Path:
        return self.snapshot_path.parents[2]

    def bytes_here(self) -> int:
        """How much of it needs no download."""
        here = next((path.stat().st_size for path in (self.blob, self.partial) if path.is_file()), 0)
        return min(here, self.size_bytes)


def download(url: str, place: SnapshotFile, told: Callable[[int], None] | None = None) -> None:
    """Bring a file to its place. A broken connection is tried again five times while nothing more arrives.

    Args:
        url: where it is; redirections are followed without the token.
        place: where it goes.
        told: called with how many bytes are here; None shows Hugging Face's bar on a terminal.

    Raises:
        Damaged: what arrived is not the file; it was deleted.
        OSError, httpx.HTTPError: it cannot be fetched or kept; what has arrived stays for the next time.
    """
    for path in (place.blob, place.snapshot_path, place.lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(place.lock):
        if not place.blob.exists():
            _complete(url, place, told)
            place.partial.replace(place.blob)
        _link(place)


def _complete(url: str, place: SnapshotFile, told: Callable[[int], None] | None) -> None:
    with _Bounded(place, told) as partial:
        here = partial.tell()
        if here < place.size_bytes:
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}  # a part of a compressed file is no part
            bar = None if told is None else silent_tqdm
            http_get(url, partial, resume_size=here, headers=headers, tqdm_class=bar)
    if _digest(place) != place.digest:
        place.partial.unlink()
        raise Damaged


class _Bounded(io.BufferedWriter):
    """The file so far, at its end; grows no further than it should."""

    def __init__(self, place: SnapshotFile, told: Callable[[int], None] | None) -> None:
        super().__init__(io.FileIO(place.partial, "ab"))
        self._size, self._told = place.size_bytes, told

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self._size:
            self.truncate(0)
            raise Damaged
        written = super().write(data)
        if self._told is not None:
            self._told(self.tell())
        return written


def _digest(place: SnapshotFile) -> str:
    git = hashlib.sha1(f"blob {place.size_bytes}\0".encode(), usedforsecurity=False)
    with place.partial.open("rb") as opened:
        return hashlib.file_digest(opened, hashlib.sha256 if len(place.digest) == 64 else lambda: git).hexdigest()


def _link(place: SnapshotFile) -> None:
    if place.snapshot_path.exists():
        return
    place.snapshot_path.unlink(missing_ok=True)
    try:
        place.snapshot_path.symlink_to(Path("..", "..", "blobs", place.digest))
    except OSError:  # no links on this file system: then the file lies in the snapshot itself, as in the cache's rules
        place.blob.replace(place.snapshot_path)
