"""What a serving node does when the way in to it changes: by a fake clock, in time, and not over and over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from node.life.reach.ladder import Reached, Whereabouts
from node.life.reach.watch import (
    AGAIN_S,
    BETTER_S,
    DIAL_BACK_S,
    LOOK_S,
    RELAY_GRACE_S,
    Senses,
    Sight,
    Watch,
    WatchMove,
    decide,
)
from swarm.base.errors import ConfigError
from swarm.directory.identity import Identity
from swarm.directory.node_record import Reach

PEER = Identity.ephemeral().peer_id
ONE, TWO = "198.51.100.1:7", "198.51.100.2:7"
DIRECT = Reached("203.0.113.5:80", Reach.DIRECT, "direct")
MAPPED = Reached("203.0.113.5:81", Reach.MAPPED, "mapped")
RELAYED = Reached(f"{PEER}.via.{ONE}", Reach.RELAYED, "relayed")
HOME = Sight(own=("192.168.1.7",), mapped=MAPPED.address, relays=(ONE, TWO))
NOTICED_S = 30.0
"""Within this, whatever changed has to be announced anew."""


@pytest.mark.parametrize(
    ("reached", "now", "move"),
    [
        (DIRECT, HOME, WatchMove.STAY),
        (DIRECT, replace(HOME, is_reached=True), WatchMove.STAY),
        (DIRECT, replace(HOME, is_reached=False), WatchMove.CLIMB),
        (DIRECT, replace(HOME, mapped=None, relays=()), WatchMove.STAY),
        (DIRECT, replace(HOME, own=("10.0.0.3",)), WatchMove.CLIMB),
        (MAPPED, HOME, WatchMove.STAY),
        (MAPPED, replace(HOME, mapped=None), WatchMove.CLIMB),
        (MAPPED, replace(HOME, mapped="203.0.113.99:81"), WatchMove.CLIMB),
        (RELAYED, HOME, WatchMove.STAY),
        (RELAYED, replace(HOME, mapped=None), WatchMove.STAY),
        (RELAYED, replace(HOME, relays=(TWO, ONE)), WatchMove.STAY),
        (RELAYED, replace(HOME, relays=(TWO,)), WatchMove.OTHER_RELAY),
        (RELAYED, replace(HOME, is_reached=False), WatchMove.CLIMB),
    ],
)
def test_what_follows_from_a_look(reached: Reached, now: Sight, move: WatchMove) -> None:
    assert decide(reached, HOME, now, alone_s=0.0)[0] is move


def test_a_lost_relay_is_waited_for_a_moment() -> None:
    alone = replace(HOME, relays=())
    assert decide(RELAYED, HOME, alone, alone_s=RELAY_GRACE_S / 2)[0] is WatchMove.STAY
    assert decide(RELAYED, HOME, alone, alone_s=RELAY_GRACE_S)[0] is WatchMove.CLIMB


@dataclass
class Home:
    """A machine whose surroundings a test changes; time passes only in `pass_s`."""

    sight: Sight = HOME
    is_reached: bool | None = True
    next_rung: Reached | None = None
    now: float = 0.0
    said: list[str] = field(default_factory=list)
    announced: list[tuple[float, str]] = field(default_factory=list)
    climbs: list[float] = field(default_factory=list)
    dialled: list[float] = field(default_factory=list)

    def begin(self, reached: Reached) -> None:
        self.whereabouts = Whereabouts(reached)
        senses = Senses(PEER, lambda: self.sight, self._dial_back, self._climb, self._announce, self.said.append)
        self.watch = Watch(self.whereabouts, senses, lambda: self.now)

    async def pass_s(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += LOOK_S
            await self.watch.look()

    async def _dial_back(self, address: str) -> bool | None:
        self.dialled.append(self.now)
        return self.is_reached

    async def _climb(self, quickly: bool) -> Reached:
        self.climbs.append(self.now)
        self.was_quick = quickly
        if self.next_rung is None:
            raise ConfigError("no way in")
        return self.next_rung

    async def _announce(self) -> None:
        self.announced.append((self.now, self.whereabouts.now.address))


async def test_a_quiet_home_is_asked_about_and_announced_no_more() -> None:
    home = Home()
    home.begin(DIRECT)
    await home.pass_s(300)
    assert not home.announced
    assert not home.climbs
    assert len(home.dialled) == pytest.approx(300 / DIAL_BACK_S, abs=1), "and peers answer six a minute"


@pytest.mark.parametrize(
    "change",
    [
        {"is_reached": False},
        {"sight": replace(HOME, own=("10.9.9.9",))},
        {"sight": replace(HOME, mapped=None)},
        {"sight": replace(HOME, mapped="203.0.113.99:81")},
    ],
)
async def test_a_way_in_that_is_lost_is_announced_anew_within_30_s(change: dict[str, object]) -> None:
    home = Home(next_rung=RELAYED)
    home.begin(MAPPED)
    await home.pass_s(100)
    began = home.now
    for name, value in change.items():
        setattr(home, name, value)
    await home.pass_s(NOTICED_S)
    assert [address for _, address in home.announced] == [RELAYED.address]
    assert home.announced[0][0] - began <= NOTICED_S
    assert home.whereabouts.now.reach is Reach.RELAYED
    assert len(home.said) == 1


async def test_a_router_that_does_not_answer_has_peers_asked_at_once_and_once() -> None:
    home = Home()
    home.begin(MAPPED)
    await home.pass_s(DIAL_BACK_S + LOOK_S)
    home.dialled.clear()
    home.sight = replace(HOME, is_doubtful=True)
    await home.pass_s(2 * LOOK_S)
    assert home.dialled == [home.now - LOOK_S]
    assert not home.climbs, "they come through yet"
    home.sight = HOME
    await home.pass_s(LOOK_S)
    home.sight, home.is_reached, home.next_rung = replace(HOME, is_doubtful=True), None, RELAYED
    await home.pass_s(LOOK_S)
    assert home.whereabouts.now.reach is Reach.RELAYED, "neither of them answers: the home's connections are gone"
    assert home.was_quick
    home.dialled.clear()
    await home.pass_s(LOOK_S)
    assert home.dialled, "what was taken without asking is asked about soon"


async def test_the_other_relay_is_announced_at_the_next_look_and_nobody_is_asked() -> None:
    home = Home()
    home.begin(RELAYED)
    home.sight = replace(HOME, relays=(TWO,))
    await home.pass_s(LOOK_S)
    assert home.announced == [(home.now, f"{PEER}.via.{TWO}")]
    assert not home.dialled
    assert not home.climbs
    home.sight = replace(HOME, relays=(TWO, ONE))
    await home.pass_s(30)
    assert len(home.announced) == 1, "the first one is back, and that is no reason to move again"


async def test_a_ladder_that_leads_nowhere_is_climbed_again_ever_more_seldom() -> None:
    home = Home()
    home.begin(RELAYED)
    home.sight = replace(HOME, relays=())
    await home.pass_s(600)
    assert not home.announced
    assert 3 <= len(home.climbs) <= 9
    assert home.climbs[1] - home.climbs[0] >= AGAIN_S
    home.sight, home.next_rung = HOME, RELAYED
    await home.pass_s(30)
    assert home.whereabouts.now == RELAYED
    assert not home.announced, "it is reached as before"


async def test_a_relayed_machine_looks_for_a_better_rung_at_times() -> None:
    home = Home(next_rung=RELAYED)
    home.begin(RELAYED)
    await home.pass_s(BETTER_S + LOOK_S)
    assert len(home.climbs) == 1
    home.next_rung = MAPPED
    await home.pass_s(BETTER_S + LOOK_S)
    assert [address for _, address in home.announced] == [MAPPED.address]


@pytest.mark.parametrize("change", [{"is_reached": False}, {"sight": replace(HOME, own=("198.51.100.77",))}])
async def test_a_changed_address_is_reached_directly_again_within_30_s(change: dict[str, object]) -> None:
    home = Home(next_rung=RELAYED)
    home.begin(DIRECT)
    await home.pass_s(100)
    began, moved = home.now, Reached("198.51.100.77:80", Reach.DIRECT, "direct")
    for name, value in change.items():
        setattr(home, name, value)
    while not home.announced:
        await home.pass_s(LOOK_S)
    home.is_reached, home.next_rung = True, moved  # the directory is back
    await home.pass_s(NOTICED_S - (home.now - began))
    assert [address for _, address in home.announced] == [RELAYED.address, moved.address]


async def test_where_nothing_better_comes_it_is_looked_for_ever_more_seldom() -> None:
    home = Home(next_rung=RELAYED)
    home.begin(DIRECT)
    home.sight = replace(HOME, own=("198.51.100.77",))
    await home.pass_s(3_600)
    gaps = [after - before for before, after in zip(home.climbs, home.climbs[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 3 * LOOK_S
    assert gaps[-1] >= BETTER_S
    assert len(home.climbs) <= 14
