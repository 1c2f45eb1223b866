"""The range: a live swarm with honest users, a health page and a broker, each a program of its own, on loopback."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks.redteam.ground import Ground, NodeMark
from benchmarks.redteam.honest import HonestText
from benchmarks.simulation.acceptance import demo_prompts
from client.tools.demo.programs import RunningProgram, start_program
from swarm.base.errors import RegistryError
from swarm.demo import TARGET
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.files.fingerprint import model_identity

SPANS = ("0-6", "6-12")
FILES = "1024:4096"
"""Open files that a program may have, and may raise that to: what shells and systemd give."""
KV_TOKENS = "40000"
LISTED_S = 60.0
TEXTS = 3
NEW_TOKENS = 32
PROMPT_TOKENS = 24
HIDDEN_SIZE, VOCAB_SIZE = 192, 4_096
LOOK_S = 0.5
PAGE_S = 5.0
"""A page that has not answered by then does not answer."""


@dataclass(frozen=True, slots=True)
class ProgramSample:
    """One program at one moment, its descendants included.

    Attributes:
        resident_mb: Memory that it has of its own: its resident set, and what its descendants do not share.
        files: Open files of the process with most of them, and its limit.
    """

    at: float
    resident_mb: float
    files: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PageRead:
    """One look at the health page: when, how long it took, and whether it showed all honest nodes."""

    at: float
    seconds: float
    right: bool


@dataclass(slots=True)
class Range:
    """A swarm that is up.

    Attributes:
        registry: The directory as a client sees it.
    """

    ground: Ground
    programs: dict[str, RunningProgram]
    results: Sequence[Path]
    registry: DhtRegistry
    samples: dict[str, list[ProgramSample]] = field(default_factory=dict)
    reads: list[PageRead] = field(default_factory=list)

    def texts(self) -> list[list[HonestText]]:
        """All texts so far, of each user."""
        return [_read(path) for path in self.results]

    def ended(self) -> list[str]:
        """Programs that have ended, of those that must not."""
        return [name for name, program in self.programs.items() if program.process.returncode is not None]

    async def records(self) -> list[NodeRecord]:
        """The honest nodes' newest records; empty where the directory has lost them."""
        model, known = self.ground.model, {node.peer for node in self.ground.nodes}
        with suppress(RegistryError):
            found = await self.registry.records(model.fingerprint, model.num_layers, within_s=0.0)
            return [record for record in found if record.peer in known]
        return []

    async def watch(self) -> None:
        """Look at programs and the page for ever."""
        while True:
            self._look()
            if self.ground.page:
                self.reads.append(await self._read_page())
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        for name, program in self.programs.items():
            with suppress(psutil.Error):
                first = psutil.Process(program.process.pid)
                members = [first, *first.children(recursive=True)]
                shares = (member.memory_full_info().pss for member in members[1:])  # workers are forks of one another
                memory = (first.memory_info().rss + sum(shares)) / 1e6
                files = max((member.num_fds(), member.rlimit(psutil.RLIMIT_NOFILE)[0]) for member in members)
                self.samples.setdefault(name, []).append(ProgramSample(time.time(), memory, files))

    async def _read_page(self) -> PageRead:
        began = time.time()
        text = b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(PAGE_S):
                host, _, port = self.ground.page.rpartition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                with closing(writer):
                    head = f"GET /api/v1/state HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                    writer.write(head.encode())
                    text = await reader.read()
        right = all(node.peer.encode() in text for node in self.ground.nodes)
        return PageRead(began, time.time() - began, right)


