"""Links to a machine behind a relay, as gRPC has them: which path each one takes, and what is learned from it."""

from __future__ import annotations

import asyncio
import gc
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from ipaddress import IPv4Interface
from pathlib import Path
from types import SimpleNamespace

import grpc.aio
import pytest

from swarm.base.ids import PeerId
from swarm.directory.address_proof import HELLO_METHOD, NONCE_BYTES, check_hello
from swarm.directory.identity import Identity
from swarm.directory.node_record import Reach
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import Dialer, plain_reason
from swarm.link.egress.streams import connect
from swarm.link.endpoint import Endpoint, LinkPath
from swarm.reach.paths import local_dialler
from swarm.reach.paths.call_back import CallBackListener, CallBackWay, ExpectedCalls
from swarm.reach.paths.hole import OwnAddresses
from swarm.reach.paths.local_dialler import LocalDialler, open_ways
from swarm.reach.paths.punch import PunchWay
from swarm.reach.paths.way import REMEMBERED_S, NoWay, OpenedWay, Way
from swarm.reach.relay.openings import Verb
from swarm.routing.latency import measure_delays, measure_rate
from tests.net.relayed_machine import RelayedMachine, StubRelay, relaying, standing
from tests.sample_records import sample_record

NONCE = bytes(range(NONCE_BYTES))
NOWHERE = OwnAddresses()
LOOPBACK = OwnAddresses((IPv4Interface("127.0.0.1/8"),))


@dataclass(frozen=True, slots=True)
class Here:
    """A relay, a machine that stands at it, and a dialer with better ways."""

    relay: StubRelay
    machine: RelayedMachine
    ways: LocalDialler
    dialer: Dialer

    async def path(self, endpoint: Endpoint | None = None) -> LinkPath | None:
        """The path of a new or kept connection, which the right machine answers."""
        endpoint = endpoint or self.machine.endpoint
        await greet(self.dialer.channel(endpoint), endpoint)
        return self.dialer.path(endpoint)


async def greet(channel: grpc.aio.Channel, endpoint: Endpoint) -> None:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HELLO_METHOD)
    assert check_hello(endpoint.peer, NONCE, endpoint.digest, await call(NONCE, timeout=10))


async def become(is_so: Callable[[], bool]) -> None:
    """Give the loop turns until something is so."""
    while not is_so():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)


@asynccontextmanager
async def here(*better: Way, own: OwnAddresses = NOWHERE) -> AsyncIterator[Here]:
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(relaying())
        machine = await stack.enter_async_context(standing(relay, own))
        ways = await stack.enter_async_context(open_ways(better))
        assert ways is not None
        yield Here(relay, machine, ways, await stack.enter_async_context(Dialer(ways=ways)))


class FakeWay:
    """Takes as long as it is told to, and fails if told so.

    Attributes:
        tried: how often.
        may_end: it does not come to an end before.
    """

    name = "fake"

    def __init__(self, machine: str | None = None, failure: Exception | None = None) -> None:
        self.tried = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.machine = machine
        self.failure = failure

    async def open(self, peer: PeerId, relay: str) -> OpenedWay:
        self.tried += 1
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        assert self.machine is not None
        return OpenedWay(await connect(self.machine), LinkPath.PUNCHED)


async def test_a_hole_is_taken() -> None:
    async with here(PunchWay(lambda: NOWHERE)) as home:
        assert await home.path() is LinkPath.PUNCHED
        assert home.machine.carried == {"relay": 0, "punch": 1, "call": 0}
        assert Verb.CONNECT not in home.relay.openings
        assert await home.path() is LinkPath.PUNCHED, "the channel is kept"
        assert home.machine.carried["punch"] == 1


async def test_in_one_home_the_lan_is_taken() -> None:
    async with here(PunchWay(lambda: LOOPBACK), own=LOOPBACK) as home:
        assert await home.path() is LinkPath.LAN
        assert home.machine.carried["relay"] == 0


async def test_a_dialler_that_can_be_dialled_is_called_back() -> None:
    calls = ExpectedCalls()
    async with CallBackListener.listen(calls, "127.0.0.1") as port, here(PunchWay(lambda: NOWHERE)) as home:
        home.ways.choice.add(CallBackWay(calls, lambda: f"127.0.0.1:{port}"))
        assert await home.path() is LinkPath.CALLED_BACK
        assert home.machine.carried == {"relay": 0, "punch": 0, "call": 1}


async def test_without_better_ways_grpc_asks_the_relay_itself() -> None:
    async with here() as home:
        assert await home.path() is LinkPath.RELAYED
        assert home.relay.openings == [Verb.CONNECT, Verb.TAKE]


async def test_what_failed_is_not_tried_again_soon() -> None:
    failing = FakeWay(failure=NoWay("no hole", REMEMBERED_S))
    async with here(failing) as home:
        assert await home.path() is LinkPath.RELAYED
        channel = home.dialer.channel(home.machine.endpoint)
        assert home.dialer.channel(home.machine.endpoint, stuck=channel) is not channel
        assert await home.path() is LinkPath.RELAYED
        assert failing.tried == 1
        assert home.machine.carried["relay"] == 2, "a stuck link gets another connection"


