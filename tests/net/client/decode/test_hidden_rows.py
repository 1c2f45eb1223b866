"""Hidden rows of the accepted path, over real nodes: the right ones, no others, and also when the tail dies (P10)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
import torch

import client.chain.answers
import client.chain.chain
import client.decode.loop
import client.decode.walk
import swarm.link.link
from client import AsyncSwarm
from client.base.options import Options
from client.decode.goodput import Goodput
from client.decode.policy import Occupancy, SpeculationPlan
from client.decode.state import GenerationState
from client.decode.walk import Observe, Walk
from client.draft.sources.model import LocalSession
from node.life.serve import Node
from node.session.tail import AcceptedPath
from swarm.base.ids import TreeNodeId
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.demo import DGF, DRAFT, REDRAFTER, TARGET
from swarm.protocol.messages import Reply, Sweep
from swarm.protocol.session import Limits
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.net.client.decode.stalled_tail import stall_a_tail
from tests.net.three_nodes import engine_of, prompt, server_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 24)
NEW = 16


@dataclass(frozen=True, slots=True)
class TwoTails:
    """Two tails, of which a chain uses one, and a client."""

    swarm: InProcessSwarm
    client: AsyncSwarm

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.swarm.nodes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[TwoTails]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    with pytest.MonkeyPatch.context() as patch:
        for module in (swarm.link.link, client.chain.answers):
            patch.setattr(module, "SILENCE_S", 20.0)  # however busy the machine is
        async with in_process_swarm(TARGET, ["0-6", "6-12", "6-12"]) as here, here.client(draft=DRAFT) as opened:
            for node in here.nodes:
                await engine_of(node).on_thread(int)  # its thread lives as long as the node
            await opened.generate("It", max_new_tokens=3, nodes=1)
            yield TwoTails(here, opened)


@pytest.fixture(scope="module")
def whole() -> RaggedModel:
    return load_whole(TARGET, torch.float32)


class Listener:
    """What one generation was told. travelled: nodes whose rows were in replies; rows: by position in the text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.travelled: list[TreeNodeId] = []
        self.rows: dict[int, torch.Tensor] = {}
        self.asked = 0

        def hand_over_rows(reply: Reply, walk: Walk, sequence: Sequence[int], observe: Observe) -> None:
            self.travelled += reply.row_ids
            client.decode.walk.hand_over_rows(reply, walk, sequence, observe)

        monkeypatch.setattr(client.decode.loop, "hand_over_rows", hand_over_rows)

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        first = len(sequence) - len(rows)
        self.rows |= {first + place: row for place, row in enumerate(rows)}


async def tokens_of(swarm: AsyncSwarm, listener: Listener, new: int = NEW, **options: Any) -> tuple[int, ...]:  # noqa: ANN401
    job: GenerationState = swarm._factory.make(IDS, Options(max_new_tokens=new, **options))
    job.observe = listener.observe
    result = None
    async for piece in swarm._once(job):
        result = piece.result
    assert result is not None
    return result.tokens


def last_rows(model: RaggedModel, ids: Sequence[int]) -> torch.Tensor:
    session = LocalSession(model, Limits(4096, 256, 1, 256))
    return session.run(session.next(ids, [None, *range(len(ids) - 1)]))


def check(listener: Listener, whole: RaggedModel, tokens: Sequence[int]) -> None:
    """Each certain token from the prompt's last one on has its row, but the last, which is not run."""
    text = (*IDS, *tokens)
    expected = last_rows(whole, text)
    covered = sorted(listener.rows)
    assert covered == list(range(len(IDS) - 1, covered[-1] + 1))
    assert len(text) - 8 <= covered[-1] < len(text)
    for position, row in listener.rows.items():
        error = (row - expected[position]).abs().max() / expected[position].abs().max()
        assert error < 1e-5, f"position {position}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_accepted_paths_rows_are_the_whole_models(
    temperature: float, running: TwoTails, whole: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(monkeypatch)
    options: dict[str, Any] = {"temperature": temperature, "seed": 7, "nodes": 8}
    tokens = await tokens_of(running.client, listener, **options)
    assert tokens == (await running.client.generate(IDS, max_new_tokens=NEW, **{**options, "nodes": 0})).tokens
    check(listener, whole, tokens)
    beyond = len(listener.travelled) - len(listener.rows)
    assert 0 <= beyond <= 8, "what the last reply accepted beyond the last token, and nothing else"
    assert len(set(listener.travelled)) == len(listener.travelled)


async def test_rows_of_trees_that_grow_while_sweeps_are_in_flight(
    running: TwoTails, whole: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Goodput, "plan", lambda *_: SpeculationPlan(3, 1e9, "small"))
    monkeypatch.setattr(Goodput, "max_nodes", lambda *_: 4)
    monkeypatch.setattr(Goodput, "min_probability", lambda *_: 0.0)
    monkeypatch.setattr(Goodput, "occupancy", lambda *_: Occupancy())
    monkeypatch.setattr(Goodput, "patience_ms", lambda *_: math.inf)  # while drafting is late rows are not handed over
    monkeypatch.setattr(client.chain.chain.Chain, "has_answer", False)
    monkeypatch.setattr(
        Goodput, "extend", lambda _, route, probabilities, pipeline: SpeculationPlan(len(probabilities), 1e9, "deeper")
    )
    grow, further = Walk.grow, list[int]()

    def grown(self: Walk, tokens: Sequence[int], parents: Sequence[TreeNodeId]) -> Sweep:
        further.append(len(tokens))
        return grow(self, tokens, parents)

    monkeypatch.setattr(Walk, "grow", grown)
    listener = Listener(monkeypatch)
    tokens = await tokens_of(running.client, listener, new=8)
    assert sum(further) > len(tokens), "further nodes went all the time"
    check(listener, whole, tokens)
    assert len(set(listener.travelled)) == len(listener.travelled)


async def test_nobody_who_does_not_ask_gets_rows(running: TwoTails, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(*_: object) -> list[TreeNodeId]:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(AcceptedPath, "walk", walk)
    await running.client.generate(IDS, max_new_tokens=4, nodes=4)


async def test_heads_draft_with_what_the_tail_sends(running: TwoTails) -> None:
    heads = [REDRAFTER, DGF]
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 3}
    async with running.swarm.client(draft=heads, draft_device="cpu", lookup=False) as opened:
        tree = await opened.generate(IDS, nodes=16, **options)
        plain = await opened.generate(IDS, nodes=0, **options)
        chosen = await opened.generate(IDS, **options)
    assert tree.tokens == plain.tokens == chosen.tokens
    assert tree.stats.acceptance_length > 1.3, "without rows they would say nothing"
    first, *later = tree.stats.sweeps
    assert first.nodes == 0, "no row has come yet"
    assert max(sweep.nodes for sweep in later) == 16
    assert max(sweep.nodes for sweep in chosen.stats.sweeps) > 0, "the controller tried again when a row was there"


async def test_rows_after_the_tails_death_with_a_sweep_in_flight(
    running: TwoTails, whole: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new tail gives the rows of what was unanswered again, from a snapshot. The last test here: one is dead."""
    listener = Listener(monkeypatch)
    struck, arrived = stall_a_tail(5, monkeypatch)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        telling = group.create_task(tokens_of(running.client, listener, nodes=8))
        await arrived.wait()
        [victim] = [node for node in running.nodes if node.peer_id in struck]
        await server_of(victim).stop(None)
        await victim.running.resources.dialer.__aexit__()
    check(listener, whole, telling.result())
    assert sum(node.sessions.info().counters.restores for node in running.nodes) == 1
