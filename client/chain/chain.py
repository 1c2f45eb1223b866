"""An open session over a chain of hops: sweeps go in at hop 0, replies come straight from the tail.

When a machine is lost, the client alone decides (R1): it raises the generation, finds a route around the machine and
sends it down the chain (R2). Sweeps in flight survive. Owns no tokens and no rules.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count

import grpc.aio

from client.chain.answers import Answer, Answers
from client.chain.reply_stream import ReplyStream
from client.chain.reroutes import FindDetour, Rerouter
from client.stats import Repair
from swarm import wire
from swarm.errors import HopError, HopLeaving, HopTimeout, ReplicasDiffer, RouteError, SwarmError, Unreachable
from swarm.ids import PeerId, SessionId
from swarm.protocol.faults import error_of
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Attach, Credits, Fault, Hold, Open, Ready, RouteHop, Snapshot, Sweep, SweepFrame
from swarm.protocol.session import SessionState
from swarm.routing.route import Route
from swarm.runtime.tasks import TaskScope
from swarm.transport.dial import Dialer
from swarm.transport.hedged_link import follow
from swarm.transport.successor import SessionLink, SuccessorLink

REPLY_TIMEOUT_S = 120.0
OPEN_S, OPEN_PER_HOP_S = 10.0, 3.0
READY_S = 4.0
"""How long a new route may take to be attached before the next one is tried (R7)."""
SUSPECT_S = 30.0
"""How long a machine that was lost is avoided while others can take its place."""
RETRY_S = 0.5
ASKED_AGAIN = 2
"""How often a silent machine is asked again before somebody else is waited for; each time takes about a second."""
MOVE_S = 2.0
"""Between looks for a machine in place of one that leaves."""
HOLD_TTL_S = 10.0
MAX_REPAIRS = 1_000
MAX_DIFFERENCES = 100

logger = logging.getLogger(__name__)

FindRoute = Callable[[Collection[str], Sequence[RouteHop]], Awaitable[Route]]
"""Finds a route without some machines that keeps some hops."""


class Chain:
    """A running session; made by `open_chain`.

    wait_s: how long a machine is waited for that is missing, or is lost again and again before an answer comes.
    repairs: what was repaired so far. differences: between replicas.
    """

    def __init__(self, dialer: Dialer, route: Route, want: Open, detour: FindDetour, wait_s: float = 60.0) -> None:
        self.route = route
        self.generation = 0
        self.credits = Credits(0, 0, 0)
        self.repairs: list[Repair] = []
        self.differences: list[str] = []
        self._dialer = dialer
        self._want = want
        self._detours = Rerouter(detour)
        self._wait_s = wait_s
        self._session = SessionId(secrets.token_bytes(16))
        self._journal: Journal | None = None
        self._next: SessionLink | None = None
        self._scope: TaskScope | None = None
        self._answers = Answers(self._session, self.on_trouble)
        self._suspects: dict[str, tuple[float, HopError]] = {}
        self._lost_since: dict[str, float] = {}
        self._count_then = 0
        self._leaving: set[str] = set()
        self._trouble: SwarmError | None = None
        self._missing: RouteError | None = None
        self._has_told = False
        self._ready_for = -1
        self._news = asyncio.Event()
        self._is_repairing = False

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
        if self._lost():  # while nobody needed it: now somebody does
            self._news.set()

    async def answer(self, timeout_s: float = REPLY_TIMEOUT_S) -> Answer:
        """The next reply.

        Raises:
            SwarmError: what broke the chain for good.
        """
        return await self._answers.next(timeout_s, lambda: self._is_repairing)

    async def idle(self, most_ms: float) -> None:
        """Until an answer is there, or so much time has passed."""
        await self._answers.idle(most_ms / 1e3)

    # What the successor asks and says

    def replay(self, received: int | None) -> Sequence[SweepFrame | Snapshot]:
        """What hop 0 lacks: ids are all that it needs."""
        return () if self._journal is None else self._journal.replay(received)

    def on_ready(self, ready: Ready) -> None:
        """Every hop of the newest route is attached."""
        if ready.generation == self.generation:
            if self.generation == 0:
                self.credits = ready.credits
            self._ready_for = ready.generation
            self._news.set()

    def on_fault(self, fault: Fault) -> None:
        """A hop reports trouble; reports of older generations are stale (R1)."""
        if fault.generation >= self.generation:
            span = next(
                (str(hop.span) for hop in (*self.route.hops, *self.route.replicas) if hop.peer == fault.peer), "?"
            )
            self.on_trouble(error_of(fault, span))

    def on_trouble(self, error: SwarmError) -> None:
        """Something is wrong: a lost machine is replaced, anything else ends the session."""
        logger.info("generation %d: %s", self.generation, error)
        match error:
            case ReplicasDiffer():
                if str(error) not in self.differences:  # it may have come up both ways
                    logger.warning("%s", error)
                    self.differences = [*self.differences, str(error)][-MAX_DIFFERENCES:]
            case HopLeaving():
                self._leaving.add(error.peer)
            case HopError():
                self._suspects[error.peer] = (time.monotonic(), error)
                if error.peer not in self._replicas():  # without it the chain goes on as it is
                    self._trouble = error
            case _:
                self._trouble = error
                self._answers.give_up(error)
        self._news.set()

    # Opening, repairing, closing

    async def open(self, scope: TaskScope) -> None:
        """Attach every hop and open the reply stream.

        Raises:
            SwarmError: a hop refused, or did not answer in time.
        """
        self._scope = scope
        self._next = SuccessorLink(scope, self._dial, self)
        limit_s = OPEN_S + OPEN_PER_HOP_S * len(self.route.hops)
        try:
            async with asyncio.timeout(limit_s):
                self._next = follow(self._next, self._attach())
                while self._ready_for < 0:
                    await self._news.wait()
                    self._news.clear()
                    if self._trouble is not None:
                        raise self._trouble
                stream = self._follow_tail(scope)
                await stream.opened.wait()
        except TimeoutError:
            first = self.route.hops[0]
            raise HopTimeout(first.peer, str(first.span), f"no chain within {limit_s:.0f} s") from None
        scope.spawn(self._keep())

    async def close(self) -> None:
        """End the session everywhere, and wait until it is said."""
        self._answers.close()
        if self._next is not None:
            self._next.close("done")
            await self._next.gone()

    async def _keep(self) -> None:
        """Repair the chain whenever it needs it; a machine that leaves is left when somebody can take its place."""
        while True:
            moving = self._moving()
            with suppress(TimeoutError):
                async with asyncio.timeout(MOVE_S if moving else None):
                    await self._news.wait()
            self._news.clear()
            lost = self._lost() if self._answers.are_due else set()
            moving = self._moving()
            if not lost and not moving:
                continue
            self._is_repairing = bool(lost)
            try:
                await self._repair(sorted(lost | moving), is_move=not lost)
            except SwarmError as error:
                self._answers.give_up(error)
                return
            finally:
                self._is_repairing = False

    async def _repair(self, replaced: Sequence[str], *, is_move: bool) -> None:
        """Try routes until one stands (R7).

        Raises:
            SwarmError: none did in time.
        """
        assert self._scope is not None
        assert self._next is not None
        now, self._missing = time.monotonic(), None
        started = now if is_move else self._pause_since(replaced, now)
        if now - started > self._wait_s and self._trouble is not None:  # it was there again, and did nothing
            raise self._trouble
        self._hold_survivors(self._scope)
        for attempt in count():
            await asyncio.sleep(min(RETRY_S, 0.05 * attempt))
            self._trouble = None
            again = set(replaced) if attempt < ASKED_AGAIN and not is_move else set[str]()
            route = await self._way_around(started, again, is_move=is_move)
            if route is None:
                return
            self.route = route
            self.generation += 1
            logger.info("generation %d goes over %s", self.generation, ", ".join(map(_named, route.hops)))
            self._next = follow(self._next, self._attach())
            self._follow_tail(self._scope)
            if await self._stands():
                break
            if time.monotonic() - started > self._wait_s:
                raise self._missing or self._trouble or _nothing_stood(route)
            self._hold_survivors(self._scope)
        seconds = time.monotonic() - now
        logger.info("repaired in %.2f s", seconds)
        self.repairs = [*self.repairs, Repair(self.generation, tuple(replaced), seconds, is_move)][-MAX_REPAIRS:]
        await self._dialer.tidy()

    def _pause_since(self, lost: Collection[str], now: float) -> float:
        """When the first of these machines was lost since the latest answer."""
        if self._answers.count > self._count_then:
            self._count_then, self._lost_since, self._has_told = self._answers.count, {}, False
        return min(self._lost_since.setdefault(peer, now) for peer in lost)

    async def _way_around(self, started: float, again: set[str], *, is_move: bool) -> Route | None:
        """A route for the next generation; None when a move must wait, because nobody else has the layers.

        Whoever of `again` was silent is asked again at once where nobody else is known: its packets were lost, perhaps,
        and a new connection finds it. The directory is asked meanwhile.
        """
        assert self._scope is not None
        known, fresh = self._detours.known, partial(self._detours.fresh, self._scope)
        while True:
            unwanted = self._suspected(SUSPECT_S, HopError) | self._leaving
            silent, gone = self._suspected(RETRY_S, HopTimeout), self._suspected(RETRY_S, Unreachable)
            keep = [hop for hop in self.route.hops if hop.peer not in unwanted]
            spans = {hop.span for hop in keep}  # of two replicas, the other one goes on where one is lost
            keep += [hop for hop in self.route.replicas if hop.peer not in unwanted and hop.span not in spans]
            ways: list[tuple[set[str], FindRoute]] = [(unwanted, known)]
            if silent & again:
                ways.append((gone | silent - again, partial(self._detours.again, self._scope)))
            ways += [(unwanted, fresh), (unwanted if is_move else gone | silent, known)]
            for avoid, find in ways:
                try:
                    return await find(avoid, keep)
                except RouteError as error:
                    missing = self._missing = error
            if is_move:
                logger.info("cannot move yet: %s", missing)
                return None
            if time.monotonic() - started > self._wait_s:
                raise missing
            if not self._has_told and time.monotonic() - started > RETRY_S:  # it was not silent for a moment only
                self._has_told = True
                logger.warning("waiting up to %.0f s: %s", self._wait_s, missing)
            self._hold_survivors(self._scope)
            await asyncio.sleep(RETRY_S)

    async def _stands(self) -> bool:
        """Whether all hops of the newest route are attached before trouble or the deadline comes."""
        try:
            async with asyncio.timeout(READY_S):
                while self._ready_for < self.generation:
                    await self._news.wait()
                    self._news.clear()
                    if self._lost():
                        return False
        except TimeoutError:
            logger.info("generation %d does not stand in time", self.generation)
            return False
        return not self._lost()

    def _peers(self) -> set[str]:
        return {hop.peer for hop in self.route.hops}

    def _replicas(self) -> set[str]:
        return {hop.peer for hop in self.route.replicas}

    def _moving(self) -> set[str]:
        """Machines of this route that leave, and a replica that was lost."""
        lost = self._replicas() & self._suspected(SUSPECT_S, HopError)
        return lost | self._leaving & (self._peers() | self._replicas())

    def _lost(self) -> set[str]:
        """Machines of this route about which trouble was reported in this generation."""
        return {self._trouble.peer} & self._peers() if isinstance(self._trouble, HopError) else set()

    def _suspected(self, within_s: float, *kinds: type[HopError]) -> set[str]:
        """Machines that were lost lately, in one of these ways."""
        now = time.monotonic()
        return {
            peer for peer, (at, error) in self._suspects.items() if now - at < within_s and isinstance(error, kinds)
        }

    def _attach(self) -> Attach:
        want = self._want
        if self.generation:  # no new hop may have less than what the session uses
            credits = self.credits
            want = replace(want, window_tokens=credits.window_tokens, sweeps=credits.sweeps, nodes=credits.nodes)
        return Attach(self._session, self.generation, self.route.hops, 0, want, self.route.hedge, self.route.sealed)

    def _follow_tail(self, scope: TaskScope) -> ReplyStream:
        route, last = self.route, self.route.hops[-1]
        tails = [last, *(hop for hop in route.replicas if hop.span == last.span)]
        acked = self._journal.state.acked if self._journal is not None else 0
        channels = [self._dialer.channel(route.address(hop.peer), self._answers.stuck(hop)) for hop in tails]
        return self._answers.follow(scope, list(zip(tails, channels, strict=True)), self.generation, acked)

    def _hold_survivors(self, scope: TaskScope) -> None:
        """Hops behind a gap would take their client for dead (R9)."""
        held = wire.encode_hold(Hold(self._session, self.generation, HOLD_TTL_S))
        for hop in (*self.route.hops, *self.route.replicas):
            if hop.peer not in self._suspects:
                scope.spawn(_tell(self._dialer.channel(self.route.address(hop.peer)), held))

    async def _dial(self, hop: RouteHop, stuck: grpc.aio.Channel | None) -> tuple[grpc.aio.Channel, bool]:
        return self._dialer.channel(self.route.address(hop.peer), stuck), False


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


async def _tell(channel: grpc.aio.Channel, request: bytes) -> None:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(wire.HOLD)
    with suppress(grpc.aio.AioRpcError):  # lost as well: its predecessor will say so
        await call(request, timeout=1.0)


def _nothing_stood(route: Route) -> HopTimeout:
    first = route.hops[0]
    return HopTimeout(first.peer, str(first.span), "no route stood in time")


def _named(hop: RouteHop) -> str:
    return f"{PeerId(hop.peer)[-8:]} {hop.span}"
