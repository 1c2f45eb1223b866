"""How the directory is reached: directly where that works, else in small packets, by a TLS port, or a proxy."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId
from swarm.directory.dht.addresses import (
    DhtConfig,
    ListenAddresses,
    Membership,
    PeerSource,
    check_join_address,
    listen_addresses,
)
from swarm.directory.dht.way_out import WayOut, find_way_out, read_egress
from swarm.link.egress.path_probe import PathVerdict
from swarm.link.egress.ports import Egress, TlsPort
from swarm.link.egress.proxy import HttpProxy

PEER = "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWKGrQD"
PLAIN, OTHER = f"/ip4/192.0.2.1/tcp/31337/p2p/{PEER}", f"/ip6/2001:db8::1/tcp/31337/p2p/{PEER}"
TLS, UDP = f"/dns4/peer.example/tcp/443/tls/p2p/{PEER}", f"/ip4/192.0.2.1/udp/31337/quic/p2p/{PEER}"
PORT = TlsPort(PeerId(PEER), "peer.example:443")


async def way_out(*join: str, proxy: str | None = None, **verdicts: PathVerdict) -> tuple[WayOut, list[str]]:
    """The way that is chosen, and what was probed."""
    listen = listen_addresses(DhtConfig(join=join, client_mode=True, membership=Membership(proxy=proxy)))
    probed: list[str] = []

    async def probe(address: str) -> PathVerdict:
        probed.append(address)
        return verdicts.get("v6" if address.startswith("[") else "v4", PathVerdict.SILENT)

    async with AsyncExitStack() as stack:
        return await find_way_out(listen, stack, probe), probed


async def test_who_is_reached_plainly_is_dialled_so() -> None:
    way, probed = await way_out(PLAIN, OTHER, TLS, v6=PathVerdict.PASSES)
    assert (way.join, way.egress) == ((PLAIN, OTHER), None)
    assert sorted(probed) == ["192.0.2.1:31337", "[2001:db8::1]:31337"]


async def test_libp2p_is_not_told_of_who_says_nothing_where_another_answers() -> None:
    """It would wait for each of them in turn, although they take connections."""
    way, _ = await way_out(PLAIN, UDP, OTHER, v6=PathVerdict.PASSES)
    assert (way.join, way.answering) == ((PLAIN, UDP, OTHER), (UDP, OTHER))
    way, _ = await way_out(PLAIN, OTHER)
    assert way.answering == (), "they may only be slow"


async def test_nobody_waits_long_for_a_second_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.directory.dht.way_out.OTHERS_S", 0.0)

    async def probe(address: str) -> PathVerdict:
        if not address.startswith("["):
            await asyncio.Event().wait()
        return PathVerdict.PASSES

    listen = listen_addresses(DhtConfig(join=(PLAIN, OTHER), client_mode=True))
    async with asyncio.timeout(5), AsyncExitStack() as stack:
        assert (await find_way_out(listen, stack, probe)).answering == (OTHER,)


async def test_where_small_packets_pass_alone_the_daemon_is_led_on() -> None:
    way, _ = await way_out(PLAIN, OTHER, TLS, v4=PathVerdict.SMALL_ONLY)
    assert way.egress == Egress((PORT,), is_narrow=True)
    assert list(way.meant.values()) == [PLAIN]
    (local,) = way.join
    assert local.startswith("/ip4/127.0.0.1/tcp/")
    assert local.endswith(f"/p2p/{PEER}")


async def test_where_nothing_answers_a_tls_port_is_taken() -> None:
    way, _ = await way_out(PLAIN, TLS)
    assert way.egress == Egress((PORT,))
    assert list(way.meant.values()) == [TLS]


async def test_without_a_tls_port_it_is_tried_as_usual() -> None:
    way, _ = await way_out(PLAIN, UDP)
    assert (way.join, way.egress) == ((PLAIN, UDP), None)


async def test_a_proxy_is_used_for_everything() -> None:
    way, probed = await way_out(PLAIN, TLS, proxy="http://me:secret@proxy.example:8080", v4=PathVerdict.PASSES)
    assert way.egress == Egress((PORT,), HttpProxy("proxy.example", 8080, "me:secret"))
    assert list(way.meant.values()) == [TLS, PLAIN]
    assert not probed
    assert "secret" not in repr(way)


async def test_who_is_led_on_to_keeps_its_source_and_is_named_as_it_was_typed() -> None:
    sources = {OTHER: PeerSource(2, "remembered"), TLS: PeerSource(1, "from CANOPY_JOIN")}
    membership = Membership(proxy="http://proxy.example", sources=sources)
    listen = listen_addresses(DhtConfig(join=(PLAIN, OTHER, TLS), client_mode=True, membership=membership))
    async with AsyncExitStack() as stack:
        way = await find_way_out(listen, stack)
        led = way.led(listen)
    assert led.join == way.join
    assert [rank for rank, _ in led.sources] == [1, 0, 2]
    assert way.as_named(led.listed()) == f"{TLS} (from CANOPY_JOIN), {PLAIN} (from --join), {OTHER} (remembered)"


async def test_a_forwarder_tells_why_it_leads_nowhere() -> None:
    listen = ListenAddresses((PLAIN,), (), None, client=True, proxy="http://127.0.0.1:1")
    async with AsyncExitStack() as stack:
        way = await find_way_out(listen, stack)
        ((local, forwarder),) = way.forwarders.items()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(local.rpartition("/")[2]))
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        assert forwarder.trouble
        assert way.trouble == forwarder.trouble


@pytest.mark.parametrize("egress", [None, Egress((PORT,), is_narrow=True)])
def test_the_parent_learns_the_way(egress: Egress | None) -> None:
    assert read_egress(WayOut((), egress).describe(), None) == egress


@pytest.mark.parametrize("address", [TLS, f"/ip6/::1/tcp/443/tls/p2p/{PEER}", PLAIN, UDP])
def test_a_join_address_may_name_a_tls_port(address: str) -> None:
    check_join_address(address)


@pytest.mark.parametrize(
    "address",
    [f"/ip4/192.0.2.1/udp/443/tls/p2p/{PEER}", f"/dns/x/tcp/0/tls/p2p/{PEER}", f"/dns/x/tcp/443/tls/tls/p2p/{PEER}"],
)
def test_what_names_no_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        check_join_address(address)
