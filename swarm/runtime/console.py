"""Where a command prints: on a terminal tables fit it; in a pipe or a file every cell stays whole on its line."""

from __future__ import annotations

import sys
from typing import IO

from rich.console import Console

UNBOUNDED = 10_000
"""Columns where no terminal looks: more than any table of ours has. A table is no wider than its cells ask for."""


def make_console(
    file: IO[str] | None = None, *, stderr: bool = False, soft_wrap: bool = False, markup: bool = True
) -> Console:
    """A console that writes to `file`; to standard output or standard error if none is named.

    soft_wrap and markup are rich's. Numbers and names are not coloured.
    """
    stream = file if file is not None else sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNBOUNDED
    return Console(file=file, stderr=stderr, width=width, soft_wrap=soft_wrap, markup=markup, highlight=False)
