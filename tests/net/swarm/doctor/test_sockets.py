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
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.doctor.directory import SwarmView, look_at_swarm
from swarm.doctor.hub import login, look_at_broker
from swarm.doctor.ladder import Diagnosis
from swarm.doctor.network import NamedPeer, Outside, Pages, look_outside
from swarm.doctor.probes import (
    GREETING,
    ConnectProxy,
    LookedUp,
    Names,
    Page,
    TcpAnswer,
    ask_page,
    exchange,
    greet,
    knock,
    takes_large,
)
from swarm.doctor.way_in import (
    RelayWord,
    ask_relays,
    listening_program,
    look_at_mapping,
    look_at_ports,
    look_at_router,
    try_bind,
)
from swarm.reach.gateway.ports import PcpRouter, PmpRouter
from tests.net.black_hole import black_hole
from tests.net.brokers import CONNACK, free_port, mosquitto, scripted_broker
from tests.net.lent_relay import lent_relay
from tests.one_diagnosis import assert_hint, assert_ok, assert_trouble, found_by, named, ready

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(answer: Serve, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server; gives its port."""
    async with await asyncio.start_server(answer, host, 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]


async def test_a_port_that_another_program_took() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = f"port {port} is taken by"
        found = look_at_ports((port,), try_bind, listening_program)
        await assert_trouble(found, "port-taken", text, "or give another port")
        assert str(os.getpid()) in (await found_by(found)).text
    await assert_ok(look_at_ports((port,), try_bind, listening_program), "port-free")
    await assert_ok(look_at_ports((), try_bind, listening_program), "port-free")


async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(64)
    writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://x.example/\r\n\r\n")
    writer.close()


async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_what_becomes_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.doctor.probes.CONNECT_S", 0.3)
    assert await knock("127.0.0.1", free_port()) is TcpAnswer.REFUSED
    with black_hole("127.0.0.1", gone := free_port()):
        assert await knock("127.0.0.1", gone) is TcpAnswer.SILENT
    async with answering(http) as port:
        assert await knock("127.0.0.1", port) is TcpAnswer.OPEN
        assert await greet("127.0.0.1", port) is TcpAnswer.OPEN
        assert await ask_page("127.0.0.1", port, "GET / HTTP/1.1") == Page(302, "http://x.example/")
        assert await takes_large("127.0.0.1", port)
    async with answering(mute) as port:
        assert await greet("127.0.0.1", port) is TcpAnswer.MUTE
        assert await exchange("127.0.0.1", port, b"x", b"y") == b""
    assert await ask_page("127.0.0.1", port, "GET / HTTP/1.1") is None
    assert await takes_large("127.0.0.1", port) is None
    assert await look_at_swarm((), Path("none")) == SwarmView()


async def test_a_real_peer_greets_and_takes_packets_of_full_size() -> None:
    async with DhtRegistry.open(DhtConfig(host="127.0.0.1")) as registry:
        _, _, host, _, port, *_ = registry.join_addresses()[0].split("/")
        assert await greet(host, int(port)) is TcpAnswer.PEER
        assert await takes_large(host, int(port))


async def test_a_peer_is_greeted_at_its_tls_port_and_through_a_proxy(tmp_path: Path) -> None:
    tls, _ = secured(tmp_path)
    tls.set_alpn_protocols(["canopy-directory"])
    wishes: list[bytes] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await mute(reader, writer)

    def proxy(status: str) -> Serve:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wishes.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
            await peer(reader, writer)

        return answer

    async with answering(peer, tls=tls) as port:
        assert await greet("127.0.0.1", port, is_tls=True) is TcpAnswer.PEER
    async with answering(proxy("200 Connected")) as port:
        between = ConnectProxy.of(f"http://anna:s%20x@127.0.0.1:{port}")
        assert await greet("boot.example", 443, proxy=between) is TcpAnswer.PEER
    assert wishes[0].startswith(b"CONNECT boot.example:443 HTTP/1.1\r\nHost: boot.example:443\r\n")
    assert b"Proxy-Authorization: Basic YW5uYTpzIHg=" in wishes[0]
    async with answering(proxy("403 Forbidden")) as port:
        assert await greet("2600::1", 443, proxy=ConnectProxy("127.0.0.1", port)) is TcpAnswer.NO_WAY
    assert b"CONNECT [2600::1]:443 " in wishes[1]
    assert [ConnectProxy.of(url) for url in ("socks5://x", "http://[", "")] == [None] * 3


async def test_where_no_peer_is_reached_their_machines_are_asked_at_port_443(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    async def knock_at(ip: str, port: int) -> TcpAnswer:
        asked.append((ip, port))
        return TcpAnswer.REFUSED if port == 443 else TcpAnswer.SILENT

    async def greet_at(ip: str, port: int, *, is_tls: bool) -> TcpAnswer:
        asked.append((ip, port))
        return TcpAnswer.PEER if port == 1 and not is_tls else TcpAnswer.SILENT

    monkeypatch.setattr("swarm.doctor.network.knock", knock_at)
    monkeypatch.setattr("swarm.doctor.network.greet", greet_at)

    async def find(host: str) -> LookedUp:
        return LookedUp((host,)) if host.startswith("192") else LookedUp()

    async def look(*hosts: tuple[str, int]) -> Outside:
        asked.clear()
        return await look_outside([NamedPeer("/…", "--join", *one) for one in hosts], find, Pages(find, {}))

    outside = await look(("192.0.2.1", 1), ("192.0.2.2", 2), ("", 0), ("192.0.2.3", 0))
    assert outside == Outside((TcpAnswer.PEER, TcpAnswer.SILENT, None, TcpAnswer.MUTE))
    assert sorted(asked) == [("192.0.2.1", 1), ("192.0.2.2", 2)]
    outside = await look(("192.0.2.2", 2), ("", 0))
    assert outside == Outside((TcpAnswer.SILENT, None), TcpAnswer.REFUSED)
    assert asked == [("192.0.2.2", 2), ("192.0.2.2", 443)]


def broker(url: str, ca: Path | None = None) -> Awaitable[Diagnosis]:
    return look_at_broker(url, ca, named("127.0.0.1"), partial(login, limit_s=0.5))


async def test_a_broker_that_cannot_be_reached() -> None:
    gone = broker(f"mqtt://127.0.0.1:{free_port()}")
    await assert_trouble(gone, "broker-silent", "nothing answers at the broker's port", "whether it runs")
    unnamed = look_at_broker("mqtt://broker.example", None, named(), login)
    await assert_trouble(unnamed, "broker-unnamed", "name is not found", "--mqtt")
    await assert_trouble(broker("http://user:secret@x"), "broker-malformed", "is no broker", "--mqtt mqtt://HOST:PORT")
    await assert_ok(look_at_broker(None, None, named(), login), "no-broker")


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


def relay(seen: str | None, circuits: int = 1) -> Serve:
    """A relay that sees the asker there; None: as it comes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        verb = (await reader.readline()).strip()
        host, port = writer.get_extra_info("peername")[:2]
        line = f"LOAD {circuits} 64 0 10" if verb == b"LOAD" else f"SEEN {seen or f'{host}:{port}'}"
        writer.write(f"{line}\n".encode())
        writer.close()

    return answer


async def ask_both(first: Serve, second: Serve) -> list[RelayWord]:
    async with answering(first) as one, answering(second, "127.0.0.2") as two:
        return await ask_relays([f"127.0.0.1:{one}", f"127.0.0.2:{two}", "nonsense"], Names())


async def test_two_relays_that_see_different_ports() -> None:
    words = await ask_both(relay("203.0.113.9:40001"), relay("203.0.113.9:40002"))
    symmetric = look_at_router(("192.168.1.7",), words, SwarmView())
    await assert_hint(symmetric, "symmetric", "no hole can be made", "--announce-address")


async def test_both_relays_are_asked_from_one_port() -> None:
    words = await ask_both(relay(None), relay(None))
    assert len({word.seen.rpartition(":")[2] for word in words}) == 1
    await assert_ok(look_at_router(("127.0.0.1",), words, SwarmView()), "direct")
    await assert_ok(look_at_router(("192.168.1.7",), words, SwarmView()), "cone")


async def test_a_real_relay_is_one() -> None:
    async with lent_relay() as offer:
        (word,) = await ask_relays([offer.address], Names())
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
        (word,) = await ask_relays([f"127.0.0.1:{port}"], Names())
    assert (word.answers, word.is_mute) == (False, False)
    (gone,) = await ask_relays([f"127.0.0.1:{free_port()}"], Names())
    assert (gone.answers, gone.is_mute) == (False, False)


async def test_a_relay_that_says_nothing_in_time_is_told_from_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.doctor.way_in.ASK_S", 0.1)
    async with answering(mute) as port:
        (word,) = await ask_relays([f"127.0.0.1:{port}"], Names())
    assert (word.answers, word.is_mute) == (False, True)


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
        await assert_hint(
            look_at_mapping(routers, ready(())),
            "mapping-refused",
            text,
            "allow it in the router's settings, or forward a TCP port",
        )
    finally:
        transport.close()


async def test_a_name_of_this_machine_is_found() -> None:
    find = Names()
    assert "127.0.0.1" in (await find("localhost")).ips
    assert (await find("[::1]")).ips == ("::1",)
