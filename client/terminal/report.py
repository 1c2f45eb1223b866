"""Lines and tables about a generation for the terminal. Measures nothing: it shows `client.base.stats`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from client.base.stats import Stats, SweepMeasurement
from swarm.protocol.numeric_class import NumericClass


def summary(stats: Stats) -> str:
    """One line: tokens, sweeps, acceptance length, speed, seed."""
    kind, why = NumericClass.parse(stats.numeric_class), stats.numeric_class
    if kind is not None and kind.is_reproducible:
        why = "multi-step sampling" if kind.is_same_everywhere else "its processors round differently"
    exact = "reproducible" if stats.reproducible else f"may differ from run to run ({why})"
    return (
        f"{stats.tokens} tokens in {_sweeps(stats)} · acceptance length {stats.acceptance_length:.2f} · "
        f"{stats.tokens_per_s:.1f} tokens/s · first token after {stats.time_to_first_token_s:.2f} s · "
        f"seed {stats.seed}, {exact}{_checked(stats)}"
    )


def _checked(stats: Stats) -> str:
    """What checks of picks found, where they found something."""
    refuted = len(stats.picks.refuted)
    told = f" · what {refuted} machine{'s' if refuted > 1 else ''} picked was refuted and taken back" if refuted else ""
    return f"{told} · the draft's candidates are picked too rarely: another model?" if stats.picks.doubt == 1 else told


def _sweeps(stats: Stats) -> str:
    """The number of trees, and of the parts that a tree had beyond its first."""
    parts = len(stats.sweeps) - stats.trees
    further = f" and {parts} further part{'s' if parts > 1 else ''}" if parts else ""
    return f"{stats.trees} sweep{'' if stats.trees == 1 else 's'}{further}"


def turn(stats: Stats) -> str:
    """One line: how many tokens of a conversation its last turn had to send."""
    new = stats.prompt_tokens - stats.reused_tokens
    return f"conversation of {stats.prompt_tokens} tokens, {stats.reused_tokens} kept by the nodes, {new} sent"


def waterfall(stats: Stats) -> Table:
    """Median milliseconds of each part of a sweep, in the order in which it passes them.

    Link times are estimates from pings. Where they exceed what the links took, the rest would be negative: then the
    row says by how much the pings were too long.
    """
    table = Table(title=f"where a sweep's time went: median of {len(stats.sweeps)}, ms")
    for title in ("part", "wire", "queue", "compute", "messages"):
        table.add_column(title, justify="left" if title == "part" else "right")
    sweeps = stats.sweeps
    table.add_row("draft", "", "", _median([sweep.draft_ms for sweep in sweeps]), "")
    to_first, from_last = map(_path, stats.paths or ("", ""))
    table.add_row(f"client → hop 0{to_first}", _median([sweep.first_link_ms for sweep in sweeps]), "", "", "")
    for index, name in enumerate(stats.hops):
        path = from_last if index == len(stats.hops) - 1 else ""
        table.add_row(f"hop {index}: {name}{path}", *_hop_cells(sweeps, index))
    for name in stats.replicas:
        table.add_row(f"replica: {name}", "", "", "", "")
    table.add_row(*_rest([sweep.other_ms for sweep in sweeps]), "", "", "")
    table.add_row("whole sweep", _median([sweep.total_ms for sweep in sweeps]), "", "", "", style="bold")
    return table


def _path(path: str) -> str:
    """How a link goes, where that is worth a word."""
    return "" if path in ("", "direct") else f" ({path})"


def explanation(stats: Stats) -> Table:
    """One row per sweep: tree size, times, tokens, and why the tree had this size."""
    table = Table(title="sweeps: K tree nodes in so many levels, ms")
    for title in ("sweep", "K", "levels", "draft", "predicted", "took", "tokens", "why"):
        table.add_column(title, justify="left" if title == "why" else "right", overflow="fold")
    for number, sweep in enumerate(stats.sweeps, 1):
        predicted = "–" if sweep.predicted_ms is None else f"{sweep.predicted_ms:.0f}"
        times = (f"{sweep.draft_ms:.0f}", predicted, f"{sweep.total_ms:.0f}")
        table.add_row(str(number), str(sweep.nodes), str(sweep.depth), *times, str(sweep.emitted), sweep.reason)
    return table


def _rest(others_ms: Sequence[float]) -> tuple[str, str]:
    """Label and milliseconds of what no part accounts for; never below 0."""
    if not others_ms:
        return "not accounted for", "–"
    rest_ms = round(statistics.median(others_ms), 1)
    if rest_ms < 0:
        return "links were faster than pings by", f"{-rest_ms:.1f}"
    return "not accounted for", f"{abs(rest_ms):.1f}"  # -0.0 is 0.0


def _hop_cells(sweeps: Sequence[SweepMeasurement], index: int) -> list[str]:
    """Medians of one hop: the link behind it, queue, compute, messages."""
    hops = [sweep.hops[index] for sweep in sweeps if index < len(sweep.hops)]
    columns = ([h.link_ms for h in hops], [h.queue_ms for h in hops], [h.compute_ms for h in hops])
    return [_median(column) for column in (*columns, [h.other_ms for h in hops])]


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else "–"
