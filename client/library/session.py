"""A session of one client: opened on the best route, then generations run in it, one after another.

Owns no text rules, no tree and no network: it brings `client.decode.loop`, `client.chain.chain` and
`client.decode.walk` together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from client.base.options import CodecChoice
from client.base.stats import PickChecks, Proof, Result, Stats, TokenLogProbs
from client.base.target import Target
from client.chain.audit import AuditedText, Auditor
from client.chain.blame import RETRY_S, Refusals
from client.chain.chain import Chain, ChainOwner
from client.chain.opening import ChainOpening, PeerLatency, first_open
from client.decode.loop import Generation
from client.decode.pick_watch import HeadChecker, PickWatch
from client.decode.policy import SWEEPS_IN_FLIGHT
from client.decode.prompt_parts import LARGEST_UNANSWERED
from client.decode.state import ForcedText, GenerationState
from client.decode.walk import Walk
from client.library.jobs import PREFILL_CHUNK
from client.library.known_prefixes import KnownPrefixes, fresh_secret
from swarm.base.errors import (
    GenerationInterrupted,
    HopError,
    LocalProtocolError,
    PicksRefuted,
    RegistryError,
    RemoteProtocolError,
    RouteError,
    SwarmError,
    TextChanged,
    UnsupportedModel,
)
from swarm.base.ids import ModelIdentity
from swarm.base.layers import Span, name_layers
from swarm.base.tasks import TaskScope
from swarm.compute.grammars import ForcedTokens, GrammarPlace
from swarm.compute.row_codec import LOSSLESS, decode_rows, lossless_codec
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord
from swarm.directory.registry import KNOWN_S, RECENT_S, Registry
from swarm.directory.signed_faults import is_signed
from swarm.link.dial import Dialer
from swarm.protocol.limits import MAX_PROMPT_ROWS, MAX_REPLY_ROWS, TICKET_BYTES
from swarm.protocol.messages import Border, Codec, Open, RouteHop, Rows, Sampling
from swarm.protocol.numeric_class import NumericClass, promises_texts
from swarm.protocol.prefix import BlockNames, borders
from swarm.protocol.session import Limits
from swarm.routing.own_layers import OwnLayers
from swarm.routing.plausible import plausible
from swarm.routing.route import Route, RouteQuery, best_route, hedged
from swarm.trust.evidence import EvidenceError

REPLAY_LAYER_MS = 1_000.0
"""Price of a layer on a machine without the session's KV, so that a repair keeps the machines that have it."""

EXPECTED_TOKENS = 1_024
"""New tokens of a text for which machines reserve KV at first, however many may come."""
MOST_SLOWER = 2.0
"""By this factor a chain that holds a text's beginning may be slower than the fastest one, and is taken still."""
MAX_REFUTED = 8
"""How often one text is begun again because of tails that were refuted."""
RANDOM_HEDGE = 0.1
"""Probability that any hop of a route has the replica, and not the slowest."""