async def test_a_slow_way_does_not_hold_the_first_connection_up_and_serves_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_dialler, "HEAD_START_S", 0.1)
    async with here() as home:
        slow = FakeWay(home.machine._server)
        slow.may_end.clear()
        home.ways.choice.add(slow)
        assert await home.path() is LinkPath.RELAYED
        first = home.dialer.channel(home.machine.endpoint)
        assert home.dialer.channel(home.machine.endpoint) is first, "nothing better is known"
        slow.may_end.set()
        await become(lambda: home.ways.choice.memory.works(home.machine.peer))
        assert await home.path() is LinkPath.PUNCHED, "a channel of its own, over what was opened meanwhile"
        assert slow.tried == 1
        await greet(first, home.machine.endpoint)  # and streams of the old one go on


async def test_a_way_that_worked_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_dialler, "HEAD_START_S", 0.0)
    async with here() as home:
        way = FakeWay(home.machine._server)
        home.ways.choice.add(way)
        home.ways.choice.memory.worked(home.machine.peer, way)
        assert await home.path() is LinkPath.PUNCHED


async def test_a_way_that_breaks_is_replaced_by_the_relay() -> None:
    """A hole worked, and the router has forgotten it since."""
    async with here() as home:
        way = FakeWay(home.machine._server)
        home.ways.choice.add(way)
        assert await home.path() is LinkPath.PUNCHED
        way.failure = NoWay("no hole any more", REMEMBERED_S)
        stuck = home.dialer.channel(home.machine.endpoint)
        home.dialer.channel(home.machine.endpoint, stuck=stuck)
        assert await home.path() is LinkPath.RELAYED


async def test_a_fault_in_a_way_costs_only_the_way(caplog: pytest.LogCaptureFixture) -> None:
    async with here(FakeWay(failure=ZeroDivisionError("a fault of ours"))) as home:
        assert await home.path() is LinkPath.RELAYED
    assert "fake to" in caplog.text


async def test_delays_are_those_of_the_way_that_links_take() -> None:
    async with here(PunchWay(lambda: NOWHERE)) as home:
        machine = home.machine.endpoint
        record = sample_record(
            machine.peer, address=machine.address, certificate=machine.certificate, reach=Reach.RELAYED
        )
        assert set(await measure_delays([record], ways=home.ways)) == {machine.peer}
        assert home.machine.carried == {"relay": 0, "punch": 1, "call": 0}
        assert await measure_rate(record, ways=home.ways) is not None
        assert home.machine.carried["relay"] == 0
        assert set(await measure_delays([record])) == {machine.peer}
        assert home.machine.carried["relay"] == 1


async def test_another_machine_behind_the_way_is_refused() -> None:
    """Encryption has its ends at the peers: a way vouches for nobody."""
    async with here() as home, standing(home.relay, identity=Identity.ephemeral()) as other:
        home.relay.machine = home.machine
        home.ways.choice.add(FakeWay(other._server))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await home.path()
        assert "another machine answers there" in plain_reason(caught.value)


async def test_a_machine_that_the_relay_has_lost_is_unreachable_at_once() -> None:
    async with here(FakeWay(failure=NoWay("no"))) as home:
        home.relay.machine = None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await home.path()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_few_ways_are_tried_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_dialler, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(local_dialler, "HEAD_START_S", 0.1)
    async with here() as home:
        slow = FakeWay(home.machine._server)
        slow.may_end.clear()
        home.ways.choice.add(slow)
        opening = [home.ways.choice.open(Identity.ephemeral().peer_id, home.relay.address) for _ in range(4)]
        gone = await asyncio.gather(*opening, return_exceptions=True)
        assert slow.tried == 2
        assert all(isinstance(one, NoWay) for one in gone), "nobody of that name stands there"


async def test_sockets_are_private_and_go_with_their_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_dialler, "MAX_DOORS", 2)
    async with here(PunchWay(lambda: NOWHERE)) as home:
        endpoints = [
            replace(home.machine.endpoint, certificate=ServerCertificate.fresh(home.machine.peer).der) for _ in range(3)
        ]
        channels = [home.dialer.channel(endpoint) for endpoint in endpoints]
        folder = home.ways._folder
        assert folder is not None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(list(folder.iterdir())) == 2
        assert home.dialer.path(endpoints[2]) is LinkPath.RELAYED, "one too many: gRPC asks the relay"
        assert home.dialer.path(endpoints[0]) is None, "not connected yet"
        del channels
        home.dialer._kept.clear()
        gc.collect()
        await become(lambda: not list(folder.iterdir()))
        assert not home.ways._doors
    assert not folder.exists()


@pytest.mark.parametrize("lacking", ["sharing", "local sockets", "a folder"])
async def test_a_system_without_what_is_needed_keeps_to_the_relay(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    match lacking:
        case "sharing":
            monkeypatch.setattr(local_dialler, "IS_SUPPORTED", False)
        case "local sockets":
            monkeypatch.setattr(local_dialler, "socket", SimpleNamespace())
        case _:
            monkeypatch.setattr("tempfile.mkdtemp", _no_folder)
    async with relaying() as relay, standing(relay) as machine, open_ways() as ways, Dialer(ways=ways) as dialer:
        await greet(dialer.channel(machine.endpoint), machine.endpoint)
        assert dialer.path(machine.endpoint) is LinkPath.RELAYED
        assert relay.openings == [Verb.CONNECT, Verb.TAKE]


def _no_folder(**_options: object) -> Path:
    raise PermissionError("read-only")
