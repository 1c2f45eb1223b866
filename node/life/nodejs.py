"""One helpful line for those who meant Node.js and got Canopy's `node`. Runs nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

SCRIPTS = (".js", ".mjs", ".cjs", ".ts", ".mts", ".cts")
OPTIONS = ("-e", "--eval", "-p", "-pe", "--print", "-c", "--check", "-r", "--require", "--import", "--test", "--watch")
PREFIXES = ("--eval=", "--print=", "--require=", "--import=", "--inspect", "--input-type", "--max-old-space-size")


def explain(argv: Sequence[str], nodejs: str | None = None) -> str | None:
    """One line when the arguments were meant for Node.js, else None.

    `argv` is without the program's name; `nodejs` is where Node.js lies, when that is known. Only the first argument
    counts: after it, the same words may be meant for one of Canopy's commands.
    """
    if not argv:
        return None
    first = argv[0]
    if not (first in OPTIONS or first.startswith(PREFIXES) or first.lower().endswith(SCRIPTS)):
        return None
    advice = f"Node.js is {nodejs}" if nodejs else "there is no Node.js on PATH"
    return f"node: this is Canopy's node, not Node.js; Canopy's is also called swarm-node, {advice}"


def find_nodejs(own: Path, path: str | None = None) -> str | None:
    """The first `node` on `path` (None: the PATH variable) that does not lie in the folder of `own`, this program."""
    folders = (os.environ.get("PATH", "") if path is None else path).split(os.pathsep)
    others = [folder for folder in folders if folder and Path(folder).resolve() != own.parent.resolve()]
    return shutil.which("node", path=os.pathsep.join(others)) if others else None
