"""An open session over a chain of hops: sweeps go in at hop 0, replies come straight from the tail.

When a machine is lost, the client alone decides (R1). `client.chain.repair_plan` says what to do; this file does it: it
opens, follows, waits and reports. Sweeps in flight survive. Owns no tokens and no rules.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

import grpc.aio

from client.base.stats import Repair
from client.chain.answers import Answer, Answers, PickCheck, ReplyStream, check_reply
from client.chain.blame import advised, blamed
from client.chain.progress import DueProgress, ProgressWatch, merged
from client.chain.receipts import TELL_S, ServedTokens
from client.chain.repair_plan import (
    FindRoute,
    Finish,
    GiveUp,
    HoldSurvivors,
    Log,
    Moment,
    NoRouteFound,
    Pause,
    RepairPlan,
    RepairStep,
    Rerouter,
    RouteAttached,
    RouteFound,
    RouteSearch,
    TakeRoute,
    TroubleReported,
    Wait,
)
from client.chain.settle import DISMISSED_S, ChainProof, Settler, TextLog, differing_link
from client.chain.tells import TellLog, parts_of, tell_of
from swarm.base.errors import (
    ConfigError,
    HopClosed,
    HopError,
    HopLeaving,
    HopMisbehaved,
    HopSlow,
    HopTimeout,
    LinkDiffers,
    PicksRefuted,
    RemoteProtocolError,
    ReplicasDiffer,
    RouteError,
    SwarmError,
)
from swarm.base.ids import PeerId, TreeNodeId
from swarm.base.tasks import TaskScope
from swarm.compute.grammars import GrammarPlace
from swarm.link.dial import Connection, Dialer
from swarm.link.endpoint import LinkPath
from swarm.link.hedged_link import follow
from swarm.link.link import Signer, introduce, pause, send_receipt
from swarm.link.successor import SessionLink, SuccessorLink
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey, prove_owner
from swarm.protocol.faults import SignatureCheck
from swarm.protocol.journal import Journal
from swarm.protocol.messages import (
    Attach,
    Border,
    Credits,
    Fault,
    Held,
    Hold,
    Open,
    OwnerProof,
    Ready,
    RepliesRequest,
    Reply,
    RouteHop,
    Rows,
    Snapshot,
    Sweep,
    SweepFrame,
    Tell,
)
from swarm.protocol.session import SessionState
from swarm.routing.route import Route

REPLY_TIMEOUT_S = 120.0
OPEN_S, OPEN_PER_HOP_S = 10.0, 3.0
HOLD_TTL_S = 10.0
MAX_REPAIRS = 1_000
MAX_DIFFERENCES = 100
PROGRESS_S = 0.2
"""Between looks at whether the chain moves, at most."""
ASLEEP_S = 0.3
"""When a look comes so much later than it should, this program did not run, and nobody else is to blame."""
ARRIVING_S = 2.0
"""Parts of a reply come, if one came so lately."""
HOLD_S = 1.0
"""How long a machine may take to hear that it is held or released; a session's end waits for that."""
STANDING_S = 0.8
"""How long a hop may take to say how far it is."""
DRAIN_S = 5.0
"""How long replies that a text does not need any more are waited for, so that all hops sign the same."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChainOwner:
    """What a chain needs of the session that opens it.

    Attributes:
        find_route: finds routes around machines.
        blame: called with every trouble that counts against machines.
        check_rows: raises RemoteProtocolError where a reply's hidden rows are none of this model's.
        is_signed: whether a fault is what its reporter said.
        valid_tokens: ids from here on are padding, which no honest tail picks.
    """

    find_route: FindRoute
    blame: Callable[[HopError], None]
    check_rows: Callable[[Rows], None]
    is_signed: SignatureCheck
    valid_tokens: int


class Chain:
    """A running session; made by `client.chain.opening`.

    Attributes:
        credits: what the hops granted of what was asked for: tokens, sweeps and nodes.
        repairs: what was repaired so far, the newest `MAX_REPAIRS`.
        differences: between replicas, the newest `MAX_DIFFERENCES`.
        roundings: the first two marks of its routes' processors (`swarm.compute.rounding`); None is of one that mixed.
        signs: whether it signs for what machines computed.
    """

    def __init__(
        self,
        dialer: Dialer,
        route: Route,
        want: Open,
        owner: ChainOwner,
        wait_s: float = 60.0,
    ) -> None:
        """Prepare a session.

        Args:
            dialer: connects to hop 0 and to the tail.
            route: the chain to begin with.
            want: what the session needs of every hop.
            owner: finds routes around machines, and hears of them.
            wait_s: how long a machine is waited for that is missing, or is lost again and again before an answer comes.
        """
        self.signs = True
        self._ticket = b""
        self._proof: OwnerProof | None = None
        self.credits = Credits(0, 0, 0)
        self.repairs: list[Repair] = []
        self.differences: list[str] = []
        self.roundings = {route.rounding}
        self._dialer = dialer
        self._want = want
        self._plan = RepairPlan(route, wait_s)
        self._rerouter = Rerouter(owner.find_route)
        self._key = SessionKey.fresh()
        self._prefix: tuple[Border, ...] = ()
        self._journal: Journal | None = None
        self._tells: TellLog | None = None
        self._next: SessionLink | None = None
        self._owner = owner
        self._picks = PickCheck(owner.valid_tokens, self.on_trouble)
        self._scope: TaskScope | None = None
        self._answers = Answers(self._key, self.on_trouble, self._check, self._on_answer, self._picks)
        self._news = asyncio.Event()
        self._progress = ProgressWatch()
        self._taken_s = self._awake_s = time.monotonic()
        self._differed_in = -1
        self._held: dict[str, Connection] = {}
        self._log: TextLog | None = None
        self._served = ServedTokens(route.hops)
        self._signing: asyncio.Task[None] | None = None
        self._logged: Route | None = None
        self._is_answered = asyncio.Event()

    @property
    def route(self) -> Route:
        """The newest route."""
        return self._plan.route

    @property
    def generation(self) -> int:
        """Its number."""
        return self._plan.generation

    @property
    def hops(self) -> int:
        """Machines that a sweep passes."""
        return len(self.route.hops)

    @property
    def key(self) -> SessionKey:
        """By which it is commanded."""
        return self._key

    @property
    def want(self) -> Open:
        """What it asked of its hops at first."""
        return self._want

    @property
    def find_route(self) -> FindRoute:
        """Finds routes of its numeric class around machines."""
        return self._owner.find_route

    @property
    def state(self) -> SessionState:
        """The session's, with every sweep that was sent."""
        assert self._journal is not None, "it began"
        return self._journal.state

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

    def wait_by(self, ticket: bytes) -> None:
        """Open it as the one that full machines know by this ticket (P16)."""
        self._ticket = ticket

    def own(self, identity: Signer) -> None:
        """Say to all machines whose session it is (R18). Before it is opened."""
        self._proof = prove_owner(self._key.session, identity.public_key, identity.sign)

    def accept_rows(self, max_bytes: int) -> None:
        """Take replies with so many bytes of hidden rows, each; none without this. Before it is opened."""
        self._answers.rows_bytes = max_bytes

    def hurry(self) -> None:
        """Leave a machine soon that keeps the session from opening, if there is a route without it. Before that."""
        self._progress.is_hasty = True

    def ask_for(self, prefix: Sequence[Border]) -> None:
        """Ask what hops hold of these beginnings (P15), before it is opened; then `credits.held` is one that all have.

        Args:
            prefix: the longest first.
        """
        self._prefix = () if self.route.hedge is not None else tuple(prefix)

    def begin(self, state: SessionState) -> None:
        """What is sent from now on belongs to a session with this state."""
        self._journal = Journal(state)
        self._served.committed = len(state.committed)
        if self._want.ends_only:
            self._tells = TellLog(state)
        if self._log is not None:
            self._log.begin(state)
        if self.generation:  # a tail that came since the session was opened does not know what it begins with
            for tell in self._told():
                self._answers.tell(tell)

    @property
    def ends_only(self) -> bool:
        """Whether token ids go to the ends alone (P17)."""
        return self._want.ends_only

    @property
    def _is_split(self) -> bool:
        """Whether hop 0 embeds tokens, and another machine, which the client tells itself, picks them (P17)."""
        return self._want.ends_only and self.hops > 1

    def _told(self) -> Iterator[Tell]:
        """What a tail has to know that knows nothing."""
        return self._tells.all() if self._tells is not None and self._is_split else iter(())

    def keep_log(self) -> None:
        """Keep what is told, so that a text of this session can be proved; before `begin`.

        Raises:
            ConfigError: two machines of one hop answer for nothing alone.
        """
        if self.route.hedge is not None:
            raise ConfigError("proof: a hedged text proves nothing, as its rows come from two machines")
        self._log, self._logged = TextLog(routes={self.generation: self.route.hops}), self.route

    @property
    def keeps_log(self) -> bool:
        """Whether a text of this session can be proved."""
        return self._log is not None

    async def prove(self, prompt: Sequence[int], answer: Sequence[int], *, with_rows: bool = False) -> ChainProof:
        """Have all hops sign what they did for this session's text, and put it together.

        Args:
            prompt: of the text.
            answer: its tokens.
            with_rows: add the rows that hops sent, so that each span can be checked by itself.

        Raises:
            EvidenceError: machines signed something else than they said while the text ran.
        """
        log = self._log
        assert log is not None, "keep_log came first"
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while self._answers.are_due:
                    self._is_answered.clear()
                    await self._is_answered.wait()
        hops, settler = self.route.hops, Settler(self._key, log, self._connection)
        await settler.settle(hops)
        for peer, why in log.refused.items():
            logger.warning("node %s did not sign this text: %s", peer, why)
        told = log.told(self._key, self._want.fingerprint, prompt, answer)
        return await settler.evidence(told, hops, with_rows=with_rows)

    def follow(self, place: GrammarPlace | None) -> None:
        """The picks of what is sent from now on must follow this grammar; one that does not is its tail's fault."""
        self._picks.follow(place)

    def beside(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Start work that ends with the chain; it raises nothing."""
        assert self._scope is not None, "it is open"
        return self._scope.spawn(work)

    def send(self, sweep: Sweep) -> None:
        """Start a sweep; never waits. While the chain is repaired, it follows with the replay."""
        assert self._next is not None and self._journal is not None, "open and begin come first"  # noqa: PT018
        assert self._scope is not None, "it is open"
        sweep = replace(sweep, generation=self.generation)
        served, cut = self._served, sweep.truncate_to
        served.sent += sweep.committed - (served.committed if cut is None else cut)
        served.committed, served.after[sweep.sequence] = sweep.committed, served.sent
        self._answers.expect(sweep)
        self._picks.expect(sweep, self._journal.state, self._scope)
        self._journal.note(sweep)
        if self._log is not None:
            self._log.sweeps.append(sweep)
        if self._tells is not None:
            self._tells.note(sweep)
        is_split = self._is_split
        self._next.push(SweepFrame(sweep.without_settings() if is_split else sweep))
        if is_split:  # after it: the tail needs it last
            for tell in parts_of(tell_of(sweep)):
                self._answers.tell(tell)
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

    def sign(self) -> None:
        """Sign for what the machines of the route computed so far, and let them hear of it; never waits."""
        sealed = self._served.receipt(self._key, self._want.fingerprint) if self.signs else None
        channel = None if self._next is None else self._next.channel
        if sealed is not None and channel is not None and self._scope is not None:
            self._signing = self._scope.spawn(send_receipt(channel, sealed, TELL_S))

    # What the next hop asks and reports

    def replay(self, received: int | None) -> Sequence[SweepFrame | Snapshot]:
        """What hop 0 lacks: ids are all that it needs."""
        messages = [] if self._journal is None else self._journal.replay(received)
        return [one.without_settings() for one in messages] if self._is_split else messages

    def on_sent(self, hop: RouteHop, since: int, message: SweepFrame | Snapshot) -> None:
        """A message is on its way to hop 0."""
        if self._log is not None:
            self._log.sent(hop, since, message)

    def on_ready(self, ready: Ready) -> None:
        """Every hop of a route is attached, and each was content with what the others grant."""
        suffice = ready.credits.suffice(self._wanted(), in_use=self.generation > 0)
        if ready.generation == self.generation and not suffice:
            first = self.route.hops[0]
            self.on_trouble(HopMisbehaved(first.peer, str(first.span), "grants less than the session needs"))
            return
        if ready.generation == self.generation == 0:
            want = self._want
            held = next((one.tokens for one in self._prefix if one.tokens <= ready.credits.held), 0)
            self.credits = ready.credits.min_with(Credits(want.window_tokens, want.sweeps, want.nodes, held))
        self._plan.report(RouteAttached(ready.generation), time.monotonic())
        self._news.set()

    def on_fault(self, fault: Fault, via: RouteHop) -> None:
        """A hop reports trouble; reports of older generations are stale (R1)."""
        if fault.generation == self.generation:
            self.on_trouble(blamed(fault, via, self._key.session, self.route, self._owner.is_signed))

    def on_trouble(self, error: SwarmError) -> None:
        """Something is wrong: a lost machine is replaced, anything else ends the session."""
        if isinstance(error, ReplicasDiffer):
            if self.route.hedge is not None and self._differed_in < self.generation:  # it may have come up both ways
                self._differed_in = self.generation
                logger.warning("%s", error)
                self.differences = [*self.differences, str(error)][-MAX_DIFFERENCES:]
            return
        error = advised(error, self.route) if isinstance(error, HopError) else error
        logger.info("generation %d: %s", self.generation, error)
        match error:
            case HopError():
                if not isinstance(error, HopLeaving):
                    self._owner.blame(error)
                self._plan.report(TroubleReported(error), time.monotonic())
            case _:
                self._plan.report(TroubleReported(error), time.monotonic())
                self._answers.give_up(error)
        self._news.set()

    def refute(self, error: PicksRefuted) -> None:
        """A tail was convicted by its own rows: it is left, and `answer` says so before anything else."""
        self._answers.refute(error)
        self.on_trouble(error)

    async def final_rows(self, tail: RouteHop, nodes: Sequence[TreeNodeId]) -> Rows | None:
        """The final rows after which a tail picked, as it shows them afterwards (S5); None where it does not."""
        with suppress(SwarmError, grpc.aio.AioRpcError, TimeoutError):
            rows = await Settler(self._key, TextLog(), self._connection).final(tail, nodes)
            self._owner.check_rows(rows)
            return rows
        return None

    def forget_refuted(self) -> None:
        """What they picked is taken back: `answer` need not say it any more."""
        self._answers.forget_refuted()

    # Opening, repairing, closing

    async def open(self, scope: TaskScope) -> None:
        """Attach every hop and open the reply stream.

        Raises:
            SwarmError: a hop refused, or did not answer in time.
        """
        self._scope, self._next = scope, SuccessorLink(scope, self._dial, self._key, self)
        limit_s = OPEN_S + OPEN_PER_HOP_S * len(self.route.hops)
        try:
            async with asyncio.timeout(limit_s):
                self._taken_s = time.monotonic()
                scope.spawn(self._watch_progress(scope))
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
            signing = () if self._signing is None else (self._signing,)
            await asyncio.gather(self._next.gone(), *map(self._release, list(self._held)), *signing)

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
                await self._settle_left(step)
                self._take_route(step, scope)
            case Log(level, message):
                logger.log(level, "%s", message)
            case Finish(repair):
                await self._finish(repair, scope)
            case GiveUp(error):
                raise error
            case _:
                assert_never(step)

    def _hold(self, hops: Sequence[RouteHop], scope: TaskScope) -> None:
        """Hops behind a gap would take their client for dead (R9)."""
        request = wire.encode_hold(Hold(self._key.session, self.generation, HOLD_TTL_S))
        for hop in hops:
            with suppress(SwarmError):  # it announces no certificate: nobody dials it
                self._held[hop.peer] = self._connection(hop)
                scope.spawn(_tell(self._held[hop.peer], self._key, request))

    async def _release(self, peer: str) -> None:
        """A hop that was held for a chain that does without it, or that stays broken, is free at once (R9)."""
        if (held := self._held.get(peer)) is not None:  # not released meanwhile
            request = wire.encode_hold(Hold(self._key.session, self.generation, is_release=True))
            await _tell(held, self._key, request)
            self._held.pop(peer, None)

    async def _search(self, search: RouteSearch, scope: TaskScope) -> None:
        try:
            found = RouteFound(await self._rerouter.find(scope, search))
        except RouteError as error:
            self._plan.report(NoRouteFound(error), time.monotonic())
        else:
            self._plan.report(found, time.monotonic())

    async def _settle_left(self, step: TakeRoute) -> None:
        """Machines that the chain leaves sign what they did, those that live."""
        old, self._logged = self._logged, step.route
        if self._log is None or old is None:
            return
        left = [hop for hop in old.hops if hop not in step.route.hops]
        await Settler(self._key, self._log, partial(self._connection_in, old)).settle(left, DISMISSED_S)

    def _take_route(self, step: TakeRoute, scope: TaskScope) -> None:
        """Send the route down the chain (R2), and hear its tail."""
        assert self._next is not None
        if step.route.hops != self._served.route:
            self.sign()  # machines of the old route that live have a part of what it computed
            self._served.follow(step.route.hops)
        if self._log is not None:
            self._log.routes[step.generation] = step.route.hops
        if len(self.roundings) == 1 and step.route.rounding not in self.roundings:
            self.roundings.add(step.route.rounding)
            logger.warning("the text goes on over a processor that rounds otherwise, and may differ from here on")
        logger.info("generation %d goes over %s", step.generation, ", ".join(map(_named, step.route.hops)))
        self._taken_s = time.monotonic()
        self._progress.forget()
        self._next = follow(self._next, self._attach())
        self._follow_tail(scope)

    async def _finish(self, repair: Repair, scope: TaskScope) -> None:
        logger.info("repaired in %.2f s", repair.seconds)
        self.repairs = [*self.repairs, repair][-MAX_REPAIRS:]
        for hop in (*self.route.hops, *self.route.replicas):
            self._held.pop(hop.peer, None)
        for left in self._held:
            scope.spawn(self._release(left))
        await self._dialer.tidy()

    def _wanted(self) -> Open:
        if not self.generation:
            return replace(self._want, prefix=self._prefix)
        credits = self.credits  # no new hop may have less than what the session uses
        return replace(self._want, window_tokens=credits.window_tokens, sweeps=credits.sweeps, nodes=credits.nodes)

    def _attach(self) -> Attach:
        route = self.route
        attach = Attach(self._key.session, self.generation, route.hops, 0, self._wanted(), route.hedge, route.sealed)
        return self._key.command(replace(attach, ticket=self._ticket, owner=self._proof))

    # Whether the chain moves

    def _check(self, reply: Reply, sweep: Sweep) -> None:
        assert self._journal is not None, "a sweep was sent"
        check_reply(reply, sweep, self._journal.state)
        self._picks.check(reply)
        if reply.rows is not None:
            self._owner.check_rows(reply.rows)
        self._compare_heads(reply)

    def _compare_heads(self, reply: Reply) -> None:
        """Notice where two neighbours do not say the same of their link: once, for all of a generation."""
        hops = self.route.hops
        if reply.generation != self.generation or len(reply.times) != len(hops) or self._differed_in >= self.generation:
            return
        place = differing_link(reply.times)
        if place is None:
            return
        self._differed_in = self.generation
        before, hop = hops[place - 1], hops[place]
        error = LinkDiffers(hop.peer, str(hop.span), f"received other rows than {before.peer} sent, they say")
        logger.warning("%s", error)
        self.differences = [*self.differences, str(error)][-MAX_DIFFERENCES:]
        self.on_trouble(error.on_link(before.peer, is_even=True))

    def _on_answer(self, total_ms: float, sweep: Sweep) -> None:
        self._is_answered.set()
        self._served.answered = self._served.after.pop(sweep.sequence, self._served.answered)
        self._picks.answered(sweep.sequence)
        self._progress.answered(total_ms, sweep.count, self.route.forecast)

    async def _watch_progress(self, scope: TaskScope) -> None:
        """Find the hop that lives and does not move, or is too slow (R17)."""
        while True:
            if await pause(self._progress.rest_s(self._due(), time.monotonic(), PROGRESS_S)) > ASLEEP_S:
                self._awake_s = time.monotonic()
            due, route, generation = self._due(), self.route, self.generation
            if due is None or not self._progress.must_ask(due, time.monotonic()):
                continue
            said = await self._standings(route, generation)
            now = self._due()
            if now is None or generation != self.generation or now.sequence != due.sequence:
                continue
            error = self._progress.judge(now, route.hops, said, time.monotonic())
            if isinstance(error, HopSlow) and not await self._is_slower(error, now, scope):
                continue
            if isinstance(error, HopSlow) and not now.sequence:  # there is no session yet that could move
                error = HopTimeout(error.peer, error.span, error.reason).on_link(error.other, is_even=True)
            if error is not None:
                self.on_trouble(error)

    async def _is_slower(self, error: HopSlow, due: DueProgress, scope: TaskScope) -> bool:
        """Whether a route around a machine that is slow should be clearly faster than this one is."""
        generation, around = self.generation, None
        with suppress(RouteError):
            around = await self._rerouter.find(scope, self._plan.detour(error.peer, time.monotonic()))
        is_alike = around is not None and self.route.rounding in (None, around.rounding)  # no text changes for speed
        forecast = around.forecast if around is not None and is_alike else None
        return generation == self.generation and self._progress.may_leave(due, forecast, time.monotonic())

    def _due(self) -> DueProgress | None:
        """What is waited for; None while it is being repaired, or nothing is."""
        plan, oldest = self._plan, self._answers.oldest
        since_s = max(self._taken_s, self._awake_s)
        if plan.lost or (plan.is_repairing and plan.is_attached):
            return None
        if not plan.is_attached:
            return DueProgress(self.route.forecast, self.generation, 0, 0, since_s)
        if oldest is None or self._next is None or self._journal is None:
            return None
        sweep, left_s = oldest
        rows, newest_s = sweep.count, self._answers.newest_s
        is_first = newest_s < self._taken_s
        if self.generation and is_first:  # a new hop runs all of the text again
            rows += len(self._journal.state.committed)
        heard_s = self._answers.heard_s
        is_arriving = heard_s > newest_s and time.monotonic() - heard_s < ARRIVING_S
        since_s = max(since_s, left_s, newest_s)
        due = DueProgress(self.route.forecast, self.generation, sweep.sequence, rows, since_s)
        return replace(due, first_has=self._next.delivered, is_arriving=is_arriving, is_first=is_first)

    async def _standings(self, route: Route, generation: int) -> list[Held | None]:
        """How far each hop says it is; of two replicas, how far either is."""
        request = wire.encode_hold(Hold(self._key.session, generation))
        said = list(await asyncio.gather(*(self._ask(hop, request) for hop in (*route.hops, *route.replicas))))
        if route.hedge is not None:
            said[route.hedge.index] = merged(said[route.hedge.index], said.pop())
        return said

    async def _ask(self, hop: RouteHop, request: bytes) -> Held | None:
        try:
            connection = self._connection(hop)
        except SwarmError:  # it announces no certificate, or is not in the route any more: nobody dials it
            return None
        return await send_hold(connection, self._key, request, STANDING_S)

    def _follow_tail(self, scope: TaskScope) -> ReplyStream:
        route, last = self.route, self.route.hops[-1]
        tails = [last, *(hop for hop in route.replicas if hop.span == last.span)]
        acked = self._journal.state.acked if self._journal is not None else 0
        dials = [partial(self._connection, hop, self._answers.stuck(hop)) for hop in tails]
        request = RepliesRequest(self._key.session, self.generation, acked, reads_packed=True)
        return self._answers.follow(scope, list(zip(tails, dials, strict=True)), request, self._told)

    async def _dial(self, hop: RouteHop, stuck: grpc.aio.Channel | None) -> Connection:
        return self._connection(hop, stuck)

    @property
    def paths(self) -> tuple[LinkPath | None, LinkPath | None]:
        """How the first machine and the last are reached; None for one that is not connected."""
        first, last = (self.route.endpoint(hop.peer) for hop in (self.route.hops[0], self.route.hops[-1]))
        return self._dialer.path(first), self._dialer.path(last)

    def _connection(self, hop: RouteHop, stuck: grpc.aio.Channel | None = None) -> Connection:
        return self._connection_in(self.route, hop, stuck)

    def _connection_in(self, route: Route, hop: RouteHop, stuck: grpc.aio.Channel | None = None) -> Connection:
        try:
            endpoint = route.endpoint(hop.peer)
        except KeyError:  # a repair came between
            raise HopClosed(hop.peer, str(hop.span), "is not in the route any more") from None
        return Connection(self._dialer.channel(endpoint, stuck), endpoint, is_member=self._dialer.is_member)


async def _tell(connection: Connection, key: SessionKey, request: bytes) -> None:
    await send_hold(connection, key, request, HOLD_S)


async def send_hold(connection: Connection, key: SessionKey, request: bytes, timeout_s: float) -> Held | None:
    """Hold a session at a machine, or ask how far it is there; None where no answer comes."""
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connection.channel.unary_unary(wire.HOLD)
    metadata = introduce(key, connection.endpoint, wire.HOLD, request)
    try:
        return wire.decode_held(await call(request, timeout=timeout_s, metadata=metadata))
    except (grpc.aio.AioRpcError, RemoteProtocolError):  # lost as well: its predecessor will say so
        return None


def _named(hop: RouteHop) -> str:
    return f"{PeerId(hop.peer)[-8:]} {hop.span}"
