"""The client's decode loop over a chain of one hop that computes in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from transformers import AutoTokenizer

from benchmarks.simulation.acceptance import answer
from client.chain.answers import Answer
from client.decode.loop import Generation
from client.decode.policy import FixedPolicy, SpeculationPolicy
from client.decode.state import GenerationState
from client.decode.text_stream import TextStream
from client.decode.walk import Walk
from client.draft.drafter import Drafter
from client.draft.sources.model import LocalSession
from swarm.compute.ragged_batch import RaggedModel
from swarm.demo import TARGET
from swarm.protocol.messages import Credits, Sampling, Sweep
from swarm.protocol.session import Limits
from swarm.routing.route import Route

FIXED = FixedPolicy(16)


class InProcessChain:
    """A chain of one hop without a network; its sweeps report the latency of a wide-area network."""

    hops = 1
    first_link_ms = 0.0
    route_key = "in process"
    has_answer = False

    def __init__(self, target: RaggedModel, credits: Credits) -> None:
        self.credits = credits
        self._answers: deque[Answer] = deque()
        self.limits = Limits(target.vocab_size, credits.window_tokens, credits.sweeps, credits.nodes)
        self._session = LocalSession(target, self.limits)

    @property
    def route(self) -> Route:
        """There is none: nobody watches picks here."""
        raise NotImplementedError

    def send(self, sweep: Sweep) -> None:
        self._answers.append(Answer(answer(self._session, sweep), 100.0 + 0.1 * len(sweep.tokens)))

    async def answer(self) -> Answer:
        return self._answers.popleft()

    async def idle(self, max_ms: float) -> None:
        await asyncio.sleep(max_ms / 1e3)


@asynccontextmanager
async def decoding(
    target: RaggedModel, drafter: Drafter, prompt: list[int], sampling: Sampling, policy: SpeculationPolicy = FIXED
) -> AsyncIterator[tuple[GenerationState, AsyncIterator[str]]]:
    """The client's own loop over 24 tokens."""
    text = TextStream(AutoTokenizer.from_pretrained(TARGET), prompt, stop=(), eos_ids=frozenset(), max_new_tokens=24)
    chain = InProcessChain(target, Credits(window_tokens=256, sweeps=4, nodes=256))
    with ThreadPoolExecutor(1) as drafting:
        job = GenerationState(tuple(prompt), sampling, policy, 512, 24, text, drafter, drafting)
        yield job, Generation(job, chain, Walk(chain.limits, Sampling())).run()
