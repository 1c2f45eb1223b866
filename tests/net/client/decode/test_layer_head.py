"""An MTP layer drafts in a swarm: rows come with replies, text after text; each is the plain one, in fewer sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.in_process_swarm import in_process_swarm
from tests.model.published_mtp import publish

pytestmark = pytest.mark.timeout(60)

PROMPTS = list(range(3, 30)), [*range(3, 20), 99, 98, 97]


async def test_texts_are_the_plain_ones_also_when_one_is_told_again(tmp_path: Path) -> None:
    folder = publish("deepseek_v3", tmp_path, is_able=True)
    async with (
        in_process_swarm(folder, ["0-2", "2-4"]) as here,
        here.client(draft="mtp", lookup=False, siblings=False) as swarm,
    ):
        plain = [await swarm.generate(prompt, max_new_tokens=20, nodes=0) for prompt in PROMPTS]
        for turn in (0, 1, 0, 0):
            told = await swarm.generate(PROMPTS[turn], max_new_tokens=20, nodes=12)
            assert told.tokens == plain[turn].tokens
            assert told.stats.acceptance_length > 1.5
