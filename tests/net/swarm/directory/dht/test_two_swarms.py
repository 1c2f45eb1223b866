"""Two open swarms and machines that know both: nothing of one reaches the other, in whatever order they meet."""

from __future__ import annotations

import logging
import random
import re
import socket
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from swarm.base.errors import RegistryError
from swarm.base.ids import PeerId, SwarmId
from swarm.directory.dht.addresses import DhtConfig, Membership, MetSwarm, PeerSource, host_and_port
from swarm.directory.dht.admission import StrangerRefused, SwarmAdmission, seal_for, unseal_from
from swarm.directory.dht.hivemind_node import DHTID, PeerID, dht_pb2
from swarm.directory.dht.registry import DhtRegistry
from swarm.directory.dht.search import DirectoryPeer
from swarm.directory.identity import Identity, kept_swarm, swarm_file
from swarm.directory.model_pointer import seal_announcement
from swarm.directory.record_store import FiledItem, open_item
from swarm.directory.registry import models_key, peer_key, storage_key
from tests.kademlia_network import KademliaNetwork, random_peer
from tests.net.connect_proxy import ConnectProxy, proxying
from tests.sample_records import MODEL, sample_record

A, B = SwarmId(bytes(16)), SwarmId(bytes([1] * 16))
WHERE = models_key(MODEL.fingerprint)
LOCAL = DhtConfig(host="127.0.0.1")


def filed(node: Identity, swarm: SwarmId | None) -> list[FiledItem]:
    """What a node announces."""
    record, now = replace(sample_record(node.peer_id, model=MODEL), swarm=swarm), time.time()
    return [
        open_item(storage_key(one.key), one.subkey, one.data, record.expires_at, now)
        for one in seal_announcement(record, node)
    ]


def met(peer: DirectoryPeer) -> set[PeerID]:
    return set(peer.node.protocol.routing_table.uid_to_peer_id.values())


@pytest.mark.parametrize("order", [*permutations(range(3))])
async def test_a_machine_that_knows_both_is_no_bridge(order: tuple[int, ...]) -> None:
    """Of each swarm a bootstrap peer and a node; a member of A that was told of B's peers asks all of them."""
    rng, network = random.Random(1), KademliaNetwork()
    nodes = [Identity.ephemeral(), Identity.ephemeral()]
    boots = [await network.peer(random_peer(rng), swarm=swarm) for swarm in (A, B)]
    peers = [
        await network.peer(PeerID.from_base58(node.peer_id), boot, swarm=swarm)
        for node, boot, swarm in zip(nodes, boots, (A, B), strict=True)
    ]
    both = await network.peer(random_peer(rng), *boots, peers[1], swarm=A)

    async def announce(number: int) -> None:
        await peers[number].keep(filed(nodes[number], (A, B)[number]))

    async def ask() -> None:
        await both.fetch([WHERE, peer_key(nodes[1].peer_id)])
        await both.node.protocol.call_ping(boots[1].node.peer_id)

    for step in order:
        await (ask() if step == 2 else announce(step))
    (found,) = await both.fetch([WHERE])
    assert [nodes[0].peer_id in blob.decode("latin1") for blob in found] == [True]
    assert await both.fetch([peer_key(nodes[1].peer_id)]) == [[]]
    for number, other in ((0, 1), (1, 0)):
        of_other = {boots[other].node.peer_id, peers[other].node.peer_id}
        assert not of_other & met(boots[number])
        assert not of_other & met(peers[number])
    assert not {boots[1].node.peer_id, peers[1].node.peer_id} & met(both)
    assert both.node.peer_id not in met(boots[1]) | met(peers[1])


async def test_no_record_of_another_swarm_is_held_or_believed(caplog: pytest.LogCaptureFixture) -> None:
    rng, network = random.Random(2), KademliaNetwork()
    boot = await network.peer(random_peer(rng), swarm=A)
    for own in (None, A, B):  # release 0.2 says no id in its messages, and signs none
        node = Identity.ephemeral()
        items = filed(node, own)
        peer = await network.peer(PeerID.from_base58(node.peer_id), boot, swarm=None if own is None else A)
        taken = await peer.node.protocol.call_store(
            boot.node.peer_id,
            [DHTID.from_bytes(item.key) for item in items],
            [item.data for item in items],
            [item.expires_at for item in items],
            [item.subkey for item in items],
        )
        assert all(taken or [False]) is (own != B)
    stranger = await network.peer(random_peer(rng), boot, swarm=B)
    assert await stranger.node.protocol.call_ping(boot.node.peer_id) is None
    assert f"{stranger.node.peer_id} is of swarm 01010101, and this is swarm 00000000" in caplog.text


