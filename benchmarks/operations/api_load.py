"""Does `client api` serve many clients for long, each with the right text and in fair turns?

The demo's three nodes and `client api` run as programs on loopback. Clients with several keys ask for chat completions
and completions, streamed and not streamed in turn; each prompt's text was made before by the library, without a draft.
One more client asks for a long answer again and again and goes away in the middle. All obey Retry-After.

    python -m benchmarks api_load --record
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import psutil
import torch
import tyro
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.emulation.swarm import SPANS, covered, local_swarm
from benchmarks.operations.api_clients import KnownRequest, LeavingClient, LoadCounts, NodeWatch, SteadyClient
from benchmarks.operations.api_program import ApiProgram, api_program
from benchmarks.sheet import Recording, Sheet
from client.library.aio import AsyncSwarm
from client.options import GenerateOptions
from swarm.demo import PASSAGES, TARGET
from swarm.errors import SwarmError
from swarm.runtime.cli import make_console
from swarm.runtime.library_logging import quiet_libraries
from swarm.runtime.tasks import TaskScope

LOOK_S = 5.0
"""Between looks at the programs' memory."""
WARM_UP = 0.2
"""The fraction of the time that memory is not judged in: caches fill."""
PROMPT_WORDS = 24
FREED_LIMIT_MS = 1_000
FAIR_LIMIT = 0.5
FLAT_LIMIT = 0.05
"""Growth of a program's memory after warming up, at most, as a fraction."""
ROOM_S = 10.0
"""Within which everything is free after the last client has gone."""


def anonymous_mb(processes: Iterable[psutil.Process]) -> float:
    """Anonymous memory of all of them together.

    Raises:
        OSError: one has ended.
    """
    total = 0
    for process in processes:
        found = re.search(
            r"^Anonymous:\s+(\d+) kB", Path(f"/proc/{process.pid}/smaps_rollup").read_text(), re.MULTILINE
        )
        if found is None:
            raise ProcessLookupError(f"process {process.pid} has no memory any more")
        total += int(found[1]) * 1024
    return total / 1e6


def note_memory(programs: Mapping[str, int], at_s: float, found: dict[str, list[tuple[float, float]]]) -> None:
    """Add the anonymous memory of each program, its first process and all descendants, in MB; Linux only."""
    for name, pid in programs.items():
        try:
            root = psutil.Process(pid)
            found.setdefault(name, []).append((at_s, anonymous_mb([root, *root.children(recursive=True)])))
        except (psutil.NoSuchProcess, OSError):
            continue  # it ended meanwhile


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Load the API with many clients."""

    clients: int = 64
    """Clients at a time, one more that goes away not counted."""
    seconds: float = 300.0
    """How long they ask."""
    keys: int = 4
    """API keys, which clients have in turn."""
    prompts: int = 16
    """Different prompts, half of them chats."""
    new_tokens: int = 24
    """New tokens of each answer, at most."""
    leave_every_s: float = 5.0
    """Between two departures of the client that goes away."""
    waiting: int | None = None
    """Requests that may wait at the API; its own default if none is given. With fewer, some are refused."""


@dataclass(slots=True)
class LoadMeasurement:
    """All that was measured.

    Attributes:
        freed_ms: from each departure until every node was free of it.
        memory_mb: of each program and its children, by name: pairs of seconds and anonymous memory.
        left_sessions: sessions that a node still held at the end beyond those that the API keeps; the most of any.
    """

    seconds: float = 0.0
    clients: LoadCounts = field(default_factory=LoadCounts)
    tokens: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    freed_ms: list[float] = field(default_factory=list)
    memory_mb: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    left_sessions: int = 0
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def fairness(self) -> float:
        """Tokens of the slowest client over those of the fastest."""
        return min(self.tokens) / max(*self.tokens, 1)

    def growth(self, name: str) -> tuple[float, float]:
        """A program's memory after warming up and at the end, in MB: medians of a fifth of the time each."""
        after = [mb for at_s, mb in self.memory_mb[name] if WARM_UP <= at_s / self.seconds < 2 * WARM_UP]
        end = [mb for at_s, mb in self.memory_mb[name] if at_s / self.seconds >= 1 - WARM_UP]
        return (median(after), median(end)) if after and end else (0.0, 0.0)


