"""Does the controller choose the right tree size and number of sweeps in flight?

Recorded texts and trees are replayed over simulated networks. The real decode loop and the real controller run against
a chain and a draft that take virtual time only. So a whole grid of networks, kinds of text and temperatures takes
minutes, and gives the same result each time. The controller begins each cell with the forecast of routing, which is
true here. The prompts of a cell follow one another. Cells share the
machine's cores.

    python -m benchmarks replay --record
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor as Pool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median
from typing import TypeVar

import torch
import tyro
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer

from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.chain import Costs, InlineExecutor, ModelTail, RecordedDrafter, RecordedTail, VirtualChain
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.profiles import FIRST_SEED, PROFILES
from benchmarks.simulation.recorded import KINDS, TREE, ModelPair, RecordedText, prompts_of, record_trees
from client.decode.goodput import Goodput
from client.decode.loop import Generation
from client.decode.policy import SWEEPS_IN_FLIGHT, FixedPolicy, PipelineState, SpeculationPlan, SpeculationPolicy
from client.decode.state import GenerationState
from client.decode.text_stream import TextStream
from client.decode.walk import Walk
from client.draft.drafter import Drafter
from client.draft.search.tree import DraftTree, StopRule
from client.library.jobs import MAX_NODES, PREFILL_CHUNK
from swarm.base.cli import make_console
from swarm.base.library_logging import quiet_libraries
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Credits, Sampling
from swarm.protocol.session import Limits
from swarm.routing.costs import RouteForecast

SIZES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
IN_FLIGHT = (1, 3, 8, 16, 24, SWEEPS_IN_FLIGHT)
DELAY_BOUND = ("25 ms, 100 Mbit/s", "50 ms, 20 Mbit/s", "100 ms, 50 Mbit/s")
FREE_WAYS = (FixedPolicy(TREE), FixedPolicy(TREE, SWEEPS_IN_FLIGHT), FixedPolicy(32, SWEEPS_IN_FLIGHT))
ORACLE_SURE, ORACLE_NODES = 0.995, 4
VOCABULARY = 1 << 20
PLAIN_BOUND, BEST_BOUND = 0.97, 0.95

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Replay the grid."""

    prompts: int = 12
    """Of each kind, as far as there are so many."""
    new_tokens: int = 96
    """New tokens of each text."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    networks: tuple[str, ...] = tuple(PROFILES)
    """Which networks."""
    forward_ms: float = Costs(0, 1).forward_ms
    """Of a hop, beside what its rows add."""
    pass_ms: float = Costs(0, 1).pass_ms
    """Of the draft's model."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one method made of one cell's prompts.

    Attributes:
        tokens_per_s: Tokens per virtual second.
        nodes_per_token: Tree nodes sent per token.
    """

    tokens_per_s: float
    nodes: float
    nodes_per_token: float


class OneAtATime(Goodput):
    """The same controller, with one sweep in flight."""

    def max_nodes(self, route: Hashable, temperature: float, room: int, pipeline: PipelineState) -> int:
        return 0

    def stop_rule(self, route: Hashable, temperature: float, planned: SpeculationPlan) -> StopRule:
        return replace(super().stop_rule(route, temperature, planned), per_sweep=math.inf)

    def trim(
        self, route: Hashable, temperature: float, probabilities: Sequence[float], planned: SpeculationPlan
    ) -> SpeculationPlan:
        """Send all of a tree at once."""
        return replace(super().trim(route, temperature, probabilities, planned), chunk=None)


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """What a replay runs with. Recorded picks and trees by default; picks behind dead branches are token 0 then.

    Attributes:
        drafter: Makes a drafter that moves this clock.
        target: A model that picks, behind dead branches too.
        forecast: What routing forecasts for the chain.
    """

    drafter: Callable[[Clock], Drafter] | None = None
    target: RaggedModel | None = None
    forecast: Callable[[Costs], RouteForecast | None] = Costs.forecast


RECORDED = ReplaySetup()


async def replay_text(
    recorded: RecordedText, costs: Costs, policy: SpeculationPolicy, tokenizer: object, setup: ReplaySetup = RECORDED
) -> tuple[int, float, list[int]]:
    """Make one text again: tokens after the first reply, virtual seconds after it, and the tree sizes.

    Raises:
        AssertionError: the text is another one.
    """
    clock, new = Clock(costs.cores), len(recorded.tokens) - len(recorded.prompt)
    window = len(recorded.tokens) + 64
    credits = Credits(window, SWEEPS_IN_FLIGHT, MAX_NODES + 3 * PREFILL_CHUNK)
    text = TextStream(tokenizer, recorded.prompt, max_new_tokens=new)  # type: ignore[arg-type]
    job = GenerationState(
        recorded.prompt,
        recorded.sampling,
        policy,
        PREFILL_CHUNK,
        new,
        text,
        RecordedDrafter(recorded, costs, clock) if setup.drafter is None else setup.drafter(clock),
        InlineExecutor(),
        clock=clock.seconds,
    )
    tail = RecordedTail(recorded, credits) if setup.target is None else ModelTail(setup.target, credits)
    chain = VirtualChain(tail, costs, clock, credits)
    walk = Walk(Limits(VOCABULARY, credits.window_tokens, credits.sweeps, credits.nodes), recorded.sampling)
    forecast = setup.forecast(costs)
    if forecast is not None:
        policy.expect(chain.route_key, forecast)
    first: tuple[int, float] | None = None
    async for _ in Generation(job, chain, walk).run():
        if first is None and text.tokens:
            first = len(text.tokens), clock.seconds()
    assert tuple(text.tokens) == recorded.tokens[len(recorded.prompt) :], "another text"
    assert first is not None
    return len(text.tokens) - first[0], clock.seconds() - first[1], [sweep.nodes for sweep in job.sweeps]


def replay_texts(
    texts: Sequence[RecordedText],
    costs: Costs,
    policy: SpeculationPolicy,
    tokenizer: object,
    setup: ReplaySetup = RECORDED,
) -> ReplayResult:
    """All prompts of a cell, one after another, by one method."""
    tokens = seconds = 0.0
    sizes: list[int] = []
    for recorded in texts:
        count, took_s, used = asyncio.run(replay_text(recorded, costs, policy, tokenizer, setup))
        tokens, seconds, sizes = tokens + count, seconds + took_s, sizes + used
    return ReplayResult(tokens / seconds, median(sizes), sum(sizes) / tokens)


def oracle(recorded: RecordedText) -> RecordedText:
    """The same text with a draft that knows it, at no cost."""
    trees = {}
    for length in recorded.trees:
        path = recorded.tokens[length:][:TREE]
        probabilities = tuple(ORACLE_SURE ** (place + 1) for place in range(len(path)))
        trees[length] = DraftTree(
            path, tuple(place - 1 if place else None for place in range(len(path))), probabilities
        )
    free = {length: tuple(range(len(tree))) for length, tree in trees.items()}
    return replace(recorded, trees=trees, looked_up=free)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the grid.

    Attributes:
        of_plain: The controller's speed over plain decoding's.
        of_best: The same over the best fixed choice's.
        of_alone: The same over one sweep at a time.
        bound: A note: how fast it could be if only the delay took time; None where the delay does not bind.
    """

    row: tuple[str, ...]
    of_plain: float
    of_best: float
    of_alone: float
    bound: str | None


