"""One session on this machine: its upstream, its log, its KV, its link to the next hop. Lives in the event loop.

What the sweeps mean is `swarm.protocol.session`'s, tensors are `node.session.sweep_run`'s, who is heard is
`node.session.upstreams`', who comes next is `swarm.link.successor`'s; this file moves work between them and says
so to the neighbours. Trouble behind it is reported and waited out: the client alone repairs (R1).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Protocol

import grpc.aio
import msgpack
import torch

from node.model.span import SpanModel
from node.session.admission import GrammarsRefused, OwnerClass, payer_of, standing_of
from node.session.context import NodeContext
from node.session.scheduler import PendingWork
from node.session.settle import HopCommitments
from node.session.sweep_run import HopRole, SweepRun
from node.session.tail import ReplyBuffer, Tail
from node.session.upstreams import UpstreamSet, UpstreamStream
from swarm.base.errors import (
    Busy,
    HopClosed,
    HopError,
    HopLeaving,
    HopMisbehaved,
    LocalProtocolError,
    RemoteProtocolError,
    SwarmError,
    Unreachable,
)
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.compute.grammars import LEASE_FIELD, CompiledGrammar, LeaseExceeded
from swarm.compute.kv_cache import KvCache
from swarm.compute.kv_pool import KvBlock, KvPool, NamedText
from swarm.compute.row_codec import check_width
from swarm.link.dial import Connection
from swarm.link.hedged_link import follow
from swarm.link.successor import SessionLink, SuccessorLink
from swarm.protocol.authority import check_command, place_in
from swarm.protocol.faults import sign_fault
from swarm.protocol.frames import FrameLimits
from swarm.protocol.hop_log import HopLog
from swarm.protocol.journal import Journal
from swarm.protocol.limits import BLOCK_TOKENS, HeadLimits
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Border,
    Close,
    Credits,
    Fault,
    FaultKind,
    Held,
    Hold,
    HopTime,
    Ready,
    Reply,
    Reroute,
    RouteHop,
    Rows,
    Sampling,
    Snapshot,
    Sweep,
    SweepFrame,
    Tell,
)
from swarm.protocol.pick_rules import Grammar
from swarm.protocol.session import CommittedToken
from swarm.protocol.told import Told
from swarm.trust.settlement import Settlement

logger = logging.getLogger(__name__)

States = dict[int, tuple[torch.Tensor, ...]]

# How long a session lives without news: renewed by every message, shortened when its upstream is lost (R9).

ORPHAN_S = 4.0
"""How long a session outlives its upstream's stream."""
HOLD_S = 60.0
"""The longest time for which a client may hold an orphan."""
IDLE_S = 1_800.0
"""How long a session may stay without a sweep: a chat's user may think for a while."""


