"""A registry without a network, for tests and virtual time: the records, checks and replacement rules of the DHT's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from swarm.discovery.identity import Identity
from swarm.discovery.node_record import NodeRecord, live_records, open_filed, seal, tombstone
from swarm.discovery.registry import MODELS_KEY, RECENT_S, block_keys, record_keys
from swarm.errors import RegistryError
from swarm.ids import ModelIdentity, PeerId
from swarm.transport.endpoint import Endpoint

DialBackCall = Callable[[Endpoint, bytes], Awaitable[bool]]
"""Calls a peer with a nonce; whether it answered with its signature."""


class MemoryNetwork:
    """What all memory registries of a test share.

    Attributes:
        clock: DHT time in seconds.
        dial: carries out dial-backs; None means that nobody can be asked for one.
    """

    def __init__(self, clock: Callable[[], float] = time.time, dial: DialBackCall | None = None) -> None:
        self.clock = clock
        self.dial = dial
        self._stored: dict[str, dict[PeerId, tuple[float, bytes]]] = {}

    def store(self, key: str, peer: PeerId, data: bytes, expires_at: float) -> bool:
        """Store a sealed record as a DHT peer would.

        Args:
            key: the storage key.
            peer: whose record it is.
            data: the sealed record.
            expires_at: DHT time in seconds.

        Returns:
            Whether it was stored; a record that does not expire later than the stored one is not.

        Raises:
            RecordError: the record is not valid.
        """
        now = self.clock()
        sealed = open_filed(data, peer, expires_at, now)
        entries = self._stored.setdefault(key, {})
        known = entries.get(peer)
        if key not in record_keys(sealed.record) or expires_at <= now or (known and known[0] >= expires_at):
            return False
        entries[peer] = (expires_at, data)
        return True

    def get(self, keys: list[str]) -> list[NodeRecord]:
        """The live records under these keys."""
        blobs = [data for key in keys for _, data in self._stored.get(key, {}).values()]
        return live_records(blobs, self.clock())


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

    def join_addresses(self) -> list[str]:
        """An address of the right form; nothing listens there."""
        return [f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer_id}"]

    async def announce(self, record: NodeRecord) -> None:
        """Publish this machine's record."""
        self._store(record, left=False)

    async def withdraw(self, record: NodeRecord) -> None:
        """Take back what was last announced."""
        self._store(tombstone(record), left=True)

    def _store(self, record: NodeRecord, *, left: bool) -> None:
        self._check_open()
        data = seal(record, self.identity, left=left)
        taken = [self._network.store(key, record.peer, data, record.expires_at) for key in record_keys(record)]
        if not all(taken):
            raise RegistryError(f"the record of {record.peer} was refused: it does not expire later than the last")

    async def models(self) -> list[ModelIdentity]:
        """The models that some node serves now."""
        self._check_open()
        found = {record.model.fingerprint: record.model for record in self._network.get([MODELS_KEY])}
        return sorted(found.values(), key=lambda model: (model.name, model.fingerprint))

    async def records(self, fingerprint: str, num_layers: int, *, within_s: float = RECENT_S) -> list[NodeRecord]:
        """Valid, unexpired records of a model; always fresh here."""
        self._check_open()
        return self._network.get(block_keys(fingerprint, 0, num_layers))

    async def mine(self) -> NodeRecord | None:
        """The newest valid record under this machine's own name."""
        self._check_open()
        return next((record for record in self._network.get([MODELS_KEY]) if record.peer == self.peer_id), None)

    async def dial_back(self, endpoint: Endpoint, nonce: bytes) -> bool | None:
        """What the network's `dial` returns; None without one."""
        self._check_open()
        return None if self._network.dial is None else await self._network.dial(endpoint, nonce)

    async def aclose(self) -> None:
        """Leave; later calls fail."""
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
