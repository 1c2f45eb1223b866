"""An open session over a chain of hops: sweeps go in at hop 0, replies come straight from the tail.

When a machine is lost, the client alone decides (R1). `client.chain.repair_plan` says what to do; this file does it: it
opens, follows, waits and reports. Sweeps in flight survive. Owns no tokens and no rules.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import assert_never

import grpc.aio

from client.chain.answers import Answer, Answers
from client.chain.repair_plan import (
    Finish,
    GiveUp,
    HoldSurvivors,
    Log,
    Moment,
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
from client.chain.reply_stream import ReplyStream
from client.chain.reroutes import FindRoute, Rerouter
from client.stats import Repair
from swarm import wire
from swarm.errors import HopError, HopTimeout, ReplicasDiffer, RouteError, SwarmError
from swarm.ids import PeerId
from swarm.protocol.authority import SessionKey
from swarm.protocol.faults import error_of
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Attach, Credits, Fault, Hold, Open, Ready, RouteHop, Snapshot, Sweep, SweepFrame
from swarm.protocol.session import SessionState
from swarm.routing.route import Route
from swarm.runtime.tasks import TaskScope
from swarm.transport.dial import Connection, Dialer
from swarm.transport.hedged_link import follow
from swarm.transport.introduction import introduce
from swarm.transport.successor import SessionLink, SuccessorLink

REPLY_TIMEOUT_S = 120.0
OPEN_S, OPEN_PER_HOP_S = 10.0, 3.0
HOLD_TTL_S = 10.0
MAX_REPAIRS = 1_000
MAX_DIFFERENCES = 100

logger = logging.getLogger(__name__)


class Chain:
    """A running session; made by `open_chain`.

    Attributes:
        credits: what the hops granted: tokens, sweeps and nodes.
        repairs: what was repaired so far, the newest `MAX_REPAIRS`.
        differences: between replicas, the newest `MAX_DIFFERENCES`.
    """

    def __init__(self, dialer: Dialer, route: Route, want: Open, find_route: FindRoute, wait_s: float = 60.0) -> None:
        """Prepare a session.

        Args:
            dialer: connects to hop 0 and to the tail.
            route: the chain to begin with.
            want: what the session needs of every hop.
            find_route: finds routes around machines.
            wait_s: how long a machine is waited for that is missing, or is lost again and again before an answer comes.
        """
        self.credits = Credits(0, 0, 0)
        self.repairs: list[Repair] = []
        self.differences: list[str] = []
        self._dialer = dialer
        self._want = want
        self._plan = RepairPlan(route, wait_s)
        self._rerouter = Rerouter(find_route)
        self._key = SessionKey.fresh()
        self._journal: Journal | None = None
        self._next: SessionLink | None = None
        self._answers = Answers(self._key, self.on_trouble)
        self._news = asyncio.Event()

    @property
    def route(self) -> Route:
        """The newest route."""
        return self._plan.route

    @property
    def generation(self) -> int:
        """Its number."""
        return self._plan.generation

    @property
    def first_link_ms(self) -> float:
        """One-way time to hop 0: half the measured round trip."""
        return self._next.rtt_ms / 2 if self._next is not None else 0.0

    @property
    def has_answer(self) -> bool:
        """Whether `answer` would return at once."""
        return self._answers.has_next

    @property
    def route_key(self) -> Hashable:
        """Names the machines and layers that it goes over now."""
        return self.route.hops

    def begin(self, state: SessionState) -> None:
        """What is sent from now on belongs to a session with this state."""
        self._journal = Journal(state)

    def send(self, sweep: Sweep) -> None:
        """Start a sweep; never waits. While the chain is repaired, it follows with the replay."""
        assert self._next is not None and self._journal is not None, "open_chain and begin come first"  # noqa: PT018
        sweep = replace(sweep, generation=self.generation)
        self._answers.expect(sweep.sequence)
        self._journal.note(sweep)
        self._next.push(SweepFrame(sweep))
        if self._plan.lost:  # while nobody needed it: now somebody does
            self._news.set()

    async def answer(self, timeout_s: float = REPLY_TIMEOUT_S) -> Answer:
        """The next reply.

        Raises:
            SwarmError: what broke the chain for good.
        """
        return await self._answers.next(timeout_s, lambda: self._plan.is_repairing)

    async def idle(self, max_ms: float) -> None:
        """Until an answer is there, or so much time has passed."""
        await self._answers.idle(max_ms / 1e3)

    # What the next hop asks and reports

    def replay(self, received: int | None) -> Sequence[SweepFrame | Snapshot]:
        """What hop 0 lacks: ids are all that it needs."""
        return () if self._journal is None else self._journal.replay(received)

    def on_ready(self, ready: Ready) -> None:
        """Every hop of a route is attached."""
        if ready.generation == self.generation == 0:
            self.credits = ready.credits
        self._plan.report(RouteAttached(ready.generation), time.monotonic())
        self._news.set()

    def on_fault(self, fault: Fault) -> None:
        """A hop reports trouble; reports of older generations are stale (R1)."""
        if fault.generation >= self.generation:
            everybody = (*self.route.hops, *self.route.replicas)
            span = next((str(hop.span) for hop in everybody if hop.peer == fault.peer), "?")
            self.on_trouble(error_of(fault, span))

    def on_trouble(self, error: SwarmError) -> None:
        """Something is wrong: a lost machine is replaced, anything else ends the session."""
        logger.info("generation %d: %s", self.generation, error)
        match error:
            case ReplicasDiffer():
                if str(error) not in self.differences:  # it may have come up both ways
                    logger.warning("%s", error)
                    self.differences = [*self.differences, str(error)][-MAX_DIFFERENCES:]
            case HopError():
                self._plan.report(TroubleReported(error), time.monotonic())
            case _:
                self._plan.report(TroubleReported(error), time.monotonic())
                self._answers.give_up(error)
        self._news.set()

    # Opening, repairing, closing

    async def open(self, scope: TaskScope) -> None:
        """Attach every hop and open the reply stream.

        Raises:
            SwarmError: a hop refused, or did not answer in time.
        """
        self._next = SuccessorLink(scope, self._dial, self._key, self)
        limit_s = OPEN_S + OPEN_PER_HOP_S * len(self.route.hops)
        try:
            async with asyncio.timeout(limit_s):
                self._next = follow(self._next, self._attach())
                while not self._plan.is_attached:
                    await self._news.wait()
                    self._news.clear()
                    if self._plan.trouble is not None:
                        raise self._plan.trouble
                stream = self._follow_tail(scope)
                await stream.opened.wait()
        except TimeoutError:
            first = self.route.hops[0]
            raise HopTimeout(first.peer, str(first.span), f"no chain within {limit_s:.0f} s") from None
        scope.spawn(self._keep_repaired(scope))

    async def close(self) -> None:
        """End the session everywhere, and wait until it is said."""
        self._answers.close()
        if self._next is not None:
            self._next.close("done")
            await self._next.gone()

    async def _keep_repaired(self, scope: TaskScope) -> None:
        """Carry out the plan, for as long as there is one."""
        try:
            while True:
                moment = Moment(time.monotonic(), self._answers.count, self._answers.are_due)
                await self._carry_out(self._plan.next_step(moment), scope)
        except SwarmError as error:
            self._plan.stop()
            self._answers.give_up(error)

    async def _carry_out(self, step: RepairStep, scope: TaskScope) -> None:
        match step:
            case Wait(limit_s):
                with suppress(TimeoutError):
                    async with asyncio.timeout(limit_s):
                        await self._news.wait()
                self._news.clear()
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case HoldSurvivors(hops):
                self._hold(hops, scope)
            case RouteSearch():
                await self._search(step, scope)
            case TakeRoute():
                self._take_route(step, scope)
            case Log(level, message):
                logger.log(level, "%s", message)
            case Finish(repair):
                await self._finish(repair)
            case GiveUp(error):
                raise error
            case _:
                assert_never(step)

    def _hold(self, hops: Sequence[RouteHop], scope: TaskScope) -> None:
        """Hops behind a gap would take their client for dead (R9)."""
        request = wire.encode_hold(Hold(self._key.session, self.generation, HOLD_TTL_S))
        for hop in hops:
            with suppress(SwarmError):  # it announces no certificate: nobody dials it
                scope.spawn(_send_hold(self._connection(hop), self._key, request))

    async def _search(self, search: RouteSearch, scope: TaskScope) -> None:
        try:
            found = RouteFound(await self._rerouter.find(scope, search))
        except RouteError as error:
            self._plan.report(NoRouteFound(error), time.monotonic())
        else:
            self._plan.report(found, time.monotonic())

    def _take_route(self, step: TakeRoute, scope: TaskScope) -> None:
        """Send the route down the chain (R2), and hear its tail."""
        assert self._next is not None
        logger.info("generation %d goes over %s", step.generation, ", ".join(map(_named, step.route.hops)))
        self._next = follow(self._next, self._attach())
        self._follow_tail(scope)

    async def _finish(self, repair: Repair) -> None:
        logger.info("repaired in %.2f s", repair.seconds)
        self.repairs = [*self.repairs, repair][-MAX_REPAIRS:]
        await self._dialer.tidy()

    def _attach(self) -> Attach:
        want = self._want
        if self.generation:  # no new hop may have less than what the session uses
            credits = self.credits
            want = replace(want, window_tokens=credits.window_tokens, sweeps=credits.sweeps, nodes=credits.nodes)
        route, session = self.route, self._key.session
        return self._key.command(Attach(session, self.generation, route.hops, 0, want, route.hedge, route.sealed))

    def _follow_tail(self, scope: TaskScope) -> ReplyStream:
        route, last = self.route, self.route.hops[-1]
        tails = [last, *(hop for hop in route.replicas if hop.span == last.span)]
        acked = self._journal.state.acked if self._journal is not None else 0
        dials = [partial(self._connection, hop, self._answers.stuck(hop)) for hop in tails]
        return self._answers.follow(scope, list(zip(tails, dials, strict=True)), self.generation, acked)

    async def _dial(self, hop: RouteHop, stuck: grpc.aio.Channel | None) -> Connection:
        return self._connection(hop, stuck)

    def _connection(self, hop: RouteHop, stuck: grpc.aio.Channel | None = None) -> Connection:
        endpoint = self.route.endpoint(hop.peer)
        return Connection(self._dialer.channel(endpoint, stuck), endpoint)


@asynccontextmanager
async def open_chain(chain: Chain) -> AsyncIterator[Chain]:
    """Attach every hop of the chain's route; leaving closes the session everywhere.

    Raises:
        SwarmError: a hop refused, or did not answer in time.
    """
    async with TaskScope() as scope:
        try:
            await chain.open(scope)
            yield chain
        finally:
            await chain.close()  # also when the generation is left or breaks: KV elsewhere is not ours to keep


async def _send_hold(connection: Connection, key: SessionKey, request: bytes) -> None:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connection.channel.unary_unary(wire.HOLD)
    with suppress(grpc.aio.AioRpcError):  # lost as well: its predecessor will say so
        await call(request, timeout=1.0, metadata=introduce(key, connection.endpoint, wire.HOLD, request))


def _named(hop: RouteHop) -> str:
    return f"{PeerId(hop.peer)[-8:]} {hop.span}"
