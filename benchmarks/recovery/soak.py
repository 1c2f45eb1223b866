"""Are texts right, books balanced and memory flat while machines with full KV come and go?

Two machines per span of the demo model are programs on loopback, with so little KV that the pools of kept texts are
full all the time. Chats with one system prompt under two keys, long prompts, short ones and readers who leave share
them; greedy and sampled texts alternate. Meanwhile one machine after the other is killed, or leaves, and comes back:
one column of them in the first half, the other in the second, so that each has a half in which its memory is watched.
The seed says who asks what and who is struck. Then every text is made again, alone and with nothing kept.

    python -m benchmarks soak --record
    python -m benchmarks soak --minutes 2
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import linear_regression
from typing import Any

import psutil
import torch
import tyro
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.emulation.swarm import covered
from benchmarks.sheet import Recording, Sheet
from client.api.backend import ApiCaller, Delta, Finished, TextJob
from client.api.sessions import SessionLimits
from client.api.swarm_backend import BackendLimits, SwarmBackend
from client.api.swarm_link import SwarmSource
from client.base.options import GenerateOptions
from client.library.aio import AsyncSwarm
from client.tools.demo.programs import RunningProgram, start_program
from swarm.base.cli import make_console
from swarm.base.errors import RegistryError, SwarmError
from swarm.base.library_logging import quiet_libraries
from swarm.base.tasks import TaskScope
from swarm.demo import DRAFT, PASSAGES, TARGET

SPANS = ("0-6", "6-12")
COLUMNS = ("a", "b")
KEYS = ("one-key", "another-key")
SYSTEM_TOKENS, CHAT_TOKENS, LONG_TOKENS = 200, 800, 1_000
ATTEMPTS = 3
"""A text that is interrupted is asked for again, as its user would; a program that does not start is started again."""
STRIKE_S = (8.0, 20.0)
"""Between a machine's return and the next strike."""
THINK_S = (0.5, 3.0)
WARM_UP_S = 60.0
"""A process's memory counts from so long after its start."""
SETTLE_S = 45.0
"""In which sessions whose client is gone must be over."""
SAMPLE_S = 2.0
SLOPE_LIMIT = 1.0
"""MB per minute."""
REFERENCES = 3
"""Texts that are made again at a time."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Load a swarm whose machines come and go, and check everything afterwards."""

    minutes: float = 10.0
    """Of load and churn; to make all texts again takes about as long."""
    kv_tokens: int = 3_072
    """KV of each machine; the load reserves about as much, and its texts would fill more."""
    seed: int = 0
    """Of prompts, options, pauses and strikes."""
    logs: Path | None = None
    """Keep the programs' output in this folder."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one reader wants.

    Attributes:
        kind: of reader.
        ids: token ids of the prompt.
        leaves_after: so many tokens the reader leaves; None: it reads all.
    """

    kind: str
    key: str
    ids: tuple[int, ...]
    options: GenerateOptions
    leaves_after: int | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """One text as its reader got it.

    Attributes:
        tokens: of the answer, as many as came.
        reused: of the prompt, tokens that no machine computed for it.
        repairs: of its chain.
        is_whole: whether its reader stayed.
    """

    asked: Asked
    tokens: tuple[int, ...]
    reused: int = 0
    repairs: int = 0
    is_whole: bool = False


@dataclass(slots=True)
class Machine:
    """One node and its program, which is started anew when it was struck."""

    span: str
    column: str
    starts: int = 0
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    program: RunningProgram | None = None

    @property
    def name(self) -> str:
        return f"{self.span} {self.column}"


