"""What to do about a machine of a chain that is lost or leaves (PROTOCOL R1, R2, R7, R9). Pure: no I/O and no clock.

The plan hears *events* and answers, whenever it is asked, with the next *step*. `client.chain.chain` reports the
events and carries out the steps; it decides nothing. In short:

- A lost machine is replaced once an answer is due (R1). One that leaves, one that is too slow, or a lost replica, is
  replaced when somebody can take its place; until then the chain goes on as it is.
- A machine that was lost is avoided while others can take its place (`client.chain.blame`). Where nobody can, those
  that were not lost just now are asked again; one that was silent is asked again at once.
- Trouble may be of a link: the accused is gone around; where that cannot be, its accuser; where nothing tells which end
  is at fault, both, if others can take their places.
- That the session itself cannot be is believed of two routes that share no machine (never that the model is another
  one), or of a machine that nobody can replace: then the session ends with its words.
- All other machines stay where they are (R2). The survivors are told to hold the session (R9).
- A route that is not attached in time is tried again under the next generation (R7). A move is a repair from then on.
- The session ends when no route stood for as long as the user waits.

Routes around machines are made from what the directory said before: it may be slow just when one is needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import Protocol, assert_never

from client.base.stats import Repair
from client.chain.blame import Suspicion, Verdicts, plain_error
from swarm.base.errors import (
    HopClosed,
    HopError,
    HopLeaving,
    HopMisbehaved,
    HopRefused,
    HopSlow,
    HopTimeout,
    LinkDiffers,
    RegistryError,
    RouteError,
    SwarmError,
    Unreachable,
)
from swarm.base.tasks import TaskScope
from swarm.protocol.messages import RouteHop
from swarm.routing.route import Route

READY_S = 4.0
"""How long a new route may take to be attached before the next one is tried (R7)."""
RETRY_S = 0.5
"""How long a machine that was lost is not asked again; also between two rounds of searches."""
ATTEMPT_S = 0.05
"""How much longer each attempt waits before it starts, up to `RETRY_S`."""
SILENT_RETRIES = 2
"""How often a silent machine is asked again before somebody else is waited for; each time takes about a second."""
MOVE_S = 2.0
"""Between searches for a machine in place of one that leaves."""


# Events: what happened


@dataclass(frozen=True, slots=True)
class TroubleReported:
    """A machine of the chain is lost or leaves, or the session itself is at fault."""

    error: SwarmError


@dataclass(frozen=True, slots=True)
class RouteAttached:
    """Every hop of this generation's route is attached."""

    generation: int


@dataclass(frozen=True, slots=True)
class RouteFound:
    """The search that was asked for found a route."""

    route: Route


@dataclass(frozen=True, slots=True)
class NoRouteFound:
    """It did not: nobody serves some layers."""

    error: RouteError


RepairEvent = TroubleReported | RouteAttached | RouteFound | NoRouteFound


# Steps: what to do now


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until something happens, for at most so many seconds (None: without a limit)."""

    limit_s: float | None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for so many seconds, whatever happens."""

    seconds: float


@dataclass(frozen=True, slots=True)
class HoldSurvivors:
    """Tell these machines to keep the session though they hear from nobody (R9)."""

    hops: tuple[RouteHop, ...]


class Freshness(Enum):
    """What a search knows of the machines."""

    KNOWN = auto()
    """What was learned lately."""
    KNOWN_AND_ASK = auto()
    """The same; the directory is asked meanwhile."""
    ASKED = auto()
    """What the directory says now, if it says it soon."""


@dataclass(frozen=True, slots=True)
class RouteSearch:
    """Find a route and report it, or that there is none.

    Attributes:
        freshness: what the search may rely on.
        avoid: peers that must not be in the route.
        keep: hops that stay where they are if that is possible.
    """

    freshness: Freshness
    avoid: frozenset[str]
    keep: tuple[RouteHop, ...]


@dataclass(frozen=True, slots=True)
class TakeRoute:
    """Send this route down the chain under this generation (R2)."""

    route: Route
    generation: int


@dataclass(frozen=True, slots=True)
class Log:
    """Say something, at a level of `logging`."""

    level: int
    message: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The chain is repaired."""

    repair: Repair


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The session ends with this error."""

    error: SwarmError


RepairStep = Wait | Pause | HoldSurvivors | RouteSearch | TakeRoute | Log | Finish | GiveUp


