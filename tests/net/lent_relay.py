"""A relay that listens on loopback until the test leaves it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.directory.address_proof import who_answer
from swarm.directory.identity import Identity
from swarm.directory.registry import RelayOffer
from swarm.reach.relay.server import RelayServer


@asynccontextmanager
async def lent_relay(port: int = 0, identity: Identity | None = None) -> AsyncIterator[RelayOffer]:
    """Lend one.

    Args:
        port: 0 takes a free one.
        identity: whose it is; a fresh one's by default.
    """
    owner = identity or Identity.ephemeral()

    async def sign(nonce: bytes) -> bytes:
        return who_answer(owner, nonce)

    server = RelayServer(owner.peer_id, sign, lent_mbit_per_s=1_000.0)
    async with server.listening("127.0.0.1", port) as bound:
        yield RelayOffer(owner.peer_id, f"127.0.0.1:{bound}")
