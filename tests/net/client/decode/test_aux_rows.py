"""An EAGLE-3 head on rows of three layers drafts in a swarm: its numbers are the published ones, texts the plain ones.

Rows come with replies, hop by hop, also after a machine has died in mid-text (PROTOCOL P14).

Links are in memory; some of these tests run over gRPC too, in `test_over_grpc.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from client import AsyncSwarm
from client.draft.search.source import Search
from client.draft.sources.layer_head import EntryState, LayerEntries, LayerHeadSource
from node.life.announcer import Announcer
from node.session.service import NodeService
from node.session.tail import Tail
from swarm.base.errors import RemoteProtocolError, RouteError
from swarm.base.ids import PeerId
from swarm.base.version import unknown_here
from swarm.compute.row_codec import decode_rows, encode_rows
from swarm.demo import TARGET
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.protocol.messages import Attach, Reply
from tests.memory_registry import MemoryRegistry
from tests.model.published_eagle3 import PublishedForward, publish_eagle3, told
from tests.net.killable_nodes import KillableNodes, reset_client
from tests.net.three_nodes import prompt

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 24)
NEW = 16
USUAL = (2, 6, 9)
"""What heads for 12 layers read unless they say otherwise: one in the middle of each span."""
BORDERS = (4, 7, 8)
"""Two of which enter a span: those rows travel once."""


@dataclass(slots=True)
class Notes:
    """What the head said of each text that it was asked about: text, first row, rows, logits behind the last row."""

    said: list[tuple[tuple[int, ...], int, int, torch.Tensor]] = field(default_factory=list)

    def check(self, folder: Path, layers: Sequence[int]) -> None:
        """All of it is what the published forward gives on transformers' hidden states of the same text."""
        published = PublishedForward(folder, TARGET, layers)
        assert len(self.said) > NEW // 4
        behind = cache(published.logits)
        for text, base, count, logits in self.said:
            end = base + count + 1
            longest = max((one for one, *_ in self.said if one[:end] == text[:end]), key=len)
            wanted = behind(longest, base)[count - 1]  # no row depends on what comes later
            found = logits[0][logits[0].isfinite()]
            assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp_min(1), f"behind {base + count}"


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    made, catch_up = Notes(), LayerEntries.catch_up
    begin = LayerHeadSource.begin
    asked: list[tuple[LayerHeadSource, Search]] = []

    def noted(
        entries: LayerEntries, tokens: Sequence[int], rows: Callable[[int, int], torch.Tensor]
    ) -> tuple[torch.Tensor, EntryState]:
        logits, state = catch_up(entries, tokens, rows)
        source, search = asked[-1]
        if search.sequence[: len(IDS)] == IDS:  # and not while it warms up
            made.said.append((search.sequence, source._base, source._count, logits.clone()))
        return logits, state

    def begun(source: LayerHeadSource, search: Search) -> bool:
        asked.append((source, search))
        return begin(source, search)

    monkeypatch.setattr(LayerEntries, "catch_up", noted)
    monkeypatch.setattr(LayerHeadSource, "begin", begun)
    return made


@asynccontextmanager
async def drafting_client(nodes: KillableNodes, folder: Path) -> AsyncIterator[AsyncSwarm]:
    """A client of these nodes, with the head alone for a draft."""
    network = nodes["a0"].registry._network  # type: ignore[attr-defined]
    options: dict[str, Any] = {
        "registry": MemoryRegistry(network),
        "calibration": None,
        "audit": 0.0,
        "draft_device": "cpu",
    }
    async with AsyncSwarm.connect(TARGET, draft=folder, lookup=False, siblings=False, **options) as client:
        reset_client(client, 20.0)
        yield client


@pytest.mark.parametrize("layers", [USUAL, BORDERS], ids=["usual", "borders"])
async def test_numbers_are_the_published_ones_and_texts_the_plain_ones(
    layers: tuple[int, ...], nodes: KillableNodes, notes: Notes, tmp_path: Path
) -> None:
    folder = publish_eagle3(tmp_path / "head", TARGET)
    if layers != USUAL:
        told(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]})
    async with drafting_client(nodes, folder) as client:
        each: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 5})
        for options in each:
            plain = await nodes.undisturbed(IDS, max_new_tokens=NEW, nodes=0, **options)
            result = await client.generate(IDS, max_new_tokens=NEW, nodes=16, **options)
            assert result.tokens == plain
            assert max(sweep.nodes for sweep in result.stats.sweeps) == 16
    notes.check(folder, layers)


