"""A scrolling list of lines, of which only those in sight are made: a thousand machines cost what a screenful does."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip


class Lines(ScrollView, can_focus=True):
    """`show(count, line)` replaces what is shown and keeps the place; `line(number)` makes one."""

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self._count = 0
        self._line: Callable[[int], Text] = lambda _: Text()

    def show(self, count: int, line: Callable[[int], Text]) -> None:
        """Show so many lines from now on."""
        self._count, self._line = count, line
        self.virtual_size = Size(self.scrollable_content_region.width, count)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line of what is in sight."""
        number = y + self.scroll_offset.y
        width = self.size.width
        if not 0 <= number < self._count:
            return Strip.blank(width, self.rich_style)
        text = self._line(number)
        text.truncate(width, overflow="ellipsis")
        segments = [segment for segment in text.render(self.app.console) if segment.text]
        return Strip(segments, text.cell_len).apply_style(self.rich_style).adjust_cell_length(width, self.rich_style)
