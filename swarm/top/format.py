"""Numbers, times, layers and signs as text, in the page's words. Pure; unknown is an en dash."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from swarm.layers import Span, name_layers

UNKNOWN: Final = "–"


@dataclass(frozen=True, slots=True)
class Sign:
    """How a state is shown, with and without colour.

    Attributes:
        glyph: one character.
        style: a colour of the terminal's own palette.
        fill: what fills its bar on the map.
    """

    glyph: str
    style: str
    fill: str = "█"


NONE: Final = Sign("·", "", "·")
VERDICTS: Final[Mapping[str, Sign]] = {
    "serving": Sign("✓", "green"),
    "degraded": Sign("!", "yellow"),
    "broken": Sign("✗", "red"),
}
STATES: Final[Mapping[str, Sign]] = {
    "serving": Sign("✓", "green", "█"),
    "draining": Sign("→", "yellow", "▒"),
    "joining": Sign("+", "blue", "░"),
    "stale": Sign("?", "yellow", "?"),
    "offline": Sign("✗", "red", "×"),
}
SEVERITIES: Final[Mapping[str, Sign]] = {
    "critical": Sign("✗", "red"),
    "warning": Sign("!", "yellow"),
    "info": Sign("·", "blue"),
}


def number(value: float | None, digits: int = 1) -> str:
    """A number with thousands separated."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """A share, 0 to 1, in per cent."""
    return UNKNOWN if share is None else f"{share:.0%}"


def compact(value: int | None) -> str:
    """A count with a unit, in about five characters."""
    if value is None:
        return UNKNOWN
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(value) >= size:
            return f"{value / size:.1f}{unit}"
    return str(value)


def duration(seconds: float | None) -> str:
    """A length of time in at most two units."""
    if seconds is None:
        return UNKNOWN
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"


def clock(at: float) -> str:
    """The local time of day; unknown where a stranger's time is out of range."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, OSError, ValueError):
        return UNKNOWN


def plural(count: int, one: str) -> str:
    """A count and its noun."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def layers(ranges: Sequence[tuple[int, int]]) -> str:
    """Half-open ranges in words, with their last layer: [4, 8) is layers 4…7."""
    return name_layers([Span(start, end) for start, end in ranges if start < end])


def short_layers(span: tuple[int, int]) -> str:
    """One range without the word."""
    start, end = span
    return f"{start}" if end - start == 1 else f"{start}…{end - 1}"


def fitted(text: str, width: int) -> str:
    """The text in exactly so many cells, cut with … where it is longer."""
    if width <= 0:
        return ""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def line(*parts: str | tuple[str, str]) -> Text:
    """One line that never wraps; a part is plain, or a text and its style."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis", end="")
