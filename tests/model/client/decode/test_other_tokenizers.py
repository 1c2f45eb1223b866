"""A draft of another tokenizer, over real nodes: the text is plain decoding's, and the draft brings tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.simulation.acceptance import demo_prompts
from client import AsyncSwarm
from swarm.demo import TARGET
from tests.in_process_swarm import in_process_swarm

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

NEW = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(foreign_draft: Path) -> AsyncIterator[AsyncSwarm]:
    """Nothing but the draft proposes tokens."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    async with (
        in_process_swarm(TARGET, ["0-6", "6-12"]) as here,
        here.client(draft=foreign_draft, lookup=False, siblings=False, threads=1) as swarm,
    ):
        await swarm.generate("It", max_new_tokens=3, nodes=1)  # starts every thread that lives as long as they do
        yield swarm


@pytest.mark.parametrize(
    "options",
    [{"multistep": True}, {"temperature": 1.0, "seed": 3}],
    ids=["greedy", "sampled"],
)
async def test_texts_are_those_of_plain_decoding(client: AsyncSwarm, options: dict[str, Any]) -> None:
    [prompt] = demo_prompts(1, tokens=40)
    plain = await client.generate(prompt, max_new_tokens=NEW, nodes=0, **options)
    tree = await client.generate(prompt, max_new_tokens=NEW, nodes=12, **options)
    assert tree.tokens == plain.tokens
    assert tree.text == plain.text
    assert plain.stats.acceptance_length == 1.0
    assert sum(sweep.accepted_tokens for sweep in tree.stats.sweeps) >= 5, "the draft's tokens are in the text"


async def test_multi_step_sampling_accepts_what_was_drawn(client: AsyncSwarm) -> None:
    [prompt] = demo_prompts(1, tokens=40)
    result = await client.generate(prompt, max_new_tokens=NEW, nodes=12, temperature=1.0, seed=3, multistep=True)
    assert len(result.tokens) == NEW
    assert sum(sweep.accepted_tokens for sweep in result.stats.sweeps) > 0
