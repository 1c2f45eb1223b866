"""What becomes of many users at once, and of those beside a long prompt or a greedy client?

On loopback, on real nodes: 64 clients, and then 32 that come at once to nodes with room for a few of them. In virtual
time, with real decode loops and a node's scheduler, but recorded texts: what a chain gives to 16 and 64 clients, what a
long prompt and a greedy client cost others.

    python -m benchmarks crowd --record
    python -m benchmarks crowd --no-real            # virtual time alone
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import tyro
from transformers import AutoTokenizer

from benchmarks.emulation.swarm import SPANS, ServeOptions, covered, local_swarm
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.chain import Costs
from benchmarks.simulation.profiles import FIRST_SEED, PROFILES
from benchmarks.simulation.recorded import ModelPair, RecordedText, prompts_of, record_trees
from benchmarks.simulation.shared_chain import SharedCosts, SharedHop, VirtualClient, shared_hops, with_prompt
from benchmarks.simulation.virtual_loop import run_virtual
from benchmarks.speed.long import gaps_ms, memory_mib
from client.decode.goodput import Goodput
from client.decode.policy import FixedPolicy
from client.library.aio import AsyncSwarm
from client.library.jobs import MAX_NODES
from swarm.base.cli import make_console
from swarm.base.errors import SwarmError
from swarm.base.library_logging import quiet_libraries
from swarm.base.tasks import TaskScope
from swarm.compute.ragged_batch import load_whole
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling

TREE = 128
"""Nodes of recorded trees."""
NETWORK = "25 ms, 100 Mbit/s"
OTHERS, CHATTING = 4, 8
"""Clients beside a greedy one, and beside a long prompt."""
GREEDY_SESSIONS, IDENTITIES = 16, 50
"""Of a greedy client: as many sessions as an address may have, or as many addresses of one network."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure a crowd."""

    real: bool = True
    """Whether to run real nodes too."""
    clients: int = 64
    """On real nodes."""
    seconds: float = 24.0
    """Seconds that count on real nodes."""
    new_tokens: int = 16
    """Of each text on real nodes."""
    waiting: int = 32
    """Clients that come at once where there is room for few."""
    kv_tokens: int = 9_000
    """Of each node then."""
    prompt_tokens: int = 16_000
    """Of the long prompt."""
    virtual_s: float = 5.0
    """Virtual seconds that count, of each measurement in virtual time."""
    warm_s: float = 3.0
    """Seconds before those, which do not count."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One number.

    Attributes:
        what: what was measured.
        value: as it is shown.
        aim: what it should be; empty where there is no aim.
        is_met: whether it is.
    """

    what: str
    value: str
    aim: str = ""
    is_met: bool = True

    @property
    def verdict(self) -> str:
        return ("yes" if self.is_met else "**no**") if self.aim else ""


def at_least(what: str, value: float, aim: float, unit: str = "×") -> Measured:
    return Measured(what, f"{value:.2f} {unit}", f"≥ {aim:g}", value >= aim)


def at_most(what: str, value: float, aim: float, unit: str = "×") -> Measured:
    return Measured(what, f"{value:.2f} {unit}", f"≤ {aim:g}", value <= aim)


def p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20)[-1]


# In virtual time


@dataclass(frozen=True, slots=True)
class VirtualWorld:
    """What virtual clients tell, over which network."""

    texts: Sequence[RecordedText]
    tokenizer: object
    options: Options
    costs: SharedCosts = field(default_factory=lambda: SharedCosts(PROFILES[NETWORK]))

    def client(self, hops: Sequence[SharedHop], place: int, owner: str, *, greedy: bool = False) -> VirtualClient:
        """One client; a greedy one has large trees in flight all the time, whatever others pay."""
        start = place % len(self.texts)
        texts = [*self.texts[start:], *self.texts[:start]]
        policy = FixedPolicy(TREE, 8) if greedy else Goodput(MAX_NODES)
        return VirtualClient(hops, self.costs, texts, policy, self.tokenizer, owner)

    def speeds(self, clients: int, greedy: Sequence[str] = ()) -> list[float]:
        """Tokens per second of clients, each of a network of its own, beside greedy sessions of these owners."""

        async def run() -> list[float]:
            async with shared_hops(self.costs) as hops, TaskScope() as scope:
                own = [self.client(hops, place, f"{20 + place}.0.0.1") for place in range(clients)]
                others = [self.client(hops, place, owner, greedy=True) for place, owner in enumerate(greedy)]
                tasks = [scope.spawn(one.tell_on()) for one in (*own, *others)]
                loop = asyncio.get_running_loop()
                await asyncio.sleep(self.options.warm_s)
                began_s = loop.time()
                await asyncio.sleep(self.options.virtual_s)
                for task in tasks:
                    task.cancel()
                took_s = loop.time() - began_s
                return [one.tokens_within(began_s, loop.time()) / took_s for one in own]

        return run_virtual(run)

    def gaps_ms(self, prompt_tokens: int) -> tuple[list[float], float]:
        """Between tokens of chatting clients, while another's prompt is read; and the seconds that this takes."""

        async def run() -> tuple[list[float], float]:
            async with shared_hops(self.costs) as hops, TaskScope() as scope:
                own = [self.client(hops, place, f"{20 + place}.0.0.1") for place in range(CHATTING)]
                tasks = [scope.spawn(one.tell_on()) for one in own]
                loop = asyncio.get_running_loop()
                await asyncio.sleep(self.options.warm_s)
                began_s = loop.time()
                if prompt_tokens:
                    text, policy = with_prompt(self.texts[0], prompt_tokens, 2), FixedPolicy(0)
                    long = VirtualClient(hops, self.costs, [text], policy, self.tokenizer, "93.184.217.1", drafts=False)
                    await long.tell(text)
                else:
                    await asyncio.sleep(self.options.virtual_s)
                for task in tasks:
                    task.cancel()
                gaps = [gap for one in own for gap in one.gaps_ms(began_s, loop.time())]
                return gaps, loop.time() - began_s

        return run_virtual(run)


