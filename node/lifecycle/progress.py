"""How a node that starts speaks on a terminal: lines, a bar while files come, a sign of life while layers load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

MAX_NAME = 40
"""Characters of a file's name that stand before the bar."""


class TerminalSay:
    """Takes lines, and draws what takes long; `with TerminalSay(console) as say:` ends what is drawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __call__(self, line: str) -> None:
        """Print a line, above what is drawn."""
        self._console.print(line)

    def fetching(self, file: str, here: int, total: int) -> None:
        """Draw how much of a download is here, in bytes; called from any thread, one at a time."""
        self._draw(f"fetching {file[-MAX_NAME:]}", here, total)

    def reading(self, file: str, read: int, total: int) -> None:
        """Draw how much was read of the weights, in bytes; called from any thread, one at a time."""
        self._draw(f"reading {file[-MAX_NAME:]} once", read, total)

    def _draw(self, what: str, here: int, total: int) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                auto_refresh=False,
            )
            self._task = self._bar.add_task(what, total=max(total, 1))
            self._bar.start()
        self._bar.update(self._task, completed=here, total=max(total, 1), description=what, refresh=True)
        if here >= total:
            self.close()

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that something goes on, for as long as it does."""
        self.close()
        with self._console.status(what):
            yield

    def close(self) -> None:
        """End what is drawn."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def __enter__(self) -> Self:
        """Nothing is drawn yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
