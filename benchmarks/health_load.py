"""What `swarm health` costs with a thousand nodes, and how fast it answers; and thirty days of history.

python -m benchmarks.health_load --record

A real mosquitto and a real bootstrap peer; the nodes are simulated in this process, each with a key of its own.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiomqtt
import psutil
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.sheet import Sheet
from client.programs import start_program
from swarm.errors import ConfigError
from swarm.health_history import WINDOWS, History, Sample
from swarm.health_verdict import Grade
from swarm.identity import Identity
from swarm.layers import Span
from swarm.tasks import TaskScope
from swarm.telemetry import METRICS_S, Body, Metrics, Presence, ServedModel, Stamp, Status, part_of, seal_body, topic_of

LAYERS, SPAN = 80, 8
PRINT = "ab12" * 16
CONNECTIONS = 10
SHOWN_S = 5.0
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the health service under load."""

    nodes: int = 1_000
    seconds: float = 60.0
    readers: int = 20
    """Readers of the live stream."""
    models: int = 64
    """With a history of 30 days."""
    record: bool = False
    """Write the table into BENCHMARKS.md and the measurements beside it."""
    json: Path | None = None


@dataclass(slots=True)
class Simulated:
    """One node that only talks."""

    identity: Identity
    span: Span
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    started_at: float = field(default_factory=time.time)
    seq: int = 0

    def sealed(self, body: Body) -> tuple[str, bytes]:
        """Topic and payload."""
        topic = topic_of("canopy", PRINT, self.identity.peer_id, part_of(body))
        return topic, seal_body(body, topic, self.identity)

    def stamp(self) -> Stamp:
        """The next one."""
        self.seq += 1
        return Stamp(self.nonce, self.seq, time.time())

    def status(self, state: Presence = Presence.SERVING) -> Status:
        """What it is."""
        stamp = self.stamp()
        return Status(
            stamp=stamp,
            is_birth=stamp.seq == 1,
            model=ServedModel("simulated", PRINT, LAYERS),
            span=self.span,
            state=state,
            device="NVIDIA GeForce RTX 3060",
            numeric_class="cuda-bfloat16",
            version="0.1.0",
            name=f"node {self.span}",
            started_at=self.started_at,
            kv_tokens_total=100_000,
        )

    def metrics(self) -> Metrics:
        """What it has done."""
        up_s = time.time() - self.started_at
        count = int(10 * up_s)
        return Metrics(
            stamp=self.stamp(),
            uptime_s=up_s,
            sweeps=count,
            tree_nodes=60 * count,
            tokens=3 * count,
            layer_tokens=24 * count,
            bytes_in=10_000 * count,
            bytes_out=10_000 * count,
            errors=0,
            busy=0.5,
            queue_ms=0.4,
            compute_ms=21.5,
            kv_tokens_free=100_000 - count % 50_000,
            kv_tokens_total=100_000,
            sessions=count % 7,
            sweep_ms=((1, 8.2), (8, 9.9), (64, 20.0)),
            device_memory_bytes=8_000_000_000,
            device_temperature_c=61.0,
        )


@dataclass(slots=True)
class Measured:
    """Everything that was seen. shown_ms: from saying something new to reading it in the stream."""

    cpu_cores: float = 0.0
    pss_bytes: int = 0
    tree_pss_bytes: int = 0
    state_bytes: int = 0
    state_ms: list[float] = field(default_factory=list)
    frames: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    shown_ms: list[float] = field(default_factory=list)
    messages: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    nodes_shown: int = 0
    history_bytes: int = 0
    query_ms: dict[str, list[float]] = field(default_factory=dict)
    is_over: bool = False


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def mosquitto(folder: Path, port: int) -> Iterator[None]:
    """The broker."""
    config = folder / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\n")
    try:
        process = subprocess.Popen(["mosquitto", "-c", str(config)], stderr=subprocess.PIPE, text=True)
    except FileNotFoundError as error:
        raise ConfigError("needs the program mosquitto: apt-get install mosquitto") from error
    assert process.stderr is not None, "a pipe"
    try:
        next((line for line in process.stderr if "running" in line), None)
        yield
    finally:
        process.terminate()
        process.wait()