async def known_requests(swarm: AsyncSwarm, options: Options) -> list[KnownRequest]:
    """Requests, chats and texts in turn, greedy and drawn; the library makes their answers without a draft."""
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()
    found = []
    for number in range(options.prompts):
        prompt = " ".join(json.loads(lines[number % len(lines)])["text"].split()[:PROMPT_WORDS])
        sampling = {"temperature": 0.7 * (number // 2 % 2), "seed": number}
        given: GenerateOptions = {**sampling, "max_new_tokens": options.new_tokens, "nodes": 0}  # type: ignore[typeddict-item]
        body = {**sampling, "max_tokens": options.new_tokens}
        if number % 2:
            result = await swarm.generate(prompt, **given)
            found.append(KnownRequest("/v1/completions", {**body, "prompt": prompt}, result.text))
        else:
            async with swarm.chat(**given) as chat:
                result = await chat.say(prompt)
            message = {"role": "user", "content": prompt}
            found.append(KnownRequest("/v1/chat/completions", {**body, "messages": [message]}, result.text))
    return found


async def measure(options: Options, folder: Path, console: Console) -> LoadMeasurement:
    """Start everything, let the clients ask, and end everything.

    Raises:
        SwarmError: a program did not start.
    """
    keys = [f"benchmark-key-{number}" for number in range(options.keys + 1)]
    bounds = [] if options.waiting is None else ["--waiting", str(options.waiting)]
    async with AsyncExitStack() as stack:
        peer, nodes = await stack.enter_async_context(local_swarm(folder))
        for node in nodes:
            await node.wait_for("serving at")
        connecting = AsyncSwarm.connect(TARGET, peers=[peer], threads=1, calibration=None)
        swarm = await stack.enter_async_context(connecting)
        await covered(swarm)
        requests = await known_requests(swarm, options)
        console.print(f"{len(requests)} texts are known")
        api = await stack.enter_async_context(api_program(peer, folder, keys, *bounds))
        programs = {"API": api.running.process.pid}
        programs |= {f"node {span}": node.process.pid for span, node in zip(SPANS, nodes, strict=True)}
        running = RunningApi(api, keys, await NodeWatch.of(swarm), programs)
        found = await running.load(options, requests)
        found.left_sessions, found.counts = await running.left()
    return found


@dataclass(frozen=True, slots=True)
class RunningApi:
    """Everything that runs.

    Attributes:
        keys: it takes; the last one is that of the client that goes away.
        programs: process ids of those whose memory is looked at, by name.
    """

    api: ApiProgram
    keys: Sequence[str]
    watch: NodeWatch
    programs: dict[str, int]

    async def load(self, options: Options, requests: Sequence[KnownRequest]) -> LoadMeasurement:
        """Let the clients ask for so long; all of them go away at the end."""
        found, memory_mb = LoadMeasurement(), dict[str, list[tuple[float, float]]]()
        async with AsyncExitStack() as stack:
            *steady, away = [await stack.enter_async_context(self.api.http(key)) for key in self.keys]
            clients = [
                SteadyClient(steady[place % len(steady)], _turned(requests, place), found.clients)
                for place in range(options.clients)
            ]
            leaver = LeavingClient(away, self.watch, found.clients)
            began = time.monotonic()
            async with TaskScope() as scope:
                for client in clients:
                    scope.spawn(client.ask_on())
                scope.spawn(leaver.leave_on(options.leave_every_s))
                while (at_s := time.monotonic() - began) < options.seconds:
                    await asyncio.to_thread(note_memory, self.programs, at_s, memory_mb)
                    await asyncio.sleep(min(LOOK_S, options.seconds / 20))
            found.seconds = time.monotonic() - began
        found.tokens = [client.tokens for client in clients]
        found.answers = [client.answers for client in clients]
        found.freed_ms, found.memory_mb = leaver.freed_ms, memory_mb
        return found

    async def left(self) -> tuple[int, dict[str, float]]:
        """Sessions that are left some time after all clients have gone, and the API's own figures."""
        until = time.monotonic() + ROOM_S
        while True:
            counts = await self._figures()
            busy = int(counts["canopy_api_running"] + counts["canopy_api_waiting"])
            infos = await self.watch.infos()
            left = max(busy, *(one.sessions - int(counts["canopy_api_kept_sessions"]) for one in infos))
            if left <= 0 or time.monotonic() > until:
                return left, counts
            await asyncio.sleep(0.1)

    async def _figures(self) -> dict[str, float]:
        async with self.api.http(self.keys[0]) as http:
            page = (await http.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        return {sample.name: sample.value for sample in samples if not sample.labels}


def _turned(requests: Sequence[KnownRequest], place: int) -> list[KnownRequest]:
    start = place % len(requests)
    return [*requests[start:], *requests[:start]]


def sheet(found: LoadMeasurement, options: Options) -> Sheet:
    met = found.clients
    made = Sheet(
        "api_load",
        f"{options.clients} clients with {options.keys} keys at `client api` for {found.seconds:.0f} s, three nodes on "
        f"loopback, answers of {options.new_tokens} tokens",
        ("what", "measured", "asked"),
    )
    answers = met.right + len(met.wrong)
    made.rows += [
        ("answers", f"{answers:,}, {met.streamed:,} of them streamed", ""),
        ("answers with another text", str(len(met.wrong)), "0"),
        ("errors", str(len(met.errors)), "0"),
        ("429 with Retry-After, obeyed", f"{met.refused:,}", ""),
        ("tokens/s of all clients", f"{sum(found.tokens) / found.seconds:.1f}", ""),
        ("tokens of the slowest / the fastest client", f"{found.fairness:.2f}", f"≥ {FAIR_LIMIT}"),
        ("clients that went away", str(len(found.freed_ms)), ""),
    ]
    if found.freed_ms:
        told = f"{median(found.freed_ms):,.0f} (most {max(found.freed_ms):,.0f})"
        made.rows.append(("until every node was free of one, ms", told, f"≤ {FREED_LIMIT_MS:,}"))
    made.rows.append(("sessions left at the end, of none that is kept", str(found.left_sessions), "0"))
    for name in found.memory_mb:
        after, end = found.growth(name)
        told = f"{after:.0f} → {end:.0f} ({end / max(after, 1.0) - 1:+.1%})"
        made.rows.append((f"memory of {name}, MB", told, f"≤ {FLAT_LIMIT:+.0%}"))
    made.notes = [
        "Memory is anonymous memory of a program and its children: the median of the second fifth of the time and of "
        "the last one.",
        *(f"Error: {text}" for text in met.errors[:3]),
        *(f"Another text: {text}" for text in met.wrong[:3]),
    ]
    made.measured = {"options": asdict(options) | {"json": None}, **asdict(found)}
    return made


def misses(found: LoadMeasurement) -> list[str]:
    """What is not as it was asked for; empty where all is."""
    missed = [f"{len(found.clients.errors)} errors"] if found.clients.errors else []
    missed += [f"{len(found.clients.wrong)} answers with another text"] if found.clients.wrong else []
    missed += [f"the slowest client has {found.fairness:.2f} of the fastest"] if found.fairness < FAIR_LIMIT else []
    slow = [ms for ms in found.freed_ms if ms > FREED_LIMIT_MS]
    missed += [f"{len(slow)} of {len(found.freed_ms)} departures freed late"] if slow or not found.freed_ms else []
    missed += [f"{found.left_sessions} sessions are left"] if found.left_sessions else []
    for name in found.memory_mb:
        after, end = found.growth(name)
        missed += [f"memory of {name} grew by {end / after - 1:.1%}"] if end > after * (1 + FLAT_LIMIT) else []
    return missed


def main() -> None:
    """Measure, print, and fail where something is not as it was asked for."""
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    quiet_libraries()
    console = make_console()
    try:
        with tempfile.TemporaryDirectory(prefix="canopy-api-load-") as folder:
            found = asyncio.run(measure(options, Path(folder), console))
    except SwarmError as error:
        raise SystemExit(f"api_load: {error}") from None
    sheet(found, options).finish(console, options)
    if missed := misses(found):
        raise SystemExit(f"api_load: {'; '.join(missed)}")
