"""Do nodes survive garbage, with typed answers and flat memory?

First the parsers read mutants of every kind of message, in this process; only typed errors may come of that. Then it
starts two nodes on loopback, sends them well-formed, half-right and senseless frames in every role of a chain, and has
texts generated before, meanwhile and after, which must be Hugging Face's, and whose sweeps must not be late. Memory is
each node's anonymous resident set (Linux's RssAnon, without its DHT process), sampled as the frames go: unlike the
proportional set it does not change when other programs come and go that share libraries with it. Ends with status 1
when something of that does not hold.

    python -m benchmarks fuzz --frames 100000 --seed 1
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, cast

import grpc.aio
import psutil
import torch
import tyro
from transformers import AutoModelForCausalLM

from benchmarks.recovery.frame_flood import Broken, FloodCounts, FloodTarget, fuzz
from benchmarks.recovery.garbage import ServedModel
from benchmarks.redteam.fuzzing.parsers import fuzz_parsers
from benchmarks.sheet import Recording, Sheet
from client import AsyncSwarm
from swarm.alive import shown_certificate
from swarm.demo import TARGET
from swarm.ids import PeerId
from swarm.layers import Span
from swarm.protocol import wire
from swarm.protocol.messages import NodeInfo
from swarm.runtime.cli import make_console
from swarm.transport.dial import CHANNEL_OPTIONS, open_channel
from swarm.transport.endpoint import Endpoint

PROMPT = (2565, 591, 572, 289, 663, 281)
NEW_TOKENS = 8
FLAT_BYTES = 8 << 20
"""What a node's memory may seem to grow by over the second half of the frames: malloc keeps no exact books."""
SPARE_FILES = 16
"""Open files and threads that a node may have more of at the end than at the start."""
SAMPLES = 40
START_S = 120.0
SETTLE_S = 20.0
"""Orphans are free five seconds after their stream has ended."""
SPANS = ("0-12", "6-12")
QUIET_TEXTS = 20
LATE = 2.0
"""A sweep is late that takes longer than so many times what the slowest took without garbage."""
LATE_SHARE = 0.01
"""Late sweeps of all sweeps, at most: a machine that others use is late by itself now and then."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Send garbage to live nodes."""

    mutants: int = 1_000_000
    """How many mutants the parsers read first."""
    frames: int = 100_000
    """How many frames the nodes get."""
    per_s: float = 600.0
    """How many of them a second: faster ones measure who gets the processors."""
    seed: int = 1
    """The same seed sends the same frames."""
    limit_s: float = 1_200.0
    """Give up after so many seconds."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One node's process at one moment."""

    frames: int
    anonymous_bytes: int
    files: int
    threads: int


@dataclass(slots=True)
class WatchedNode:
    """A node's process over time."""

    span: str
    process: psutil.Process
    samples: list[ProcessSample] = field(default_factory=list)

    def look(self, frames: int) -> None:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        anonymous = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert anonymous is not None, status
        files, threads = self.process.num_fds(), self.process.num_threads()
        self.samples.append(ProcessSample(frames, int(anonymous[1]) << 10, files, threads))

    @property
    def growth_bytes(self) -> float:
        """By a straight line through the second half of the samples, over that half."""
        half = self.samples[len(self.samples) // 2 :]
        frames = [sample.frames for sample in half]
        slope, _ = linear_regression(frames, [sample.anonymous_bytes for sample in half])
        return slope * (frames[-1] - frames[0])

    def check(self) -> list[str]:
        """What is not as it was."""
        first, last = self.samples[0], self.samples[-1]
        found = []
        if self.growth_bytes > FLAT_BYTES:
            found.append(f"node {self.span}: memory grew by {self.growth_bytes / 2**20:.1f} MiB in the second half")
        for name in ("files", "threads"):
            before, after = getattr(first, name), getattr(last, name)
            if after > before + SPARE_FILES:
                found.append(f"node {self.span}: {before} {name} became {after}")
        return found


@dataclass(frozen=True, slots=True)
class ServedNode:
    """A running `node serve`.

    Attributes:
        endpoint: Where it listens, and its certificate.
        join: An address for others to join.
    """

    span: str
    process: subprocess.Popen[bytes]
    log: Path
    endpoint: Endpoint
    join: str


@contextmanager
def serve(span: str, join: str | None, folder: Path) -> Iterator[ServedNode]:
    """Run `node serve` on loopback until the block ends."""
    log = folder / f"{span}.log"
    command = [sys.executable, "-m", "node.cli", "serve", str(TARGET), "--layers", span, "--host", "127.0.0.1"]
    command += ["--threads", "1", "--kv-tokens", "40000", "--identity", str(folder / f"{span}.key")]
    with log.open("wb") as output:
        environment = {**os.environ, "XDG_STATE_HOME": str(folder)}  # `node status` tells of the user's own nodes
        joining = ["--join", join] if join else []
        process = subprocess.Popen([*command, *joining], stdout=output, stderr=output, env=environment)
    try:
        said = _wait_for(r"serving at (\S+) as (\S+)[\s\S]*--join (\S+)", process, log)
        host, port = said[1].split(":")
        endpoint = Endpoint(PeerId(said[2]), said[1], shown_certificate(host, int(port)))
        yield ServedNode(span, process, log, endpoint, said[3])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)


