"""What does a relay cost the machine that lends it?

A relay runs as `swarm bootstrap` runs it, in a process of its own, on loopback. One machine stands at it and answers 20
circuits. In each row 19 of them carry as much as the relay lends, and the last one sends 8 KiB there and back, which is
timed. CPU and memory are those of the relay's process, read from outside.

    python -m benchmarks relay_cost --record
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
import tyro
from rich.console import Console

from benchmarks.sheet import Sheet
from swarm.discovery.identity import Identity
from swarm.errors import SwarmError
from swarm.relay.child import RelaySettings
from swarm.relay.presence import prove_presence
from swarm.relay.process import RelayProcess, relay_process
from swarm.runtime.console import make_console
from swarm.runtime.tasks import TaskScope

HOST = "127.0.0.1"
PIECE = 65_536
TALK = 8_192
UNLIMITED_MBIT = 100_000.0
ALONE_S = 1.0
"""For how long the delay is measured while nothing else moves."""
PAUSE_S = 0.2
"""Between pieces of the circuit that is timed: it takes less than its share."""
WARM_UP_S = 2.0
"""Until buffers are full, and what a relay that was idle gives at once is over."""

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Options:
    """Measure what a relay costs."""

    lent_mbit: tuple[float, ...] = (20.0, 100.0, 400.0, UNLIMITED_MBIT)
    """What the relay lends, in Mbit/s, one row each; the last stands for no limit."""
    circuits: int = 20
    """Circuits, the one that is timed among them."""
    seconds: float = 12.0
    """Of each row."""
    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it."""
    json: Path | None = None
    """Write the measurements into this file."""


@dataclass(frozen=True, slots=True)
class RelayMeasurement:
    """One row.

    Attributes:
        mbit_per_s: carried by all circuits.
        cpu: seconds of the relay's process per second.
        pss_mb: memory of the relay's process, its share of what it shares included.
        fairness: the least that a circuit carried, divided by the most.
        idle_ms: 8 KiB there and back through the relay while nothing else moves, the same without it subtracted.
        busy_ms: the same while all others carry.
    """

    mbit_per_s: float
    cpu: float
    pss_mb: float
    fairness: float
    idle_ms: float
    busy_ms: float

    @property
    def cpu_per_100_mbit(self) -> float:
        """Seconds of the process per second at 100 Mbit/s."""
        return self.cpu / self.mbit_per_s * 100