async def talk(nodes: list[Simulated], port: int, ready: asyncio.Event, measured: Measured) -> None:
    """Be some of the nodes: everybody says something every 5 s, evenly spread."""
    async with aiomqtt.Client("127.0.0.1", port, timeout=PATIENCE_S) as client:
        for node in nodes:
            await client.publish(*node.sealed(node.status()), qos=1, retain=True)
        ready.set()
        started, said = time.monotonic(), 0
        while not measured.is_over:  # Python 3.11 may lose a cancellation in the middle of publishing
            node = nodes[said % len(nodes)]
            topic, payload = node.sealed(node.metrics())
            await client.publish(topic, payload)
            said += 1
            measured.messages += 1
            await asyncio.sleep(max(started + said * METRICS_S / len(nodes) - time.monotonic(), 0.0))


async def read(url: str, measured: Measured, watched: str, told: dict[str, float], first: bool) -> None:
    """Read the live stream; the first reader also looks at one node."""
    host, _, rest = url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port), limit=2**24)
    writer.write(f"GET /{rest}api/v1/stream HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
    last_s = None
    try:
        while True:
            line = await reader.readline()
            if not line:
                raise ConfigError("the stream ended")
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            measured.frames += 1
            if first:
                measured.gaps_ms += [] if last_s is None else [(now - last_s) * 1e3]
                last_s = now
                _look(line, watched, told, measured)
    finally:
        writer.close()


def _look(line: bytes, watched: str, told: dict[str, float], measured: Measured) -> None:
    where = line.find(watched.encode())
    state = line.find(b'"state":"', where)
    shown = line[state + 9 : state + 25].partition(b'"')[0].decode()
    if where >= 0 and shown in told:
        measured.shown_ms.append((time.monotonic() - told.pop(shown)) * 1e3)


async def change(node: Simulated, port: int, told: dict[str, float], measured: Measured) -> None:
    """Let one node change its state again and again."""
    async with aiomqtt.Client("127.0.0.1", port, timeout=PATIENCE_S) as client:
        while not measured.is_over:
            for state in (Presence.DRAINING, Presence.SERVING):
                told[state.value] = time.monotonic()
                await client.publish(*node.sealed(node.status(state)), qos=1, retain=True)
                await asyncio.sleep(SHOWN_S)


def fetch(url: str) -> tuple[dict[str, Any], int, float]:
    """The state, its size, and how long it took in milliseconds."""
    started = time.perf_counter()
    with urllib.request.urlopen(f"{url}api/v1/state", timeout=10) as answer:
        data = answer.read()
    took_ms = (time.perf_counter() - started) * 1e3
    return json.loads(data), len(data), took_ms


async def load(options: Options, console: Console, folder: Path, measured: Measured) -> None:
    """Run everything for a while, and look at the health service's process."""
    keys = [Identity.ephemeral() for _ in track(range(options.nodes), "keys", console=console)]
    spans = [Span(start, start + SPAN) for start in range(0, LAYERS, SPAN)]
    nodes = [Simulated(key, spans[number % len(spans)]) for number, key in enumerate(keys)]
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(mosquitto(folder, port))
        arguments = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "key")]
        async with start_program("bootstrap", arguments, folder) as bootstrap:
            peer = await bootstrap.wait_for(r"/ip4/\S+")
            arguments = ["swarm.cli", "health", "--join", peer, "--mqtt", f"mqtt://127.0.0.1:{port}", "--port", "0"]
            arguments += ["--probe-every", "0", "--data", str(folder / "health.sqlite3")]
            async with start_program("health", arguments, folder) as health:
                url = (await health.wait_for(r"http://\S+/")).rstrip()
                await _run(options, nodes, (port, url, psutil.Process(health.process.pid)), measured)


async def _run(
    options: Options, nodes: list[Simulated], where: tuple[int, str, psutil.Process], measured: Measured
) -> None:
    port, url, process = where
    told: dict[str, float] = {}
    async with TaskScope() as scope:
        ready = [asyncio.Event() for _ in range(CONNECTIONS)]
        for number, event in enumerate(ready):
            scope.spawn(talk(nodes[1 + number :: CONNECTIONS], port, event, measured))
        for event in ready:
            await event.wait()
        for number in range(options.readers):
            scope.spawn(read(url, measured, nodes[0].identity.peer_id, told, number == 0))
        scope.spawn(change(nodes[0], port, told, measured))
        await asyncio.sleep(2 * METRICS_S)
        measured.frames = 0
        measured.gaps_ms.clear()
        before, started, messages = process.cpu_times(), time.monotonic(), measured.messages
        while time.monotonic() - started < options.seconds:
            state, measured.state_bytes, took_ms = await asyncio.to_thread(fetch, url)
            measured.state_ms.append(took_ms)
            await asyncio.sleep(0.5)
        after, seconds = process.cpu_times(), time.monotonic() - started
        measured.messages -= messages
        measured.cpu_cores = (after.user + after.system - before.user - before.system) / seconds
        measured.pss_bytes = process.memory_full_info().pss
        family = [process, *process.children(recursive=True)]
        measured.tree_pss_bytes = sum(one.memory_full_info().pss for one in family)
        measured.refused = {reason: count for reason, count in state["refused"].items() if count}
        measured.nodes_shown = sum(node["state"] == "serving" for model in state["models"] for node in model["nodes"])
        measured.is_over = True


