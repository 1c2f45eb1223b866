"""A seeded fuzz of two live nodes: every answer is typed, a text beside it is right, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

import node.session.hop_session
from node.life.serve import Node
from node.session.hop_session import HopSession
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.demo import TARGET
from tests.in_process_swarm import in_process_swarm
from tests.net.healthy_session import WORDS, right_picks
from tests.net.node.session.frame_flood import FloodCounts, FloodTarget, fuzz
from tests.net.node.session.garbage import ENDING, GOING_ON, FrameKind, ServedModel
from tests.net.raw_client import info
from tests.net.three_nodes import until, until_freed

FRAMES, REPLIES = 2_000, 20
"""Frames that are sent, and more than so many replies: garbage goes as deep as a model."""


def target_of(first: Node, second: Node) -> FloodTarget:
    model = ServedModel(first.identity.fingerprint, 192, 4096)
    return FloodTarget(first.endpoint, second.endpoint, Span(6, 12), model, 12)


def held() -> list[object]:
    """Sessions and KV that anything refers to."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in (HopSession, KvCache)]


@pytest.mark.crossing
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("broken_calls")
async def test_nodes_withstand_garbage(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(node.session.hop_session, "ORPHAN_S", 0.2)
    caplog.set_level(logging.ERROR)
    others = {id(thing): thing for thing in held()}  # of tests before, which keep their ids for as long as they are

    async def nothing_held() -> bool:
        return all(id(thing) in others for thing in held())

    async with in_process_swarm(TARGET, ["0-12", "6-12"], kv_tokens=20_000) as here, here.client() as swarm:
        counts, texts, done = FloodCounts(), [], asyncio.Event()

        async def read_on() -> None:
            while not done.is_set():
                texts.append((await swarm.generate(WORDS, max_new_tokens=1)).tokens)

        async with asyncio.TaskGroup() as group:
            group.create_task(read_on())
            frames, seed = FRAMES, 3
            while counts.frames < FRAMES or counts.answers["reply"] <= REPLIES:  # on a busy machine fewer are awaited
                await fuzz(target_of(*here.nodes), frames, seed, counts)
                frames, seed = counts.frames + FRAMES // 4, seed + 1
            done.set()
        await until_freed(here.nodes)
        assert (await info(here.nodes[0])).counters.sweeps > 50
        await until(nothing_held)
    assert {tuple(tokens) for tokens in texts} == {right_picks()[-1:]}
    assert not [record for record in caplog.records if record.exc_info], "an accident in a node"
    assert {FrameKind.ATTACH, *GOING_ON} <= counts.sent.keys()
    assert sum(counts.sent[kind] for kind in ENDING) > 10