def in_virtual_time(world: VirtualWorld) -> tuple[list[Measured], dict[str, Any]]:
    options = world.options
    alone, some, many = (sum(world.speeds(clients)) for clients in (1, 16, 64))
    quiet, _ = world.gaps_ms(0)
    beside, prompt_s = world.gaps_ms(options.prompt_tokens)
    before = world.speeds(OTHERS)
    one = world.speeds(OTHERS, ["93.184.216.1"] * GREEDY_SESSIONS)
    crowd = world.speeds(OTHERS, [f"93.184.216.{place}" for place in range(IDENTITIES)])
    rows = [
        at_least(f"16 clients over one ({alone:.0f} tokens/s), virtual", some / alone, 6),
        at_least("64 clients over one, virtual", many / alone, 15),
        at_most(
            f"between tokens of {CHATTING} beside a prompt of {options.prompt_tokens:,}: p95 over undisturbed, virtual",
            p95(beside) / p95(quiet),
            1.5,
        ),
        Measured("that prompt takes, virtual", f"{prompt_s:.1f} s"),
        at_least(f"speed of {OTHERS} beside a greedy client, virtual", sum(one) / sum(before), 0.8),
        at_least(f"the same beside {IDENTITIES} identities of one network", sum(crowd) / sum(before), 0.8),
    ]
    seen: dict[str, Any] = {"tokens_per_s": {"1": alone, "16": some, "64": many}, "others": before, "beside_one": one}
    seen |= {"beside_many": crowd, "p95_ms": [p95(quiet), p95(beside)], "prompt_s": prompt_s}
    return rows, seen


def record_texts() -> list[RecordedText]:
    """Greedy and sampled texts of passages, in turn, with trees."""
    pair = ModelPair(load_whole(TARGET, torch.float32), load_whole(DRAFT, torch.float32), 64)
    prompts = prompts_of("passages", 8)
    samplings = [Sampling(FIRST_SEED + place, float(place % 2)) for place in range(len(prompts))]
    return record_trees(pair, prompts, samplings, TREE)


# On real nodes


@dataclass(slots=True)
class RealClient:
    """One user of real nodes.

    Attributes:
        came: (second, tokens) as they came.
        first_s: how long first tokens took.
        error: what ended it.
    """

    prompt: Sequence[int]
    seed: int
    came: list[tuple[float, int]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    error: str | None = None

    async def tell(self, swarm: AsyncSwarm, new_tokens: int) -> None:
        """One text."""
        began_s, is_first = time.perf_counter(), True
        try:
            stream = swarm.stream(self.prompt, max_new_tokens=new_tokens, seed=self.seed, end_tokens=())
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    if piece.tokens:
                        self.came.append((time.perf_counter(), len(piece.tokens)))
                        if is_first:
                            self.first_s.append(time.perf_counter() - began_s)
                        is_first = False
        except SwarmError as error:
            self.error = str(error)

    async def tell_on(self, swarm: AsyncSwarm, new_tokens: int) -> None:
        while self.error is None:
            await self.tell(swarm, new_tokens)


@asynccontextmanager
async def demo_swarm(*options: str) -> Any:  # noqa: ANN401 - a context manager
    """Three nodes on loopback and a client; yields the nodes' programs too."""
    with tempfile.TemporaryDirectory(prefix="canopy-crowd-") as folder:
        served = ServeOptions(TARGET, SPANS, ("--device", "cpu", *options))
        async with local_swarm(Path(folder), served) as (peer, nodes):
            await asyncio.gather(*(node.wait_for("serving at") for node in nodes))
            async with AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, nodes=None) as swarm:
                await covered(swarm)
                yield swarm, nodes


