"""hivemind's Kademlia messages, as a peer among strangers answers and reads them.

What another peer may make this one hold, compute or send is bounded here:

- an item is stored only for the peer that signed it and is connected (`swarm.directory.record_store`);
- nothing is handed on to newcomers: nodes renew what they say three times in its life;
- a Kademlia id is the hash of the peer id, so that a peer has one place, and cannot choose it;
- who is of another swarm is neither heard nor believed (`swarm.directory.dht.admission`);
- requests cost the address that they come from (`swarm.base.quota`);
- an answer is read into plain values; what is odd in it spoils that peer's answer alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from swarm.base.ids import PeerId
from swarm.base.logs import CountedLog
from swarm.base.quota import UNKNOWN, Quota, QuotaLimits, RateLimit, address_key, link_of, site_key
from swarm.directory.dht.addresses import REFUSED
from swarm.directory.dht.admission import DirectoryAdmission, StrangerRefused, open_place
from swarm.directory.dht.hivemind_node import DHTID, DHTProtocol, P2PContext, PeerID, dht_pb2, node_module
from swarm.directory.record_store import FiledItem, RecordStore, open_item
from swarm.directory.registry import StorageKey
from swarm.directory.sealing import RecordError

MAX_ASKED = 40
"""Keys of one question, and items of one request to store: the deepest model's blocks, the node's key, a pointer."""
ANSWER_BYTES = 2 << 20
"""Data of one answer; p2pd takes 4 MiB. Keys that do not fit any more are answered as if nothing lay there."""
MAX_ROWS = 2_048
"""Items of one key of an answer that are looked at."""
ORIGINS_S, _NEW_ORIGINS_S = 10.0, 0.1
"""The addresses of connected peers are read again after so long; for a peer that is new, sooner."""
_FIND, _STORE = "questions", "items to store"
_LIMITS = QuotaLimits(
    rates={
        _FIND: RateLimit(per_key=400.0, burst=4_000.0, total=4_000.0, total_burst=16_000.0),
        _STORE: RateLimit(per_key=100.0, burst=1_000.0, total=1_000.0, total_burst=4_000.0),
    }
)

ReportedItem = tuple[str, bytes, float]
"""What an answer holds of an item: subkey, sealed bytes, expiry."""


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    """What one peer answered about one key; nothing of it is checked but its form."""

    rows: tuple[ReportedItem, ...] = ()
    size: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a peer is connected from.

    Attributes:
        address: whom its requests cost (`address_key`).
        site: with whom it shares places (`site_key`).
        link: what it is told of itself (`link_of`).
    """

    address: str
    site: str
    link: str


_NOWHERE = Origin(UNKNOWN, UNKNOWN, UNKNOWN)


def _origin(addresses: Sequence[object]) -> Origin:
    """Where a connection comes from, given libp2p's multiaddresses, such as `/ip4/192.0.2.7/tcp/4001`."""
    parts = str(addresses[0]).split("/") if addresses else []
    if len(parts) < 3:
        return _NOWHERE
    return Origin(address_key(parts[2]), site_key(parts[2]), link_of(parts[2]))


def kademlia_id(peer: PeerID, admission: DirectoryAdmission | None = None) -> DHTID:
    """The one Kademlia id of a peer; in a private swarm only members can tell it."""
    return open_place(peer) if admission is None else admission.place(peer)


