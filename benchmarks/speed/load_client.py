"""The clients of `benchmarks.speed.load`: several at once on one chain, whose drafts were recorded before.

A recorded draft is there at once, so drafting does not use the nodes' cores. Reads its job as JSON from the
command line and writes what it measured to the file that the job names.
"""

from __future__ import annotations

import asyncio
import pickle
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.emulation.client_process import work
from benchmarks.emulation.swarm import covered
from benchmarks.simulation.chain import InlineExecutor
from benchmarks.simulation.recorded import RecordedText
from client.base.options import Options
from client.base.target import ModelSearch, find_in_swarm, load_target
from client.decode.goodput import Goodput
from client.draft.drafter import NO_PICKS, Drafters
from client.draft.search.tree import NO_LIMIT, DraftTree, Picks, StopRule
from client.library.aio import EXPECTED_NODES
from client.library.jobs import MAX_NODES, GenerationFactory
from client.library.session import SessionOpener
from swarm.demo import TARGET
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.link.dial import Dialer
from swarm.protocol.messages import Sampling

WAYS: dict[str, int | None] = {"off": 0, "K = 16": 16, "chosen": None}


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        texts: The file with recorded texts and trees.
        loads: Numbers of clients, each in turn.
        warm_s: Seconds that do not count.
    """

    peer: str
    texts: str
    loads: tuple[int, ...]
    rounds: int
    warm_s: float
    seconds: float
    result: str


class FreeDrafter:
    """Recorded trees, whose search is over before it begins."""

    def __init__(self, recorded: RecordedText) -> None:
        self._trees = recorded.trees

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        tree = self._trees[len(sequence)]
        worthy = bisect_right(tree.acceptance_probs, -stop_rule.min_probability, key=lambda probability: -probability)
        return shallow(tree.first(min(nodes, worthy)), depth)

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        """Nothing."""


def shallow(tree: DraftTree, depth: int) -> DraftTree:
    """The tree without its nodes below `depth`."""
    if tree.depth <= depth:
        return tree
    depths: dict[int | None, int] = {None: 0}
    for node, parent in enumerate(tree.parents):
        depths[node] = depths[parent] + 1
    kept = [node for node in range(len(tree)) if depths[node] <= depth]
    places: dict[int | None, int] = {node: place for place, node in enumerate(kept)}
    return DraftTree(
        tuple(tree.tokens[node] for node in kept),
        tuple(places.get(tree.parents[node]) for node in kept),
        tuple(tree.acceptance_probs[node] for node in kept),
    )


@dataclass(slots=True)
class LoadClient:
    """One client and what it has learned.

    Attributes:
        nodes: Its fixed tree size; None: the controller chooses.
    """

    opener: SessionOpener
    texts: Sequence[RecordedText]
    nodes: int | None
    goodput: Goodput = field(default_factory=lambda: Goodput(MAX_NODES))
    tokens: int = 0
    texts_told: int = 0
    sizes: list[int] = field(default_factory=list)

    async def tell_on(self) -> None:
        while True:
            await self._tell(self.texts[self.texts_told % len(self.texts)])
            self.texts_told += 1

    async def _tell(self, recorded: RecordedText) -> None:
        """One text, which must be the recorded one.

        Raises:
            AssertionError: it is another.
        """
        jobs = GenerationFactory(
            self.opener.target, Drafters(FreeDrafter(recorded)), InlineExecutor(), self.nodes, goodput=self.goodput
        )
        sampling = recorded.sampling
        options = Options(
            max_new_tokens=len(recorded.tokens) - len(recorded.prompt),
            temperature=sampling.temperature,
            seed=sampling.seed,
        )
        job = jobs.make(recorded.prompt, options)
        before = self.tokens
        async with self.opener.open(len(job.prompt) + job.max_new_tokens, job.nodes) as session:
            async for _ in session.run(job):
                self.tokens = before + len(job.text.tokens)
        self.sizes += [sweep.nodes for sweep in job.sweeps]
        made = tuple(job.text.tokens)
        assert made == recorded.tokens[len(recorded.prompt) :][: len(made)], "another text"


def recorded_texts(job: Job) -> list[RecordedText]:
    texts: list[RecordedText] = pickle.loads(Path(job.texts).read_bytes())
    return texts


async def measure(job: Job) -> list[dict[str, Any]]:
    """Every load, round and method, the methods in another order each round."""
    texts = recorded_texts(job)
    target, found = load_target(str(TARGET), None), []
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(
            DhtRegistry.open(DhtConfig(join=(job.peer,), client_mode=True)),
        )
        dialer = await stack.enter_async_context(Dialer())
        identity = await find_in_swarm(target, registry, ModelSearch((job.peer,)))
        opener = SessionOpener(target, identity, registry, dialer, (job.peer,), EXPECTED_NODES)
        await covered(opener)
        for load in job.loads:
            clients = {
                way: [
                    LoadClient(opener, texts[place % len(texts) :] + texts[: place % len(texts)], nodes)
                    for place in range(load)
                ]
                for way, nodes in WAYS.items()
            }
            for turn in range(job.rounds):
                names = list(WAYS)
                for way in names[turn % len(names) :] + names[: turn % len(names)]:
                    speed = await _together(clients[way], job)
                    sizes = [size for client in clients[way] for size in client.sizes]
                    row = {"load": load, "round": turn, "way": way, "tokens_per_s": speed}
                    found.append({**row, "nodes": median(sizes) if sizes else 0})
                    print(f"{load} clients, round {turn}, {way}: {speed:.1f} tokens/s", flush=True)  # noqa: T201
    return found


async def _together(clients: Sequence[LoadClient], job: Job) -> float:
    """Tokens per second of all clients at once; what they are at when the time is over is left."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.tell_on()) for client in clients]
        await asyncio.sleep(job.warm_s)
        before = sum(client.tokens for client in clients)
        started = asyncio.get_running_loop().time()
        await asyncio.sleep(job.seconds)
        took_s = asyncio.get_running_loop().time() - started
        counted = sum(client.tokens for client in clients) - before
        for task in tasks:
            task.cancel()
    return counted / took_s


if __name__ == "__main__":
    work(Job, measure)