async def many_at_once(options: Options) -> tuple[list[Measured], dict[str, Any]]:
    prompts = [prompt[:16] for prompt in prompts_of("passages", 8)]
    clients = [RealClient(prompts[place % len(prompts)], place) for place in range(options.clients)]
    async with demo_swarm() as (swarm, nodes), asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.tell_on(swarm, options.new_tokens)) for one in clients]
        await asyncio.sleep(options.warm_s)
        began_s, before = time.perf_counter(), memory_mib(nodes, "VmRSS")
        await asyncio.sleep(options.seconds)
        after, took_s = memory_mib(nodes, "VmRSS"), time.perf_counter() - began_s
        for task in tasks:
            task.cancel()
    tokens = [sum(count for at_s, count in one.came if at_s >= began_s) for one in clients]
    first = [seconds for one in clients for seconds in one.first_s]
    rows = [
        Measured(f"{options.clients} clients, real nodes", f"{sum(tokens) / took_s:.0f} tokens/s"),
        at_least("their slowest over their fastest", min(tokens) / max(tokens), 0.6),
        at_most("first tokens: p95 over median", p95(first) / median(first), 3),
        at_most("memory of a node, after over before", max(b / a for a, b in zip(before, after, strict=True)), 1.1),
    ]
    errors = [one.error for one in clients if one.error is not None]
    seen = {"tokens": tokens, "took_s": took_s, "first_s": first, "mib": [before, after], "errors": errors}
    return [*rows, Measured("refused for good", f"{len(errors)}", "0", not errors)], seen


async def a_herd(options: Options) -> tuple[list[Measured], dict[str, Any]]:
    prompts = [prompt[:16] for prompt in prompts_of("passages", 8)]
    clients = [RealClient(prompts[place % len(prompts)], place) for place in range(options.waiting)]
    async with demo_swarm("--kv-tokens", str(options.kv_tokens)) as (swarm, _):
        began_s, ends_s = time.perf_counter(), list[float]()

        async def tell(one: RealClient) -> None:
            await one.tell(swarm, options.new_tokens)
            ends_s.append(time.perf_counter() - began_s)

        async with asyncio.TaskGroup() as group:
            for one in clients:
                group.create_task(tell(one))
    errors = [one.error for one in clients if one.error is not None]
    pauses = gaps_ms(sorted(ends_s))
    rows = [
        Measured(
            f"{options.waiting} clients at once where few have room, refused for good",
            f"{len(errors)}",
            "0",
            not errors,
        ),
        Measured("until the last one is done", f"{max(ends_s):.1f} s"),
        Measured("longest pause between two that are done", f"{max(pauses) / 1e3:.1f} s"),
    ]
    return rows, {"ends_s": sorted(ends_s), "errors": errors}


def make_sheet(parts: Sequence[tuple[list[Measured], dict[str, Any]]], options: Options) -> Sheet:
    sheet = Sheet(
        "crowd",
        "Many users on one chain of three nodes",
        ("what", "measured", "aim", "met"),
        measured={"options": asdict(options), "seen": [seen for _, seen in parts]},
    )
    for rows, _ in parts:
        sheet.rows += [
            (one.what, one.value, one.aim, ("yes" if one.is_met else "**no**") if one.aim else "") for one in rows
        ]
    chain: Costs = SharedCosts(PROFILES[NETWORK]).chain
    sheet.notes.append(
        f"Real nodes: loopback, all programs on the same cores, {options.seconds:g} s, texts of {options.new_tokens} "
        f"tokens. Virtual: {NETWORK}, a hop {chain.forward_ms:g} ms and {chain.row_ms:g} per row, each hop and client "
        f"on a machine of its own. Greedy: {GREEDY_SESSIONS} sessions, or {IDENTITIES} addresses with one each, trees "
        f"of {TREE} nodes, eight in flight."
    )
    return sheet


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    quiet_libraries()
    programs: list[Callable[[], tuple[list[Measured], dict[str, Any]]]] = []
    if options.real:
        programs += [lambda: asyncio.run(many_at_once(options)), lambda: asyncio.run(a_herd(options))]
    parts = [program() for program in programs]
    world = VirtualWorld(record_texts(), AutoTokenizer.from_pretrained(TARGET), options)
    make_sheet([*parts, in_virtual_time(world)], options).finish(make_console(), options)


if __name__ == "__main__":
    main()
