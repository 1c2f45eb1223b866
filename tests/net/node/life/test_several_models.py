"""Machines that serve several models: one identity, one port, one compute thread; exact texts and fair turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from client import AsyncSwarm
from client.api.command import ServerOptions, listening, model_sources, served_api
from client.api.swarm_directory import SwarmDirectory
from node.life.serve import Node
from swarm.base.errors import ConfigError, SwarmError
from swarm.base.layers import Span
from swarm.demo import DRAFT, TARGET
from swarm.directory.node_record import NodeState
from tests.in_process_swarm import InProcessSwarm, swarm_in
from tests.memory_registry import MemoryNetwork, MemoryRegistry

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "It was a dark night, and the old captain"
MODELS = (TARGET, DRAFT)
LONG = 96


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines() -> AsyncIterator[InProcessSwarm]:
    """Two machines, each with a part of both models."""
    more = {"more": (str(DRAFT),)}
    async with swarm_in(MemoryNetwork(), TARGET, ["0-6,0-1", "6-12,1-2"], more) as swarm:
        yield swarm


@asynccontextmanager
async def client_of(swarm: InProcessSwarm, model: Path) -> AsyncIterator[AsyncSwarm]:
    registry = MemoryRegistry(swarm.network)
    async with AsyncSwarm.connect(model, registry=registry, calibration=None, lookup=False, audit=0.0) as client:
        yield client


def by_transformers(model: Path, tokens: int) -> tuple[int, ...]:
    """The greedy text of the whole model in one process."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(model)(PROMPT, return_tensors="pt").input_ids
    made = whole.generate(ids, do_sample=False, max_new_tokens=tokens, eos_token_id=None)  # type: ignore[misc]
    return tuple(made[0, ids.shape[1] :].tolist())


async def test_one_identity_on_one_port_is_listed_for_each_model(machines: InProcessSwarm) -> None:
    registry = MemoryRegistry(machines.network)
    for number, node in enumerate(machines.nodes):
        (other,) = node.others
        assert (other.peer_id, other.address) == (node.peer_id, node.address)
        assert other.running.resources.compute is node.running.resources.compute
        for served, span in ((node, ["0-6", "6-12"][number]), (other, ["0-1", "1-2"][number])):
            found = await registry.records(served.identity.fingerprint, served.identity.num_layers)
            (record,) = [one for one in found if one.peer == node.peer_id]
            assert (record.span, record.state) == (Span.parse(span), NodeState.SERVING)
    assert {model.name for model in await registry.models()} == {TARGET.name, DRAFT.name}


async def test_each_record_is_later_than_the_one_before_whatever_model_it_is_of(
    machines: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = machines.nodes[0]
    (other,) = node.others
    now = time.time()
    monkeypatch.setattr("node.life.announcer.time", SimpleNamespace(time=lambda: now))
    records = [one.running.announcer.record(NodeState.SERVING) for one in (node, other, other, node)]
    for before, after in pairwise(records):
        assert before.expires_at < after.expires_at
        assert before.sequence < after.sequence


async def test_texts_of_both_are_those_of_transformers(machines: InProcessSwarm) -> None:
    wanted = [by_transformers(model, 24) for model in MODELS]
    async with client_of(machines, TARGET) as target, client_of(machines, DRAFT) as draft:
        options = {"max_new_tokens": 24, "temperature": 0.0, "end_tokens": ()}
        made = await asyncio.gather(*(one.generate(PROMPT, **options) for one in (target, draft) * 3))  # type: ignore[arg-type]
    assert [one.tokens for one in made] == wanted * 3
    assert wanted[0] != wanted[1]


async def test_one_api_serves_both(machines: InProcessSwarm) -> None:
    directory = SwarmDirectory({"calibration": None}, lambda _: MemoryRegistry(machines.network))
    sources = model_sources(list(map(str, MODELS)), {}, directory, all_listed=False)
    wanted = {}
    for model in MODELS:
        async with client_of(machines, model) as client:
            wanted[model.name] = (await client.generate(PROMPT, max_new_tokens=12, temperature=0.7, seed=3)).text
    with listening("127.0.0.1", 0) as taken:
        async with (
            served_api(sources, ServerOptions(), taken) as url,
            httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as http,
        ):
            for name, text in wanted.items():
                body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.7, "seed": 3}
                assert (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"] == text


@pytest.mark.parametrize(("crowd", "single"), [MODELS, MODELS[::-1]], ids=["a large model", "a small one"])
async def test_a_crowd_of_one_model_starves_no_client_of_the_other(
    machines: InProcessSwarm, crowd: Path, single: Path
) -> None:
    """While eight clients of one model never pause, one of the other gets a turn after each of theirs."""
    ended: list[str] = []

    async def run(client: AsyncSwarm, tokens: int, seed: int) -> None:
        await client.generate(PROMPT, max_new_tokens=tokens, temperature=1.0, seed=seed, nodes=0, end_tokens=())
        ended.append(client.target.name)

    async with client_of(machines, crowd) as many, client_of(machines, single) as one:
        await run(one, 2, 0)
        ended.clear()
        async with asyncio.TaskGroup() as group:
            for seed in range(8):
                group.create_task(run(many, LONG, seed))
            group.create_task(run(one, LONG // 4, 9))
    assert ended[0] == single.name


async def test_one_moves_while_the_other_serves_on(machines: InProcessSwarm) -> None:
    (other,) = machines.nodes[0].others
    port = machines.nodes[0].address
    async with client_of(machines, TARGET) as target:
        stream = target.stream(PROMPT, max_new_tokens=LONG, temperature=0.0, nodes=0, end_tokens=())
        pieces = [await anext(stream)]
        await other.move(Span(0, 2))
        pieces += [piece async for piece in stream]
    result = pieces[-1].result
    assert result is not None
    assert result.tokens == by_transformers(TARGET, LONG)
    assert len(result.stats.hops) == 2, "its session stayed where it was"
    assert machines.nodes[0].address == other.address == port
    async with client_of(machines, DRAFT) as draft:
        made = await draft.generate(PROMPT, max_new_tokens=12, temperature=0.0, end_tokens=())
    assert made.tokens == by_transformers(DRAFT, 12)


async def test_one_model_is_not_served_twice(machines: InProcessSwarm) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        async with swarm_in(MemoryNetwork(), TARGET, ["0-12"], {"more": (str(TARGET),)}):
            pass
    config = machines.nodes[0]._config
    assert [one.layers for one in config.of_models()] == ["0-6", "0-6"]
    with pytest.raises(ConfigError, match="give one range for each of 2 models"):
        type(config)(layers="0-1,1-2,2-3", more=(str(DRAFT),)).check()


async def test_a_machine_that_leaves_takes_all_its_models_along() -> None:
    network = MemoryNetwork()
    async with swarm_in(network, TARGET, ["0-12,0-2"], {"more": (str(DRAFT),)}) as swarm:
        node: Node = swarm.nodes[0]
        await node.pause("a test")
        async with client_of(swarm, DRAFT) as client:
            with pytest.raises(SwarmError):
                await client.generate("It", max_new_tokens=1)
        await node.resume()
        async with client_of(swarm, DRAFT) as client:
            assert len((await client.generate("It", max_new_tokens=4, end_tokens=())).tokens) == 4
    registry = MemoryRegistry(network)
    for model in (node.identity, node.others[0].identity):
        assert await registry.records(model.fingerprint, model.num_layers) == []
