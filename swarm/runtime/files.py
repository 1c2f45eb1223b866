"""Files that appear whole or not at all, and that a crash or a second writer never leaves half written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

OWNER_ONLY: Final = 0o600


def replace_file(
    path: Path, data: bytes | Callable[[Path], None], *, mode: int = OWNER_ONLY, is_durable: bool = False
) -> None:
    """Write a file beside the old one, then put it in its place: a reader sees the old content or the new one.

    Args:
        path: the file; its folder exists.
        data: the new content, or what writes it to the path that it is given.
        mode: permissions of the new file.
        is_durable: whether it is on disk before it takes the old one's place, so that a power cut leaves either.

    Raises:
        OSError: it cannot be written; the old file is as it was, and nothing else is left.
    """
    draft = _draft(path)
    try:
        if isinstance(data, bytes):
            draft.write_bytes(data)
        else:
            data(draft)
        draft.chmod(mode)
        if is_durable:
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def create_file(path: Path, data: bytes, *, mode: int = OWNER_ONLY) -> None:
    """Write a file that must not be there yet; it appears whole.

    Raises:
        FileExistsError: it is there; it is as it was.
        OSError: it cannot be written.
    """
    draft = _draft(path)
    try:
        draft.write_bytes(data)
        draft.chmod(mode)
        path.hardlink_to(draft)  # atomic, and fails where the file exists
    finally:
        draft.unlink(missing_ok=True)


def _draft(path: Path) -> Path:
    """A new file of the owner's alone in the same folder, which nobody can have made a link before."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    return Path(name)
