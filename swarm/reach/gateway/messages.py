"""Messages by which a router is asked to map a port: PCP (RFC 6887) and NAT-PMP (RFC 6886). Pure: bytes and values.

Both are one datagram there and one back, on UDP port 5351 of the router.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from swarm.base.errors import RemoteProtocolError

PORT: Final = 5351
PCP_NONCE_BYTES: Final = 12
MAX_DATAGRAM: Final = 1_100
"""Of PCP (RFC 6887 §7); NAT-PMP's are shorter."""
_PCP_VERSION: Final = 2
_ANNOUNCE, _MAP, _ANSWER = 0, 1, 0x80
_TCP: Final = 6
_PMP_ADDRESS, _PMP_MAP_TCP = 0, 2
_HEADER = struct.Struct("!BBBBI")
"""Of PCP's answers: version, opcode, reserved, result, lifetime; behind it epoch and 12 bytes of nothing."""
_ANSWER_BYTES, _MAP_BYTES = 24, 36
_RESULTS: Final = {
    1: "does not speak this version",
    2: "does not allow it",
    3: "found the request malformed",
    4: "does not map ports",
    7: "has no address of its own from its provider",
    8: "has no room for it",
    11: "cannot give the port asked for",
    12: "wants a request from the address that it sees",
    13: "sees this machine behind another router",
}
"""What a router says by a result that is not 0 (RFC 6887 §7.4)."""


@dataclass(frozen=True, slots=True)
class MapAnswer:
    """A router's answer to a request for a mapping.

    Attributes:
        port: the external one.
        lifetime_s: for how long it holds.
        epoch_s: for how long the router has known its mappings.
        address: the external address; None where the protocol does not say it.
        internal_port: whose mapping it is.
    """

    port: int
    lifetime_s: int
    epoch_s: int
    address: IPv4Address | IPv6Address | None
    internal_port: int


@dataclass(frozen=True, slots=True)
class EpochAnswer:
    """A router's word of itself.

    Attributes:
        epoch_s: for how long it has known its mappings.
        address: its external address, where the protocol says it.
    """

    epoch_s: int
    address: IPv4Address | None = None


@dataclass(frozen=True, slots=True)
class MapRequest:
    """What is asked for.

    Attributes:
        internal_port: TCP port of this machine.
        external_port: wanted outside; 0: any.
        lifetime_s: 0 deletes the mapping.
        client: this machine's address towards the router.
        nonce: 12 bytes, the same for a mapping's whole life; NAT-PMP has none.
    """

    internal_port: int
    external_port: int
    lifetime_s: int
    client: IPv4Address | IPv6Address
    nonce: bytes


def pcp_map(request: MapRequest) -> bytes:
    """A PCP request for a mapping."""
    wildcard = IPv4Address(0) if isinstance(request.client, IPv4Address) else IPv6Address(0)
    ports = request.internal_port, request.external_port
    body = struct.pack("!12sB3xHH16s", request.nonce, _TCP, *ports, _wide(wildcard))
    return _pcp_header(_MAP, request.lifetime_s, request.client) + body


def pcp_announce(client: IPv4Address | IPv6Address) -> bytes:
    """A PCP question for the router's epoch."""
    return _pcp_header(_ANNOUNCE, 0, client)


def read_pcp_map(data: bytes, nonce: bytes) -> MapAnswer:
    """Read the answer to a PCP request for a mapping.

    Raises:
        RemoteProtocolError: it is none, or another one's (`field` is `answer`), or the router refuses (`result`).
    """
    epoch_s, lifetime_s = _pcp_answer(data, _MAP)
    if len(data) < _ANSWER_BYTES + _MAP_BYTES:
        raise RemoteProtocolError("answer", "is too short")
    theirs, protocol, internal, external, address = struct.unpack_from("!12sB3xHH16s", data, _ANSWER_BYTES)
    if theirs != nonce or protocol != _TCP:
        raise RemoteProtocolError("answer", "is about another mapping")
    wide = IPv6Address(address)
    return MapAnswer(external, lifetime_s, epoch_s, wide.ipv4_mapped or wide, internal)


