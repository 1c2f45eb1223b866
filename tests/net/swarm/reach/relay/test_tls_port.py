"""The TLS port over real connections: what it leads to, whom it charges, and that strangers hold nothing for long."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from swarm.base.ids import PeerId
from swarm.base.quota import HoldingLimit, RateLimit, stand_in
from swarm.directory.identity import Identity
from swarm.link.egress.ports import DIRECTORY, RELAY, Egress, TlsPort
from swarm.link.egress.streams import bracketed
from swarm.reach.relay import server
from swarm.reach.relay.tls_port import TlsEntry
from swarm.reach.relay.visits import RelayLimits
from tests.net.relay_kit import HOST, LiveRelay, accepted, connect, dialled, echo, open_relay, serving
from tests.unit.swarm.reach.relay.test_client_hello import HELLO, client_hello

NOBODY = Identity.ephemeral().peer_id


@asynccontextmanager
async def tls_relay(
    directory: str = "", limits: RelayLimits | None = None, host: str = HOST
) -> AsyncIterator[tuple[LiveRelay, TlsPort]]:
    """A relay with a TLS port."""
    async with open_relay(limits=limits) as relay:
        peer = relay.owner.peer_id
        async with relay.server.listening(host, 0, TlsEntry(peer, directory)) as port:
            yield relay, TlsPort(peer, f"{bracketed(host)}:{port}")


async def test_a_machine_is_reached_through_it() -> None:
    async with tls_relay() as (relay, port), serving(relay, echo) as here:
        streams = await Egress().open_tls(port, RELAY)
        streams.writer.write(connect(here.identity.peer_id))
        assert await accepted(streams.reader)
        sent = bytes(range(256)) * 4_000
        streams.writer.write(sent)
        assert await streams.reader.readexactly(len(sent)) == sent
        assert relay.server.load.circuits == 1
        streams.abort()


@asynccontextmanager
async def service() -> AsyncIterator[tuple[str, asyncio.Queue[str]]]:
    """A service of this machine that speaks first; where its callers come from."""
    came: asyncio.Queue[str] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.put_nowait(writer.get_extra_info("peername")[0])
        writer.write(b"hello")
        writer.write(await reader.read(100))
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(answer, HOST, 0)
    async with listening:
        yield f"{HOST}:{listening.sockets[0].getsockname()[1]}", came


@pytest.mark.parametrize("host", [HOST, "::1"])
async def test_the_directory_sees_an_address_that_stands_for_who_comes(host: str) -> None:
    async with service() as (address, came), tls_relay(address, host=host) as (_, port):
        streams = await Egress().open_tls(port, DIRECTORY)
        streams.writer.write(b" you")
        assert await streams.reader.readexactly(9) == b"hello you"
        assert await came.get() == stand_in("TlsEntry", host)
        streams.abort()


async def test_what_is_not_offered_is_closed() -> None:
    async with tls_relay() as (_, port):
        for protocol in (DIRECTORY, "h2"):
            with pytest.raises(ConnectionRefusedError, match=protocol):
                await Egress().open_tls(port, protocol)
        (await Egress().open_tls(port, RELAY)).abort()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"HERE Qm\n", client_hello(), bytes(9_000)])
async def test_what_asks_for_nothing_is_closed(said: bytes) -> None:
    async with tls_relay() as (_, port), dialled(int(port.address.rpartition(":")[2]), said) as (reader, _):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""


@pytest.mark.parametrize("pieces", [HELLO[:40], HELLO], ids=["half a hello", "no handshake"])
async def test_who_is_slow_is_closed(pieces: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "OPENING_S", 0.1)
    async with tls_relay() as (relay, port), dialled(int(port.address.rpartition(":")[2]), pieces) as (reader, _):
        async with asyncio.timeout(5):
            await reader.read()
        assert relay.server._visits._quota.total("openings") == 0


async def test_a_hello_in_small_pieces_is_heard() -> None:
    async with tls_relay() as (relay, port), serving(relay, echo) as here:
        reader, writer = await asyncio.open_connection(HOST, int(port.address.rpartition(":")[2]))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols([RELAY])
        came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = context.wrap_bio(came, goes)
        while True:
            try:
                session.do_handshake()
            except ssl.SSLWantReadError:
                for byte in goes.read():
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0)
                came.write(await reader.read(65_536))
            else:
                break
        session.write(connect(here.identity.peer_id))
        writer.write(goes.read())
        async with asyncio.timeout(5):
            said = b""
            while b"200" not in said:
                came.write(await reader.read(65_536))
                try:
                    said += session.read(100)
                except ssl.SSLWantReadError:
                    continue
        writer.transport.abort()


async def test_it_charges_the_address_that_somebody_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.reach.relay.visits.is_private", lambda key: False)
    limits = RelayLimits(connections=HoldingLimit(2, 100))
    async with service() as (address, _), tls_relay(address, limits) as (relay, port):
        held = [await Egress().open_tls(port, DIRECTORY) for _ in range(2)]
        with pytest.raises(ConnectionRefusedError):
            await Egress().open_tls(port, DIRECTORY)
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            async with relay.dial(b"LOAD\n") as (reader, _):
                await reader.readexactly(1)
        async with relay.dial(b"LOAD\n", source="127.0.0.77") as (reader, _):
            assert (await reader.readline()).startswith(b"LOAD 0 ")
        for streams in held:
            streams.abort()


async def test_it_leads_on_to_listed_nodes_and_the_plain_port_does_not() -> None:
    async with service() as (address, _), tls_relay() as (relay, port):
        asked: list[PeerId] = []

        async def find(peer: PeerId) -> str:
            asked.append(peer)
            return address if len(asked) == 1 else ""

        relay.server.lead_beyond(find)
        assert (await relay.ask(connect(NOBODY))).startswith(b"HTTP/1.1 404")
        assert not asked
        streams = await Egress().open_tls(port, RELAY)
        streams.writer.write(connect(NOBODY) + b" you")
        assert await accepted(streams.reader)
        assert await streams.reader.readexactly(9) == b"hello you"
        assert asked == [NOBODY]
        streams.abort()
        streams = await Egress().open_tls(port, RELAY)
        streams.writer.write(connect(NOBODY))
        assert (await streams.reader.readline()).startswith(b"HTTP/1.1 404 no listed node")
        streams.abort()


async def test_it_leads_to_a_node_behind_another_relay() -> None:
    async with open_relay() as other, serving(other, echo) as here, tls_relay() as (relay, port):

        async def find(peer: PeerId) -> str:
            return f"{peer}.via.{other.address}"

        relay.server.lead_beyond(find)
        streams = await Egress().open_tls(port, RELAY)
        streams.writer.write(connect(here.identity.peer_id))
        assert await accepted(streams.reader)
        streams.writer.write(b"over two")
        assert await streams.reader.readexactly(8) == b"over two"
        streams.abort()


async def test_who_wants_other_nodes_too_often_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.reach.relay.visits.is_private", lambda key: False)
    async with tls_relay(limits=RelayLimits(beyond=RateLimit(0.001, 1.0, 10.0, 80.0))) as (relay, port):

        async def find(peer: PeerId) -> str:
            return ""

        relay.server.lead_beyond(find)
        answers = []
        for _ in range(2):
            streams = await Egress().open_tls(port, RELAY)
            streams.writer.write(connect(NOBODY))
            answers.append((await streams.reader.readline()).split()[1])
            streams.abort()
        assert answers == [b"404", b"429"]
