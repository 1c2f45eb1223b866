"""Rows from another hop that no span can take: refused by field, and the node's other session never notices."""

from __future__ import annotations

import pytest
import torch

from node.life.serve import Node
from swarm.compute.row_codec import encode_rows
from swarm.protocol import wire
from swarm.protocol.messages import Close, Codec, Fault, FaultKind, SweepFrame
from swarm.protocol.wire import encode_part
from tests.net.healthy_session import (
    FIRST_SWEEP,
    WIDTH,
    WORDS,
    attacked_link,
    random_rows,
    valid_attach,
)
from tests.net.raw_client import SweepNumbering, raw_replies
from tests.net.three_nodes import refusal

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("other_session")]


@pytest.mark.parametrize(
    ("index", "frame"),
    [
        (0, SweepFrame(FIRST_SWEEP, None, random_rows(6))),
        (1, SweepFrame(FIRST_SWEEP)),
        (1, SweepFrame(FIRST_SWEEP, None, random_rows(6, WIDTH - 1))),
        (2, SweepFrame(FIRST_SWEEP, None, random_rows(6, 2 * WIDTH))),
    ],
    ids=["from a client", "none", "narrow", "wide"],
)
async def test_rows_of_another_shape_are_refused(index: int, frame: SweepFrame, nodes: tuple[Node, ...]) -> None:
    async with attacked_link(nodes, index) as link, raw_replies(nodes[2], valid_attach(nodes).session) as replies:
        await link.send(frame)
        fault = await link.until(Fault)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, "rows", nodes[index].peer_id)
        await link.send(SweepFrame(FIRST_SWEEP, None, random_rows(6) if index else None))
        assert (await replies.read()).sequence == 1, "the session goes on"
        await link.send(Close("done"))


@pytest.mark.parametrize(
    ("field", "frame"),
    [
        ("rows", SweepFrame(FIRST_SWEEP, None, random_rows(5))),
        ("kept", SweepFrame(FIRST_SWEEP, (True,) * 9, random_rows(9))),
    ],
    ids=["fewer", "longer"],
)
async def test_rows_that_do_not_match_their_nodes_end_the_stream(
    field: str, frame: SweepFrame, nodes: tuple[Node, ...]
) -> None:
    async with attacked_link(nodes, 1) as link:
        await link.send(frame)
        fault = await refusal(link)
        assert (fault.kind, fault.field) == (FaultKind.PROTOCOL, field)


async def test_rows_of_another_type_than_the_sessions_are_refused(nodes: tuple[Node, ...]) -> None:
    async with attacked_link(nodes, 1) as link, raw_replies(nodes[2], valid_attach(nodes).session) as replies:
        for codec in (Codec.FP16, Codec.BF16):
            await link.send(SweepFrame(FIRST_SWEEP, None, random_rows(6, codec=codec)))
            fault = await link.until(Fault)
            assert (fault.kind, fault.field) == (FaultKind.PROTOCOL, "codec")
        await link.send(SweepFrame(FIRST_SWEEP, None, random_rows(6)))
        assert (await replies.read()).sequence == 1, "the session goes on"
        await link.send(Close("done"))


async def test_values_of_another_size_than_announced(nodes: tuple[Node, ...]) -> None:
    """The header says fp16, the values are fp32: twice the bytes."""
    honest = wire.encode_frame(SweepFrame(FIRST_SWEEP, None, random_rows(6, codec=Codec.FP16)))
    values = bytes(random_rows(6).data)
    async with attacked_link(nodes, 1) as link:
        await link.send_bytes(encode_part(len(honest), len(values), (honest, values)))
        assert (await refusal(link)).field == "rows"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("index", [1, 2])
async def test_values_that_are_not_finite_end_their_session(value: float, index: int, nodes: tuple[Node, ...]) -> None:
    bad = torch.zeros(6, WIDTH)
    bad[3, 5] = value
    async with attacked_link(nodes, index) as link:
        await link.send(SweepFrame(FIRST_SWEEP, None, encode_rows(bad, Codec.FP32)))
        fault = await refusal(link)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, "rows", nodes[index].peer_id)


@pytest.mark.parametrize("index", [1, 2])
async def test_committing_a_node_that_was_left_out(index: int, nodes: tuple[Node, ...]) -> None:
    async with attacked_link(nodes, index) as link:
        said = SweepNumbering()
        kept = (True, True, False)
        await link.send(
            SweepFrame(said.next(WORDS[:3], (None, 0, 1)), kept, random_rows(2)),
            SweepFrame(said.next((7,), (None,), commit=(0, 1, 2)), None, random_rows(1)),
        )
        fault = await refusal(link)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, "kept", nodes[index].peer_id)
