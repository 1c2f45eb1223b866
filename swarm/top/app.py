"""`swarm top` on a terminal: draws the newest state when it comes, and once a second, since it shows ages.

textual, and not rich's Live: over ssh it sends only the cells that changed, and it brings keys, the mouse, scrolling
and resizing. It uses the terminal's own colours, so that a light terminal stays light, and none where NO_COLOR is set.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.css.query import NoMatches
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static

from swarm.health.remote.state import ModelShown, State
from swarm.top.feed import LatestState
from swarm.top.format import NONE, VERDICTS, clock, duration, line
from swarm.top.layer_map import head, in_order, row
from swarm.top.view import (
    COLUMNS,
    LAYERS,
    choose,
    fitting,
    journal,
    sorted_nodes,
    sources,
    table_head,
    table_row,
    verdict,
    waterfall,
)

PANES: Final = ("map", "nodes", "probe", "journal")
TITLES: Final = ("layers", "nodes", "probe", "alerts and events")
HELP: Final = """\
tab, 1-4       the next pane: layers, nodes, probe, alerts and events
← →            the model before, the next model
↑ ↓ PgUp PgDn  scroll in the pane; Home, End
s, r           sort the nodes by the next column, the other way round
c              copy the command that helps (if the terminal takes it)
?, Esc         this help, and back
q              quit

  ✓ serving   ! degraded, a warning   ✗ broken, offline, nobody
  → draining  + joining   ? stale: nothing heard of it for a while
  The row "machines" counts who holds each layer: + ten or more, ✗ nobody; ╎ nobody serves it.
  Colours and signs say the same. Names and texts come from the machines themselves."""
CSS: Final = """
Screen { layout: vertical; overflow: hidden; background: ansi_default; color: ansi_default; }
Static, LineList, Container, Vertical { background: ansi_default; color: ansi_default; }
#top, #models, #freshness, #keys { height: 1; }
#models { display: none; }
#models.several { display: block; }
#verdict { height: auto; max-height: 4; text-wrap: nowrap; text-overflow: ellipsis; }
#fix { height: auto; max-height: 4; padding: 0 0 0 2; text-style: bold; }
#freshness { display: none; }
#freshness.shown { display: block; }
#panes { height: 1fr; layout: vertical; }
.pane { display: none; height: 1fr; }
.pane.chosen { display: block; }
.pane > .title { height: 1; }
.pane > .head { height: auto; }
LineList { height: 1fr; scrollbar-size-vertical: 1; }
LineList { scrollbar-background: ansi_default; scrollbar-color: ansi_bright_black; }
.-wide.-tall #panes { layout: grid; grid-size: 2 2; grid-gutter: 0 2; grid-columns: 3fr 2fr; grid-rows: 3fr 2fr; }
.-wide.-tall .pane { display: block; height: 100%; }
#help { display: none; height: 1fr; padding: 1 2; }
#help.shown { display: block; }
#panes.hidden { display: none; }
"""


class LineList(ScrollView, can_focus=True):
    """A scrolling list that makes only the lines in sight: a thousand machines cost what a screenful does."""

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self._count = 0
        self._line: Callable[[int], Text] = lambda _: Text()

    def show(self, count: int, line: Callable[[int], Text]) -> None:
        """Replace what is shown, and keep the scroll position; `line(number)` makes one line."""
        self._count, self._line = count, line
        self.virtual_size = Size(self.scrollable_content_region.width, count)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line on the screen, as textual asks for it."""
        number = y + self.scroll_offset.y
        width = self.size.width
        if not 0 <= number < self._count:
            return Strip.blank(width, self.rich_style)
        text = self._line(number)
        text.truncate(width, overflow="ellipsis")
        segments = [segment for segment in text.render(self.app.console) if segment.text]
        return Strip(segments, text.cell_len).apply_style(self.rich_style).adjust_cell_length(width, self.rich_style)


class Pane(Vertical):
    """A title, a head, and a list of lines."""

    def __init__(self, name: str, title: str) -> None:
        super().__init__(id=f"pane-{name}", classes="pane")
        self._list_id, self._title = name, title

    def compose(self) -> ComposeResult:
        """The widgets of the pane."""
        yield Static(self._title, classes="title", markup=False)
        yield Static("", classes="head", markup=False)
        yield LineList(self._list_id)

    def show(self, titles: tuple[Text, list[Text]], count: int, make: Callable[[int], Text]) -> None:
        """Draw the pane.

        Args:
            titles: the title, and the lines of the head.
            count: number of lines.
            make: gives a line by its number.
        """
        title, above = titles
        self.query_one(".title", Static).update(title)
        self.query_one(".head", Static).update(Text("\n").join(above))
        self.query_one(".head", Static).display = bool(above)
        self.query_one(LineList).show(count, make)

    @property
    def room(self) -> int:
        """Width for lines, in cells, without the scroll bar."""
        return max(self.size.width - 1, 20)


