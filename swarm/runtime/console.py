"""Where a command prints: on a terminal tables fit it; in a pipe or a file every cell stays whole on its line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from swarm.runtime.plain_text import plain

UNBOUNDED = 10_000
"""Columns where no terminal looks: more than any table of ours has. A table is no wider than its cells ask for."""


class PlainConsole(Console):
    """A console on which text is only ever text: no control, no markup, no emoji code in it means anything."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich renders, with every text plain; colours and cursor movements are rich's own, and stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """A reader that went away is the program's to know: `swarm.runtime.program`."""
        raise


def make_console(file: IO[str] | None = None, *, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that writes to `file`; to standard output or standard error if none is named.

    soft_wrap is rich's. Numbers and names are not coloured.
    """
    stream = file if file is not None else sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNBOUNDED
    return PlainConsole(
        file=file, stderr=stderr, width=width, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False
    )
