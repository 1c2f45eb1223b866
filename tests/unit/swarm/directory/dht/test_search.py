"""Reading and writing among peers that lie, drop, stall or crowd: over calls in memory, with the real protocol."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from swarm.base.ids import PeerId
from swarm.directory.dht import search
from swarm.directory.dht.hivemind_node import DHTID, PeerID, dht_pb2
from swarm.directory.dht.protocol import DirectoryProtocol, kademlia_id
from swarm.directory.dht.search import DirectoryPeer, StoreOutcome
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import Filing, seal_announcement
from swarm.directory.record_store import FiledItem, open_item
from swarm.directory.registry import block_keys, storage_key
from tests.kademlia_network import KademliaNetwork, peer_beside, random_peer
from tests.sample_records import MODEL, sample_record

[BLOCK] = block_keys(MODEL.fingerprint, 0, 12)
BLOCK_ID = DHTID.from_bytes(storage_key(BLOCK))


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.ephemeral()


def peer_id_of(identity: Identity) -> PeerID:
    return PeerID.from_base58(identity.peer_id)


def filings_of(identity: Identity, life_s: float = 60.0) -> list[Filing]:
    record = sample_record(identity.peer_id, expires_at=round(time.time() + life_s, 3))
    return seal_announcement(record, identity)


def opened(filings: list[Filing]) -> list[FiledItem]:
    return [open_item(storage_key(one.key), one.subkey, one.data, expires_of(one), time.time()) for one in filings]


def expires_of(filing: Filing) -> float:
    from swarm.directory.model_pointer import open_pointer
    from swarm.directory.node_record import open_sealed

    now = time.time()
    is_pointer = "/models/" in filing.key
    return open_pointer(filing.data, now).expires_at if is_pointer else open_sealed(filing.data, now).expires_at


async def honest_peers(network: KademliaNetwork, count: int, rng: random.Random) -> list[DirectoryPeer]:
    first = await network.peer(random_peer(rng))
    return [first, *[await network.peer(random_peer(rng), first) for _ in range(count - 1)]]


def drop_all(peer: DirectoryPeer) -> None:
    """It says that it has stored everything, and has nothing."""
    protocol: DirectoryProtocol = peer.node.protocol
    protocol._take = lambda row, signer, origin: True  # type: ignore[method-assign]


async def announced(peer: DirectoryPeer, identity: Identity) -> tuple[StoreOutcome, list[Filing]]:
    filings = filings_of(identity)
    return await peer.keep(opened(filings)), filings


async def test_what_is_filed_is_found_by_everybody_with_few_messages(identity: Identity) -> None:
    rng, network = random.Random(1), KademliaNetwork()
    peers = await honest_peers(network, 5, rng)
    node = await network.peer(peer_id_of(identity), peers[0])
    reader = await network.peer(random_peer(rng), peers[0], client=True)
    await node.fetch([BLOCK])
    network.calls.clear()
    kept, filings = await announced(node, identity)
    calls = Counter(network.calls)
    assert (kept.asked, kept.copies, kept.is_outdated) == (5, (5, 5, 5), False)
    assert calls == {"rpc_find": 10, "rpc_store": 5}, "one question, one store and one reading per peer"
    found = await reader.fetch([one.key for one in filings])
    assert found == [[one.data] for one in filings]
    kept = await node.keep(opened(filings_of(identity, life_s=50)))
    assert kept.is_outdated


async def test_who_reaches_those_alone_that_it_joined_through_asks_nobody_else(identity: Identity) -> None:
    rng, network = random.Random(2), KademliaNetwork()
    peers = await honest_peers(network, 5, rng)
    node = await network.peer(peer_id_of(identity), peers[0], client=True)
    reader = await network.peer(random_peer(rng), peers[0], client=True)
    node.is_confined = reader.is_confined = True
    network.calls.clear()
    kept, filings = await announced(node, identity)
    assert (kept.asked, kept.copies) == (1, (1, 1, 1))
    assert Counter(network.calls) == {"rpc_find": 2, "rpc_store": 1}
    network.calls.clear()
    assert await reader.fetch([one.key for one in filings], len(filings)) == [[one.data] for one in filings]
    assert network.calls == ["rpc_find"]


async def test_alone_a_node_holds_its_own(identity: Identity) -> None:
    node = await KademliaNetwork().peer(peer_id_of(identity))
    kept, [own, *_] = await announced(node, identity)
    assert (kept.asked, kept.is_outdated) == (0, False)
    assert await node.fetch([own.key]) == [[own.data]]


@pytest.mark.parametrize("count", [14, 24])
async def test_ids_crowded_beside_a_key_hide_nobody_whose_peer_is_shared(identity: Identity, count: int) -> None:
    """They hold nothing, say that they do, and name only one another. Each id cost a few tries, for it is a hash."""
    rng, network = random.Random(count), KademliaNetwork()
    honest = await honest_peers(network, 5, rng)
    node = await network.peer(peer_id_of(identity), honest[0])
    reader = await network.peer(random_peer(rng), honest[0], client=True)
    nearest = min(BLOCK_ID.xor_distance(one.node.node_id) for one in [*honest, node])
    crowd = [await network.peer(peer_beside(BLOCK_ID, nearest, rng), honest[0]) for _ in range(count)]
    theirs = [(one.node.node_id, one.node.peer_id) for one in crowd]
    for one in crowd:
        drop_all(one)
        one.node.protocol.routing_table.get_nearest_neighbors = lambda *_, **__: theirs[:20]
    kept, filings = await announced(node, identity)
    assert min(kept.copies) >= 1
    assert (await reader.fetch([BLOCK])) == [[filings[1].data]]


async def test_peers_that_drop_are_replaced_by_the_next(identity: Identity) -> None:
    rng, network = random.Random(3), KademliaNetwork()
    peers = await honest_peers(network, 12, rng)
    by_distance = sorted(peers[1:], key=lambda one: BLOCK_ID.xor_distance(one.node.node_id))
    for one in by_distance[:6]:
        drop_all(one)
    node = await network.peer(peer_id_of(identity), peers[0])
    kept, _ = await announced(node, identity)
    assert kept.copies[1] >= 5


ODD: dict[str, Callable[[], Any]] = {
    "no msgpack": lambda: b"\xc1",
    "a number": lambda: msgpack.packb(7),
    "a map": lambda: msgpack.packb({"a": 1}),
    "rows of other things": lambda: msgpack.packb([[1, 2, 3]]),
    "no rows": lambda: msgpack.packb(["x"]),
    "an endless expiry": lambda: msgpack.packb([["x", b"y", float("nan")], ["x", b"y", float("inf")]]),
    "many rows": lambda: msgpack.packb([[str(n), b"", 1e300] for n in range(50_000)]),
    "deep": lambda: b"\x91" * 5_000 + b"\x00",
    "hivemind's dictionary with a text for its size": lambda: msgpack.packb(
        msgpack.ExtType(0x50, msgpack.packb(["x", 1.0, []]))
    ),
}


@pytest.mark.parametrize("odd", ODD)
async def test_one_peers_odd_answer_spoils_no_other(identity: Identity, odd: str) -> None:
    """One odd field in one answer used to make every look-up of a key wait for 15 s and fail."""
    rng, network = random.Random(5), KademliaNetwork()
    peers = await honest_peers(network, 3, rng)
    node = await network.peer(peer_id_of(identity), peers[0])
    liar = await network.peer(random_peer(rng), peers[0])
    _, filings = await announced(node, identity)
    value = ODD[odd]()

    async def answer(request: dht_pb2.FindRequest, _context: object) -> dht_pb2.FindResponse:
        result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=float("nan"))
        result.nearest_node_ids.extend([b"", bytes(50)])
        result.nearest_peer_ids.extend([b"", bytes(5_000), liar.node.peer_id.to_bytes()])
        return dht_pb2.FindResponse(results=[result] * len(request.keys), peer=liar.node.protocol.node_info)

    network.handlers[str(liar.node.peer_id), "DirectoryProtocol.rpc_find"] = answer
    reader = await network.peer(random_peer(rng), peers[0], liar, client=True)
    async with asyncio.timeout(3):
        assert await reader.fetch([BLOCK]) == [[filings[1].data]]


async def test_neighbours_that_never_answer_cost_no_more_than_the_time_of_one_look_up(
    identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, network, over = random.Random(6), KademliaNetwork(), asyncio.Event()
    peers = await honest_peers(network, 3, rng)
    node = await network.peer(peer_id_of(identity), peers[0])
    liar = await network.peer(random_peer(rng), peers[0])
    _, filings = await announced(node, identity)

    def invented(*_: object, **__: object) -> list[tuple[DHTID, PeerID]]:
        made_up = [peer_beside(BLOCK_ID, 2**150, rng) for _ in range(3)]
        for one in made_up:
            network.handlers[str(one), "DirectoryProtocol.rpc_find"] = stall
        return [(kademlia_id(one), one) for one in made_up]

    async def stall(_request: object, _context: object) -> None:
        await over.wait()

    reader = await network.peer(random_peer(rng), peers[0], liar, client=True)
    liar.node.protocol.routing_table.get_nearest_neighbors = invented
    monkeypatch.setattr(search, "LOOK_UP_S", 0.3)
    reader.node.protocol.wait_timeout = 60.0
    try:
        async with asyncio.timeout(20):
            assert await reader.fetch([BLOCK]) == [[filings[1].data]]
    finally:
        over.set()


@pytest.mark.parametrize("cuts", [1, 3])
async def test_a_node_that_was_cut_off_is_back_with_its_next_question(
    identity: Identity, monkeypatch: pytest.MonkeyPatch, cuts: int
) -> None:
    """As behind a router that restarts: its connections carry nothing more, and nobody says so."""
    rng, network = random.Random(7), KademliaNetwork()
    peers = await honest_peers(network, 3, rng)
    node = await network.peer(peer_id_of(identity), *peers, client=True)
    _, filings = await announced(node, identity)
    reader = await network.peer(random_peer(rng), peers[0], client=True)
    monkeypatch.setattr(search, "ANEW_S", 0.0)
    for _ in range(cuts):
        network.dead |= {(str(node.node.peer_id), str(one.node.peer_id)) for one in peers}
        kept = await node.keep(opened(filings_of(identity, life_s=70)))
        assert kept.asked == 0, "nobody answers"
        filings = filings_of(identity, life_s=80)
        kept = await node.keep(opened(filings))
        assert kept.copies == (3, 3, 3)
    assert await reader.fetch([BLOCK]) == [[filings[1].data]]


async def test_an_item_is_taken_from_its_signer_alone_and_an_id_is_a_hash(identity: Identity) -> None:
    rng, network = random.Random(7), KademliaNetwork()
    peer = await network.peer(random_peer(rng))
    protocol: DirectoryProtocol = peer.node.protocol
    filings = filings_of(identity)
    request = dht_pb2.StoreRequest(
        keys=[storage_key(one.key) for one in filings],
        subkeys=[msgpack.packb(one.subkey) for one in filings],
        values=[one.data for one in filings],
        expiration_time=[expires_of(one) for one in filings],
        in_cache=[False] * len(filings),
        peer=dht_pb2.NodeInfo(node_id=BLOCK_ID.to_bytes()),
    )
    thief, own = random_peer(rng), peer_id_of(identity)
    refused = await protocol.rpc_store(request, SimpleNamespace(remote_id=thief))
    assert not any(refused.store_ok), "a stranger cannot bring it, though it is signed"
    taken = await protocol.rpc_store(request, SimpleNamespace(remote_id=own))
    assert all(taken.store_ok)
    assert not peer.node.protocol.routing_table.uid_to_peer_id, "neither has an id of its own choice"
    hello = dht_pb2.PingRequest(peer=request.peer)
    await protocol.rpc_ping(hello, SimpleNamespace(remote_id=thief))
    await asyncio.sleep(0)
    assert not peer.node.protocol.routing_table.uid_to_peer_id
    request.subkeys[0] = b"\xc1"
    assert (await protocol.rpc_store(request, SimpleNamespace(remote_id=own))).store_ok[0] is False


async def test_questions_stores_and_neighbours_are_bounded_per_address(identity: Identity) -> None:
    rng, network = random.Random(8), KademliaNetwork()
    peer = await network.peer(random_peer(rng))
    protocol: DirectoryProtocol = peer.node.protocol
    flooder, other = random_peer(rng), random_peer(rng)
    network.addresses = {str(flooder): "203.0.113.1", str(other): "203.0.113.2"}
    question = dht_pb2.FindRequest(keys=[bytes(20)] * 40)

    async def answered(asker: PeerID) -> bool:
        return len((await protocol.rpc_find(question, SimpleNamespace(remote_id=asker))).results) == 40

    assert sum([await answered(flooder) for _ in range(300)]) <= 110
    assert await answered(other)
    crowd = [random_peer(rng) for _ in range(3_000)]
    for one in crowd:
        await protocol.update_routing_table(kademlia_id(one), one)
    table = protocol.routing_table
    assert len(table.uid_to_peer_id) <= 2 * 20 * len(table.buckets)
    assert len(table.buckets) < 40


async def test_an_answer_has_room_for_two_full_keys_of_records_or_eight_of_pointers() -> None:
    rng, network = random.Random(9), KademliaNetwork()
    peer = await network.peer(random_peer(rng))
    protocol: DirectoryProtocol = peer.node.protocol
    for number in range(4_000):
        key = storage_key(f"block {number % 4}")
        one = FiledItem(key, f"{number}", PeerId(f"{number}"), time.time() + 60, bytes(1_500), origin=f"{number}")
        protocol.records.put(one, time.time())
        listed = FiledItem(
            storage_key(f"list {number % 8}"), f"{number}/{number}", PeerId(f"{number}"), one.expires_at, bytes(900)
        )
        protocol.records.put(replace(listed, group=f"{number}", origin=f"{number}"), time.time())
    lists = dht_pb2.FindRequest(keys=[storage_key(f"list {number}") for number in range(8)])
    response = await protocol.rpc_find(lists, SimpleNamespace(remote_id=random_peer(rng)))
    assert all(result.type == dht_pb2.FOUND_DICTIONARY for result in response.results)
    assert all(len(result.value) > 150_000 for result in response.results)
    question = dht_pb2.FindRequest(keys=[storage_key(f"block {number}") for number in range(4)])
    response = await protocol.rpc_find(question, SimpleNamespace(remote_id=random_peer(rng)))
    assert [result.type == dht_pb2.FOUND_DICTIONARY for result in response.results] == [True, True, False, False]
    assert response.ByteSize() < 2.5 * 2**20
