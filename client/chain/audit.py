"""After a text, now and then: did one hop of its chain compute what it says? Knows no layers, no directory.

A coin that nobody else sees says whether, and a second one which hop. Another machine with the same layers gets what
entered that hop, as one does that takes a lost machine's place: a snapshot of the committed text. What leaves it is
compared with what left the hop. Where the two differ, a third machine decides: the one of three that differs from two
that agree is left by this client from then on. That is avoidance and no proof, which only recomputation gives.

One audit at a time, beside whatever the client does next, within bounds of time, memory and bytes a second. An audit
that cannot be made (nobody else has the layers, a machine is gone) says nothing of anybody.

Decision: docs/decisions/0091-audits-recompute.md.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import grpc.aio
import torch

from client.base.options import AUDITED_SHARE
from client.chain.answers import ReplyStream
from client.chain.chain import STANDING_S, Chain, send_hold
from client.chain.evidence_files import keep_evidence, report
from client.chain.repair_plan import FindRoute
from client.chain.tells import TellLog
from swarm.base.errors import (
    HopClosed,
    HopError,
    HopMisbehaved,
    LinkDiffers,
    LocalProtocolError,
    RegistryError,
    RouteError,
    SwarmError,
)
from swarm.base.ids import PeerId, TreeNodeId
from swarm.base.layers import Span
from swarm.base.quota import address_key, is_private, site_key
from swarm.base.tasks import TaskScope
from swarm.compute.gumbel import gumbel_row
from swarm.compute.picks.filters import filters
from swarm.compute.row_codec import decode_rows
from swarm.link.dial import Connection, Dialer
from swarm.link.link import Signer, Uplink
from swarm.link.successor import SuccessorLink
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.hop_log import REPLAY_NODES
from swarm.protocol.journal import Journal
from swarm.protocol.messages import (
    Attach,
    Codec,
    Fault,
    Hold,
    Open,
    Ready,
    RepliesRequest,
    Reply,
    RouteHop,
    Rows,
    Sampling,
    Snapshot,
    Sweep,
    SweepFrame,
    Want,
)
from swarm.protocol.peer_keys import peer_id_of
from swarm.protocol.pick_rules import MAX_TOP_LOG_PROBS
from swarm.protocol.session import CommittedToken, Limits, SessionState
from swarm.routing.route import Route
from swarm.trust.bounds import (
    FAR_MEDIAN,
    FAR_ROW,
    FEWEST,
    WINDOW,
    Agrees,
    Bounds,
    Differs,
    Judgement,
    Unclear,
    bounds_of,
    is_exact,
    judge_picks,
    judge_rows,
    row_distances,
)

AUDIT_S: Final = 120.0
"""How long one audit may take in all."""
ROWS_BYTES: Final = 64 << 20
"""Of what entered the hop: a longer text is audited up to there. Three times as much is in memory at a time."""
MBIT_PER_S: Final = 20.0
"""By which rows leave for another machine, so that texts of this client have the rest of its line."""
POLL_S: Final = 0.1
JUDGE_S: Final = 40.0
"""The same for one machine of those that compute a hop's part again."""
JUDGES_TRIED: Final = 3
"""How many are asked in turn for one answer: the liar's friend may never give one."""
OTHERS_TRIED: Final = 4
"""Routes that are looked at for a third machine of another network and owner."""
KEPT: Final = 64
"""Audits that are remembered, and machines that left no evidence."""
SILENT: Final = 3
"""So often in a row a machine signs nothing, or shows no rows, before it is left: a line may fail, memory be short."""
SWEEPS: Final = 64
INLINE_VALUES: Final = 1 << 18
"""Of more values distances are computed on a thread."""

logger = logging.getLogger(__name__)

CannotAudit = SwarmError


@dataclass(frozen=True, slots=True)
class Sender:
    """A hop of a session, as its client asks for what it sent.

    Attributes:
        connection: to it.
        hop: the machine and its layers.
        key: of the session, whose client alone may ask.
        codec: of its rows.
        signed_class: in which its record says that it computes.
    """

    connection: Connection
    hop: RouteHop
    key: SessionKey
    codec: Codec
    signed_class: str


