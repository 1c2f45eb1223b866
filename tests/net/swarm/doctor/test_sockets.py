"""Troubles planted on real sockets: a taken port, silent and odd peers, brokers, relays that see different ports."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from cryptography.hazmat.primitives import serialization

from swarm.commands.certificates import authority, broker_certificate, key_pem, new_key
from swarm.discovery.identity import Identity
from swarm.doctor.broker import BrokerCheck, login
from swarm.doctor.directory import DhtCheck
from swarm.doctor.network import connect, resolve
from swarm.doctor.ports import PortCheck, listening_program, try_bind
from swarm.doctor.relays import RelayWord, ask_relays
from swarm.doctor.router import MappingCheck, RelayCheck, RouterCheck
from swarm.doctor.swarm_view import JoinState, SwarmView, greet, look_at_swarm
from swarm.gateway.ports import PcpRouter, PmpRouter
from tests.net.brokers import CONNACK, free_port, mosquitto, scripted_broker
from tests.net.lent_relay import lent_relay
from tests.one_diagnosis import assert_hint, assert_ok, assert_trouble, ready

PEER = Identity.ephemeral().peer_id
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(answer: Answer, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server; gives its port."""
    async with await asyncio.start_server(answer, host, 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]


async def test_a_port_that_another_program_took() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = PortCheck((port,), try_bind, listening_program)
        await assert_trouble(check, "port-taken", f"port {port} is taken by", "or give another port")
        assert str(os.getpid()) in (await check.look())[0].text
    await assert_ok(check, "port-free")
    await assert_ok(PortCheck((), try_bind, listening_program), "port-free")


