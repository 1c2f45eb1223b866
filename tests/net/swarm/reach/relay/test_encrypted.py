"""What a relay can do to the links that it carries: cut them, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import grpc.aio
import pytest

from swarm.base.tasks import TaskScope, spawn_on
from swarm.directory.address_proof import check_hello
from swarm.directory.dht.dialback import call_hello
from swarm.directory.identity import Identity
from swarm.link.certificate import ServerCertificate
from swarm.link.endpoint import Endpoint, RelayedAddress
from tests.net.hello_server import answering
from tests.net.relay_kit import HOST, Ends, dialled, open_relay, serving

ME, OTHER = Identity.ephemeral(), Identity.ephemeral()
NONCE = b"a nonce in plain"
Change = Callable[[bytes], bytes]


def through(endpoint: Endpoint, relay: str) -> Endpoint:
    return replace(endpoint, address=str(RelayedAddress(endpoint.peer, relay)))


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Change = bytes) -> None:
    while data := await reader.read(65_536):
        writer.write(change(data))
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()


async def join(one: Ends, other: Ends, there: Change = bytes, back: Change = bytes) -> None:
    """Pass bytes on both ways, until one end is reset or both have said all."""
    with suppress(OSError):
        async with TaskScope() as scope:
            passing = [scope.spawn(pass_on(one[0], other[1], there)), scope.spawn(pass_on(other[0], one[1], back))]
            await asyncio.wait(passing)


async def test_grpc_goes_through_a_relay_and_ends_at_the_machine() -> None:
    async with answering(ME) as local, open_relay() as relay:
        carried: list[bytes] = []

        def note(data: bytes) -> bytes:
            carried.append(data)
            return data

        async def to_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with dialled(port_of(local.address), b"") as server:
                await join((reader, writer), server, note, note)

        async with serving(relay, to_server, ME):
            endpoint = through(local, relay.address)
            answer = await call_hello(endpoint, NONCE)
            assert check_hello(ME.peer_id, NONCE, endpoint.digest, answer)
            assert carried[0][0] == 0x16, "a TLS handshake went over the relay"
            seen = b"".join(carried)
            assert len(seen) > 1_000
            for secret in (NONCE, ME.public_key, b"Hello", b"public_key"):
                assert secret not in seen
            assert relay.server.load.mbit_per_s > 0


@asynccontextmanager
async def hostile(target: str, there: Change = bytes, back: Change = bytes) -> AsyncIterator[str]:
    """A relay that leads every CONNECT where it likes, and changes what it carries."""
    async with TaskScope() as scope:

        async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
                async with dialled(port_of(target), b"") as server:
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                    await join((reader, writer), server, there, back)
            finally:
                writer.transport.abort()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            spawn_on(scope, writer, lead(reader, writer))

        async with await asyncio.start_server(accept, HOST, 0) as server:
            yield f"{HOST}:{server.sockets[0].getsockname()[1]}"


def flip_from(position: int) -> Change:
    """Change one bit of the byte at this position and of each one 100 further on."""
    at = 0

    def flip(data: bytes) -> bytes:
        nonlocal at
        changed = bytearray(data)
        for place in range(len(changed)):
            if at + place >= position and (at + place - position) % 100 == 0:
                changed[place] ^= 1
        at += len(data)
        return bytes(changed)

    return flip


async def refused(endpoint: Endpoint) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call_hello(endpoint, NONCE)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return caught.value.details() or ""


@pytest.mark.parametrize("position", [40, 1_500])
@pytest.mark.parametrize("way", ["there", "back"])
async def test_a_relay_that_swaps_bytes_gets_no_session(
    position: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the handshake and behind it."""
    monkeypatch.setattr("swarm.directory.dht.dialback.DEADLINE_S", 2.0)
    async with answering(ME) as local, hostile(local.address, **{way: flip_from(position)}) as relay:
        await refused(through(local, relay))


async def test_a_relay_that_swaps_peers_or_plays_a_certificate_gets_no_session() -> None:
    """It leads to another machine, to the machine's older certificate, to one of its own with the machine's name."""
    mine = ServerCertificate.fresh(ME.peer_id)
    expected = Endpoint(ME.peer_id, "", mine.der)
    async with AsyncExitStack() as stack:
        impostors = [
            await stack.enter_async_context(answering(OTHER)),
            await stack.enter_async_context(answering(ME, ServerCertificate.fresh(ME.peer_id))),
            await stack.enter_async_context(answering(OTHER, ServerCertificate.fresh(ME.peer_id))),
        ]
        for impostor in impostors:
            relay = await stack.enter_async_context(hostile(impostor.address))
            assert "CERTIFICATE_VERIFY_FAILED" in await refused(through(expected, relay))


async def test_a_relay_without_the_machine_says_so_at_once() -> None:
    async with answering(ME) as local, open_relay() as relay:
        assert "404" in await refused(through(local, relay.address))
