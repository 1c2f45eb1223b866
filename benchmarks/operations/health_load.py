"""What does `swarm health` cost with 1,000 nodes and a history of 30 days?

    python -m benchmarks health_load --record

A real mosquitto and a real bootstrap peer; the nodes are simulated in this process, each with a key of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiomqtt
import psutil
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.operations.health_nodes import SimulatedNode, simulate
from benchmarks.sheet import Recording, Sheet
from client.demo.programs import start_program
from swarm.discovery.identity import Identity
from swarm.errors import ConfigError
from swarm.health.state.model_slots import MAX_MODELS
from swarm.health.state.verdict import Grade
from swarm.health.tasks.history import WINDOWS, History, Sample
from swarm.runtime.cli import make_console
from swarm.runtime.tasks import TaskScope
from swarm.telemetry.messages import METRICS_S, Presence

CONNECTIONS = 10
SHOWN_S = 5.0
PATIENCE_S = 60.0
PAUSE_S = 0.25
"""Between two queries."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure the health service under load."""

    nodes: int = 1_000
    """How many nodes."""
    seconds: float = 60.0
    """Seconds that count."""
    readers: int = 20
    """Readers of the live stream."""
    models: tuple[int, ...] = (1, 8)
    """Over how many models the nodes are spread; one run for each."""
    most: int = MAX_MODELS
    """Models of the largest history."""


@dataclass(slots=True)
class HealthRun:
    """What was seen in one run.

    Attributes:
        cpu_cores: CPU seconds of the health process per second.
        pss_bytes: Its memory at the end (PSS).
        tree_pss_bytes: The same with its DHT processes.
        state_bytes: One state in the live stream.
        query_ms: Times of HTTP requests, by path.
        gaps_ms: From one state to the next, at one reader.
        shown_ms: From a node's new state to its arrival in the stream.
        history_bytes: The history file before the run.
        is_over: All tasks end when this is set.
    """

    cpu_cores: float = 0.0
    pss_bytes: int = 0
    tree_pss_bytes: int = 0
    state_bytes: int = 0
    query_ms: dict[str, list[float]] = field(default_factory=dict)
    frames: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    shown_ms: list[float] = field(default_factory=list)
    messages: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    nodes_shown: int = 0
    history_bytes: int = 0
    is_over: bool = False

    def series(self) -> dict[str, list[float]]:
        """Everything of which there are many."""
        usual = {"between updates, ms": self.gaps_ms, "change to update, ms": self.shown_ms}
        return {**usual, **{f"{name}, ms": times for name, times in self.query_ms.items()}}


def fingerprints(count: int) -> list[str]:
    return [f"ab12{number:060x}" for number in range(count)]


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def mosquitto(folder: Path, port: int) -> Iterator[None]:
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


async def publish_all(nodes: list[SimulatedNode], port: int, ready: asyncio.Event, measured: HealthRun) -> None:
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


async def read(url: str, measured: HealthRun, watched: str, published: dict[str, float], first: bool) -> None:
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
                _look(line, watched, published, measured)
    finally:
        writer.close()


def _look(line: bytes, watched: str, published: dict[str, float], measured: HealthRun) -> None:
    where = line.find(watched.encode())
    state = line.find(b'"state":"', where)
    shown = line[state + 9 : state + 25].partition(b'"')[0].decode()
    if where >= 0 and shown in published:
        measured.shown_ms.append((time.monotonic() - published.pop(shown)) * 1e3)


async def change(node: SimulatedNode, port: int, published: dict[str, float], measured: HealthRun) -> None:
    """Let one node change its state again and again."""
    async with aiomqtt.Client("127.0.0.1", port, timeout=PATIENCE_S) as client:
        while not measured.is_over:
            for state in (Presence.DRAINING, Presence.SERVING):
                published[state.value] = time.monotonic()
                await client.publish(*node.sealed(node.status(state)), qos=1, retain=True)
                await asyncio.sleep(SHOWN_S)


def fetch(url: str) -> tuple[bytes, float]:
    """An answer, and how long it took in milliseconds."""
    started = time.perf_counter()
    with urllib.request.urlopen(url, timeout=10) as answer:
        data: bytes = answer.read()
    return data, (time.perf_counter() - started) * 1e3


