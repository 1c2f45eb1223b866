"""The live view: rich's Live redraws a few panes of lines when a state comes, a key is pressed, and once a second.

It uses the terminal's own colours, so that a light terminal stays light, and none where NO_COLOR is set.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import termios
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from swarm.base.tasks import TaskScope
from swarm.health.remote.state import ModelShown, State
from swarm.health.top.feed import LatestState
from swarm.health.top.screen import (
    NONE,
    VERDICTS,
    by_layers,
    choose,
    clock,
    duration,
    head,
    in_order,
    journal,
    line,
    plural,
    row,
    sources,
    table_head,
    table_row,
    verdict,
    waterfall,
)

TITLES: Final = ("layers", "nodes", "probe", "alerts and events", "signs")
KEYS: Final = "q quit · tab 1-5 pane · ←→ model · ↑↓ PgUp PgDn scroll · ? signs"
SIGNS: Final = """\
✓ serving   ! degraded or a warning   ✗ broken or offline
→ draining  + joining  ? stale: nothing heard for a while
The row "machines" counts who holds each layer:
+ ten or more machines, ✗ and ╎ no machine
Names and texts come from the machines themselves."""
WIDE, TALL = 130, 34
"""A terminal of this size shows four panes at once."""
KEY: Final = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
MODELS: Final = {"\x1b[C": 1, "\x1b[D": -1}
PANES: Final = {"\t": 1, "\x1b[Z": -1}
LINES: Final = {"\x1b[A": -1, "\x1b[B": 1, "k": -1, "j": 1, "\x1b[H": -(10**9), "\x1b[F": 10**9}
PAGES: Final = {"\x1b[5~": -1, "\x1b[6~": 1}
QUIT: Final = frozenset({"q", "\x03", "\x04"})

FollowStates = Callable[[LatestState], Coroutine[Any, Any, None]]
"""Brings states for ever."""


class LiveView:
    """What the terminal shows; `press` takes keys."""

    def __init__(self, watched: LatestState, selected: str | None) -> None:
        self.watched, self.selected = watched, selected
        self.pane, self.is_over = 0, False
        self._scroll = [0] * len(TITLES)
        self._page = 10

    @property
    def state(self) -> State:
        assert self.watched.state is not None  # the first was taken before anything is drawn
        return self.watched.state

    @property
    def model(self) -> ModelShown | None:
        """The model that is shown: the selected one, else the worst, which is then selected."""
        found = choose(self.state, self.selected) or choose(self.state, None)
        if found is not None and self.selected is None:
            self.selected = found.fingerprint
        return found

    def press(self, keys: str) -> None:
        for key in KEY.findall(keys.replace("\x1bO", "\x1b[")):
            models, model = self.state.models, self.model
            if key in QUIT:
                self.is_over = True
            elif key in MODELS and model is not None:
                self.selected = models[(models.index(model) + MODELS[key]) % len(models)].fingerprint
            elif key in PANES or key == "?" or key in map(str, range(1, len(TITLES) + 1)):
                number = self.pane + PANES[key] if key in PANES else len(TITLES) - 1 if key == "?" else int(key) - 1
                self.pane = number % len(TITLES)
            elif key in LINES or key in PAGES:
                self._scroll[self.pane] += LINES[key] if key in LINES else PAGES[key] * self._page

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n").join(self.lines(options.max_width, options.height or options.size.height))

    def lines(self, width: int, height: int) -> list[Text]:
        """The screen, line by line: at most `height` lines of at most `width` cells."""
        above, below = self._above(width), line((KEYS, "dim"))
        model, room = self.model, max(height - len(above) - 1, 0)
        panes: list[Text] = []
        if model is not None:
            if width >= WIDE and height >= TALL and self.pane < 4:
                left, top = (width - 2) * 3 // 5, room * 3 // 5
                sizes = ((left, top), (width - 2 - left, top), (left, room - top), (width - 2 - left, room - top))
                one, two, three, four = (self._pane(place, model, size) for place, size in enumerate(sizes))
                panes = [*_beside(one, two, left), *_beside(three, four, left)]
            else:
                panes = self._pane(self.pane, model, (width, room), has_tabs=True)
        blank = [line() for _ in range(room - len(panes))]
        lines = [*[*above, *panes, *blank][: max(height - 1, 0)], below]
        for shown in lines:
            shown.truncate(width, overflow="ellipsis")
        return lines

    def _above(self, width: int) -> list[Text]:
        watched, model = self.watched, self.model
        state = self.state
        fresh, found = ("● live", "bold green"), list[Text]()
        if watched.is_stale:
            why = f" ({watched.trouble})" if watched.trouble else ""
            fresh, old = ("✗ STALE", "bold red"), f"STALE: no news for {duration(watched.silent_s)}{why}"
            found = [line((f"{old}; below is the last known state, not what is true now", "bold red"))]
        elif watched.trouble is not None:
            fresh = ("! reconnecting", "bold yellow")
            found = [line((f"{watched.trouble}; trying again", "bold yellow"))]
        alerts = [f"✗ {plural(len(state.alerts), 'alert')}"] if state.alerts else []
        summary = " · ".join([clock(watched.now), sources(state), *alerts])
        top = [line(("Canopy", "bold"), f" {state.swarm}  ", fresh, f"  {summary}")]
        if len(state.models) > 1:
            parts = [
                part
                for one in state.models
                for sign in [VERDICTS.get(one.verdict, NONE)]
                for part in ((f" {sign.glyph} ", sign.style), (f" {one.name} ", "bold reverse" if one is model else ""))
            ]
            top.append(line(*parts))
        if model is None:
            nothing = line("no machine serves a model here yet; on any machine, run:")
            return [*top, *found, nothing, line(("  node serve MODEL --layers auto --join PEER", "bold"))]
        fix = textwrap.wrap(model.fixes[0], max(width - 2, 8), break_on_hyphens=False)[:4] if model.fixes else []
        said = verdict(model, watched.now, watched.is_stale)
        return [*top, *found, *said, *(line((f"  {part}", "bold")) for part in fix)]

    def _pane(self, place: int, model: ModelShown, size: tuple[int, int], has_tabs: bool = False) -> list[Text]:
        """One pane: its title, its head, and as many lines as there is room for, from where it is scrolled to."""
        (width, height), now = size, self.watched.now
        styles = ["bold reverse" if number == self.pane else "" for number in range(len(TITLES))]
        tabs = [(f" {number + 1} {TITLES[number]} ", styles[number]) for number in range(len(TITLES))]
        above = [line(*(tabs if has_tabs else [(f"{place + 1} {TITLES[place]}", styles[place] or "bold")]))]
        make: Callable[[Any], Text] = Text.copy
        rows: list[Any]
        match place:
            case 0:
                above, rows = above + head(model, width), in_order(model.nodes)
                make = partial(row, model=model, room=width)
            case 1:
                above, rows = [*above, table_head(width)], by_layers(model)
                make = partial(table_row, now=now, width=width)
            case 2:
                rows = waterfall(model, now, width)
            case 3:
                rows = journal(self.state, now)
            case _:
                rows = [line(text) for text in SIGNS.splitlines()]
        room = max(height - len(above), 0)
        at = self._scroll[place] = min(max(self._scroll[place], 0), max(len(rows) - room, 0))
        if place == self.pane:
            self._page = max(room - 1, 1)
        return [*above, *map(make, rows[at : at + room])][:height] + [line()] * (height - len(above) - len(rows))


def _beside(left: list[Text], right: list[Text], width: int) -> list[Text]:
    for one in left:
        one.truncate(width, overflow="ellipsis", pad=True)
    return [Text.assemble(one, "  ", other) for one, other in zip(left, right, strict=True)]


@contextmanager
def _typing(press: Callable[[str], None]) -> Iterator[None]:
    """Hand on every key as it is pressed, unseen; none where the input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(fd)
    mode = termios.tcgetattr(fd)
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)

    def read() -> None:
        with suppress(BlockingIOError):
            press(os.read(fd, 1_024).decode(errors="replace") or "q")  # nothing: the terminal is gone

    termios.tcsetattr(fd, termios.TCSADRAIN, mode)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def watch(source: FollowStates, state: State, selected: str | None, console: Console) -> None:
    changed = asyncio.Event()
    view = LiveView(LatestState(changed.set), selected)
    view.watched.take(state)

    def press(keys: str) -> None:
        view.press(keys)
        changed.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live, _typing(press):
            async with TaskScope() as scope:
                scope.spawn(source(view.watched), "source")
                while not view.is_over:
                    changed.clear()
                    live.update(view, refresh=True)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await changed.wait()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
