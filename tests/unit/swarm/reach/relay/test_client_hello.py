"""What a ClientHello names is read whole, in pieces or cut into records; everything else is refused by name."""

from __future__ import annotations

import ssl
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import RemoteProtocolError
from swarm.reach.relay.tls_port import MAX_HELLO_BYTES, named_protocols


def client_hello(*protocols: str, host: str | None = "relay.example") -> bytes:
    """As OpenSSL says it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    if protocols:
        context.set_alpn_protocols(list(protocols))
    said = ssl.MemoryBIO()
    session = context.wrap_bio(ssl.MemoryBIO(), said, server_hostname=host)
    with suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return said.read()


HELLO = client_hello("canopy-relay", "http/1.1")


@pytest.mark.parametrize("protocols", [("canopy-relay",), ("h2", "http/1.1"), ()])
@pytest.mark.parametrize("host", ["relay.example", None])
def test_the_named_protocols_are_read_in_their_order(protocols: tuple[str, ...], host: str | None) -> None:
    assert named_protocols(client_hello(*protocols, host=host)) == protocols


def test_a_hello_in_pieces_is_waited_for_and_what_follows_is_not_read() -> None:
    for length in range(len(HELLO)):
        assert named_protocols(HELLO[:length]) is None
    assert named_protocols(HELLO + b"\xff" * 40) == ("canopy-relay", "http/1.1")


@pytest.mark.parametrize("size", [1, 3, 100, 16_000])
def test_a_hello_in_several_records_is_one(size: int) -> None:
    body = HELLO[5:]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    cut = b"".join(b"\x16\x03\x01" + len(piece).to_bytes(2, "big") + piece for piece in pieces)
    if len(cut) < MAX_HELLO_BYTES:
        assert named_protocols(cut) == ("canopy-relay", "http/1.1")
        assert named_protocols(cut[:-1]) is None


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"HERE Qm\n",
        b"\x13/multistream/1.0.0\n",
        b"\x16\x02\x00\x00\x10",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x40\x00\x01\xff\xff\xff",
        b"\x16\x03\x01\x00\x27\x01\x00\x00\x23" + bytes(34) + b"\xff",
        (b"\x16\x03\x01\x00\x04\x01\x00\x13\x88" + b"\x16\x03\x01\x00\x01x" * 1_400)[:MAX_HELLO_BYTES],
    ],
)
def test_what_begins_no_tls_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        named_protocols(data)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=300), st.integers(0, len(HELLO)))
def test_no_bytes_make_it_raise_anything_else(data: bytes, kept: int) -> None:
    with suppress(RemoteProtocolError):
        named_protocols(HELLO[:kept] + data)
