"""Names that have addresses of both families, one of which leads nowhere: gRPC falls back within a second or two."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import cast

import grpc.aio
import pytest

from swarm.directory.address_proof import HELLO_METHOD, NONCE_BYTES, check_hello
from swarm.directory.identity import Identity
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import CHANNEL_OPTIONS, open_channel
from swarm.link.endpoint import Endpoint
from tests.net.black_hole import black_hole
from tests.net.hello_server import answering

NONCE = bytes(NONCE_BYTES)
A, AAAA = 1, 28
TRIES = 5
ADDRESSES = {A: socket.inet_aton("127.0.0.1"), AAAA: socket.inet_pton(socket.AF_INET6, "::1")}


class BothFamilies(asyncio.DatagramProtocol):
    """A name server that gives this machine's loopback of both families to every name."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        end = data.index(0, 12) + 5
        (kind,) = struct.unpack(">H", data[end - 4 : end - 2])
        found = ADDRESSES.get(kind, b"")
        answer = b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 60, len(found)) + found if found else b""
        header = data[:2] + struct.pack(">HHHHH", 0x8180, 1, 1 if found else 0, 0, 0)
        self._transport.sendto(header + data[12:end] + answer, address)


@asynccontextmanager
async def names() -> AsyncIterator[str]:
    """`host:port` of the name server."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(BothFamilies, local_addr=("127.0.0.1", 0))
    try:
        host, port = transport.get_extra_info("sockname")
        yield f"{host}:{port}"
    finally:
        transport.close()


@pytest.mark.parametrize(("alive", "dead"), [("127.0.0.1", "::1"), ("[::1]", "127.0.0.1")])
async def test_a_name_with_one_dead_family_is_reached_by_the_other(alive: str, dead: str) -> None:
    identity = Identity.ephemeral()
    certificate = ServerCertificate.fresh(identity.peer_id)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(names())
        for _ in range(TRIES):
            here = await stack.enter_async_context(answering(identity, certificate, alive))
            port = here.address.rpartition(":")[2]
            with suppress(OSError):  # somebody else has this port of the other family
                stack.enter_context(black_hole(dead, int(port)))
                break
        else:
            pytest.fail("no port was free in both families")
        name = Endpoint(here.peer, f"dns://{server}/two.example:{port}", here.certificate)
        channel = await stack.enter_async_context(open_channel(name, CHANNEL_OPTIONS))
        began = time.monotonic()
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HELLO_METHOD)
        assert check_hello(here.peer, NONCE, certificate.digest, await call(NONCE, timeout=10))
        assert time.monotonic() - began < 4