@asynccontextmanager
async def open_range(folder: Path, *, health: bool = True) -> AsyncIterator[Range]:
    """Start everything; leaving ends it.

    Raises:
        RegistryError: a program did not start.
    """
    limited = ("prlimit", f"--nofile={FILES}", "--")
    async with AsyncExitStack() as stack:

        async def start(name: str, *arguments: str) -> RunningProgram:
            return await stack.enter_async_context(start_program(name, arguments, folder, limited))

        key = str(folder / "bootstrap.key")
        bootstrap = await start(
            "bootstrap", "swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", key
        )
        join = await bootstrap.wait_for(r"/ip4/\S+")
        programs = {"bootstrap": bootstrap}
        told: list[str] = []
        page = broker = ""
        if health:
            options = ["--embedded-broker", "--broker-port", "0", "--port", "0", "--data", str(folder / "history")]
            service = await start("health", "swarm.cli", "health", "--join", join, *options, "--probe-every", "0")
            programs["health"] = service
            page = (await service.wait_for(r"health page at http://[^/]+")).rpartition("/")[2]
            broker = (await service.wait_for(r"broker at \S+?;")).split()[-1].rstrip(";")
            told = ["--mqtt", broker]
        for span in SPANS:
            serve = ["node.cli", "serve", str(TARGET), "--layers", span, "--join", join, "--host", "127.0.0.1"]
            serve += ["--threads", "1", "--device", "cpu", "--kv-tokens", KV_TOKENS, "--drain", "0", *told]
            name = f"node {span}"
            programs[name] = await start(name, *serve, "--identity", str(folder / f"{name}.key"))
        right = asyncio.get_running_loop().run_in_executor(None, honest_cases)
        for span in SPANS:
            await programs[f"node {span}"].wait_for(r"serving at")
        cases = await right
        registry = await stack.enter_async_context(DhtRegistry.open(DhtConfig(join=(join,), client_mode=True)))
        records = await _listed(registry)
        ground = _ground(folder, join, records, page, broker.rpartition("/")[2])
        results = []
        for number, comes in enumerate((False, True)):
            name = f"user who {'comes' if comes else 'stays'}"
            results.append(folder / f"user {number}.jsonl")
            job = {"join": join, "cases": cases, "comes": comes, "result": str(results[-1])}
            programs[name] = await start(name, "benchmarks.redteam.honest", json.dumps(job))
        here = Range(ground, programs, results, registry)
        await _warm(here)
        yield here


async def _listed(registry: DhtRegistry) -> list[NodeRecord]:
    identity = model_identity(TARGET)
    async with asyncio.timeout(LISTED_S):
        while True:
            found = await registry.records(identity.fingerprint, identity.num_layers, within_s=0.0)
            serving = [record for record in found if record.state is NodeState.SERVING]
            if len(serving) == len(SPANS):
                return sorted(serving, key=lambda record: record.span)
            await asyncio.sleep(0.3)


async def _warm(here: Range) -> None:
    """Wait until each user has had every text once, rightly."""
    async with asyncio.timeout(LISTED_S):
        while any(sum(text.right for text in some) < TEXTS for some in here.texts()):
            if here.ended():
                raise RegistryError(f"{', '.join(here.ended())} ended")
            await asyncio.sleep(0.3)


def _ground(folder: Path, join: str, records: Sequence[NodeRecord], page: str, broker: str) -> Ground:
    nodes = tuple(
        NodeMark(
            record.address,
            record.peer,
            record.span,
            getattr(record, "certificate", b"").hex(),
            str(folder / f"node {record.span}.log"),
        )
        for record in records
    )
    first = records[0]
    return Ground(join, nodes, first.model, HIDDEN_SIZE, VOCAB_SIZE, first.numeric_class, page, broker, str(folder))


def honest_cases() -> list[tuple[list[int], list[int]]]:
    """Prompts, and Hugging Face's greedy continuations in fp32."""
    model = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    cases = []
    for prompt in demo_prompts(TEXTS, tokens=PROMPT_TOKENS):
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        cases.append((prompt, ids[0].tolist()[len(prompt) :]))
    return cases


def ground_as_json(ground: Ground) -> str:
    return json.dumps(asdict(ground))


def _read(path: Path) -> list[HonestText]:
    """Whole lines only: the last one may still be written."""
    return [HonestText(**json.loads(line)) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