@pytest.mark.parametrize("victim", ["a0", "a1", "a2"])
async def test_a_death_in_mid_text(victim: str, nodes: KillableNodes, notes: Notes, tmp_path: Path) -> None:
    """Whoever replaces a hop gets rows of earlier layers again beside those that enter it."""
    folder = publish_eagle3(tmp_path / "head", TARGET)
    plain = await nodes.undisturbed(IDS, max_new_tokens=NEW, nodes=0)
    async with drafting_client(nodes, folder) as client:
        arrived = nodes.stall(victim, 6)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            telling = group.create_task(client.generate(IDS, max_new_tokens=NEW, nodes=16))
            await arrived.wait()
            await nodes.announce("b0", "b1", "b2")
            await nodes.kill(victim)
    result = telling.result()
    assert result.tokens == plain
    assert len(result.stats.repairs) == 1
    assert max(sweep.nodes for sweep in result.stats.sweeps[-5:]) == 16, "rows came again"
    notes.check(folder, USUAL)


@pytest.mark.parametrize("name", ["a0", "a2"])
async def test_a_machine_that_says_that_it_sends_none_is_gone_around(
    name: str, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its record says so, so that nobody asks it in vain; a session that names no layers takes it."""
    folder, other = publish_eagle3(tmp_path / "head", TARGET), name.replace("a", "b")
    record, plain = Announcer.record, await nodes.undisturbed(IDS, max_new_tokens=8, nodes=0)

    def older(announcer: Announcer, state: NodeState) -> NodeRecord:
        made = record(announcer, state)
        return replace(made, aux_rows=made.peer != nodes[name].peer_id)

    monkeypatch.setattr(Announcer, "record", older)
    await nodes.announce(name)
    async with drafting_client(nodes, folder) as client:
        says = "nobody serves layers .*; 1 machines of an older release do not send rows of several layers"
        with pytest.raises(RouteError, match=says):
            await client.generate(IDS, max_new_tokens=4, nodes=4)
        assert len((await nodes.client.generate(IDS, max_new_tokens=4, nodes=4)).tokens) == 4
        await nodes.announce(other)
        result = await client.generate(IDS, max_new_tokens=8, nodes=8)
    assert result.tokens == plain
    assert nodes.route()[int(name[1])] == other


async def test_one_that_refuses_such_an_opening_after_all_is_gone_around(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, plain = NodeService._first, await nodes.undisturbed(IDS, max_new_tokens=8, nodes=0)

    def older(service: NodeService, part: bytes, address: str) -> Attach:
        found = first(service, part, address)
        if service._context.peer == nodes["a1"].peer_id and found.open.aux_layers:
            raise RemoteProtocolError("kind", unknown_here("Frame of kind 11"))
        return found

    monkeypatch.setattr(NodeService, "_first", older)
    await nodes.announce("b1")
    async with drafting_client(nodes, publish_eagle3(tmp_path / "head", TARGET)) as client:
        result = await client.generate(IDS, max_new_tokens=8, nodes=8)
    assert result.tokens == plain
    assert nodes.route() == ["a0", "b1", "a2"]


@pytest.mark.parametrize("parts", [1, 5])
async def test_a_tail_whose_replies_have_another_width_is_left(
    parts: int, nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain, width = await nodes.undisturbed(IDS, max_new_tokens=8, nodes=0), 192
    wrong = [True]

    with_rows = Tail._with_rows

    def widened(tail: Tail, *given: Any) -> Reply:  # noqa: ANN401 - as the tail's
        made = with_rows(tail, *given)
        if not wrong or made.rows is None:
            return made
        wrong.pop()  # the first reply that has rows
        rows = decode_rows(made.rows, torch.float32)
        return replace(made, rows=encode_rows(torch.cat([rows, rows], dim=1)[:, : parts * width], made.rows.codec))

    monkeypatch.setattr(Tail, "_with_rows", widened)
    await nodes.announce("b2")
    async with drafting_client(nodes, publish_eagle3(tmp_path / "head", TARGET)) as client:
        result = await client.generate(IDS, max_new_tokens=8, nodes=8)
    assert result.tokens == plain
    assert not wrong
    [repair] = result.stats.repairs
    tails = {nodes[name].peer_id: name for name in ("a2", "b2")}
    assert [tails.pop(PeerId(peer)) for peer in repair.replaced]
    assert nodes.route() == ["a0", "a1", *tails.values()], "the other one goes on"
