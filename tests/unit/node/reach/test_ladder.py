"""The ladder takes the first rung that a dial-back proves, and says what it tried where none holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from node.reach.ladder import Ladder, Rungs
from swarm.discovery.identity import Identity
from swarm.discovery.node_record import Reach
from swarm.errors import ConfigError
from swarm.gateway.ports import NoMapping

PEER = Identity.ephemeral().peer_id
OWN, OUTSIDE, RELAY, OTHER = "192.168.1.7:80", "203.0.113.5:80", "198.51.100.1:7", "198.51.100.2:7"


@dataclass
class FakeRelays:
    relays: tuple[str, ...] = (RELAY, OTHER)
    troubles: tuple[str, ...] = ()

    def prefer_other(self) -> None:
        self.relays = self.relays[1:] + self.relays[:1]

    async def stands(self, limit_s: float) -> bool:
        return bool(self.relays)


@dataclass
class World:
    """Peers that give these verdicts, and a router that maps or does not."""

    verdicts: Mapping[str, bool | None] = field(default_factory=dict)
    mapped: str | None = None
    relays: FakeRelays = field(default_factory=FakeRelays)
    asked: list[str] = field(default_factory=list)
    unmapped: int = 0
    leads_here: bool = True

    async def dial_back(self, address: str) -> bool | None:
        self.asked.append(address)
        return self.verdicts.get(address, False)

    async def call_self(self, address: str) -> bool:
        return self.leads_here

    async def map_port(self) -> tuple[str, str]:
        if self.mapped is None:
            raise NoMapping("PCP: no answer")
        return self.mapped, "PCP"

    async def unmap(self) -> None:
        self.unmapped += 1

    def rungs(self, *own: str) -> Rungs:
        return Rungs(
            peer=PEER,
            announced=None,
            own=lambda: own,
            fallback=OWN,
            is_first=False,
            dial_back=self.dial_back,
            call_self=self.call_self,
            map_port=self.map_port,
            unmap=self.unmap,
            relays=lambda: cast("Any", self.relays),
        )


async def test_an_own_address_that_peers_call_is_direct() -> None:
    world = World({OUTSIDE: True}, mapped="203.0.113.9:1")
    reached = await Ladder(world.rungs(OWN, OUTSIDE)).climb()
    assert (reached.address, reached.reach) == (OUTSIDE, Reach.DIRECT)
    assert world.asked == [OWN, OUTSIDE]


async def test_the_first_machine_of_a_swarm_asks_nobody_and_maps_nothing() -> None:
    world = World({OWN: None}, mapped=OUTSIDE)
    reached = await Ladder(replace(world.rungs(OWN), is_first=True)).climb()
    assert (reached.address, reached.reach) == (OWN, Reach.DIRECT)
    assert "first machine" in reached.why


async def test_what_is_announced_is_not_second_guessed() -> None:
    world = World({OUTSIDE: True}, mapped=OUTSIDE)
    rungs = replace(world.rungs(OWN), announced=OUTSIDE)
    assert (await Ladder(rungs).climb()).reach is Reach.DIRECT
    with pytest.raises(ConfigError, match=r"peers cannot reach node\.example:80: open or forward the port"):
        await Ladder(replace(rungs, announced="node.example:80")).climb()
    assert world.asked == [OUTSIDE, "node.example:80"]


async def test_a_mapped_port_counts_once_peers_come_through() -> None:
    world = World({OUTSIDE: True}, mapped=OUTSIDE)
    reached = await Ladder(world.rungs(OWN)).climb()
    assert (reached.address, reached.reach) == (OUTSIDE, Reach.MAPPED)
    assert "PCP" in reached.why
    assert not world.unmapped


async def test_a_mapping_behind_another_router_is_given_back() -> None:
    world = World({f"{PEER}.via.{RELAY}": True}, mapped=OUTSIDE)
    ladder = Ladder(world.rungs())
    reached = await ladder.climb()
    assert (reached.address, reached.reach) == (f"{PEER}.via.{RELAY}", Reach.RELAYED)
    assert world.unmapped == 1
    assert any("another router" in line for line in ladder.tried)


async def test_a_relay_that_leads_nowhere_is_left_for_the_other() -> None:
    world = World({f"{PEER}.via.{OTHER}": True})
    reached = await Ladder(world.rungs()).climb()
    assert reached.address == f"{PEER}.via.{OTHER}"
    assert world.relays.relays[0] == OTHER


async def test_in_a_hurry_a_relay_that_leads_here_is_enough() -> None:
    world = World({OUTSIDE: False})
    assert (await Ladder(world.rungs(OUTSIDE)).climb(quickly=True)).address == f"{PEER}.via.{RELAY}"
    assert world.asked == [OUTSIDE]
    world.leads_here = False
    with pytest.raises(ConfigError):
        await Ladder(world.rungs(OUTSIDE)).climb(quickly=True)


async def test_busy_peers_prove_nothing() -> None:
    """Where no peer could be asked, a relay is surer than an address that nobody tried."""
    world = World({OWN: None, f"{PEER}.via.{RELAY}": True})
    assert (await Ladder(world.rungs(OWN)).climb()).reach is Reach.RELAYED
    without = replace(world.rungs(OWN), relays=None)
    assert (await Ladder(without).climb()).address == OWN


async def test_no_way_in_says_what_was_tried() -> None:
    world = World(relays=FakeRelays((), ("198.51.100.1:7: does not answer",)))
    ladder = Ladder(world.rungs(OWN))
    with pytest.raises(ConfigError) as caught:
        await ladder.climb()
    assert "\n" not in str(caught.value)
    assert [line.partition(":")[0] for line in ladder.tried] == ["direct", "mapped", "relayed"]
    assert "198.51.100.1:7: does not answer" in ladder.tried[2]


async def test_what_the_user_forbids_is_not_tried() -> None:
    world = World({OUTSIDE: True}, mapped=OUTSIDE)
    ladder = Ladder(replace(world.rungs(OWN), map_port=None, relays=None))
    with pytest.raises(ConfigError):
        await ladder.climb()
    assert "--no-port-mapping" in ladder.tried[1]
    assert "--relay off" in ladder.tried[2]


async def test_where_large_packets_do_not_pass_a_relay_is_tried_first() -> None:
    world = World({OWN: True, f"{PEER}.via.{RELAY}": True})
    rungs = replace(world.rungs(OWN), is_narrow=True)
    assert (await Ladder(rungs).climb()).reach is Reach.RELAYED
    assert (await Ladder(replace(rungs, relays=None)).climb()).reach is Reach.DIRECT
    world.relays = FakeRelays(())
    assert (await Ladder(rungs).climb()).reach is Reach.DIRECT
