"""Connections on which nothing comes through any more, as when TCP lost several packets in a row: nobody has died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from client import AsyncSwarm
from swarm.base.ids import PeerId
from swarm.base.tasks import TaskScope, spawn_on
from swarm.demo import DRAFT, TARGET
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import Dialer
from swarm.link.endpoint import Endpoint
from tests.in_process_swarm import in_process_swarm
from tests.net.three_nodes import prompt

IDS = prompt(4, 24)
SPANS = ("0-4", "4-8", "8-12")
NOBODY = Endpoint(PeerId("nobody"), "127.0.0.1:1", ServerCertificate.fresh(PeerId("nobody")).der)


class Wire:
    """A way to a port. `stick`: what connections carry now never arrives, and none of them ends; new ones are well."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.connections = 0
        self._flows = asyncio.Event()
        self._flows.set()

    def stick(self) -> None:
        self._flows.clear()
        self._flows = asyncio.Event()
        self._flows.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        flows = self._flows
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        try:
            async with TaskScope() as scope:
                scope.spawn(_pass(far_reader, writer, flows))
                await _pass(reader, far_writer, flows)
        finally:
            for end in (writer, far_writer):
                end.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
    try:
        while data := await reader.read(65_536):
            await flows.wait()
            writer.write(data)
        writer.close()
    except OSError:
        writer.transport.abort()


@pytest.fixture
async def wired(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[AsyncSwarm, list[Wire]]]:
    """A client and three machines, which all dial each other by wires; one per machine, in the order of layers."""
    straight, wires = Dialer.channel, dict[str, Wire]()

    def by_wire(dialer: Dialer, endpoint: Endpoint, stuck: grpc.aio.Channel | None = None) -> grpc.aio.Channel:
        wire = wires.get(endpoint.address)
        return straight(
            dialer, endpoint if wire is None else replace(endpoint, address=f"127.0.0.1:{wire.port}"), stuck
        )

    monkeypatch.setattr(Dialer, "channel", by_wire)
    async with in_process_swarm(TARGET, SPANS, kv_tokens=4_096) as here, AsyncExitStack() as stack:
        for node in here.nodes:
            wires[node.address] = await stack.enter_async_context(_wire_to(node.running.resources.port))
        swarm = await stack.enter_async_context(here.client(draft=DRAFT, adapt=False))
        yield swarm, list(wires.values())


@asynccontextmanager
async def _wire_to(target: int) -> AsyncIterator[Wire]:
    wire = Wire(target)
    async with TaskScope() as scope:
        server = await asyncio.start_server(lambda *ends: spawn_on(scope, ends[1], wire.carry(*ends)), "127.0.0.1", 0)
        wire.port = server.sockets[0].getsockname()[1]
        try:
            yield wire
        finally:
            server.close()


@pytest.mark.parametrize("place", range(len(SPANS)))
@pytest.mark.timeout(60)
async def test_a_text_goes_on_over_a_new_connection(place: int, wired: tuple[AsyncSwarm, list[Wire]]) -> None:
    """To the same machine, which still holds the session: nobody else has its layers."""
    swarm, wires = wired
    plain = await swarm.generate(IDS, max_new_tokens=32, nodes=8)
    before = wires[place].connections
    pieces = 0
    async for piece in swarm.stream(IDS, max_new_tokens=32, nodes=8):
        pieces += 1
        if pieces == 1:
            wires[place].stick()
        result = piece.result
    assert result is not None
    assert result.tokens == plain.tokens
    assert result.stats.repairs, "it was noticed"
    assert wires[place].connections > before


async def test_many_that_were_given_up_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ones, which carry nothing any more."""
    monkeypatch.setattr("swarm.link.dial.ABANDONED_KEPT", 2)
    monkeypatch.setattr("swarm.link.dial.MAX_ABANDONED", 3)
    async with Dialer() as dialer:
        channels = [dialer.channel(NOBODY)]
        for _ in range(3):
            channels.append(dialer.channel(NOBODY, channels[-1]))
        assert len(set(map(id, channels))) == 4
        assert dialer.channel(NOBODY, channels[0]) is channels[-1], "somebody else gave that one up before"
        assert dialer.channel(NOBODY, channels[-1]) is channels[-1], "too many were given up just now"
        await dialer.tidy()
        closed = [channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in channels]
        assert closed == [True, False, False, False]
        assert dialer.channel(NOBODY, channels[-1]) is not channels[-1]
