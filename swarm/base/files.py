"""Files that appear whole or not at all, the folders of a user's programs, and JSON from files that may be damaged."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final


def state_folder() -> Path:
    """`canopy` in the user's state folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "canopy"


def cache_folder() -> Path:
    """`canopy` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "canopy"


def strict_json(text: str | bytes) -> Any:  # noqa: ANN401  (JSON values)
    """The value; every number in it is finite.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or has a number that is too large or none at all.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is too large")
    return value


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


def why_unusable(error: OSError, path: Path | None = None) -> str:
    """Why a file cannot be used, and the command that mends it where the user may run one.

    Args:
        path: the file, where the error does not name it.
    """
    if path is None and error.filename is not None:
        path = Path(os.fsdecode(error.filename))
    said = error.strerror or str(error)
    if path is None:
        return said
    foreign = foreign_part(path) if isinstance(error, PermissionError) else None
    mend = "" if foreign is None else f'; {foreign} is another user\'s: sudo chown -R "$USER" {foreign}'
    return f"{path}: {said}{mend}"


def foreign_part(path: Path) -> Path | None:
    """The highest part of a path below the user's home folder that another user owns; None if all are the user's."""
    home = Path.home()
    for part in reversed((path, *path.parents)):
        try:
            if home in part.parents and part.stat().st_uid != os.geteuid():
                return part
        except OSError:
            return None  # not there, or inside a folder that is closed, which is the user's own
    return None


def _draft(path: Path) -> Path:
    """A new file of the owner's alone in the same folder, which nobody can have made a link before."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    return Path(name)
