"""Layers whose rows travel beside the last one's: what a session agreed on decides every width (PROTOCOL P14)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from node.life.serve import Node
from swarm.compute.row_codec import encode_rows
from swarm.protocol.messages import Attach, Close, Codec, Fault, FaultKind, Ready, Reroute, SweepFrame, Want
from tests.net.healthy_session import (
    FIRST_SWEEP,
    WIDTH,
    WORDS,
    random_rows,
    until_sessions,
    valid_attach,
)
from tests.net.raw_client import SweepNumbering, key_of, raw_link, raw_replies
from tests.net.three_nodes import refusal

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("other_session")]

LAYERS = (2, 4, 9)
"""One within the first span, one that enters the second, one within the third."""


def asking(nodes: tuple[Node, ...], layers: tuple[int, ...] = LAYERS, index: int = 0) -> Attach:
    attach = valid_attach(nodes, index)
    return key_of(b"victim").command(replace(attach, open=replace(attach.open, aux_layers=layers)))


@pytest.mark.parametrize(("index", "right"), [(1, 2), (2, 3)])
async def test_rows_are_as_wide_as_the_session_agreed_on(index: int, right: int, nodes: tuple[Node, ...]) -> None:
    """A middle hop gets what entered layers before its own, and never again what enters its first one."""
    asked = replace(FIRST_SWEEP, want=Want(hidden_rows=True))
    attach = asking(nodes, index=index)
    async with raw_link(nodes[index], attach) as link:
        await link.until(Ready)
        async with raw_replies(nodes[2], attach.session) as replies:
            for parts in (1, right + 1):
                await link.send(SweepFrame(asked, None, random_rows(6, parts * WIDTH)))
                fault = await link.until(Fault)
                assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, "rows", nodes[index].peer_id)
            await link.send(SweepFrame(asked, None, random_rows(6, right * WIDTH)))
            reply = await replies.read()
        assert reply.rows is not None
        assert (reply.rows.width, len(reply.row_ids)) == (4 * WIDTH, reply.rows.count)
        await link.send(Close("done"))
        while await link.read() is not None:
            pass


async def test_a_part_of_a_row_that_is_not_finite_ends_the_session(nodes: tuple[Node, ...]) -> None:
    bad = torch.zeros(6, 2 * WIDTH)
    bad[3, WIDTH + 5] = float("nan")
    async with raw_link(nodes[1], asking(nodes, index=1)) as link:
        await link.until(Ready)
        await link.send(SweepFrame(FIRST_SWEEP, None, encode_rows(bad, Codec.FP32)))
        fault = await refusal(link)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, "rows", nodes[1].peer_id)


@pytest.mark.parametrize("layers", [(12,), (2, 500)], ids=["behind the last", "far behind"])
async def test_layers_that_the_model_does_not_have(layers: tuple[int, ...], nodes: tuple[Node, ...]) -> None:
    async with raw_link(nodes[0], asking(nodes, layers)) as link:
        fault = await refusal(link)
        assert (fault.kind, fault.field) == (FaultKind.PROTOCOL, "aux_layers")
    await until_sessions(nodes, 1)


async def test_a_session_keeps_to_its_layers(nodes: tuple[Node, ...]) -> None:
    """Journals, and what is on its way, have the width that was agreed on."""
    attach = asking(nodes)
    same = key_of(b"victim").command(replace(attach, generation=1))
    other = key_of(b"victim").command(replace(attach, generation=2, open=replace(attach.open, aux_layers=(2,))))
    async with raw_link(nodes[0], attach) as link:
        await link.until(Ready)
        await link.send(Reroute(1, same.route, same.open, signature=same.signature))
        assert (await link.until(Ready)).generation == 1
        await link.send(Reroute(2, other.route, other.open, signature=other.signature))
        assert (await refusal(link)).field == "aux_layers"
    await until_sessions(nodes, 1)  # or a hop behind would still hold the first one
    async with raw_link(nodes[0], replace(other, generation=3)) as link:  # from the start it may have others
        await link.until(Ready)
        await link.send(SweepFrame(SweepNumbering().chain(WORDS)))
        async with raw_replies(nodes[2], attach.session) as replies:
            assert (await replies.read()).sequence == 1
        await link.send(Close("done"))
        while await link.read() is not None:
            pass
