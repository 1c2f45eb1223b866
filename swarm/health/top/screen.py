"""A state as lines of text, in the page's words: verdict, layer map, nodes, probe, alerts and events.

Pure: a state and a width in, lines out; unknown is an en dash. The live view and `--once` draw the same lines. Every
colour has a glyph beside it. Where a model has more layers than there are columns, a column stands for several and
shows the worst of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from swarm.base.layers import Span, name_layers
from swarm.health.remote.state import HopShown, ModelShown, NodeShown, ProbeShown, State

UNKNOWN: Final = "–"


@dataclass(frozen=True, slots=True)
class Sign:
    """How a state is shown: a glyph, a colour of the terminal's own palette, and what fills its bar on the map."""

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


MAX_PER_LAYER: Final = 8
MAX_CONTRIBUTORS: Final = 5
LABEL: Final = 16
GAP: Final = "╎"
TICK_CELLS: Final = 6
_STEPS: Final = (1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 80, 100, 128, 200, 256, 512, 1_024)


@dataclass(frozen=True, slots=True)
class Columns:
    """Which cells show which layers: a layer takes several cells, or a cell shows several layers."""

    num_layers: int
    width: int
    """Cells of the whole map."""

    @classmethod
    def fit(cls, num_layers: int, room: int) -> Columns:
        """The widest map for the room, in whole cells per layer where that is possible."""
        room = max(room, 1)
        per_layer = min(room // max(num_layers, 1), MAX_PER_LAYER)
        return cls(num_layers, num_layers * per_layer if per_layer else room)

    def cell(self, layer: int) -> int:
        """The cell at which a layer begins."""
        return min(layer, self.num_layers) * self.width // max(self.num_layers, 1)

    def cells(self, span: tuple[int, int]) -> tuple[int, int]:
        """Cells of a span, at least one."""
        start = min(self.cell(span[0]), self.width - 1)
        return start, max(self.cell(span[1]), start + 1)

    def layers(self, cell: int) -> range:
        """The layers that a cell shows."""
        first = cell * self.num_layers // max(self.width, 1)
        last = -(-(cell + 1) * self.num_layers // max(self.width, 1))
        return range(first, max(last, first + 1))


def head(model: ModelShown, room: int) -> list[Text]:
    """The axis and the count of machines per layer."""
    columns = Columns.fit(model.num_layers, room - LABEL)
    counts = line((fitted("machines", LABEL), "dim"))
    per_layer = columns.width // model.num_layers if model.num_layers else 0
    for cell in range(columns.width):
        min_count = min(
            (model.replicas[layer] for layer in columns.layers(cell) if layer < len(model.replicas)), default=0
        )
        is_first = per_layer <= 1 or cell % per_layer == 0
        counts.append(*_count(min_count, is_first))
    return [line((fitted("layer", LABEL), "dim"), (_axis(columns), "dim")), counts]


def _count(min_count: int, is_first: bool) -> tuple[str, str]:
    """A cell of the row of counts; the number stands at the layer's first cell."""
    if min_count <= 0:
        return "✗", "bold red"
    text = (str(min_count) if min_count < 10 else "+") if is_first else "·"
    return text, "bold yellow" if min_count == 1 else "green"


def _axis(columns: Columns) -> str:
    width = max(columns.width, 1)
    every = next((step for step in _STEPS if step * width >= TICK_CELLS * columns.num_layers), 2_048)
    text = ""
    for layer in range(0, columns.num_layers, every):
        label = str(layer)
        at = columns.cell(layer)
        if at >= len(text) and at + len(label) <= width:
            text = text.ljust(at) + label
    return text.ljust(width)


def in_order(nodes: Sequence[NodeShown]) -> list[NodeShown]:
    """The nodes by span, so that a change of state moves nothing."""
    return sorted(nodes, key=lambda node: (node.span[0], -node.span[1], node.peer))


def row(node: NodeShown, model: ModelShown, room: int) -> Text:
    """One machine's bar; gaps are drawn through all rows, and a state other than serving is named if there is room."""
    columns = Columns.fit(model.num_layers, room - LABEL)
    sign = STATES.get(node.state, NONE)
    start, end = columns.cells(node.span)
    gaps = {cell for missing in model.missing for cell in range(*columns.cells(missing))}
    bar, word = sign.fill * (end - start), f" {node.state} {short_layers(node.span)} "
    if node.state != "serving" and len(word) + 2 <= len(bar):
        bar = word.center(len(bar), sign.fill)
    label = line((sign.glyph, sign.style), " ", fitted(node.label, LABEL - 3), " ")
    label.append_text(_gapped(range(start), gaps)).append(bar, sign.style)
    return label.append_text(_gapped(range(end, columns.width), gaps))


def _gapped(cells: range, gaps: set[int]) -> Text:
    return Text.assemble(*((GAP, "red") if cell in gaps else " " for cell in cells), end="")


WORST: Final = ("broken", "degraded", "serving")
BESIDE_BAR: Final = 65
"""Cells that a hop's name, layers and figures take."""
MAX_ROWS: Final = 24
"""Machines on the one screen of `--once`."""


Cell = Callable[[NodeShown, float], str | None]
"""What a column shows of a node at a time; None: it is not known."""


def _free(node: NodeShown) -> str | None:
    return f"{compact(node.kv_free)}/{compact(node.kv_total)}" if node.kv_total else None


def _sessions(node: NodeShown) -> str | None:
    counts = (("preferred", node.preferred_sessions), ("contributors'", node.contributor_sessions))
    first = ", ".join(f"{count} {name}" for name, count in counts if count)
    return None if node.sessions is None else f"{node.sessions} ({first})" if first else f"{node.sessions}"


def _work(node: NodeShown) -> str | None:
    """What its work is found to be, by the service or by other nodes."""
    if node.named:
        return "unlike two others"
    if node.refuted:
        return f"wrong, say {len(node.refuted)}"
    return None if node.agrees is None else "as another's" if node.agrees else "unlike another's"


COLUMNS: Final[Sequence[tuple[str, int, Cell]]] = (
    ("state", 10, lambda node, _: f"{STATES.get(node.state, NONE).glyph} {node.state}"),
    ("node", 14, lambda node, _: node.label),
    ("layers", 9, lambda node, _: short_layers(node.span)),
    ("load", 6, lambda node, _: percent(node.busy)),
    ("KV free", 13, lambda node, _: _free(node)),
    ("sessions", 18, lambda node, _: _sessions(node)),
    ("work", 17, lambda node, _: _work(node)),
    ("probed", 9, lambda node, _: None if node.probed_ms is None else f"{number(node.probed_ms)} ms"),
    ("uptime", 11, lambda node, now: duration(None if node.started_at is None else now - node.started_at)),
    ("version", 20, lambda node, _: node.version),
    ("class", 24, lambda node, _: node.numeric_class),
    ("reached", 9, lambda node, _: node.reach),
    ("device", 24, lambda node, _: node.device),
    ("path", 16, lambda node, _: node.path),
)
"""Title, width in cells and what is shown; where a terminal is narrow, the last ones are left out."""


def choose(state: State, selected: str | None) -> ModelShown | None:
    """The model with this name or fingerprint, or the beginning of one; the worst model if none is selected."""
    if selected is None:
        ranks = {verdict: rank for rank, verdict in enumerate(WORST)}
        return min(state.models, key=lambda model: ranks.get(model.verdict, 9), default=None)
    exact = [model for model in state.models if selected in (model.name, model.fingerprint)]
    by_prefix = [
        model for model in state.models if model.fingerprint.startswith(selected) or model.name.startswith(selected)
    ]
    return next(iter([*exact, *by_prefix]), None)


def verdict(model: ModelShown, now: float, is_stale: bool) -> list[Text]:
    """How the model fares, why, and what the command below helps with."""
    sign = VERDICTS.get(model.verdict, NONE)
    style = "dim" if is_stale else f"bold {sign.style}"
    word = f"{sign.glyph} {'last known: ' if is_stale else ''}{model.verdict.upper()}"
    found = [
        line(
            (word, style), "  ", (model.name, "bold"), f"  {model.fingerprint[:12]}  for {duration(now - model.since)}"
        ),
        line(f"  {model.reason}"),
        line(f"  {_distance(model)} · {model.serving} serving · {model.num_layers} layers · {_speed(model.probe)}"),
    ]
    if model.fixes:
        found.append(line(f"  {_why(model)}"))
    return found


def _distance(model: ModelShown) -> str:
    """How many machines may go; of a broken one, what is broken."""
    if model.verdict != "broken":
        return f"{plural(model.margin, 'machine')} to spare"
    return f"broken: {layers(model.missing)} missing" if model.missing else "broken, though every layer has a machine"


def _speed(probe: ProbeShown | None) -> str:
    if probe is None:
        return "not probed yet"
    speed = probe.tokens_per_s
    return "its last probe gave no speed" if speed is None else f"{number(speed)} tokens/s probed"


def _why(model: ModelShown) -> str:
    if model.missing:
        return f"missing: {layers(model.missing)}; on any machine, run:"
    return "it works; to make it stronger, run:" if model.verdict == "serving" else "to strengthen it, run:"


def fitting(width: int) -> list[tuple[str, int, Cell]]:
    """The columns for which there is room."""
    ends = [sum(column[1] + 1 for column in COLUMNS[: place + 1]) for place in range(len(COLUMNS))]
    return [column for column, end in zip(COLUMNS, ends, strict=True) if end <= width]


def table_head(width: int) -> Text:
    parts = [part for title, cells, _ in fitting(width) for part in ((fitted(title, cells), "underline"), " ")]
    return line(*parts)


def by_layers(model: ModelShown) -> list[NodeShown]:
    """The nodes as the table lists them."""
    return sorted(in_order(model.nodes), key=lambda node: node.span)


def table_row(node: NodeShown, now: float, width: int) -> Text:
    text = line()
    for title, cells, shown in fitting(width):
        style = STATES.get(node.state, NONE).style if title == "state" else ""
        text.append(fitted(shown(node, now) or UNKNOWN, cells), style).append(" ")
    return text


def waterfall(model: ModelShown, now: float, width: int) -> list[Text]:
    """The latest probe: its figures, and one sweep hop by hop."""
    probe = model.probe
    if probe is None:
        return [line("no probe has been made yet")]
    age = duration(now - probe.at)
    if not probe.ok:
        return [line(("✗ ", "bold red"), f"the probe failed {age} ago: {probe.error or 'no reason is known'}")]
    found = [
        line(
            f"made {age} ago · first token {number(probe.ttft_ms, 0)} ms · {number(probe.tokens_per_s)} tokens/s"
            f" · {number(probe.acceptance_length, 2)} tokens per sweep"
        ),
    ]
    if not probe.hops:
        return found
    names = {node.peer: node.label for node in model.nodes}
    steps = [(hop, _parts(hop)) for hop in probe.hops]
    back = max(probe.return_ms or 0.0, 0.0)
    total = max(sum(sum(parts) for _, parts in steps) + back, 1e-3)
    room = max(min(width - BESIDE_BAR, 80), 8)
    at = 0.0
    for hop, parts in steps:
        found.append(_step(f"{names.get(hop.peer, hop.short)}", short_layers(hop.span), (at, parts), (total, room)))
        at += sum(parts)
    found.append(_step("back", "", (at, (back, 0.0, 0.0)), (total, room)))
    found.append(
        line(
            ("─ wire ", "dim"), ("▒ waiting ", "yellow"), ("█ computing", "green"), f"   one sweep: {number(total)} ms"
        )
    )
    return found


def _parts(hop: HopShown) -> tuple[float, float, float]:
    return max(hop.link_ms or 0.0, 0.0), max(hop.queue_ms or 0.0, 0.0), max(hop.compute_ms or 0.0, 0.0)


def _step(name: str, span: str, bar: tuple[float, Sequence[float]], scale: tuple[float, int]) -> Text:
    at, parts = bar
    total, room = scale
    text = line(fitted(name, 16), " ", fitted(span, 8), " ")
    edges = [round(edge / total * room) for edge in (at, at + parts[0], at + parts[0] + parts[1], at + sum(parts))]
    text.append(" " * edges[0])
    for place, (fill, style) in enumerate((("─", "dim"), ("▒", "yellow"), ("█", "green"))):
        text.append(fill * (edges[place + 1] - edges[place]), style)
    text.append(" " * (room - edges[3]))
    named = zip(("wire", "wait", "compute"), parts, strict=True)
    text.append("  " + " · ".join(f"{word} {number(ms)}" for word, ms in named if ms > 0), "dim")
    return text


def journal(state: State, now: float) -> list[Text]:
    found = [line(("Alerts", "bold"))]
    for alert in state.alerts:
        sign = SEVERITIES.get(alert.severity, NONE)
        begins = f"{sign.glyph} {alert.severity:<8} "
        found.append(line((begins, sign.style), alert.text, (f"  for {duration(now - alert.since)}", "dim")))
    if not state.alerts:
        found.append(line("nothing is wrong that this service knows of"))
    if state.contributors:
        found += [line(), line(("Contributors", "bold"), (" by layer-tokens that clients signed for", "dim"))]
    for one in state.contributors[:MAX_CONTRIBUTORS]:
        amount = f"{compact(one.layer_tokens):>7} {percent(one.share):>6} "
        found.append(line((amount, "dim"), one.name or one.short))
    found += [line(), line(("Events", "bold"))]
    for event in state.events:
        who = f"{event.short} " if event.short else ""
        found.append(line((f"{clock(event.at)} ", "dim"), fitted(event.kind, 9), " ", who, event.text))
    return found


def sources(state: State) -> str:
    links = (("broker", state.sources.broker), ("DHT", state.sources.dht))
    return " · ".join(f"{name} {link.state}" for name, link in links if link is not None)


def screen(state: State, model: ModelShown, width: int) -> list[Text]:
    """Everything as one screen, for `--once`; commands are never cut."""
    now = state.at
    found = [line(("Canopy", "bold"), f" {state.swarm} · {clock(now)} · {sources(state)}"), line()]
    found += verdict(model, now, is_stale=False)
    found += [line(f"  {fix}") for fix in model.fixes[:1]]
    others = [f"{one.name} {one.verdict}" for one in state.models if one is not model]
    if others:
        found.append(line(f"  other models: {', '.join(others[:8])}{' …' if len(others) > 8 else ''}"))
    more = len(model.nodes) - MAX_ROWS
    rest = [line(f"… and {plural(more, 'machine')} more")] if more > 0 else []
    bars = [row(node, model, width) for node in in_order(model.nodes)[:MAX_ROWS]]
    found += [line(), *head(model, width), *bars, *rest, line(), table_head(width)]
    found += [table_row(node, now, width) for node in by_layers(model)[:MAX_ROWS]]
    return [*found, *rest, line(), *waterfall(model, now, width), line(), *journal(state, now)[:MAX_ROWS]]
