"""The product's claim: in fp32 the text depends on model, prompt, options and seed, and on nothing else.

Strict token equality throughout, over real nodes and gRPC on loopback. References: Hugging Face's `generate`, and the
oracle's few lines over Hugging Face's logits. Design: docs/design/session-protocol.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import client.library.jobs
from client import AsyncSwarm, Result
from client.base.stats import SweepMeasurement
from client.chain.chain import Chain
from client.decode.goodput import Goodput
from client.decode.policy import Occupancy, SpeculationPlan
from client.decode.prompt_parts import CHAIN_PART
from client.draft.search.tree import NO_LIMIT
from swarm.demo import DRAFT, PASSAGES, TARGET
from swarm.protocol.messages import Sampling
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.oracle import oracle_scores

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW = 20
"""Tokens of most generations here."""
TIE = 1e-4
"""A flip is excused only where the reference's own two best scores lie closer than this."""
ALLOWED_TIES = 1
DEEPER = "deeper"
PART = "a part"
LAYOUTS = {
    "one": ["0-12"],
    "three": ["0-4", "4-8", "8-12"],
    "overlapping": ["0-8", "4-12"],
}


@dataclass(frozen=True, slots=True)
class Running:
    """A swarm and a client with a draft, warm."""

    here: InProcessSwarm
    client: AsyncSwarm

    @property
    def rows(self) -> list[int]:
        """Rows that went through each node's forwards since it started."""
        return [node.sessions.info().counters.rows_in_forwards for node in self.here.nodes]


async def run(layout: str) -> AsyncIterator[Running]:
    async with in_process_swarm(TARGET, LAYOUTS[layout]) as here, here.client(draft=DRAFT) as swarm:
        await swarm.generate("It", max_new_tokens=3, nodes=1)  # starts the threads that live as long as the swarm
        yield Running(here, swarm)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def one_thread_for_files() -> None:
    """Threads that a loop starts when several files are read at once would outlive their test."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one() -> AsyncIterator[Running]:
    async for running in run("one"):
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three() -> AsyncIterator[Running]:
    async for running in run("three"):
        yield running


@pytest.fixture(scope="module")
def hugging_face() -> PreTrainedModel:
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    return model


@cache
def prompt(line: int, tokens: int = 12) -> tuple[int, ...]:
    text = json.loads(PASSAGES.read_text().splitlines()[line])["text"]
    return tuple(AutoTokenizer.from_pretrained(TARGET)(text).input_ids[:tokens])


@torch.inference_mode()
def greedy(model: PreTrainedModel, ids: tuple[int, ...], count: int = NEW) -> tuple[int, ...]:
    """Hugging Face's own continuation."""
    made = cast("Any", model).generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return tuple(made[0, len(ids) :].tolist())


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: tuple[int, ...], tokens: tuple[int, ...]) -> NDArray[np.float32]:
    """Logits at the place of each token, teacher-forced over one full forward."""
    logits = cast("Any", model)(torch.tensor([[*ids, *tokens[:-1]]])).logits[0, len(ids) - 1 :]
    return np.asarray(logits.numpy())


def gaps(
    logits: NDArray[np.float32], ids: tuple[int, ...], tokens: tuple[int, ...], sampling: Sampling
) -> Iterator[float]:
    """For each token, by how much the oracle's best score at its place exceeds its own: 0 for the oracle's pick.

    Infinite where the filters leave the token out.
    """
    for offset, token in enumerate(tokens):
        scores = oracle_scores(logits[offset], len(ids) + offset, sampling)
        best = min(scores, key=lambda other: (-scores[other], other))
        gap = scores[best] - scores.get(token, float("-inf"))
        yield 0.0 if token == best else max(gap, 1e-12)


async def same_as_plain(running: Running, ids: tuple[int, ...], sizes: tuple[int, ...], **options: Any) -> Result:  # noqa: ANN401
    """Generate plainly and with every tree size; all must give the plain tokens, and trees must have been used."""
    options = {"max_new_tokens": NEW, **options}
    plain = await running.client.generate(ids, nodes=0, **options)
    assert plain.stats.acceptance_length == 1
    for size in sizes:
        tree = await running.client.generate(ids, nodes=size, **options)
        assert tree.tokens == plain.tokens, f"K = {size}"
        assert tree.text == plain.text
        assert max(sweep.nodes for sweep in tree.stats.sweeps) == size, "the trees were as large as asked"
        assert len(tree.stats.sweeps) <= len(plain.stats.sweeps)
    return plain


