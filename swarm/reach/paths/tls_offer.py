"""Lending a relay in TLS too, beside the directory: what a machine offers to networks that let out one port.

Who comes by that port is led to listed nodes only: to an address that a node's signed record holds, once that node has
signed a nonce there with the certificate of its record. So a port that leads on is no open proxy.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address
from typing import Final

from swarm.base.ids import PeerId
from swarm.directory.address_proof import NONCE_BYTES, check_hello
from swarm.directory.dht.addresses import host_and_port
from swarm.directory.dht.dialback import HelloCall, call_hello
from swarm.directory.dht.registry import DhtRegistry
from swarm.directory.dialable import DialPolicy
from swarm.directory.node_record import NodeRecord
from swarm.link.egress.streams import bracketed
from swarm.link.endpoint import Endpoint
from swarm.link.network_key import NetworkKey
from swarm.reach.relay.child import RelaySettings
from swarm.reach.relay.lending import LentRelay, ReachedAt, lend

logger = logging.getLogger(__name__)


KNOWN_S: Final = 120.0
"""How long an address counts as proven."""
UNKNOWN_S: Final = 10.0
"""How long a node that was not found is not looked for again."""
MAX_KNOWN: Final = 1_024
PROOF_S: Final = 8.0

RecordOf = Callable[[PeerId], Awaitable[NodeRecord | None]]


class NodeFinder:
    """Finds them, and remembers for a while."""

    def __init__(
        self,
        record_of: RecordOf,
        policy: DialPolicy,
        call: HelloCall = call_hello,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
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


@dataclass(frozen=True, slots=True)
class TlsOffer:
    """What is offered.

    Attributes:
        port: TCP port; 0 takes a free one.
        host: IP address that the directory and the relay are bound to.
        allow_private: whether nodes at private addresses are led to also from a public one.
    """

    port: int
    host: str
    network: NetworkKey | None = field(default=None, repr=False)
    allow_private: bool = False

    @asynccontextmanager
    async def lend(
        self,
        registry: DhtRegistry,
        settings: RelaySettings,
        reached_at: ReachedAt,
        mbit_per_s: Callable[[], float] | None = None,
    ) -> AsyncIterator[LentRelay]:
        """As `swarm.reach.relay.lending.lend`; the TLS port is named among the addresses of this machine meanwhile."""
        own = registry.join_addresses()
        policy = await DialPolicy.of(*map(host_and_port, own), allow_private=self.allow_private)
        finder = NodeFinder(registry.record_of, policy, partial(call_hello, network=self.network))
        directory = local_service(self.host, own[0]) if own else ""
        offered = replace(settings, tls_port=self.port, directory=directory)
        async with lend(registry, offered, reached_at, mbit_per_s, finder.find) as lent:
            await registry.offer_tls_port(lent.tls_port)
            try:
                yield lent
            finally:
                await registry.offer_tls_port(None)


def local_service(host: str, address: str) -> str:
    """`host:port` under which this machine reaches a service of its own.

    Args:
        host: IP address that it is bound to; a wildcard stands for this machine.
        address: a multiaddress of it, whose port counts.
    """
    port = address.split("/")[4]
    ip = ip_address("127.0.0.1" if host == "localhost" else host)
    return f"127.0.0.1:{port}" if ip.is_unspecified else f"{bracketed(str(ip))}:{port}"