@dataclass(frozen=True, slots=True)
class Moment:
    """How far the session is when a step is asked for.

    Attributes:
        now_s: time of a monotonic clock.
        answers: answers that came so far.
        is_answer_due: whether a sweep is unanswered.
    """

    now_s: float
    answers: int
    is_answer_due: bool


class RepairPlan:
    """The decisions of one session's repairs.

    Attributes:
        route: the newest route.
        generation: its number; only this plan raises it (R1).
        trouble: what was reported last about this generation's route, if anything was.
        is_repairing: whether a lost machine is being replaced; a move does not count.
    """

    def __init__(self, route: Route, wait_s: float) -> None:
        """Begin with a route that is being opened.

        Args:
            route: the first one, generation 0.
            wait_s: how long a machine is waited for that is missing, or is lost again and again before an answer comes.
        """
        self.route = route
        self.generation = 0
        self.trouble: SwarmError | None = None
        self.is_repairing = False
        self._wait_s = wait_s
        self._suspicion = Suspicion()
        self._verdicts = Verdicts()
        self._is_settled = False
        self._leaving: set[str] = set()
        self._lost_since: dict[str, float] = {}
        self._answers_then = 0
        self._has_warned = False
        self._attached_generation = -1
        self._found: Route | None = None
        self._no_route: RouteError | None = None
        self._moment = Moment(0.0, 0, is_answer_due=False)
        self._steps = self._run()

    def report(self, event: RepairEvent, now_s: float) -> None:
        """Something happened."""
        match event:
            case TroubleReported(HopLeaving() | HopSlow() | LinkDiffers() as error):  # serves until it is replaced
                self._leaving.add(error.peer)
            case TroubleReported(HopError() as error):
                self._suspicion.add(error, now_s, self.route.relay_of(error.peer))
                if isinstance(error, HopRefused):
                    route = _peers((*self.route.hops, *self.route.replicas))
                    self._is_settled |= self._verdicts.add(error, route, now_s)
                is_replica = error.peer in _peers(self.route.replicas)  # without it the chain goes on as it is
                if not is_replica and not self._is_explained(error):
                    self.trouble = error
            case TroubleReported(error):
                self.trouble = error
            case RouteAttached(generation):
                if generation == self.generation:  # reports of older ones are ignored (R1)
                    self._attached_generation = generation
            case RouteFound(route):
                self._found = route
            case NoRouteFound(missing):
                self._no_route = missing
            case _:
                assert_never(event)

    def _is_explained(self, error: HopError) -> bool:
        """Whether a stream just ended after it had said why; both may be heard in one turn of the event loop."""
        said = self.trouble
        is_end = isinstance(error, HopClosed) and said is not None
        return is_end and (said.peer == error.peer if isinstance(said, HopError) else True)

    def next_step(self, moment: Moment) -> RepairStep:
        """What to do now; the step before is done. `GiveUp` is the last one."""
        self._moment = moment
        return next(self._steps)

    def detour(self, peer: str, now_s: float) -> RouteSearch:
        """The search for a route around one machine more."""
        return self._around(self._suspicion.avoided(now_s) | self._leaving | {peer})

    def stop(self) -> None:
        """The session ends: nothing is repaired any more."""
        self._steps.close()

    @property
    def is_attached(self) -> bool:
        """Whether every hop of the newest route is attached."""
        return self._attached_generation >= self.generation

    @property
    def lost(self) -> set[str]:
        """Machines of this route about which trouble was reported in this generation."""
        return {self.trouble.peer} & _peers(self.route.hops) if isinstance(self.trouble, HopError) else set()

    @property
    def _now_s(self) -> float:
        return self._moment.now_s

    def _run(self) -> Generator[RepairStep]:
        """Repair the chain whenever it needs it, for as long as that succeeds."""
        try:
            while True:
                yield Wait(MOVE_S if self._unwanted() else None)
                lost = self.lost if self._moment.is_answer_due else set()
                if replaced := sorted(lost | self._unwanted()):
                    self.is_repairing = bool(lost)
                    try:
                        yield from self._repair(replaced, is_move=not lost)
                    finally:
                        self.is_repairing = False
        except SwarmError as error:
            yield GiveUp(error)

    def _repair(self, replaced: Collection[str], *, is_move: bool) -> Generator[RepairStep]:
        """Try routes until one stands (R7).

        Raises:
            SwarmError: none did in time.
        """
        began_s, was_move, self._no_route = self._now_s, is_move, None
        since_s = began_s if is_move else self._pause_since(replaced)
        if began_s - since_s > self._wait_s and self.trouble is not None:  # it was there again, and did nothing
            raise plain_error(self.trouble)
        yield self._hold()
        accusers: set[str] = set()
        for attempt in count():
            yield Pause(min(RETRY_S, ATTEMPT_S * attempt))
            trouble, self.trouble = self.trouble, None
            if isinstance(trouble, HopError) and trouble.other is not None:
                accusers.add(trouble.other)
            again = frozenset(replaced if attempt < SILENT_RETRIES and not is_move else ())
            route = yield from self._search(trouble, since_s, again, is_move=is_move)
            if route is None:
                return
            self.route, self.generation = route, self.generation + 1
            yield TakeRoute(route, self.generation)
            if (yield from self._stands()):
                break
            if is_move:  # the route before is left, so this one must be repaired
                since_s, is_move, self.is_repairing = self._pause_since(replaced), False, True
            if self._now_s - since_s > self._wait_s:
                blamed = self.trouble if isinstance(self.trouble, HopMisbehaved) else None
                raise blamed or self._no_route or plain_error(self.trouble or _nothing_stood(route))
            yield self._hold()
        here = _peers(self.route.hops)
        if here.issuperset(replaced) and accusers - here:  # who accused it was replaced
            replaced = sorted(accusers - here)
        yield Finish(Repair(self.generation, tuple(replaced), self._now_s - began_s, was_move))

    def _search(
        self, trouble: SwarmError | None, since_s: float, again: frozenset[str], *, is_move: bool
    ) -> Generator[RepairStep, None, Route | None]:
        """Search until there is a route; None when a move must wait, because nobody else has the layers.

        Raises:
            RouteError: some layers were missing for too long.
            SwarmError: what a machine said of the session, and is believed.
        """
        refused = trouble if isinstance(trouble, HopRefused) else None
        if refused is not None and self._is_settled:
            raise refused.cause
        while True:
            for search in self._searches(trouble, again, is_move=is_move):
                self._found = None
                yield search
                if self._found is not None:
                    return self._found
            assert self._no_route is not None, "a search found no route, and was not reported"
            if refused is not None:  # and nobody else can say otherwise
                raise refused.cause
            if is_move:
                yield Log(logging.INFO, f"cannot move yet: {self._no_route}")
                return None
            if self._now_s - since_s > self._wait_s:
                raise trouble if isinstance(trouble, HopMisbehaved) else self._no_route
            if not self._has_warned and self._now_s - since_s > RETRY_S:  # it was not silent for a moment only
                self._has_warned = True
                yield Log(logging.WARNING, f"waiting up to {self._wait_s:.0f} s: {self._no_route}")
            yield self._hold()
            yield Pause(RETRY_S)

    def _searches(self, trouble: SwarmError | None, again: frozenset[str], *, is_move: bool) -> Generator[RouteSearch]:
        """One round: without all who are suspected, then with those who may be back.

        Whoever of `again` was silent is asked again at once where nobody else is known: its packets were lost, perhaps,
        and a new connection finds it. For a move nobody is asked again: the chain works as it is.
        """
        now_s, suspicion = self._now_s, self._suspicion
        first, *others = suspicion.in_turn(now_s)
        avoid = first | self._leaving
        if isinstance(trouble, HopRefused) and (heard := self._verdicts.heard_over(now_s)):
            yield self._around(avoid | heard)
        elif isinstance(trouble, HopError) and trouble.is_even and trouble.other is not None:
            yield self._around(avoid | {trouble.other})
        if relays := suspicion.relays(now_s):
            yield self._around(avoid | relays)
        yield self._around(avoid)
        for other in () if is_move else others:
            yield self._around(other | self._leaving)
        silent, gone = suspicion.within(RETRY_S, HopTimeout, now_s), suspicion.within(RETRY_S, Unreachable, now_s)
        keep = self._kept(avoid)
        is_refusal = isinstance(trouble, HopRefused)
        if silent & again and not is_refusal:
            yield RouteSearch(Freshness.KNOWN_AND_ASK, gone | (silent - again), keep)
        yield RouteSearch(Freshness.ASKED, avoid, keep)
        if is_refusal:
            return
        offenders = suspicion.offenders(now_s) - gone - silent
        if offenders and not is_move:
            yield self._around(gone | silent | offenders)
        yield RouteSearch(Freshness.KNOWN, avoid if is_move else gone | silent, keep)

    def _around(self, avoid: frozenset[str]) -> RouteSearch:
        return RouteSearch(Freshness.KNOWN, avoid, self._kept(avoid))

    def _kept(self, avoid: frozenset[str]) -> tuple[RouteHop, ...]:
        """Hops that stay where they are; of two replicas, the other one goes on where one is lost."""
        hops = [hop for hop in self.route.hops if hop.peer not in avoid]
        spans = {hop.span for hop in hops}
        return (*hops, *(hop for hop in self.route.replicas if hop.peer not in avoid and hop.span not in spans))

    def _stands(self) -> Generator[RepairStep, None, bool]:
        """Whether all hops of the newest route are attached before trouble or the deadline comes."""
        deadline_s = self._now_s + READY_S
        while not self.is_attached and not self.lost:
            if self._now_s >= deadline_s:
                yield Log(logging.INFO, f"generation {self.generation} does not stand in time")
                return False
            yield Wait(deadline_s - self._now_s)
        return not self.lost

    def _pause_since(self, lost: Collection[str]) -> float:
        """When the first of these machines was lost since the latest answer."""
        if self._moment.answers > self._answers_then:
            self._answers_then, self._lost_since, self._has_warned = self._moment.answers, {}, False
        return min(self._lost_since.setdefault(peer, self._now_s) for peer in lost)

    def _hold(self) -> HoldSurvivors:
        everybody, seen = (*self.route.hops, *self.route.replicas), self._suspicion.seen()
        return HoldSurvivors(tuple(hop for hop in everybody if hop.peer not in seen))

    def _unwanted(self) -> set[str]:
        """Machines of this route that leave, and a replica that was lost."""
        hops, replicas = _peers(self.route.hops), _peers(self.route.replicas)
        return self._leaving & (hops | replicas) | self._suspicion.avoided(self._now_s) & replicas


