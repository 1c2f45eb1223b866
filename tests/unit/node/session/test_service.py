"""A peer that reads nothing at all: its stream can be ended although its first message never left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

import node.session.service
from node.session.admission import LIMITS, SIGNED, Admission
from node.session.service import NodeService, TimedWriter
from node.session.spans import ServedSpans
from swarm.base.errors import Busy
from swarm.base.ids import SessionId
from swarm.directory.identity import Identity
from swarm.link.link import Uplink
from swarm.protocol.messages import Attach, Fault

FAR = "9.9.9.9"


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


class Refused:
    """A stream that hears why it ends."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def send(self, fault: Fault) -> None:
        self.faults.append(fault)


@pytest.mark.parametrize("index", [0, 1], ids=["of a client", "of a hop before"])
def test_a_flood_of_refusals_costs_few_signatures(index: int) -> None:
    """Only those that somebody passes on are signed, and of these one address is worth a few."""
    identity = Identity.ephemeral()
    admission = Admission(clock=lambda: 1.0)
    context = SimpleNamespace(peer=identity.peer_id, signer=identity, admission=admission, digest=b"")
    service, stream = NodeService(cast("Any", context), ServedSpans(), bytes), Refused()
    attach = cast("Any", SimpleNamespace(index=index, generation=3, session=SessionId(bytes(32))))
    for _ in range(1_000):
        service._refuse(cast("Any", stream), Busy(identity.peer_id, "0-4", "is full"), cast(Attach, attach), FAR)
    signed = [fault for fault in stream.faults if fault.signature]
    assert len(signed) == (LIMITS.rates[SIGNED].burst if index else 0)
    assert len(stream.faults) == (len(signed) if index else 1_000), "a hop believes nothing that is not signed"
    assert {(fault.generation, fault.peer) for fault in stream.faults} == {(3, identity.peer_id)}