class Machines:
    """All of them."""

    def __init__(self, peer: str, folder: Path, kv_tokens: int) -> None:
        self.all = [Machine(span, column) for span in SPANS for column in COLUMNS]
        self._peer = peer
        self._folder = folder
        self._kv_tokens = kv_tokens

    async def start(self, machine: Machine) -> None:
        machine.starts += 1
        serve = ["benchmarks.recovery.soak_node", "serve", str(TARGET), "--layers", machine.span, "--join", self._peer]
        serve += ["--host", "127.0.0.1", "--threads", "1", "--device", "cpu", "--kv-tokens", str(self._kv_tokens)]
        serve += ["--identity", str(self._folder / f"{machine.name}.key"), "--drain", "10"]
        for attempt in range(ATTEMPTS):  # where gRPC's threads run in this process, a fork fails now and then
            name = f"{machine.name} {machine.starts}.{attempt}"
            machine.program = await machine.stack.enter_async_context(start_program(name, serve, self._folder))
            try:
                await machine.program.wait_for("serving at")
                return
            except RegistryError:
                if attempt + 1 == ATTEMPTS:
                    raise

    async def strike(self, machine: Machine, number: signal.Signals) -> None:
        """Kill a machine, or let it leave, and start it again."""
        assert machine.program is not None
        machine.program.process.send_signal(number)
        await machine.program.process.wait()
        await machine.stack.aclose()
        await self.start(machine)

    async def whole(self) -> None:
        """Whoever was struck last is started again, or serves soon."""
        for machine in self.all:
            assert machine.program is not None
            if machine.program.process.returncode is not None:
                await machine.stack.aclose()
                await self.start(machine)
            await machine.program.wait_for("serving at")

    async def books(self, machine: Machine) -> dict[str, Any]:
        """What a machine says of its sessions and its pool."""
        assert machine.program is not None
        before = len(self._said(machine))
        machine.program.process.send_signal(signal.SIGUSR1)
        for _ in range(int(SETTLE_S / 0.1)):
            await asyncio.sleep(0.1)
            if len(said := self._said(machine)) > before:
                return dict(json.loads(said[-1]))
        raise RegistryError(f"{machine.name} does not say what it holds")

    def tracebacks(self) -> int:
        """Of all programs that ran."""
        return sum(log.read_text().count("Traceback") for log in self._folder.glob("*.log"))

    @staticmethod
    def _said(machine: Machine) -> list[str]:
        assert machine.program is not None
        return re.findall(r"^books: (\{.*\})$", machine.program.log.read_text(), re.MULTILINE)


@asynccontextmanager
async def open_machines(folder: Path, kv_tokens: int) -> AsyncIterator[tuple[str, Machines]]:
    async with AsyncExitStack() as stack:
        boot = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "boot.key")]
        bootstrap = await stack.enter_async_context(start_program("bootstrap", boot, folder))
        peer = await bootstrap.wait_for(r"/ip4/\S+")
        machines = Machines(peer, folder, kv_tokens)
        try:
            async with asyncio.TaskGroup() as group:
                for machine in machines.all:
                    group.create_task(machines.start(machine))
            yield peer, machines
        finally:
            for machine in machines.all:
                await machine.stack.aclose()


def passages() -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()
    return [token for line in lines for token in tokenizer(json.loads(line)["text"])["input_ids"]]


