"""The ways of a machine whose network lets little out: to a node itself, and through the TLS port of a peer."""

from __future__ import annotations

from functools import partial

from swarm.egress.ports import RELAY, Egress, TlsPort
from swarm.egress.streams import Streams
from swarm.errors import SwarmError
from swarm.ids import PeerId
from swarm.runtime.counted_log import describe
from swarm.transport.way import LinkPath
from swarm.ways.relay_circuit import RelayCircuit
from swarm.ways.way import REMEMBERED_S, NoWay, OpenedWay, Way


class DirectWay:
    """Dials a node at its own address, in small packets, through the proxy where there is one."""

    name = "direct"

    def __init__(self, egress: Egress) -> None:
        """Dial nobody yet.

        Args:
            egress: how connections leave.
        """
        self._egress = egress

    async def open(self, _peer: PeerId, address: str) -> OpenedWay:
        """A connection to a node at `host:port`; errors as of every way."""
        try:
            return OpenedWay(await self._egress.open(address), LinkPath.DIRECT)
        except (OSError, TimeoutError) as error:
            raise NoWay(f"{address} is not reached: {describe(error)}", REMEMBERED_S) from error


class PortWay:
    """Asks peers that have a TLS port to lead on."""

    name = "TLS port"

    def __init__(self, egress: Egress) -> None:
        """Ask nobody yet.

        Args:
            egress: knows the ports.
        """
        self._egress = egress

    async def open(self, peer: PeerId, address: str) -> OpenedWay:
        """A circuit to a node, through the first port that leads there; errors as of every way."""
        why = "no peer that was joined has a TLS port"
        for port in self._egress.ports:
            try:
                return await RelayCircuit(partial(self._dial, port)).open(peer, port.address)
            except (OSError, TimeoutError, SwarmError) as error:
                why = describe(error)
        raise NoWay(f"{address} is not reached: {why}")

    async def _dial(self, port: TlsPort, _address: str) -> Streams:
        return await self._egress.open_tls(port, RELAY)


def confined_ways(best: Way, egress: Egress) -> tuple[list[Way], Way]:
    """The ways that are tried first, and the last one: through a TLS port, where one is known.

    Args:
        best: the way that leads to a machine without a TLS port.
        egress: how connections leave.
    """
    return ([best], PortWay(egress)) if egress.ports else ([], best)
