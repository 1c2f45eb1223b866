"""A checkpoint's own sampling: what its generation_config.json says holds where a generation says nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import pytest

from client.base.options import GenerateOptions, make_options
from swarm.demo import TARGET
from tests.in_process_swarm import in_process_swarm

OWN: Final = GenerateOptions(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.2)
PROMPT: Final = "It was a dark night"
LEAST: Final = GenerateOptions(max_new_tokens=12, seed=3)
BOTH: Final = GenerateOptions(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.2, max_new_tokens=12, seed=3)
GREEDY: Final = GenerateOptions(temperature=0, repetition_penalty=1, max_new_tokens=12, seed=3)


async def test_a_checkpoints_sampling_holds_where_a_generation_says_nothing(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TARGET, tmp_path / "model"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **OWN, "do_sample": True}))
    async with in_process_swarm(folder, ["0-12"]) as running:
        async with running.client() as swarm:
            assert swarm.defaults == OWN
            own = await swarm.generate(PROMPT, **LEAST)
            greedy = await swarm.generate(PROMPT, **GREEDY)
            async with swarm.chat(**LEAST) as chat:
                said = await chat.say(PROMPT)
        async with running.client(generation_config=False) as swarm:
            assert swarm.defaults == {}
            assert (await swarm.generate(PROMPT, **BOTH)).text == own.text
            assert (await swarm.generate(PROMPT, **LEAST)).text == greedy.text
            async with swarm.chat(**BOTH) as chat:
                assert (await chat.say(PROMPT)).text == said.text
    assert own.text != greedy.text


@pytest.mark.parametrize(("given", "wanted"), [(0.9, 0.9), (0, 0)])
def test_what_is_given_counts_before_it(given: float, wanted: float) -> None:
    assert make_options({"temperature": given}).with_defaults(OWN).temperature == wanted
