"""`generate(**inputs)` over real nodes returns the very ids that transformers' own returns in one process."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from client import AsyncDistributedModel
from swarm.demo import TARGET
from tests.net.three_nodes import ThreeNodes, three_nodes

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "It was a dark night, and the old captain"
TOKENIZER = AutoTokenizer.from_pretrained(TARGET)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[ThreeNodes]:
    async with three_nodes() as running:
        yield running


@pytest.fixture(scope="module")
def whole() -> Any:  # noqa: ANN401 (transformers' models have no common type)
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 24},
    "default length": {},
    "max_length": {"max_length": 20},
    "repetition penalty": {"max_new_tokens": 24, "repetition_penalty": 1.3},
    "another end": {"max_new_tokens": 24, "eos_token_id": 15},
    "stop string": {"max_new_tokens": 24, "stop_strings": ["the"], "tokenizer": TOKENIZER},
}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
async def test_greedy_ids_are_those_of_transformers(
    running: ThreeNodes,
    whole: Any,  # noqa: ANN401
    arguments: dict[str, Any],
) -> None:
    inputs = TOKENIZER(PROMPT, return_tensors="pt")
    expected = whole.generate(**inputs, **arguments, do_sample=False, pad_token_id=2)
    found = await AsyncDistributedModel(running.client).generate(**inputs, **arguments)
    assert found.tolist() == expected.tolist()


async def test_drawn_ids_are_those_of_the_library(running: ThreeNodes) -> None:
    model = AsyncDistributedModel(running.client)
    inputs = TOKENIZER(PROMPT, return_tensors="pt")
    found = await model.generate(**inputs, max_new_tokens=12, do_sample=True, temperature=0.8, top_k=0, seed=5)
    alone = await running.client.generate(inputs.input_ids[0].tolist(), max_new_tokens=12, temperature=0.8, seed=5)
    assert found[0, inputs.input_ids.shape[1] :].tolist() == list(alone.tokens)


async def test_a_text_streamer_shows_the_text(running: ThreeNodes) -> None:
    inputs = TOKENIZER(PROMPT, return_tensors="pt")
    shown = io.StringIO()
    with redirect_stdout(shown):
        streamer = TextStreamer(TOKENIZER, skip_prompt=True, skip_special_tokens=True)
        found = await AsyncDistributedModel(running.client).generate(**inputs, max_new_tokens=12, streamer=streamer)
    text = TOKENIZER.decode(found[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert shown.getvalue().strip() == str(text).strip()
