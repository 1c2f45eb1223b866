"""Which span an `--layers auto` node takes: chosen from fresh records, reserved before anything is loaded.

The reservation is a `JOINING` record, which no route uses and every other placement counts. Of two nodes that reserve
at the same time the one with the lower peer id keeps its span; the other chooses again with that span taken.

    choose ──▶ announce JOINING ──▶ settle ──▶ read ──▶ did a node with a lower peer id reserve meanwhile? ──▶ again
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from swarm.base.errors import TooSlow
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span, SpanBorders, missing_layers
from swarm.base.logs import describe
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import Registry
from swarm.routing.placement import Newcomer, layout_of, own_move, plan_join, typical_capacity
from swarm.routing.plausible import plausible

logger = logging.getLogger(__name__)

SETTLE_S = 3.0
"""Longer than choosing and storing a record take: of two nodes that reserve together at least one sees the other."""
MAX_ROUNDS = 4

Choose = Callable[[Sequence[NodeRecord]], Span | None]


@dataclass(frozen=True, slots=True)
class Joiner:
    """What a newcomer knows of itself.

    Attributes:
        numeric_class: of what it will compute.
        capacity: layers per second in plain decoding; None while it is not measured.
        ghosts: machines that do not answer it; they hold nothing.
    """

    numeric_class: str
    capacity: float | None = None
    ghosts: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class SpanReservation:
    """Where spans of a model are reserved."""

    registry: Registry
    model: ModelIdentity
    announce: Callable[[Span], Awaitable[None]]
    """Publishes this machine's `JOINING` record for a span."""
    borders: SpanBorders | None = None
    """Where the model can be cut; None for everywhere."""

    @property
    def peer(self) -> PeerId:
        """This machine."""
        return self.registry.peer_id

    def moved_to_borders(self, choose: Choose) -> Choose:
        """The same choice, or the nearest span that cuts nothing apart.

        Raises:
            LayersError: when it chooses, and there is none that is short enough.
        """
        if self.borders is None:
            return choose
        borders = self.borders

        def choose_allowed(records: Sequence[NodeRecord]) -> Span | None:
            span = choose(records)
            return None if span is None else borders.nearest(span)

        return choose_allowed

    def kept_to_borders(self, choose: Choose) -> Choose:
        """The same choice where it cuts nothing apart; else none."""

        def choose_allowed(records: Sequence[NodeRecord]) -> Span | None:
            span = choose(records)
            return span if span is None or self.borders is None or self.borders.allow(span) else None

        return choose_allowed

    async def others(self) -> list[NodeRecord]:
        """Everybody else's records, read now."""
        records = await self.registry.records(self.model.fingerprint, self.model.num_layers, within_s=0.0)
        return [record for record in records if record.peer != self.peer]

    async def reserve(self, choose: Choose) -> Span | None:
        """The span that `choose` finds in the others' records, reserved; None when it finds none.

        Raises:
            RegistryError: the directory cannot be read or written.
        """
        known = await self.others()
        span = await asyncio.to_thread(choose, known)
        for _ in range(MAX_ROUNDS):
            if span is None:
                return None
            await self.announce(span)
            await asyncio.sleep(SETTLE_S)
            now = await self.others()
            rivals = _reservations(now) - _reservations(known)
            if not any(peer < self.peer for peer, _ in rivals):
                return span
            giving_way = {peer for peer, _ in rivals if peer > self.peer}
            known = [record for record in now if record.peer not in giving_way]
            again = await asyncio.to_thread(choose, known)
            if again == span:
                return span
            span = again
        return span


def joiners_choice(peer: PeerId, num_layers: int, model: ModelIdentity, own: Joiner | None = None) -> Choose:
    """The span that a newcomer takes.

    Args:
        own: what it knows of itself; None: it counts as a typical machine, among all that there are.
    """

    def choose(records: Sequence[NodeRecord]) -> Span:
        others = list(records)
        if own is not None:
            others = [one for one in of_class(records, own.numeric_class) if one.peer not in own.ghosts]
        typical = typical_capacity(others)
        layout = layout_of(others, model.num_layers, typical)
        capacity = typical if own is None or own.capacity is None else own.capacity
        return plan_join(layout, Newcomer(peer, num_layers, capacity)).span

    return choose


