"""What a client does about lost machines: situations, and the steps that follow."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest

from client.base.stats import Repair
from client.chain.blame import SUSPECT_S
from client.chain.repair_plan import (
    MOVE_S,
    READY_S,
    RETRY_S,
    SILENT_RETRIES,
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
    TroubleReported,
    Wait,
)
from swarm.base.errors import (
    ContextFull,
    HopClosed,
    HopError,
    HopLeaving,
    HopRefused,
    HopSlow,
    LocalProtocolError,
)
from swarm.directory.node_record import Reach
from swarm.protocol.messages import RouteHop
from tests.planned_session import MISSING, PlannedSession, full, gone, leaves, route, silent
from tests.sample_records import sample_record

KNOWN, KNOWN_AND_ASK, ASKED = Freshness
WAIT_S = 60.0


@pytest.fixture
def session() -> PlannedSession:
    one = PlannedSession(RepairPlan(route("ABC"), WAIT_S))
    one.report(RouteAttached(0))
    assert one.step() == Wait(None)
    return one


def test_who_said_why_it_ends_the_session_is_not_said_to_have_just_ended_it() -> None:
    """The end of its stream may be heard in the same turn of the event loop; another machine's end is news."""
    for said in (full("B"), ContextFull("no room")):
        one = PlannedSession(RepairPlan(route("ABC"), WAIT_S))
        one.report(said, HopClosed("B", "4-8", "ended the session"))
        assert one.plan.trouble is said
    one = PlannedSession(RepairPlan(route("ABC"), WAIT_S))
    one.report(full("B"), ended := HopClosed("A", "0-4", "ended the session"))
    assert one.plan.trouble is ended


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
    session = PlannedSession(RepairPlan(route("ABC", situation.replica), WAIT_S))
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


def test_a_slow_machine_is_left_like_one_that_leaves_and_kept_where_nobody_else_is() -> None:
    session = PlannedSession(RepairPlan(route("ABC"), WAIT_S))
    session.report(RouteAttached(0))
    assert session.step() == Wait(None)
    session.report(HopSlow("B", "4-8", "holds sweeps back"))
    assert searches_of_a_round(session) == [(KNOWN, "B"), (ASKED, "B"), (KNOWN, "B")]
    assert isinstance(session.until(Wait), Wait), "the chain goes on as it is"
    assert session.plan.route == route("ABC")
    finish = session.repaired("AXC")
    assert finish.repair.is_move
    assert finish.repair.replaced == ("B",)
    assert session.plan.detour("X", session.now_s).avoid == {"B", "X"}


def accused(peer: str, by: str, *, is_even: bool = False) -> HopError:
    return gone(peer).on_link(by, is_even=is_even)


def searches_of_a_round(session: PlannedSession) -> list[tuple[Freshness, str]]:
    """Whom the searches of the next round avoid, in order, while none finds a route."""
    found: list[tuple[Freshness, str]] = []
    step = session.until(RouteSearch)
    while isinstance(step, RouteSearch):
        found.append((step.freshness, "".join(sorted(step.avoid))))
        session.report(NoRouteFound(MISSING))
        step = session.step()
    return found


@pytest.mark.parametrize(
    ("reported", "searches"),
    [
        pytest.param([accused("B", by="A")], [(KNOWN, "B"), (KNOWN, "A"), (ASKED, "B"), (KNOWN, "B")], id="accused"),
        pytest.param(
            [accused("B", by="A", is_even=True)],
            [(KNOWN, "AB"), (KNOWN, "B"), (KNOWN, "A"), (ASKED, "B"), (KNOWN, "B")],
            id="nothing tells which end",
        ),
        pytest.param(
            [accused("E", by="A"), accused("B", by="A")],
            [(KNOWN, "ABE"), (KNOWN, "A"), (KNOWN, "BE"), (ASKED, "ABE"), (KNOWN, "ABE"), (KNOWN, "BE")],
            id="what two troubles have in common",
        ),
    ],
)
def test_both_ends_of_a_link_carry_its_trouble(
    reported: list[HopError], searches: list[tuple[Freshness, str]], session: PlannedSession
) -> None:
    session.report(*reported)
    assert searches_of_a_round(session) == searches


