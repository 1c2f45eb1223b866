"""What a client does about lost machines: situations and the steps that follow, and what holds whatever happens."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import cast

import pytest

from client.chain.repair_plan import (
    MOVE_S,
    READY_S,
    RETRY_S,
    SILENT_RETRIES,
    SUSPECT_S,
    Finish,
    Freshness,
    GiveUp,
    HoldSurvivors,
    Log,
    Moment,
    NoRouteFound,
    Pause,
    RepairEvent,
    RepairPlan,
    RepairStep,
    RouteAttached,
    RouteFound,
    RouteSearch,
    TakeRoute,
    TroubleReported,
    Wait,
)
from client.stats import Repair
from swarm.errors import (
    Busy,
    HopError,
    HopLeaving,
    HopTimeout,
    LocalProtocolError,
    RouteError,
    SwarmError,
    Unreachable,
)
from swarm.ids import PeerId
from swarm.layers import Span
from swarm.protocol.messages import Hedge, RouteHop
from swarm.routing.costs import RouteForecast
from swarm.routing.route import Route

SPANS = (Span(0, 4), Span(4, 8), Span(8, 12))
KNOWN, KNOWN_AND_ASK, ASKED = Freshness
MISSING = RouteError("nobody serves layers 4-8", ((4, 8),))
WAIT_S = 60.0


def route(peers: str, replica: str = "") -> Route:
    """A chain with a machine for each of the three spans, and a replica of the second one."""
    hops = tuple(RouteHop(PeerId(peer), span) for peer, span in zip(peers, SPANS, strict=True))
    hedge = Hedge(1, PeerId(replica)) if replica else None
    return Route(hops, (), (), 0.0, cast("RouteForecast", None), hedge=hedge)


def gone(peer: str) -> HopError:
    return Unreachable(peer, "?", "the stream broke")


def silent(peer: str) -> HopError:
    return HopTimeout(peer, "?", "is silent")


def full(peer: str) -> HopError:
    return Busy(peer, "?", "has no room")


def leaves(peer: str) -> HopError:
    return HopLeaving(peer, "?", "leaves")


@dataclass(slots=True)
class Session:
    """A session that asks a plan for its steps, at times that a test sets."""

    plan: RepairPlan
    now_s: float = 1000.0
    answers: int = 0
    is_answer_due: bool = True

    def report(self, *events: RepairEvent | SwarmError) -> None:
        for event in events:
            self.plan.report(TroubleReported(event) if isinstance(event, SwarmError) else event, self.now_s)

    def step(self, after_s: float = 0.0) -> RepairStep:
        self.now_s += after_s
        return self.plan.next_step(Moment(self.now_s, self.answers, self.is_answer_due))

    def until(self, kind: type[RepairStep]) -> RepairStep:
        """The next step of a kind; those before it are done, and no search finds anything."""
        for _ in range(20):
            match step := self.step():
                case _ if isinstance(step, kind):
                    return step
                case RouteSearch():
                    self.report(NoRouteFound(MISSING))
                case Pause(seconds):
                    self.now_s += seconds
                case _:
                    pass
        raise AssertionError(f"no {kind.__name__}")

    def repaired(self, peers: str) -> Finish:
        """Let the search that is next find this route, which is attached at once."""
        assert isinstance(self.until(RouteSearch), RouteSearch)
        self.report(RouteFound(route(peers)))
        taken = self.step()
        assert isinstance(taken, TakeRoute)
        self.report(RouteAttached(taken.generation))
        finish = self.step(0.1)
        assert isinstance(finish, Finish)
        return finish


@pytest.fixture
def session() -> Session:
    one = Session(RepairPlan(route("ABC"), WAIT_S))
    one.report(RouteAttached(0))
    assert one.step() == Wait(None)
    return one


# Which searches are tried, in this order


@dataclass(frozen=True, slots=True)
class Situation:
    """What was reported how many seconds ago, and the searches of the first round: freshness, avoid, keep."""

    reported: tuple[tuple[float, HopError], ...]
    searches: tuple[tuple[Freshness, str, str], ...]
    replica: str = ""


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param(
            Situation(((0, gone("B")),), ((KNOWN, "B", "AC"), (ASKED, "B", "AC"), (KNOWN, "B", "AC"))),
            id="gone: not asked again yet",
        ),
        pytest.param(
            Situation(((1, gone("B")),), ((KNOWN, "B", "AC"), (ASKED, "B", "AC"), (KNOWN, "", "AC"))),
            id="gone for a while: asked again where nobody else is left",
        ),
        pytest.param(
            Situation(
                ((0, silent("B")),),
                ((KNOWN, "B", "AC"), (KNOWN_AND_ASK, "", "AC"), (ASKED, "B", "AC"), (KNOWN, "B", "AC")),
            ),
            id="silent: asked again at once",
        ),
        pytest.param(
            Situation(
                ((0, gone("A")), (0, silent("B"))),
                ((KNOWN, "AB", "C"), (KNOWN_AND_ASK, "A", "C"), (ASKED, "AB", "C"), (KNOWN, "AB", "C")),
            ),
            id="one gone, one silent",
        ),
        pytest.param(
            Situation(((0, full("B")),), ((KNOWN, "B", "AC"), (ASKED, "B", "AC"), (KNOWN, "", "AC"))),
            id="full: asked again",
        ),
        pytest.param(
            Situation(((10, gone("A")), (0, gone("B"))), ((KNOWN, "AB", "C"), (ASKED, "AB", "C"), (KNOWN, "B", "C"))),
            id="another one was lost ten seconds ago",
        ),
        pytest.param(
            Situation(
                ((SUSPECT_S, gone("A")), (0, gone("B"))), ((KNOWN, "B", "AC"), (ASKED, "B", "AC"), (KNOWN, "B", "AC"))
            ),
            id="what was lost long ago is forgotten",
        ),
        pytest.param(
            Situation(((0, leaves("C")), (0, gone("B"))), ((KNOWN, "BC", "A"), (ASKED, "BC", "A"), (KNOWN, "B", "A"))),
            id="another one leaves",
        ),
        pytest.param(
            Situation(((0, leaves("B")),), ((KNOWN, "B", "AC"), (ASKED, "B", "AC"), (KNOWN, "B", "AC"))),
            id="one leaves: nobody is asked again",
        ),
        pytest.param(
            Situation(((0, gone("B")),), ((KNOWN, "B", "ACX"), (ASKED, "B", "ACX"), (KNOWN, "B", "ACX")), "X"),
            id="of two replicas the other one goes on",
        ),
        pytest.param(
            Situation(((0, silent("X")),), ((KNOWN, "X", "ABC"), (ASKED, "X", "ABC"), (KNOWN, "X", "ABC")), "X"),
            id="a replica is lost: the chain goes on meanwhile",
        ),
    ],
)
def test_the_searches_of_a_situation(situation: Situation) -> None:
    session = Session(RepairPlan(route("ABC", situation.replica), WAIT_S))
    assert session.step() == Wait(None)
    for age_s, error in situation.reported:
        session.plan.report(TroubleReported(error), session.now_s - age_s)
    searches: list[tuple[Freshness, str, str]] = []
    held = session.until(HoldSurvivors)
    assert session.step() == Pause(0.0)
    for freshness, avoid, keep in situation.searches:
        search = session.step()
        assert search == RouteSearch(freshness, frozenset(avoid), tuple(hop for peer in keep for hop in hops_of(peer)))
        searches.append((freshness, avoid, keep))
        session.report(NoRouteFound(MISSING))
    assert not isinstance(session.step(), RouteSearch)
    assert isinstance(held, HoldSurvivors)
    lost = {error.peer for _, error in situation.reported if not isinstance(error, HopLeaving)}
    assert [hop.peer for hop in held.hops] == [peer for peer in "ABC" + situation.replica if peer not in lost]


def hops_of(peer: str) -> list[RouteHop]:
    return [hop for hop in (*route("ABC", "X").hops, *route("ABC", "X").replicas) if hop.peer == peer]


def test_a_silent_machine_is_asked_again_so_often_and_then_no_more(session: Session) -> None:
    session.report(silent("B"))
    for attempt in range(SILENT_RETRIES):
        assert session.until(RouteSearch) == RouteSearch(KNOWN, frozenset("B"), route("ABC").hops[::2])
        session.report(NoRouteFound(MISSING))
        search = session.step()
        assert search == RouteSearch(KNOWN_AND_ASK, frozenset(), route("ABC").hops[::2])
        session.report(RouteFound(route("ABC")))
        assert session.step() == TakeRoute(route("ABC"), attempt + 1)
        assert session.step() == Wait(READY_S)
        session.report(silent("B"))
    session.until(RouteSearch)
    session.report(NoRouteFound(MISSING))
    assert session.step() == RouteSearch(ASKED, frozenset("B"), route("ABC").hops[::2])


# One repair from its beginning to its end


def test_a_lost_machine_is_replaced_step_by_step(session: Session) -> None:
    session.report(gone("B"))
    assert session.step() == HoldSurvivors(route("ABC").hops[::2])
    assert session.plan.is_repairing
    assert session.step() == Pause(0.0)
    assert session.step() == RouteSearch(KNOWN, frozenset("B"), route("ABC").hops[::2])
    session.report(RouteFound(route("ADC")))
    assert session.step() == TakeRoute(route("ADC"), 1)
    assert (session.plan.route, session.plan.generation) == (route("ADC"), 1)
    assert session.step(0.5) == Wait(READY_S)
    session.report(RouteAttached(1))
    assert session.step(0.5) == Finish(Repair(1, ("B",), 1.0, is_move=False))
    assert session.step() == Wait(None)
    assert not session.plan.is_repairing


def test_what_is_lost_while_nothing_is_due_is_replaced_when_something_is(session: Session) -> None:
    session.is_answer_due = False
    session.report(gone("B"))
    assert session.step() == Wait(None)
    assert session.plan.lost == {"B"}
    session.is_answer_due = True
    assert session.step(100) == HoldSurvivors(route("ABC").hops[::2])
    assert session.repaired("ABC").repair.replaced == ("B",)


def test_trouble_of_a_machine_that_is_not_in_the_route_is_no_trouble(session: Session) -> None:
    session.report(gone("D"))
    assert session.step() == Wait(None)


def test_what_is_no_machines_failure_is_not_repaired(session: Session) -> None:
    session.report(LocalProtocolError("sweep", "does not fit the wire"))
    assert session.step() == Wait(None)
    assert isinstance(session.plan.trouble, LocalProtocolError)


def test_a_route_that_is_not_attached_in_time_is_followed_by_the_next_generation(session: Session) -> None:
    """R7."""
    session.report(gone("B"))
    session.until(RouteSearch)
    session.report(RouteFound(route("ADC")))
    assert session.step() == TakeRoute(route("ADC"), 1)
    session.report(RouteAttached(0), RouteAttached(2))
    assert session.step() == Wait(READY_S), "there is no such generation, or no more (R1)"
    assert session.step(READY_S) == Log(logging.INFO, "generation 1 does not stand in time")
    assert session.step() == HoldSurvivors((route("ADC")).hops)
    assert session.step() == Pause(0.05)
    repair = session.repaired("ADC").repair
    assert repair.generation == 2
    assert repair.seconds == pytest.approx(READY_S + 0.1)


def test_a_route_with_a_machine_that_is_lost_too_is_left_at_once(session: Session) -> None:
    session.report(gone("B"))
    session.until(RouteSearch)
    session.report(RouteFound(route("ADC")))
    assert isinstance(session.step(), TakeRoute)
    session.report(gone("D"))
    assert session.step() == HoldSurvivors(route("ABC").hops[::2])
    assert session.until(RouteSearch) == RouteSearch(KNOWN, frozenset("BD"), route("ABC").hops[::2])
    session.report(RouteFound(route("AEC")))
    assert session.step() == TakeRoute(route("AEC"), 2)


# Nobody to take its place


def test_it_waits_says_so_once_and_gives_up(session: Session) -> None:
    session.report(gone("B"))
    began_s, said = session.now_s, []
    while not isinstance(step := session.step(), GiveUp):
        match step:
            case RouteSearch():
                session.report(NoRouteFound(MISSING))
            case Pause(seconds):
                session.now_s += seconds
            case Log():
                said.append(step)
            case _:
                assert isinstance(step, HoldSurvivors)
    assert step == GiveUp(MISSING)
    assert said == [Log(logging.WARNING, f"waiting up to 60 s: {MISSING}")]
    assert WAIT_S < session.now_s - began_s <= WAIT_S + RETRY_S
    assert not session.plan.is_repairing


@pytest.mark.parametrize("is_answered", [False, True])
def test_one_that_is_lost_again_and_again_is_waited_for_until_an_answer_comes(
    is_answered: bool, session: Session
) -> None:
    for _ in range(7):
        session.report(full("B"))
        session.repaired("ABC")
        session.answers += is_answered
        assert session.step(9.9) == Wait(None)
    error = full("B")
    session.report(error)
    assert session.step() == (HoldSurvivors(route("ABC").hops[::2]) if is_answered else GiveUp(error))


@pytest.mark.parametrize("error", [leaves("B"), gone("X")], ids=["leaves", "replica"])
def test_who_may_stay_meanwhile_is_replaced_later_and_nobody_gives_up(error: HopError) -> None:
    session = Session(RepairPlan(route("ABC", "X"), WAIT_S))
    assert session.step() == Wait(None)
    session.report(error)
    for _ in range(14):  # for the time that a replica is suspected
        assert session.until(Log) == Log(logging.INFO, f"cannot move yet: {MISSING}")
        assert not session.plan.is_repairing
        assert session.step() == Wait(MOVE_S)
        session.now_s += MOVE_S
    finish = session.repaired("ADC")
    assert finish.repair.is_move
    assert finish.repair.replaced == (error.peer,)


def test_a_move_to_a_machine_that_is_lost_too_is_a_repair_from_then_on(session: Session) -> None:
    """The route before is left: the one that leaves, and serves yet, is asked again where nobody else is known."""
    session.report(leaves("B"))
    session.until(RouteSearch)
    session.report(RouteFound(route("ADC")))
    assert session.step() == TakeRoute(route("ADC"), 1)
    session.report(gone("D"))
    assert session.step() == HoldSurvivors(route("ABC").hops[::2])
    assert session.plan.is_repairing
    assert session.step() == Pause(0.05)
    for freshness, avoid in ((KNOWN, "BD"), (ASKED, "BD"), (KNOWN, "D")):
        assert session.step() == RouteSearch(freshness, frozenset(avoid), route("ABC").hops[::2])
        session.report(NoRouteFound(MISSING))
    finish = session.repaired("ABC")
    assert finish.repair.is_move
    assert (finish.repair.generation, finish.repair.replaced) == (2, ("B",))


# Whatever happens


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
    session: Session
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
        session = Session(RepairPlan(route("abc", "d"), wait_s))
        session.report(RouteAttached(0))
        world = World(rng, session, wait_s, rng.choice([0.03, 0.1, 0.3]), rng.choice([0.3, 1.0, 1.0]), seen)
        world.run(rng.randrange(20, 1000))
    assert {kind: seen[kind] for kind, least in OFTEN.items() if seen[kind] < least} == {}