class Load:
    """Who asks, and what was answered.

    Attributes:
        told: every text that was read to its end, or until its reader left.
        again: how often a text was asked for once more, by why.
        refused: texts that were not told in `ATTEMPTS`.
    """

    def __init__(self, backend: SwarmBackend, ids: Sequence[int], options: Options) -> None:
        self.told: list[Told] = []
        self.again: Counter[str] = Counter()
        self.refused: list[str] = []
        self._backend = backend
        self._ids = ids
        self._seed = options.seed
        self._until = time.monotonic() + 60 * options.minutes

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(self._chat(random.Random(f"{self._seed} chat {number}"), KEYS[number % 2]))
            group.create_task(self._prompts(random.Random(f"{self._seed} long"), "long", LONG_TOKENS))
            group.create_task(self._prompts(random.Random(f"{self._seed} short"), "short", 60))
            group.create_task(self._prompts(random.Random(f"{self._seed} leaves"), "leaves", 300))

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._until

    async def _chat(self, rng: random.Random, key: str) -> None:
        """Conversations: each turn's prompt is all that was said, and a little more."""
        system = self._ids[:SYSTEM_TOKENS]
        while not self._is_over:
            said = [*system, *self._passage(rng, rng.randint(20, 80))]
            while len(said) < CHAT_TOKENS and not self._is_over:
                answer = await self._ask(rng, "chat", key, said)
                said += [*answer, *self._passage(rng, rng.randint(20, 80))]
                await asyncio.sleep(rng.uniform(*THINK_S))

    async def _prompts(self, rng: random.Random, kind: str, tokens: int) -> None:
        while not self._is_over:
            await self._ask(rng, kind, rng.choice(KEYS), self._passage(rng, rng.randint(tokens // 2, tokens)))
            await asyncio.sleep(rng.uniform(*THINK_S))

    def _passage(self, rng: random.Random, tokens: int) -> Sequence[int]:
        start = rng.randrange(len(self._ids) - tokens)
        return self._ids[start : start + tokens]

    async def _ask(self, rng: random.Random, kind: str, key: str, ids: Sequence[int]) -> tuple[int, ...]:
        """A text, asked for again where it is interrupted; empty where it is refused for good."""
        options: GenerateOptions = {"max_new_tokens": rng.randint(12, 48), "nodes": 8, "seed": rng.randrange(1 << 30)}
        options |= {"temperature": rng.choice((0.0, 1.0))}
        asked = Asked(kind, key, tuple(ids), options, rng.randint(1, 8) if kind == "leaves" else None)
        why = ""
        for _ in range(ATTEMPTS):
            try:
                told = await tell(self._backend, asked)
            except SwarmError as error:
                why = f"{kind}: {type(error).__name__}: {error}"
                self.again[why] += 1
            else:
                self.told.append(told)
                return told.tokens
        self.refused.append(why)
        return ()


async def tell(backend: SwarmBackend, asked: Asked) -> Told:
    """One text.

    Raises:
        SwarmError: it was refused, or interrupted.
    """
    tokens: list[int] = []
    async with aclosing(backend.run(TextJob(asked.ids, asked.options), ApiCaller(asked.key))) as events:
        async for event in events:
            if isinstance(event, Finished):
                stats = event.result.stats
                return Told(asked, event.result.tokens, stats.reused_tokens, len(stats.repairs), is_whole=True)
            if isinstance(event, Delta):
                tokens += event.tokens
            if asked.leaves_after is not None and len(tokens) >= asked.leaves_after:
                break
    return Told(asked, tuple(tokens))


async def churn(machines: Machines, strikes: Counter[str], options: Options, console: Console) -> None:
    """Strike one machine after the other until cancelled, and count how often in which way."""
    rng = random.Random(f"{options.seed} strikes")
    began = time.monotonic()
    while True:
        await asyncio.sleep(rng.uniform(*STRIKE_S))
        passed = (time.monotonic() - began) / 60 / options.minutes
        span, number = rng.choice(SPANS), rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        column = COLUMNS[passed > 1 / 2]
        machine = next(one for one in machines.all if (one.span, one.column) == (span, column))
        strikes[number.name] += 1
        console.print(f"{60 * options.minutes * passed:4.0f} s: {number.name} to {machine.name}", highlight=False)
        await machines.strike(machine, number)


class Memory:
    """Resident memory of processes over time.

    Attributes:
        seen: process id → its name, and (seconds since its first sample, MB).
    """

    def __init__(self, machines: Machines) -> None:
        self.seen: dict[int, tuple[str, list[tuple[float, float]]]] = {}
        self._machines = machines

    async def watch(self) -> None:
        began: dict[int, float] = {}
        while True:
            programs = {one.program.process.pid: one.name for one in self._machines.all if one.program is not None}
            for pid, name in {os.getpid(): "client", **programs}.items():
                with suppress(psutil.NoSuchProcess):  # it was struck
                    megabytes = psutil.Process(pid).memory_info().rss / 1e6
                    since = time.monotonic() - began.setdefault(pid, time.monotonic())
                    self.seen.setdefault(pid, (name, []))[1].append((since, megabytes))
            await asyncio.sleep(SAMPLE_S)

    def slopes(self, warm_up_s: float) -> dict[str, tuple[float, float, float]]:
        """Of each process that was watched for twice the warm-up: minutes watched, MB per minute, MB at the end."""
        found: dict[str, tuple[float, float, float]] = {}
        for name, samples in self.seen.values():
            warm = [(at_s / 60, megabytes) for at_s, megabytes in samples if at_s >= warm_up_s]
            if samples[-1][0] >= 2 * warm_up_s and len(warm) > 2:
                slope = linear_regression(*zip(*warm, strict=True)).slope
                if name not in found or warm[-1][0] - warm[0][0] > found[name][0]:
                    found[name] = (warm[-1][0] - warm[0][0], slope, warm[-1][1])
        return found


async def until_free(machines: Machines) -> dict[str, dict[str, Any]]:
    """The books of all machines once no session is left, or `SETTLE_S` after."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        books = {machine.name: await machines.books(machine) for machine in machines.all}
        if not any(one["sessions"] for one in books.values()) or time.monotonic() > deadline:
            return books
        await asyncio.sleep(1.0)


async def differing(backend: SwarmBackend, told: Sequence[Told]) -> list[Told]:
    """The texts that are others when they are made again, with a key each, so that nothing is reused."""
    wrong: list[Told] = []
    todo = iter(enumerate(told))

    async def work() -> None:
        for number, one in todo:
            again = await tell(backend, replace(one.asked, key=f"again {number}", leaves_after=None))
            assert again.reused == 0, "a key has nothing kept"
            if one.tokens != (again.tokens if one.is_whole else again.tokens[: len(one.tokens)]):
                wrong.append(one)

    async with asyncio.TaskGroup() as group:
        for _ in range(REFERENCES):
            group.create_task(work())
    return wrong


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of it.

    Attributes:
        books: of each machine, when all sessions were over.
        slopes: see `Memory.slopes`.
    """

    load: Load
    wrong: list[Told]
    strikes: Counter[str]
    books: dict[str, dict[str, Any]]
    slopes: dict[str, tuple[float, float, float]]
    tracebacks: int

    @property
    def faults(self) -> list[str]:
        """All that is not as it should be."""
        found = [f"{one.asked.kind}: another text, {one.asked.options}" for one in self.wrong]
        found += self.load.refused
        for name, one in self.books.items():
            found += [f"{name}: {what}" for what in one["wrong"]]
            if one["sessions"] or one["free"] != one["kv_tokens"] or one["pool_tokens"] > one["kv_tokens"]:
                found.append(f"{name}: {one}")
        found += [f"{name}: {slope:.2f} MB/min" for name, (_, slope, _) in self.slopes.items() if slope > SLOPE_LIMIT]
        return found + [f"{self.tracebacks} tracebacks"] * bool(self.tracebacks)


async def run(folder: Path, ids: Sequence[int], options: Options, console: Console) -> Seen:
    limits = BackendLimits(sessions=SessionLimits(kept=3, idle_s=5.0))
    async with (
        open_machines(folder, options.kv_tokens) as (peer, machines),
        AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, threads=1, calibration=None) as swarm,
        TaskScope() as scope,
    ):
        await covered(swarm)

        @asynccontextmanager
        async def connect() -> AsyncIterator[AsyncSwarm]:
            yield swarm

        backend = SwarmBackend(SwarmSource("demo", connect), scope, limits)
        scope.spawn(backend.link.keep())
        await backend.link.tried.wait()
        memory, load, strikes = Memory(machines), Load(backend, ids, options), Counter[str]()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(memory.watch())
            striking = group.create_task(churn(machines, strikes, options, console))
            await load.run()
            striking.cancel()
            watching.cancel()
        slopes = memory.slopes(min(WARM_UP_S, 60 * options.minutes / 6))
        await machines.whole()
        assert backend.link.sessions is not None, "it was found"
        await backend.link.sessions.clear()
        books = await until_free(machines)
        console.print(f"{len(load.told)} texts; making them again", highlight=False)
        wrong = await differing(backend, load.told)
        return Seen(load, wrong, strikes, books, slopes, machines.tracebacks())


def make_sheet(seen: Seen, options: Options) -> Sheet:
    told = seen.load.told
    sheet = Sheet(
        "soak",
        f"{options.minutes:g} minutes of load and churn, two machines a span, KV for {options.kv_tokens:,} tokens each",
        ("who asks", "texts", "the same", "prompt tokens", "reused", "with repairs"),
        measured={
            "minutes": options.minutes,
            "kv_tokens": options.kv_tokens,
            "seed": options.seed,
            "faults": seen.faults,
            "again": seen.load.again,
            "strikes": seen.strikes,
            "books": seen.books,
            "slopes": seen.slopes,
        },
    )
    for kind in sorted({one.asked.kind for one in told}):
        some = [one for one in told if one.asked.kind == kind]
        wrong = sum(one.asked.kind == kind for one in seen.wrong)
        prompts, reused = sum(len(one.asked.ids) for one in some), sum(one.reused for one in some)
        repaired = sum(one.repairs > 0 for one in some)
        sheet.rows.append(
            (kind, f"{len(some):,}", f"{len(some) - wrong:,}", f"{prompts:,}", f"{reused:,}", f"{repaired}")
        )
    kept = ", ".join(f"{name}: {one['block_tokens']:,}" for name, one in seen.books.items())
    slopes = ", ".join(f"{name} {slope:+.2f} ({minutes:.1f} min)" for name, (minutes, slope, _) in seen.slopes.items())
    struck = ", ".join(f"{count} {name}" for name, count in sorted(seen.strikes.items()))
    sheet.notes += [
        f"Strikes: {struck}. Asked again after an interruption: {seen.load.again.total()}; refused for good: "
        f"{len(seen.load.refused)}. Seed {options.seed}.",
        f"KV tokens in blocks at the end: {kept}; all else is free, and the books of pools and KV balance."
        if not seen.faults
        else f"Not as it should be: {'; '.join(seen.faults)}.",
        f"Memory, MB per minute: {slopes}.",
    ]
    return sheet


def main() -> None:
    """Load, strike, check, and fail if anything is not as it should be."""
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    quiet_libraries()
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="canopy-soak-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(exist_ok=True)
        seen = asyncio.run(run(folder, passages(), options, console))
    make_sheet(seen, options).finish(console, options)
    if seen.faults:
        sys.exit(f"soak: {len(seen.faults)} things are not as they should be")


if __name__ == "__main__":
    main()
