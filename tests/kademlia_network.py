"""Kademlia peers of one process, without libp2p: the real protocol and search over calls in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from swarm.base.ids import PeerId, SwarmId
from swarm.directory.dht.admission import DirectoryAdmission, NetworkAdmission, SwarmAdmission
from swarm.directory.dht.hivemind_node import DHTID, DHTNode, Multiaddr, P2PHandlerError, PeerID
from swarm.directory.dht.protocol import DirectoryProtocol, kademlia_id
from swarm.directory.dht.search import DirectoryPeer
from swarm.link.network_key import NetworkKey

Handler = Callable[[Any, Any], Awaitable[Any]]


@dataclass
class KademliaNetwork:
    """All peers of a test.

    Attributes:
        handlers: what answers, per peer and method.
        addresses: IP address per peer id; 192.0.2.1 where none is given.
        calls: methods called, in order.
        dead: connections, by caller and called, that carry nothing until the caller gives them up.
    """

    handlers: dict[tuple[str, str], Handler] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    dead: set[tuple[str, str]] = field(default_factory=set)

    async def peer(
        self,
        peer_id: PeerID,
        *joined: DirectoryPeer,
        client: bool = False,
        key: NetworkKey | None = None,
        swarm: SwarmId | None = None,
    ) -> DirectoryPeer:
        """A peer that has joined through others; with a key, as a member of a private swarm, else of an open one."""
        admission: DirectoryAdmission | None = None if swarm is None else SwarmAdmission(swarm)
        if key is not None:
            admission = NetworkAdmission(key, PeerId(peer_id.to_base58()))
        addresses = [f"/ip4/127.0.0.1/tcp/1/p2p/{one.node.peer_id}" for one in joined]
        node = await DHTNode.create(
            p2p=InMemoryP2P(self, peer_id),
            node_id=kademlia_id(peer_id, admission),
            authorizer=admission,
            initial_peers=addresses or None,
            ensure_bootstrap_success=False,
            client_mode=client,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            reuse_get_requests=False,
            wait_timeout=0.2,
        )
        return DirectoryPeer(node, [one.node.peer_id for one in joined])


class InMemoryP2P:
    """One peer's connection to all others."""

    def __init__(self, network: KademliaNetwork, peer_id: PeerID) -> None:
        self.peer_id = peer_id
        self._network = network

    async def add_protobuf_handler(self, name: str, handler: Handler, *_: object, **__: object) -> None:
        self._network.handlers[str(self.peer_id), name] = handler

    async def call_protobuf_handler(self, peer: PeerID, name: str, request: Any, _: type) -> Any:  # noqa: ANN401
        self._network.calls.append(name.rpartition(".")[2])
        if (str(self.peer_id), str(peer)) in self._network.dead:
            await asyncio.Event().wait()
        handler = self._network.handlers.get((str(peer), name))
        if handler is None:
            raise P2PHandlerError("nobody there")
        return await handler(request, SimpleNamespace(remote_id=self.peer_id))

    async def hang_up(self, peer: PeerID) -> None:
        """Give up a connection."""
        self._network.dead.discard((str(self.peer_id), str(peer)))

    async def list_peers(self) -> list[Any]:
        """Everybody, with an address."""
        names = {name for name, _ in self._network.handlers} | set(self._network.addresses)
        return [
            SimpleNamespace(
                peer_id=PeerID.from_base58(name),
                addrs=[Multiaddr(f"/ip4/{self._network.addresses.get(name, '192.0.2.1')}/tcp/1")],
            )
            for name in names
        ]


def random_peer(rng: random.Random) -> PeerID:
    """The id of a peer that signs nothing."""
    return PeerID(b"\x12\x20" + rng.randbytes(32))


def peer_beside(key: DHTID, nearer_than: int, rng: random.Random) -> PeerID:
    """The id of a peer that lies nearer to a key than some distance: tried until one does."""
    while True:
        peer = random_peer(rng)
        if key.xor_distance(kademlia_id(peer)) < nearer_than:
            return peer


__all__ = ["DirectoryProtocol", "KademliaNetwork", "peer_beside", "random_peer"]