def read_pcp_announce(data: bytes) -> EpochAnswer:
    """Read the answer to a PCP question for the epoch; raises as `read_pcp_map`."""
    return EpochAnswer(_pcp_answer(data, _ANNOUNCE)[0])


def pmp_map(request: MapRequest) -> bytes:
    """A NAT-PMP request for a mapping."""
    return struct.pack("!BBHHHI", 0, _PMP_MAP_TCP, 0, request.internal_port, request.external_port, request.lifetime_s)


def pmp_address() -> bytes:
    """A NAT-PMP question for the router's address and epoch."""
    return bytes((0, _PMP_ADDRESS))


def read_pmp_map(data: bytes) -> MapAnswer:
    """Read the answer to a NAT-PMP request for a mapping; raises as `read_pcp_map`."""
    epoch_s = _pmp_answer(data, _PMP_MAP_TCP, 16)
    internal, external, lifetime_s = struct.unpack_from("!HHI", data, 8)
    return MapAnswer(external, lifetime_s, epoch_s, None, internal)


def read_pmp_address(data: bytes) -> EpochAnswer:
    """Read the answer to a NAT-PMP question for the address; raises as `read_pcp_map`."""
    epoch_s = _pmp_answer(data, _PMP_ADDRESS, 12)
    return EpochAnswer(epoch_s, IPv4Address(data[8:12]))


def has_forgotten(before_epoch_s: float, passed_s: float, epoch_s: float) -> bool:
    """Whether a router began anew between two answers, and so lost its mappings.

    Its clock may go by up to 1/16 slower or faster than this machine's (RFC 6887 §8.5); 2 s are for the way.

    Args:
        before_epoch_s: the epoch of the earlier answer.
        passed_s: time between both, by this machine's clock.
        epoch_s: the epoch of the later one.
    """
    went_s = epoch_s - before_epoch_s
    return went_s < -1 or passed_s + 2 < went_s - went_s / 16 or went_s + 2 < passed_s - passed_s / 16


def _pcp_header(opcode: int, lifetime_s: int, client: IPv4Address | IPv6Address) -> bytes:
    return struct.pack("!BBHI16s", _PCP_VERSION, opcode, 0, lifetime_s, _wide(client))


def _wide(ip: IPv4Address | IPv6Address) -> bytes:
    """16 bytes; an IPv4 address as an IPv4-mapped one."""
    return ip_address(f"::ffff:{ip}").packed if isinstance(ip, IPv4Address) else ip.packed


def _pcp_answer(data: bytes, opcode: int) -> tuple[int, int]:
    """Epoch and lifetime of an answer of some kind."""
    if len(data) < _ANSWER_BYTES or len(data) > MAX_DATAGRAM:
        raise RemoteProtocolError("answer", "is no answer of PCP")
    version, answered, _, result, lifetime_s = _HEADER.unpack_from(data)
    if version != _PCP_VERSION or answered != _ANSWER | opcode:
        raise RemoteProtocolError("answer", "is no answer of PCP")
    _check(result)
    (epoch_s,) = struct.unpack_from("!I", data, 8)
    return epoch_s, lifetime_s


def _pmp_answer(data: bytes, opcode: int, size: int) -> int:
    """Epoch of an answer of some kind."""
    if len(data) < 8 or data[:2] != bytes((0, _ANSWER | opcode)):
        raise RemoteProtocolError("answer", "is no answer of NAT-PMP")
    result, epoch_s = struct.unpack_from("!HI", data, 2)
    _check(result)
    if len(data) < size:
        raise RemoteProtocolError("answer", "is too short")
    return int(epoch_s)


def _check(result: int) -> None:
    if result:
        raise RemoteProtocolError("result", _RESULTS.get(result, f"refuses with result {result}"))