@asynccontextmanager
async def connected(port: int, line: str) -> AsyncIterator[Ends]:
    """A connection that has said a line."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(line.encode())
        yield reader, writer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def machine_at(relay: RelayProcess, owner: Identity, got: list[int]) -> AsyncIterator[Identity]:
    """A machine that stands at the relay. It echoes what circuit 0 brings, and counts and drops what others bring.

    Raises:
        SwarmError: the relay does not take it.
    """
    who = Identity.ephemeral()
    async with connected(relay.port, f"HERE {who.peer_id}\n") as (reader, writer), TaskScope() as scope:
        *_, nonce = (await reader.readline()).decode().split()
        key, signature = prove_presence(who, owner.peer_id, bytes.fromhex(nonce))
        writer.write(f"PROOF {key} {signature}\n".encode())
        if not (await reader.readline()).startswith(b"OK "):
            raise SwarmError("the relay did not take the machine")

        async def take(token: str) -> None:
            async with connected(relay.port, f"TAKE {token}\n") as ends:
                await answer(*ends, got)

        async def listen() -> None:
            while line := (await reader.readline()).decode().split():
                if line == ["PING"]:
                    writer.write(b"PONG\n")
                else:
                    scope.spawn(take(line[1]))

        scope.spawn(listen())
        yield who


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, got: list[int]) -> None:
    """Echo pieces of 8 KiB, or count; the first byte says which circuit this is."""
    number = (await reader.readexactly(1))[0]
    while data := await (reader.read(PIECE) if number else reader.readexactly(TALK)):
        got[number] += len(data)
        if not number:
            writer.write(data)


async def talk(ends: Ends, seconds: float, pause_s: float = 0.02) -> float:
    """Milliseconds for 8 KiB there and back, again and again for some seconds; the median."""
    took: list[float] = []
    reader, writer = ends
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        writer.write(bytes(TALK))
        await reader.readexactly(TALK)
        took.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(pause_s)
    return median(took)


async def send(ends: Ends) -> None:
    """Send for ever."""
    piece = bytes(PIECE)
    while True:
        ends[1].write(piece)
        await ends[1].drain()


async def direct_ms(seconds: float) -> float:
    """8 KiB there and back over loopback without a relay."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer, [0])
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(serve, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connected(port, "\0") as ends:
            return await talk(ends, seconds)


async def measure(mbit: float, options: Options) -> RelayMeasurement:
    """One row.

    Raises:
        SwarmError: the relay does not start, or refuses somebody.
    """
    owner = Identity.ephemeral()
    base_ms = await direct_ms(ALONE_S)
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(relay_process(owner, RelaySettings(owner.peer_id, mbit, HOST)))
        got = [0] * options.circuits
        who = await stack.enter_async_context(machine_at(relay, owner, got))

        async def circuit(number: int) -> Ends:
            opening = f"CONNECT {who.peer_id}:1 HTTP/1.1\r\n\r\n"
            ends = await stack.enter_async_context(connected(relay.port, opening))
            if not (await ends[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 "):
                raise SwarmError("the relay refused a circuit")
            ends[1].write(bytes([number]))
            return ends

        talker, *others = [await circuit(number) for number in range(options.circuits)]
        idle_ms = await talk(talker, ALONE_S)
        async with TaskScope() as scope:
            for ends in others:
                scope.spawn(send(ends))
            await asyncio.sleep(WARM_UP_S)
            process, before = psutil.Process(relay.pid), list(got)
            cpu, began = sum(process.cpu_times()[:2]), time.monotonic()
            busy_ms = await talk(talker, options.seconds, PAUSE_S)
            seconds = time.monotonic() - began
            cpu = sum(process.cpu_times()[:2]) - cpu
            carried = [now - then for now, then in zip(got, before, strict=True)][1:]
            pss_mb = process.memory_full_info().pss / 1e6
    return RelayMeasurement(
        mbit_per_s=sum(carried) / 125_000 / seconds,
        cpu=cpu / seconds,
        pss_mb=pss_mb,
        fairness=min(carried) / max(max(carried), 1),
        idle_ms=idle_ms - base_ms,
        busy_ms=busy_ms - base_ms,
    )


def sheet(found: dict[float, RelayMeasurement], options: Options) -> Sheet:
    """The table."""
    made = Sheet(
        "relay_cost",
        f"A relay with {options.circuits} circuits on loopback, {options.seconds:.0f} s each",
        (
            "lent, Mbit/s",
            "carried",
            "CPU, of a core",
            "CPU per 100 Mbit/s",
            "memory, MB",
            "least / most of a circuit",
            "8 KiB and back, idle, extra ms",
            "the same, all others busy",
        ),
        measured={"options": asdict(options) | {"json": None}},
    )
    for mbit, one in found.items():
        lent = "no limit" if mbit >= UNLIMITED_MBIT else f"{mbit:g}"
        cpu = (f"{one.cpu:.1%}", f"{one.cpu_per_100_mbit:.1%}")
        times = (f"{one.idle_ms:.2f}", f"{one.busy_ms:.2f}")
        made.rows.append((lent, f"{one.mbit_per_s:,.0f}", *cpu, f"{one.pss_mb:.0f}", f"{one.fairness:.2f}", *times))
        made.measured[f"{mbit:g}"] = asdict(one)
    made.notes.append(
        "CPU and memory (PSS) of the relay's process. Times are medians, less the same over loopback without a relay. "
        "The circuit that is timed takes less than its share. Without a limit the senders' own process, which is also "
        "the machine's, is the bottleneck, and the last delay is its."
    )
    return made


async def _run(options: Options, console: Console) -> dict[float, RelayMeasurement]:
    found = {}
    for mbit in options.lent_mbit:
        found[mbit] = one = await measure(mbit, options)
        console.print(f"{mbit:g} Mbit/s lent: {one.mbit_per_s:,.0f} carried, {one.cpu:.1%} of a core")
    return found


def main() -> None:
    """Measure and print."""
    options = tyro.cli(Options)
    console = make_console()
    try:
        found = asyncio.run(_run(options, console))
    except SwarmError as error:
        raise SystemExit(f"relay_cost: {error}") from None
    sheet(found, options).finish(console, record=options.record, path=options.json)


if __name__ == "__main__":
    main()
