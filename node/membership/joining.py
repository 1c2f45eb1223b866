"""Which span an `--layers auto` node takes: chosen from fresh records, reserved before anything is loaded.

The reservation is a `JOINING` record, which no route uses and every other placement counts. Of two nodes that reserve
at the same time the one with the lower peer id keeps its span; the other chooses again with that span taken.

    choose ──▶ announce JOINING ──▶ settle ──▶ read ──▶ did a node with a lower peer id reserve meanwhile? ──▶ again
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarm.discovery.node_record import NodeRecord, NodeState
from swarm.discovery.registry import Registry
from swarm.ids import ModelIdentity, PeerId
from swarm.layers import Span, SpanBorders
from swarm.routing.placement import Newcomer, layout_of, own_move, plan_join, typical_capacity

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
        peer: the newcomer.
        num_layers: how many layers it takes.
        model: of which.
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