def replay_cell(name: tuple[str, str, float], costs: Costs, texts: Sequence[RecordedText]) -> Cell:
    """Every fixed choice, the controller that waits for each sweep, and the one that does not."""
    (network, kind, temperature), tokenizer = name, AutoTokenizer.from_pretrained(TARGET)
    fixed = {
        (size, flights): replay_texts(texts, costs, FixedPolicy(size, flights), tokenizer)
        for size in SIZES
        for flights in (IN_FLIGHT if size else (1,))
    }
    plain, best = fixed[0, 1].tokens_per_s, max(fixed, key=lambda size: fixed[size].tokens_per_s)
    alone, ours = (replay_texts(texts, costs, kind_of(MAX_NODES), tokenizer) for kind_of in (OneAtATime, Goodput))
    alone = max(alone, *(fixed[size, 1] for size in SIZES), key=lambda told: told.tokens_per_s)
    others = plain, fixed[best].tokens_per_s, alone.tokens_per_s
    of_plain, of_best, of_alone = (ours.tokens_per_s / other for other in others)
    bound = None
    if network in DELAY_BOUND:
        bound = f"{network}, {kind}, {temperature:g}: {_free(texts, costs, tokenizer) / alone.tokens_per_s:.2f}"
    speeds = (f"{plain:.1f}", f"{fixed[best].tokens_per_s:.1f}", f"{best[0]} × {best[1]}")
    chosen = (f"{alone.tokens_per_s:.1f}", f"{ours.tokens_per_s:.1f}", f"{ours.nodes:g}")
    price = f"{alone.nodes_per_token:.0f} → {ours.nodes_per_token:.0f}"
    parts = (f"{of_plain:.2f}", f"{of_best:.2f}", f"{of_alone:.2f}")
    row = (f"{network}, {kind}", f"{temperature:g}", *speeds, *chosen, *parts, price)
    return Cell(row, of_plain, of_best, of_alone, bound)


