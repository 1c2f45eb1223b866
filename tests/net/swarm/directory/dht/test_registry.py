"""The registry's promises, by both implementations, and a hostile DHT peer that tries to break them."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import msgpack
import pytest
import pytest_asyncio

from swarm.base.errors import ConfigError, IdentityError, RegistryError
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.address_proof import hello_response, who_answer
from swarm.directory.dht import addresses
from swarm.directory.dht import registry as dht_registry
from swarm.directory.dht.dialback import DialBack, pack_request
from swarm.directory.dht.registry import DhtConfig, DhtPipe, DhtRegistry, start_pipe
from swarm.directory.dialable import DialPolicy
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord, NodeState, seal, split_address
from swarm.directory.registry import RECORD_TTL_S, Registry, RelayOffer
from swarm.directory.sealing import RecordError
from swarm.link.certificate import ServerCertificate
from swarm.link.endpoint import Endpoint
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.hello_server import answering

ROOT = Path(__file__).parents[5]
MODEL = ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 40)
NONCE = bytes(range(16))
LOCAL = DhtConfig(host="127.0.0.1")
NOBODY = Endpoint(PeerId("nobody"), "127.0.0.1:1")
in_one_loop = pytest.mark.asyncio(loop_scope="module")


def record_of(registry: Registry, span: Span, name: str = "victim") -> NodeRecord:
    return NodeRecord(
        peer=registry.peer_id,
        model=MODEL,
        span=span,
        address="127.0.0.1:5000",
        state=NodeState.SERVING,
        numeric_class="cpu-float32",
        version="0.2.0",
        name=name,
        sweep_ms=((1, 1.0),),
        kv_tokens_free=1,
        kv_tokens_total=2,
        sequence=1,
        expires_at=time.time() + RECORD_TTL_S,
    )


def joining(*peers: DhtRegistry, client_mode: bool = False) -> DhtConfig:
    return replace(LOCAL, join=tuple(peer.join_addresses()[0] for peer in peers), client_mode=client_mode)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dht_pair() -> AsyncIterator[tuple[DhtRegistry, DhtRegistry]]:
    """Two peers that tests use one after another; each test takes back what it files."""
    async with DhtRegistry.open(LOCAL) as one, DhtRegistry.open(joining(one)) as two:
        yield one, two


@pytest.fixture(params=["memory", "dht"])
def pair(request: pytest.FixtureRequest, dht_pair: tuple[DhtRegistry, DhtRegistry]) -> tuple[Registry, Registry]:
    if request.param == "dht":
        return dht_pair
    network = MemoryNetwork()
    return MemoryRegistry(network), MemoryRegistry(network)


@in_one_loop
async def test_announce_replace_and_withdraw(pair: tuple[Registry, Registry]) -> None:
    one, two = pair
    first, second = record_of(one, Span(0, 20)), record_of(two, Span(15, 40))
    assert await two.models() == []
    assert await two.records(MODEL.fingerprint, 40) == []
    await one.announce(first)
    await two.announce(second)
    for registry in (one, two):
        assert await registry.records(MODEL.fingerprint, 40, within_s=0.0) == [first, second]
        assert await registry.models() == [MODEL]
    newer = replace(second, span=Span(33, 40), sequence=2, expires_at=second.expires_at + 1)
    await two.announce(newer)
    assert await one.records(MODEL.fingerprint, 40, within_s=0.0) == [first, newer]
    with pytest.raises(RegistryError, match="last"):
        await two.announce(replace(newer, sequence=3))  # the very same one would be held already
    with pytest.raises(RecordError, match="peer"):
        await two.announce(first)
    with pytest.raises(RecordError, match="expires_at"):
        await two.announce(replace(newer, expires_at=time.time() + 3_600))
    await two.withdraw(newer)
    assert await one.records(MODEL.fingerprint, 40, within_s=0.0) == [first]
    await one.withdraw(first)
    assert await two.records(MODEL.fingerprint, 40, within_s=0.0) == []
    assert await two.models() == []


@in_one_loop
async def test_a_lent_relay_is_found_until_it_is_lent_no_more(pair: tuple[Registry, Registry]) -> None:
    one, two = pair
    assert await two.relays() == []
    both = ("192.0.2.7:31338", "[2001:db8::7]:31338")
    await one.offer_relay(*both)
    assert await two.relays() == [RelayOffer(one.peer_id, address) for address in both]
    assert await one.relays() == [], "nobody is told of its own"
    await one.offer_relay()
    assert await two.relays() == []


@in_one_loop
async def test_a_client_finds_relays_and_a_peer_that_offers_nonsense_lends_none(
    dht_pair: tuple[DhtRegistry, DhtRegistry],
) -> None:
    one, two = dht_pair
    await two.offer_relay("[2001:db8::7]:31338")
    async with DhtRegistry.open(joining(one, two, client_mode=True)) as client:
        assert await client.relays() == [RelayOffer(two.peer_id, "[2001:db8::7]:31338")]
        await one.offer_relay("http://192.0.2.7/")
        assert await client.relays() == [RelayOffer(two.peer_id, "[2001:db8::7]:31338")]
    await one.offer_relay()
    await two.offer_relay()


@in_one_loop
async def test_a_relay_counts_as_reached_where_it_proves_whose_it_is(
    dht_pair: tuple[DhtRegistry, DhtRegistry],
) -> None:
    one, two = dht_pair

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = (await reader.readline()).split()
        writer.write(who_answer(two.identity, bytes.fromhex(asked[1].decode())))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as relay:
        address = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
        assert await two.dial_back_relay(address) is True
        assert await one.dial_back_relay(address) is False, "a relay answers there, but not the asker's"
    assert await two.dial_back_relay(address) is False, "nothing answers any more"
    assert await two.dial_back_relay("not an address") is False


async def test_a_relay_of_a_private_address_is_not_called_and_counts_as_a_dial_back() -> None:
    identity, called = Identity.ephemeral(), list[str]()

    async def call(address: str, nonce: bytes) -> bytes:
        called.append(address)
        return who_answer(identity, nonce)

    request = msgpack.packb("10.0.0.1:22")
    public = DialBack(DialPolicy(only_public=True), call_relay=call)
    assert await public.answer_relay(identity.peer_id, request) == b"\xc2"
    assert not called
    own = DialBack(DialPolicy(only_public=False), call_relay=call)
    assert [await own.answer_relay(identity.peer_id, request) for _ in range(7)] == [b"\xc3"] * 6 + [b"\xc0"]
    assert await own.answer_relay(identity.peer_id, b"\xff") == b"\xc2"
    for line in (b"", b"WHO\n", b"WHO x y\n", b"\xff" * 9_000, who_answer(Identity.ephemeral(), NONCE)):

        async def lie(address: str, nonce: bytes, line: bytes = line) -> bytes:
            return line

        liar = DialBack(DialPolicy(only_public=False), call_relay=lie)
        assert await liar.answer_relay(identity.peer_id, request) == b"\xc2"


async def test_memory_forgets_what_expired_and_what_is_closed() -> None:
    now = time.time()
    network = MemoryNetwork(clock=lambda: now)
    registry = MemoryRegistry(network)
    await registry.announce(record_of(registry, Span(0, 4)))
    assert len(await registry.records(MODEL.fingerprint, 40)) == 1
    now += RECORD_TTL_S + 1
    assert await registry.records(MODEL.fingerprint, 40) == []
    await registry.aclose()
    with pytest.raises(RegistryError, match="closed"):
        await registry.models()


async def test_a_client_reads_and_one_dead_peer_of_two_does_not_matter() -> None:
    async with DhtRegistry.open(LOCAL) as one:
        record = record_of(one, Span(0, 20))
        await one.announce(record)
        dead = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.ephemeral().peer_id}"
        config = DhtConfig(join=(dead, one.join_addresses()[0]), client_mode=True)
        async with DhtRegistry.open(config) as client:
            assert await client.records(MODEL.fingerprint, 40) == [record]
            assert client.join_addresses() == []
        assert await one.dial_back(NOBODY, NONCE) is None, "a client is not asked"


async def test_a_hostile_peer_cannot_touch_the_record_of_another_or_fill_the_directory_or_blind_readers() -> None:
    async with DhtRegistry.open(LOCAL) as one, DhtRegistry.open(joining(one)) as two:
        record = record_of(one, Span(0, 4))
        await one.announce(record)
        await two.announce(record_of(two, Span(4, 40), name="second"))
        command = ["-m", "tests.net.hostile_dht_peer", one.join_addresses()[0]]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, seal(record, one.identity).hex(), stdin=PIPE, stdout=PIPE, cwd=ROOT
        )
        assert process.stdout is not None
        taken = json.loads(await process.stdout.readline())
        flood = taken.pop("flood")
        assert [name for name, accepted in taken.items() if accepted] == ["own record", "own pointer"], taken
        assert len(taken) == 15
        assert flood == 65 + 7, "what one identity may file: two spans of the deepest model, and eight models"
        for registry in (one, two):  # it is asked as well, and answers nonsense by now
            listed = await registry.records(MODEL.fingerprint, 40, within_s=0.0)
            assert sorted(str(entry.name) for entry in listed) == ["hostile", "second", "victim"]
            models = await registry.models()
            assert MODEL in models
            assert len(models) == 8
            assert await registry.mine() == (record if registry is one else listed[-1])
        await two.announce(record_of(two, Span(4, 40), name="second"))
        await process.communicate(b"")


async def test_dial_back_wants_the_askers_own_signature() -> None:
    async with DhtRegistry.open(LOCAL) as one, DhtRegistry.open(joining(one)) as two:
        async with answering(two.identity) as here:
            assert await two.dial_back(here, NONCE) is True
            assert await one.dial_back(here, NONCE) is False, "somebody answers there, but not the asker"
            other = replace(here, certificate=ServerCertificate.fresh(two.peer_id).der)
            assert await two.dial_back(other, NONCE) is False, "it answers with another certificate"
            assert await two.dial_back(replace(here, certificate=b""), NONCE) is False, "nobody is called in plain text"
        assert await two.dial_back(here, NONCE) is False, "nobody answers any more"
        assert await two.dial_back(replace(here, address="not an address"), NONCE) is False


async def test_dial_back_is_limited_per_peer_and_in_all() -> None:
    identity, calls, now = Identity.ephemeral(), [], [0.0]

    async def call(endpoint: Endpoint, nonce: bytes) -> bytes:
        calls.append(endpoint)
        return hello_response(identity, nonce, endpoint.digest)

    def asking(peer: PeerId) -> bytes:
        return pack_request("192.0.2.1:80", NONCE, ServerCertificate.fresh(peer).der)

    service = DialBack(DialPolicy(only_public=False), call, lambda: now[0])
    request = asking(identity.peer_id)
    answers = [await service.answer(identity.peer_id, request) for _ in range(8)]
    assert answers == [b"\xc3"] * 6 + [b"\xc0"] * 2  # msgpack: true, nil
    assert len(calls) == 6
    peers = [PeerId(f"peer{number}") for number in range(80)]
    others = [await service.answer(peer, asking(peer)) for peer in peers]
    assert others == [b"\xc2"] * 54 + [b"\xc0"] * 26, "60 a minute in all, and a stranger's answer is not its own"
    now[0] += 61
    assert await service.answer(identity.peer_id, request) == b"\xc3"
    bad = [pack_request("http://x/", NONCE, b""), pack_request("x:1", b"short", b"")]
    for nonsense in (b"", b"\xff", *bad, bytes(1_100)):
        assert await service.answer(identity.peer_id, nonsense) == b"\xc2"
    assert len(calls) == 61
    assert calls[0].peer == identity.peer_id


@pytest.mark.parametrize("address", ["127.0.0.1:22", "10.0.0.1:80", "169.254.169.254:80", "[::1]:22", "localhost:22"])
async def test_dial_back_looks_into_no_network_for_a_stranger(address: str) -> None:
    """Else a stranger learned from the time that it takes which ports are open beside a public machine."""
    identity, called = Identity.ephemeral(), list[str]()

    async def call(endpoint: Endpoint, nonce: bytes) -> bytes:
        called.append(endpoint.address)
        return hello_response(identity, nonce, endpoint.digest)

    request = pack_request(address, NONCE, ServerCertificate.fresh(identity.peer_id).der)
    assert await DialBack(DialPolicy(only_public=True), call).answer(identity.peer_id, request) == b"\xc2"
    assert not called
    assert await DialBack(DialPolicy(only_public=False), call).answer(identity.peer_id, request) == b"\xc3"
    host, port = split_address(called[0])
    assert str(ip_address(host.strip("[]"))), "the address that was checked is dialled, and no name"
    assert port == split_address(address)[1]


async def test_nobody_answers_is_one_line_with_the_addresses() -> None:
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.ephemeral().peer_id}"
    with pytest.raises(RegistryError, match="no peer answers") as caught:
        async with DhtRegistry.open(DhtConfig(join=(address,), client_mode=True)):
            pass
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["", "192.0.2.1:80", "/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.1/tcp/1/p2p/QmNope", "/ip4/x/tcp/1/p2p/Qm"]
)
def test_a_malformed_peer_address_is_a_configuration_error(address: str) -> None:
    with pytest.raises(ConfigError, match="--join"):
        DhtRegistry.open(DhtConfig(join=(address,)))


async def test_one_identity_and_one_port_per_running_program(tmp_path: Path) -> None:
    config = replace(LOCAL, identity_path=tmp_path / "identity.key")
    async with DhtRegistry.open(config) as one:
        with pytest.raises(IdentityError, match="in use"):
            await DhtRegistry.open(config)
        port = int(one.join_addresses()[0].split("/")[4])
        with pytest.raises(ConfigError, match=str(port)):
            await DhtRegistry.open(replace(LOCAL, port=port))
        peer_id = one.peer_id
    async with DhtRegistry.open(config) as again:
        assert again.peer_id == peer_id
        assert again.join_addresses()[0].endswith(peer_id)


async def test_a_chosen_port_that_somebody_takes_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """An announced port is chosen before the daemon listens on it; one that never is free is an error after all."""
    find, tried = addresses.free_port, list[int]()
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        taken: int = somebody.getsockname()[1]

        def late(version: int) -> int:
            tried.append(find(version) if tried else taken)
            return tried[-1]

        monkeypatch.setattr(addresses, "free_port", late)
        async with DhtRegistry.open(replace(LOCAL, announce_host="127.0.0.1")) as one:
            assert len(tried) == 2
            assert [int(address.split("/")[4]) for address in one.join_addresses()] == [tried[-1]]
            async with DhtRegistry.open(joining(one, client_mode=True)) as other:
                assert await other.models() == []
        monkeypatch.setattr(addresses, "free_port", lambda _: taken)
        with pytest.raises(RegistryError, match=f"{taken}.*address already in use"):
            await DhtRegistry.open(replace(LOCAL, announce_host="127.0.0.1"))


@in_one_loop
async def test_a_wrong_clock_is_named(
    dht_pair: tuple[DhtRegistry, DhtRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import runpy, time; right = time.time; time.time = lambda: right() + 10\n"
        "runpy.run_module('swarm.directory.dht.process', run_name='__main__')"
    )

    async def start_late() -> DhtPipe:
        return await start_pipe([sys.executable, "-c", program])

    one, _ = dht_pair
    monkeypatch.setattr("swarm.directory.dht.registry.start_pipe", start_late)
    with pytest.raises(RegistryError, match="clock"):
        await DhtRegistry.open(joining(one))


START = (
    "import runpy, sys, {imports}\n{change}\n"
    "runpy.run_module('swarm.directory.dht.process', run_name='__main__', alter_sys=True)"
)
"""A DHT process in which something is otherwise."""


def starting(monkeypatch: pytest.MonkeyPatch, *programs: str) -> list[str]:
    """Start one of these programs after another as the DHT process; those that are left."""
    left = list(programs)

    async def start() -> DhtPipe:
        return await start_pipe([sys.executable, "-c", left.pop(0)])

    monkeypatch.setattr("swarm.directory.dht.registry.start_pipe", start)
    return left


BUSY = START.format(
    imports="swarm.directory.dht.hivemind_node as node",
    change="async def late(*args): raise node.P2PDaemonError('Daemon failed to start in 15.0 seconds')\n"
    "node.start_daemon = late",
)
SOUND = START.format(imports="os", change="")


@in_one_loop
async def test_a_busy_machine_gets_more_time_once_and_says_so(
    dht_pair: tuple[DhtRegistry, DhtRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = dht_pair
    said: list[str] = []
    monkeypatch.setattr(dht_registry._log, "warning", lambda text, *values: said.append(text % values))
    left = starting(monkeypatch, BUSY, SOUND)
    async with DhtRegistry.open(joining(one, client_mode=True)) as other:
        assert await other.models() == []
    assert not left
    assert said == ["this machine is busy: joining took 15 s; tried once more, for 60 s"]
    starting(monkeypatch, BUSY, BUSY)
    with pytest.raises(RegistryError, match="too busy: the p2p daemon did not start within 60 s"):
        await DhtRegistry.open(joining(one, client_mode=True))


async def test_where_no_peer_answers_no_time_is_wasted_on_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.ephemeral().peer_id}"
    starting(monkeypatch, BUSY)
    with pytest.raises(RegistryError, match=f"no peer answers at {address} .from --join. .waited 15 s.$"):
        await DhtRegistry.open(DhtConfig(join=(address,), client_mode=True))


async def test_two_releases_that_cannot_meet_say_which_is_to_be_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    later = START.format(
        imports="swarm.directory.dht.about as about", change="about.OURS = about.About('9.0.0', (3,), (1,))"
    )
    async with DhtRegistry.open(LOCAL) as one:
        starting(monkeypatch, later)
        with pytest.raises(RegistryError, match=r"runs 9\.0\.0, with format 3: its machines are to be updated"):
            await DhtRegistry.open(joining(one))
    starting(monkeypatch, later, SOUND)
    async with DhtRegistry.open(LOCAL) as one:
        with pytest.raises(RegistryError, match=r"runs release 9\.0\.0, with records of format 3.*update this machine"):
            await DhtRegistry.open(joining(one, client_mode=True))
