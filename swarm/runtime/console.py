"""The console of every command: on a terminal tables fit it; in a pipe or a file every cell stays whole on its line."""

from __future__ import annotations

import sys
from typing import IO

from rich.console import Console

UNBOUNDED = 10_000
"""Columns where no terminal looks: more than any table of ours has. A table is no wider than its cells ask for."""


def open_console(file: IO[str] | None = None, *, soft_wrap: bool = False, markup: bool = True) -> Console:
    """A console that writes to `file`, which is standard output if none is named.

    soft_wrap and markup are rich's. Numbers and names are not coloured.
    """
    out = sys.stdout if file is None else file
    width = None if out.isatty() else UNBOUNDED
    return Console(file=file, width=width, soft_wrap=soft_wrap, markup=markup, highlight=False)
