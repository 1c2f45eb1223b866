"""Messages to routers: what is written is read, and whatever bytes come are an answer or a clear refusal."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import RemoteProtocolError
from swarm.reach.gateway import messages
from swarm.reach.gateway.messages import MapRequest

PORTS, SECONDS = st.integers(0, 65_535), st.integers(0, 2**32 - 1)
V4 = st.integers(1, 2**32 - 1).map(IPv4Address)
ADDRESSES = V4 | st.integers(2**64, 2**128 - 1).map(IPv6Address)
NONCES = st.binary(min_size=12, max_size=12)


def wide(ip: IPv4Address | IPv6Address) -> bytes:
    return ip.packed if isinstance(ip, IPv6Address) else bytes(10) + b"\xff\xff" + ip.packed


@given(PORTS, PORTS, SECONDS, ADDRESSES, NONCES)
def test_a_pcp_request_is_as_rfc_6887_draws_it(
    internal: int, external: int, lifetime_s: int, client: IPv4Address | IPv6Address, nonce: bytes
) -> None:
    data = messages.pcp_map(MapRequest(internal, external, lifetime_s, client, nonce))
    assert len(data) == 60
    assert data[:4] == bytes((2, 1, 0, 0))
    assert struct.unpack("!I", data[4:8]) == (lifetime_s,)
    assert data[8:24] == wide(client)
    assert data[24:36] == nonce
    assert data[36:40] == bytes((6, 0, 0, 0)), "TCP"
    assert struct.unpack("!HH", data[40:44]) == (internal, external)
    assert data[44:60] == (wide(IPv4Address(0)) if isinstance(client, IPv4Address) else bytes(16))


@given(st.tuples(PORTS, PORTS), SECONDS, SECONDS, ADDRESSES, NONCES)
def test_a_pcp_answer_is_read(
    ports: tuple[int, int], lifetime_s: int, epoch_s: int, address: IPv4Address | IPv6Address, nonce: bytes
) -> None:
    internal, external = ports
    data = struct.pack("!BBBBII12x", 2, 0x81, 0, 0, lifetime_s, epoch_s) + nonce
    data += struct.pack("!B3xHH", 6, internal, external) + wide(address)
    answer = messages.read_pcp_map(data, nonce)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    assert (answer.internal_port, answer.port, answer.lifetime_s) == (internal, external, lifetime_s)
    assert (answer.epoch_s, answer.address) == (epoch_s, mapped or address)
    with pytest.raises(RemoteProtocolError, match="another mapping"):
        messages.read_pcp_map(data, bytes(12) if nonce != bytes(12) else b"x" * 12)


@given(PORTS, PORTS, SECONDS, SECONDS, V4)
def test_nat_pmp_answers_are_read(internal: int, external: int, lifetime_s: int, epoch_s: int, ip: IPv4Address) -> None:
    request = messages.pmp_map(MapRequest(internal, external, lifetime_s, ip, b""))
    assert request == struct.pack("!BBHHHI", 0, 2, 0, internal, external, lifetime_s)
    mapped = messages.read_pmp_map(struct.pack("!BBHIHHI", 0, 130, 0, epoch_s, internal, external, lifetime_s))
    assert (mapped.internal_port, mapped.port, mapped.lifetime_s, mapped.epoch_s) == (
        internal,
        external,
        lifetime_s,
        epoch_s,
    )
    told = messages.read_pmp_address(struct.pack("!BBHI", 0, 128, 0, epoch_s) + ip.packed)
    assert (told.epoch_s, told.address) == (epoch_s, ip)


@given(st.binary(max_size=1_200))
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    readers = (
        lambda: messages.read_pcp_map(data, bytes(12)),
        lambda: messages.read_pcp_announce(data),
        lambda: messages.read_pmp_map(data),
        lambda: messages.read_pmp_address(data),
    )
    for read in readers:
        with suppress(RemoteProtocolError):
            read()


@given(st.integers(1, 255))
def test_a_refusal_is_said_in_words(result: int) -> None:
    pcp = struct.pack("!BBBBII12x", 2, 0x81, 0, result, 0, 0)
    pmp = struct.pack("!BBHIHHI", 0, 130, result, 0, 0, 0, 0)
    readers: tuple[Callable[[], object], ...] = (
        lambda: messages.read_pcp_map(pcp, bytes(12)),
        lambda: messages.read_pmp_map(pmp),
    )
    for read in readers:
        with pytest.raises(RemoteProtocolError) as caught:
            read()
        assert caught.value.field == "result"


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(-1 / 16, 1 / 16))
def test_a_clock_that_is_a_little_off_has_forgotten_nothing(epoch_s: float, passed_s: float, off: float) -> None:
    assert not messages.has_forgotten(epoch_s, passed_s, epoch_s + passed_s * (1 + off * 0.9))


@given(st.floats(10, 1e6), st.floats(0, 1e6))
def test_a_router_that_began_anew_has(epoch_s: float, passed_s: float) -> None:
    """Its epoch is what passed since it began, here half of the time between both answers."""
    assert messages.has_forgotten(epoch_s, passed_s, passed_s / 2)
