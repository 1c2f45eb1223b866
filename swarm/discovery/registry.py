"""How machines find each other: the interface to the swarm's directory. Owns no network and no storage.

`swarm.discovery.dht.registry` is the real one, `swarm.discovery.memory_registry` the one for tests.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from swarm.ids import ModelIdentity, PeerId

if TYPE_CHECKING:
    from swarm.discovery.identity import Identity
    from swarm.discovery.node_record import NodeRecord

RECENT_S = 1.5
"""How old an answer of the directory may be where nothing else is said."""

KNOWN_S = 30.0
"""How old it may be where every millisecond counts: while a chain is repaired."""

RECORD_TTL_S = 60.0
"""How long a record lives after its announcement; the announcer renews it well before."""

BLOCK_LAYERS = 16
"""Layers per storage key: a record is filed under every block that its span touches."""

MODELS_KEY = "canopy/v1/models"


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
            RegistryError: nobody took it.
        """
        ...

    async def withdraw(self, record: NodeRecord) -> None:
        """Take back what was last announced: this machine is no longer listed."""
        ...

    async def models(self) -> list[ModelIdentity]:
        """The models that somebody serves now."""
        ...

    async def records(self, fingerprint: str, num_layers: int, *, within_s: float = RECENT_S) -> list[NodeRecord]:
        """Valid, unexpired records of a model, the newest per peer, as known at most `within_s` seconds ago."""
        ...

    async def mine(self) -> NodeRecord | None:
        """The newest valid record under this machine's own name, whoever wrote it; always fresh."""
        ...

    async def dial_back(self, address: str, nonce: bytes) -> bool | None:
        """Ask a peer to call this machine at `host:port`: does it answer with `nonce` signed? None: nobody to ask."""
        ...

    async def wait_closed(self) -> None:
        """Return when this machine's part of the directory has ended, for whatever reason."""
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