def sheet(texts: dict[tuple[str, float], list[RecordedText]], pool: Pool, options: Options, console: Console) -> Sheet:
    made = Sheet(
        "replay",
        "Tokens per virtual second: plain, the best fixed tree, and what the controller chooses, one sweep at a time "
        "and more",
        (
            *("network, text", "T", "plain", "best fixed", "its K × in flight", "one at a time", "many in flight"),
            *("median K", "of plain", "of the best", "many / one at a time", "nodes per token"),
        ),
    )
    costs = {
        name: replace(PROFILES[name], forward_ms=options.forward_ms, pass_ms=options.pass_ms)
        for name in options.networks
    }
    work = [pool.submit(replay_cell, (name, *key), costs[name], texts[key]) for name in costs for key in texts]
    cells = [cell.result() for cell in track(work, "cells", console=console)]
    made.rows += [cell.row for cell in cells]
    against_plain, against_best = [cell.of_plain for cell in cells], [cell.of_best for cell in cells]
    made.notes.append(
        f"Least of plain {min(against_plain):.2f}, least of the best {min(against_best):.2f}, over {len(cells)} cells; "
        f"up to {options.prompts} prompts of {options.new_tokens} new tokens each, hop {options.forward_ms:g} ms + "
        f"{Costs(0, 1).row_ms:g} ms per node, draft {options.pass_ms:g} ms per pass, three hops. One at a "
        "time is at its best: what the controller chooses or a fixed size, whichever is faster. Nodes per token: one "
        "at a time and with many in flight."
    )
    made.notes.append(
        "Speed of the same trees if only the delay took time, and machines, drafts and bytes were free, "
        f"over one at a time: {'; '.join(cell.bound for cell in cells if cell.bound is not None)}."
    )
    made.notes.append(_oracle_note(next(iter(texts.values())), costs, AutoTokenizer.from_pretrained(TARGET)))
    made.measured = {
        "plain": against_plain,
        "best": against_best,
        "alone": [cell.of_alone for cell in cells],
        "rows": [list(row) for row in made.rows],
    }
    return made


def _free(texts: Sequence[RecordedText], costs: Costs, tokenizer: object) -> float:
    """Tokens per second where nothing takes time but the delay: whole trees at once, or ever further ones."""
    free = Costs(costs.delay_ms, math.inf, forward_ms=0.0, row_ms=0.0, pass_ms=0.0)
    return max(replay_texts(texts, free, policy, tokenizer).tokens_per_s for policy in FREE_WAYS)


def _oracle_note(texts: Sequence[RecordedText], networks: Mapping[str, Costs], tokenizer: object) -> str:
    """What a draft that is always right gives with small trees."""
    known = [oracle(recorded) for recorded in texts]
    said = []
    for network, costs in networks.items():
        alone, pipe = (
            replay_texts(known, costs, policy, tokenizer).tokens_per_s
            for policy in (FixedPolicy(ORACLE_NODES), FixedPolicy(ORACLE_NODES, IN_FLIGHT[-1]))
        )
        said.append(f"{network} {alone:.0f} and {pipe:.0f}")
    return (
        f"An oracle, which costs nothing and is always right, with {ORACLE_NODES} nodes per sweep: tokens/s one at a "
        f"time and with {IN_FLIGHT[-1]} in flight: {'; '.join(said)}."
    )


def record_kind(kind: str, temperature: float, options: Options) -> list[RecordedText]:
    """Texts and trees of one kind and temperature."""
    pair = ModelPair(load_whole(TARGET, torch.float32), load_whole(DRAFT, torch.float32), options.new_tokens)
    prompts = prompts_of(kind, options.prompts)
    return record_trees(pair, prompts, [Sampling(FIRST_SEED + place, temperature) for place in range(len(prompts))])


def record_all(pool: Pool, options: Options, console: Console) -> dict[tuple[str, float], list[RecordedText]]:
    """Texts and trees of every kind and temperature."""
    keys = [(kind, temperature) for kind in KINDS for temperature in options.temperatures]
    work = [pool.submit(record_kind, *key, options) for key in keys]
    found = [texts.result() for texts in track(work, "recording", console=console)]
    return dict(zip(keys, found, strict=True))


def one_core() -> None:
    """Each process of the pool has one core."""
    torch.set_num_threads(1)
    quiet_libraries()


def all_cells(work: Sequence[Callable[[], T]], console: Console) -> list[T]:
    """What each of these makes in a process of its own that has one core, in their order."""
    with Pool(os.cpu_count(), get_context("spawn"), one_core) as pool:
        cells = [pool.submit(one) for one in work]
        return [cell.result() for cell in track(cells, "cells", console=console)]


def main() -> None:
    """Record, replay, print, and fail where it is slower than it may be."""
    options = tyro.cli(Options)
    one_core()
    console = make_console()
    with Pool(os.cpu_count(), get_context("spawn"), one_core) as pool:
        made = sheet(record_all(pool, options, console), pool, options, console)
    made.finish(console, options)
    if min(made.measured["plain"]) < PLAIN_BOUND or min(made.measured["best"]) < BEST_BOUND:
        sys.exit(f"replay: a cell is below {PLAIN_BOUND} of plain or {BEST_BOUND} of the best fixed size")
