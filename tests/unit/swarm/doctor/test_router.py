"""Troubles of the way in, each planted: symmetric routers, refused mappings, relays that are silent or full."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.directory.dht.about import About
from swarm.directory.dht.registry import PeerSurvey
from swarm.doctor.directory import SwarmView
from swarm.doctor.ladder import Diagnosis
from swarm.doctor.way_in import RelayWord, look_at_mapping, look_at_relays, look_at_router
from swarm.reach.gateway.ports import Mapping, NoMapping
from tests.one_diagnosis import assert_hint, assert_ok, assert_trouble, assert_unknown, ready

OWN = ("192.168.1.7", "127.0.0.1")
ONE, TWO = RelayWord("192.0.2.1", 3, 64, "203.0.113.9:40001"), RelayWord("192.0.2.2", 0, 64, "203.0.113.9:40001")


def view(*relays: str, seen: str = "") -> SwarmView:
    surveys = (PeerSurvey(PeerId("Qm"), 0.0, About("0.2.0", (2,), (1,), seen=seen)),)
    return SwarmView(surveys=surveys, relays=relays)


def router(*words: RelayWord, own: tuple[str, ...] = OWN, seen: str = "") -> Diagnosis:
    return look_at_router(own, words, view(seen=seen))


async def test_a_symmetric_router() -> None:
    other = RelayWord("192.0.2.2", 0, 64, "203.0.113.9:51234")
    await assert_hint(router(ONE, other), "symmetric", "no hole can be made", "--announce-address")
    elsewhere = RelayWord("192.0.2.2", 0, 64, "203.0.113.10:40001")
    await assert_hint(router(ONE, elsewhere), "symmetric", "no hole can be made", "forward a TCP port")
    same_relay = RelayWord("192.0.2.1", 0, 64, "203.0.113.9:51234")
    await assert_hint(router(ONE, same_relay), "symmetric", "no hole can be made", "forward a TCP port")


async def test_a_cone_a_direct_way_and_what_is_not_known() -> None:
    await assert_ok(router(ONE, TWO), "cone")
    await assert_ok(router(ONE, TWO, own=("203.0.113.9",)), "direct")
    await assert_ok(router(seen="192.168.1.7"), "direct")
    await assert_ok(router(ONE), "router-unknown")
    await assert_ok(router(ONE, RelayWord("2001:db8::1", 0, 64, "[2001:db8::7]:51234")), "router-unknown")
    await assert_ok(router(ONE, RelayWord("192.0.2.1", 0, 64, "203.0.113.9:40001")), "router-unknown")
    await assert_ok(router(seen="203.0.113.9"), "router-unknown")
    await assert_ok(router(ONE, RelayWord("192.0.2.2", 0, 64, "nonsense")), "router-unknown")
    await assert_ok(router(own=("8.8.8.8",)), "public-address")
    await assert_ok(router(), "router-untried")


@dataclass
class PlantedRouter:
    """A way to ask a router that gives this, or fails so."""

    name: str
    outcome: str | Exception
    is_mapped: bool = False

    async def map(self, external_port: int, lifetime_s: int) -> Mapping:
        assert 0 < lifetime_s <= 120
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.is_mapped = True
        return Mapping(self.outcome, 40_000, lifetime_s, self.name)

    async def holds(self) -> bool:
        return self.is_mapped

    async def unmap(self) -> None:
        self.is_mapped = False
        raise TimeoutError


SILENT = PlantedRouter("NAT-PMP", TimeoutError())


def mapping(*routers: PlantedRouter, seen: tuple[str, ...] = ()) -> Awaitable[Diagnosis]:
    return look_at_mapping(routers, ready(seen))


async def test_a_router_that_refuses_to_map() -> None:
    refusing = PlantedRouter("PCP", RemoteProtocolError("result", "does not allow it"))
    text = "refuses to map a port: PCP does not allow it"
    await assert_hint(mapping(refusing, SILENT), "mapping-refused", text, "allow it in the router's settings")
    odd = PlantedRouter("UPnP", NoMapping("the router refuses: 718"))
    await assert_hint(mapping(SILENT, odd), "mapping-refused", "UPnP: the router refuses", "in the router's settings")


async def test_a_router_that_does_not_map() -> None:
    check = mapping(PlantedRouter("PCP", ConnectionRefusedError()), SILENT)
    await assert_hint(check, "no-mapping", "PCP: no answer, NAT-PMP: no answer", "switch UPnP or PCP on in the router")
    missing = PlantedRouter("UPnP", NoMapping("not tried: pip install 'canopy-swarm[upnp]' adds it"))
    await assert_hint(
        mapping(missing), "no-mapping", "UPnP: not tried: pip install 'canopy-swarm[upnp]'", "switch UPnP"
    )
    await assert_ok(mapping(), "mapping-untried")


async def test_a_router_behind_another_one() -> None:
    carrier = PlantedRouter("PCP", "100.70.1.2")
    await assert_hint(mapping(carrier), "double-router", "behind the provider's second router", "a public address")
    other = PlantedRouter("UPnP", "8.8.8.8")
    check = mapping(other, seen=("9.9.9.9",))
    await assert_hint(check, "double-router", "nobody reaches the mapped port", "rely on a relay")


async def test_a_mapping_is_given_back() -> None:
    mapper = PlantedRouter("PCP", "8.8.8.8")
    await assert_ok(mapping(SILENT, mapper, seen=("8.8.8.8",)), "mapping")
    assert not mapper.is_mapped
    await assert_ok(mapping(mapper, seen=("2001:db8::7",)), "mapping")


def relay(
    *words: RelayWord, listed: tuple[str, ...] = ("192.0.2.1:1", "192.0.2.2:1"), way_in: tuple[str, ...] = ("cone",)
) -> Diagnosis:
    return look_at_relays(words, view(*listed), way_in)


async def test_relays_that_do_not_answer() -> None:
    silent = RelayWord("192.0.2.1")
    await assert_trouble(relay(silent), "relay-silent", "none of 2 relays answers", "let outgoing TCP")
    await assert_hint(relay(silent, way_in=("direct",)), "relay-silent", "none of 2", "let outgoing TCP")
    await assert_hint(relay(silent, way_in=("symmetric", "mapping")), "relay-silent", "none of 2", "outgoing TCP")
    await assert_hint(relay(silent, way_in=("router-untried",)), "relay-silent", "none of 2", "let outgoing TCP")
    await assert_unknown(relay(silent, RelayWord("192.0.2.2", is_mute=True)), "say nothing in time")
    await assert_ok(relay(silent, TWO), "relay")


async def test_relays_that_are_full_or_not_there() -> None:
    full = RelayWord("192.0.2.1", 64, 64)
    await assert_hint(relay(full), "relays-full", "as many links as it takes", "lend one")
    await assert_hint(relay(listed=(), way_in=("direct",)), "no-relay", "the swarm has no relay", "swarm bootstrap")
    nobody = relay(listed=(), way_in=("cone", "double-router"))
    await assert_trouble(nobody, "no-way-in", "nobody can dial this machine", "forward a TCP port")
    await assert_ok(look_at_relays((), SwarmView(), ()), "relay-untried")
