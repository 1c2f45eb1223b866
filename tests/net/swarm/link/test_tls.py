"""Links are encrypted, and only the machine whose record was read can answer; others are refused in one line."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from swarm import alive
from swarm.base.errors import SwarmError
from swarm.base.ids import PeerId
from swarm.directory.address_proof import HELLO_METHOD, NONCE_BYTES, check_hello
from swarm.directory.dht.dialback import call_hello
from swarm.directory.identity import Identity
from swarm.link import dial
from swarm.link.certificate import ServerCertificate, check_certificate, server_name
from swarm.link.dial import SERVER_OPTIONS, ChannelOptions, Dialer, bind_port, plain_reason
from swarm.link.endpoint import Endpoint, is_loopback
from swarm.link.link import Stream
from tests.net.hello_server import answering
from tests.net.tee import Tee

ME = Identity.ephemeral()
OTHER = Identity.ephemeral()
NONCE = bytes(range(NONCE_BYTES))
ECHO = "/test/Echo"
HTTP2_BEGINS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
"""The preface and empty settings: what a client says that then calls nothing."""


@asynccontextmanager
async def echoing(
    certificate: ServerCertificate | None, options: ChannelOptions = SERVER_OPTIONS
) -> AsyncIterator[Endpoint]:
    """A server of ME that sends back what it gets; in plain text without a certificate."""

    async def echo(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = grpc.aio.server(options=options)
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    port = bind_port(server, "127.0.0.1:0", certificate)
    await server.start()
    try:
        yield Endpoint(ME.peer_id, f"127.0.0.1:{port}", b"" if certificate is None else certificate.der)
    finally:
        await server.stop(None)


async def echoed(channel: grpc.aio.Channel, data: bytes = b"words") -> bytes:
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(ECHO)
    call = method(iter([data]), timeout=5)
    return b"".join([answer async for answer in call])


async def refusal(dialer: Dialer, endpoint: Endpoint) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echoed(dialer.channel(endpoint))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    reason = plain_reason(caught.value)
    assert "\n" not in reason
    return reason


async def test_only_the_machine_of_the_record_can_answer() -> None:
    """Another one at its address, its own older certificate, its certificate under another name, one without TLS."""
    mine, old = ServerCertificate.fresh(ME.peer_id), ServerCertificate.fresh(ME.peer_id)
    async with echoing(mine) as here, echoing(None) as plain, Dialer() as dialer:
        assert await echoed(dialer.channel(here)) == b"words"
        another = Endpoint(OTHER.peer_id, here.address, ServerCertificate.fresh(OTHER.peer_id).der)
        for impostor in (another, replace(here, certificate=old.der), replace(here, peer=OTHER.peer_id)):
            assert "another machine answers there" in await refusal(dialer, impostor)
        assert "speaks no TLS" in await refusal(dialer, replace(here, address=plain.address))
        assert await echoed(dialer.channel(here)) == b"words"


async def test_nobody_is_dialled_in_plain_text_unless_this_machine_is_alone() -> None:
    async with echoing(None) as plain, Dialer() as dialer, Dialer(insecure=True) as insecure:
        with pytest.raises(SwarmError, match="announces no certificate") as caught:
            dialer.channel(plain)
        assert "\n" not in str(caught.value)
        assert await echoed(insecure.channel(plain)) == b"words"
        for address in ("192.0.2.1:80", "localhost.example:80", "0.0.0.0:80", "[::ffff:7f00:1]:80"):
            with pytest.raises(SwarmError, match="this machine's own addresses"):
                insecure.channel(replace(plain, address=address))
    async with echoing(ServerCertificate.fresh(ME.peer_id)) as here, Dialer(insecure=True) as insecure:
        assert "Socket closed" in await refusal(insecure, replace(here, certificate=b""))
        assert await echoed(insecure.channel(here)) == b"words", "who has a certificate is asked for it, here too"


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.9.1", "[::1]", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "10.0.0.1", "[::]", "127.0.0.1.example", "")),
    ],
)
def test_what_is_this_machine(host: str, is_here: bool) -> None:
    assert is_loopback(host) is is_here


async def test_a_hello_cannot_be_passed_on() -> None:
    """A machine in between has a certificate with the right name, which it made itself, and asks the real node."""
    between = ServerCertificate.fresh(ME.peer_id)
    check_certificate(between.der, ME.peer_id)  # anybody can make one: only the record and Hello tell them apart
    async with answering(ME) as real:
        assert check_hello(ME.peer_id, NONCE, real.digest, await call_hello(real, NONCE))
        assert await asyncio.to_thread(alive.main, ["node", real.address.rpartition(":")[2]]) == 0

        async def relay(nonce: bytes, _context: object) -> bytes:
            return await call_hello(real, nonce)

        async with _serving(HELLO_METHOD, relay, between) as port:
            relayed = Endpoint(ME.peer_id, f"127.0.0.1:{port}", between.der)
            answer = await call_hello(relayed, NONCE)
            assert check_hello(ME.peer_id, NONCE, real.digest, answer), "the real node's word, for its own certificate"
            assert not check_hello(ME.peer_id, NONCE, relayed.digest, answer)
            assert await asyncio.to_thread(alive.main, ["node", str(port)]) == 1


@asynccontextmanager
async def _serving(method: str, answer: Callable[..., object], certificate: ServerCertificate) -> AsyncIterator[int]:
    service, name = method.strip("/").split("/")
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {name: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = bind_port(server, "127.0.0.1:0", certificate)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def test_a_proxy_of_the_environment_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    async with server, answering(ME) as here, echoing(None) as plain, Dialer(insecure=True) as dialer:
        for name in ("http_proxy", "grpc_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = dialer.channel(here).unary_unary(HELLO_METHOD)
        assert check_hello(ME.peer_id, NONCE, here.digest, await call(NONCE, timeout=5))
        assert check_hello(ME.peer_id, NONCE, here.digest, await call_hello(here, NONCE))
        assert await echoed(dialer.channel(plain)) == b"words"
        assert await asyncio.to_thread(alive.main, ["node", here.address.rpartition(":")[2]]) == 0
    assert asked == []


async def test_the_version_is_1_3() -> None:
    """Whatever this side offers; `node serve` takes nothing older, see tests/e2e."""

    def negotiated(port: int) -> str | None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", port), 5) as plain, context.wrap_socket(plain) as secured:
            return secured.version()

    async with echoing(ServerCertificate.fresh(ME.peer_id)) as here:
        assert await asyncio.to_thread(negotiated, int(here.address.rpartition(":")[2])) == "TLSv1.3"


async def test_nothing_is_compressed() -> None:
    """A few kilobytes on the wire are never megabytes in memory."""
    async with echoing(ServerCertificate.fresh(ME.peer_id)) as here:
        credentials, pinned = dial.pin(here.certificate, server_name(here.peer))
        gzip = grpc.Compression.Gzip
        async with grpc.aio.secure_channel(here.address, credentials, pinned, gzip) as channel:
            call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(ECHO)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(bytes(10_000), timeout=5).read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_who_connects_and_says_nothing_is_sent_away() -> None:
    """Before the handshake and after it; the limits are the real ones, a hundred times as short."""
    short = {"grpc.server_handshake_timeout_ms": 50, "grpc.max_connection_idle_ms": 600}
    limits = [(name, short.get(name, value)) for name, value in SERVER_OPTIONS]
    async with echoing(ServerCertificate.fresh(ME.peer_id), limits) as here:
        port = int(here.address.rpartition(":")[2])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        for secured, said in ((None, b""), (context, b""), (context, HTTP2_BEGINS)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=secured)
            writer.write(said)
            async with asyncio.timeout(8):
                await reader.read()  # until the end
            writer.close()


async def test_the_least_used_channel_goes_and_no_stream_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "MAX_CHANNELS", 4)
    certificate = ServerCertificate.fresh(ME.peer_id)
    nobody = [Endpoint(ME.peer_id, f"127.0.0.1:{port}", certificate.der) for port in range(1, 9)]
    async with echoing(certificate) as here, Dialer() as dialer:
        used = dialer.channel(here)
        call: Stream = used.stream_stream(ECHO)(timeout=10)
        await call.write(b"before")
        assert await call.read() == b"before"
        first = [id(dialer.channel(endpoint)) for endpoint in nobody]
        assert len(dialer._kept) == 4
        assert here not in dialer._kept
        await call.write(b"after")
        assert await call.read() == b"after", "its stream goes on"
        assert dialer.channel(here) is used, "and so does its connection"
        assert id(dialer.channel(nobody[-1])) == first[-1], "what was used lately stays"
        for endpoint in nobody:
            dialer.channel(endpoint)
        call.cancel()
        del used, call
        await asyncio.sleep(0)
        assert not [one for one in dialer._dropped if one != here], "what nobody used is closed"


async def test_a_new_link_costs_one_round_trip_more_than_in_plain_text() -> None:
    one_way_s = 0.03

    async def first_answer_s(endpoint: Endpoint) -> float:
        async with Dialer(insecure=True) as dialer:
            started = time.monotonic()
            assert await echoed(dialer.channel(endpoint)) == b"words"
            return time.monotonic() - started

    tee = Tee(one_way_s)
    async with (
        echoing(ServerCertificate.fresh(ME.peer_id)) as here,
        echoing(None) as plain,
        tee.before(here.address) as secured,
        tee.before(plain.address) as in_plain,
    ):
        ends = replace(plain, address=in_plain), replace(here, address=secured)
        plain_s, secured_s = [min([await first_answer_s(end) for _ in range(3)]) for end in ends]
    assert secured_s - plain_s < 1.5 * 2 * one_way_s


def test_names_are_dns_names_and_differ_by_capitals_too() -> None:
    names = {server_name(PeerId(peer)) for peer in ("QmAbc", "Qmabc", "QMABC")}
    assert len(names) == 3
    for name in names:
        assert name == name.lower()
        assert all(0 < len(label) <= 63 for label in name.split("."))
