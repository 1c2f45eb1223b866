"""The address of a machine that is reached through a relay: `PEER.via.HOST:PORT`. Pure.

It means: say `CONNECT PEER` to the relay at HOST:PORT. The connection beyond is encrypted between its two ends and
names the peer, so a relay carries bytes and vouches for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.ids import PeerId

_VIA = ".via."


@dataclass(frozen=True, slots=True)
class RelayedAddress:
    """An address of the form `PEER.via.HOST:PORT`.

    Attributes:
        peer: who is reached; not checked to be a peer id.
        relay: `host:port` of the relay; not checked.
    """

    peer: PeerId
    relay: str

    def __str__(self) -> str:
        return f"{self.peer}{_VIA}{self.relay}"


def parse_relayed(address: str) -> RelayedAddress | None:
    """Take an address apart; None for one that leads to the machine itself."""
    peer, via, relay = address.partition(_VIA)
    return RelayedAddress(PeerId(peer), relay) if via else None


def first_stop(address: str) -> str:
    """`host:port` to which a TCP connection is opened: the relay's, or the machine's own."""
    relayed = parse_relayed(address)
    return address if relayed is None else relayed.relay