async def thirty_days(options: Options, console: Console, folder: Path, measured: Measured) -> None:
    """Fill a history as it would be after thirty days, and ask it."""
    path, now = folder / "full.sqlite3", time.time() // 900 * 900
    finest = {window.step_s: now - window.kept_s for window in WINDOWS.values()}
    at, moments = now - WINDOWS["30d"].kept_s, []
    while at < now:
        moments.append(at)
        at += min(step_s for step_s, since in finest.items() if at >= since)
    prints = [f"{number:032x}" for number in range(options.models)]
    async with History.open(path) as history:
        for moment in track(moments, "30 days", console=console):
            samples = [Sample(one, Grade.SERVING, 99, options.nodes, 3.0, 9.9, 210.0) for one in prints]
            await history.add(samples, moment)
        for window in WINDOWS:
            measured.query_ms[window] = []
            for fingerprint in prints[:20]:
                started = time.perf_counter()
                json.dumps(await history.points(fingerprint, window, now))
                measured.query_ms[window].append((time.perf_counter() - started) * 1e3)


def sheet(options: Options, measured: Measured) -> Sheet:
    """The table."""
    made = Sheet(
        "health_load",
        f"`swarm health` with {options.nodes:,} nodes that speak every {METRICS_S:.0f} s, {options.readers} readers, "
        f"{options.seconds:.0f} s; 30 days of history of {options.models} models",
        ("what", "median", "95 %", "limit"),
    )
    p95 = {name: quantiles(values, n=20)[-1] for name, values in _series(measured).items() if len(values) > 1}
    middle = {name: median(values) for name, values in _series(measured).items() if values}
    limits = {"/api/v1/state, ms": "", "between updates, ms": "", "change to update, ms": "2,000"}
    made.rows = [
        ("CPU, cores", f"{measured.cpu_cores:.2f}", "", "1"),
        ("memory of the process, MB (PSS)", f"{measured.pss_bytes / 1e6:.0f}", "", "500"),
        ("memory with its DHT processes, MB (PSS)", f"{measured.tree_pss_bytes / 1e6:.0f}", "", ""),
        *((name, f"{middle[name]:.0f}", f"{p95.get(name, 0):.0f}", limits.get(name, "200")) for name in middle),
        ("history file, MB", f"{measured.history_bytes / 1e6:.0f}", "", ""),
    ]
    made.notes = [
        f"{measured.messages / options.seconds:.0f} signed messages/s were heard; "
        f"refused: {measured.refused or 'none'}; "
        f"{measured.nodes_shown:,} nodes serving, in {measured.state_bytes / 1e3:.0f} kB; "
        f"{measured.frames / options.readers / options.seconds:.2f} updates/s to each reader.",
    ]
    made.measured = {"measured": {name: getattr(measured, name) for name in Measured.__slots__}}
    return made


def _series(measured: Measured) -> dict[str, list[float]]:
    queries = {f"history of {window}, ms": times for window, times in measured.query_ms.items()}
    return {
        "/api/v1/state, ms": measured.state_ms,
        "between updates, ms": measured.gaps_ms,
        "change to update, ms": measured.shown_ms,
        **queries,
    }


def main() -> None:
    """Entry point."""
    options, console = tyro.cli(Options, description=__doc__), Console()
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="canopy-health-") as name:
        try:
            asyncio.run(thirty_days(options, console, Path(name), measured))
            measured.history_bytes = sum(file.stat().st_size for file in Path(name).glob("full.sqlite3*"))
            asyncio.run(load(options, console, Path(name), measured))
        except ConfigError as error:
            sys.exit(f"health_load: {error}")
    sheet(options, measured).finish(console, record=options.record, path=options.json)


if __name__ == "__main__":
    main()
