"""A private swarm's machine hears members only: anybody else gets no further than the handshake, and one line."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
import pytest

from swarm import alive
from swarm.directory.address_proof import HELLO_METHOD, NONCE_BYTES, check_hello, hello_response
from swarm.directory.dht.dialback import call_hello
from swarm.directory.identity import Identity
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import CHANNEL_OPTIONS, SERVER_OPTIONS, Dialer, bind_port, plain_reason
from swarm.link.endpoint import Endpoint
from swarm.link.network_key import RENEW_S, NetworkKey, _member

ME = Identity.ephemeral()
CERTIFICATE = ServerCertificate.fresh(ME.peer_id)
NONCE = bytes(range(NONCE_BYTES))
KEY, OTHER_KEY = NetworkKey(bytes(range(32))), NetworkKey(bytes(32))


@asynccontextmanager
async def private_machine(calls: list[bytes]) -> AsyncIterator[Endpoint]:
    """ME in the swarm of KEY; notes every call that it hears."""

    async def hello(nonce: bytes, _: object) -> bytes:
        calls.append(nonce)
        return hello_response(ME, nonce, CERTIFICATE.digest)

    server = grpc.aio.server(options=SERVER_OPTIONS)
    service, _, method = HELLO_METHOD[1:].rpartition("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(hello)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = bind_port(server, "127.0.0.1:0", CERTIFICATE, KEY)
    await server.start()
    try:
        yield Endpoint(ME.peer_id, f"127.0.0.1:{port}", CERTIFICATE.der)
    finally:
        await server.stop(None)


async def test_a_member_is_served() -> None:
    calls: list[bytes] = []
    async with private_machine(calls) as there:
        answer = await call_hello(there, NONCE, network=KEY)
        assert check_hello(ME.peer_id, NONCE, there.digest, answer)
        async with Dialer(network=KEY) as dialer:
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = dialer.channel(there).unary_unary(HELLO_METHOD)
            assert check_hello(ME.peer_id, NONCE, there.digest, await method(NONCE))
    assert calls == [NONCE, NONCE]


@pytest.mark.parametrize(
    ("network", "whom"),
    [(None, "has not its network key"), (OTHER_KEY, "has another network key or a wrong clock")],
    ids=["stranger", "member of another swarm"],
)
async def test_others_get_no_call_and_one_line(network: NetworkKey | None, whom: str) -> None:
    calls: list[bytes] = []
    async with private_machine(calls) as there:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call_hello(there, NONCE, network=network)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert plain_reason(error.value, is_member=network is not None) == (
            f"it hung up at once (Socket closed), as a private swarm does to whoever {whom}"
        )
    assert calls == []


async def test_plain_text_gets_no_call() -> None:
    calls: list[bytes] = []
    async with private_machine(calls) as there, grpc.aio.insecure_channel(there.address, CHANNEL_OPTIONS) as channel:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HELLO_METHOD)
        with pytest.raises(grpc.aio.AioRpcError):
            await method(NONCE)
    assert calls == []


async def test_a_certificate_that_has_run_out_gets_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []
    old = _member(KEY.secret, day=20_000)  # of 2024
    monkeypatch.setattr(NetworkKey, "member", lambda *_: old)
    async with private_machine(calls) as there:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call_hello(there, NONCE, network=KEY)
        assert plain_reason(error.value, is_member=True).endswith("another network key or a wrong clock")
    assert calls == []


async def test_a_member_still_refuses_who_answers_in_place_of_another() -> None:
    calls: list[bytes] = []
    async with private_machine(calls) as there:
        other = Endpoint(ME.peer_id, there.address, ServerCertificate.fresh(ME.peer_id).der)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call_hello(other, NONCE, network=KEY)
        assert "another machine answers there" in plain_reason(error.value)
    assert calls == []


async def test_a_channel_is_opened_anew_before_its_certificate_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr("swarm.link.dial.time.monotonic", lambda: now)
    there = Endpoint(ME.peer_id, "127.0.0.1:1", CERTIFICATE.der)
    async with Dialer(network=KEY) as dialer, Dialer() as open_dialer:
        first, kept = dialer.channel(there), open_dialer.channel(there)
        now += RENEW_S - 1
        assert dialer.channel(there) is first
        now += 2
        assert dialer.channel(there) is not first
        assert open_dialer.channel(there) is kept


async def test_the_health_check_of_an_image_is_a_member(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path_factory.mktemp("keys") / "own.key"
    KEY.save(path)
    calls: list[bytes] = []
    async with private_machine(calls) as there:
        port = int(there.address.rpartition(":")[2])
        assert not await asyncio.to_thread(alive.node, "127.0.0.1", port)
        monkeypatch.setenv("CANOPY_NETWORK_KEY", str(path))
        assert await asyncio.to_thread(alive.node, "127.0.0.1", port)


async def test_what_a_stranger_sees_is_the_certificate_and_no_more() -> None:
    calls: list[bytes] = []
    async with private_machine(calls) as there:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        seen = await _read_all(there, context)
        assert seen == CERTIFICATE.der


async def _read_all(there: Endpoint, context: ssl.SSLContext) -> bytes:
    host, _, port = there.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    der: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
    heard = b""
    with suppress(ssl.SSLError, ConnectionError):
        heard = await reader.read()
    assert heard == b""
    writer.close()
    return der
