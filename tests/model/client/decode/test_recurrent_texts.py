"""Texts of a model whose layers keep states: trees, a death in mid-text, going back in a chat, going on elsewhere.

Strict token equality with plain decoding in fp32, over real nodes and gRPC on loopback.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from client import AsyncSwarm
from swarm.base.errors import GenerationInterrupted, Unfinished
from swarm.demo import DRAFT, PASSAGES, TARGET
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.model.recurrent_models import RECURRENT, recurrent_model
from tests.net.three_nodes import engine_of, server_of, until_freed

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW = 20
SPANS = ["0-2", "2-4", "4-6", "2-4"]


@dataclass(frozen=True, slots=True)
class Running:
    here: InProcessSwarm
    client: AsyncSwarm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gated delta rules and attention, with the tokenizer of the demo's models."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    made = tmp_path_factory.mktemp("qwen3_next")
    vocabulary = {"vocab_size": len(tokenizer), "eos_token_id": None}
    recurrent_model("qwen3_next", {**RECURRENT["qwen3_next"], **vocabulary}).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(folder: Path) -> AsyncIterator[Running]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    async with in_process_swarm(folder, SPANS) as here, here.client(draft=DRAFT) as swarm:
        await swarm.generate("It", max_new_tokens=3, nodes=1)
        for node in here.nodes:
            await engine_of(node).on_thread(int)  # its thread lives as long as the node
        yield Running(here, swarm)


def prompt(line: int, tokens: int = 24) -> tuple[int, ...]:
    text = json.loads(PASSAGES.read_text().splitlines()[line])["text"]
    return tuple(AutoTokenizer.from_pretrained(TARGET)(text).input_ids[:tokens])


@pytest.mark.parametrize(("temperature", "nodes"), [(0.0, 64), (1.0, 16)])
async def test_trees_of_every_size_give_the_plain_text(temperature: float, nodes: int, running: Running) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "seed": 5}
    plain = await running.client.generate(prompt(1), nodes=0, **options)
    assert len(plain.tokens) == NEW
    tree = await running.client.generate(prompt(1), nodes=nodes, **options)
    assert tree.tokens == plain.tokens
    assert max(sweep.nodes for sweep in tree.stats.sweeps) == nodes


async def test_a_chat_whose_earlier_turn_changed_goes_on_from_what_is_left(running: Running) -> None:
    """Its session goes back to the common beginning, in the middle of what ran as one sequence."""
    options: dict[str, Any] = {"max_new_tokens": 8, "nodes": 16}
    async with running.client.chat("Answer in few words, and never twice in the same way.", **options) as chat:
        await chat.say("What is a tree?")
        await chat.say("And a forest?")
        session = chat._session
        chat._conversation.messages[3] = replace(chat._conversation.messages[3], content="And a river?")
        del chat._conversation.messages[4:]
        chat._conversation.take_back()
        changed = await chat.say("And a river?")
        assert chat._session is session is not None, "it went back, and did not begin again"
        chat._conversation.messages.pop()
        plain = await running.client.generate(chat._conversation.plan().tokens, **{**options, "nodes": 0})
    assert changed.tokens == plain.tokens


async def test_an_interrupted_text_goes_on_as_if_nothing_had_happened(running: Running) -> None:
    """What was a text's own tokens is part of a prompt then: rows that ran one by one run as a sequence."""
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 8, "nodes": 16}
    plain = await running.client.generate(prompt(3), **{**options, "nodes": 0})
    begun = GenerationInterrupted("node Qm vanished", "", plain.tokens[:23])
    begun.unfinished = Unfinished(prompt(3), options, plain.tokens[:23])
    *_, last = [piece async for piece in running.client.resume(begun)]
    assert last.result is not None
    assert last.result.tokens == plain.tokens


async def test_a_prompt_goes_on_from_blocks_that_are_kept(running: Running) -> None:
    long = [*prompt(0, 90), *prompt(1, 90)]
    nodes, options = running.here.nodes, {"max_new_tokens": NEW, "temperature": 0.0, "nodes": 8}
    await until_freed(nodes)
    for node in nodes:
        node.sessions.pool.clear()
    alone = await running.client.generate((*long, 7), **options)  # type: ignore[arg-type]
    assert alone.stats.reused_tokens == 0
    await until_freed(nodes)
    for length in (181, 140):
        wanted = (*long[: length - 1], 7)
        again = await running.client.generate(wanted, **options)  # type: ignore[arg-type]
        assert again.stats.reused_tokens == 128
        await until_freed(nodes)
        for node in nodes:
            node.sessions.pool.check_integrity()
            node.sessions.pool.clear()
        fresh = await running.client.generate(wanted, **options)  # type: ignore[arg-type]
        assert (fresh.tokens, fresh.stats.reused_tokens) == (again.tokens, 0)
        await until_freed(nodes)


async def test_a_death_in_mid_text_changes_no_token(running: Running) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 7, "nodes": 16}
    plain = await running.client.generate(prompt(2), **{**options, "nodes": 0})
    result, killed = None, False
    async for piece in running.client.stream(prompt(2), **options):
        if not killed:
            (used,) = (node for node in running.here.nodes[1::2] if len(node.sessions))
            await server_of(used).stop(None)
            killed = True
        result = piece.result
    assert result is not None
    assert result.tokens == plain.tokens
    assert len(result.stats.repairs) == 1


async def test_a_prompt_goes_on_before_what_some_machines_keep(running: Running) -> None:
    """They go back to a state within what they took over, and compute the rest again."""
    long = (*prompt(0, 90), *prompt(1, 90))
    nodes, options = running.here.nodes, {"max_new_tokens": NEW, "temperature": 1.0, "seed": 4, "nodes": 8}
    await until_freed(nodes)
    for node in nodes:
        node.sessions.pool.clear()
    alone = await running.client.generate(long, **options)  # type: ignore[arg-type]
    await until_freed(nodes)
    tail = nodes[2].sessions.pool
    while len(tail) > 1:
        tail.shrink(tail.tokens - 1)
    again = await running.client.generate(long, **options)  # type: ignore[arg-type]
    assert again.stats.reused_tokens == 64
    assert again.tokens == alone.tokens
