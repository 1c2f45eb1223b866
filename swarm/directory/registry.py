"""How machines find each other: the interface of the swarm's directory. Owns no network and no storage.

`swarm.directory.dht.registry` implements it over a DHT.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, NewType, Protocol, Self

import msgpack

from swarm.base.errors import RegistryError
from swarm.base.ids import ModelIdentity, PeerId

if TYPE_CHECKING:
    from swarm.directory.identity import Identity
    from swarm.directory.node_record import NodeRecord
    from swarm.link.egress.ports import Egress
    from swarm.link.endpoint import Endpoint


RECENT_S = 1.5
"""Age up to which the directory's cached answers are used by default."""

KNOWN_S = 30.0
"""Age up to which they are used while a chain is repaired, where every millisecond counts."""

RECORD_TTL_S = 60.0
"""How long a record lives after its announcement; the announcer renews it well before."""

BLOCK_LAYERS = 16
"""Layers per storage key: a record is filed under every block that its span touches."""

MODELS_LISTED = 1_024
"""Models that one listing returns, at most."""

ROOT = "canopy/v2"
"""What every storage key begins with; the number grows when what lies under a key changes its form."""

StorageKey = NewType("StorageKey", bytes)
"""20 bytes: where in the DHT something lies."""


@dataclass(frozen=True, slots=True)
class RelayOffer:
    """A relay that a peer lends, by that peer's own word; nobody has tried it yet.

    Attributes:
        peer: whose it is, and the name that it signs for.
        address: `host:port`, IPv6 in brackets; the host may be a name.
    """

    peer: PeerId
    address: str


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

    @property
    def egress(self) -> Egress | None:
        """How connections should leave this machine, whose network lets little out; None: as they are."""
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
        """The models that nodes say they serve, each fingerprint once, at most `MODELS_LISTED`.

        Those come first that the peers joined through have known for longest: a stranger's many inventions stand behind
        what was there before them. A name is what most of a model's pointers call it: a hint, which digests are not.
        """
        ...

    async def records(self, fingerprint: str, num_layers: int, *, within_s: float = RECENT_S) -> list[NodeRecord]:
        """Valid, unexpired records of a model, the newest per peer.

        Args:
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

    async def dial_back_relay(self, address: str) -> bool | None:
        """Ask a peer to call the relay that this machine lends.

        Args:
            address: `host:port` under which others should reach it.

        Returns:
            Whether a relay answered there and proved that it is this machine's; None if no peer could be asked.
        """
        ...

    async def relays(self) -> list[RelayOffer]:
        """The relays that known peers lend, of each peer one, which may have an address of each family.

        Those of the peers joined through come first, and of one relay the address that it prefers.

        A few peers are asked at a time, and not always the same. Empty where none of them answers in time.
        """
        ...

    async def offer_relay(self, *addresses: str) -> None:
        """Say to whoever asks that this machine lends a relay.

        Args:
            addresses: `host:port` under which others reach it, the best first; none: it lends none any more.
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
    return [f"{ROOT}/{fingerprint}/{block}" for block in range(start // BLOCK_LAYERS, (end - 1) // BLOCK_LAYERS + 1)]


def peer_key(peer: PeerId) -> str:
    """The storage key under which a node finds its own record, whatever it serves."""
    return f"{ROOT}/peers/{peer}"


def models_key(fingerprint: str) -> str:
    """The storage key under which the pointers to a model lie."""
    return f"{ROOT}/models/{fingerprint[0]}"


MODELS_KEYS = tuple(models_key(digit) for digit in "0123456789abcdef")
"""All keys that hold pointers to models: one per first digit of a fingerprint."""


def record_keys(record: NodeRecord) -> list[str]:
    """Every storage key under which a record is filed."""
    return [peer_key(record.peer), *block_keys(record.model.fingerprint, record.span.start, record.span.end)]


def storage_key(name: str) -> StorageKey:
    return StorageKey(hashlib.sha1(msgpack.packb(name), usedforsecurity=False).digest())


def item_key(key: StorageKey, subkey: str) -> StorageKey:
    """Where one item under a key can be asked for alone; it is held where `key` is."""
    return StorageKey(hashlib.sha1(key + subkey.encode(), usedforsecurity=False).digest())


MODEL_S: Final = 10.0
"""Time for the records of one model."""
ALL_S: Final = 30.0
"""Time for the records of all models; what is not read by then is left out."""
AT_ONCE: Final = 8
"""Models that are read at a time."""
MODELS_NAMED: Final = 8
"""Models that a message names, at most."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What could be read, and what could not.

    Attributes:
        records: per fingerprint.
        failed: models without an answer, and why.
    """

    records: dict[str, list[NodeRecord]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


async def read_models(registry: Registry, models: Sequence[ModelIdentity]) -> Listing:
    """Read the records of each model; one that fails or takes long hinders no other."""
    listing, slots = (
        Listing(failed={model.fingerprint: "no time was left" for model in models}),
        asyncio.Semaphore(AT_ONCE),
    )

    async def read(model: ModelIdentity) -> None:
        async with slots:
            try:
                async with asyncio.timeout(MODEL_S):
                    found = await registry.records(model.fingerprint, model.num_layers, within_s=0.0)
            except TimeoutError:
                listing.failed[model.fingerprint] = f"no answer within {MODEL_S:.0f} s"
            except RegistryError as error:
                listing.failed[model.fingerprint] = str(error)
            else:
                listing.records[model.fingerprint] = found
                del listing.failed[model.fingerprint]

    with suppress(TimeoutError):
        async with asyncio.timeout(ALL_S), asyncio.TaskGroup() as tasks:
            for model in models:
                tasks.create_task(read(model))
    return listing


def name_models(models: Sequence[ModelIdentity]) -> str:
    """The first few models, by name and the beginning of their fingerprints, and how many more there are."""
    named = ", ".join(f"{model.name} ({model.fingerprint[:12]})" for model in models[:MODELS_NAMED])
    return named if len(models) <= MODELS_NAMED else f"{named} and {len(models) - MODELS_NAMED} more"