def _wait_for(pattern: str, process: subprocess.Popen[bytes], log: Path) -> re.Match[str]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(pattern, log.read_text()):
            return found
        time.sleep(0.1)  # a log file has no event to wait for
    raise Broken(f"a node did not start:\n{log.read_text()}")


async def info(node: ServedNode) -> NodeInfo:
    """What a node says of itself."""
    async with open_channel(node.endpoint, CHANNEL_OPTIONS) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(wire.INFO)
        return wire.decode_info(await call(b"", timeout=10))


def right_tokens() -> tuple[int, ...]:
    """Hugging Face's greedy continuation of the prompt."""
    model = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return tuple(ids[0].tolist()[len(PROMPT) :])


class FloodRun:
    """A run: fuzz, watch, and have texts generated beside."""

    def __init__(self, options: Options, nodes: Sequence[ServedNode], right: tuple[int, ...]) -> None:
        self.counts = FloodCounts()
        self.watched = [WatchedNode(node.span, psutil.Process(node.process.pid)) for node in nodes]
        self.texts = 0
        self.usual_ms: list[float] = []
        self.meanwhile_ms: list[float] = []
        self.options = options
        self._nodes = nodes
        self._right = right

    async def run(self, swarm: AsyncSwarm) -> None:
        """Raise `Broken` when a node does not withstand it."""
        await self.text(swarm)
        for _ in range(QUIET_TEXTS):
            self.usual_ms += await self.text(swarm)
        target = await self._target()
        await fuzz(
            target, self.options.frames // 50, self.options.seed + 1, FloodCounts()
        )  # caches fill, threads start
        self._look()
        async with asyncio.timeout(self.options.limit_s), self._beside(swarm):
            await fuzz(target, self.options.frames, self.options.seed, self.counts, self.options.per_s)
        await self._until_freed()
        await self.text(swarm)
        self._look()
        for node in self._nodes:
            if "Traceback" in node.log.read_text():
                raise Broken(f"an accident in node {node.span}:\n{node.log.read_text()[-3_000:]}")
        found = [trouble for watched in self.watched for trouble in watched.check()]
        if self.late > LATE_SHARE * len(self.meanwhile_ms):
            found.append(
                f"{self.late} of {len(self.meanwhile_ms)} sweeps took longer than {LATE:g} × the slowest before"
            )
        if found:
            raise Broken("; ".join(found))

    @property
    def late(self) -> int:
        """Sweeps that took too long while garbage came."""
        return sum(ms > LATE * max(self.usual_ms, default=0.0) for ms in self.meanwhile_ms)

    async def text(self, swarm: AsyncSwarm) -> list[float]:
        """One text, which must be the right one; the milliseconds of its sweeps."""
        result = await swarm.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.0)
        if tuple(result.tokens) != self._right:
            raise Broken(f"a text is {result.tokens}, and Hugging Face's is {self._right}")
        self.texts += 1
        return [sweep.total_ms for sweep in result.stats.sweeps]

    async def _target(self) -> FloodTarget:
        first, second = self._nodes
        about = await info(first)
        model = ServedModel(about.fingerprint, about.hidden_size, about.vocab_size)
        return FloodTarget(first.endpoint, second.endpoint, Span.parse(second.span), model, about.num_layers)

    @asynccontextmanager
    async def _beside(self, swarm: AsyncSwarm) -> AsyncIterator[None]:
        """Samples and texts while the block runs."""

        async def watch() -> None:
            step = self.options.frames / SAMPLES
            while True:
                await asyncio.sleep(0.1)
                if self.counts.frames >= step * len(self.watched[0].samples):
                    self._look()
                    self.meanwhile_ms += await self.text(swarm)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(watch())
            yield
            task.cancel()

    async def _until_freed(self) -> None:
        async with asyncio.timeout(SETTLE_S):
            while True:
                found = [await info(node) for node in self._nodes]
                if all(one.sessions == 0 and one.kv_tokens_free == one.kv_tokens_total for one in found):
                    return
                await asyncio.sleep(0.2)

    def _look(self) -> None:
        for watched in self.watched:
            watched.look(self.counts.frames)