async def test_a_peer_of_release_0_2_is_heard_and_brings_nobody_of_another_swarm() -> None:
    rng, network = random.Random(3), KademliaNetwork()
    one, two = [await network.peer(random_peer(rng), swarm=swarm) for swarm in (A, B)]
    old = await network.peer(random_peer(rng), one, two)
    assert met(old) == {one.node.peer_id, two.node.peer_id}
    node = Identity.ephemeral()
    peer = await network.peer(PeerID.from_base58(node.peer_id), old, swarm=A)
    await peer.keep(filed(node, A))
    assert one.node.peer_id in met(peer)
    assert two.node.peer_id not in met(peer)
    assert await two.fetch([WHERE]) == [[]]


def test_handlers_of_our_own_hear_one_swarm() -> None:
    rng = random.Random(4)
    one, two = random_peer(rng), random_peer(rng)
    ours, theirs = SwarmAdmission(A), SwarmAdmission(B)
    request = dht_pb2.PingRequest()
    request.auth.nonce = A
    assert seal_for(ours, two, b"all") == b"all"  # a release that does not read it
    ours.note(two, request.auth)
    sealed = seal_for(ours, two, b"all")
    assert unseal_from(SwarmAdmission(A), one, sealed) == unseal_from(SwarmAdmission(A), one, b"all") == b"all"
    with pytest.raises(StrangerRefused, match="this is swarm 01010101, not swarm 00000000"):
        unseal_from(theirs, one, sealed)


async def joined(join: tuple[str, ...], **membership: object) -> SwarmId | None:
    config = replace(LOCAL, join=join, client_mode=True, membership=Membership(**membership))  # type: ignore[arg-type]
    async with DhtRegistry.open(config) as registry:
        return registry.swarm_id


async def test_real_peers_say_which_swarm_they_are_of_and_keep_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    own = replace(LOCAL, identity_path=tmp_path / "own.key")
    async with DhtRegistry.open(own) as first:
        swarm = first.swarm_id
    assert swarm is not None
    assert kept_swarm(tmp_path / "own.key") == swarm
    swarm_file(tmp_path / "own.key").unlink()  # as where a key is mounted and nothing can be written
    async with DhtRegistry.open(own) as one, DhtRegistry.open(LOCAL) as two:
        assert one.swarm_id == swarm  # also after a restart
        assert two.swarm_id not in (None, swarm)
        (here,), (there,) = one.join_addresses(), two.join_addresses()
        assert await joined((here,)) == swarm
        with pytest.raises(RegistryError, match=f"is of swarm {two.swarm_id.hex()[:8]}, and swarm {swarm.hex()[:8]} "):
            await joined((here, there))
        with pytest.raises(RegistryError, match="two swarms are never made one"):
            await joined((there,), swarm=swarm, is_certain=True)
        assert "means swarm" in caplog.text  # the peer that was to be joined says so too
        old: list[MetSwarm] = []
        sources = {one: PeerSource(2, "remembered") for one in (here, there)}
        assert await joined((here, there), sources=sources, note_peers=old.append) == swarm
        assert (old[0].peers, old[0].others) == ((here,), ((two.swarm_id, there),))
        for registry in (one, two):
            await registry.announce(sample_record(registry.peer_id, model=MODEL))
        assert await one.record_of(PeerId(two.peer_id)) is None
    async with DhtRegistry.open(replace(own, membership=Membership(is_new=True))) as new:
        assert new.swarm_id not in (None, swarm)


async def test_an_address_counts_as_proven_once_another_peer_reached_it() -> None:
    """An address at which nobody answers stood in join lines and invites."""
    dead = "/ip4/192.0.2.1/tcp/9"
    async with DhtRegistry.open(LOCAL) as one:
        (here,) = one.join_addresses()
        async with DhtRegistry.open(replace(LOCAL, join=(here,))) as two:
            (own,) = two.join_addresses()
            assert await two._call("dial_back_peer", {"address": own}) is True
            assert await two._call("dial_back_peer", {"address": here}) is False, "another's"
            assert await two._call("dial_back_peer", {"address": f"{dead}/p2p/{two.peer_id}"}) is False
            two._addresses.append(f"{dead}/p2p/{two.peer_id}")
            assert len(two.join_addresses()) == 2
            two._reached = {own: True, two._addresses[1]: False}
            assert two.join_addresses() == [own]
            assert two.is_proven(own)


async def test_peers_behind_a_proxy_are_told_apart_and_named_as_they_were_typed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    async with DhtRegistry.open(LOCAL) as one, DhtRegistry.open(LOCAL) as two:
        (here,), (there,) = one.join_addresses(), two.join_addresses()
        ports = tuple(int(host_and_port(address).rpartition(":")[2]) for address in (here, there))
        async with proxying(listener, ConnectProxy(ports)) as passed:
            proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(RegistryError, match=re.escape(f"the peer at {there} (from --join) is of ")):
                await joined((here, there), proxy=proxy)
            seen: list[MetSwarm] = []
            sources = {there: PeerSource(2, "remembered")}
            assert await joined((here, there), sources=sources, note_peers=seen.append, proxy=proxy) == one.swarm_id
        assert (seen[0].peers, seen[0].others) == ((here,), ((two.swarm_id, there),))
        assert passed.connected == {host_and_port(here), host_and_port(there)}
