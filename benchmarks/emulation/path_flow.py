"""A stream of messages over gRPC, timed one way: the namespaces share one machine's clock, so each end reads it."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from swarm.transport.certificate import ServerCertificate
from swarm.transport.dial import SERVER_OPTIONS, bind_port

SERVICE, METHOD = "benchmarks.Paths", "Flow"
SMALL, LARGE = 8 << 10, 512 << 10
COLD_COUNT, WARM_COUNT, LARGE_COUNT = 4, 20, 8
"""Messages of each kind; cold ones are the first on their connection."""
IN_FLIGHT: Final = 4
STAMP_BYTES: Final = 8
READY_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class FlowTimes:
    """What one new connection did.

    Attributes:
        connected_ms: until it was ready, handshakes included.
        small_cold_ms: 8 KiB one way, among the first messages.
        small_warm_ms: the same after much traffic.
        large_ms: 512 KiB one way.
        mbit_per_s: of messages of 512 KiB, several in flight.
    """

    connected_ms: float
    small_cold_ms: float
    small_warm_ms: float
    large_ms: float
    mbit_per_s: float


def flow_server(host: str, certificate: ServerCertificate | None) -> tuple[grpc.aio.Server, int]:
    """A server that answers each message with the nanoseconds that it took; not started yet. Returns its port too."""

    async def flow(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for message in requests:
            late_ns = time.monotonic_ns() - int.from_bytes(message[:STAMP_BYTES], "big")
            yield late_ns.to_bytes(STAMP_BYTES, "big")

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {METHOD: grpc.stream_stream_rpc_method_handler(flow)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    return server, bind_port(server, f"{host}:0", certificate)


async def measure_flow(channel: grpc.aio.Channel, seconds: float) -> FlowTimes:
    """Connect, and let messages flow; the large ones for so many seconds."""
    began_s = time.monotonic()
    async with asyncio.timeout(READY_S):
        await channel.channel_ready()
    connected_ms = (time.monotonic() - began_s) * 1e3
    call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")
    stream = call()
    cold = await _one_way_ms(stream, SMALL, COLD_COUNT)
    large = await _one_way_ms(stream, LARGE, LARGE_COUNT)
    rate = await _rate(stream, seconds)
    warm = await _one_way_ms(stream, SMALL, WARM_COUNT)
    await stream.done_writing()
    return FlowTimes(connected_ms, cold, warm, large, rate)


async def _one_way_ms(stream: Any, size_bytes: int, times: int) -> float:  # noqa: ANN401 - gRPC's stream
    """The median over messages, of which one is on its way at a time."""
    body = os.urandom(size_bytes - STAMP_BYTES)
    found = []
    for _ in range(times):
        await stream.write(_stamp() + body)
        found.append(int.from_bytes(await stream.read(), "big") / 1e6)
    return statistics.median(found)


async def _rate(stream: Any, seconds: float) -> float:  # noqa: ANN401 - gRPC's stream
    """Mbit/s over all but the first quarter of the time, in which TCP opens its window."""
    body = os.urandom(LARGE - STAMP_BYTES)
    began_s = time.monotonic()
    waiting, arrivals = 0, []
    while (now_s := time.monotonic()) < began_s + seconds:
        while waiting < IN_FLIGHT:
            await stream.write(_stamp() + body)
            waiting += 1
        await stream.read()
        waiting -= 1
        if now_s > began_s + seconds / 4:
            arrivals.append(time.monotonic())
    for _ in range(waiting):
        await stream.read()
    if len(arrivals) < IN_FLIGHT:
        return 0.0
    return (len(arrivals) - 1) * LARGE * 8e-6 / (arrivals[-1] - arrivals[0])


def _stamp() -> bytes:
    return time.monotonic_ns().to_bytes(STAMP_BYTES, "big")