def test_behind_the_relay_of_a_lost_machine_no_other_hop_begins_at_first() -> None:
    """The relay may be what is gone; where nobody else is left, those behind it are tried all the same."""
    relay = "198.51.100.1:7"
    records = tuple(
        sample_record(hop.peer, address=f"{hop.peer}.via.{relay}", reach=Reach.RELAYED) for hop in route("ABC").hops
    )
    session = PlannedSession(RepairPlan(replace(route("ABC"), records=records), WAIT_S))
    session.report(RouteAttached(0))
    assert session.step() == Wait(None)
    session.report(gone("B"))
    keep = tuple(hop for hop in route("ABC").hops if hop.peer != "B")
    found: list[RepairStep] = [session.until(RouteSearch)]
    while isinstance(found[-1], RouteSearch):
        session.report(NoRouteFound(MISSING))
        found.append(session.step())
    assert found[:2] == [
        RouteSearch(KNOWN, frozenset({"B", relay}), keep),
        RouteSearch(KNOWN, frozenset("B"), keep),
    ]


def test_who_accuses_a_machine_that_nobody_can_replace_is_replaced(session: PlannedSession) -> None:
    session.report(accused("B", by="A"))
    assert session.until(HoldSurvivors) == HoldSurvivors(route("ABC").hops), "nobody saw B fail"
    assert session.until(RouteSearch) == RouteSearch(KNOWN, frozenset("B"), route("ABC").hops[::2])
    session.report(NoRouteFound(MISSING))
    assert session.step() == RouteSearch(KNOWN, frozenset("A"), route("ABC").hops[1:])
    session.report(RouteFound(route("DBC")))
    assert session.step() == TakeRoute(route("DBC"), 1)
    session.report(RouteAttached(1))
    finish = session.step()
    assert isinstance(finish, Finish)
    assert finish.repair.replaced == ("A",)


# What a machine says of the session itself

FULL = ContextFull("no room")


def refuses(peer: str) -> HopError:
    return HopRefused(peer, "?", FULL)


def test_one_machine_alone_is_believed_at_once(session: PlannedSession) -> None:
    session.report(refuses("B"))
    began_s = session.now_s
    assert session.until(GiveUp) == GiveUp(FULL)
    assert session.now_s == began_s


def test_two_routes_that_share_nothing_are_believed(session: PlannedSession) -> None:
    session.report(refuses("B"))
    assert session.until(RouteSearch) == RouteSearch(KNOWN, frozenset("B"), route("ABC").hops[::2])
    session.report(RouteFound(route("ADC")))
    assert isinstance(session.step(), TakeRoute)
    session.report(refuses("D"))
    assert isinstance(session.step(), HoldSurvivors)
    assert isinstance(session.step(), Pause)
    search = session.step()
    assert search == RouteSearch(KNOWN, frozenset("ABCD"), ()), "a route that shares nothing settles it"
    session.report(RouteFound(route("EFG")))
    assert isinstance(session.step(), TakeRoute)
    session.report(refuses("F"))
    assert session.until(GiveUp) == GiveUp(FULL)


def test_a_route_that_says_nothing_of_the_kind_goes_on(session: PlannedSession) -> None:
    session.report(refuses("B"))
    assert session.repaired("ADC").repair.replaced == ("B",)
    assert session.step() == Wait(None)


def hops_of(peer: str) -> list[RouteHop]:
    return [hop for hop in (*route("ABC", "X").hops, *route("ABC", "X").replicas) if hop.peer == peer]


def test_a_silent_machine_is_asked_again_so_often_and_then_no_more(session: PlannedSession) -> None:
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


def test_a_lost_machine_is_replaced_step_by_step(session: PlannedSession) -> None:
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


def test_what_is_lost_while_nothing_is_due_is_replaced_when_something_is(session: PlannedSession) -> None:
    session.is_answer_due = False
    session.report(gone("B"))
    assert session.step() == Wait(None)
    assert session.plan.lost == {"B"}
    session.is_answer_due = True
    assert session.step(100) == HoldSurvivors(route("ABC").hops[::2])
    assert session.repaired("ABC").repair.replaced == ("B",)


def test_trouble_of_a_machine_that_is_not_in_the_route_is_no_trouble(session: PlannedSession) -> None:
    session.report(gone("D"))
    assert session.step() == Wait(None)


def test_what_is_no_machines_failure_is_not_repaired(session: PlannedSession) -> None:
    session.report(LocalProtocolError("sweep", "does not fit the wire"))
    assert session.step() == Wait(None)
    assert isinstance(session.plan.trouble, LocalProtocolError)


def test_a_route_that_is_not_attached_in_time_is_followed_by_the_next_generation(session: PlannedSession) -> None:
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


def test_a_route_with_a_machine_that_is_lost_too_is_left_at_once(session: PlannedSession) -> None:
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


def test_it_waits_says_so_once_and_gives_up(session: PlannedSession) -> None:
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
    is_answered: bool, session: PlannedSession
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
    session = PlannedSession(RepairPlan(route("ABC", "X"), WAIT_S))
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


def test_a_move_to_a_machine_that_is_lost_too_is_a_repair_from_then_on(session: PlannedSession) -> None:
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
