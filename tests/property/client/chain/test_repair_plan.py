"""Repairs in worlds where machines die, fall silent, come back and leave at random: what holds whatever happens."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import cast

import pytest

from client.chain.blame import SUSPECT_S
from client.chain.repair_plan import (
    READY_S,
    RETRY_S,
    Finish,
    Freshness,
    GiveUp,
    HoldSurvivors,
    Log,
    NoRouteFound,
    Pause,
    RepairPlan,
    RepairStep,
    RouteAttached,
    RouteFound,
    RouteSearch,
    TakeRoute,
    Wait,
)
from swarm.base.errors import (
    Busy,
    HopError,
    HopTimeout,
    Unreachable,
)
from swarm.protocol.messages import RouteHop
from swarm.routing.route import Route
from tests.planned_session import MISSING, SPANS, PlannedSession, leaves, route

KNOWN, KNOWN_AND_ASK, ASKED = Freshness

MACHINES = dict(zip("ABCabcde", (*SPANS, *SPANS, SPANS[1], SPANS[1]), strict=True))
"""Of whom those with capital letters never leave."""


@dataclass(slots=True)
class World:
    """Machines that die, fall silent, come back and leave; a directory that lists some of them; a session.

    Every step is checked as it is carried out. A machine that comes back has lost its session: its stream is `broken`
    until a new route opens another one, and that was reported once.

    Attributes:
        unrest: how likely something happens to some machine while time passes.
        healing: how likely a machine comes back then, if it is its turn.
        since_s: when a repair began for the first time since the latest answer.
        round: the searches since the last other step; found: what the newest one found.
    """

    rng: Random
    session: PlannedSession
    wait_s: float
    unrest: float
    healing: float
    seen: Counter[str]
    down: dict[str, type[HopError]] = field(default_factory=dict)
    unlisted: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    lost_s: dict[str, tuple[float, HopError]] = field(default_factory=dict)
    since_s: float | None = None
    round: list[RouteSearch] = field(default_factory=list)
    round_s: float = 0.0
    found: Route | None = None
    is_reroute_lost: bool = False
    is_calm: bool = False
    is_over: bool = False
    attempts: int = 0

    def act(self) -> None:
        """Something happens to some machine, sometimes."""
        if self.is_calm or self.rng.random() > self.unrest:
            return
        peer = self.rng.choice(list(MACHINES))
        match self.rng.randrange(6):
            case 0:
                self.down[peer] = self.rng.choice([Unreachable, HopTimeout, Busy])
                self.tell_of(peer)
            case 1 | 2 | 3 if self.rng.random() < self.healing:
                self.down.pop(peer, None)
            case 4:
                self.unlisted ^= {peer}
            case 5 if peer.islower():
                self.leaving.add(peer)
                self.session.report(leaves(peer))
            case _:
                pass

    @property
    def everybody(self) -> list[str]:
        """All machines of the route."""
        return [hop.peer for hop in (*self.session.plan.route.hops, *self.session.plan.route.replicas)]

    def tell_of(self, *peers: str) -> None:
        """Machines of the route that are down are reported."""
        for peer in sorted(set(self.everybody).intersection(peers) & set(self.down)):
            error = self.down[peer](peer, "?", "lost")
            self.broken.add(peer)
            self.lost_s[peer] = self.session.now_s, error
            self.session.report(error)

    def lost_within(self, seconds: float, now_s: float, *kinds: type[HopError]) -> set[str]:
        return {peer for peer, (at, error) in self.lost_s.items() if now_s - at < seconds and isinstance(error, kinds)}

    def pick(self, avoid: frozenset[str], keep: tuple[RouteHop, ...]) -> Route | None:
        """A route of listed machines, those to keep first; the directory does not know who is down."""
        hops: list[str] = []
        for span in SPANS:
            able = [p for p, s in MACHINES.items() if s == span and p not in avoid and p not in self.unlisted]
            if not able:
                return None
            kept = [hop.peer for hop in keep if hop.peer in able]
            hops.append(kept[0] if kept else self.rng.choice(able))
        spare = [p for p, s in MACHINES.items() if s == SPANS[1] and p not in {*hops, *avoid, *self.unlisted}]
        return route(cast("str", hops), self.rng.choice(spare) if spare and self.rng.random() < 0.3 else "")

    def carry_out(self, step: RepairStep) -> None:
        if not isinstance(step, RouteSearch) and self.round:
            self.end_round()
        if self.session.plan.is_repairing and self.since_s is None:
            self.since_s = self.session.now_s
        self.do(step)
        if self.since_s is not None:
            assert self.session.now_s - self.since_s < self.wait_s + 2 * READY_S, "it neither stands nor gives up"

    def do(self, step: RepairStep) -> None:
        session, plan = self.session, self.session.plan
        match step:
            case Wait(limit_s):
                self.wait(10.0 if limit_s is None else limit_s)
            case Pause(seconds):
                session.now_s += seconds
                self.act()
            case HoldSurvivors(hops):
                assert not {hop.peer for hop in hops} & set(self.lost_s)
            case RouteSearch():
                self.search(step)
            case TakeRoute(taken, generation):
                assert (taken, generation) == (self.found, plan.generation)
                self.broken.clear()
                self.tell_of(*self.everybody)
                self.is_reroute_lost = not self.is_calm and self.rng.random() < 0.2
                self.seen["later attempts"] += plan.is_repairing and self.attempts > 0
                self.attempts += 1
            case Finish(repair):
                assert (plan.is_attached, plan.lost) == (True, set())
                assert repair.generation == plan.generation
                self.seen["moves" if repair.is_move else "repairs"] += 1
                self.attempts = 0
            case GiveUp():
                assert self.since_s is not None, "a move never ends a session"
                assert session.now_s - self.since_s > self.wait_s
                self.is_over = True
                self.seen["gave up"] += 1
            case Log(level, message):
                self.seen["warnings"] += level == logging.WARNING
                self.seen["not in time"] += "not stand in time" in message

    def wait(self, limit_s: float) -> None:
        """Time passes; a chain that is well answers, or is attached."""
        session, plan = self.session, self.session.plan
        assert limit_s > 0
        session.now_s += min(self.rng.uniform(0.01, 3.0), limit_s)
        self.act()
        if any(hop.peer in self.broken for hop in plan.route.hops):
            return
        if plan.is_attached:
            session.answers += 1
            self.since_s = None
        elif not self.is_reroute_lost:
            session.report(RouteAttached(plan.generation))

    def search(self, search: RouteSearch) -> None:
        now_s = self.session.now_s
        if not self.round:
            self.round_s = now_s
        suspected = self.lost_within(SUSPECT_S, self.round_s, HopError) | self.leaving
        assert search.avoid <= suspected, "it avoids a machine that nobody complained of"
        assert not {hop.peer for hop in search.keep} & suspected, "it keeps a suspected machine"
        assert {hop.peer for hop in search.keep} >= {hop.peer for hop in self.session.plan.route.hops} - suspected
        self.round.append(search)
        self.seen["asked again at once"] += search.freshness is KNOWN_AND_ASK
        self.found = self.pick(search.avoid, search.keep)
        self.session.report(NoRouteFound(MISSING) if self.found is None else RouteFound(self.found))

    def end_round(self) -> None:
        """Where nobody was found, all were asked but those that were lost just now, or it is a move."""
        last = self.round[-1]
        assert self.round[0].freshness is KNOWN
        if self.found is None:
            assert any(search.freshness is ASKED for search in self.round)
            self.seen["rounds without a route"] += 1
            if self.session.plan.is_repairing:
                assert last.avoid <= self.lost_within(RETRY_S, self.round_s, Unreachable, HopTimeout)
        self.round.clear()

    def run(self, steps: int) -> None:
        """So many steps in which anything may happen; then all machines are well but those that leave."""
        while steps and not self.is_over:
            self.carry_out(self.session.step())
            steps -= 1
        self.is_calm = True
        self.down.clear()
        self.unlisted = set(self.leaving)
        calm_s, plan = self.session.now_s, self.session.plan
        while not self.is_over and self.session.now_s < calm_s + SUSPECT_S + 3 * READY_S:
            self.carry_out(self.session.step())
        if not self.is_over:
            assert (plan.is_attached, plan.is_repairing) == (True, False)
            assert not {hop.peer for hop in plan.route.hops} & self.leaving


OFTEN = {  # at least, in a block of 100 worlds
    "repairs": 50,
    "moves": 50,
    "later attempts": 200,
    "rounds without a route": 400,
    "asked again at once": 10,
    "not in time": 20,
    "warnings": 15,
    "gave up": 15,
}


@pytest.mark.parametrize("block", range(3))
def test_whatever_happens_every_repair_ends_and_avoids_the_right_machines(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(100 * block, 100 * block + 100):
        rng = Random(seed)
        wait_s = rng.choice([5.0, 30.0])
        session = PlannedSession(RepairPlan(route("abc", "d"), wait_s))
        session.report(RouteAttached(0))
        world = World(rng, session, wait_s, rng.choice([0.03, 0.1, 0.3]), rng.choice([0.3, 1.0, 1.0]), seen)
        world.run(rng.randrange(20, 1000))
    assert {kind: seen[kind] for kind, least in OFTEN.items() if seen[kind] < least} == {}