MIDDLE_HOPS = 3
"""A chain of so many machines has one between its ends."""
_IDS_TRAVEL = "ids travel"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a new session's text begins with, so that machines which hold some of it need not compute that (P15).

    Attributes:
        tokens: token ids.
        new_tokens: that may come after them.
        secret: 16 to 64 bytes, of all who may use what others of them had computed; None: of this swarm's object.
        is_proved: whether the text is to be proved.
    """

    tokens: Sequence[int]
    new_tokens: int
    secret: bytes | None = None
    is_proved: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain by one sweep.

    Attributes:
        text: the next characters; empty while tokens make no whole one.
        result: of the whole generation, in the last piece of a stream.
        tokens: the ids that became certain since the last piece.
        log_probs: one per token, where they were asked for.
        sweeps: the sweeps that answered since the last piece, where `trace` was asked for: plain values for JSON.
        reasoning: in a chat, the next characters of what the model thinks before it answers.
    """

    text: str
    result: Result | None = None
    tokens: tuple[int, ...] = ()
    log_probs: tuple[TokenLogProbs, ...] = ()
    sweeps: tuple[dict[str, object], ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class _SessionNeeds:
    """What a session asks machines for: tokens of its window, tree nodes of a sweep, beginnings of its text.

    Attributes:
        expected_tokens: KV that it should take, for two trees too; 0: all that it may take.
        holders: the chain that is believed to hold the longest beginning.
    """

    window_tokens: int
    nodes: int
    prefix: tuple[Border, ...] = ()
    expected_tokens: int = 0
    holders: tuple[RouteHop, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """An open chain and the sequence that it holds.

    Attributes:
        chain: of hops.
        walk: the client's side of the session's rules.
        codec: how hidden rows travel.
        nearby: learns how fast the machines of the chain are.
        checker: checks picks against final rows; None: nobody does.
        auditor: audits texts, some of them; None audits nothing.
        drawn: what its coin said of the first text at the opening, until that is over; empty where it was not asked.
    """

    chain: Chain
    walk: Walk
    codec: Codec
    nearby: PeerLatency = field(default_factory=PeerLatency)
    checker: HeadChecker | None = None
    auditor: Auditor | None = None
    drawn: list[bool] = field(default_factory=list)

    @property
    def window_tokens(self) -> int:
        """Tokens that the sequence may grow to."""
        return self.chain.credits.window_tokens

    @property
    def held(self) -> tuple[int, ...]:
        """The first tokens of its sequence, which every hop has for certain."""
        return self.walk.held

    async def run(
        self, state: GenerationState, report: Callable[[Stats], None] = lambda _: None
    ) -> AsyncGenerator[Piece, None]:
        """Generate; what the session's sequence has in common with the prompt does not travel again.

        What a refuted tail picked is taken back, and the text goes on from what others gave.

        Args:
            state: of the generation.
            report: takes the stats, however the generation ends.

        Raises:
            GenerationInterrupted: the chain broke midway; carries text and tokens so far.
            TextChanged: some of what was handed out was picked by a tail that was refuted, and is another text's.
        """
        started = state.clock()
        repaired = len(self.chain.repairs)
        first_token = started
        told = _ShownText(state)
        state.policy.expect(self.chain.route_key, self.chain.route.forecast)
        self._follow_grammar(state)
        state.watch = watch = PickWatch(
            self.checker, self.nearby.doubts, state.sampling, len(state.text.tokens), self.chain
        )
        try:
            with state.with_drafter():
                async for text in self._generated(state, watch):
                    if first_token == started and len(state.text.tokens) > state.resumed_tokens:
                        first_token = state.clock()
                    if watch.holds and not state.is_held:
                        told.hold()
                        continue
                    piece = told.piece(text)
                    if (piece.text or state.is_held or state.tracer is not None) and not state.text.stopped:
                        yield self._traced(piece, state)
        except TextChanged:
            raise
        except SwarmError as error:
            if isinstance(error, HopError):
                self.nearby.failed(error.peer)
            state.text.finish()
            interrupted = GenerationInterrupted(str(error), state.text.text, state.text.tokens)
            interrupted.unfinished = state.unfinished()
            raise interrupted from error
        finally:
            told.release()
            stats = self._stats(state, first_token - started, state.clock() - started, repaired)
            report(stats)
            self.chain.sign()
            self.nearby.served(self.chain.route, stats)
        logger.info(
            "session over: %d tokens, %d sweeps, acceptance length %.2f, %.1f tokens/s",
            *(stats.tokens, len(stats.sweeps), stats.acceptance_length, stats.tokens_per_s),
        )
        yield replace(self._traced(told.rest(), state), result=await self._result(state, stats))
        await self._audit(state)

    async def _result(self, state: GenerationState, stats: Stats) -> Result:
        ended = state.text
        return Result(
            ended.text,
            tuple(ended.tokens),
            ended.finish_reason or "length",
            stats,
            tuple(state.log_probs),
            ended.stop_string,
            await self._proof(state),
        )

    async def _generated(self, state: GenerationState, watch: PickWatch) -> AsyncIterator[str]:
        """The text as it becomes certain, begun again from what is not refuted as often as need be.

        Yields:
            What `Generation.run` does; the text of `state` may have become shorter meanwhile.
        """
        for _ in range(MAX_REFUTED):
            try:
                async for text in Generation(state, self.chain, self.walk).run():
                    yield text
                await watch.settle()
            except PicksRefuted:
                if not watch.refuted:  # nobody else could take its place
                    raise
            if not watch.refuted:
                return
            refuted = next(iter(watch.refuted.values()))
            right = watch.right_tokens()
            logger.warning("%s; %d tokens are taken back", refuted, len(state.text.tokens) - right)
            state.go_back(right)
            watch.go_back(right)
            self.chain.forget_refuted()
        raise refuted

    async def _proof(self, state: GenerationState) -> Proof | None:
        """What the text proves, where that was asked for. Machines that do not sign are avoided for a while."""
        if not state.is_proved:
            return None
        if not self.chain.keeps_log:
            return Proof(b"", problems=("a conversation is not proved: ask for one text, without a chat",))
        tokens, resumed = state.text.tokens, state.resumed_tokens
        prompt, answer = (*state.prompt, *tokens[:resumed]), tokens[resumed:]
        try:
            made = await self.chain.prove(prompt, answer, with_rows=state.options["proof"] == "rows")
        except EvidenceError as error:
            return Proof(b"", problems=(f"no proof: {error}",))
        for peer, _ in made.refused:
            self.nearby.failed(peer)
        checked = made.checked
        problems = [f"node {peer}: {why}" for peer, why in made.refused]
        problems += [f"{one.sender} and {one.receiver} signed different rows" for one in checked.differing]
        unsigned = tuple(sorted({peer for _, peer in checked.unsigned}))
        return Proof(made.data, checked.signed_picks, unsigned, tuple(problems))

    async def _audit(self, state: GenerationState) -> None:
        """Let the text be audited, if a coin says so; its reader has all of it."""
        text = None if self.auditor is None else AuditedText.of(self.chain, len(state.prompt), state.sampling)
        if self.auditor is not None and text is not None:
            await self.auditor.text_is_over(text, self.drawn.pop() if self.drawn else None)

    def _follow_grammar(self, state: GenerationState) -> None:
        grammar, rules = state.grammar, state.sampling.rules
        if rules is not None and rules.grammar is not None and grammar is None:  # a tail could ignore it
            raise LocalProtocolError("grammar", "is not compiled, so picks cannot be checked by it")
        if grammar is None or rules is None:
            self.chain.follow(None)
            return
        self.chain.follow(GrammarPlace(grammar, rules))
        if not state.sampling.multistep:  # there every child is drawn
            state.forced = ForcedText(ForcedTokens(grammar, rules), self.chain.beside)

    def _traced(self, piece: Piece, state: GenerationState) -> Piece:
        """The piece, with the sweeps that answered meanwhile."""
        return piece if state.tracer is None else replace(piece, sweeps=state.tracer.take(self._hops))

    @property
    def _hops(self) -> tuple[str, ...]:
        """The chain as it is shown to people."""
        return tuple(f"{hop.peer[-8:]} {hop.span}" for hop in self.chain.route.hops)

    def _stats(self, state: GenerationState, first_token_s: float, total_s: float, repaired: int) -> Stats:
        route = self.chain.route
        (mark,) = self.chain.roundings if len(self.chain.roundings) == 1 else (None,)
        is_lossy = self.codec is Codec.INT8
        numeric_class = replace(_class_of(route.numeric_class), lossy_rows=is_lossy, rounding=mark or "")
        return Stats(
            tokens=len(state.text.tokens) - state.resumed_tokens,
            prompt_tokens=len(state.prompt),
            reused_tokens=state.kept_tokens,
            prefill_sweeps=state.prefill_sweeps,
            seed=state.sampling.seed,
            reproducible=numeric_class.is_reproducible and mark is not None and not _is_multistep(state.sampling),
            numeric_class=str(numeric_class),
            time_to_first_token_s=first_token_s,
            total_s=total_s,
            sweeps=tuple(state.sweeps),
            hops=self._hops,
            replicas=tuple(f"{hop.peer[-8:]} {hop.span}" for hop in route.replicas),
            repairs=tuple(self.chain.repairs[repaired:]),
            differences=tuple(self.chain.differences),
            ids_travel=len(route.hops) >= MIDDLE_HOPS and not self.chain.ends_only,
            paths=tuple("" if path is None else path.value for path in self.chain.paths),
            picks=PickChecks() if state.watch is None else state.watch.checks,
        )


@dataclass(frozen=True, slots=True)
class SessionOpener:
    """Opens sessions of one model in one swarm.

    Attributes:
        target: the model as its client knows it.
        identity: the model as the swarm knows it.
        registry: the directory.
        dialer: connects to machines.
        join: the peers that the user named, for messages.
        nodes: tree nodes per sweep that routes are chosen for.
        codec: how hidden rows travel between hops.
        wait_s: how long to wait for a machine where nobody serves some layers.
        hedge: whether one hop gets a second machine: mostly the slowest, at times any.
        nearby: measured delays to machines.
        reproducible: use only machines whose numeric class promises the same text.
        own: layers that only machines of the user's choice compute; None for none.
        aux_layers: what enters these comes beside the hidden rows of replies (P14).
        secret: names what its sessions have machines compute (P15), where they are not given another one.
        known: which chain holds which beginnings.
        checker: checks picks against final rows; None: nobody does.
        auditor: audits texts, some of them; None audits nothing.
        signs: whether its sessions sign for what machines computed.
        owner: the identity that says to all machines whose sessions these are; None: nobody says it.
    """

    target: Target
    identity: ModelIdentity
    registry: Registry
    dialer: Dialer
    join: tuple[str, ...]
    nodes: int
    codec: CodecChoice = "lossless"
    wait_s: float = 60.0
    hedge: bool = False
    nearby: PeerLatency = field(default_factory=PeerLatency)
    reproducible: bool = False
    own: OwnLayers | None = None
    aux_layers: tuple[int, ...] = ()
    secret: bytes = field(default_factory=fresh_secret, repr=False)
    known: KnownPrefixes = field(default_factory=KnownPrefixes)
    checker: HeadChecker | None = None
    auditor: Auditor | None = None
    signs: bool = True
    owner: Identity | None = None
    _notes: list[str] = field(default_factory=list)

    async def route(self, *, avoid: frozenset[str] = frozenset()) -> Route:
        """The chain that a session would take now.

        Around machines that refused: by what the directory said lately, and by what it says now only where that does
        not suffice. Else whoever connects anew would wait for the directory after each refusal.

        Raises:
            RouteError: nobody serves some layers.
        """
        if not avoid:
            return await self._route(avoid, RECENT_S)
        with suppress(RouteError):
            return await self._route(avoid, KNOWN_S)
        return await self._route(avoid, 0.0)

    async def _route(self, avoid: frozenset[str], within_s: float) -> Route:
        identity = self.identity
        records = await self.registry.records(identity.fingerprint, identity.num_layers, within_s=within_s)
        records = self._readable(records)
        await self.nearby.measure(records, identity.num_layers)
        return self._best(records, self.nearby.query(self._query(avoid), may_explore=True))

    def _readable(self, records: Sequence[NodeRecord]) -> list[NodeRecord]:
        """The machines that may be used and whose numeric class this client can read; says once that others compute.

        Raises:
            UnsupportedModel: there are only others.
        """
        records = records if self.own is None else self.own.keep_to(records)
        readable = [record for record in records if _dtype(record.numeric_class) is not None]
        odd = sorted({record.numeric_class for record in records} - {record.numeric_class for record in readable})
        if odd and not readable:
            raise _unreadable(odd[0])
        if odd and odd[0] not in self._notes:
            self._notes.append(odd[0])
            logger.warning("nodes that compute in %s are passed over: this client cannot read their rows", odd[0])
        return readable

    def _best(self, records: Sequence[NodeRecord], query: RouteQuery, *, ends_only: bool = False) -> Route:
        able = [one for one in records if one.aux_rows or not self.aux_layers]
        try:
            return self._best_discreet(able, query, must=ends_only)
        except RouteError as error:
            if len(able) == len(records):
                raise
            older = f"{len(records) - len(able)} machines of an older release do not send rows of several layers"
            raise RouteError(f"{error}; {older}, which this draft reads", error.missing) from error

    def _best_discreet(self, records: Sequence[NodeRecord], query: RouteQuery, *, must: bool) -> Route:
        """The best route on which token ids go to the ends alone (P17), or any where there is none and none must be."""
        discreet = [one for one in records if one.ends_only]
        if must:
            return self._best_of(discreet, query)
        best = self._best_of(records, query)
        if not self.target.needs_ids and not best.ends_only and len(best.hops) >= MIDDLE_HOPS:
            with suppress(RouteError):
                return self._best_of(discreet, query)
        return best

    def _best_of(self, records: Sequence[NodeRecord], query: RouteQuery) -> Route:
        usable = [one for one in records if not self.reproducible or promises_texts(one.numeric_class)]
        left_out = sorted({one.numeric_class for one in records} - {one.numeric_class for one in usable})
        records = plausible(usable)
        try:
            route = self._honest_route(records, query)
        except RouteError as error:
            if self.own is not None and error.missing:
                raise RouteError(f"{error}; only machines that you trust count here", error.missing) from error
            if self.reproducible and not left_out and not error.missing:
                raise RouteError(f"{error}: leave out --reproducible to use them all", ()) from error
            if not left_out or query.numeric_class is not None:
                raise
            raise _no_promise(query.name, left_out, error) from error
        if not self.hedge:
            return route
        rng = self.nearby.rng  # no machine can count on not being compared
        return hedged(route, records, query, rng.randrange(len(route.hops)) if rng.random() < RANDOM_HEDGE else None)

    def _honest_route(self, records: Sequence[NodeRecord], query: RouteQuery) -> Route:
        """The best route without machines that were found to lie, if there is one.

        Raises:
            RouteError: nobody serves some layers.
        """
        if liars := self.nearby.liars:
            with suppress(RouteError):
                return best_route(records, replace(query, avoid=query.avoid.union(liars)))
        return best_route(records, query)

    def _query(self, avoid: Collection[str]) -> RouteQuery:
        around = frozenset(avoid)
        name, layers = self.target.name, self.identity.num_layers
        return RouteQuery(name, layers, self.nodes, self.join, avoid=around, alike=self.reproducible)

    @asynccontextmanager
    async def open(self, window_tokens: int, nodes: int, beginning: Beginning | None = None) -> AsyncIterator[Session]:
        """Open a session, on another route if a machine of the first does not answer.

        Args:
            window_tokens: tokens of its sequence, at most.
            nodes: tree nodes of a sweep, at most, its pending token not counted.
            beginning: of its text. `Session.held` says how much of it every machine had; nothing without this.

        Raises:
            RouteError: nobody serves some layers.
            HopError: a machine refused, or did not answer, and no other takes its place.
            SwarmError: machines that share nothing say that this session cannot be.
        """
        async with TaskScope() as scope:
            names, room = None, _SessionNeeds(window_tokens, nodes + 1)  # and the pending token
            drawn: list[bool] = []
            if beginning is not None:
                names = BlockNames(beginning.secret or self.secret)
                names.extend(beginning.tokens[:-1])  # the last one's pick is wanted
                if names.names and self.auditor is not None:
                    drawn.append(self.auditor.drawn())
                is_anew = beginning.is_proved or any(drawn)  # nobody signs anything of rows that are held from before
                known, holders = (0, ()) if is_anew else self.known.longest(names.names)
                new_tokens = min(beginning.new_tokens, EXPECTED_TOKENS)
                expected = len(beginning.tokens) + new_tokens + 2 * room.nodes
                asked = () if is_anew else borders(names.names, known)
                room = _SessionNeeds(window_tokens, room.nodes, asked, expected, holders)
            made = await self._opened(scope, room)
            walk = self._walk(made.chain, beginning, names)
            if beginning is not None and beginning.is_proved:
                made.chain.keep_log()
            made.chain.begin(walk.state)
            scope.spawn(self._keep_known())
            codec = _codec(made.chain.route.numeric_class, self.codec)
            try:
                yield Session(made.chain, walk, codec, self.nearby, self.checker, self.auditor, drawn)
            finally:
                self.known.note(walk.state.names, made.chain.route.hops)

    def _chain(self, route: Route, room: _SessionNeeds) -> Chain:
        """A chain over a route, not opened yet."""
        window_tokens, sweep_nodes = room.window_tokens, room.nodes
        want = Open(
            fingerprint=self.identity.fingerprint,
            window_tokens=window_tokens,
            sweeps=SWEEPS_IN_FLIGHT,
            nodes=sweep_nodes + max(LARGEST_UNANSWERED * min(PREFILL_CHUNK, window_tokens), sweep_nodes),
            codec=_codec(route.numeric_class, self.codec),
            aux_layers=self.aux_layers,
            expected_tokens=room.expected_tokens,
            ends_only=route.ends_only and not self.target.needs_ids,
        )
        self._warn_of_ids(route, want)
        detour = partial(self._detour, (route.numeric_class, route.rounding), ends_only=want.ends_only)
        width = self.target.hidden_size * want.row_parts(self.target.num_layers)
        owner = ChainOwner(
            *(detour, self.nearby.blame, partial(_check_rows, width), is_signed),
            self.target.valid_tokens or self.target.vocab_size,
        )
        chain = Chain(self.dialer, route, want, owner, self.wait_s)
        chain.accept_rows(_reply_rows_bytes(width, route))
        chain.ask_for(room.prefix)
        return chain

    def _warn_of_ids(self, route: Route, want: Open) -> None:
        """Say once that machines between the ends are sent token ids, and why."""
        if want.ends_only or len(route.hops) < MIDDLE_HOPS or _IDS_TRAVEL in self._notes:
            return
        self._notes.append(_IDS_TRAVEL)
        why = "this model's layers read them" if self.target.needs_ids else "some are of an older release"
        logger.warning("token ids are sent through all machines of the chain: %s", why)

    async def _opened(self, scope: TaskScope, room: _SessionNeeds) -> ChainOpening:
        """The first opening that stands, on whichever route; what kept others from it is remembered.

        Raises:
            SwarmError: none does.
        """
        refusals, ticket = Refusals(self.wait_s), os.urandom(TICKET_BYTES)

        def begin(route: Route, *, is_hasty: bool) -> ChainOpening:
            if self.checker is not None:
                self.checker.prepare(route.numeric_class)
            chain = self._chain(route, room)
            chain.wait_by(ticket)
            chain.signs = self.signs
            if self.owner is not None:
                chain.own(self.owner)
            if is_hasty:
                chain.hurry()
            return ChainOpening(scope, chain)

        async def first() -> ChainOpening:
            route = await (self._route_beside(refusals) if refusals.last else self._holding(room))
            return begin(route, is_hasty=refusals.last is None)  # after that, whoever is slow has all its time

        async def beside(late: ChainOpening) -> ChainOpening | None:
            route = await self._other_route(late, refusals)
            return None if route is None else begin(route, is_hasty=False)

        def failed(one: ChainOpening) -> SwarmError | None:
            assert one.error is not None, "it failed"
            return None if refusals.add(one.error, one.peers) else refusals.final(one.error)

        times = self.nearby.openings
        made, left = await first_open(first, beside, failed, lambda one: times.late_s(one.chain.route.forecast))
        times.note(made.seconds)
        if left is not None:
            slow = left.peers - made.peers if left.waited_s > made.seconds else ()  # else it began later
            for peer in slow:
                self.nearby.failed(peer, is_hearsay=True)  # nothing tells which of them it was
        return made

    async def _holding(self, room: _SessionNeeds) -> Route:
        """The chain that holds most of a text's beginning, unless its sweeps take much longer than the fastest one's.

        Raises:
            RouteError: nobody serves some layers.
        """
        best = await self.route()
        if not room.holders or room.holders == best.hops or best.hedge is not None:
            return best
        with suppress(RouteError, RegistryError):
            kept = await self._detour((best.numeric_class, None), (), room.holders)
            is_alike = kept.rounding is not None or best.rounding is None
            if kept.hops == room.holders and is_alike and kept.sweep_ms <= MOST_SLOWER * best.sweep_ms:
                return kept
        return best

    async def _other_route(self, late: ChainOpening, refusals: Refusals) -> Route | None:
        """A route with as few machines as possible of one that is late, by what is known; None without any other."""
        avoid, found = refusals.avoided()[0], None
        for others in (late.peers, *({peer} for peer in sorted(late.peers))):
            with suppress(RouteError, RegistryError):
                found = await self._route(avoid | others, KNOWN_S)
                avoid |= others
            if late.peers <= avoid:
                break
        return found

    async def _keep_known(self) -> None:
        """Read the directory now and then, so that a repair need not wait for it."""
        while True:
            await asyncio.sleep(KNOWN_S / 2)
            await self.dialer.tidy()
            with suppress(RegistryError):
                await self.registry.records(self.identity.fingerprint, self.identity.num_layers)

    async def _detour(
        self,
        kind: tuple[str, str | None],
        avoid: Collection[str],
        keep: Sequence[RouteHop],
        *,
        within_s: float = KNOWN_S,
        ends_only: bool = False,
    ) -> Route:
        """A route of the same numeric class without some machines; the others stay where they are.

        Args:
            kind: numeric class of the session, and the mark of its processors; None where they round differently.
            avoid: machines to go around.
            keep: hops that have the session.
            within_s: how old what is known of machines may be.
            ends_only: whether its machines must do without token ids between the ends (P17), as the session does.
        """
        identity = self.identity
        records = await self.registry.records(identity.fingerprint, identity.num_layers, within_s=within_s)
        records = self._readable(records)
        listed = {record.peer for record in records}
        query = replace(
            self.nearby.query(self._query(avoid)),
            keep=tuple(hop for hop in keep if hop.peer in listed),
            replay_layer_ms=REPLAY_LAYER_MS,
            numeric_class=kind[0],
            rounding=kind[1],
        )
        return self._best(records, query, ends_only=ends_only)

    async def _route_beside(self, refusals: Refusals) -> Route:
        """A route without the machines that refused; where there is none, those that went or stand in are waited for.

        Raises:
            RouteError: nobody serves some layers.
            HopError: the last refusal; nobody is left to ask, or no time.
        """
        last = refusals.last
        while True:
            everyone, *others = refusals.avoided()
            try:
                return await self.route(avoid=everyone)
            except RouteError as error:
                if last is None:
                    raise
                refusals.gap = error
            for avoid in others:
                with suppress(RouteError):
                    return await self.route(avoid=avoid)
            if not refusals.may_wait:
                raise refusals.final(last) from last
            if (news := refusals.news()) is not None:
                logger.warning("%s", news)
            await asyncio.sleep(RETRY_S)

    def _walk(self, chain: Chain, beginning: Beginning | None, names: BlockNames | None) -> Walk:
        credits = chain.credits
        limits = Limits(self.target.vocab_size, credits.window_tokens, credits.sweeps, credits.nodes)
        if beginning is None or names is None:
            return Walk(limits, Sampling())
        names.truncate(credits.held)
        return Walk(limits, Sampling(), beginning.tokens[: credits.held], names)


def _no_promise(name: str, left_out: Sequence[str], error: RouteError) -> RouteError:
    """Why there is no chain where only classes were asked for that promise the same text, and what there is instead."""
    layers = f" ({name_layers([Span(*gap) for gap in error.missing])} are missing)" if error.missing else ""
    return RouteError(
        f"no chain of machines that promise the same text covers {name}{layers}; the swarm also computes in "
        f"{', '.join(left_out)}: leave out --reproducible to use them",
        error.missing,
    )


class _ShownText:
    """What of a generation's text its reader has; nothing before the end where the state is held.

    Attributes:
        held_s: how long certain text was held.
    """

    def __init__(self, state: GenerationState) -> None:
        self._state = state
        self._shown = state.text
        self._tokens, self._characters = len(state.text.tokens), len(state.text.text)
        self._is_late = False  # more is certain than was shown: it comes with the next piece
        self._held_since, self.held_s = math.inf, 0.0

    def hold(self) -> None:
        """What is certain is not shown yet."""
        self._is_late, self._held_since = True, min(self._held_since, self._state.clock())

    def piece(self, text: str) -> Piece:
        """What is new, where `text` is what the last sweep brought.

        Raises:
            TextChanged: the reader has another text.
        """
        state = self._state
        if state.text is not self._shown:
            if not self._is_again():
                return Piece("")
            self._is_late = True
        if self._is_late:
            self.release()
            text, self._is_late = state.text.text[self._characters :], False
        if state.is_held or state.text.stopped or not (text or state.tracer is not None):
            return Piece("")  # the rest comes at the end
        return self._new(text)

    def rest(self) -> Piece:
        """All that is new at the end; errors as in `piece`."""
        text = self._state.text
        if text is not self._shown and not self._is_again():
            raise self._changed(len(text.tokens))
        return self._new(text.text[self._characters :])

    def release(self) -> None:
        """It is shown from now on."""
        self.held_s += max(self._state.clock() - self._held_since, 0.0)
        self._held_since = math.inf
        if self._state.watch is not None:
            self._state.watch.checks = replace(self._state.watch.checks, held_s=self.held_s)

    def _new(self, text: str) -> Piece:
        have, state = self._tokens, self._state
        self._tokens, self._characters = len(state.text.tokens), self._characters + len(text)
        return Piece(text, tokens=tuple(state.text.tokens[have:]), log_probs=self._log_probs(have))

    def _log_probs(self, have: int) -> tuple[TokenLogProbs, ...]:
        return tuple(self._state.log_probs[have - self._state.resumed_tokens :])

    def _is_again(self) -> bool:
        """Whether a text that was begun again has come to where the reader is."""
        now, before = self._state.text, self._shown.tokens[: self._tokens]
        pairs = enumerate(zip(now.tokens, before, strict=False))
        if (other := next((place for place, (one, two) in pairs if one != two), None)) is not None:
            raise self._changed(other)
        if len(now.tokens) < self._tokens or not now.text.startswith(self._shown.text[: self._characters]):
            return False
        self._shown = now
        return True

    def _changed(self, right: int) -> TextChanged:
        text = self._state.text
        reason = (
            f"what was shown after token {right} was picked by a machine that was refuted; the model picks otherwise"
        )
        changed = TextChanged(reason, text.text, text.tokens, right)
        changed.unfinished = self._state.unfinished()
        return changed


def _is_multistep(sampling: Sampling) -> bool:
    return sampling.multistep and sampling.temperature > 0


def _reply_rows_bytes(width: int, route: Route) -> int:
    """What a reply's hidden rows may take: they travel in the lossless codec, whatever the one between hops."""
    rows = MAX_REPLY_ROWS + min(PREFILL_CHUNK, MAX_PROMPT_ROWS)
    return rows * _codec(route.numeric_class, "lossless").row_bytes(width)


def _codec(numeric_class: str, choice: CodecChoice) -> Codec:
    """The codec that was chosen; the lossless one is that of the compute type."""
    dtype = _dtype(numeric_class)
    if dtype is None:
        raise _unreadable(numeric_class)
    return Codec.INT8 if choice == "int8" else lossless_codec(dtype)


def _dtype(numeric_class: str) -> torch.dtype | None:
    """The compute type of a numeric class; None where this version does not know it, or no codec keeps its rows."""
    found = NumericClass.parse(numeric_class)
    dtype = None if found is None else getattr(torch, found.dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype in LOSSLESS else None


def _class_of(numeric_class: str) -> NumericClass:
    """The class of a route; its machines were chosen among those that this client can read."""
    found = NumericClass.parse(numeric_class)
    if found is None:
        raise _unreadable(numeric_class)
    return found


def _unreadable(numeric_class: str) -> UnsupportedModel:
    return UnsupportedModel(f"this client knows no codec for nodes that compute in {numeric_class}; update it")


def _check_rows(width: int, rows: Rows) -> None:
    """That hidden rows are as wide as the session asked for, and finite.

    Raises:
        RemoteProtocolError: they are not.
    """
    if rows.width != width:
        raise RemoteProtocolError("rows", f"of width {rows.width}, the session's is {width}")
    decode_rows(rows, torch.float32)
