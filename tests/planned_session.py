"""A session that follows a repair plan on a clock that the test moves, and routes and errors to report to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from client.chain.repair_plan import (
    Finish,
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
)
from swarm.base.errors import (
    Busy,
    HopError,
    HopLeaving,
    HopTimeout,
    RouteError,
    SwarmError,
    Unreachable,
)
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.protocol.messages import Hedge, RouteHop
from swarm.routing.costs import RouteForecast
from swarm.routing.route import Route

SPANS = (Span(0, 4), Span(4, 8), Span(8, 12))
MISSING = RouteError("nobody serves layers 4-8", ((4, 8),))


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
class PlannedSession:
    """A session that follows a repair plan on a clock that the test moves.

    Attributes:
        plan: decides what the repair does next.
        now_s: the clock.
        answers: answers of sweeps that have come.
        is_answer_due: whether a sweep is unanswered.
    """

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
        """The next step of a kind; earlier ones are carried out, and searches find nothing."""
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
        """Let the next search find this route, and attach it at once."""
        assert isinstance(self.until(RouteSearch), RouteSearch)
        self.report(RouteFound(route(peers)))
        taken = self.step()
        assert isinstance(taken, TakeRoute)
        self.report(RouteAttached(taken.generation))
        finish = self.step(0.1)
        assert isinstance(finish, Finish)
        return finish
