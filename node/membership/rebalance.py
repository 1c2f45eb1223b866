"""A running `--layers auto` node checks at times whether it is needed elsewhere. Owns neither span nor session.

All nodes plan the same from the same records (`swarm.routing.placement`), so at most one machine finds that it is its
turn. It first fetches the files of the other span, while it still serves; then it reserves that span as a newcomer
does, and moves.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Protocol

from node.membership.joining import SpanReservation, movers_choice
from swarm.discovery.node_record import NodeRecord
from swarm.layers import Span
from swarm.runtime.logs import describe

LOOK_S = 180.0
"""Mean time between looks; each is drawn from half of it to one and a half."""
COOL_DOWN_S = 300.0
"""After it arrived, a node stays so long at least, and half as long again at most."""

logger = logging.getLogger(__name__)


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
