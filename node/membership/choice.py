"""What a machine that was told nothing serves: in which numeric class, how many layers, or why it cannot help. Pure.

the swarm's records + what this machine can ──▶ class ──▶ layers that fit ──▶ layers that are fast enough
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from node.membership.joining import of_class
from swarm.discovery.node_record import NodeRecord, NodeState
from swarm.errors import TooSlow
from swarm.layers import Span, missing_layers
from swarm.routing.plausible import plausible

COMPARED_NODES: Final = 8
"""Tree nodes of the sweep at which machines are compared."""
SPAN_RATIO: Final = 2.0
"""A newcomer takes no more layers than make its span so many times as slow as the swarm's median one …"""
TOO_SLOW: Final = 4.0
"""… and a machine of which one layer alone is so many times as slow is not needed, where others hold all layers."""
NEEDED_HOLDERS: Final = 2
"""A layer that fewer machines hold needs any machine, however slow."""


@dataclass(frozen=True, slots=True)
class ClassChoice:
    """In which numeric class a machine computes.

    Attributes:
        numeric_class: as `cpu-float32` (`swarm.protocol.numeric_class`).
        why: as a clause.
        note: a line for the user, where no chain can use this machine yet; empty otherwise.
    """

    numeric_class: str
    why: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class LayerCount:
    """How many layers a machine holds.

    Attributes:
        count: at least 1.
        why: as a clause.
    """

    count: int
    why: str


def choose_class(records: Sequence[NodeRecord], able: Sequence[str]) -> ClassChoice:
    """The class in which the swarm serves a model, as far as this machine can compute in it.

    Args:
        records: of the model.
        able: classes in which this machine can compute, and its user lets it; the first is its own choice.
    """
    serving = [record for record in records if record.state is not NodeState.DRAINING]
    held = {kind: of_class(serving, kind) for kind in sorted({record.numeric_class for record in serving})}
    if not held:
        return ClassChoice(able[0], "its own choice, as nobody serves the model yet")
    main = max(held, key=lambda kind: _coverage(held[kind]))
    common = [kind for kind in held if kind in able]
    if not common:
        note = (
            f"the swarm computes in {main}, which this machine cannot or may not: no chain mixes it with {able[0]}, "
            f"so this machine is of use once others serve the rest in {able[0]}"
        )
        return ClassChoice(able[0], f"its own choice, for it cannot compute in {main}", note)
    chosen = max(common, key=lambda kind: _coverage(held[kind]))
    nodes = f"{len(held[chosen])} node{'s' if len(held[chosen]) > 1 else ''}"
    return ClassChoice(chosen, f"as {nodes} of the swarm, since a chain never mixes types")


def choose_count(
    records: Sequence[NodeRecord], numeric_class: str, num_layers: int, fits: int, layer_ms: Mapping[int, float] | None
) -> LayerCount:
    """How many layers this machine should hold.

    Args:
        records: of the model.
        numeric_class: in which it computes.
        num_layers: of the model.
        fits: how many layers its memory holds, at least 1.
        layer_ms: by tree nodes, what one of its layers takes; None where it was not measured.

    Raises:
        TooSlow: one layer of it is slower than others' spans, and nobody needs it.
    """
    memory = LayerCount(fits, "all of the model" if fits == num_layers else "as many as its memory holds")
    alike = [one for one in of_class(records, numeric_class) if one.state is NodeState.SERVING]
    speeds = [_span_ms(record) for record in plausible(alike)]
    known = [ms for ms in speeds if ms is not None]
    if layer_ms is None or not known or _are_few(alike, num_layers):
        return memory
    own_ms, usual_ms = layer_ms[COMPARED_NODES], statistics.median(known)
    if own_ms > TOO_SLOW * usual_ms:
        raise TooSlow(
            f"this machine would slow down every chain that it joins: one layer takes {own_ms:.0f} ms here, and the "
            f"whole span of a node of this swarm {usual_ms:.0f} ms (median of {len(known)}); all layers have "
            f"{NEEDED_HOLDERS} machines or more without it. A graphics card would help, or a machine that does "
            "nothing else; --num-layers 1 joins all the same"
        )
    fast = max(1, int(SPAN_RATIO * usual_ms / own_ms))
    if fast >= fits:
        return memory
    return LayerCount(fast, f"its memory holds {fits}, but more would make it the slowest of the chain")


def need_of(records: Sequence[NodeRecord], numeric_class: str, span: Span, num_layers: int) -> str:
    """Why the swarm wants these layers held, as a clause."""
    alike = [one for one in of_class(records, numeric_class) if one.state is not NodeState.DRAINING]
    missing = _within(missing_layers([one.span for one in alike], num_layers), span)
    if missing == len(span):
        return "nobody holds them"
    if missing:
        return f"nobody holds {missing} of them"
    holders = [sum(one.span.start <= layer < one.span.end for one in alike) for layer in range(span.start, span.end)]
    few = min(holders)
    return "one machine alone holds some of them" if few == 1 else f"they have the fewest holders, {few} at least"


def _within(ranges: Sequence[tuple[int, int]], span: Span) -> int:
    return sum(max(0, min(end, span.end) - max(start, span.start)) for start, end in ranges)


def _coverage(records: Collection[NodeRecord]) -> tuple[bool, int, int]:
    """How well a class covers a model: whether wholly, how many layers, by how many machines."""
    num_layers = next(iter(records)).model.num_layers
    gaps = sum(end - start for start, end in missing_layers([one.span for one in records], num_layers))
    return not gaps, num_layers - gaps, len(records)


def _are_few(alike: Sequence[NodeRecord], num_layers: int) -> bool:
    """Whether some layer has too few holders to send anybody away, or to want little of him."""
    return any(
        sum(one.span.start <= layer < one.span.end for one in alike) < NEEDED_HOLDERS for layer in range(num_layers)
    )


def _span_ms(record: NodeRecord) -> float | None:
    """What a sweep takes at a node, as it announces it; of the sizes that it measured, the nearest from above."""
    larger = [ms for nodes, ms in record.sweep_ms if nodes >= COMPARED_NODES]
    return min(larger) if larger else None
