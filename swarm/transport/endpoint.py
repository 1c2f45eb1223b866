"""Where a machine is reached, and what proves that it is the one who answers. Pure; dials nothing."""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass

from swarm.ids import PeerId
from swarm.transport.relayed import parse_relayed


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
        """Whether its address is on this machine."""
        return is_loopback(self.address.rpartition(":")[0])


def is_loopback(host: str) -> bool:
    """Whether a host, as it stands before a port or alone, is this machine: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