def of_class(records: Sequence[NodeRecord], numeric_class: str) -> list[NodeRecord]:
    """Those with which a machine of this numeric class can be in one chain: a chain never mixes classes."""
    return [record for record in records if record.numeric_class == numeric_class]


def movers_choice(own: NodeRecord) -> Choose:
    """The span that a node with the record `own` moves to now, if it is its turn."""

    def choose(records: Sequence[NodeRecord]) -> Span | None:
        alike = (*of_class(records, own.numeric_class), own)
        layout = layout_of(alike, own.model.num_layers, typical_capacity(alike))
        move = own_move(layout, own.peer)
        return None if move is None else move.new

    return choose


def _reservations(records: Sequence[NodeRecord]) -> set[tuple[PeerId, Span]]:
    return {(record.peer, record.span) for record in records if record.state is NodeState.JOINING}


# What a machine that was told nothing serves: in which numeric class, how many layers, or why it cannot help.
#
# the swarm's records + what this machine can ──▶ class ──▶ layers that fit ──▶ layers that are fast enough

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
        able: classes in which this machine can compute, and its user lets it; the first is its own choice.
    """
    serving = [record for record in records if record.state is not NodeState.DRAINING]
    held = {kind: of_class(serving, kind) for kind in sorted({record.numeric_class for record in serving})}
    if not held:
        return ClassChoice(able[0], "its own choice, as nobody serves the model yet")
    main = max(held, key=lambda kind: _coverage(held[kind]))
    common = [kind for kind in able if kind in held]  # of two that are covered alike, the one that it prefers
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


# A running `--layers auto` node checks at times whether it is needed elsewhere.
#
# All nodes plan the same from the same records (`swarm.routing.placement`), so at most one machine finds that it is its
# turn. It first fetches the files of the other span, while it still serves; then it reserves that span as a newcomer
# does, and moves.

LOOK_S = 180.0
"""Mean time between looks; each is drawn from half of it to one and a half."""
COOL_DOWN_S = 300.0
"""After it arrived, a node stays so long at least, and half as long again at most."""


class MovableNode(Protocol):
    """What is used of the node here."""

    def serving(self) -> NodeRecord:
        """The record that it announces now."""

    async def fetch(self, span: Span) -> None:
        """Download what another span needs, and go on serving."""

    async def move(self, span: Span) -> None:
        """Serve the span that it has reserved, instead of its own."""

    async def stay(self) -> None:
        """Take back a reservation: go on where it is."""


class Rebalance:
    """When a node may move, and the loop that asks."""

    def __init__(self, rng: random.Random, clock: Callable[[], float] = time.monotonic) -> None:
        self._rng = rng
        self._clock = clock
        self._stays_until = 0.0

    @property
    def may_move(self) -> bool:
        """Whether the cool-down after the last arrival is over."""
        return self._clock() >= self._stays_until

    def arrived(self) -> None:
        """Begin a cool-down."""
        self._stays_until = self._clock() + COOL_DOWN_S * self._rng.uniform(1.0, 1.5)

    async def keep_looking(self, reservation: SpanReservation, node: MovableNode) -> None:
        """Look every few minutes, for ever; what fails is logged."""
        while True:
            await asyncio.sleep(LOOK_S * self._rng.uniform(0.5, 1.5))
            if self.may_move:
                await self.look(reservation, node)

    async def look(self, reservation: SpanReservation, node: MovableNode) -> None:
        """Move if it is this node's turn.

        Raises:
            SwarmError: it gave its span up and cannot load the other.
        """
        try:
            span = await self._reserve(reservation, node)
        except Exception as trouble:  # noqa: BLE001 - whatever it is, this node serves on
            logger.warning("stays where it is: %s", describe(trouble))
            return
        if span is not None:
            self.arrived()
            await node.move(span)

    async def _reserve(self, reservation: SpanReservation, node: MovableNode) -> Span | None:
        choose = reservation.kept_to_borders(movers_choice(node.serving()))
        span = await asyncio.to_thread(choose, await reservation.others())
        if span is None:
            return None
        await node.fetch(span)
        reserved = None
        try:
            reserved = await reservation.reserve(choose)
        finally:
            if reserved is None:
                await node.stay()
        return reserved