def _peers(hops: Collection[RouteHop]) -> set[str]:
    return {hop.peer for hop in hops}


def _nothing_stood(route: Route) -> HopTimeout:
    first = route.hops[0]
    return HopTimeout(first.peer, str(first.span), "no route stood in time")


FRESH_S = 1.0
"""How long a repair waits for the directory: a DHT that has lost peers as well may take ten seconds."""


class FindRoute(Protocol):
    """Finds routes around machines."""

    async def __call__(self, avoid: Collection[str], keep: Sequence[RouteHop], *, within_s: float = ...) -> Route:
        """Find the best route that there is.

        Args:
            avoid: peers that must not be in it.
            keep: hops that stay where they are if that is possible.
            within_s: how old its records may be; by default what the directory said before will do.

        Raises:
            RouteError: nobody serves some layers.
            RegistryError: the directory does not answer.
        """


class Rerouter:
    """Searches for one chain; at most one question to the directory is open."""

    def __init__(self, find_route: FindRoute) -> None:
        self._find_route = find_route
        self._question: asyncio.Task[None] | None = None

    async def find(self, scope: TaskScope, search: RouteSearch) -> Route:
        """Carry out a search; what the directory says too late is known to the next one.

        Args:
            scope: owns the question to the directory.
            search: the search.

        Raises:
            RouteError: nobody that is known serves some layers.
        """
        match search.freshness:
            case Freshness.KNOWN_AND_ASK:
                self._ask(scope, search)
            case Freshness.ASKED:
                await asyncio.wait({self._ask(scope, search)}, timeout=FRESH_S)
            case Freshness.KNOWN:
                pass
        try:
            return await self._find_route(search.avoid, search.keep)
        except RegistryError as error:
            raise RouteError(str(error), ()) from error

    def _ask(self, scope: TaskScope, search: RouteSearch) -> asyncio.Task[None]:
        if self._question is None or self._question.done():
            self._question = scope.spawn(self._ask_directory(search))
        return self._question

    async def _ask_directory(self, search: RouteSearch) -> None:
        with suppress(RouteError, RegistryError):  # what it says is remembered by whoever is asked
            await self._find_route(search.avoid, search.keep, within_s=0.0)