def queries(url: str, prints: list[str], turn: int) -> dict[str, str]:
    """All that can be asked, of another model in each turn."""
    model = prints[turn % len(prints)]
    history = {f"history of {window}": f"{url}api/v1/history?model={model}&window={window}" for window in WINDOWS}
    return {"/api/v1/state": f"{url}api/v1/state", **history, "/api/v1/alerts": f"{url}api/v1/alerts"}


async def load(options: Options, nodes: list[SimulatedNode], folder: Path, measured: HealthRun) -> None:
    """Run everything for a while, and look at the health service's process."""
    port = free_port()
    with mosquitto(folder, port):
        arguments = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "key")]
        async with start_program("bootstrap", arguments, folder) as bootstrap:
            peer = await bootstrap.wait_for(r"/ip4/\S+")
            arguments = ["swarm.cli", "health", "--join", peer, "--mqtt", f"mqtt://127.0.0.1:{port}", "--port", "0"]
            arguments += ["--probe-every", "0", "--data", str(folder / "health.sqlite3")]
            async with start_program("health", arguments, folder) as health:
                url = (await health.wait_for(r"http://\S+/")).rstrip()
                await _run(options, nodes, (port, url, psutil.Process(health.process.pid)), measured)


async def _run(
    options: Options, nodes: list[SimulatedNode], where: tuple[int, str, psutil.Process], measured: HealthRun
) -> None:
    port, url, process = where
    published: dict[str, float] = {}
    async with TaskScope() as scope:
        ready = [asyncio.Event() for _ in range(CONNECTIONS)]
        for number, event in enumerate(ready):
            scope.spawn(publish_all(nodes[1 + number :: CONNECTIONS], port, event, measured))
        for event in ready:
            await event.wait()
        for number in range(options.readers):
            scope.spawn(read(url, measured, nodes[0].identity.peer_id, published, number == 0))
        scope.spawn(change(nodes[0], port, published, measured))
        await asyncio.sleep(2 * METRICS_S)
        measured.frames = 0
        measured.gaps_ms.clear()
        before, started, messages = process.cpu_times(), time.monotonic(), measured.messages
        state = await _ask(options, url, sorted({node.fingerprint for node in nodes}), measured)
        after, seconds = process.cpu_times(), time.monotonic() - started
        measured.messages -= messages
        measured.cpu_cores = (after.user + after.system - before.user - before.system) / seconds
        measured.pss_bytes = process.memory_full_info().pss
        family = [process, *process.children(recursive=True)]
        measured.tree_pss_bytes = sum(one.memory_full_info().pss for one in family)
        measured.refused = {reason: count for reason, count in state["refused"].items() if count}
        measured.nodes_shown = sum(node["state"] == "serving" for model in state["models"] for node in model["nodes"])
        measured.is_over = True


async def _ask(options: Options, url: str, prints: list[str], measured: HealthRun) -> dict[str, Any]:
    """Ask everything again and again; the last state."""
    started, turn, state = time.monotonic(), 0, b"{}"
    while time.monotonic() - started < options.seconds:
        for name, one in queries(url, prints, turn).items():
            data, took_ms = await asyncio.to_thread(fetch, one)
            measured.query_ms.setdefault(name, []).append(took_ms)
            state = data if name == "/api/v1/state" else state
            await asyncio.sleep(PAUSE_S)
        turn += 1
    measured.state_bytes = len(state)
    found: dict[str, Any] = json.loads(state)
    return found


