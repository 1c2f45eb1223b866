"""Which commit this source is: as a build noted it, or as the git checkout around it says. Standard library alone.

`setup.py` runs this file, so it imports nothing of Canopy's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

NOTE: Final = "commit.txt"
"""Beside this file in whatever was built of a checkout."""
_HERE: Final = Path(__file__).parent
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")


def source_commit(here: Path = _HERE) -> str | None:
    """The commit's hash; None where nothing tells.

    Args:
        here: the folder of this file, two below the checkout's.
    """
    try:
        note = here / NOTE
        found = note.read_text(encoding="ascii") if note.exists() else _checked_out(here.parents[1])
    except (OSError, ValueError):
        return None
    return found.strip() if _COMMIT.fullmatch(found.strip()) else None


def _checked_out(root: Path) -> str:
    """What a checkout's HEAD means, without the program git: a worktree's `.git` is a file that names its folder."""
    git = root / ".git"
    if git.is_file():
        git = root / git.read_text(encoding="utf-8").partition(":")[2].strip()
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git / "commondir"
    shared = git / common.read_text(encoding="utf-8").strip() if common.exists() else git
    for folder in (git, shared):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="ascii")
    packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
