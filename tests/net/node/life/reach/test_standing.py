"""Standing connections to real relays on loopback: calls come through them, and one that dies costs only a moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import pytest

from node.life.reach import standing as standing_module
from node.life.reach.circuits import Circuits, LocalServer
from node.life.reach.hello import HelloOnly
from node.life.reach.standing import PunchRequest, Standing, StandingOptions
from swarm.base.quota import stand_in
from swarm.base.tasks import TaskScope
from swarm.directory.address_proof import NONCE_BYTES, check_hello
from swarm.directory.dht.dialback import call_hello
from swarm.directory.dialable import DialPolicy
from swarm.directory.identity import Identity
from swarm.directory.registry import RelayOffer
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import bind_port
from swarm.link.endpoint import Endpoint
from tests.net.lent_relay import lent_relay

NONCE = bytes(NONCE_BYTES)


@dataclass
class Machine:
    """A machine that answers Hello on loopback and stands at relays.

    Attributes:
        callers: from where its server was called.
    """

    identity: Identity
    certificate: ServerCertificate
    standing: Standing
    circuits: Circuits
    punches: asyncio.Queue[PunchRequest] = field(default_factory=asyncio.Queue)
    callers: list[str] = field(default_factory=list)

    async def is_reached_through(self, relay: str) -> bool:
        endpoint = Endpoint(self.identity.peer_id, f"{self.identity.peer_id}.via.{relay}", self.certificate.der)
        answer = await call_hello(endpoint, NONCE)
        return check_hello(self.identity.peer_id, NONCE, endpoint.digest, answer)

    async def until(self, *relays: str) -> None:
        """Wait until it stands at exactly these."""
        async with asyncio.timeout(10):
            while set(self.standing.relays) != set(relays):
                self.standing.changed.clear()
                await self.standing.changed.wait()


@asynccontextmanager
async def machine(*offers: RelayOffer, only: str | None = None) -> AsyncIterator[Machine]:
    identity = Identity.ephemeral()
    certificate = ServerCertificate.fresh(identity.peer_id)
    callers: list[str] = []

    class NotingHello(HelloOnly):
        async def _hello(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            callers.append(context.peer())
            return await super()._hello(request, context)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((NotingHello(identity, certificate.digest),))
    port = bind_port(server, "127.0.0.1:0", certificate)
    await server.start()
    punches: asyncio.Queue[PunchRequest] = asyncio.Queue()

    async def find() -> list[RelayOffer]:
        return list(offers)

    try:
        async with TaskScope() as scope:
            circuits = Circuits(LocalServer("127.0.0.1", port), scope)
            options = StandingOptions(DialPolicy(only_public=False), only, punches.put)
            standing = Standing(identity, circuits, find, options)
            scope.spawn(standing.run())
            yield Machine(identity, certificate, standing, circuits, punches, callers)
    finally:
        await server.stop(None)


async def test_calls_come_through_both_relays_and_count_for_the_dialler() -> None:
    async with lent_relay() as one, lent_relay() as two, machine(one, two) as home:
        await home.until(one.address, two.address)
        for offer in (one, two):
            assert await home.is_reached_through(offer.address)
        assert home.standing.seen == {"127.0.0.1"}
        hosts = [caller.rpartition(":")[0] for caller in home.callers]
        assert hosts == [f"ipv4:{stand_in(offer.address, '127.0.0.1:1')}" for offer in (one, two)]
        assert len(set(hosts)) == 2, "one relay cannot use up what comes through the other"


async def test_a_relay_with_two_addresses_is_one_relay_by_the_one_that_it_prefers() -> None:
    async with lent_relay() as one, lent_relay() as two:
        port = one.address.rpartition(":")[2]
        dead, other = RelayOffer(one.peer, "127.0.0.1:9"), RelayOffer(one.peer, f"localhost:{port}")
        async with machine(one, other, two) as home:
            await home.until(one.address, two.address)
        async with machine(dead, other, two) as home:
            await home.until(other.address, two.address)


async def test_a_dead_relay_beside_one_that_answers_is_nobodys_trouble(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, standing_module.__name__)
    dead = RelayOffer(Identity.ephemeral().peer_id, "127.0.0.1:9")
    async with lent_relay() as one, machine(dead, one) as home:
        await home.until(one.address)
    levels = {record.levelno for record in caplog.records if dead.address in record.getMessage()}
    assert levels == {logging.INFO}


async def test_a_relay_that_dies_leaves_the_other_in_front() -> None:
    async with lent_relay() as two, AsyncExitStack() as first:
        owner = Identity.ephemeral()
        one = await first.enter_async_context(lent_relay(identity=owner))
        async with machine(one, two) as home:
            await home.until(one.address, two.address)
            while home.standing.relays[0] != one.address:
                home.standing.prefer_other()
            await first.aclose()
            await home.until(two.address)
            assert await home.is_reached_through(two.address)
            async with lent_relay(int(one.address.rpartition(":")[2]), owner):
                await home.until(one.address, two.address)
                assert home.standing.relays == (two.address, one.address), "it is back, and not named first again"


async def test_a_relay_under_another_name_is_not_trusted_with_the_proof() -> None:
    """What is proven to it could be shown to the relay whose name it has."""
    async with lent_relay() as one:
        other = RelayOffer(Identity.ephemeral().peer_id, one.address)
        async with machine(other) as home:
            assert not await home.standing.stands(0.5)
            assert "another name" in home.standing.troubles[0]
        async with machine(only=one.address) as home:  # its user names the address alone
            await home.until(one.address)


async def test_a_relay_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line == b"LOAD\n":
            writer.write(b"LOAD 0 10 0 10\n")
        else:
            await reader.read()
        writer.close()

    monkeypatch.setattr(standing_module, "CONNECT_S", 0.2)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, lent_relay() as one:
        silent = RelayOffer(Identity.ephemeral().peer_id, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with machine(silent, one) as home:
            await home.until(one.address)
            async with asyncio.timeout(5):
                while not any(line.startswith(silent.address) for line in home.standing.troubles):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert await home.is_reached_through(one.address)


async def test_who_wants_a_hole_or_a_call_is_heard() -> None:
    async with lent_relay() as one, machine(one) as home:
        await home.until(one.address)
        _, writer = await asyncio.open_connection("127.0.0.1", int(one.address.rpartition(":")[2]))
        writer.write(f"PUNCH {home.identity.peer_id} 127.0.0.1:4,192.168.1.9:4\n".encode())
        async with asyncio.timeout(5):
            request = await home.punches.get()
        assert (request.relay, request.addresses) == (one.address, ("127.0.0.1:4", "192.168.1.9:4"))
        writer.close()

        called: asyncio.Queue[bytes] = asyncio.Queue()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.put_nowait(await reader.readline())
            writer.close()

        async with await asyncio.start_server(take, "127.0.0.1", 0) as here:
            port = here.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection("127.0.0.1", int(one.address.rpartition(":")[2]))
            writer.write(f"CALL {home.identity.peer_id} 127.0.0.1:{port} {'ab' * 16}\n".encode())
            async with asyncio.timeout(5):
                assert await called.get() == f"TAKE {'ab' * 16}\n".encode()
            writer.close()


async def test_a_node_that_moves_refuses_and_does_not_hang() -> None:
    """Between two spans its server is closed: whoever dials then hears so at once."""
    async with lent_relay() as one, machine(one) as home:
        await home.until(one.address)
        monkey = pytest.MonkeyPatch()
        monkey.setattr(home.circuits, "_server", LocalServer("127.0.0.1", 9))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(one.address.rpartition(":")[2]))
        writer.write(f"CONNECT {home.identity.peer_id}:1 HTTP/1.1\r\n\r\n".encode())
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()
        monkey.undo()
        assert await home.is_reached_through(one.address)
        async with asyncio.timeout(5):
            while home.circuits.count(one.address):  # noqa: ASYNC110
                await asyncio.sleep(0)
