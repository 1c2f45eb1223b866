"""A healthy session on three nodes that receive invalid frames: its picks must stay right."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import node.session.hop_session
import node.session.service
from node.life.serve import Node
from swarm.base.ids import TreeNodeId
from swarm.compute.row_codec import encode_rows
from swarm.demo import TARGET
from swarm.protocol.frames import split
from swarm.protocol.messages import Attach, Close, Codec, Fault, Frame, Ready, Rows, SweepFrame
from tests.in_process_swarm import in_process_swarm
from tests.net.raw_client import RawLink, SweepNumbering, attach, info, opening, raw_link, raw_replies, route_of
from tests.net.three_nodes import SPANS, until

WIDTH, VOCAB = 192, 4096
WORDS = (2565, 591, 572, 289, 663, 281)


@asynccontextmanager
async def warm_nodes() -> AsyncIterator[tuple[Node, ...]]:
    """Three nodes that have served once, so that all their threads are started."""
    async with in_process_swarm(TARGET, SPANS) as here, here.client() as swarm:
        await swarm.generate("It", max_new_tokens=1)
        yield here.nodes


@cache
def right_picks() -> tuple[int, ...]:
    """Hugging Face's greedy pick after each of WORDS."""
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    with torch.inference_mode():
        return tuple(cast("Any", model)(torch.tensor([WORDS])).logits[0].argmax(dim=1).tolist())


@asynccontextmanager
async def healthy_session(nodes: tuple[Node, ...], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Keep a session open on the nodes; its picks must be right before and after the block."""
    monkeypatch.setattr(node.session.hop_session, "ORPHAN_S", 0.1)
    monkeypatch.setattr(node.session.service, "UPSTREAM_S", 60.0)  # it does not ping
    opened = attach(route_of(nodes, SPANS), opening(nodes[0]), b"other")
    async with raw_link(nodes[0], opened) as link:
        await link.until(Ready)
        async with raw_replies(nodes[2], opened.session) as replies:
            sweeps = SweepNumbering()
            await link.send(SweepFrame(sweeps.chain(WORDS[:3])))
            picks = [token for _, token in (await replies.read()).picks]
            yield
            await until_sessions(nodes, 1)
            await link.send(SweepFrame(sweeps.chain(WORDS[3:], commit=(0, 1, 2), acked=1)))
            picks += [token for _, token in (await replies.read()).picks]
            assert tuple(picks) == right_picks()
            await link.send(Close("done"))
            while await link.read() is not None:
                pass
        assert not [answer for answer in link.heard if isinstance(answer, Fault)]
    await until_sessions(nodes, 0)


async def until_sessions(nodes: tuple[Node, ...], count: int) -> None:
    """Wait until every node holds this number of sessions."""

    async def held() -> bool:
        return all([(await info(node)).sessions == count for node in nodes])

    await until(held)


@asynccontextmanager
async def attacked_link(nodes: tuple[Node, ...], index: int = 0) -> AsyncIterator[RawLink]:
    """A link of another session, attached to the hop at `index`; the test attacks over it."""
    async with raw_link(nodes[index], valid_attach(nodes, index)) as link:
        await link.until(Ready)
        yield link


def valid_attach(nodes: tuple[Node, ...], index: int = 0) -> Attach:
    return attach(route_of(nodes, SPANS), opening(nodes[index]), b"victim", index=index)


def random_rows(count: int, width: int = WIDTH, codec: Codec = Codec.FP32) -> Rows:
    return encode_rows(torch.randn(count, width, generator=torch.Generator().manual_seed(count)), codec)


def single_part(message: Frame) -> bytes:
    """A small message as its only frame part."""
    (part,) = split(message)
    return part


FIRST_SWEEP = SweepNumbering().chain(WORDS)
NEXT_SWEEP = replace(
    FIRST_SWEEP,
    sequence=2,
    committed=6,
    commit_to=TreeNodeId(5),
    first_id=TreeNodeId(6),
    picks_from=TreeNodeId(6),
    tokens=(1, 2),
    parents=(None, TreeNodeId(6)),
    acked=1,
)