class DirectoryProtocol(DHTProtocol):  # type: ignore[misc]  # hivemind is untyped
    """One peer's side of the directory.

    Attributes:
        authorizer: who is heard; None in an open swarm that has no id.
    """

    authorizer: DirectoryAdmission | None

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  (hivemind's own)
        super().__init__(**options)
        self._log = CountedLog(logging.getLogger(__name__))
        self.records = RecordStore()
        self._quota = Quota(_LIMITS, time.monotonic)
        self._origins: dict[str, Origin] = {}
        self._origins_at = float("-inf")

    def keep(self, items: Iterable[FiledItem]) -> bool:
        """Hold what this machine itself files; whether all of it is held now."""
        now = time.time()
        held = [self.records.put(replace(item, origin="this machine"), now) for item in items]
        return all(held)

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Say hello; with `validate`, only after having reached the asker."""
        self._hear(request, context)
        origin = await self._meet(dht_pb2.NodeInfo(), context)
        if not self._quota.spend(_FIND, origin.address):
            request = dht_pb2.PingRequest()
        return await super().rpc_ping(request, context)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Hold items for the peer that signed them."""
        self._hear(request, context)
        origin = await self._meet(request.peer, context)
        rows = list(zip(request.keys, request.subkeys, request.values, request.expiration_time, strict=True))
        if len(rows) > MAX_ASKED or not self._quota.spend(_STORE, origin.address, len(rows)):
            rows_held = [False] * len(rows)
        else:
            signer = PeerId(context.remote_id.to_base58())
            rows_held = [self._take(row, signer, origin) for row in rows]
        return dht_pb2.StoreResponse(store_ok=rows_held, peer=self.node_info)

    def _take(self, row: tuple[bytes, bytes, bytes, float], signer: PeerId, origin: Origin) -> bool:
        key, tag, data, expires_at = row
        now = time.time()
        try:
            subkey = _subkey(tag)
            if not subkey.endswith(signer):
                return False  # before any signature is checked
            item = open_item(StorageKey(key), subkey, data, expires_at, now)
        except RecordError:
            return False
        placed = replace(item, origin=origin.site, address=origin.address)
        return item.signer == signer and self.is_ours(item) and self.records.put(placed, now)

    def is_ours(self, item: FiledItem) -> bool:
        """Whether an item is of this swarm."""
        return self.authorizer is None or self.authorizer.is_ours(item.swarm)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Say what lies under some keys, and which peers are nearer to them."""
        self._hear(request, context)
        origin = await self._meet(request.peer, context)
        response = dht_pb2.FindResponse(results=[], peer=self.node_info)
        keys = request.keys[:MAX_ASKED]
        if not self._quota.spend(_FIND, origin.address, len(keys)):
            return response  # not aligned with the keys: the asker takes it for no answer
        left, now = ANSWER_BYTES, time.time()
        asker = kademlia_id(context.remote_id, self.authorizer)
        for key in keys:
            result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
            items = self.records.get(StorageKey(key), now)
            size = sum(len(item.data) for item in items)
            if items and size <= left:
                left -= size
                result.type = dht_pb2.FOUND_DICTIONARY
                result.value = msgpack.packb([[item.subkey, item.data, item.expires_at] for item in items])
                result.expiration_time = max(item.expires_at for item in items)
            nearest = self.routing_table.get_nearest_neighbors(DHTID.from_bytes(key), k=self.bucket_size, exclude=asker)
            for node, peer in nearest:
                result.nearest_node_ids.append(node.to_bytes())
                result.nearest_peer_ids.append(peer.to_bytes())
            response.results.append(result)
        return response

    async def call_find(
        self, peer: PeerID, keys: Iterable[DHTID]
    ) -> dict[DHTID, tuple[KeyAnswer, dict[DHTID, PeerID]]] | None:
        """Ask a peer what lies under some keys, and whom it knows nearer to them; None if it gives no sound answer."""
        asked = list(keys)
        request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in asked], peer=self.node_info)
        try:
            async with self.rpc_semaphore:
                response = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            self._believe(response, peer)
            results = {
                key: (_key_answer(result), self._nearer(result))
                for key, result in zip(asked, response.results, strict=True)
            }
        except Exception:  # noqa: BLE001  (hivemind and strangers raise anything: that peer gave no answer)
            await self.update_routing_table(self.routing_table.get(peer_id=peer), peer, responded=False)
            return None
        await self.update_routing_table(self._said(response.peer, peer), peer, responded=True)
        return results

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """Say hello to a peer; its id, if it gives its own."""
        found: DHTID | None = await super().call_ping(peer, validate, strict)
        return found if found == kademlia_id(peer, self.authorizer) else None

    def _hear(self, request: Any, context: P2PContext) -> None:  # noqa: ANN401  (one of three messages)
        """Let a question of this swarm in.

        Raises:
            StrangerRefused: it is another's. hivemind tells it so.
        """
        if self.authorizer is None:
            return
        try:
            self.authorizer.hear(context.remote_id, request.auth)
        except StrangerRefused as why:
            self.say_refused(context.remote_id, why)
            raise

    def say_refused(self, peer: PeerID, why: StrangerRefused) -> None:
        """One line a minute of strangers that are not heard."""
        self._log.say("stranger", f"{REFUSED}: {peer.to_base58()} {why.who}")

    def _believe(self, response: dht_pb2.FindResponse, peer: PeerID) -> None:
        """Take an answer of this swarm; hivemind has asked the admission whether it may be one.

        Raises:
            StrangerRefused: it does not give the place that a peer of this swarm has.
        """
        if self.authorizer is None:
            return
        if self._said(response.peer, peer) is None:
            raise StrangerRefused("not a peer of this swarm")
        self.authorizer.note(peer, response.auth)

    def _nearer(self, result: dht_pb2.FindResult) -> dict[DHTID, PeerID]:
        """Those of a peer's neighbours whose ids are their own; this peer is none of them."""
        nearest: dict[DHTID, PeerID] = {}
        for raw in result.nearest_peer_ids[: self.bucket_size]:
            peer = PeerID(raw[:64])
            if peer != self.p2p.peer_id:
                nearest[kademlia_id(peer, self.authorizer)] = peer
        return nearest

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Note who answered and who did not. hivemind's storage stays empty, so nothing is handed to a newcomer."""
        if node_id is not None and node_id != kademlia_id(peer_id, self.authorizer):
            return  # an id that it chose
        if node_id is None and responded:
            return  # a client
        await super().update_routing_table(node_id, peer_id, responded=responded)
        if node_id is not None and responded:
            bucket = self.routing_table.buckets[self.routing_table.get_bucket_index(node_id)]
            while len(bucket.replacement_nodes) > bucket.size:
                del self.routing_table[next(iter(bucket.replacement_nodes))]

    async def _meet(self, said: dht_pb2.NodeInfo, context: P2PContext) -> Origin:
        """Note who asks, if it can be asked itself, and where it is."""
        await self.update_routing_table(self._said(said, context.remote_id), context.remote_id)
        return await self.origin(context.remote_id)

    async def origin(self, peer_id: PeerID) -> Origin:
        """Where a peer is connected from."""
        peer, now = peer_id.to_base58(), time.monotonic()
        age_s = now - self._origins_at
        if age_s >= ORIGINS_S or (peer not in self._origins and age_s >= _NEW_ORIGINS_S):
            self._origins_at = now
            self._origins = {one.peer_id.to_base58(): _origin(one.addrs) for one in await self.p2p.list_peers()}
        return self._origins.get(peer, _NOWHERE)

    def _said(self, said: dht_pb2.NodeInfo, peer: PeerID) -> DHTID | None:
        """The id that a peer gives, if it is its own."""
        own = kademlia_id(peer, self.authorizer)
        return own if said.node_id == own.to_bytes() else None


def _subkey(tag: bytes) -> str:
    """Which item under a key a request speaks of."""
    try:
        subkey = msgpack.unpackb(tag)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError("subkey", "malformed") from error
    if not isinstance(subkey, str):
        raise RecordError("subkey", "must be a text")
    return subkey


def _key_answer(result: dht_pb2.FindResult) -> KeyAnswer:
    """What an answer says of one key; raises whatever an odd one makes it raise."""
    if result.type == dht_pb2.NOT_FOUND:
        return KeyAnswer()
    rows = []
    for subkey, data, expires_at in msgpack.unpackb(result.value)[:MAX_ROWS]:
        if not (isinstance(subkey, str) and isinstance(data, bytes) and isinstance(expires_at, float)):
            raise RecordError("data", "malformed")
        rows.append((subkey, data, expires_at))
    return KeyAnswer(tuple(rows), len(result.value))


node_module.DHTProtocol = DirectoryProtocol  # which `DHTNode.create` makes
