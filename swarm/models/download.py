"""One file from the hub into Hugging Face's cache: resumes an interrupted download and checks the digest.

    blobs/DIGEST.incomplete ──▶ all bytes here, digest right ──▶ blobs/DIGEST ◀── snapshots/COMMIT/NAME, a link

huggingface_hub's own download starts an interrupted file from 0 (huggingface_hub#4196). The paths are the cache's.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported where mypy does not look
    WeakFileLock,
    build_hf_headers,
    silent_tqdm,
)


class DamagedFile(Exception):
    """The bytes that arrived are not those of the file."""


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """Where a file of a snapshot goes.

    Attributes:
        snapshot_path: the file's path in the snapshot of its commit.
        digest: SHA-256 or git's blob id, and the file's name among the blobs; empty if unknown.
        size_bytes: of the whole file.
    """

    snapshot_path: Path
    digest: str
    size_bytes: int

    @property
    def blob(self) -> Path:
        """The file's contents; equal files of several commits share one blob."""
        return self._cache / "blobs" / self.digest

    @property
    def partial(self) -> Path:
        """The part that has arrived, while it is not complete."""
        return self.blob.with_name(f"{self.digest}.incomplete")

    @property
    def lock(self) -> Path:
        """Lock file of the one program that downloads it."""
        return self._cache.parent / ".locks" / self._cache.name / f"{self.digest}.lock"

    @property
    def _cache(self) -> Path:
        return next(path.parent for path in self.snapshot_path.parents if path.name == "snapshots")

    def bytes_here(self) -> int:
        """How many bytes of it need no download."""
        here = next((path.stat().st_size for path in (self.blob, self.partial) if path.is_file()), 0)
        return min(here, self.size_bytes)


def download(url: str, target: SnapshotFile, report: Callable[[int], None] | None = None) -> None:
    """Download a file into the cache. A broken connection is tried again five times while nothing more arrives.

    Args:
        url: where it is; redirections are followed without the token.
        target: where it goes.
        report: called with how many bytes are here; None shows Hugging Face's bar on a terminal.

    Raises:
        DamagedFile: what arrived is not the file; it was deleted.
        OSError, httpx.HTTPError: it cannot be fetched or stored; what has arrived stays for the next time.
    """
    for path in (target.blob, target.snapshot_path, target.lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(target.lock):
        if not target.blob.exists():
            _complete(url, target, report)
            target.partial.replace(target.blob)
        _link(target)


def _complete(url: str, target: SnapshotFile, report: Callable[[int], None] | None) -> None:
    with _BoundedFile(target, report) as partial:
        here = partial.tell()
        if here < target.size_bytes:
            # Compressed on the way, a file could not be resumed at a byte of its own.
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            bar = None if report is None else silent_tqdm
            http_get(url, partial, resume_size=here, headers=headers, tqdm_class=bar)
    if _digest(target) != target.digest:
        target.partial.unlink()
        raise DamagedFile


class _BoundedFile(io.BufferedWriter):
    """The partial file, opened at its end; refuses to grow beyond the file's size."""

    def __init__(self, target: SnapshotFile, report: Callable[[int], None] | None) -> None:
        super().__init__(io.FileIO(target.partial, "ab"))
        self._size, self._report = target.size_bytes, report

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self._size:
            self.truncate(0)
            raise DamagedFile
        written = super().write(data)
        if self._report is not None:
            self._report(self.tell())
        return written


def _digest(target: SnapshotFile) -> str:
    git = hashlib.sha1(f"blob {target.size_bytes}\0".encode(), usedforsecurity=False)
    with target.partial.open("rb") as opened:
        return hashlib.file_digest(opened, hashlib.sha256 if len(target.digest) == 64 else lambda: git).hexdigest()


def _link(target: SnapshotFile) -> None:
    if target.snapshot_path.exists():
        return
    target.snapshot_path.unlink(missing_ok=True)
    try:
        target.snapshot_path.symlink_to(os.path.relpath(target.blob, target.snapshot_path.parent))
    except OSError:  # a file system without links: the cache's rules put the file into the snapshot itself
        target.blob.replace(target.snapshot_path)
