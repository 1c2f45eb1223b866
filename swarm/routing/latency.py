"""Delays and rates to machines, measured by calls that answer at once. Owns no records and keeps nothing.

An `Info` call needs no signature and no computation, so it takes one round trip and little else.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from swarm.base.errors import SwarmError
from swarm.base.ids import PeerId
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.link.dial import Dialer
from swarm.link.endpoint import Ways
from swarm.link.network_key import NetworkKey
from swarm.protocol import wire

MAX_MEASURED = 16
"""Machines that are measured at a time."""
TIMEOUT_S = 1.0
RELAYED_TIMEOUT_S = 2.5
"""The same where a machine is reached through a relay: connecting takes longer, and a better way gets a head start."""
ROUND_TRIPS = 3
"""Round trips per machine, of which the shortest counts."""
RATE_PROBE_BYTES = 256 << 10
"""Payload of a rate measurement: enough to open TCP's congestion window as hidden rows would."""

DelayProbe = Callable[[Sequence[NodeRecord]], Awaitable[dict[PeerId, float]]]
"""Measures one-way delays in milliseconds; machines that do not answer are left out."""
InfoCall = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


async def measure_delays(
    records: Sequence[NodeRecord],
    limit_s: float | None = None,
    *,
    insecure: bool = False,
    ways: Ways | None = None,
    network: NetworkKey | None = None,
) -> dict[PeerId, float]:
    """One-way delays to machines, all measured at once. Connections that were opened here are closed again.

    Args:
        records: the machines; the first `MAX_MEASURED` are measured.
        limit_s: a machine that does not answer within it is left out; by default a second, or what relays need.
        insecure: whether machines of this machine's loopback are dialled that announce no certificate.
        ways: lead past relays, as those of the connections that will be used.
        network: the private swarm's key, if it is one.

    Returns:
        Milliseconds by peer: half of each one's shortest round trip.
    """
    found: dict[PeerId, float] = {}
    if limit_s is None:
        is_direct = all(record.endpoint.relay is None for record in records[:MAX_MEASURED])
        limit_s = TIMEOUT_S if is_direct else RELAYED_TIMEOUT_S
    async with Dialer(insecure=insecure, ways=ways, network=network) as dialer:
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as pings:
                for record in records[:MAX_MEASURED]:
                    pings.create_task(_measure(dialer, record, found))
        except TimeoutError:
            pass
    return found


async def measure_rate(
    record: NodeRecord,
    limit_s: float = 4 * TIMEOUT_S,
    *,
    insecure: bool = False,
    ways: Ways | None = None,
    network: NetworkKey | None = None,
) -> float | None:
    """The rate of this machine's uplink, measured towards another machine.

    Args:
        record: the other machine; its downlink bounds what is measured.
        limit_s: where the payload takes longer, the rate that this time allows is returned.
        insecure: as in `measure_delays`.
        ways: likewise.
        network: likewise.

    Returns:
        Mbit/s; None when the machine does not answer.
    """
    short_s = None
    try:
        async with Dialer(insecure=insecure, ways=ways, network=network) as dialer, asyncio.timeout(limit_s):
            call = _info(dialer, record)
            await call(b"")  # connects
            short_s = min([await _round_trip_s(call, b"") for _ in range(ROUND_TRIPS)])
            await call(bytes(RATE_PROBE_BYTES))
            passed_s = await _round_trip_s(call, bytes(RATE_PROBE_BYTES)) - short_s
    except TimeoutError:
        if short_s is None:
            return None
        passed_s = limit_s
    except (grpc.aio.AioRpcError, SwarmError):
        return None
    return RATE_PROBE_BYTES * 8 / 1e6 / max(passed_s, 1e-4)


def chain_ends(records: Sequence[NodeRecord], num_layers: int, rng: random.Random) -> list[NodeRecord]:
    """Up to `MAX_MEASURED` machines that a chain may begin or end with, half of each kind where both are many.

    Args:
        records: machines of one model.
        num_layers: the model's.
        rng: chooses among more machines than are returned.
    """
    serving = [record for record in records if record.state is NodeState.SERVING]
    rng.shuffle(serving)
    firsts = [record for record in serving if record.span.start == 0]
    lasts = [record for record in serving if record.span.end == num_layers and record.span.start > 0]
    num_firsts = min(len(firsts), max(MAX_MEASURED // 2, MAX_MEASURED - len(lasts)))
    return firsts[:num_firsts] + lasts[: MAX_MEASURED - num_firsts]


def worth_measuring(records: Sequence[NodeRecord], num_layers: int, rng: random.Random) -> list[NodeRecord]:
    """The machines that a client asks before it chooses a chain: its ends first, then others while there is room.

    Of a machine that died a moment ago its record says nothing, and a hop that dials it waits for seconds.
    """
    ends = chain_ends(records, num_layers, rng)
    known = {record.peer for record in ends}
    others = [one for one in records if one.state is NodeState.SERVING and one.peer not in known]
    return ends + rng.sample(others, min(len(others), MAX_MEASURED - len(ends)))


async def ghosts(records: Sequence[NodeRecord], probe: DelayProbe, rng: random.Random) -> frozenset[PeerId]:
    """Machines that are listed as serving and do not answer: killed a moment ago, their records live on for a minute.

    Where nobody at all answers, it is this machine that reaches nobody, and none of them is a ghost.

    Args:
        records: of one model; `MAX_MEASURED` of them are asked, all at once.
        probe: measures delays; those that do not answer are left out.
        rng: chooses whom to ask.
    """
    serving = [record for record in records if record.state is NodeState.SERVING]
    asked = rng.sample(serving, min(len(serving), MAX_MEASURED))
    answered = await probe(asked) if asked else {}
    return frozenset(record.peer for record in asked if answered and record.peer not in answered)


def _info(dialer: Dialer, record: NodeRecord) -> InfoCall:
    call: InfoCall = dialer.channel(record.endpoint).unary_unary(wire.INFO)
    return call


async def _measure(dialer: Dialer, record: NodeRecord, found: dict[PeerId, float]) -> None:
    try:
        call = _info(dialer, record)
        await call(b"")  # connects
        for _ in range(ROUND_TRIPS):
            delay_ms = await _round_trip_s(call, b"") * 1e3 / 2
            found[record.peer] = min(delay_ms, found.get(record.peer, delay_ms))
    except (grpc.aio.AioRpcError, SwarmError):
        return


async def _round_trip_s(call: InfoCall, payload: bytes) -> float:
    started = time.perf_counter()
    await call(payload)
    return time.perf_counter() - started