async def thirty_days(prints: list[str], nodes: int, path: Path, console: Console) -> float:
    """Fill a history as it is after thirty days up to now; the slowest query of it, in milliseconds."""
    now = time.time() // 900 * 900
    finest = {window.step_s: now - window.kept_s for window in WINDOWS.values()}
    at, moments, took = now - WINDOWS["30d"].kept_s, [], []
    while at < now:
        moments.append(at)
        at += min(step_s for step_s, since in finest.items() if at >= since)
    async with History.open(path) as history:
        for moment in track(moments, f"30 days of {len(prints)} models", console=console):
            samples = [Sample(one, Grade.SERVING, 99, nodes // len(prints), 3.0, 9.9, 210.0) for one in prints]
            await history.add(samples, moment)
        for window in WINDOWS:
            for fingerprint in prints[:20]:
                started = time.perf_counter()
                json.dumps(await history.points(fingerprint, window, now))
                took.append((time.perf_counter() - started) * 1e3)
    return max(took)


def size_of(path: Path) -> int:
    """Of a database and the files beside it."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def sheet(options: Options, runs: dict[int, HealthRun], most: tuple[int, float]) -> Sheet:
    """The table. `most` is the size and the slowest query of a history of as many models as there can be."""
    made = Sheet(
        "health_load",
        f"`swarm health` with {options.nodes:,} nodes that speak every {METRICS_S:.0f} s, {options.readers} readers, "
        f"{options.seconds:.0f} s, on a history of 30 days",
        ("what", *(column for count in runs for column in (_models(count), "95 %")), "limit"),
    )
    single = [
        ("CPU, cores", [f"{run.cpu_cores:.2f}" for run in runs.values()], "1"),
        ("memory of the process, MB (PSS)", [f"{run.pss_bytes / 1e6:.0f}" for run in runs.values()], "500"),
        ("memory with its DHT processes, MB (PSS)", [f"{run.tree_pss_bytes / 1e6:.0f}" for run in runs.values()], ""),
        ("history file, MB", [f"{run.history_bytes / 1e6:.1f}" for run in runs.values()], ""),
    ]
    limits = {"between updates, ms": "", "change to update, ms": "2,000"}
    made.rows = [(name, *(cell for value in values for cell in (value, "")), limit) for name, values, limit in single]
    for name in next(iter(runs.values())).series():
        cells = [cell for run in runs.values() for cell in _cells(run.series().get(name, []))]
        made.rows.append((name, *cells, limits.get(name, "200")))
    made.notes = [
        f"{_models(count)}: {run.messages / options.seconds:.0f} signed messages/s were heard; "
        f"refused: {run.refused or 'none'}; {run.nodes_shown:,} nodes serving, in {run.state_bytes / 1e3:.0f} kB; "
        f"{run.frames / options.readers / options.seconds:.2f} updates/s to each reader."
        for count, run in runs.items()
    ]
    made.notes.append(
        f"The history of {options.most} models (the page has room for {MAX_MODELS}): {most[0] / 1e6:.0f} MB, "
        f"slowest query {most[1]:.0f} ms."
    )
    made.measured = {
        "runs": {str(count): asdict(run) for count, run in runs.items()},
        "most": {"models": options.most, "bytes": most[0], "slowest_query_ms": most[1]},
    }
    return made


def _models(count: int) -> str:
    return "1 model" if count == 1 else f"{count} models"


def _cells(values: list[float]) -> tuple[str, str]:
    if len(values) < 2:
        return "–", "–"
    return f"{median(values):.0f}", f"{quantiles(values, n=20, method='inclusive')[-1]:.0f}"


async def measure(options: Options, console: Console) -> tuple[dict[int, HealthRun], tuple[int, float]]:
    """Every run, and the largest history."""
    runs: dict[int, HealthRun] = {}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        made = (threads.submit(Identity.ephemeral) for _ in range(options.nodes))
        keys = [one.result() for one in track(list(made), "keys", console=console)]
    with tempfile.TemporaryDirectory(prefix="canopy-health-") as name:
        for count in options.models:
            folder, run, prints = Path(name) / str(count), HealthRun(), fingerprints(count)
            folder.mkdir()
            await thirty_days(prints, options.nodes, folder / "health.sqlite3", console)
            run.history_bytes = size_of(folder / "health.sqlite3")
            console.print(f"{options.nodes:,} nodes in {_models(count)}")
            await load(options, simulate(keys, prints), folder, run)
            runs[count] = run
        full = Path(name) / "full.sqlite3"
        slowest_ms = await thirty_days(fingerprints(options.most), options.nodes, full, console)
        return runs, (size_of(full), slowest_ms)


def main() -> None:
    options, console = tyro.cli(Options, description=__doc__), make_console()
    try:
        runs, most = asyncio.run(measure(options, console))
    except ConfigError as error:
        sys.exit(f"health_load: {error}")
    sheet(options, runs, most).finish(console, options)
