"""Texts of models with other kinds of attention, over real nodes and gRPC on loopback: trees change no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import node.model.span
from client import AsyncSwarm
from node.model.family_check import shrink
from swarm.demo import DRAFT, TARGET
from tests.in_process_swarm import in_process_swarm
from tests.net.three_nodes import engine_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW = 16
KINDS = {
    "deepseek_v32": {"index_topk": 6},
    "gemma3n_text": {},
}
"""An indexer's keys; keys of other layers, streams of rows and tokens in every layer."""
PROMPT = (20, 400, 37, 5, 811, 20, 90, 12, 1200, 33, 20)


@dataclass(frozen=True, slots=True)
class Running:
    whole: PreTrainedModel
    client: AsyncSwarm


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(KINDS))
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    config = shrink(cast("Any", CONFIG_MAPPING[request.param])(**KINDS[request.param]))
    for name, value in {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.eos_token_id = None
    torch.manual_seed(3)
    whole = cast("Any", AutoModelForCausalLM).from_config(config, attn_implementation="eager").eval()
    for weight in whole.parameters():
        weight.data += torch.randn_like(weight) * 0.05
    folder: Path = tmp_path_factory.mktemp(request.param)
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.model.span, "TESTED", {request.param})  # whose self-test runs elsewhere
        async with in_process_swarm(folder, ["0-2", "2-4", "4-6"]) as here, here.client(draft=DRAFT) as swarm:
            for each in here.nodes:
                await engine_of(each).on_thread(int)  # its thread lives as long as the node
            yield Running(whole, swarm)


async def test_trees_give_the_text_that_the_class_itself_generates(running: Running) -> None:
    result = await running.client.generate(PROMPT, max_new_tokens=NEW, nodes=16)
    assert max(sweep.nodes for sweep in result.stats.sweeps) == 16
    own = cast("Any", running.whole).generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    assert list(result.tokens) == own[0, len(PROMPT) :].tolist()


async def test_sampled_texts_with_trees_are_the_plain_texts(running: Running) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 5}
    plain = await running.client.generate(PROMPT, nodes=0, **options)
    tree = await running.client.generate(PROMPT, nodes=16, **options)
    assert tree.tokens == plain.tokens
