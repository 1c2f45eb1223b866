"""How machines find each other: the interface of the swarm's directory. Owns no network and no storage.

`swarm.discovery.dht.registry` implements it over a DHT, `swarm.discovery.memory_registry` in memory, for tests.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from swarm.ids import ModelIdentity, PeerId

if TYPE_CHECKING:
    from swarm.discovery.identity import Identity
    from swarm.discovery.node_record import NodeRecord
    from swarm.transport.endpoint import Endpoint

RECENT_S = 1.5
"""Age up to which the directory's cached answers are used by default."""

KNOWN_S = 30.0
"""Age up to which they are used while a chain is repaired, where every millisecond counts."""

RECORD_TTL_S = 60.0
"""How long a record lives after its announcement; the announcer renews it well before."""

BLOCK_LAYERS = 16
"""Layers per storage key: a record is filed under every block that its span touches."""

MODELS_KEY = "canopy/v1/models"
"""The storage key under which every node's record is filed, whatever its model."""


class Registry(Protocol):
    """The swarm's directory as one machine sees it; use as `async with`."""

    @property
    def identity(self) -> Identity:
        """Who this machine is."""
        ...

    @property
    def peer_id(self) -> PeerId:
        """This machine's name in the swarm."""
        ...

    def join_addresses(self) -> list[str]:
        """Multiaddresses that others can give to `--join`, best first; empty for a client."""
        ...

    async def announce(self, record: NodeRecord) -> None:
        """Publish this machine's record; the next one must expire later.

        Raises:
            RegistryError: the directory did not store it.
        """
        ...

    async def withdraw(self, record: NodeRecord) -> None:
        """Take back what was last announced: this machine is no longer listed."""
        ...

    async def models(self) -> list[ModelIdentity]:
        """The models that some node serves now."""
        ...

    async def records(self, fingerprint: str, num_layers: int, *, within_s: float = RECENT_S) -> list[NodeRecord]:
        """Valid, unexpired records of a model, the newest per peer.

        Args:
            fingerprint: the model's.
            num_layers: the model's.
            within_s: how old a cached answer may be, in seconds.
        """
        ...

    async def mine(self) -> NodeRecord | None:
        """The newest valid record under this machine's own name, whoever wrote it; always fresh."""
        ...

    async def dial_back(self, endpoint: Endpoint, nonce: bytes) -> bool | None:
        """Ask a peer to call this machine.

        Args:
            endpoint: where to call, and the certificate with which this machine answers.
            nonce: 16 bytes that the answer must sign.

        Returns:
            Whether this machine answered there; None if no peer could be asked.
        """
        ...

    async def wait_closed(self) -> None:
        """Return when this machine's membership has ended, for whatever reason."""
        ...

    async def aclose(self) -> None:
        """Leave the swarm."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def block_keys(fingerprint: str, start: int, end: int) -> list[str]:
    """The storage keys for layers `[start, end)` of a model."""
    return [f"canopy/v1/{fingerprint}/{block}" for block in range(start // BLOCK_LAYERS, (end - 1) // BLOCK_LAYERS + 1)]


def record_keys(record: NodeRecord) -> list[str]:
    """Every storage key under which a record is filed."""
    return [MODELS_KEY, *block_keys(record.model.fingerprint, record.span.start, record.span.end)]
