"""A private swarm's directory: strangers read, list and write nothing there, and members believe none of them."""

from __future__ import annotations

import logging
import random
import time

import pytest

from swarm.base.errors import RegistryError
from swarm.base.ids import PeerId
from swarm.directory.dht.addresses import OPEN_SWARM, Membership, MetSwarm
from swarm.directory.dht.admission import STRANGER, NetworkAdmission, StrangerRefused, seal_for, unseal_from
from swarm.directory.dht.hivemind_node import DHTID, PeerID, dht_pb2
from swarm.directory.dht.protocol import DirectoryProtocol, kademlia_id
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.dht.search import DirectoryPeer
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import seal_announcement
from swarm.directory.record_store import FiledItem, open_item
from swarm.directory.registry import MODELS_KEYS, models_key, storage_key
from swarm.link.network_key import NetworkKey
from tests.kademlia_network import KademliaNetwork, random_peer
from tests.sample_records import MODEL, sample_record

KEY, OTHER_KEY = NetworkKey(bytes(range(32))), NetworkKey(bytes(32))
RNG = random.Random(7)
WHERE = models_key(MODEL.fingerprint)
"""Where the pointers to the model lie."""


def admission(peer: PeerID, key: NetworkKey = KEY) -> NetworkAdmission:
    return NetworkAdmission(key, PeerId(peer.to_base58()))


async def test_members_find_each_other_and_what_they_file() -> None:
    network = KademliaNetwork()
    node = Identity.ephemeral()
    own = PeerID.from_base58(node.peer_id)
    boot = await network.peer(random_peer(RNG), key=KEY)
    one = await network.peer(own, boot, key=KEY)
    client = await network.peer(random_peer(RNG), boot, client=True, key=KEY)
    items = filed(node)
    outcome = await one.keep(items)
    assert min(outcome.copies) >= 1
    assert [len(found) for found in await client.fetch([WHERE])] == [1]
    assert one.node.protocol.routing_table.uid_to_peer_id.keys() == {kademlia_id(boot.node.peer_id, admission(own))}
    assert kademlia_id(own, admission(own)) != kademlia_id(own)  # a stranger cannot tell where it lies


def filed(node: Identity) -> list[FiledItem]:
    """What a node announces."""
    record = sample_record(node.peer_id, model=MODEL)
    now = time.time()
    return [
        open_item(storage_key(one.key), one.subkey, one.data, record.expires_at, now)
        for one in seal_announcement(record, node)
    ]


@pytest.mark.parametrize("key", [None, OTHER_KEY], ids=["stranger", "member of another swarm"])
async def test_a_stranger_reads_lists_and_writes_nothing(key: NetworkKey | None) -> None:
    network = KademliaNetwork()
    node = Identity.ephemeral()
    boot = await network.peer(PeerID.from_base58(node.peer_id), key=KEY)
    await boot.keep(filed(node))
    thief = Identity.ephemeral()
    stranger = await network.peer(PeerID.from_base58(thief.peer_id), boot, key=key)
    assert await stranger.fetch([WHERE]) == [[]]
    protocol: DirectoryProtocol = stranger.node.protocol
    keys = [DHTID.from_bytes(storage_key(name)) for name in MODELS_KEYS]
    assert await protocol.call_find(boot.node.peer_id, keys) is None
    assert await protocol.call_ping(boot.node.peer_id) is None
    mine = filed(thief)
    stored = await protocol.call_store(
        boot.node.peer_id,
        [DHTID.from_bytes(one.key) for one in mine],
        [one.data for one in mine],
        [one.expires_at for one in mine],
        [one.subkey for one in mine],
    )
    assert not stored
    assert not boot.node.protocol.routing_table.uid_to_peer_id  # nobody is sent to the stranger
    assert [len(found) for found in await boot.fetch([WHERE])] == [1]


async def test_a_members_proof_is_of_no_use_to_whom_it_was_said() -> None:
    network = KademliaNetwork()
    boot = await network.peer(random_peer(RNG), key=KEY)
    member, thief = random_peer(RNG), random_peer(RNG)
    request = dht_pb2.FindRequest(keys=[storage_key(WHERE)])
    request.auth.signature = KEY.proof(PeerId(member.to_base58()))
    name = f"{DirectoryProtocol.__name__}.rpc_find"
    for peer, is_heard in ((member, True), (thief, False)):
        asking = await network.peer(peer, key=KEY, client=True)
        if is_heard:
            answer = await asking.node.p2p.call_protobuf_handler(boot.node.peer_id, name, request, None)
            assert len(answer.results) == 1
        else:
            with pytest.raises(StrangerRefused):
                await asking.node.p2p.call_protobuf_handler(boot.node.peer_id, name, request, None)


async def test_a_member_believes_no_stranger() -> None:
    network = KademliaNetwork()
    liar = await network.peer(random_peer(RNG))
    member = await network.peer(random_peer(RNG), liar, key=KEY, client=True)
    keys = [DHTID.from_bytes(storage_key(WHERE))]
    assert await member.node.protocol.call_find(liar.node.peer_id, keys) is None
    assert await member.node.protocol.call_ping(liar.node.peer_id) is None


async def test_refused_strangers_are_counted_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    network = KademliaNetwork()
    boot: DirectoryPeer = await network.peer(random_peer(RNG), key=KEY)
    stranger = await network.peer(random_peer(RNG))
    for _ in range(50):
        assert await stranger.node.protocol.call_ping(boot.node.peer_id) is None
    lines = [line for line in caplog.messages if "refused a stranger" in line]
    assert lines == [f"refused a stranger: {stranger.node.peer_id} has not this swarm's network key"]


def test_our_own_handlers_hear_members_only() -> None:
    one, two = random_peer(RNG), random_peer(RNG)
    assert unseal_from(admission(two), one, seal_for(admission(one), two, b"words")) == b"words"
    others = [seal_for(whose, two, b"words") for whose in (admission(two), admission(one, OTHER_KEY))]
    for said in (b"words", b"", *others):
        with pytest.raises(StrangerRefused, match=STRANGER):
            unseal_from(admission(two), one, said)
    assert unseal_from(None, one, seal_for(None, two, b"words")) == b"words"


async def test_real_peers_say_why_they_do_not_let_a_machine_in(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    met: list[MetSwarm] = []
    private = Membership(KEY, met.append)
    async with DhtRegistry.open(DhtConfig(host="127.0.0.1", membership=private)) as boot:
        join = tuple(boot.join_addresses())
        async with DhtRegistry.open(DhtConfig(join=join, client_mode=True, membership=private)) as member:
            assert await member.models() == []
        assert met == [MetSwarm(None, (), join), MetSwarm(None, join)]  # what others can join through later
        with pytest.raises(RegistryError, match="this machine has not their network key: get an invite from a member"):
            await _joined(join, OPEN_SWARM)
    assert any("refused a stranger" in line for line in caplog.messages)
    async with DhtRegistry.open(DhtConfig(host="127.0.0.1")) as boot:
        with pytest.raises(RegistryError, match="of an open swarm, and this machine has a private one's network key"):
            await _joined(tuple(boot.join_addresses()), private)


async def _joined(join: tuple[str, ...], membership: Membership) -> None:
    async with DhtRegistry.open(DhtConfig(join=join, client_mode=True, membership=membership)):
        pass


async def test_a_swarm_whose_peers_are_gone_says_what_to_do() -> None:
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"
    with pytest.raises(RegistryError, match="ask for an invite"):
        await _joined((nobody,), Membership(nobody="ask for an invite"))
