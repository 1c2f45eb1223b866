"""Many texts of one client at once: their drafts share passes, and each text is that of plain decoding."""

from __future__ import annotations

import asyncio

import pytest

from client.draft import joined
from swarm.demo import DRAFT, TARGET
from tests.in_process_swarm import in_process_swarm

TEXTS = 12


async def test_texts_are_those_of_plain_decoding_while_drafts_share_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = joined._joined

    def counted(model: object, passes: list[object]) -> object:
        sizes.append(len(passes))
        return run(model, passes)  # type: ignore[arg-type]

    monkeypatch.setattr(joined, "_joined", counted)
    prompts = [f"{number} nights ago the old captain" for number in range(TEXTS)]
    async with in_process_swarm(TARGET, ["0-6", "6-12"]) as swarm, swarm.client(draft=DRAFT, lookup=False) as client:

        async def text(prompt: str, seed: int, nodes: int) -> tuple[int, ...]:
            made = await client.generate(prompt, max_new_tokens=16, temperature=0.8, seed=seed, nodes=nodes)
            return made.tokens

        plain = [await text(prompt, seed, 0) for seed, prompt in enumerate(prompts)]
        drafted = await asyncio.gather(*(text(prompt, seed, 16) for seed, prompt in enumerate(prompts)))
    assert drafted == plain
    assert max(sizes) > 4, "more than four texts at once were in one forward"