class RowSource(Protocol):
    """Rows that machines sent."""

    async def keep(self, senders: Sequence[Sender]) -> None:
        """Have hops keep what they sent for a while after the session, which runs yet, and answer for it.

        Args:
            senders: one, or neighbours in the order of the route: what one sent, the next one received, or nothing
                would say whose rows an audit compares.

        Raises:
            SwarmError: one does not, or two neighbours do not agree.
        """

    async def sent(self, sender: Sender, committed: Sequence[CommittedToken]) -> Rows | None:
        """What a hop that keeps it sent of a text's tokens, from the first on; None where that is gone."""

    def evidence(self, sender: Sender, claim: HopClaim) -> bytes | None:
        """The file by which anybody with a hop's layers recomputes its part; None where not all of it is signed."""


@dataclass(frozen=True, slots=True)
class HopClaim:
    """What one hop of a text says of its part.

    Attributes:
        committed: the text's tokens, as far as they are shown.
        entering: rows that entered it, one a token or more; None where ids did.
        leaving: rows that left it; None at the tail.
        sampling: how the tail was to pick.
    """

    committed: tuple[CommittedToken, ...]
    entering: Rows | None
    leaving: Rows | None
    sampling: Sampling


MakeKey = Callable[[], Awaitable[Signer]]
"""Makes the key by which this client stands before a hop, as the machine does that sends it rows."""


@dataclass(frozen=True, slots=True)
class AuditedText:
    """A text that is over, as its client knows it.

    Attributes:
        route: over which all of it went.
        find_route: finds routes of its numeric class around machines.
        key: of its session.
        want: what it asked of its hops: the model, the codec, what travels beside rows.
        vocab_size: token ids are below it.
        num_layers: of the model.
        committed: its tokens and the nodes that they were, in order.
        picks_from: position of the first token that was picked, and not given.
        sampling: how.
    """

    route: Route
    find_route: FindRoute
    key: SessionKey
    want: Open
    vocab_size: int
    num_layers: int
    committed: tuple[CommittedToken, ...]
    picks_from: int
    sampling: Sampling

    @classmethod
    def of(cls, chain: Chain, picks_from: int, sampling: Sampling) -> AuditedText | None:
        """The text that a chain holds; None where machines were replaced in its course, or a hop has two.

        Nor is there one where its beginning is from an earlier session.
        """
        route, state = chain.route, chain.state
        if chain.generation or route.hedge is not None or chain.credits.held:
            return None
        of_model = state.limits.vocab_size, route.hops[-1].span.end
        committed = tuple(state.committed)
        return cls(route, chain.find_route, chain.key, chain.want, *of_model, committed, picks_from, sampling)

    def up_to(self, count: int) -> AuditedText:
        """Its first tokens."""
        return replace(self, committed=self.committed[:count])


@dataclass(frozen=True, slots=True)
class Audit:
    """What became of one audit.

    Attributes:
        hop: that was audited.
        verdict: of its rows, or picks, against another machine's.
        asked: the other machines that computed them.
        named: the one of three that differs from two others; None: nobody.
    """

    hop: RouteHop
    verdict: Judgement
    asked: tuple[PeerId, ...] = ()
    named: PeerId | None = None


@dataclass(frozen=True, slots=True)
class AuditOwner:
    """What audits need of the client.

    Attributes:
        dialer: connects to machines.
        rows: gives what machines sent.
        make_key: makes keys.
        named: told of a machine that two others contradict.
        suspected: told of two machines of which nothing says which is wrong, or of one that keeps or signs nothing.
        agreed: told of a machine whose part another one computed alike.
        doubt: how much a machine is doubted already, 0 to 1: its texts are audited that much more often.
        refuted: how often its part of a text is audited because others say that it computes something else, 0 to 1.
        keep: puts evidence into a file, on a thread; None where it cannot.
    """

    dialer: Dialer
    rows: RowSource
    make_key: MakeKey
    named: Callable[[HopMisbehaved], None]
    suspected: Callable[[PeerId], None]
    agreed: Callable[[PeerId], None] = lambda _: None
    doubt: Callable[[PeerId], float] = lambda _: 0.0
    refuted: Callable[[PeerId], float] = lambda _: 0.0
    keep: Callable[[bytes], Path | None] = keep_evidence


