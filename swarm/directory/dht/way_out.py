"""By which way the directory's peers are reached: as they are, in small packets, by a TLS port, or through a proxy.

libp2p's daemon dials by itself and knows none of the last three. There it dials ports of this machine, which lead on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from swarm.base.ids import PeerId
from swarm.base.tasks import TaskScope
from swarm.directory.dht.addresses import MAX_TRIED, ListenAddresses, host_and_port
from swarm.link.egress.path_probe import PathVerdict, probe_path
from swarm.link.egress.ports import DIRECTORY, Egress, Forwarder, TlsPort, tls_port
from swarm.link.egress.proxy import HttpProxy
from swarm.link.egress.streams import Streams

OTHERS_S = 1.0
"""How long peers are waited for once one answers."""
ProbePath = Callable[[str], Awaitable[PathVerdict]]


@dataclass(slots=True)
class WayOut:
    """How peers are reached.

    Attributes:
        join: multiaddresses for libp2p.
        egress: how other connections should leave; None: as they are.
        forwarders: those that lead on, by the loopback multiaddress that libp2p dials.
        meant: the multiaddress that each of these stands for.
        answering: those of `join` that libp2p is told of at its start, since it waits for each; empty for all of them.
    """

    join: tuple[str, ...]
    egress: Egress | None = None
    forwarders: dict[str, Forwarder] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)
    answering: tuple[str, ...] = ()

    @property
    def is_confined(self) -> bool:
        """Whether libp2p reaches nobody well but those that are led on to."""
        return self.egress is not None

    @property
    def trouble(self) -> str:
        """Why a peer was not reached by a way of this kind; empty where that is not known."""
        return next((one.trouble for one in self.forwarders.values() if one.trouble), "")

    def led(self, listen: ListenAddresses) -> ListenAddresses:
        """The peers as libp2p dials them, each with where its address comes from."""
        sources = dict(zip(listen.join, listen.sources, strict=False))
        named = map(self.as_named, self.join)
        return replace(listen, join=self.join, sources=tuple(sources[one] for one in named if one in sources))

    def as_named(self, text: str) -> str:
        """A text with the multiaddresses that were named in place of those that libp2p dials."""
        for local, address in self.meant.items():
            text = text.replace(f"{local}/p2p/{address.rpartition('/')[2]}", address)
        return text

    def describe(self) -> dict[str, object] | None:
        """For the parent; `read_egress` reads it."""
        if self.egress is None:
            return None
        ports = [[port.peer, port.address] for port in self.egress.ports]
        return {"ports": ports, "is_narrow": self.egress.is_narrow}


def read_egress(said: dict[str, Any] | None, proxy: str | None) -> Egress | None:
    """How connections should leave, as the DHT process found out."""
    if said is None:
        return None
    ports = tuple(TlsPort(PeerId(peer), address) for peer, address in said["ports"])
    return Egress(ports, None if proxy is None else HttpProxy.parse(proxy), said["is_narrow"])


async def find_way_out(listen: ListenAddresses, stack: AsyncExitStack, probe: ProbePath = probe_path) -> WayOut:
    """Choose how the directory is reached: directly, in small packets, by a TLS port, or through a proxy.

    Raises:
        OSError: no port is to be had on this machine.
    """
    ports = {address: port for address in listen.join if (port := tls_port(address)) is not None}
    plain = [address for address in listen.join if address not in ports]
    if listen.proxy is not None:
        egress = Egress(tuple(ports.values()), HttpProxy.parse(listen.proxy))
        return await _lead_on([*ports, *plain], egress, stack)
    tcp = [address for address in plain if "/udp/" not in address][:MAX_TRIED]
    verdicts = await _verdicts(tcp, probe)
    silent = {one for one in tcp if verdicts.get(one, PathVerdict.SILENT) is PathVerdict.SILENT}
    if PathVerdict.PASSES not in verdicts.values():
        small = [address for address, verdict in verdicts.items() if verdict is PathVerdict.SMALL_ONLY]
        if small:
            return await _lead_on(small, Egress(tuple(ports.values()), is_narrow=True), stack)
        if ports:
            return await _lead_on(list(ports), Egress(tuple(ports.values())), stack)
        return WayOut(tuple(plain))
    return WayOut(tuple(plain), answering=tuple(one for one in plain if one not in silent))


async def _verdicts(addresses: Sequence[str], probe: ProbePath) -> dict[str, PathVerdict]:
    """What reaches each of these; once one is reached as it is, the others are waited for little longer."""
    found: dict[str, PathVerdict] = {}

    async def look(address: str) -> None:
        found[address] = await probe(host_and_port(address))

    async with TaskScope() as scope:
        looking = {scope.spawn(look(one)) for one in addresses}
        while looking and PathVerdict.PASSES not in found.values():
            _, looking = await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
        if looking:
            await asyncio.wait(looking, timeout=OTHERS_S)
    return found


async def _lead_on(addresses: list[str], egress: Egress, stack: AsyncExitStack) -> WayOut:
    way = WayOut((), egress)
    for address in addresses[:MAX_TRIED]:
        port, peer = tls_port(address), address.rpartition("/")[2]
        open_far: Callable[[], Awaitable[Streams]] = (
            partial(egress.open, host_and_port(address)) if port is None else partial(egress.open_tls, port, DIRECTORY)
        )
        forwarder = await stack.enter_async_context(Forwarder.listening(open_far))
        local = f"/ip4/127.0.0.1/tcp/{forwarder.port}"
        way.forwarders[local], way.meant[local] = forwarder, address
        way.join = (*way.join, f"{local}/p2p/{peer}")
    return way
