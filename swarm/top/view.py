"""A state as lines of text: verdict, machines, probe, alerts, events, and all of it as one screen.

Pure: a state and a width in, lines out. The live view and `--once` draw the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from swarm.health.remote.state import AlertShown, EventShown, HopShown, ModelShown, NodeShown, ProbeShown, State
from swarm.top.format import (
    NONE,
    SEVERITIES,
    STATES,
    VERDICTS,
    clock,
    compact,
    duration,
    fitted,
    layers,
    line,
    number,
    percent,
    plural,
    short_layers,
)
from swarm.top.layer_map import head, in_order, row

WORST: Final = ("broken", "degraded", "serving")
BESIDE_BAR: Final = 65
"""Cells that a hop's name, layers and figures take."""
MAX_ROWS: Final = 24
"""Machines on the one screen of `--once`."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of nodes.

    Attributes:
        title: its head.
        width: in cells.
        text: what it shows of a node, at a time.
        key: what it is sorted by.
    """

    title: str
    width: int
    text: Callable[[NodeShown, float], str]
    key: Callable[[NodeShown, float], Any]


def _known(value: float | None) -> tuple[bool, float]:
    """A sort key under which unknown comes last."""
    return value is None, value or 0.0


def _free(node: NodeShown) -> str:
    return "–" if not node.kv_total else f"{compact(node.kv_free)}/{compact(node.kv_total)}"


COLUMNS: Final = (
    Column(
        "state",
        10,
        lambda node, _: node.state,
        lambda node, _: list(STATES).index(node.state) if node.state in STATES else 9,
    ),
    Column("node", 14, lambda node, _: node.label, lambda node, _: node.label.casefold()),
    Column("layers", 9, lambda node, _: short_layers(node.span), lambda node, _: node.span),
    Column("load", 6, lambda node, _: percent(node.busy), lambda node, _: _known(node.busy)),
    Column("KV free", 13, lambda node, _: _free(node), lambda node, _: _known(node.kv_free)),
    Column(
        "probed",
        9,
        lambda node, _: f"{number(node.probed_ms)} ms" if node.probed_ms is not None else "–",
        lambda node, _: _known(node.probed_ms),
    ),
    Column(
        "uptime",
        11,
        lambda node, now: duration(None if node.started_at is None else now - node.started_at),
        lambda node, now: _known(None if node.started_at is None else now - node.started_at),
    ),
    Column("version", 20, lambda node, _: node.version or "–", lambda node, _: node.version or ""),
    Column("class", 24, lambda node, _: node.numeric_class or "–", lambda node, _: node.numeric_class or ""),
    Column("reached", 9, lambda node, _: node.reach or "–", lambda node, _: node.reach or ""),
    Column("device", 24, lambda node, _: node.device or "–", lambda node, _: node.device or ""),
    Column("path", 16, lambda node, _: node.path or "–", lambda node, _: node.path or ""),
)
"""From left to right; where a terminal is narrow, the last ones are left out."""
LAYERS: Final = 2
"""Index of the column by which the rows are sorted at first."""


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


def table_head(width: int, sort: int, is_reversed: bool) -> Text:
    """The titles, with a mark at the column by which the rows are sorted."""
    text = line()
    for place, column in enumerate(fitting(width)):
        mark = ("↓" if is_reversed else "↑") if place == sort else ""
        style = "bold underline" if place == sort else "underline"
        text.append(fitted(f"{column.title}{mark}", column.width), style)
        text.append(" ")
    return text


def fitting(width: int) -> list[Column]:
    """The columns for which there is room."""
    found: list[Column] = []
    for column in COLUMNS:
        if sum(one.width + 1 for one in (*found, column)) > width:
            break
        found.append(column)
    return found


def sorted_nodes(model: ModelShown, now: float, sort: int, is_reversed: bool) -> list[NodeShown]:
    """The rows in order."""
    column = COLUMNS[sort]
    return sorted(in_order(model.nodes), key=lambda node: column.key(node, now), reverse=is_reversed)


def table_row(node: NodeShown, now: float, width: int) -> Text:
    """One machine."""
    sign = STATES.get(node.state, NONE)
    text = line()
    for column in fitting(width):
        cell = column.text(node, now)
        if column.title == "state":
            text.append(fitted(f"{sign.glyph} {cell}", column.width), sign.style)
        else:
            text.append(fitted(cell, column.width))
        text.append(" ")
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


def alert(one: AlertShown, now: float) -> Text:
    """An open alert."""
    sign = SEVERITIES.get(one.severity, NONE)
    return line(
        (f"{sign.glyph} {one.severity:<8} ", sign.style), one.text, (f"  for {duration(now - one.since)}", "dim")
    )


def event(one: EventShown) -> Text:
    """One event."""
    who = f"{one.short} " if one.short else ""
    return line((f"{clock(one.at)} ", "dim"), fitted(one.kind, 9), " ", who, one.text)


def journal(state: State, now: float) -> list[Text]:
    """Alerts, then events."""
    alerts = [alert(one, now) for one in state.alerts]
    events = [event(one) for one in state.events]
    nothing = [line("nothing is wrong that this service knows of")]
    return [line(("Alerts", "bold")), *(alerts or nothing), line(), line(("Events", "bold")), *events]


def sources(state: State) -> str:
    """The states of broker and DHT."""
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
    found += [line(), *head(model, width), *bars, *rest, line(), table_head(width, LAYERS, is_reversed=False)]
    found += [table_row(node, now, width) for node in sorted_nodes(model, now, LAYERS, is_reversed=False)[:MAX_ROWS]]
    return [*found, *rest, line(), *waterfall(model, now, width), line(), *journal(state, now)[:MAX_ROWS]]