class Lease:
    """A timer that calls `end` with the reason when it runs out."""

    def __init__(self, end: Callable[[str], None]) -> None:
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def renew(self) -> None:
        """A message of the session came."""
        self._set(IDLE_S, "nothing was heard of it")

    def orphan(self) -> None:
        """The upstream's stream ended: wait a while for another one."""
        self._set(ORPHAN_S, "its upstream vanished")

    def hold(self, seconds: float) -> None:
        """The client says that it repairs the chain."""
        self._set(min(seconds, HOLD_S), "its chain was not repaired in time")

    def cancel(self) -> None:
        """The session is over."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, seconds: float, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_over:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end, reason)


# Frame validation beyond the session's rules: rows, codec, sampling.


class FrameRefused(SwarmError):
    """A frame that the session did not take; its neighbours know already."""


@dataclass(frozen=True, slots=True)
class HopKnowledge:
    """What the chain brings a hop beside structure and rows (P17).

    Attributes:
        tokens: whether it brings token ids.
        settings: whether it brings how to pick: sampling, guesses, what is wanted beside picks.
        hears_client: whether the session's client says both itself.
    """

    tokens: bool = True
    settings: bool = True
    hears_client: bool = False

    @classmethod
    def of(cls, attach: Attach) -> HopKnowledge:
        """What it brings this hop; a chain of one machine has both ends in one."""
        if not attach.open.ends_only or len(attach.route) == 1:
            return cls()
        return cls(attach.index == 0, settings=False, hears_client=attach.index == len(attach.route) - 1)

    def check(self, headers: Iterable[Sweep]) -> None:
        """Refuse sweeps that bring other things than were agreed on when the session was opened.

        Raises:
            RemoteProtocolError: names the field.
        """
        for sweep in headers:
            self.check_tokens(sweep.tokens, sweep.count)
            has_settings = sweep.sampling is not None or sweep.want is not None or bool(sweep.guesses)
            if has_settings and not self.settings:
                raise RemoteProtocolError("sampling", "goes to the tail alone in this session")

    def check_tokens(self, tokens: Sequence[int], nodes: int) -> None:
        """Refuse tokens where none are to be, and nodes without any where there must be some.

        Raises:
            RemoteProtocolError: names the field.
        """
        if nodes and bool(tokens) != self.tokens:
            raise RemoteProtocolError("tokens", "are missing" if self.tokens else "go to the ends of this chain alone")


def check_sweep(frame: SweepFrame, model: SpanModel, role: HopRole, brings: HopKnowledge) -> None:
    """Refuse a sweep whose rows or sampling this hop cannot serve, or that brings what it must not have.

    Raises:
        RemoteProtocolError: names the field.
    """
    brings.check([frame.sweep])
    check_parts(frame.sweep.sampling, frame.rows, model, role)
    if any(max(guess.tokens) >= model.vocab_size for guess in frame.sweep.guesses):  # the wire saw to all else
        raise RemoteProtocolError("guesses", f"token ids must be below {model.vocab_size}")


def check_parts(sampling: Sampling | None, rows: Rows | None, model: SpanModel, role: HopRole) -> None:
    """Refuse a sampling of tokens that the model has not, and rows that are not the session's; hop 0 embeds ids.

    Raises:
        RemoteProtocolError: names the field.
    """
    if sampling is not None and (problem := sampling.beyond(model.vocab_size)) is not None:
        raise RemoteProtocolError("sampling", " ".join(problem))
    if (rows is None) != (role.span.start == 0):
        raise RemoteProtocolError("rows", "hop 0 embeds ids, later hops take rows")
    if rows is not None:
        check_width(rows, role.width(role.span.start, model.hidden_size))
        if rows.codec is not role.codec:
            raise RemoteProtocolError("codec", f"{rows.codec.value} rows in a session of {role.codec.value}")


TELL_S = 10.0
"""How long a tail waits for what the client has to say of a sweep: it leaves the client together with the sweep."""
MAX_FAULTS = 64
"""Faults of the hops behind that are passed on in one generation."""
FILED_TOGETHER = 64
"""Blocks that are copied at a time: so many leave other sessions their turns."""
GRANTS_TOO_LITTLE = "grants less than the session needs"
NOBODY_SIGNED = "passed on a fault that its reporter did not sign"


def _scope_of(attach: Attach, role: HopRole) -> bytes | None:
    """What KV and rows depend on beside the tokens; with the hops in front, wrong rows spoil no other chain's."""
    if attach.hedge is not None:
        return None
    front = [(hop.peer, hop.span.start, hop.span.end) for hop in attach.route[: attach.index]]
    own = [front, role.span.start, role.span.end, role.codec.value, role.aux_layers, attach.open.ends_only]
    return hashlib.sha256(msgpack.packb(own)).digest()


class TextShelf(Protocol):
    """What a node holds of texts, besides a session's own.

    Attributes:
        pool: of sessions that are over.
    """

    pool: KvPool

    def running(self, scope: bytes, prefix: Sequence[Border]) -> HopSession | None:
        """A session that holds the longest of these beginnings, and has not left it to the pool."""

    def need(self, session: HopSession, tokens: int) -> None:
        """A session takes so many KV tokens from now on; where there is no room, somebody's session ends here."""

    def over(self, session: HopSession) -> None:
        """A session is over: its room is others', and its blocks', from now on."""

    def room(self) -> int:
        """KV tokens that blocks may take beside the reservations of all sessions."""


