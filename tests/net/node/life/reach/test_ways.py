"""A real relay, a machine that stands at it as nodes do, and a dialler with better ways, all on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import grpc.aio
import pytest

from node.life.reach.circuits import Circuits, LocalServer
from node.life.reach.ladder import Reached, Whereabouts
from node.life.reach.lend import call_address, node_ways
from node.life.reach.punch import PunchAnswerer
from node.life.reach.standing import PunchRequest, Standing, StandingOptions
from swarm.base.quota import stand_in
from swarm.base.tasks import TaskScope
from swarm.directory.address_proof import HELLO_METHOD, NONCE_BYTES, check_hello
from swarm.directory.dialable import DialPolicy
from swarm.directory.identity import Identity
from swarm.directory.node_record import Reach
from swarm.directory.registry import RelayOffer
from swarm.link.dial import Dialer
from swarm.link.endpoint import Endpoint, LinkPath, RelayedAddress
from swarm.reach.gateway.ports import NoMapping
from swarm.reach.paths import hole
from swarm.reach.paths.local_dialler import open_ways
from tests.net.hello_server import answering
from tests.net.lent_relay import lent_relay

NONCE = bytes(range(NONCE_BYTES))


@dataclass(frozen=True, slots=True)
class Home:
    """A machine that nobody dials.

    Attributes:
        endpoint: it, through the relay.
        relay: at which it stands.
        circuits: what it carries.
        callers: the sources of its own connections to its server.
    """

    endpoint: Endpoint
    relay: str
    circuits: Circuits
    callers: list[str]


@asynccontextmanager
async def home(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Home]:
    identity = Identity.ephemeral()
    callers: list[str] = []
    connect = LocalServer.connect

    async def note(server: LocalServer, source: str) -> object:
        callers.append(source)
        return await connect(server, source)

    monkeypatch.setattr(LocalServer, "connect", note)
    async with lent_relay() as relay, answering(identity) as direct, TaskScope() as scope:
        circuits = Circuits(LocalServer("127.0.0.1", int(direct.address.rpartition(":")[2])), scope)
        punches = PunchAnswerer(circuits.adopt)

        async def punch(request: PunchRequest) -> None:
            await punches.answer(request.relay, request.token, request.addresses)

        async def find() -> list[RelayOffer]:
            return [relay]

        options = StandingOptions(DialPolicy(only_public=False), on_punch=punch)
        standing = Standing(identity, circuits, find, options)
        scope.spawn(standing.run())
        assert await standing.stands(10)
        through = Endpoint(identity.peer_id, str(RelayedAddress(identity.peer_id, relay.address)), direct.certificate)
        yield Home(through, relay.address, circuits, callers)


async def path(dialer: Dialer, endpoint: Endpoint) -> LinkPath | None:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = dialer.channel(endpoint).unary_unary(HELLO_METHOD)
    assert check_hello(endpoint.peer, NONCE, endpoint.digest, await call(NONCE, timeout=10))
    return dialer.path(endpoint)


async def test_a_client_punches_and_counts_for_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async with home(monkeypatch) as far, open_ways() as ways, Dialer(ways=ways) as dialer:
        assert await path(dialer, far.endpoint) in (LinkPath.PUNCHED, LinkPath.LAN)
        assert far.callers == [stand_in(far.relay, "127.0.0.1:1")]


async def test_a_node_that_can_be_dialled_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    whereabouts = Whereabouts(Reached("127.0.0.1:1", Reach.DIRECT, ""))
    async with (
        home(monkeypatch) as far,
        node_ways("127.0.0.1", whereabouts, no_router) as ways,
        Dialer(ways=ways) as dialer,
    ):
        assert await path(dialer, far.endpoint) is LinkPath.CALLED_BACK


async def test_a_node_behind_a_relay_itself_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    whereabouts = Whereabouts(Reached("x.via.127.0.0.1:1", Reach.RELAYED, ""))
    async with (
        home(monkeypatch) as far,
        node_ways("127.0.0.1", whereabouts, no_router) as ways,
        Dialer(ways=ways) as dialer,
    ):
        assert await path(dialer, far.endpoint) in (LinkPath.PUNCHED, LinkPath.LAN)


async def test_where_no_hole_opens_the_relay_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two routers that give each connection another port."""

    async def in_vain(*_arguments: object) -> None:
        return None

    monkeypatch.setattr(hole.Hole, "_knock", in_vain)
    monkeypatch.setattr(hole, "MEET_S", 0.2)
    async with home(monkeypatch) as far, open_ways() as ways, Dialer(ways=ways) as dialer:
        assert ways is not None
        assert await path(dialer, far.endpoint) is LinkPath.RELAYED
        assert ways.choice.is_hopeless(far.endpoint.peer), "and is not tried again soon"


async def no_router(_port: int) -> str:
    raise NoMapping


@pytest.mark.parametrize(
    ("address", "reach", "mapped", "called"),
    [
        ("8.8.8.8:50", Reach.DIRECT, None, "8.8.8.8:7"),
        ("[2001:db8::1]:50", Reach.DIRECT, None, "[2001:db8::1]:7"),
        ("a.name.example:50", Reach.DIRECT, None, None),
        ("8.8.8.8:50", Reach.MAPPED, "8.8.8.8:51", "8.8.8.8:51"),
        ("8.8.8.8:50", Reach.MAPPED, None, None),
        ("x.via.8.8.8.8:50", Reach.RELAYED, "8.8.8.8:51", None),
    ],
)
def test_where_a_node_can_be_called(address: str, reach: Reach, mapped: str | None, called: str | None) -> None:
    assert call_address(Whereabouts(Reached(address, reach, "")), 7, mapped) == called


async def test_a_taken_host_costs_only_calls() -> None:
    """A node listens where it was told to; where that cannot be, holes are left."""
    whereabouts = Whereabouts(Reached("127.0.0.1:1", Reach.DIRECT, ""))
    async with AsyncExitStack() as stack:
        ways = await stack.enter_async_context(node_ways("192.0.2.77", whereabouts, no_router))
        assert ways is not None
    with suppress(KeyError):
        async with node_ways("127.0.0.1", whereabouts, no_router):
            raise KeyError
