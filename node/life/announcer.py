"""What a node says of itself: its record in the directory, renewed while it runs, and its state for telemetry.

Owns the record's span, state and sequence number. Loads nothing and serves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from node.life.duplicate_identity import check_still_alone, next_expiry
from node.life.planning import NodeResources
from node.life.report import NodeSnapshot
from node.life.span_host import SpanHost
from node.model.malloc_trim import trim_heap
from swarm.base.errors import IdentityError, RegistryError
from swarm.base.layers import Span
from swarm.base.logs import CountedLog, describe
from swarm.base.version import VERSION
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import RECORD_TTL_S
from swarm.protocol.limits import SWEEP_MS
from swarm.routing.costs import DEFAULT_LINK_MBIT_PER_S
from swarm.status.messages import MessageKind

ANNOUNCE_S = RECORD_TTL_S / 3
SAY_AGAIN, SAY_AGAIN_S = 5, 2.0
"""How often a new address is announced until the directory takes it, and how long after the try before."""

logger = logging.getLogger(__name__)


class Announcer:
    """Writes a node's record.

    Attributes:
        announced: the newest record, also one whose announcement failed: it may have reached some peers all the same.
    """

    def __init__(self, resources: NodeResources, host: SpanHost) -> None:
        self.announced: NodeRecord | None = None
        self._resources = resources
        self._host = host
        self._rebalance = resources.rebalance
        self._span: Span | None = None
        self._state = NodeState.JOINING
        self._troubles = CountedLog(logger)
        self._one_by_one = asyncio.Lock()

    @property
    def span(self) -> Span:
        """The layers that the node serves, or is about to load."""
        assert self._span is not None, "layers are chosen before anything is said of them"
        return self._span

    def choose(self, span: Span) -> None:
        """The node serves these layers, or is about to load them."""
        self._span = span

    async def reserve(self, span: Span) -> None:
        """Announce that the node is about to load a span."""
        self.choose(span)
        await self.announce(NodeState.JOINING)

    async def announce(self, state: NodeState) -> None:
        """Write the record.

        Raises:
            RegistryError: the directory does not take it.
        """
        self._state = state
        self._resources.outbox.request(MessageKind.STATUS)
        async with self._one_by_one:
            record = self.record(self._state)
            self.announced = record
            await self._resources.registry.announce(record)

    async def keep_announcing(self) -> None:
        """Renew the record for ever, and measure a little before each time.

        Raises:
            IdentityError: another machine has served under this identity for longer.
        """
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            await self._try(self._resources.dialer.tidy)
            await self._try(partial(asyncio.to_thread, trim_heap))
            await self._try(self._check_alone)
            await self._try(self._measure_delays)
            await self._try(self._check_speed)
            await self._try(lambda: self.announce(self._state))

    async def say_again(self) -> None:
        """Write the record at once, as others reach the node otherwise now; nothing where it was not announced yet.

        A home that lost its way in has often lost the directory too: it is tried a few times, then with the next
        renewal.
        """
        if self.announced is None:
            return
        for _ in range(SAY_AGAIN):
            try:
                return await self.announce(self._state)
            except (RegistryError, OSError) as trouble:
                self._troubles.say("announcing", f"not announced this time: {describe(trouble)}")
            await asyncio.sleep(SAY_AGAIN_S)

    async def _try(self, step: Callable[[], Awaitable[object]]) -> None:
        """Take a step of a loop that must not end, whatever fails: without it, the node would not be listed.

        Raises:
            IdentityError: another machine has served under this identity for longer.
        """
        try:
            await step()
        except IdentityError:
            raise
        except Exception as trouble:  # noqa: BLE001 - such as no file descriptor left
            self._troubles.say("announcing", f"not announced this time: {describe(trouble)}")

    async def _check_alone(self) -> None:
        def newest() -> NodeRecord:
            newest = self._resources.machine.newest  # of any model
            assert newest is not None
            return newest

        await check_still_alone(self._resources.registry, newest, self._resources.left_behind)

    async def _measure_delays(self) -> None:
        service, identity = self._host.service, self._resources.identity
        if service is not None:
            records = await self._resources.registry.records(identity.fingerprint, identity.num_layers)
            service.successors.note_listed(records)
            self._resources.machine.refuted.listed[identity.fingerprint] = frozenset(one.peer for one in records)
            await service.peer_delays.measure([record for record in records if service.policy.allows(record.address)])

    async def _check_speed(self) -> None:
        if self._state is NodeState.SERVING:
            await self._host.check_speed()

    async def withdraw(self) -> None:
        """Take back what was announced by a node that could not start."""
        if self.announced is not None:
            with suppress(RegistryError):
                await self._resources.registry.withdraw(self.announced)

    def record(self, state: NodeState) -> NodeRecord:
        """The record of this node in some state, newer than every one before."""
        resources, host = self._resources, self._host
        machine = resources.machine
        machine.sequence += 1
        record = NodeRecord(
            peer=resources.registry.peer_id,
            model=resources.identity,
            span=self.span,
            address=resources.address,
            reach=resources.whereabouts.now.reach,
            state=state,
            numeric_class=host.numeric_class,
            version=VERSION,
            name=resources.config.name,
            sweep_ms=tuple((nodes, min(max(ms, SWEEP_MS[0]), SWEEP_MS[1])) for nodes, ms in host.sweep_ms),
            bucketed=host.bucketed,
            aux_rows=True,
            ends_only=True,
            rounding=host.rounding,
            kv_tokens_free=0,
            kv_tokens_total=0,
            sequence=machine.sequence,
            expires_at=next_expiry(time.time(), machine.newest, resources.left_behind),
            certificate=b"" if resources.certificate is None else resources.certificate.der,
            refuted=machine.refuted.announced(resources.identity.fingerprint),
            movable=resources.config.is_auto and state is NodeState.SERVING and self._rebalance.may_move,
        )
        machine.newest = record
        if host.service is None:
            return record  # nothing is loaded
        kv_free, kv_total = host.sessions.kv_tokens_free, host.sessions.kv_tokens
        record = host.service.peer_delays.describe(replace(record, kv_tokens_free=kv_free, kv_tokens_total=kv_total))
        limit = resources.uplink.mbit_per_s
        if record.uplink_mbit_per_s is None and limit is not None and limit < DEFAULT_LINK_MBIT_PER_S:
            return replace(record, uplink_mbit_per_s=limit)  # what is not measured yet would be taken for more
        return record

    def snapshot(self) -> NodeSnapshot:
        """How this node is now, for telemetry."""
        host = self._host
        snapshot = NodeSnapshot(self.span, self._state, host.numeric_class, host.sweep_ms, path=host.path)
        if host.service is None:
            return snapshot  # nothing is loaded
        sessions = host.sessions
        return replace(
            snapshot,
            sessions=len(sessions),
            kv_tokens_free=sessions.kv_tokens_free,
            kv_tokens_total=sessions.kv_tokens,
            kv_tokens_kept=sessions.pool.tokens,
            worked_ms=sessions.worked_ms,
            held=sessions.held(),
            waiting=sessions.waiting,
        )
