"""Multi-step speculative sampling through real nodes: what was drawn reaches the tail, and what it picks is walked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
import torch

import node.sweep_run
from client import AsyncSwarm
from client.report import summary
from swarm.demo import DRAFT, TARGET
from swarm.guess import Guess
from swarm.multistep import picks
from tests.net.running import prompt
from tests.swarm_here import swarm_here

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW_TOKENS = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncSwarm]:
    async with swarm_here(TARGET, ["0-6", "6-12"]) as here, here.client(draft=DRAFT) as swarm:
        await swarm.generate("It", max_new_tokens=3, nodes=1)  # starts every thread that lives as long as they do
        yield swarm


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[Guess | None]:
    """What the tail was told was drawn, node by node."""
    seen: list[Guess | None] = []

    def recording(
        probs: torch.Tensor, positions: Sequence[int], guesses: Sequence[Guess | None], seed: int, sequence: int
    ) -> list[int]:
        seen.extend(guesses)
        return picks(probs, positions, guesses, seed, sequence)

    monkeypatch.setattr(node.sweep_run, "picks", recording)
    return seen


@pytest.mark.parametrize("nodes", [12, None])
async def test_draws_reach_the_tail_and_trees_are_walked(
    nodes: int | None, client: AsyncSwarm, arrived: list[Guess | None]
) -> None:
    result = await client.generate(
        prompt(0, 60), max_new_tokens=NEW_TOKENS, temperature=1.0, seed=4, nodes=nodes, multistep=True
    )
    assert len(result.tokens) == NEW_TOKENS
    assert result.stats.acceptance_length > (1.0 if nodes is None else 1.3)
    assert not result.stats.reproducible
    assert "may differ from run to run (multi-step sampling)" in summary(result.stats)
    assert sum(guess is not None for guess in arrived) >= len(result.stats.sweeps) / 2
    assert any(guess is None for guess in arrived), "leaves have none"


async def test_plain_decoding_by_it_needs_no_draft(client: AsyncSwarm, arrived: list[Guess | None]) -> None:
    result = await client.generate(prompt(1), max_new_tokens=6, temperature=1.0, seed=4, nodes=0, multistep=True)
    assert result.stats.acceptance_length == 1.0
    assert arrived == [None] * len(result.stats.sweeps)


async def test_greedy_picks_are_the_same_by_either_rule(client: AsyncSwarm, arrived: list[Guess | None]) -> None:
    texts = [
        (await client.generate(prompt(2), max_new_tokens=12, nodes=6, multistep=multistep)).tokens
        for multistep in (False, True)
    ]
    assert texts[0] == texts[1]
    assert not arrived


async def test_it_is_off_by_default(client: AsyncSwarm, arrived: list[Guess | None]) -> None:
    result = await client.generate(prompt(3), max_new_tokens=6, temperature=1.0, seed=1, nodes=6)
    assert result.stats.reproducible
    assert not arrived