def coin(share: float) -> bool:
    """Whether a text is audited: drawn where nobody else can foresee it."""
    return secrets.randbelow(1 << 32) < share * (1 << 32)


class Auditor:
    """Audits texts of one client.

    Attributes:
        done: what became of the newest `KEPT`.
        draw: the place of a hop to audit, of so many.
    """

    def __init__(
        self,
        owner: AuditOwner,
        scope: TaskScope,
        share: float = AUDITED_SHARE,
        toss: Callable[[float], bool] = coin,
        draw: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        """Make an auditor; no text was audited yet.

        Args:
            scope: owns the work.
            share: of all texts.
            toss: says of a text whether it is audited.
            draw: as the attribute.
        """
        self.done: deque[Audit] = deque(maxlen=KEPT)
        self._owner, self._scope, self._share, self._toss, self.draw = owner, scope, share, toss, draw
        self._is_busy = False
        self._silent: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    async def newest(self) -> Audit | None:
        """What became of the newest audit, once none is under way; None where there was none."""
        if self._task is not None:
            await asyncio.wait([self._task])
        return self.done[-1] if self.done else None

    def drawn(self) -> bool:
        """Whether a text is to be audited that could begin with what machines hold: then it must not.

        Of rows from before, no machine signs anything in this session.
        """
        return self._toss(self._share)

    async def text_is_over(self, text: AuditedText, drawn: bool | None = None) -> None:
        """Audit it beside whatever comes next, if the coin says so and no other one is audited now.

        A route that is doubted has it said more often, up to always.

        Args:
            drawn: what the coin said at the opening; None where it was not asked.

        Returns once the hops keep what they sent, so that the session may end: in most texts at once.
        """
        if len(text.committed) < FEWEST or self._is_busy or (place := self._place(text.route.hops, drawn)) is None:
            return
        self._is_busy = True
        try:
            around = range(max(place - 1, 0), min(place + 2, len(text.route.hops)))
            await self._owner.rows.keep([self._sender(text, one) for one in around])
        except (SwarmError, grpc.aio.AioRpcError, TimeoutError) as error:
            if isinstance(error, LinkDiffers):
                for peer in (error.peer, error.other):
                    self._owner.suspected(PeerId(peer or error.peer))
            elif isinstance(error, HopError):
                self._was_silent(error)
            self._failed(text.route.hops[place], error)
            return
        if around[-1] + 1 == len(text.route.hops):
            self._silent.pop(text.route.hops[-1].peer, None)  # a tail has shown its picks
        self._task = self._scope.spawn(self._run(text, place), "an audit")

    def _place(self, hops: Sequence[RouteHop], drawn: bool | None = None) -> int | None:
        """The hop to audit, if any.

        What others say makes audits of whom they mean, beside those that the coin alone asks for: it takes none of
        these away.
        """
        doubt = max(self._owner.doubt(hop.peer) for hop in hops)
        share = self._share if drawn is None else float(drawn)
        if self._toss(share + (1 - share) * doubt):
            return self.draw(len(hops))
        said = [self._owner.refuted(hop.peer) for hop in hops]
        return said.index(max(said)) if max(said) and self._toss(max(said)) else None

    def _was_silent(self, error: HopError) -> None:
        """A machine leaves no evidence of what it computed. One that never does is worth no more than a liar."""
        self._owner.suspected(PeerId(error.peer))
        self._silent[error.peer] = self._silent.pop(error.peer, 0) + 1
        if self._silent[error.peer] >= SILENT:
            why = f"left no evidence of what it computed, {SILENT} times: {error.reason}"
            self._owner.named(HopMisbehaved(error.peer, error.span, why))
            logger.warning("node %s %s; this client goes around it from now on", error.peer, why)
        while len(self._silent) > KEPT:
            del self._silent[next(iter(self._silent))]

    def _failed(self, hop: RouteHop, error: Exception) -> None:
        self._is_busy = False
        why = str(error) or "it took too long"
        logger.info("an audit of layers %s at %s could not be made: %s", hop.span, hop.peer, why)
        self.done.append(Audit(hop, Unclear(why)))

    async def _run(self, text: AuditedText, place: int) -> None:
        try:
            async with asyncio.timeout(AUDIT_S):
                audit = await self.audit(text, place)
        except (SwarmError, grpc.aio.AioRpcError, TimeoutError) as error:
            self._failed(text.route.hops[place], error)
            return
        self._is_busy = False
        self.done.append(audit)

    def _sender(self, text: AuditedText, place: int) -> Sender:
        hop = text.route.hops[place]
        kind = text.route.records[place].signed_class
        return Sender(_connect(self._owner.dialer, text.route, hop), hop, text.key, text.want.codec, kind)

    async def audit(self, text: AuditedText, place: int) -> Audit:
        """Have a hop's work on a text done again elsewhere, and say who is wrong.

        Raises:
            SwarmError: nobody else has these layers, or rows are not to be had.
        """
        accused, owner = Seat(text.route, place), self._owner
        entering, text = await self._entering(text, place)
        claimed = _Picked.of_text(text) if accused.is_tail(text) else await self._sent(text, place)
        first, redone = await self._judged(text, entering, accused)
        found = redone.computed
        asked: tuple[PeerId, ...] = (first.hop.peer,)
        bounds = Bounds.known(first.signed_class, accused.signed_class)
        verdict = None if bounds is None else await _compared(found, claimed, bounds)
        if isinstance(verdict, Agrees | Unclear):
            return self._agreed(Audit(accused.hop, verdict, asked))
        try:
            third, again = await self._judged(text, entering, accused, first)
        except (SwarmError, grpc.aio.AioRpcError, TimeoutError) as error:
            if verdict is None:
                return Audit(
                    accused.hop, Unclear(f"of its class only a third machine tells what is honest: {error}"), asked
                )
            owner.suspected(accused.hop.peer)
            owner.suspected(first.hop.peer)
            return Audit(accused.hop, verdict, asked)
        asked, decides = (*asked, third.hop.peer), again.computed
        if bounds is None:  # what two others differ by is what rounding does
            bounds = await _bounds_between(found, decides, text.route.numeric_class)
            if bounds is None:
                return Audit(accused.hop, Unclear("picks of a class that promises no text are not judged"), asked)
            verdict = await _compared(found, claimed, bounds)
        if not isinstance(verdict, Differs):
            assert verdict is not None, "it was compared"
            return self._agreed(Audit(accused.hop, verdict, asked))
        of_hop, of_first = [Bounds.known(third.signed_class, one.signed_class) or bounds for one in (accused, first)]
        with_hop, with_first = await _agree(decides, claimed, of_hop), await _agree(decides, found, of_first)
        if with_hop == with_first:
            return Audit(accused.hop, verdict, asked)
        own = _Redone(claimed, self._sender(text, place), text.committed)
        await self._name(redone if with_hop else own, entering, text, verdict, (first, third))
        return Audit(accused.hop, verdict, asked, first.hop.peer if with_hop else accused.hop.peer)

    async def _judged(
        self, text: AuditedText, entering: Rows | None, accused: Seat, first: Seat | None = None
    ) -> tuple[Seat, _Redone]:
        """A machine that computes a hop's part again, and what it found; who fails, or hinders, is passed over.

        Raises:
            SwarmError: nobody else has these layers, or the last that was asked does not compute them.
            TimeoutError: it takes too long.
        """
        failed: set[PeerId] = set()
        while True:
            seat = await _other(text, accused, first, failed)
            try:
                async with asyncio.timeout(JUDGE_S):
                    return seat, await _recomputed(self._owner, seat, text, entering)
            except (SwarmError, grpc.aio.AioRpcError, TimeoutError) as error:
                logger.info("layers %s are not computed again at %s: %s", seat.hop.span, seat.hop.peer, error)
                failed.add(seat.hop.peer)
                if len(failed) == JUDGES_TRIED:
                    raise

    def _agreed(self, audit: Audit) -> Audit:
        if isinstance(audit.verdict, Agrees):
            self._owner.agreed(audit.hop.peer)
        return audit

    async def _name(
        self,
        liar: _Redone,
        entering: Rows | None,
        text: AuditedText,
        verdict: Differs,
        asked: Sequence[Seat],
    ) -> None:
        """Leave a machine from now on, and let others know what it signed, as far as they can recompute that."""
        hop, owner = liar.sender.hop, self._owner
        where = ", ".join(map(str, verdict.places))
        reason = f"computed something else than two other machines did ({verdict.what} at {where})"
        error = HopMisbehaved(hop.peer, str(hop.span), reason)
        owner.named(error)
        kind = text.route.numeric_class
        least, behind = (FEWEST, 1) if is_exact(kind, kind) else (WINDOW, WINDOW)  # as others need who round otherwise
        shown = liar.committed[: max(max(verdict.places) + behind, least)]
        leaving = liar.computed if isinstance(liar.computed, Rows) else None
        claim = HopClaim(shown, entering, leaving, text.sampling)
        data = await asyncio.to_thread(owner.rows.evidence, liar.sender, claim)
        file = None if data is None else await asyncio.to_thread(owner.keep, data)
        model = text.route.records[0].model.name
        line = (
            "no file shows it" if file is None else f"swarm verify {file} --model {model} --layers {hop.span} shows it"
        )
        logger.warning("%s; this client goes around it from now on; %s", error, line)
        for seat in asked:
            if data is not None and seat.hop.peer != hop.peer:
                await report(_connect(owner.dialer, seat.route, seat.hop), data)

    async def _entering(self, text: AuditedText, place: int) -> tuple[Rows | None, AuditedText]:
        """What entered a hop, and the text as far as that is audited."""
        if place == 0:
            return None, text
        hidden = text.route.records[place - 1].row_bytes or 1
        text = text.up_to(max(ROWS_BYTES // hidden, FEWEST))
        return await self._sent(text, place - 1), text

    async def _sent(self, text: AuditedText, place: int) -> Rows:
        """What a hop sent of a text."""
        sender = self._sender(text, place)
        rows = await self._owner.rows.sent(sender, text.committed)
        if rows is None or rows.count != len(text.committed):
            silent = HopClosed(sender.hop.peer, str(sender.hop.span), "does not give the rows that it sent")
            self._was_silent(silent)
            raise silent
        self._silent.pop(sender.hop.peer, None)
        return rows


@dataclass(frozen=True, slots=True)
class Seat:
    """A machine's place in a route."""

    route: Route
    place: int

    @property
    def hop(self) -> RouteHop:
        """The machine and its layers there."""
        return self.route.hops[self.place]

    @property
    def signed_class(self) -> str:
        """The machine's numeric class with its processor's mark, by its record."""
        return self.route.records[self.place].signed_class

    def is_tail(self, text: AuditedText) -> bool:
        """Whether it picks."""
        return self.hop.span.end == text.num_layers

    def may_be(self, other: Seat) -> bool:
        """Whether the machine may be the same owner's as another one, by network or name.

        Machines of a private network may be anybody's.
        """
        own, others = self.route.records[self.place], other.route.records[other.place]
        is_near = not is_private(address_key(own.address)) and site_key(own.address) == site_key(others.address)
        return is_near or (own.name is not None and own.name == others.name)


async def _other(text: AuditedText, accused: Seat, first: Seat | None = None, failed: Collection[PeerId] = ()) -> Seat:
    """Another machine that has exactly the layers of the accused one; of its processor's mark, if one is found.

    Args:
        first: another machine that was asked: a third one differs from both in network and owner.
        failed: machines that do not compute them again.

    Raises:
        RouteError: there is none.
    """
    keep = tuple(hop for at, hop in enumerate(text.route.hops) if at != accused.place)
    known = [accused, *([] if first is None else [first])]
    avoid = {one.hop.peer for one in known}.union(failed)
    other: Seat | None = None
    for _ in range(OTHERS_TRIED):
        with suppress(RegistryError):
            try:
                route = await text.find_route(avoid, keep)
            except RouteError:
                if other is None:
                    raise
                return other
            place = next((at for at, hop in enumerate(route.hops) if hop.span == accused.hop.span), None)
            if place is None:
                break
            found = Seat(route, place)
            avoid.add(found.hop.peer)
            if first is not None and any(found.may_be(one) for one in known):
                continue
            if found.signed_class == accused.signed_class:
                return found
            other = other or found
    if other is not None:
        return other
    span = accused.hop.span
    raise RouteError(f"nobody else has layers {span} who could say what they compute", ((span.start, span.end),))


def _connect(dialer: Dialer, route: Route, hop: RouteHop) -> Connection:
    endpoint = route.endpoint(hop.peer)
    return Connection(dialer.channel(endpoint), endpoint, is_member=dialer.is_member)


# What is compared: rows, or picks


@dataclass(frozen=True, slots=True)
class _Picked:
    """Picks along a text.

    Attributes:
        sampling: how they were to be made.
        after: by position of a token, the token picked after it.
        best: by position, the likeliest tokens and their log-probabilities; empty where nobody told them.
    """

    sampling: Sampling
    after: dict[int, int]
    best: dict[int, dict[int, float]] = field(default_factory=dict)

    @classmethod
    def of_text(cls, text: AuditedText) -> _Picked:
        """What the text's own tail picked: its tokens."""
        tokens = [token.token for token in text.committed]
        places = range(max(text.picks_from, 1), len(tokens))
        return cls(text.sampling, {place - 1: tokens[place] for place in places})


_Computed = Rows | _Picked


async def _compared(ours: _Computed, theirs: _Computed, bounds: Bounds) -> Judgement:
    """What follows of what one machine claims from what another one computed."""
    if isinstance(ours, _Picked) and isinstance(theirs, _Picked):
        return _compared_picks(ours, theirs, bounds)
    assert isinstance(ours, Rows)
    assert isinstance(theirs, Rows)
    if (ours.count, ours.width) != (theirs.count, theirs.width):
        return Differs("rows", (0,), theirs.count, math.inf, bounds.row)
    return judge_rows(await _distances(ours, theirs), bounds)


async def _agree(ours: _Computed, theirs: _Computed, bounds: Bounds) -> bool:
    return isinstance(await _compared(ours, theirs, bounds), Agrees)


async def _distances(ours: Rows, theirs: Rows) -> torch.Tensor:
    def compute() -> torch.Tensor:
        return row_distances(*(decode_rows(rows, torch.float32) for rows in (ours, theirs)))

    return compute() if ours.count * ours.width < INLINE_VALUES else await asyncio.to_thread(compute)


async def _bounds_between(one: _Computed, other: _Computed, numeric_class: str) -> Bounds | None:
    """Bounds of a class whose rounding is not known: by what two machines differ; None for picks.

    Two of one kind may not differ at all, and say nothing then of what a third one rounds otherwise.
    """
    if not isinstance(one, Rows) or not isinstance(other, Rows) or one.size_bytes != other.size_bytes:
        return None
    found = bounds_of(numeric_class, numeric_class, [await _distances(one, other)])
    return replace(found, row=max(found.row, FAR_ROW), median=max(found.median or 0.0, FAR_MEDIAN))


def _compared_picks(ours: _Picked, theirs: _Picked, bounds: Bounds) -> Judgement:
    """Gaps of what one tail picked, by what the other one says of the likeliest tokens.

    A token that is none of these is at most as likely as the last of them. Where nobody tells, another pick is one.
    """
    sampling = theirs.sampling
    if sampling.multistep or sampling.rules is not None or filters(sampling):
        same = all(ours.after.get(place) == token for place, token in theirs.after.items())
        told = "picks that follow rules or filters differ, and their margins are not known here"
        return Agrees(len(theirs.after), 0.0, bounds.pick) if same else Unclear(told)
    gaps, places = [], []
    for place, token in theirs.after.items():
        if (own := ours.after.get(place)) is None:
            continue
        places.append(place + 1)
        best = ours.best.get(place) or theirs.best.get(place)
        gaps.append(0.0 if own == token else _gap(best, place, (own, token), sampling))
    return judge_picks(torch.tensor(gaps, dtype=torch.float64), places, bounds)


def _gap(best: dict[int, float] | None, place: int, pair: tuple[int, int], sampling: Sampling) -> float:
    """By how much, in logits, one token is better than another one, at least.

    Args:
        best: the likeliest tokens and their log-probabilities.
        pair: the token that was picked here, and the one that was named there.
    """
    if not best:
        return math.inf
    least = min(best.values())
    better, worse = (best.get(token, least) for token in pair)
    if not sampling.temperature:
        return better - worse
    noise = gumbel_row(sampling.seed, place + 1, max(pair) + 1)
    return better - worse + sampling.temperature * float(noise[pair[0]] - noise[pair[1]])


# The other machine's work: one session there, at the place of the hop


@dataclass(frozen=True, slots=True)
class _Redone:
    """A hop's part of a text, as one machine computed it.

    Attributes:
        computed: what left it.
        sender: whom to ask for what it signed.
        committed: the text's tokens, as nodes of its session.
    """

    computed: _Computed
    sender: Sender
    committed: tuple[CommittedToken, ...]


async def _recomputed(owner: AuditOwner, seat: Seat, text: AuditedText, entering: Rows | None) -> _Redone:
    """What a machine computes of the text.

    Args:
        seat: where it stands: the hop's place in a route that leads on as the text's does.
        entering: rows of all committed tokens; None for the first layers.

    Raises:
        SwarmError: it does not.
    """
    hop, key, route = seat.hop, SessionKey.fresh(), seat.route
    signer: Signer = key if hop.span.start == 0 else await owner.make_key()
    front = () if hop.span.start == 0 else (RouteHop(peer_id_of(signer.public_key), Span(0, hop.span.start)),)
    journal, limits, asked, tells = _journal_of(text, entering, is_tail=seat.is_tail(text))
    want = replace(text.want, window_tokens=limits.window_tokens, sweeps=limits.sweeps, nodes=limits.nodes)
    want = replace(want, expected_tokens=0, prefix=())
    attach = Attach(key.session, 1, (*front, *route.hops[seat.place :]), len(front), want, records=route.sealed)
    listener = _Replaying(journal, is_split=want.ends_only and not front)
    async with TaskScope() as scope:
        dial = partial(_dial, owner.dialer, route)
        link = SuccessorLink(scope, dial, signer, listener, Uplink(mbit_per_s=MBIT_PER_S))
        try:
            link.follow(key.command(attach))
            sender = Sender(_connect(owner.dialer, route, hop), hop, key, text.want.codec, seat.signed_class)
            if seat.is_tail(text):
                picked = await _picks(scope, sender.connection, (key, hop, journal, tells), asked, text)
                return _Redone(picked, sender, tuple(journal.state.committed))
            await _until_computed(sender.connection, key, journal.state.sequence, listener)
            await owner.rows.keep([sender])
            rows = await owner.rows.sent(sender, journal.state.committed)
        finally:
            link.close("done")
            await link.gone()
    if rows is None:
        raise CannotAudit(f"node {hop.peer} does not give the rows that it computed")
    return _Redone(rows, sender, tuple(journal.state.committed))


async def _dial(dialer: Dialer, route: Route, hop: RouteHop, stuck: grpc.aio.Channel | None) -> Connection:
    return _connect(dialer, route, hop)


def _journal_of(
    text: AuditedText, entering: Rows | None, *, is_tail: bool
) -> tuple[Journal, Limits, dict[int, Sweep], TellLog]:
    """The text as the machine before would replay it, its limits, and the sweeps that a tail is to answer."""
    count = len(text.committed)
    nodes = max(REPLAY_NODES, count if is_tail else 0)
    limits = Limits(text.vocab_size, count + 1, SWEEPS + count // REPLAY_NODES, nodes)
    state = SessionState(limits)
    tells, asked, tokens = TellLog(state), dict[int, Sweep](), [token.token for token in text.committed]
    journal = Journal(state, is_bare=text.want.ends_only and entering is not None)
    first_asked = max(text.picks_from - 1, 0) if is_tail else count
    for start in range(0, count + 1, REPLAY_NODES):
        some = tokens[start : start + REPLAY_NODES]
        parents = (None, *map(TreeNodeId, range(start, start + len(some) - 1)))[: len(some)]
        sweep = Sweep(
            sequence=state.sequence + 1,
            committed=start,
            first_id=TreeNodeId(start),
            tokens=tuple(some),
            parents=parents,
            picks_from=TreeNodeId(min(max(first_asked, start), start + len(some))),
            generation=1,
            acked=min(first_asked // REPLAY_NODES, state.sequence),
            commit_to=TreeNodeId(start - 1) if start else None,
            sampling=None if start else text.sampling,
            want=Want(log_probs=True, top_log_probs=MAX_TOP_LOG_PROBS) if is_tail else None,
        )
        state.apply(sweep)
        journal.note(sweep)
        tells.note(sweep)
        asked[sweep.sequence] = sweep
    if state.live:
        sweep = Sweep(
            state.sequence + 1, count, state.next_id, (), (), state.next_id, 1, state.acked, None, TreeNodeId(count - 1)
        )
        state.apply(sweep)
        journal.note(sweep)
        tells.note(sweep)
    if not is_tail:
        state.acked = state.sequence
    if entering is not None:
        journal.begin(state, [entering])
    return journal, limits, {number: each for number, each in asked.items() if number > state.acked}, tells


@dataclass(slots=True)
class _Replaying:
    """Gives the machine its snapshot once, and notes what goes wrong.

    Attributes:
        is_split: whether another machine picks, which the client tells itself how to.
        trouble: set when the machine is lost or refuses.
    """

    journal: Journal
    is_split: bool = False
    trouble: asyncio.Future[SwarmError] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def replay(self, received: int | None) -> Sequence[SweepFrame | Snapshot]:
        """All of the text."""
        messages = self.journal.replay(received)
        return [one.without_settings() for one in messages] if self.is_split else messages

    def on_sent(self, hop: RouteHop, since: int, message: SweepFrame | Snapshot) -> None:
        """Nothing is committed to by who asks."""

    def on_ready(self, ready: Ready) -> None:
        """The machines behind are of no concern."""

    def on_fault(self, fault: Fault, via: RouteHop) -> None:
        """A machine refuses; of those behind it, nobody asks for anything."""
        if fault.peer == via.peer:
            self._note(CannotAudit(f"node {via.peer} does not take an audit: {fault.reason}"))

    def on_trouble(self, error: HopError | LocalProtocolError) -> None:
        """The machine is lost."""
        self._note(error)

    def _note(self, error: SwarmError) -> None:
        if not self.trouble.done():
            self.trouble.set_result(error)


async def _until_computed(connection: Connection, key: SessionKey, sequence: int, listener: _Replaying) -> None:
    """Wait until a machine has run the snapshot: it says so when its client asks, as of any session."""
    request = wire.encode_hold(Hold(key.session, 1))
    while not listener.trouble.done():
        held = await send_hold(connection, key, request, STANDING_S)
        if held is not None and held.received >= sequence and held.working < sequence:
            return
        await asyncio.wait([listener.trouble], timeout=POLL_S)
    raise listener.trouble.result()


async def _picks(
    scope: TaskScope,
    connection: Connection,
    at: tuple[SessionKey, RouteHop, Journal, TellLog],
    asked: dict[int, Sweep],
    text: AuditedText,
) -> _Picked:
    """What a tail picks along the text, and what it says of the likeliest tokens."""
    key, hop, journal, tells = at
    answers: asyncio.Queue[Reply | SwarmError] = asyncio.Queue(SWEEPS)
    told = tells.all() if text.want.ends_only else ()
    stream = ReplyStream(hop, key, lambda _, message: answers.put_nowait(message), tells=told)
    request = RepliesRequest(key.session, 1, journal.state.acked, may_wait=True)
    scope.spawn(stream.run(lambda: connection, request))
    found = _Picked(text.sampling, {})
    while asked:
        reply = await answers.get()
        if isinstance(reply, SwarmError):
            raise reply
        if asked.pop(reply.sequence, None) is None:
            continue
        for place, (node, token) in enumerate(reply.picks):
            found.after[int(node)] = token
            if reply.top_log_probs is not None:
                found.best[int(node)] = dict(reply.top_log_probs[place])
    return found
