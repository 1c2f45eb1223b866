"""A peer that reads nothing at all: its stream can be ended although its first message never left."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

import node.session.service
from node.session.service import TimedWriter
from swarm.transport.uplink import Uplink


class Unread:
    """A call as gRPC sees it: its headers leave with the first message, and only once; no message ever leaves."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def send_initial_metadata(self, metadata: object) -> None:
        self.events.append("headers")

    async def write(self, message: bytes) -> None:
        self.events.append("headers" if not self.events else "message")
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert self.events == ["headers", "message"], "the core refuses headers that are on their way already"
        raise grpc.aio.AbortError(details)


async def test_a_stream_ends_whose_first_message_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.session.service, "WRITE_S", 0.01)
    call = Unread()
    with pytest.raises(TimeoutError):
        await TimedWriter(cast("Any", call), Uplink()).write(b"first")
    with pytest.raises(grpc.aio.AbortError, match="nothing was read"):
        await node.session.service._give_up(cast("Any", call))