class TopApp(App[None]):
    """The live view; `source` brings states into `watched`, for ever."""

    CSS = CSS
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-narrow"), (130, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-low"), (34, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit"),
        Binding("tab", "pane(1)", priority=True),
        Binding("shift+tab", "pane(-1)", priority=True),
        *(Binding(str(place + 1), f"open({place})") for place in range(len(PANES))),
        Binding("right", "model(1)", priority=True),
        Binding("left", "model(-1)", priority=True),
        Binding("s", "sort"),
        Binding("r", "turn"),
        Binding("c", "copy"),
        Binding("question_mark,h,f1", "help"),
        Binding("escape", "close_help"),
    ]

    def __init__(
        self, source: Callable[[LatestState], Coroutine[Any, Any, None]], state: State, selected: str | None
    ) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.watched = LatestState(self.redraw)
        self._source, self._first_state, self._selected = source, state, selected
        self._pane, self._sort, self._is_turned = 0, LAYERS, False
        self._notice = ""

    def compose(self) -> ComposeResult:
        """The widgets of the screen."""
        for name in ("top", "models", "freshness", "verdict", "fix"):
            yield Static("", id=name, markup=False)
        with Container(id="panes"):
            for name, title in zip(PANES, TITLES, strict=True):
                yield Pane(name, title)
        yield Static(HELP, id="help", markup=False)
        yield Static("", id="keys", markup=False)

    def on_mount(self) -> None:
        """Show the first state and start the source."""
        self.watched.take(self._first_state)
        self.action_open(0)
        self.set_interval(1.0, self.redraw)
        self.run_worker(self._source(self.watched), name="source")

    def on_resize(self, _: events.Resize) -> None:
        """Draw anew: lines are made for a width."""
        self.call_after_refresh(self.redraw)

    @property
    def model(self) -> ModelShown | None:
        """The model that is shown: the selected one, else the worst, which is then selected."""
        state = self.watched.state
        if state is None:
            return None
        found = choose(state, self._selected) or choose(state, None)
        if found is not None and self._selected is None:
            self._selected = found.fingerprint
        return found

    def redraw(self) -> None:
        """Draw everything anew; textual sends only the cells that changed."""
        try:
            self._draw()
        except NoMatches:
            return  # the widgets are not mounted yet, or not any more

    def _draw(self) -> None:
        watched, model = self.watched, self.model
        self._set_text("top", _top(watched))
        self._set_text("keys", self._keys())
        self._freshness()
        if watched.state is None:
            self._set_text("verdict", line("waiting for the first state …"))
            return
        self._models(watched.state, model)
        if model is None:
            self._set_text("verdict", line("nobody serves a model here yet; on any machine, run:"))
            self._set_text("fix", line("node serve MODEL --layers auto --join PEER"))
            return
        self._set_text("verdict", Text("\n").join(verdict(model, watched.now, watched.is_stale)))
        self._set_text("fix", Text(model.fixes[0] if model.fixes else ""))
        self.query_one("#fix").display = bool(model.fixes)
        self._panes(watched.state, model)

    def _set_text(self, name: str, text: Text) -> None:
        self.query_one(f"#{name}", Static).update(text)

    def _freshness(self) -> None:
        watched = self.watched
        text = line()
        if watched.is_stale:
            age, why = duration(watched.silent_s), f" ({watched.trouble})" if watched.trouble else ""
            text = line(
                (f"STALE: no news for {age}{why}; below is the last known state, not what is true now", "bold red")
            )
        elif watched.trouble is not None:
            text = line((f"{watched.trouble}; trying again", "bold yellow"))
        self.query_one("#freshness").set_class(bool(text.plain), "shown")
        self._set_text("freshness", text)

    def _models(self, state: State, chosen: ModelShown | None) -> None:
        text = line()
        for model in state.models:
            sign = VERDICTS.get(model.verdict, NONE)
            style = "bold reverse" if model is chosen else ""
            text.append(f" {sign.glyph} ", sign.style)
            text.append(f" {model.name} ", style)
        self._set_text("models", text)
        self.query_one("#models").set_class(len(state.models) > 1, "several")

    def _panes(self, state: State, model: ModelShown) -> None:
        now = self.watched.now
        panes = [self.query_one(f"#pane-{name}", Pane) for name in PANES]
        heads = [self._title(place) for place in range(len(PANES))]
        nodes = in_order(model.nodes)
        room = panes[0].room
        panes[0].show((heads[0], head(model, room)), len(nodes), lambda at: row(nodes[at], model, room))
        across = panes[1].room
        rows = sorted_nodes(model, now, self._sort, self._is_turned)
        titles = [table_head(across, self._sort, self._is_turned)]
        panes[1].show((heads[1], titles), len(rows), lambda at: table_row(rows[at], now, across))
        probe = waterfall(model, now, panes[2].room)
        panes[2].show((heads[2], []), len(probe), lambda at: probe[at].copy())
        happened = journal(state, now)
        panes[3].show((heads[3], []), len(happened), lambda at: happened[at].copy())

    def _title(self, place: int) -> Text:
        if self.screen.has_class("-wide") and self.screen.has_class("-tall"):
            return line((f"{place + 1} {TITLES[place]}", "bold reverse" if place == self._pane else "bold"))
        tabs = line()
        for number, title in enumerate(TITLES):
            tabs.append(f" {number + 1} {title} ", "bold reverse" if number == self._pane else "")
        return tabs

    def _keys(self) -> Text:
        return line(
            (
                self._notice or "q quit · tab pane · ←→ model · ↑↓ scroll · s r sort · c copy · ? help",
                "dim",
            )
        )

    def action_pane(self, by: int) -> None:
        """Open the next pane, or the one before."""
        self.action_open((self._pane + by) % len(PANES))

    def action_open(self, place: int) -> None:
        """Open a pane."""
        self._pane = place
        for number, name in enumerate(PANES):
            self.query_one(f"#pane-{name}").set_class(number == place, "chosen")
        self.query_one(f"#{PANES[place]}", LineList).focus()
        self.redraw()

    def action_model(self, by: int) -> None:
        """Show the next model, or the one before."""
        state, model = self.watched.state, self.model
        if state is None or model is None:
            return
        place = (state.models.index(model) + by) % len(state.models)
        self._selected = state.models[place].fingerprint
        self.redraw()

    def action_sort(self) -> None:
        """Sort by the next column that is shown."""
        shown = len(fitting(self.query_one("#pane-nodes", Pane).room)) or len(COLUMNS)
        self._sort = (self._sort + 1) % shown
        self.redraw()

    def action_turn(self) -> None:
        """Sort the other way round."""
        self._is_turned = not self._is_turned
        self.redraw()

    def action_copy(self) -> None:
        """Copy the command to the terminal's clipboard."""
        model = self.model
        if model is not None and model.fixes:
            self.copy_to_clipboard(model.fixes[0])
            self._show_notice(f"copied, if this terminal takes it: {model.fixes[0]}")

    def _show_notice(self, text: str) -> None:
        def done() -> None:
            self._notice = ""
            self.redraw()

        self._notice = text
        self.set_timer(3.0, done)
        self.redraw()

    def action_help(self) -> None:
        """Show or hide the keys."""
        self._help(not self.query_one("#help").has_class("shown"))

    def action_close_help(self) -> None:
        """Hide the keys."""
        self._help(False)

    def _help(self, is_shown: bool) -> None:
        self.query_one("#help").set_class(is_shown, "shown")
        self.query_one("#panes").set_class(is_shown, "hidden")


def _top(watched: LatestState) -> Text:
    state = watched.state
    if state is None:
        return line(("Canopy", "bold"), "  ", ("connecting", "bold yellow"))
    fresh = ("● live", "bold green")
    if watched.is_stale:
        fresh = ("✗ STALE", "bold red")
    elif watched.trouble is not None:
        fresh = ("! reconnecting", "bold yellow")
    worst = [f"✗ {len(state.alerts)} alerts"] if len(state.alerts) > 1 else ["1 alert"] if state.alerts else []
    summary = " · ".join([clock(watched.now), sources(state), *worst])
    return line(("Canopy", "bold"), f" {state.swarm}  ", fresh, f"  {summary}")
