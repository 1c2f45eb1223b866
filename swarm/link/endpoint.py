"""Where a machine is reached, what proves that it answers, and how gRPC is led past a relay. Pure; dials nothing.

The address of a machine behind a relay is `PEER.via.HOST:PORT`: say `CONNECT PEER` to the relay at HOST:PORT. The
connection beyond is encrypted between its two ends and names the peer, so a relay carries bytes and vouches for
nothing.

gRPC dials a machine's own address, or asks a relay by itself. Whatever else opens a byte stream to a peer stands behind
a `Door`: an address on this machine that gRPC dials instead.
"""

from __future__ import annotations

import enum
import hashlib
import ipaddress
from dataclasses import dataclass
from typing import Protocol

from swarm.base.ids import PeerId

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


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A machine as its signed record announces it.

    Attributes:
        peer: its identity: whose name the certificate must bear.
        address: `host:port` of its gRPC service, or `PEER.via.HOST:PORT` where a relay carries the bytes.
        certificate: DER of the one certificate with which it may answer; empty where it speaks no TLS.
    """

    peer: PeerId
    address: str
    certificate: bytes = b""

    @property
    def digest(self) -> bytes:
        """SHA-256 of the certificate, 32 bytes; empty without one."""
        return hashlib.sha256(self.certificate).digest() if self.certificate else b""

    @property
    def relay(self) -> str | None:
        """`host:port` of the relay through which it is reached; None where it is dialled itself."""
        relayed = parse_relayed(self.address)
        return None if relayed is None else relayed.relay

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.address.rpartition(":")[0])


def is_loopback(host: str) -> bool:
    """Whether a host, as it stands before a port or alone, is this machine: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class LinkPath(enum.Enum):
    """How a connection reaches its machine."""

    DIRECT = "direct"
    LAN = "LAN"
    CALLED_BACK = "called back"
    PUNCHED = "punched"
    RELAYED = "relayed"


class Door(Protocol):
    """A local address that leads to one machine, for one channel."""

    @property
    def address(self) -> str:
        """What gRPC dials, such as `unix:/tmp/…`."""

    @property
    def path(self) -> LinkPath | None:
        """How its latest connection goes; None before there was one."""

    @property
    def can_improve(self) -> bool:
        """Whether a new connection would probably go a better way than this one's latest."""

    def release(self) -> None:
        """Its channel is gone: close it soon. May be called from any thread, and more than once."""


class Ways(Protocol):
    """Opens doors to machines that are reached through relays, or that this machine's network lets it not dial."""

    def open_door(self, endpoint: Endpoint) -> Door | None:
        """A door to a machine; None where nothing is better than to let gRPC dial it, or ask its relay."""