class HopSession:
    """One session's hop; `run` owns it from attach to close.

    Attributes:
        credits: how much may be unanswered.
        replies: at the tail, what the client has not confirmed.
        log: the session's rules and state here.
        journal: what the next hop may need again (R5).
        commitments: to what it received and sent (S1).
        account: who pays for it (`node.session.admission`).
        owner: whose turns it has (`node.session.scheduler`): behind hop 0, who pays there.
        scope: what its KV and rows depend on beside the tokens (P15); None where a hop has a replica.
        used_at: when the last sweep came, or the session began, on the clock of `time.monotonic`.
    """

    def __init__(self, context: NodeContext, attach: Attach, credits: Credits, account: str, shelf: TextShelf) -> None:
        """Begin a session.

        Args:
            shelf: what this node holds of other texts (P15).
        """
        self.credits = credits
        self.account = account
        self._since = attach.generation
        self.owner = payer_of(account, attach)
        self.used_at = time.monotonic()
        self.replies = ReplyBuffer()
        self._brings = HopKnowledge.of(attach)
        told = Told(is_new=attach.generation == 0) if self._brings.hears_client else None
        self.log = HopLog(context.limits(credits), told)
        self.journal = Journal(self.log.executed, is_bare=attach.open.ends_only)
        self._untold: asyncio.TimerHandle | None = None
        self.commitments = HopCommitments(attach.session, context.peer, context.hashing)
        self._context, self._attach = context, attach
        self._kv_cache: KvCache | None = None
        opened, span = attach.open, attach.route[attach.index].span
        self._role = HopRole(span, opened.codec, context.valid_tokens, context.noise, opened.aux_layers)
        self._is_tail = attach.index == len(attach.route) - 1
        parts = opened.row_parts(span.start)
        self._upstreams = UpstreamSet(context.peer, context.counters, self._receipt, self._sign, row_parts=parts)
        self._passed_faults_in, self._passed_faults = -1, 0
        self._next: SessionLink | None = None
        self._ready_behind: Ready | None = None
        self._running: SweepRun | None = None
        self._shelf = shelf
        self._tail = Tail(self.log, self._compile if self._is_tail else None)
        self._asker = account  # who pays for grammars
        self._arrived: dict[int, float] = {}
        self._journal_bytes, self._asked_in = 0, -1
        self._adopted, self._sealed = 0, b""
        self._is_restoring = False  # a snapshot came, and not all of it is computed
        self._closed, self._is_dismissed, self._reason = asyncio.Event(), False, "closed"
        self._lease = Lease(self.expire)
        self._claim = context.receipts.begin(attach, self._next_channel)
        self._attaching: asyncio.Task[None] | None = None
        self._connect = context.dials(account)
        self.scope = _scope_of(attach, self._role)

    @property
    def span(self) -> Span:
        """The layers that this session uses here."""
        return self._role.span

    def serves(self, attach: Attach) -> bool:
        """Whether what a client asks of this hop is what it does already."""
        asked = attach.route[attach.index].span, attach.open.aux_layers, HopKnowledge.of(attach)
        return asked == (self.span, self._role.aux_layers, self._brings)

    @property
    def _is_replica(self) -> bool:
        """Whether this hop is hedged: another machine gets the same sweeps."""
        hedge = self._attach.hedge
        return hedge is not None and hedge.index == self._attach.index

    @property
    def rested_s(self) -> float:
        """For how long it has had nothing to do."""
        return 0.0 if self._running is not None or len(self.log) else time.monotonic() - self.used_at

    @property
    def _kv_tokens(self) -> int:
        """KV that it takes once all that came is computed, at most."""
        return max(len(state.committed) + len(state.live) for state in (self.log.received, self.log.executed))

    @property
    def names(self) -> list[bytes]:
        """Of the blocks that it has computed, as far as its client gave them (P15)."""
        return self.log.executed.names

    @property
    def is_tail(self) -> bool:
        """Whether this hop picks tokens and holds the reply stream."""
        return self._is_tail

    @property
    def frame_limits(self) -> FrameLimits:
        """The largest frame: every node that the session may hold (a snapshot's), with its rows in their codec."""
        credits, role = self.credits, self._role
        counts = HeadLimits(credits.window_tokens, credits.sweeps, credits.nodes)
        row_bytes = role.codec.row_bytes(role.width(self.span.start, self._context.model.hidden_size))
        return FrameLimits.of_session(counts, row_bytes * (credits.window_tokens + credits.nodes))

    @property
    def is_closed(self) -> bool:
        """Whether the session is over."""
        return self._closed.is_set()

    def attach(self, upstream: UpstreamStream, attach: Attach, sender: str) -> None:
        """Hear this stream from now on, and no other (R3) but its replica's (H2); go on with its route.

        Args:
            attach: its first message, which the session's client signed.
            sender: who opened it: see `sender_of`.

        Raises:
            HopClosed: a newer generation holds the session.
            RemoteProtocolError: the generation is too far ahead.
        """
        is_new = self._upstreams.attach(upstream, attach, sender, self.log.received.sequence, self.credits)
        self.commitments.listen(attach.generation, sender)
        self._lease.renew()
        if is_new:
            self._go_on(attach)

    def reroute(self, upstream: UpstreamStream, reroute: Reroute) -> None:
        """Go on with another route, which has this hop as it is (R2).

        Raises:
            RemoteProtocolError: it has not, or the session's client did not sign it.
        """
        if upstream not in self._upstreams or self.is_closed:
            return
        session, peer = self._attach.session, self._context.peer
        index = place_in(reroute, peer, self.span)
        if index is None:
            raise RemoteProtocolError("route", f"{peer} does not have layers {self.span} in it")
        check_command(session, reroute)
        if reroute.open.aux_layers != self._role.aux_layers:
            raise RemoteProtocolError("aux_layers", "are others than those that the session was opened with")
        if reroute.open.ends_only != self._attach.open.ends_only:
            raise RemoteProtocolError("ends_only", "is another than the session was opened with")
        if self._upstreams.reroute(upstream, reroute, index, self.credits):
            old, new = self._attach, Attach(session, reroute.generation, reroute.route, index, reroute.open)
            new = replace(new, ticket=old.ticket, payer=old.payer, owner=old.owner)
            self._go_on(replace(new, hedge=reroute.hedge, records=reroute.records, signature=reroute.signature))

    def _go_on(self, attach: Attach) -> None:
        self._attach, self.scope = attach, _scope_of(attach, self._role)
        if attach.hedge is not None:
            self.commitments.stop()
        if self._is_tail and self._kv_cache is not None and self._attaching is None:
            self._upstreams.be_ready(self.credits)
        elif self._next is not None:
            self._next = follow(self._next, replace(attach, index=attach.index + 1))

    def detach(self, upstream: UpstreamStream) -> None:
        """The stream ended. If it was the last one that brought sweeps, wait a while for another one."""
        if upstream in self._upstreams:
            self._upstreams.drop(upstream)
            if len(self._upstreams) == 0:
                self._lease.orphan()

    def receive(self, upstream: UpstreamStream, frame: SweepFrame) -> None:
        """Take one sweep off the session's stream.

        Raises:
            FrameRefused: the header breaks the rules; nothing is changed, and the neighbours were told.
        """
        if upstream not in self._upstreams or self.is_closed:
            return
        if self._is_replica and not self.log.has_room(frame.sweep):
            self.leave("fell too far behind its replica")
            return
        if self._upstreams.skips(upstream, frame, self.log.received.sequence):
            return
        try:
            if self._upstreams.ready_for < 0 and self._attach.generation == 0 and self._attach.hedge is None:
                raise RemoteProtocolError("sequence", f"sweep {frame.sweep.sequence} came before Ready")
            check_sweep(frame, self._context.model, self._role, self._brings)
            self._check_grammar(frame.sweep.sampling)
            is_new = self.log.receive(frame)
        except SwarmError as error:
            raise self._refused(error) from error
        self._lease.renew()
        self.used_at = time.monotonic()
        self._context.counters.frames_in += 1
        if is_new:
            self._shelf.need(self, self._kv_tokens)
            self._tail.expect(frame.sweep.sampling)
            self._upstreams.note(frame)
            self._arrived[frame.sweep.sequence] = time.perf_counter()
            self._go_on_if_told()
            self.commitments.received(frame, self.log.received)
            return
        self.commitments.refused()
        if not self._upstreams.is_duplicate(upstream, frame) and self._is_tail:
            self.replies.resend(frame.sweep.sequence)

    def restore(self, upstream: UpstreamStream, snapshot: Snapshot) -> None:
        """Forget what was here and continue from a snapshot (R5), unless a replica brought as much already.

        Raises:
            FrameRefused: it makes no sense; nothing is changed, and the neighbours were told.
        """
        if upstream not in self._upstreams or self.is_closed:
            return
        is_duplicate = len(self._upstreams) > 1 and snapshot.sequence <= self.log.received.sequence
        if is_duplicate and self._asked_in < self._attach.generation:
            return
        try:
            self._brings.check(snapshot.headers)
            self._brings.check_tokens(snapshot.tokens, len(snapshot.ids))
            if snapshot.sampling != Sampling() and not self._brings.settings:
                raise RemoteProtocolError("sampling", "goes to the tail alone in this session")
            check_parts(snapshot.sampling, snapshot.rows, self._context.model, self._role)
            self._check_grammar(snapshot.sampling)
            self.log.restore(snapshot)
        except SwarmError as error:
            raise self._refused(error) from error
        self.used_at = time.monotonic()
        self._is_restoring = True
        self._shelf.need(self, self._kv_tokens)
        self._running = None  # what runs now is of no use any more
        self._arrived.clear()
        self._tail.forget()
        self._tail.expect(snapshot.sampling)
        self.journal.restored(self.log.executed, snapshot.headers)
        if self._next is not None:
            self._next.desync()
        self._account()
        self._context.counters.restores += 1
        self._context.counters.restored_nodes += len(snapshot.ids)
        self._go_on_if_told()
        self.commitments.received(snapshot, self.log.received)

    def tell(self, tell: Tell, address: str) -> None:
        """The session's client says what a sweep holds, which the chain does not bring (P17).

        Args:
            tell: what it says.
            address: of the client, who pays for grammars, since no machine before this one sees any.

        Raises:
            RemoteProtocolError: this hop does not ask it.
        """
        if not self._brings.hears_client:
            raise RemoteProtocolError("tell", "comes to a machine that has its tokens from the chain")
        if self.is_closed:
            return
        self._asker = address
        try:
            self._check_grammar(tell.sampling)
            is_news = self.log.hear(tell)
        except SwarmError as error:
            self.fail(error)
            return
        self._lease.renew()
        if is_news:
            self._tail.expect(tell.sampling)
        self._stop_waiting()
        self._go_on_if_told()

    def _go_on_if_told(self) -> None:
        """Run what has come; for what the client has to say of it there is a time."""
        if self.log.untold is None:
            self._stop_waiting()
        elif self._untold is None:
            self._untold = asyncio.get_running_loop().call_later(TELL_S, self._give_up_untold)
        self._context.engine.submit(self)

    def _stop_waiting(self) -> None:
        if self._untold is not None:
            self._untold.cancel()
            self._untold = None

    def _give_up_untold(self) -> None:
        if not self.is_closed and (sequence := self.log.untold) is not None:
            reason = f"the session's client did not say within {TELL_S:.0f} s what sweep {sequence} holds"
            self.fail(RemoteProtocolError("tell", reason))

    def _check_grammar(self, sampling: Sampling | None) -> None:
        if sampling is not None and sampling.rules is not None and sampling.rules.grammar is not None:
            self._context.admission.check_grammar(self._asker)

    async def _compile(self, grammar: Grammar) -> CompiledGrammar:
        return await self._context.compile(self.span, self._asker, grammar)

    def _refused(self, error: SwarmError) -> FrameRefused:
        self._context.counters.failed(error)
        self._upstreams.report(error)
        if isinstance(error, GrammarsRefused):
            self.dismiss(str(error))
        return FrameRefused(str(error))

    def hold(self, hold: Hold) -> None:
        """Outlive the upstream while the chain is repaired, or end here because it goes on without (R9)."""
        is_stale = hold.generation < self._attach.generation
        if hold.is_release and not is_stale:
            self.dismiss("its client released it")
        elif hold.ttl_s > 0 and not is_stale and len(self._upstreams) == 0:
            self._lease.hold(hold.ttl_s)

    def warn(self, reason: str) -> None:
        """Report that this hop leaves soon, and serve on."""
        self._upstreams.report(HopLeaving(self._context.peer, str(self.span), reason))

    def closed_by(self, upstream: UpstreamStream, close: Close) -> None:
        """The session's upstream says that it is over, here or altogether."""
        if upstream in self._upstreams:
            self._is_dismissed = close.dismissed
            self.close(close.reason)

    def dismiss(self, reason: str) -> None:
        """End the session on this hop alone."""
        self._is_dismissed = True
        self.close(reason)

    def leave(self, reason: str) -> None:
        """Leave the session to others, and say why."""
        self._upstreams.report(HopClosed(self._context.peer, str(self._role.span), reason))
        self.dismiss(reason)

    def give_way(self) -> None:
        """End the session on this hop alone, because others need its room more."""
        self._upstreams.report(Busy(self._context.peer, str(self.span), "is full, and others need this session's room"))
        self.dismiss("gave way to another session")

    def expire(self, reason: str) -> None:
        """End a session that no client asks for any more, here and behind."""
        self._upstreams.report(HopClosed(self._context.peer, str(self._role.span), reason))
        self.close(reason)

    def close(self, reason: str) -> None:
        """End the session; its room is free at once, and `run` files what is committed."""
        if not self.is_closed:
            self._reason = reason
            self._running = None
            self._closed.set()
            self._context.receipts.end(self._attach.session, self._claim)
            self._stop_waiting()
            self._shelf.over(self)
            self.replies.close()
            if self._sealed:
                self._keep_settled()
            if self._attaching is not None:
                self._attaching.cancel()

    async def run(self) -> None:
        """Reserve KV and attach what lies behind this hop, then wait for the end."""
        self._attaching = asyncio.current_task()
        try:
            self._kv_cache = await self._context.kv_cache(self.span, self.credits, self._attach.open.expected_tokens)
            await (self._serve_tail() if self._is_tail else self._serve_linked())
            self._upstreams.end()
            await self.file()
        except SwarmError as error:
            if isinstance(error, LeaseExceeded):
                self._context.admission.grammar_exceeded(self._asker)
            self._upstreams.report(self._discreet(error))
            self.close(str(error))
        finally:
            self._attaching = None
            self.close("ended")
            self._lease.cancel()
            self._upstreams.end()
            self._kv_cache = None  # its memory is free
            self.commitments.forget_picked()
            if not self._sealed:
                self.journal.drop()
                self.commitments.drop()
                self._account()
            logger.info("session over: %s; %d sweeps", self._reason, self.log.received.sequence)

    async def _begin(self) -> None:
        """Take what this node holds of the text; only then anything is computed, and said to be ready."""
        await self._take_beginning()
        self._attaching = None
        self._context.engine.submit(self)  # a replay may have come meanwhile

    async def _take_beginning(self) -> None:
        """Begin with the longest beginning of its text that this node holds (P15)."""
        prefix = [border for border in self._attach.open.prefix if border.tokens < self.credits.window_tokens]
        kv, scope, pool = self._kv_cache, self.scope, self._shelf.pool
        if not prefix or scope is None or self._attach.generation or kv is None:
            return
        blocks, names = pool.find(scope, prefix)
        longer = [border for border in prefix if border.tokens > len(blocks) * BLOCK_TOKENS]
        if longer and (running := self._shelf.running(scope, longer)) is not None:
            await running.file()
            blocks, names = pool.find(scope, prefix)
        if not blocks:
            return
        self._shelf.need(self, len(blocks) * BLOCK_TOKENS)  # whatever its client said that it would take
        for start in range(0, len(blocks), FILED_TOGETHER):
            if self.is_closed:
                return
            await self._context.engine.on_thread(partial(_adopt, kv, blocks[start : start + FILED_TOGETHER]))
        if self.is_closed or self._is_restoring:  # what comes with a snapshot takes the place of all that is here
            return
        tokens = [token for block in blocks for token in block.tokens or (None,) * BLOCK_TOKENS]
        self.log.begin(tokens, names)
        self.journal.begin(self.log.executed, [block.rows for block in blocks if block.rows is not None])
        self._account()
        self.credits = replace(self.credits, held=len(tokens))
        self._adopted = len(tokens)
        self._context.counters.kept_tokens += len(tokens)

    async def file(self) -> None:
        """Leave copies of what is committed and named in the node's pool, for sessions that begin alike (P15)."""
        kv, scope, pool = self._kv_cache, self.scope, self._shelf.pool
        if kv is None or scope is None:
            return
        text, crowd = NamedText(scope, tuple(self.names)), standing_of(self.account).network or self.account
        lacking = pool.lacks(text)
        for first in lacking[::FILED_TOGETHER]:
            if self._is_restoring or self.names[: len(text.names)] != [*text.names]:
                return  # its KV is of another text, or it was cut back meanwhile
            places = range(first, min(first + FILED_TOGETHER, lacking.stop))
            spans = [(place * BLOCK_TOKENS, (place + 1) * BLOCK_TOKENS) for place in places]
            tokens = [_ids(self.log.executed.committed[slice(*span)]) for span in spans]
            rows = [None if self._is_tail else self.journal.block(*span) for span in spans]
            cuts = await self._context.engine.on_thread(partial(_cut, kv, spans))
            found = zip(tokens, rows, cuts, strict=False)
            whole = takewhile(lambda one: self._is_tail or one[1] is not None, found)
            blocks = [KvBlock(ids, tensors, row, states) for ids, row, (tensors, states) in whole]
            if pool.add(text, first, blocks, crowd, self._shelf.room()) < len(spans):
                return

    def pending(self) -> PendingWork | None:
        """For the engine: what `next_run` would return."""
        if self.is_closed or self._attaching is not None or self._kv_cache is None or not self._tail.is_ready:
            return None
        rows = self.log.next_rows if self._running is None else self._running.remaining
        return None if rows is None else PendingWork(self.span, rows, self._kv_cache.slots.used)

    def next_run(self) -> SweepRun | None:
        """For the engine: the sweep to work on."""
        if self.is_closed or self._attaching is not None or self._kv_cache is None or not self._tail.is_ready:
            return None
        if self._running is None:
            work = self.log.next_work()
            if work is not None:
                self._running = SweepRun(self._context.model, self._kv_cache, self._role, work, self._tail.picking())
                self._tail.expect_masks(self._running)
        return self._running if self._tail.is_ready else None

    def finish(self, run: SweepRun) -> None:
        """For the engine: a sweep is done; send it on, or answer it."""
        if self.is_closed or run is not self._running:
            return
        self._running = None
        self._context.counters.forwarded(run.forwards_ms)
        self._note(run)
        if run.work.is_replay:
            self._end_replay(run)
            return
        sweep = run.work.frame.sweep
        stayed_ms = (time.perf_counter() - self._arrived.pop(sweep.sequence)) * 1e3
        waited_ms = stayed_ms - run.compute_ms - run.encode_ms
        link_ms = self.replies.link_ms if self._next is None else self._next.rtt_ms / 2
        other_ms = run.encode_ms + self._context.engine.loop_cost.mean_ms
        own = HopTime(max(waited_ms, 0.0), run.compute_ms, other_ms, link_ms, self.commitments.heads())
        times = (*run.work.frame.times, own)
        self._context.counters.swept(run.work, len(self.span), max(waited_ms, 0.0), run.compute_ms)
        self._claim.tokens += len(run.work.applied.path)
        self._context.counters.rows_by_class[OwnerClass.of(self.account)] += len(run.work.run)
        if self._is_tail:
            self._answer(self._tail.reply(run, times), self.log.received.acked)
            self.commitments.answered()
            self._account()
            return
        kept = None if len(run.work.run) == sweep.count else run.kept
        if self._next is not None:
            passed = sweep.structure() if self._attach.open.ends_only else sweep
            self._next.push(SweepFrame(passed, kept, run.rows, times))

    def _answer(self, reply: Reply, acked: int) -> None:
        self.replies.put(reply, acked)
        self.commitments.replied(self._since, reply, self.log.executed)

    def on_sent(self, hop: RouteHop, since: int, message: SweepFrame | Snapshot) -> None:
        """A message is on its way to the next hop."""
        self.commitments.sent(hop.peer, since, message, self.log.executed)

    async def settle(self) -> bytes:
        """Sign what was received and sent so far (S4); once the session is over, it is kept for a while."""
        context, attach = self._context, self._attach
        received, sent = await self.commitments.settle()
        model = context.model
        made = Settlement(
            *(attach.session, context.peer, attach.open.fingerprint, model.signed_class, self.span, model.num_layers),
            *(self._role.codec, attach.generation, self._adopted, received, sent, int(time.time())),
        )
        self._sealed = context.settling.seal(made, context.signer)
        return self._sealed

    def _note(self, run: SweepRun) -> None:
        """Into the journal before anything is sent (R5)."""
        self.commitments.computed(run.answered)
        if run.rows is not None:
            self.journal.keep(run.work.applied, run.work.nodes, run.rows)
            self._account()
        if not run.work.is_replay:
            self.journal.note(run.work.frame.sweep)

    def _end_replay(self, run: SweepRun) -> None:
        """A part of a snapshot was run: after the last one, go on where the hop before left off."""
        self._context.counters.replay_us += round(run.compute_ms * 1e3)
        if self._is_tail:
            self._tail.replayed(run)
        if self.log.is_replaying:
            return
        self._is_restoring = False
        self._claim.tokens += len(self.log.executed.committed)
        if self._next is not None:
            self._next.sync()
            return
        for reply in self._tail.replies(self._attach.generation):
            self._answer(reply, self.log.executed.acked)
        self.commitments.answered()

    def replay(self, received: int | None) -> Sequence[SweepFrame | Snapshot] | None:
        """What the next hop lacks, unless this one is in the middle of a sweep or being replayed itself."""
        if self.log.is_replaying or self._running is not None:
            return None
        if self.log.executed.sequence == (received or 0) and not self._lacks_beginning(received):
            return ()
        if self.journal.is_dropped:
            self._need_replay()
            return None
        messages = self.journal.replay(received)
        self._context.counters.replays += any(isinstance(message, Snapshot) for message in messages)
        self._context.counters.catch_ups += sum(isinstance(message, SweepFrame) for message in messages)
        return messages

    def _lacks_beginning(self, received: int | None) -> bool:
        """Whether a machine that came later lacks the tokens that the session began with: no sweep has brought them."""
        return received is None and self._attach.generation > 0 and bool(self.log.executed.committed)

    def _need_replay(self) -> None:
        """Ask for a replay before one can be given (R8); where that found no room either, another machine must do."""
        generation, asked = self._attach.generation, self._asked_in
        self._asked_in = generation
        if asked == generation:
            self._upstreams.report(
                Busy(self._context.peer, str(self.span), "has no memory to replay this session to the next hop")
            )
        else:
            self._upstreams.send(Attached(generation, None, reads_packed=True))

    def on_ready(self, ready: Ready) -> None:
        """The hops behind are attached; one that grants less than a session needs is refused."""
        if self._attaching is not None:
            self._ready_behind = ready
        elif ready.generation == self._attach.generation:
            if not ready.credits.suffice(self._attach.open, in_use=ready.generation > 0):
                behind = self._attach.route[self._attach.index + 1]
                self.on_trouble(HopMisbehaved(behind.peer, str(behind.span), GRANTS_TOO_LITTLE))
                return
            self.credits = self.credits.min_with(ready.credits)
            self.log.limit(self._context.limits(self.credits))
            self._upstreams.be_ready(self.credits)

    def on_fault(self, fault: Fault, via: RouteHop) -> None:
        """A hop behind has trouble: the client's business. One that forges what others say is trouble itself."""
        if self._passed_faults_in < self._upstreams.heard:
            self._passed_faults_in, self._passed_faults = self._upstreams.heard, 0
        if self._passed_faults >= MAX_FAULTS:
            return
        self._passed_faults += 1
        if self._context.is_signed(fault, self._attach.session, self._attach.records) is False:
            self.on_trouble(HopMisbehaved(via.peer, str(via.span), NOBODY_SIGNED))
        else:
            if (fault.kind, fault.field) == (FaultKind.PROTOCOL, LEASE_FIELD):
                self._context.admission.grammar_exceeded(self.account)
            self._upstreams.send(fault)

    def standing(self) -> Held:
        """How far the session is here, for its client, who looks for the hop that does not move (R17)."""
        running, log = self._running, self.log
        received, done = log.received.sequence, log.executed.sequence
        if self._is_restoring or self._attaching is not None or self._kv_cache is None:
            done, working = 0, max(received, 1)
        else:
            done -= running is not None
            working = done + 1 if running is not None or len(log) else 0
        delivered = None if self._next is None else self._next.delivered
        passed = done if self._is_tail else min(done, delivered or 0)
        if not working and passed < done and self._next is not None and self._next.is_sending:
            working = passed + 1
        heard = self._upstreams.heard
        is_ready = self._upstreams.ready_for == heard
        return Held(not self.is_closed, max(heard, 0), is_ready, received, passed, working)

    def on_trouble(self, error: HopError | LocalProtocolError) -> None:
        """The next hop is lost, or cannot be told: the client's business."""
        self._context.counters.failed(error)
        if isinstance(error, Unreachable):  # what answered there, or did not, is nobody's business
            logger.info("%s", error)
            error = Unreachable(error.peer, error.span, "cannot be reached")
        self._upstreams.report(error)

    def fail(self, error: Exception, run: SweepRun | None = None) -> None:
        """For the engine: a sweep could not be run, so this hop is lost to the session."""
        if run is not None and run is not self._running:
            return  # of a state that was replaced meanwhile
        self._running = None
        self._context.counters.failed(error)
        if not isinstance(error, SwarmError) or isinstance(error, LocalProtocolError):
            logger.error("a forward failed", exc_info=error)
        self._upstreams.report(self._discreet(error))
        self.dismiss(f"failed: {error}")

    def _discreet(self, error: Exception) -> Exception:
        """The error for the hops before; where these hear nothing of a grammar, not what is wrong with it."""
        if self._brings.hears_client and type(error) is RemoteProtocolError and error.field == "grammar":
            return RemoteProtocolError("grammar", "was refused")
        return error

    async def _serve_linked(self) -> None:
        async with TaskScope() as scope:
            link = SuccessorLink(scope, self._dial, self._context.signer, self, self._context.uplink)
            self._next = follow(link, replace(self._attach, index=self._attach.index + 1))
            try:
                await self._begin()
                if self._ready_behind is not None:
                    self.on_ready(self._ready_behind)
                await self._closed.wait()
            finally:
                self._upstreams.end()  # the hop before waits for this hop only, not for all behind it
                self._next.close(None if self._is_dismissed else self._reason)
                await self._next.gone()

    async def _dial(self, hop: RouteHop, stuck: grpc.aio.Channel | None) -> Connection:
        return await self._connect(hop, self._attach.records, stuck)

    async def _serve_tail(self) -> None:
        await self._begin()
        self._upstreams.be_ready(self.credits)
        async with TaskScope() as scope:
            scope.spawn(self._tail.follow_grammars(lambda: self._context.engine.submit(self)))
            await self._closed.wait()

    def _next_channel(self) -> grpc.aio.Channel | None:
        return None if self._next is None else self._next.channel

    def _receipt(self, parts: int) -> Ack:
        working = self._running.work.frame.sweep.sequence if self._running is not None else 0
        return Ack(self.log.received.sequence, parts, working)

    def _sign(self, fault: Fault) -> Fault:
        return sign_fault(fault, self._attach.session, self._context.peer, self._context.signer.sign)

    def _account(self) -> None:
        journals = self._context.journals
        self._journal_bytes = journals.settle(self._journal_bytes, self.journal, self.commitments)

    def _keep_settled(self) -> None:
        """Rows and leaves that were settled stay for a while; others may have their room."""
        journals = self._context.journals
        journals.used_bytes -= self._journal_bytes
        self._journal_bytes = 0
        journals.settled.keep(self._attach.session, self._sealed, self.commitments, self.journal)


def _adopt(kv: KvCache, blocks: Sequence[KvBlock]) -> None:
    for block in blocks:
        kv.adopt(block.kv, block.states, BLOCK_TOKENS)


def _ids(committed: Iterable[CommittedToken]) -> tuple[int, ...] | None:
    """Token ids; None where only structure is known."""
    found = [one.told for one in committed]
    known = tuple(token for token in found if token is not None)
    return known if len(known) == len(found) else None


def _cut(kv: KvCache, spans: Iterable[tuple[int, int]]) -> list[tuple[tuple[torch.Tensor, ...], States]]:
    """Copies of committed tokens, as far as they are committed yet."""
    return [kv.cut(start, end) for start, end in spans if end <= kv.slots.committed]
