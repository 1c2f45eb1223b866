"""Finds listed nodes for those who come by a TLS port: only who answers there under its own name is led to.

So a port that leads on is no open proxy: it dials addresses that a node's signed record holds, once that node has
signed a nonce there, with the certificate of its record.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final

from swarm.discovery.address_proof import NONCE_BYTES, check_hello
from swarm.discovery.dht.dialback import HelloCall, call_hello
from swarm.discovery.dialable import DialPolicy
from swarm.discovery.node_record import NodeRecord
from swarm.ids import PeerId
from swarm.transport.endpoint import Endpoint

KNOWN_S: Final = 120.0
"""How long an address counts as proven."""
UNKNOWN_S: Final = 10.0
"""How long a node that was not found is not looked for again."""
MAX_KNOWN: Final = 1_024
PROOF_S: Final = 8.0

RecordOf = Callable[[PeerId], Awaitable[NodeRecord | None]]

logger = logging.getLogger(__name__)


class NodeFinder:
    """Finds them, and remembers for a while."""

    def __init__(
        self,
        record_of: RecordOf,
        policy: DialPolicy,
        call: HelloCall = call_hello,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know nobody.

        Args:
            record_of: reads the directory.
            policy: which addresses may be dialled on a stranger's word.
            call: sends a Hello.
            clock: a monotonic one, in seconds.
        """
        self._record_of = record_of
        self._policy = policy
        self._call = call
        self._clock = clock
        self._known: dict[PeerId, tuple[float, str]] = {}

    async def find(self, peer: PeerId) -> str:
        """Where a listed node is dialled, `host:port` or behind a relay, with an IP address; empty: nowhere."""
        now = self._clock()
        until, address = self._known.get(peer, (now, ""))
        if until > now:
            return address
        try:
            async with asyncio.timeout(PROOF_S):
                address = await self._proven(peer)
        except Exception as error:
            logger.debug("no way to %s", peer, exc_info=error)
            address = ""
        while len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[peer] = self._clock() + (KNOWN_S if address else UNKNOWN_S), address
        return address

    async def _proven(self, peer: PeerId) -> str:
        record = await self._record_of(peer)
        dialled = None if record is None else await self._policy.resolve(record.address)
        if record is None or dialled is None or not record.certificate:
            return ""
        endpoint, nonce = Endpoint(peer, dialled, record.certificate), secrets.token_bytes(NONCE_BYTES)
        answer = await self._call(endpoint, nonce)
        return dialled if check_hello(peer, nonce, endpoint.digest, answer) else ""