def sheet(flood: FloodRun, seconds: float) -> Sheet:
    """What was sent, what came back, what the nodes look like."""
    counts = flood.counts
    made = Sheet(
        "fuzz",
        f"{counts.frames:,} frames in {seconds:.0f} s, {flood.texts} right texts before, meanwhile and after",
        ("node", "MiB at the start", "at half", "at the end", "growth in 2nd half", "files", "threads"),
        measured={
            "options": asdict(flood.options) | {"json": None},
            "seconds": seconds,
            "texts": flood.texts,
            "tally": {"sent": counts.sent, "answers": counts.answers, "ends": counts.endings},
            "sweeps_ms": {"usual": flood.usual_ms, "meanwhile": flood.meanwhile_ms},
            "nodes": {one.span: list(map(asdict, one.samples)) for one in flood.watched},
        },
    )
    usual, meanwhile = flood.usual_ms or [0.0], flood.meanwhile_ms or [0.0]
    made.notes.append(
        f"honest sweeps: median {median(usual):.1f} ms, slowest {max(usual):.1f} ms of {len(usual)} before; "
        f"median {median(meanwhile):.1f} ms, slowest {max(meanwhile):.1f} ms of {len(meanwhile)} meanwhile, "
        f"of which {flood.late} took longer than {LATE:g} × the slowest before"
    )
    for title, counted in (("sent", counts.sent), ("answers", counts.answers), ("ends of streams", counts.endings)):
        listed = ", ".join(f"{name} {count:,}" for name, count in counted.most_common())
        made.notes.append(f"{title}: {listed}")
    for watched in flood.watched:
        if not watched.samples:
            continue
        first, half, last = watched.samples[0], watched.samples[len(watched.samples) // 2], watched.samples[-1]
        memory = [f"{sample.anonymous_bytes / 2**20:.1f}" for sample in (first, half, last)]
        others = [f"{first.files} → {last.files}", f"{first.threads} → {last.threads}"]
        made.rows.append((watched.span, *memory, f"{watched.growth_bytes / 2**20:+.1f}", *others))
    return made


def main() -> None:
    """Run and report; the exit status says whether the nodes withstood it."""
    options = tyro.cli(Options)
    console = make_console(soft_wrap=True)
    parsed = fuzz_parsers(options.mutants, options.seed)
    console.print(f"{parsed.count:,} mutants in {parsed.seconds:.0f} s, {len(parsed.accidents)} accidents")
    if parsed.accidents:
        sys.exit("\n".join(parsed.accidents))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        first = stack.enter_context(serve(SPANS[0], None, Path(name)))
        second = stack.enter_context(serve(SPANS[1], first.join, Path(name)))
        flood = FloodRun(options, (first, second), right_tokens())
        started, failure = time.monotonic(), None
        try:
            asyncio.run(_flood(flood, first.join))
        except (Broken, TimeoutError) as error:
            failure = f"seed {options.seed}, after {flood.counts.frames:,} frames: {error or 'out of time'}"
    made = sheet(flood, time.monotonic() - started)
    made.notes.insert(0, f"parsers: {parsed.count:,} mutants in {parsed.seconds:.0f} s, typed errors only")
    made.measured["parsers"] = {"seconds": parsed.seconds, "outcomes": parsed.outcomes, "slowest_s": parsed.slowest_s}
    made.finish(console, options)
    sys.exit(failure)


async def _flood(flood: FloodRun, join: str) -> None:
    async with AsyncSwarm.connect(TARGET, peers=(join,)) as swarm:
        await flood.run(swarm)
