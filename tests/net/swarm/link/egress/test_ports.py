"""Connections through proxies: what comes of them, and what a refusal says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarm.base.ids import PeerId
from swarm.link.egress import ports
from swarm.link.egress.ports import Egress, TlsPort, tls_port
from swarm.link.egress.proxy import HttpProxy, ProxyRefused
from swarm.link.egress.streams import SEGMENT_BYTES
from tests.net.connect_proxy import ConnectProxy, proxying

PEER = "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWKGrQD"


@asynccontextmanager
async def greeting_server() -> AsyncIterator[str]:
    """Speaks first, then echoes a line."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first\n" + await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def answering_proxy(answer: bytes) -> AsyncIterator[HttpProxy]:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    async with server:
        yield HttpProxy("127.0.0.1", server.sockets[0].getsockname()[1])


def listener() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


async def test_bytes_pass_a_proxy_that_wants_a_password() -> None:
    async with greeting_server() as address:
        sock = listener()
        proxy = HttpProxy("127.0.0.1", sock.getsockname()[1], "me:secret")
        port = int(address.rpartition(":")[2])
        async with proxying(sock, ConnectProxy((port,), "me:secret")) as passed:
            streams = await Egress(proxy=proxy).open(address)
            streams.writer.write(b"second\n")
            assert await streams.reader.read() == b"first\nsecond\n", "nothing of the other end's is lost"
            streams.abort()
        assert passed.connected == {address}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "does not allow"),
        (b"HTTP/1.0 407 Proxy Authentication Required\r\nX: y\r\n\r\n", "wants a user and a password"),
        (b"HTTP/1.1 418 I am\x1b[2J a teapot\r\n\r\n", "teapot"),
        (b"HTTP/1.1 500\r\n\r\n", "gives no reason"),
        (b"HTTP/1.1 200 OK\r\n", "does not answer as an HTTP proxy does"),
        (b"SSH-2.0-x\r\n\r\n", "does not answer as an HTTP proxy does"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "does not answer as an HTTP proxy does"),
        (b"", "does not answer as an HTTP proxy does"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000, "does not answer as an HTTP proxy does"),
    ],
)
async def test_a_refusal_is_one_line_that_says_what_to_do(answer: bytes, said: str) -> None:
    async with answering_proxy(answer) as proxy:
        with pytest.raises(ProxyRefused, match=said) as caught:
            await Egress(proxy=proxy).open("192.0.2.1:443")
    assert str(caught.value).isprintable()


async def test_a_proxy_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "OPEN_S", 0.05)
    sock = listener()
    sock.listen()
    with sock, pytest.raises(TimeoutError):
        await Egress(proxy=HttpProxy("127.0.0.1", sock.getsockname()[1])).open("192.0.2.1:443")


async def test_a_port_without_tls_is_no_tls_port() -> None:
    async with greeting_server() as address:
        with pytest.raises(OSError, match=r"(?i)ssl|version|record"):
            await Egress().open_tls(TlsPort(PeerId(PEER), address), "canopy-relay")


async def test_segments_fit_any_path() -> None:
    with socket.socket() as far:
        far.bind(("127.0.0.1", 0))
        far.listen()
        streams = await Egress().open("{}:{}".format(*far.getsockname()))
        sock = streams.writer.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= SEGMENT_BYTES
        streams.abort()


@pytest.mark.parametrize(
    ("address", "found"),
    [
        (f"/ip4/192.0.2.1/tcp/443/tls/p2p/{PEER}", "192.0.2.1:443"),
        (f"/ip6/2001:db8::1/tcp/443/tls/p2p/{PEER}", "[2001:db8::1]:443"),
        (f"/dns/relay.example/tcp/8443/tls/p2p/{PEER}", "relay.example:8443"),
        (f"/ip4/192.0.2.1/tcp/443/p2p/{PEER}", None),
        (f"/ip4/192.0.2.1/udp/443/quic/p2p/{PEER}", None),
    ],
)
def test_a_multiaddress_names_a_tls_port(address: str, found: str | None) -> None:
    assert tls_port(address) == (None if found is None else TlsPort(PeerId(PEER), found))
