"""A reply stream is patient as long as something comes, however long it lives, and no longer."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc.aio
import pytest

import client.chain.answers
from client.chain.answers import ReplyStream
from swarm.base.errors import HopTimeout, SwarmError
from swarm.base.ids import PeerId, SessionId
from swarm.base.layers import Span
from swarm.link.dial import Connection
from swarm.link.endpoint import Endpoint
from swarm.protocol.authority import SessionKey
from swarm.protocol.frames import split
from swarm.protocol.messages import Ping, RepliesRequest, Reply, RouteHop

TAIL = RouteHop(PeerId("tail"), Span(8, 12))


class Call:
    """A stream on which a ping comes every 20 ms, so many times; then nothing."""

    def __init__(self, pings: int) -> None:
        self.left = pings

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(0)

    async def read(self) -> bytes:
        if self.left == 0:
            await asyncio.Event().wait()
        self.left -= 1
        await asyncio.sleep(0.02)
        (part,) = split(Ping(self.left + 1))
        return part

    def cancel(self) -> None:
        """Nothing to end."""

    def __call__(self, metadata: object) -> Call:
        return self

    def stream_stream(self, method: str) -> Call:
        return self


@pytest.mark.parametrize("pings", [0, 40])
async def test_it_lives_while_pings_come_and_not_much_longer(pings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.chain.answers, "OPEN_S", 0.3)
    monkeypatch.setattr(client.chain.answers, "SILENCE_S", 0.2)
    monkeypatch.setattr(client.chain.answers, "PINGS_S", 0.02)
    monkeypatch.setattr(client.chain.answers, "ROUND_TRIPS", 0)
    said: list[Reply | SwarmError] = []
    call = Call(pings)
    stream = ReplyStream(TAIL, SessionKey.fresh(), lambda _, what: said.append(what))
    connection = Connection(cast("grpc.aio.Channel", call), Endpoint(TAIL.peer, "192.0.2.1:1"))
    await stream.run(lambda: connection, RepliesRequest(SessionId(bytes(16))))
    (error,) = said
    assert isinstance(error, HopTimeout)
    assert call.left == 0, "no ping was left unread: 40 of them take longer than it may take to open"
