"""How far machines are: delays and rates measured by calls that answer at once. Owns no records and keeps nothing.

An `Info` call asks for no signature and no compute, so it takes one round trip and little else.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import grpc.aio

from swarm import wire
from swarm.discovery.node_record import NodeRecord, NodeState
from swarm.ids import PeerId
from swarm.transport.dial import Dialer

AT_ONCE = 16
LIMIT_S = 1.0
PINGS = 3
RATE_BYTES = 256 << 10
"""As much as warms a link up: what TCP has learned by then, it uses for hidden rows."""

Call = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


async def measure_delays(records: Sequence[NodeRecord], limit_s: float = LIMIT_S) -> dict[PeerId, float]:
    """One-way delays in milliseconds, half the best of some round trips, to at most `AT_ONCE` machines, all at once.

    Connections that nobody else uses are closed again. Who does not answer within `limit_s` is left out.
    """
    found: dict[PeerId, float] = {}
    async with Dialer() as dialer:
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as pings:
                for record in records[:AT_ONCE]:
                    pings.create_task(_measure(dialer, record, found))
        except TimeoutError:
            pass
    return found


async def measure_rate(record: NodeRecord, limit_s: float = 4 * LIMIT_S) -> float | None:
    """The rate towards a machine in Mbit/s, at most what its downlink takes; None when it does not answer.

    A link that does not carry the bytes in time is said to be as fast as that time allows.
    """
    short_s = None
    try:
        async with Dialer() as dialer, asyncio.timeout(limit_s):
            call = _info(dialer, record)
            await call(b"")  # connects
            short_s = min([await _round_trip_s(call, b"") for _ in range(PINGS)])
            await call(bytes(RATE_BYTES))
            passed_s = await _round_trip_s(call, bytes(RATE_BYTES)) - short_s
    except TimeoutError:
        if short_s is None:
            return None
        passed_s = limit_s
    except grpc.aio.AioRpcError:
        return None
    return RATE_BYTES * 8 / 1e6 / max(passed_s, 1e-4)


def chain_ends(records: Sequence[NodeRecord], num_layers: int, rng: random.Random) -> list[NodeRecord]:
    """Up to `AT_ONCE` machines that a chain may begin or end with: both kinds alike, by chance where there are more."""
    serving = [record for record in records if record.state is NodeState.SERVING]
    rng.shuffle(serving)
    firsts = [record for record in serving if record.span.start == 0]
    lasts = [record for record in serving if record.span.end == num_layers and record.span.start > 0]
    few = min(len(firsts), max(AT_ONCE // 2, AT_ONCE - len(lasts)))
    return firsts[:few] + lasts[: AT_ONCE - few]


def _info(dialer: Dialer, record: NodeRecord) -> Call:
    call: Call = dialer.channel(record.address).unary_unary(wire.INFO)
    return call


async def _measure(dialer: Dialer, record: NodeRecord, found: dict[PeerId, float]) -> None:
    call = _info(dialer, record)
    try:
        await call(b"")  # connects
        for _ in range(PINGS):
            delay_ms = await _round_trip_s(call, b"") * 1e3 / 2
            found[record.peer] = min(delay_ms, found.get(record.peer, delay_ms))
    except grpc.aio.AioRpcError:
        return


async def _round_trip_s(call: Call, payload: bytes) -> float:
    started = time.perf_counter()
    await call(payload)
    return time.perf_counter() - started
