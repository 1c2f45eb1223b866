"""Does the emulated network have the delays and rates that were asked for?

One-way delay and goodput per direction, and the round trip, beside their nominal values. One TCP connection does it
all: both of its ends are in this process, so one clock times each way by itself.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from rich.console import Console

from benchmarks.emulation.network import Network, NetworkKind, NetworkPlan, open_network
from benchmarks.sheet import Recording, Sheet
from client.tools.demo.link_shape import LinkShape
from swarm.base.cli import make_console
from swarm.base.errors import SwarmError
from swarm.base.plain_text import plain_line

PINGS = 21
PING = bytes(8)
PING_PACKET_BYTES = 60
"""On the wire: IPv4, TCP with timestamps, the payload."""
WINDOWS, WINDOW_S = 9, 0.15
"""Times in which the goodput is measured; their median does not mind that this machine stalls now and then."""
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
WARM_ROUND_TRIPS = 16
"""How long TCP is given before that to open its window, which then fills half of the link's queue and loses nothing."""
CHUNK = bytes(1 << 16)
DELAY_BOUND_MS = {NetworkKind.TUN: 0.5, NetworkKind.PROXY: 1.5}
DELAY_BOUND = 0.02
"""A delay may be off by this share of it and the milliseconds above; the proxy is one more program on the way."""
RATE_BOUNDS = (0.85, 1.02)
"""Goodput by nominal rate. Headers take 3.5 % at an MTU of 1,500; no bulk transfer may be faster than its link."""

CHOICES = (tyro.conf.EnumChoicesFromValues,)


@dataclass(frozen=True, slots=True)
class CheckedValue:
    """One value beside what it should be."""

    what: str
    unit: str
    nominal: float
    measured: float
    low: float
    high: float

    @property
    def is_good(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Build an emulated network, measure it and compare with what was asked for."""

    kind: NetworkKind | None = None
    """tun needs root; proxy needs nothing; left out: the best that this machine allows."""
    hosts: int = 2
    """How many hosts."""
    delay_ms: float = 25.0
    """One way."""
    mbit: float | None = 100.0
    """Per interface and direction; None: unlimited."""
    jitter_ms: float = 0.0
    """Largest extra delay of a packet."""
    loss: float = 0.0
    """Fraction of packets, TUN alone; the rate is not measured then."""
    queue_ms: float = 100.0
    """Length of each link's queue."""
    seed: int = 0
    """Of all that is random."""
    mtu: int = 1500
    """Of every interface, in bytes."""


@dataclass(frozen=True, slots=True)
class Direction:
    name: str
    shape: LinkShape
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader


async def check(net: Network, pairs: Sequence[tuple[int, int]] = ((0, 1),)) -> list[CheckedValue]:
    """Measure the links of these pairs of hosts, both ways, one pair after the other; no link of theirs may be cut."""
    results = []
    for near, far in pairs:
        async with _connected(net, near, far) as ways:
            results += await _delays(net.kind, ways)
            lossy = any(way.shape.loss for way in ways)
            for way in ways:
                if way.shape.mbit is not None and not lossy:
                    warm_s = WARM_ROUND_TRIPS * sum(way.shape.delay_ms for way in ways) / 1e3
                    nominal, rate = way.shape.mbit, await _goodput(way, warm_s)
                    low, high = (nominal * bound for bound in RATE_BOUNDS)
                    results.append(CheckedValue(f"rate {way.name}", "Mbit/s", nominal, rate, low, high))
    return results


@asynccontextmanager
async def _connected(net: Network, near: int, far: int) -> AsyncIterator[tuple[Direction, Direction]]:
    """A connection that `near` opened to `far`: there, back."""
    loop = asyncio.get_running_loop()
    ways = net.shapes(near, far)
    with net.socket(far) as listener:
        dialler = net.socket(near)
        for end, shape in zip((listener, dialler), ways, strict=True):
            _limit_window(end, shape, sum(way.delay_ms for way in ways) / 1e3)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(net.bind_address(far))
        listener.listen()
        listener.setblocking(False)
        dialler.setblocking(False)
        await loop.sock_connect(dialler, net.dial_address(far))
        accepted, _ = await loop.sock_accept(listener)
    for end in (dialler, accepted):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    near_reader, near_writer = await asyncio.open_connection(sock=dialler)
    far_reader, far_writer = await asyncio.open_connection(sock=accepted)
    try:
        yield (
            Direction(f"{near} → {far}", ways[0], near_writer, far_reader),
            Direction(f"{far} → {near}", ways[1], far_writer, near_reader),
        )
    finally:
        for writer in (near_writer, far_writer):
            writer.transport.abort()  # what is left of a bulk transfer has no reader


def _limit_window(end: socket.socket, shape: LinkShape, round_trip_s: float) -> None:
    """Let a receiver's window fill its link and half of the queue before it; the kernel doubles a buffer for itself."""
    if shape.mbit is not None:
        window_s = round_trip_s + shape.queue_ms / 2e3
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, int(window_s * shape.mbit * 1e6 / 8))


