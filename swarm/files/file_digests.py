"""SHA-256 of weight files on this machine. Each file is read once: what was found is kept in the user's cache.

A file of Hugging Face's cache is named by its digest, so it is not read at all. A kept digest holds for a path, size,
inode and both times of change: the time of modification can be set back by what copies files, the other one cannot.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from swarm.base.errors import UnknownModel
from swarm.base.files import cache_folder, replace_file
from swarm.protocol.manifest import SHA256

FILES_KEPT: Final = 4_096
"""Digests that are kept: those of the files that were read last."""
MAX_KEPT_BYTES: Final = 8 << 20
"""Of the file that keeps them."""
AT_ONCE: Final = 4
"""Files that are read at the same time, at most."""
BLOCK_BYTES: Final = 1 << 20

ReadProgress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes of all files that were read, and the bytes of all files."""
FileVersion = tuple[int, int, int, int]
"""Size, inode, and when contents and entry changed, in nanoseconds."""
KeptDigests = dict[str, tuple[FileVersion, str]]
"""By path; the last one was read last."""

logger = logging.getLogger(__name__)
_VERSION: Final = 1


def known_digests(files: Iterable[Path]) -> dict[Path, str]:
    """The digests of files' contents, as far as they are known without reading a file."""
    kept = _load()
    found = {file: _blob_digest(file) or _kept(kept, file) for file in files}
    return {file: digest for file, digest in found.items() if digest is not None}


def digest_files(files: Sequence[Path], report: ReadProgress | None = None) -> dict[Path, str]:
    """The digests of files' contents; those that are not known are read, several at once.

    Raises:
        UnknownModel: a file cannot be read, or changed meanwhile.
    """
    found = known_digests(files)
    unread = [file for file in dict.fromkeys(files) if file not in found]
    if unread:
        counter = _Counter(sum(_version_of(file)[0] for file in unread), report)
        with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1), thread_name_prefix="digest") as pool:
            for file, (digest, version) in zip(unread, pool.map(counter.digest, unread), strict=True):
                found[file] = digest
                _keep(str(file.resolve()), version, digest)  # now, since whoever waits for all may end the program
    return found


class _Counter:
    """Reads files and counts the bytes of all of them."""

    def __init__(self, total: int, report: ReadProgress | None) -> None:
        self._total, self._report = total, report
        self._read = 0
        self._lock = threading.Lock()

    def digest(self, file: Path) -> tuple[str, FileVersion]:
        version, digest, block = _version_of(file), hashlib.sha256(), bytearray(BLOCK_BYTES)
        try:
            with file.open("rb", buffering=0) as opened:
                while count := opened.readinto(block):
                    digest.update(memoryview(block)[:count])
                    self._note(file.name, count)
        except OSError as error:
            raise UnknownModel(f"{file}: {error.strerror or error}") from error
        if _version_of(file) != version:
            raise UnknownModel(f"{file}: changed while it was read; wait until it is complete, then run this again")
        return digest.hexdigest(), version

    def _note(self, name: str, count: int) -> None:
        with self._lock:
            self._read += count
            if self._report is not None:
                self._report(name, self._read, self._total)


def _blob_digest(file: Path) -> str | None:
    """The digest by which Hugging Face's cache names a file's contents; it keeps small ones by another digest."""
    blob = file.resolve()
    is_blob = blob.parent.name == "blobs" and blob.parent.parent.name.startswith("models--")
    return blob.name if is_blob and SHA256.fullmatch(blob.name) and blob.is_file() else None


def _version_of(file: Path) -> FileVersion:
    try:
        about = file.stat()
    except OSError as error:
        raise UnknownModel(f"{file}: {error.strerror or error}") from error
    return about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns


def _kept(kept: KeptDigests, file: Path) -> str | None:
    version, digest = kept.get(str(file.resolve()), (None, None))
    return digest if version is not None and version == _version_of(file) else None


def _path() -> Path:
    return cache_folder() / "digests.json"


def _load() -> KeptDigests:
    """What is kept; nothing where it cannot be read, for then the files are read again."""
    try:
        with _path().open("rb") as opened:
            content = json.loads(opened.read(MAX_KEPT_BYTES))
        if content["version"] != _VERSION:
            return {}
        return dict(_entry(path, *version_and_digest) for path, *version_and_digest in content["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _entry(path: str, *version_and_digest: int | str) -> tuple[str, tuple[FileVersion, str]]:
    size, inode, modified, changed, digest = version_and_digest
    if SHA256.fullmatch(str(digest)) is None:
        raise ValueError("no digest")
    return path, ((int(size), int(inode), int(modified), int(changed)), str(digest))


def _keep(file: str, version: FileVersion, digest: str) -> None:
    """Keep what was found; of two programs that write at once one may lose, and its files are read again."""
    kept = {path: entry for path, entry in _load().items() if path != file} | {file: (version, digest)}
    newest = [[path, *entry, digest] for path, (entry, digest) in kept.items()][-FILES_KEPT:]
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, json.dumps({"version": _VERSION, "files": newest}).encode())
    except OSError as error:
        logger.warning("digests of weight files are not kept in %s (%s)", path, error.strerror or error)
