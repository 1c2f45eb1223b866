"""Texts over several machines behind a prompt of many parts: those of one process, whoever else computes meanwhile."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import aclosing
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from node.session.step_cost import LONG_TOKENS
from swarm.demo import TARGET
from tests.in_process_swarm import in_process_swarm
from tests.net.three_nodes import service_of

TOKENS = 3_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo target with a rope that reaches twice as far."""
    folder = tmp_path / "long"
    shutil.copytree(TARGET, folder)
    config = json.loads((TARGET / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4_096}))
    return folder


async def test_a_long_prompt_in_parts_is_that_of_one_process_and_others_go_on(model: Path) -> None:
    torch.manual_seed(0)
    prompt = list(islice(cycle(torch.randint(3, 4_000, (701,)).tolist()), TOKENS))
    whole: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([prompt])
    made = whole.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, eos_token_id=None
    )
    meanwhile = 0
    async with (
        in_process_swarm(model, ["0-4", "4-8", "8-12"]) as here,
        here.client(lookup=False, siblings=False) as client,
        asyncio.TaskGroup() as tasks,
    ):
        long = tasks.create_task(client.generate(prompt, max_new_tokens=8, temperature=0, end_tokens=()))
        while not long.done():
            async with aclosing(client.stream(prompt[:40], max_new_tokens=16, temperature=0)) as pieces:
                async for piece in pieces:
                    meanwhile += 0 if long.done() else len(piece.tokens)
        result = await long
        learned = [service_of(node).engine._cost.per_key_ms for node in here.nodes]
    assert list(result.tokens) == made[0, TOKENS:].tolist()
    assert TOKENS > LONG_TOKENS
    assert all(ms > 0 for ms in learned), "what keys cost was seen"
    assert meanwhile >= 8