@pytest.mark.parametrize("line", [0, 5])
async def test_greedy_over_one_span_and_three_is_hugging_faces(
    line: int, one: Running, three: Running, hugging_face: PreTrainedModel
) -> None:
    ids = prompt(line)
    expected = greedy(hugging_face, ids)
    before = one.rows, three.rows
    for running in (one, three):
        result = await running.client.generate(ids, max_new_tokens=NEW, nodes=0)
        assert result.tokens == expected
        assert len(result.stats.hops) == len(running.here.nodes), "every node was part of the chain"
    grown = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, (one.rows, three.rows), strict=True)]
    assert grown == [[len(ids) + NEW - 1], [len(ids) + NEW - 1] * 3], "each token went once through each hop"


SAMPLED = [
    Sampling(seed=11, temperature=0.6),
    Sampling(seed=12, temperature=1.0),
    Sampling(seed=13, temperature=1.0, top_k=20),
    Sampling(seed=14, temperature=1.0, top_p=0.8),
    Sampling(seed=15, temperature=1.0, min_p=0.05),
    Sampling(seed=2**64 - 1, temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
]


def options_of(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in ("seed", "temperature", "top_k", "top_p", "min_p")}


async def test_sampled_text_is_the_oracles(three: Running, hugging_face: PreTrainedModel) -> None:
    flips: list[float] = []
    best_alone = 0
    for line, sampling in enumerate(SAMPLED):
        ids = prompt(line)
        result = await three.client.generate(ids, max_new_tokens=12, nodes=16, **options_of(sampling))
        logits = logits_of(hugging_face, ids, result.tokens)
        flips += [gap for gap in gaps(logits, ids, result.tokens, sampling) if gap > 0]
        best_alone += sum(gap > 0 for gap in gaps(logits, ids, result.tokens, Sampling()))
        if options_of(sampling) != options_of(unfiltered := Sampling(sampling.seed, sampling.temperature)):
            assert any(gap > TIE for gap in gaps(logits, ids, result.tokens, unfiltered)), (
                "the filter decided something"
            )
    print(f"{len(flips)} excused flips in {12 * len(SAMPLED)} picks: {flips}")  # noqa: T201
    assert all(gap < TIE for gap in flips)
    assert len(flips) <= ALLOWED_TIES
    assert best_alone > 12, "the noise decided: greedy would have picked other tokens"


@pytest.mark.parametrize(
    ("temperature", "seed", "line", "sizes"),
    [(0.0, 0, 1, (1, 16, 256)), (0.6, 21, 2, (4,)), (1.0, 22, 3, (1, 64, 256))],
)
async def test_speculative_text_is_the_plain_text_for_every_tree_size(
    temperature: float, seed: int, line: int, sizes: tuple[int, ...], three: Running
) -> None:
    await same_as_plain(three, prompt(line), sizes, temperature=temperature, seed=seed)


async def test_seeds_and_prompts_decide_the_text(three: Running) -> None:
    texts = set()
    for line, seed in ((6, 41), (6, 42), (7, 41)):
        result = await three.client.generate(prompt(line), max_new_tokens=8, nodes=16, temperature=1.0, seed=seed)
        texts.add(result.tokens)
    assert len(texts) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_trees_that_grow_while_sweeps_are_in_flight_leave_the_plain_text(
    temperature: float, three: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small trees, sent deeper and deeper as long as the credits allow; tokens come from what was not verified yet."""

    monkeypatch.setattr(Goodput, "plan", lambda *_: SpeculationPlan(3, 1e9, "small"))
    monkeypatch.setattr(Goodput, "max_nodes", lambda *_: 4)
    monkeypatch.setattr(Goodput, "occupancy", lambda *_: Occupancy())  # how fast the machine is decides nothing
    monkeypatch.setattr(Chain, "has_answer", False)  # on loopback an answer may be there before a tree is
    monkeypatch.setattr(Goodput, "min_probability", lambda *_: 0.0)
    monkeypatch.setattr(
        Goodput, "extend", lambda _, route, probabilities, pipeline: SpeculationPlan(len(probabilities), 1e9, DEEPER)
    )
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": temperature, "seed": 81}
    plain = await three.client.generate(prompt(4), nodes=0, **options)
    result = await three.client.generate(prompt(4), **options)
    assert result.tokens == plain.tokens
    deep = [sweep for sweep in result.stats.sweeps if sweep.reason == DEEPER]
    assert sum(sweep.emitted for sweep in deep) > 0
    assert sum(sweep.emitted == 0 for sweep in deep) > 0, "and some were left behind"


async def test_trees_that_travel_in_parts_leave_the_plain_text(three: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best nodes of a tree leave first, the others right behind them; tokens come from all parts."""
    monkeypatch.setattr(Goodput, "plan", lambda *_: SpeculationPlan(12, 1e9, "a tree"))
    monkeypatch.setattr(Goodput, "stop_rule", lambda *_: NO_LIMIT)
    monkeypatch.setattr(Goodput, "trim", lambda *_: SpeculationPlan(12, 1e9, "trimmed", chunk=4))
    monkeypatch.setattr(Goodput, "max_nodes", lambda *_: 4)
    monkeypatch.setattr(Goodput, "occupancy", lambda *_: Occupancy())  # how fast the machine is decides nothing
    monkeypatch.setattr(Goodput, "min_probability", lambda *_: 0.0)
    monkeypatch.setattr(
        Goodput, "extend", lambda _, route, probabilities, pipeline: SpeculationPlan(len(probabilities), 1e9, PART)
    )
    monkeypatch.setattr(Chain, "has_answer", False)
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "seed": 83}
    plain = await three.client.generate(prompt(5), nodes=0, **options)
    result = await three.client.generate(prompt(5), **options)
    assert result.tokens == plain.tokens
    firsts, parts = ([s for s in result.stats.sweeps if (s.reason == PART) is part] for part in (False, True))
    assert all(sweep.nodes <= 4 for sweep in result.stats.sweeps)
    assert sum(sweep.nodes for sweep in parts) > sum(sweep.nodes for sweep in firsts)
    assert sum(sweep.emitted for sweep in parts) > 0
    assert result.stats.trees == len(firsts) < len(result.stats.sweeps)


async def test_what_goodput_chooses_by_itself_leaves_the_plain_text(
    three: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent, learn = list[SweepMeasurement](), Goodput.observe_sweep

    def noted(goodput: Goodput, route: Hashable, what: SweepMeasurement) -> None:
        spent.append(what)
        learn(goodput, route, what)

    monkeypatch.setattr(Goodput, "observe_sweep", noted)
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "seed": 82}
        plain = await three.client.generate(prompt(7), nodes=0, **options)
        result = await three.client.generate(prompt(7), **options)
        assert result.tokens == plain.tokens
        assert all(sweep.reason for sweep in result.stats.sweeps)
    pinged = [what.network_ms for what in spent if what.network_ms]
    assert pinged, "of all links"


async def test_a_prompt_in_chunks_gives_the_same_text(three: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(8, tokens=61)
    whole = await three.client.generate(ids, max_new_tokens=8, temperature=0.6, seed=51)
    monkeypatch.setattr(client.library.jobs, "PREFILL_CHUNK", 7)
    for nodes in (0, 16):
        cut = await three.client.generate(ids, max_new_tokens=8, nodes=nodes, temperature=0.6, seed=51)
        assert cut.tokens == whole.tokens
        assert (whole.stats.prefill_sweeps, cut.stats.prefill_sweeps) == (1, 9)


async def test_a_long_prompt_goes_in_a_chains_parts(three: Running, hugging_face: PreTrainedModel) -> None:
    ids = tuple(token for line in range(8, 14) for token in prompt(line, 200))[:550]
    result = await three.client.generate(ids, max_new_tokens=8, nodes=16)
    assert result.stats.prefill_sweeps == -(-(len(ids) - 1) // CHAIN_PART) == 5
    assert result.tokens == greedy(hugging_face, ids, 8)


async def test_other_span_borders_give_the_same_text(one: Running) -> None:
    """Uneven ones, where a node runs only some of its layers (R12)."""
    expected = await same_as_plain(one, prompt(3), (16,), temperature=1.0, seed=61)
    async for running in run("overlapping"):
        assert (await same_as_plain(running, prompt(3), (16,), temperature=1.0, seed=61)).tokens == expected.tokens
        hops = [hop.span for hop in (await running.client.route()).hops]
        held = [str(record.span) for record in (await running.client.route()).records]
        assert [str(hop) for hop in hops] != held


async def test_a_tree_of_2048_nodes(three: Running) -> None:
    plain = await three.client.generate(prompt(12), max_new_tokens=7, nodes=0, temperature=1.0, seed=71)
    before = three.rows
    tree = await three.client.generate(prompt(12), max_new_tokens=7, nodes=2048, temperature=1.0, seed=71)
    assert tree.tokens == plain.tokens
    assert max(sweep.nodes for sweep in tree.stats.sweeps) == 2048
    assert all(after - rows > 2048 for rows, after in zip(before, three.rows, strict=True))
