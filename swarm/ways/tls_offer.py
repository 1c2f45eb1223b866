"""Lending a relay in TLS too, beside the directory: what a machine offers to networks that let out one port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address

from swarm.discovery.dht.addresses import host_and_port
from swarm.discovery.dht.dialback import call_hello
from swarm.discovery.dht.registry import DhtRegistry
from swarm.discovery.dialable import DialPolicy
from swarm.discovery.node_record import bracketed
from swarm.relay.child import RelaySettings
from swarm.relay.lending import LentRelay, ReachedAt, lend
from swarm.transport.network_key import NetworkKey
from swarm.ways.node_finder import NodeFinder


@dataclass(frozen=True, slots=True)
class TlsOffer:
    """What is offered.

    Attributes:
        port: TCP port; 0 takes a free one.
        host: IP address that the directory and the relay are bound to.
        network: the private swarm's key, if it is one.
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
        """As `swarm.relay.lending.lend`; the TLS port is named among the addresses of this machine meanwhile."""
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