async def _delays(kind: NetworkKind, ways: tuple[Direction, Direction]) -> list[CheckedValue]:
    pings = [[await _one_way_ms(way) for way in ways] for _ in range(PINGS)]
    there, back = ways
    return [
        _delay(kind, f"round trip {there.name.replace('→', '⇄')}", ways, [sum(ping) for ping in pings]),
        _delay(kind, f"one way {there.name}", (there,), [ping[0] for ping in pings]),
        _delay(kind, f"one way {back.name}", (back,), [ping[1] for ping in pings]),
    ]


def _delay(kind: NetworkKind, what: str, ways: Sequence[Direction], times_ms: Sequence[float]) -> CheckedValue:
    """The median of the times that these directions took together."""
    jitter_ms = sum(way.shape.jitter_ms for way in ways) / 2
    nominal_ms = jitter_ms + sum(way.shape.delay_ms + way.shape.transmit_s(PING_PACKET_BYTES) * 1e3 for way in ways)
    slack_ms = len(ways) * DELAY_BOUND_MS[kind] + DELAY_BOUND * nominal_ms + jitter_ms
    return CheckedValue(what, "ms", nominal_ms, median(times_ms), nominal_ms - slack_ms, nominal_ms + slack_ms)


async def _one_way_ms(way: Direction) -> float:
    start_s = time.monotonic()
    way.writer.write(PING)
    await way.reader.readexactly(len(PING))
    return (time.monotonic() - start_s) * 1e3


async def _goodput(way: Direction, warm_s: float) -> float:
    """Bulk transfer in Mbit/s of payload, once TCP has opened its window."""

    async def send() -> None:
        while True:
            way.writer.write(CHUNK)
            await way.writer.drain()

    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send())
        await _count(way.reader, warm_s)
        rates = [await _count(way.reader, WINDOW_S) for _ in range(WINDOWS)]
        sending.cancel()
    return median(rates)


async def _count(reader: asyncio.StreamReader, for_s: float) -> float:
    """Mbit/s of what comes during this time."""
    size_bytes, start_s, spent_s = 0, time.monotonic(), 0.0
    while not size_bytes or spent_s < for_s:
        size_bytes += len(await reader.read(len(CHUNK)))
        spent_s = time.monotonic() - start_s
    return size_bytes * 8e-6 / spent_s


def sheet(net: Network, results: Sequence[CheckedValue]) -> Sheet:
    made = Sheet(
        "network",
        f"{net.kind} network of {net.plan.hosts} hosts",
        ("what", "nominal", "measured", "accepted", ""),
        notes=[f"{net.kind}: {net.reason}; TCP congestion control {_congestion_control()}"],
        measured=summary(net, results),
    )
    for result in results:
        cells = (f"{result.nominal:.2f}", f"{result.measured:.2f} {result.unit}", f"{result.low:.2f}–{result.high:.2f}")
        made.rows.append((result.what, *cells, "ok" if result.is_good else "OFF"))
    return made


def summary(net: Network, results: Sequence[CheckedValue]) -> dict[str, Any]:
    """The network and what was measured, for JSON."""
    return {
        "kind": net.kind,
        "reason": net.reason,
        "plan": asdict(net.plan),
        "congestion_control": _congestion_control(),
        "measured": [asdict(result) for result in results],
    }


def _congestion_control() -> str | None:
    return CONGESTION_CONTROL.read_text().strip() if CONGESTION_CONTROL.exists() else None


async def _run(options: Options, console: Console) -> bool:
    """Whether all that was measured is good."""
    shape = LinkShape(options.delay_ms, options.mbit, options.jitter_ms, options.loss, options.queue_ms)
    async with open_network(NetworkPlan(options.hosts, shape, options.seed, options.mtu), options.kind) as net:
        results = await check(net)
    sheet(net, results).finish(console, options)
    return all(result.is_good for result in results)


def main() -> None:
    """Entry point; fails if a value is off."""
    try:
        good = asyncio.run(_run(tyro.cli(Options, config=CHOICES), make_console()))
    except (SwarmError, OSError) as error:
        print(f"network: {plain_line(str(error))}", file=sys.stderr)  # noqa: T201 - the command line's own output
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if good else 1)
