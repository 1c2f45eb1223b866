"""What nodes that lie send is what their lie says: one reply may become two."""

from __future__ import annotations

from contextlib import aclosing
from typing import cast

import pytest

from benchmarks.redteam.byzantine import Insider, Lie, _lie
from node.life.serve import Node
from node.session.table import SessionTable
from node.session.tail import ReplyBuffer
from swarm.base.ids import TreeNodeId
from swarm.link.successor import SuccessorLink
from swarm.protocol.messages import Reply

RIGHT = Reply(1, 0, ((TreeNodeId(0), 5),), ())
WRONG = Reply(1, 0, ((TreeNodeId(0), 6),), ())


async def test_a_second_reply_to_a_sweep_does_not_take_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (ReplyBuffer, "put"),
        (ReplyBuffer, "stream"),
        (SuccessorLink, "push"),
        (SessionTable, "attach"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back as it was
    _lie(Insider(cast("Node", None)), Lie(replies=lambda reply: (reply, WRONG)))
    replies = ReplyBuffer()
    replies.put(RIGHT, 0)
    async with aclosing(replies.stream(0)) as sent:  # type: ignore[type-var]
        assert [await anext(sent), await anext(sent)] == [RIGHT, WRONG]
