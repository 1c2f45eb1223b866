"""Packed rows over real nodes: they travel, in sweeps and in snapshots, and the text is that of raw rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import swarm.link.link
from client.base.options import GenerateOptions
from swarm.link.link import Link
from swarm.protocol.frames import FrameAssembler, rows_of
from swarm.protocol.messages import Attached, Frame, Snapshot, SweepFrame, Upstream
from swarm.protocol.packed_rows import LEAST_ROWS
from tests.net.client.chain.test_repair import IDS, SAMPLED, SPARES, struck
from tests.net.killable_nodes import KillableNodes

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

WIDE: GenerateOptions = {**SAMPLED, "nodes": 24}
assert len(IDS) > LEAST_ROWS


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[Frame]:
    """Every frame with rows as it arrived, before anything is unpacked."""
    finish, found = FrameAssembler.finish, list[Frame]()

    def noted(self: FrameAssembler) -> Frame | None:
        frame = finish(self)
        if frame is not None and rows_of(frame) is not None:
            found.append(frame)
        return frame

    monkeypatch.setattr(FrameAssembler, "finish", noted)
    return found


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.link.link, "NEAR_MS", 0.0)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.link.link, "NEAR_MS", 1e9)


def packed(frames: list[Frame], kind: type[Any] = SweepFrame) -> list[bool]:
    """Of those frames of a kind that have many rows, in order: whether they came packed."""
    rows = [rows_of(frame) for frame in frames if isinstance(frame, kind)]
    return [one.is_packed for one in rows if one is not None and one.count >= LEAST_ROWS]


@pytest.mark.usefixtures("near")
async def test_rows_of_near_machines_travel_as_they_are(nodes: KillableNodes, arrived: list[Frame]) -> None:
    await nodes.client.generate(IDS, **WIDE)
    assert packed(arrived)
    assert not any(packed(arrived))


@pytest.mark.usefixtures("far")
async def test_prompts_and_trees_travel_packed(nodes: KillableNodes, arrived: list[Frame]) -> None:
    plain = await nodes.undisturbed(IDS, **WIDE)
    arrived.clear()
    result = await nodes.client.generate(IDS, **WIDE)
    assert result.tokens == plain
    assert len(packed(arrived)) >= 2 * 2, "a prompt and a tree over two links"
    assert all(packed(arrived))
    few = [rows for rows in map(rows_of, arrived) if rows is not None and rows.count < LEAST_ROWS]
    assert not any(rows.is_packed for rows in few)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("victim", ["a1", "a2"])
async def test_a_snapshot_travels_packed(nodes: KillableNodes, arrived: list[Frame], victim: str) -> None:
    plain, result = await struck(nodes, (victim,), SPARES, 5, SAMPLED)
    assert result.tokens == plain
    assert packed(arrived, Snapshot) == [True]


@pytest.mark.usefixtures("far")
async def test_a_machine_of_an_earlier_release_gets_rows_as_they_are(
    nodes: KillableNodes, arrived: list[Frame], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone: the other link of the chain has packed rows."""
    plain, older = await nodes.undisturbed(IDS, **SAMPLED), nodes["a1"].peer_id
    take = Link.take

    def as_it_was(link: Link, message: Upstream) -> None:
        if isinstance(message, Attached) and link.hop.peer == older:
            message = replace(message, reads_packed=False)
        take(link, message)

    monkeypatch.setattr(Link, "take", as_it_was)
    arrived.clear()
    assert (await nodes.client.generate(IDS, **SAMPLED)).tokens == plain
    assert packed(arrived)[:2] == [False, True]
