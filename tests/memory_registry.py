"""A registry without a network, in virtual time: the records, checks and replacement rules of the DHT's."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Self

from swarm.base.errors import RegistryError
from swarm.base.ids import ModelIdentity, PeerId
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import listed_models, seal_announcement
from swarm.directory.node_record import NodeRecord, live_records, tombstone
from swarm.directory.record_store import RecordStore, open_item
from swarm.directory.registry import MODELS_KEYS, RECENT_S, RelayOffer, block_keys, peer_key, storage_key
from swarm.link.endpoint import Endpoint

DialBackCall = Callable[[Endpoint, bytes], Awaitable[bool]]
"""Calls a peer with a nonce; whether it answered with its signature."""
RelayCall = Callable[[PeerId, str], Awaitable[bool]]
"""Calls a relay at an address; whether it proved that it is this peer's."""


class MemoryNetwork:
    """What all memory registries of a test share.

    Attributes:
        clock: DHT time in seconds.
        dial: carries out dial-backs; None means that nobody can be asked for one.
        dial_relay: the same for relays.
        relays: `host:port` of the relay that a peer lends.
        further_relays: its other addresses.
    """

    def __init__(self, clock: Callable[[], float] = time.time, dial: DialBackCall | None = None) -> None:
        self.clock = clock
        self.dial = dial
        self.dial_relay: RelayCall | None = None
        self.relays: dict[PeerId, str] = {}
        self.further_relays: defaultdict[PeerId, list[str]] = defaultdict(list)
        self._store = RecordStore()

    def store(self, name: str, subkey: str, data: bytes, expires_at: float) -> bool:
        """Store a sealed record or pointer as a DHT peer would.

        Args:
            name: the storage key.
            subkey: which item under that key.
            data: what was sealed.
            expires_at: DHT time in seconds.

        Returns:
            Whether it is held; one that does not expire later than the held one is not, unless it is the very same.

        Raises:
            RecordError: it may not lie there.
        """
        now = self.clock()
        item = open_item(storage_key(name), subkey, data, expires_at, now)
        return self._store.put(replace(item, origin=item.signer), now)

    def get(self, names: Iterable[str]) -> list[NodeRecord]:
        """The live records under these keys."""
        return live_records(self._sealed(names), self.clock())

    def models(self) -> list[ModelIdentity]:
        """The models that live pointers tell of."""
        return listed_models(self._sealed(MODELS_KEYS), self.clock())

    def _sealed(self, names: Iterable[str]) -> list[bytes]:
        now = self.clock()
        return [item.data for name in names for item in self._store.get(storage_key(name), now)]


class MemoryRegistry:
    """One machine's view of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, identity: Identity | None = None) -> None:
        self._network = network
        self.identity = identity or Identity.ephemeral()
        self._closed = asyncio.Event()

    @property
    def peer_id(self) -> PeerId:
        """This machine's name in the swarm."""
        return self.identity.peer_id

    @property
    def egress(self) -> None:
        """Nothing leaves this machine."""
        return

    def join_addresses(self) -> list[str]:
        """An address of the right form; nothing listens there."""
        return [f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer_id}"]

    async def announce(self, record: NodeRecord) -> None:
        """Publish this machine's record."""
        self._file(record)

    async def withdraw(self, record: NodeRecord) -> None:
        """Take back what was last announced."""
        self._file(tombstone(record))

    def _file(self, record: NodeRecord) -> None:
        self._check_open()
        filed = seal_announcement(record, self.identity)
        taken = [self._network.store(one.key, one.subkey, one.data, record.expires_at) for one in filed]
        if not all(taken):
            raise RegistryError(f"the record of {record.peer} was refused: it does not expire later than the last")

    async def models(self) -> list[ModelIdentity]:
        """The models that some node serves now."""
        self._check_open()
        return self._network.models()

    async def records(self, fingerprint: str, num_layers: int, *, within_s: float = RECENT_S) -> list[NodeRecord]:
        """Valid, unexpired records of a model; always fresh here."""
        self._check_open()
        return self._network.get(block_keys(fingerprint, 0, num_layers))

    async def mine(self) -> NodeRecord | None:
        """The newest valid record under this machine's own name."""
        self._check_open()
        return next(iter(self._network.get([peer_key(self.peer_id)])), None)

    async def dial_back(self, endpoint: Endpoint, nonce: bytes) -> bool | None:
        """What the network's `dial` returns; None without one."""
        self._check_open()
        return None if self._network.dial is None else await self._network.dial(endpoint, nonce)

    async def dial_back_relay(self, address: str) -> bool | None:
        """What the network's `dial_relay` returns; None without one."""
        self._check_open()
        call = self._network.dial_relay
        return None if call is None else await call(self.peer_id, address)

    async def relays(self) -> list[RelayOffer]:
        """The relays that the others lend."""
        self._check_open()
        further = self._network.further_relays
        every = [(peer, at) for peer, best in self._network.relays.items() for at in (best, *further.get(peer, ()))]
        return [RelayOffer(peer, at) for peer, at in every if peer != self.peer_id]

    async def offer_relay(self, *addresses: str) -> None:
        """Lend a relay there; none: no more."""
        self._check_open()
        self._network.relays.pop(self.peer_id, None)
        if addresses:
            self._network.relays[self.peer_id], *self._network.further_relays[self.peer_id] = addresses

    async def aclose(self) -> None:
        """Leave; later calls fail. What was lent is lent no more."""
        self._network.relays.pop(self.peer_id, None)
        self._closed.set()

    async def wait_closed(self) -> None:
        """Return when this view was closed."""
        await self._closed.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RegistryError("this registry is closed")
