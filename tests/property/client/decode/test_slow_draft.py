"""A draft that is slow, stuck or broken: the text goes on without it. Real threads, a chain in virtual time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.simulation.chain import Costs, RecordedTail, VirtualChain
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.recorded import RecordedText
from client.decode.goodput import Goodput
from client.decode.loop import Generation
from client.decode.policy import FixedPolicy, SpeculationPolicy
from client.decode.state import GenerationState
from client.decode.text_stream import FastTokenizer, TextStream
from client.decode.walk import Walk
from client.draft.drafter import NO_PICKS
from client.draft.search.tree import NO_LIMIT, DraftTree, Picks, StopRule
from swarm.demo import TARGET
from swarm.protocol.messages import Credits, Sampling
from swarm.protocol.session import Limits
from tests.property.client.decode.test_pipeline import NEW, PROMPT, VOCABULARY, recorded

AMPLE = Credits(256, 64, 4_096)


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    found: FastTokenizer = AutoTokenizer.from_pretrained(TARGET)
    return found


class Ready(VirtualChain):
    """Whatever was sent is answered by the time that anybody asks."""

    @property
    def has_answer(self) -> bool:
        return bool(self._flights)


class Draft:
    """Knows the next token. grown: how many trees it was asked for."""

    def __init__(self, text: Sequence[int]) -> None:
        self.grown = 0
        self._text = text

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: StopRule = NO_LIMIT
    ) -> DraftTree:
        self.grown += 1
        return DraftTree(tuple(self._text[len(sequence) :][:1]), (None,), (0.9,), rounds=1)

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        pass


class Stuck(Draft):
    """Reads the text for its first tree, until it is let go."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(text)
        self.asked, self.go = threading.Event(), threading.Event()

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: StopRule = NO_LIMIT
    ) -> DraftTree:
        tree, is_first = super().grow(sequence, nodes, depth, sampling, worth), self.grown == 1
        self.asked.set()
        assert not is_first or self.go.wait(60)
        return replace(tree, has_read=is_first)


class Greedy(Draft):
    """Asks for more memory than there is."""

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: StopRule = NO_LIMIT
    ) -> DraftTree:
        if self.grown == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().grow(sequence, nodes, depth, sampling, worth)


async def made(
    text: RecordedText, draft: Draft, policy: SpeculationPolicy, tokenizer: FastTokenizer, credits: Credits = AMPLE
) -> tuple[GenerationState, list[int]]:
    """The text, told by this draft, and when how many tokens were there: after each reply."""
    clock = Clock()
    chain = Ready(RecordedTail(text, credits), Costs(1, 1_000), clock, credits)
    policy.expect(chain.route_key, replace(Costs(1, 1_000).forecast(), links_ms=20.0))
    stream = TextStream(tokenizer, text.prompt, stop=(), eos_ids=frozenset(), max_new_tokens=NEW)
    limits = Limits(VOCABULARY, credits.window_tokens, credits.sweeps, credits.nodes)
    counts: list[int] = []
    with ThreadPoolExecutor(1) as drafting:
        job = GenerationState(
            text.prompt, text.sampling, policy, 512, NEW, stream, draft, drafting, clock=time.perf_counter
        )
        async for _ in Generation(job, chain, Walk(limits, text.sampling)).run():
            counts.append(len(stream.tokens))
            if isinstance(draft, Stuck) and len(stream.tokens) >= NEW // 2:
                draft.go.set()
                await asyncio.sleep(0.01)
    assert tuple(stream.tokens) == text.tokens[PROMPT:]
    return job, counts


async def test_a_text_does_not_wait_for_a_draft_that_reads_its_prompt(tokenizer: FastTokenizer) -> None:
    """Half of it comes plainly, while the first tree is not there; then it is drafted for."""
    text = recorded(1, 0.9)
    draft = Stuck(text.tokens)
    job, counts = await made(text, draft, Goodput(16), tokenizer)
    plain = [sweep for sweep in job.sweeps if not sweep.nodes]
    assert counts[: NEW // 2] == list(range(1, NEW // 2 + 1))
    assert len(plain) >= NEW // 2
    assert job.sweeps[0].reason == "the draft takes too long"
    assert draft.grown > 1
    assert any(sweep.nodes for sweep in job.sweeps), "trees come again"


async def test_whoever_asks_for_trees_waits_for_them(tokenizer: FastTokenizer) -> None:
    text = recorded(1, 0.9)
    draft = Stuck(text.tokens)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(made(text, draft, FixedPolicy(1), tokenizer))
        assert await asyncio.to_thread(draft.asked.wait, 60)
        await asyncio.sleep(0.2)
        assert not waiting.done()
        draft.go.set()
    job, _ = waiting.result()
    assert job.sweeps[0].nodes == 1


async def test_a_draft_without_memory_is_given_up(tokenizer: FastTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    text = recorded(2, 0.9)
    draft = Greedy(text.tokens)
    with caplog.at_level(logging.WARNING):
        job, _ = await made(text, draft, FixedPolicy(1), tokenizer)
    assert [sweep.nodes for sweep in job.sweeps][:3] == [1, 1, 1]
    assert not any(sweep.nodes for sweep in job.sweeps[3:])
    assert [record.message for record in caplog.records] == [
        "the draft ran out of memory, the text goes on without it: CUDA out of memory. Tried to allocate 2.00 GiB"
    ]


@pytest.mark.parametrize("sweeps", [1, 64])
@pytest.mark.parametrize("nodes", [1, 7, 4_096])
async def test_a_prompt_goes_in_parts_that_are_allowed(sweeps: int, nodes: int, tokenizer: FastTokenizer) -> None:
    """The chain's own `SessionState` refuses more (F1)."""
    text = recorded(3, 0.9)
    job, _ = await made(text, Draft(text.tokens), Goodput(16), tokenizer, Credits(256, sweeps, nodes))
    assert job.prefill_sweeps >= -(-(PROMPT - 1) // nodes)