async def test_a_peer_that_is_not_there_and_one_that_is_something_else(tmp_path: Path) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    gone = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{PEER}"
    view = await look_at_swarm((gone,), tmp_path / "identity.key")
    assert view == SwarmView((JoinState.SILENT,))
    await assert_trouble(DhtCheck(ready(view)), "peer-silent", "does not answer", "ask for the swarm's present peers")
    async with answering(http) as port:
        view = await look_at_swarm((f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}",), tmp_path / "identity.key")
    await assert_trouble(DhtCheck(ready(view)), "peer-other", "no peer of a swarm", "check the port")
    assert await greet("/ip4/127.0.0.1/tcp/1") is JoinState.MALFORMED
    assert await greet(f"/dns4/boot.example/tcp/1/p2p/{PEER}", ready(())) is JoinState.NO_NAME
    assert await greet(f"/dns4/boot.example/tcp/1/p2p/{PEER}", ready(("127.0.0.1",))) is JoinState.SILENT
    assert await look_at_swarm((), tmp_path / "identity.key") is None


def broker(url: str, ca: Path | None = None) -> BrokerCheck:
    return BrokerCheck(url, ca, ready(("127.0.0.1",)), connect, partial(login, limit_s=0.5))


async def test_a_broker_that_cannot_be_reached() -> None:
    gone = broker(f"mqtt://127.0.0.1:{free_port()}")
    await assert_trouble(gone, "broker-silent", "nothing answers at the broker's port", "whether it runs")
    unnamed = BrokerCheck("mqtt://broker.example", None, ready(()), connect, login)
    await assert_trouble(unnamed, "broker-unnamed", "name is not found", "--mqtt")
    await assert_trouble(broker("http://user:secret@x"), "broker-malformed", "is no broker", "--mqtt mqtt://HOST:PORT")
    await assert_ok(BrokerCheck(None, None, ready(()), connect, login), "no-broker")


@pytest.mark.needs_program("mosquitto", "mosquitto")
async def test_a_broker_that_refuses_the_password(tmp_path: Path) -> None:
    (tmp_path / "passwords").write_text("")
    (tmp_path / "passwords").chmod(0o600)
    port = free_port()
    with mosquitto(tmp_path, port, f"password_file {tmp_path / 'passwords'}"):
        wrong = broker(f"mqtt://anna:wrong-password@127.0.0.1:{port}")
        await assert_trouble(wrong, "broker-refuses", "does not accept this user and password", "export CANOPY_MQTT=")
        await assert_trouble(
            broker(f"mqtt://127.0.0.1:{port}"), "broker-refuses", "without a password", "USER:PASSWORD"
        )


async def test_a_broker_that_answers_or_is_none() -> None:
    async with scripted_broker(CONNACK) as good:
        await assert_ok(broker(f"mqtt://127.0.0.1:{good.port}"), "broker")
    async with scripted_broker(b"HTTP/1.1 400 Bad Request\r\n\r\n") as odd:
        await assert_trouble(broker(f"mqtt://127.0.0.1:{odd.port}"), "broker-odd", "does not speak MQTT", "mqtts://")


async def test_a_broker_without_tls_and_one_that_is_not_trusted(tmp_path: Path) -> None:
    async with scripted_broker(b"HTTP/1.1 400 Bad Request\r\n\r\n") as plain:
        await assert_trouble(broker(f"mqtts://127.0.0.1:{plain.port}"), "broker-plain", "speaks no TLS", "mqtt://")
    tls, ca = secured(tmp_path)

    async def connack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(256):
            writer.write(CONNACK)
            await reader.read(256)
        writer.close()

    async with answering(connack, tls=tls) as port:
        url = f"mqtts://127.0.0.1:{port}"
        await assert_trouble(broker(url), "broker-untrusted", "certificate is not trusted", "--mqtt-ca FILE")
        await assert_ok(broker(url, ca), "broker")


def secured(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's side for 127.0.0.1, and the file of its authority."""
    signer, key, now = new_key(), new_key(), datetime.now(UTC)
    root = authority(signer, now)
    certificate = broker_certificate(key.public_key(), ["127.0.0.1"], (root, signer), now)
    for name, data in (
        ("ca.crt", root.public_bytes(serialization.Encoding.PEM)),
        ("broker.pem", certificate.public_bytes(serialization.Encoding.PEM) + key_pem(key)),
    ):
        (folder / name).write_bytes(data)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "broker.pem")
    return tls, folder / "ca.crt"


def relay(seen: str | None, circuits: int = 1) -> Answer:
    """A relay that sees the asker there; None: as it comes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        verb = (await reader.readline()).strip()
        host, port = writer.get_extra_info("peername")[:2]
        line = f"LOAD {circuits} 64 0 10" if verb == b"LOAD" else f"SEEN {seen or f'{host}:{port}'}"
        writer.write(f"{line}\n".encode())
        writer.close()

    return answer


async def ask_both(first: Answer, second: Answer) -> list[RelayWord]:
    async with answering(first) as one, answering(second, "127.0.0.2") as two:
        return await ask_relays([f"127.0.0.1:{one}", f"127.0.0.2:{two}", "nonsense"])


async def test_two_relays_that_see_different_ports() -> None:
    words = await ask_both(relay("203.0.113.9:40001"), relay("203.0.113.9:40002"))
    view = ready(SwarmView((JoinState.ANSWERS,)))
    symmetric = RouterCheck(lambda: ("192.168.1.7",), ready(words), view)
    await assert_hint(symmetric, "symmetric", "no hole can be made", "--announce-address")


async def test_both_relays_are_asked_from_one_port() -> None:
    words = await ask_both(relay(None), relay(None))
    assert len({word.seen.rpartition(":")[2] for word in words}) == 1
    view = ready(SwarmView((JoinState.ANSWERS,)))
    await assert_ok(RouterCheck(lambda: ("127.0.0.1",), ready(words), view), "direct")
    await assert_ok(RouterCheck(lambda: ("192.168.1.7",), ready(words), view), "cone")


async def test_a_real_relay_is_one() -> None:
    async with lent_relay() as offer:
        (word,) = await ask_relays([offer.address])
    assert word.answers
    assert word.limit > 0
    assert word.seen.startswith("127.0.0.1:")


@pytest.mark.parametrize("said", [b"", b"x" * 4_000, b"LOAD many 64 0 10\n", b"\xff\xff\n", b"NO\n"])
async def test_what_is_no_relay_is_told_from_one(said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(said)
        writer.close()

    async with answering(answer) as port:
        (word,) = await ask_relays([f"127.0.0.1:{port}"])
    assert not word.answers
    assert not (await ask_relays([f"127.0.0.1:{free_port()}"]))[0].answers
    check = RelayCheck(ready([word]), ready(None))
    await assert_ok(check, "relay-untried")


class RefusingGateway(asyncio.DatagramProtocol):
    """A home router that understands PCP and NAT-PMP and allows nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if data[0] == 2:
            self.transport.sendto(struct.pack("!BBBBII12x", 2, 0x81, 0, 2, 0, 1_000) + data[24:60], addr)
        else:
            self.transport.sendto(struct.pack("!BBHIHHI", 0, 0x82, 2, 1_000, 4_242, 0, 0), addr)


async def test_a_router_that_refuses_to_map() -> None:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(RefusingGateway, ("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    routers = (PcpRouter("127.0.0.1", 4_242, bytes(12), port), PmpRouter("127.0.0.1", 4_242, port))
    text = "the router refuses to map a port: PCP does not allow it; NAT-PMP does not allow it"
    try:
        check = MappingCheck(lambda: routers, ready(()))
        await assert_hint(check, "mapping-refused", text, "allow it in the router's settings, or forward a TCP port")
    finally:
        transport.close()


async def test_a_name_of_this_machine_is_found() -> None:
    assert "127.0.0.1" in await resolve("localhost")
