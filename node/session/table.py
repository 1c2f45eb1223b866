"""The sessions of a node: opening them within the KV budget, finding them by their names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from node.session.admission import (
    NETWORK_OWNERS,
    SESSIONS,
    Admission,
    Caller,
    OwnerClass,
    OwnerStanding,
    owner_of,
    standing_of,
)
from node.session.context import NodeContext
from node.session.counters import NodeCounters
from node.session.hop_session import HopSession
from node.session.receipts import PASS_S
from node.session.refute import Refuter
from node.session.settle import SettledTexts
from node.session.upstreams import UpstreamStream, sender_of
from node.session.waiting import MOST_RETRY_S, WaitingList, WaitingPlace
from swarm.base.errors import Busy, ContextFull, HopClosed, ModelMismatch, RemoteProtocolError
from swarm.base.ids import ModelIdentity, SessionId
from swarm.base.layers import Span
from swarm.base.process_limits import main_memory
from swarm.base.tasks import TaskScope
from swarm.base.version import VERSION
from swarm.compute.kv_cache import KvLayout
from swarm.compute.kv_pool import KEPT_S, KvPool
from swarm.link.link import send_receipt
from swarm.protocol.authority import check_command, place_in
from swarm.protocol.limits import BLOCK_TOKENS
from swarm.protocol.messages import Attach, Border, Credits, NodeInfo, Open
from swarm.trust.receipt import Receipt

logger = logging.getLogger(__name__)

# Whose session goes where a node is full: of who holds most, the one that did nothing for the longest.

IDLE_S = 30.0
"""Without a sweep for so long, a session gives way to any other."""
UNUSED_S = 3.0
"""The same for one that never had a sweep: who opens a session begins at once, and who hoards room does not."""
ALWAYS_OWN = 0.25
"""The fraction of the KV that an address keeps while it uses it, whoever else wants some."""

HolderT = TypeVar("HolderT")


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a session holds, or asks for.

    Attributes:
        key: who pays for it.
        tokens: KV tokens.
    """

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class ClassHoldings:
    """What owners of one class hold.

    Attributes:
        owners: how many there are.
        sessions: of all of them.
        kv_tokens: that these reserved.
    """

    owners: int = 0
    sessions: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """What a node has for sessions.

    Attributes:
        tokens: KV tokens in all.
        sessions: how many in all.
    """

    tokens: int
    sessions: int


def victims(
    held: Mapping[HolderT, Reservation],
    asked: Reservation,
    room: Room,
    idle_s: Callable[[HolderT], float],
    standing: Callable[[str], OwnerStanding],
) -> list[HolderT] | None:
    """The sessions that must go so that another fits: none where there is room, None where nobody has to go.

    First go those that nobody uses, idle for `IDLE_S`: of the owner who holds most by its weight, the longest first.
    Then who holds most gives way, and of its sessions the one that was idle for the longest, if its owner holds more
    than its share, and more than a quarter of the KV. Whoever asks holds what it asks for, so nobody takes from who
    has less. Whom the operator prefers takes the quarter too. Owners of one network are one here, of `NETWORK_OWNERS`
    shares at most: many names hold no more.

    Args:
        idle_s: how long a session did no sweep (`as_idle_s`).
        standing: what a key counts for.
    """
    left = dict(held)
    gone: list[HolderT] = []
    known = {key: standing(key) for key in {asked.key, *(one.key for one in held.values())}}
    crowd_of = {key: one.network or key for key, one in known.items()}
    while True:
        lacks_tokens = sum(one.tokens for one in left.values()) + asked.tokens > room.tokens
        if not lacks_tokens and len(left) < room.sessions:
            return gone
        amounts: Counter[str] = Counter()
        keys: dict[str, set[str]] = {}
        for one in (*left.values(), asked):
            crowd = crowd_of[one.key]
            amounts[crowd] += one.tokens if lacks_tokens else 1
            keys.setdefault(crowd, set()).add(one.key)
        shares = {crowd: _shares([known[key] for key in own]) for crowd, own in keys.items()}
        unused = [session for session in left if idle_s(session) >= IDLE_S]
        if unused:
            of = {session: crowd_of[left[session].key] for session in unused}
            victim = max(unused, key=lambda one: (amounts[of[one]] / shares[of[one]], idle_s(one)))
        else:
            asking = crowd_of[asked.key]
            heaviest = max(amounts, key=lambda crowd: (amounts[crowd] / shares[crowd], crowd == asking, crowd))
            own = [session for session, one in left.items() if crowd_of[one.key] == heaviest]
            capacity = room.tokens if lacks_tokens else room.sessions
            share = capacity * shares[heaviest] / sum(shares.values())
            always = 0.0 if known[asked.key].shares > 1 or not lacks_tokens else ALWAYS_OWN
            kept = max(share, always * capacity)
            if not own or heaviest == asking or amounts[heaviest] <= kept:
                return None
            victim = max(own, key=idle_s)
        del left[victim]
        gone.append(victim)


def making_room(
    held: Mapping[HolderT, Reservation],
    grown: HolderT,
    tokens: int,
    rested_s: Callable[[HolderT], float],
    standing: Callable[[str], OwnerStanding],
) -> list[HolderT]:
    """The sessions that must go because one of them grew: none while all fit.

    First go those that rest, the longest first: of anybody after `IDLE_S`, after `REST_S` of owners who hold as much or
    more by their weight than the owner of the one that grew. A text that runs goes only where all take more than there
    is by `OVERCOMMITTED`: the newest one of the owner who holds most. Owners of one network are one here.

    Args:
        held: all sessions, the oldest first, that one with what it takes now.
        grown: which of them grew.
        tokens: KV tokens in all.
        rested_s: for how long a session has had nothing to do.
        standing: what a key counts for.
    """
    left = dict(held)
    gone: list[HolderT] = []
    while (taken := sum(one.tokens for one in left.values())) > tokens:
        load = _loads(left.values(), standing)
        rests = {session: rested_s(session) for session in left if session != grown}
        own = load[held[grown].key]
        resting = [
            session
            for session, seconds in rests.items()
            if seconds >= IDLE_S or (seconds >= REST_S and load[left[session].key] >= own)
        ]
        if resting:
            victim = max(resting, key=rests.__getitem__)
        elif taken > (1 + OVERCOMMITTED) * tokens:
            most = max(load.values())
            victim = [session for session, one in left.items() if load[one.key] == most][-1]
        else:
            break
        del left[victim]
        gone.append(victim)
        if victim == grown:
            break
    return gone


def _loads(held: Iterable[Reservation], standing: Callable[[str], OwnerStanding]) -> dict[str, float]:
    """By owner: the tokens of all owners that are one with it, by the shares of these."""
    amounts: Counter[str] = Counter()
    for one in held:
        amounts[one.key] += one.tokens
    known = {key: standing(key) for key in amounts}
    crowds: dict[str, list[str]] = {}
    for key, standing_of_key in known.items():
        crowds.setdefault(standing_of_key.network or key, []).append(key)
    return {
        key: sum(amounts[each] for each in own) / _shares([known[each] for each in own])
        for own in crowds.values()
        for key in own
    }


def _crowd_shares(crowd: str) -> int:
    """How many shares those have whose kept blocks count as one's."""
    found = standing_of(crowd)
    return NETWORK_OWNERS if crowd.startswith("network ") else found.sessions * found.shares


def _shares(owners: Sequence[OwnerStanding]) -> int:
    """How many shares owners have that are one crowd."""
    each = [one.sessions * one.shares for one in owners]
    return min(sum(each), max(NETWORK_OWNERS, *each))


def as_idle_s(idle_s: float, *, is_unused: bool) -> float:
    """For how long a session counts as idle: one that never had a sweep, ten times as long as it was.

    Args:
        idle_s: seconds since its last sweep, or since it was opened.
        is_unused: whether it never had one.
    """
    return idle_s * (IDLE_S / UNUSED_S) if is_unused else idle_s


REST_S = 1.0
"""A session that was given no sweep for so long makes room for a text that runs; its tokens stay in the pool."""
GROWN_TOKENS = 256
"""A session that takes more KV than it was expected to takes a multiple of this."""
OVERCOMMITTED = 0.125
"""The fraction of the KV that sessions which grew may take beyond all there is, before one of them has to go."""
MAX_SWEEPS = 64
MAX_NODES = 8_192
MAX_SESSIONS = 1_024
LEAVING, PAUSED, MOVING = "is leaving the swarm", "is paused by its owner", "moves to other layers"
"""Why a node takes no session."""
RETRY = f"try again in {UNUSED_S:.0f} s, or in {IDLE_S:.0f} s"


KEPT_SHARE = 0.25
"""Of the host memory that is free when a node starts: what blocks may take beside a device with memory of its own."""


def _host_tokens(layout: KvLayout) -> int | None:
    """KV tokens that blocks may take in host memory; None where sessions lie there too."""
    if layout.device.type == "cpu":
        return None
    return int(KEPT_SHARE * main_memory().available) // max(layout.bytes_per_token, 1)


class SessionTable:
    """All sessions of this node; each holds its reservation until it ends.

    Attributes:
        kv_tokens: the KV budget of all sessions together.
        pool: what sessions that are over have left (P15); it takes the KV that no session has reserved.
        draining: whether new sessions are refused.
        because: why they are then, as `is leaving the swarm`.
    """

    def __init__(self, context: NodeContext, identity: ModelIdentity, kv_tokens: int, scope: TaskScope) -> None:
        self.kv_tokens = kv_tokens
        self.draining = False
        self.because = LEAVING
        self._context = context
        self._identity = identity
        self._scope = scope
        self.refuter = Refuter(context, identity.fingerprint, scope, lambda: self.kv_tokens_free)
        self._open: dict[SessionId, HopSession] = {}
        self._reserved: dict[HopSession, Reservation] = {}
        self.pool = KvPool(context.model.layout.bytes_per_token, _crowd_shares)
        self._host_tokens = _host_tokens(context.model.layout)
        self._awaited: dict[SessionId, asyncio.Event] = {}
        self._ended = asyncio.Event()
        self._forgetting = scope.spawn(self._forget_old(), "blocks that nobody uses")
        self._waiting = WaitingList(standing_of, time.monotonic)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def counters(self) -> NodeCounters:
        """What this node has done."""
        return self._context.counters

    @property
    def admission(self) -> Admission:
        """What each address may cost this node."""
        return self._context.admission

    @property
    def worked_ms(self) -> float:
        """How long the engine has computed since its start."""
        return self._context.engine.worked_ms

    @property
    def kv_tokens_free(self) -> int:
        """KV tokens that a new session could reserve."""
        return max(0, self.kv_tokens - sum(one.tokens for one in self._reserved.values()))

    def held(self) -> dict[OwnerClass, ClassHoldings]:
        """What owners of each class hold now."""
        found = {
            kind: [one for one in self._reserved.values() if OwnerClass.of(one.key) is kind] for kind in OwnerClass
        }
        return {
            kind: ClassHoldings(len({one.key for one in held}), len(held), sum(one.tokens for one in held))
            for kind, held in found.items()
        }

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    def find(self, session: SessionId) -> HopSession | None:
        """The session of this name, unless it is over."""
        hop = self._open.get(session)
        return None if hop is None or hop.is_closed else hop

    async def find_tail(self, session: SessionId, seconds: float) -> HopSession | None:
        """The session, if it ends here or comes to within so many seconds."""
        event = self._awaited.get(session, asyncio.Event())
        try:
            async with asyncio.timeout(seconds):
                while (hop := self.find(session)) is None or not hop.is_tail:
                    event = self._awaited.setdefault(session, asyncio.Event())
                    await event.wait()
                return hop
        except TimeoutError:
            return None
        finally:
            if not event._waiters and self._awaited.get(session) is event:
                del self._awaited[session]

    @property
    def settled(self) -> SettledTexts:
        """What is kept of sessions that were settled and are over."""
        return self._context.journals.settled

    def running(self, scope: bytes, prefix: Sequence[Border]) -> HopSession | None:
        """A session that has computed the longest of these beginnings; None where none has."""
        of_scope = [hop for hop in self._open.values() if hop.scope == scope]
        for border in prefix:
            place = border.tokens // BLOCK_TOKENS
            for hop in of_scope:
                if hop.names[place - 1 : place] == [border.name]:
                    return hop
        return None

    def need(self, session: HopSession, tokens: int) -> None:
        """A session takes more KV than it was expected to; see `making_room`."""
        held = self._reserved.get(session)
        if held is None or self._context.kv_tokens(session.credits, tokens) <= held.tokens:
            return
        grown = -(-tokens // GROWN_TOKENS) * GROWN_TOKENS
        self._reserved[session] = Reservation(held.key, self._context.kv_tokens(session.credits, grown))
        for hop in making_room(self._reserved, session, self.kv_tokens, lambda hop: hop.rested_s, standing_of):
            self._evict(hop)
        self.pool.shrink(self.room())

    def _idle_s(self, hop: HopSession) -> float:
        return as_idle_s(time.monotonic() - hop.used_at, is_unused=hop.log.received.sequence == 0)

    def room(self) -> int:
        """KV tokens that blocks may take: what no session has reserved; beside a device, a share of host memory."""
        return self.kv_tokens_free if self._host_tokens is None else self._host_tokens

    def over(self, session: HopSession) -> None:
        """A session is over: its room is others', and its blocks', from now on."""
        reservation = self._reserved.pop(session, None)
        if reservation is not None:
            self.admission.quota.give(SESSIONS, reservation.key)
            self._waiting.ended(reservation.tokens)

    def attach(self, attach: Attach, caller: Caller, upstream: UpstreamStream, address: str) -> HopSession:
        """Open the session, or hand a running one to its new upstream.

        Raises:
            SwarmError: the attach does not fit this node or is not the caller's, or there is no room.
        """
        self._check(attach)
        sender = sender_of(attach, caller)
        check_command(attach.session, attach)
        hop = self.find(attach.session)
        if hop is not None and not hop.serves(attach):
            hop.dismiss("another part of the layers is wanted now")
            hop = None
        if attach.index == 0:
            attach = replace(attach, payer=self.admission.payer_tag(address))
        if hop is None:
            owners = self.admission.preferred, self.admission.contributors
            hop = self._reserve(attach, owner_of(address, attach, caller, *owners))
            hop.attach(upstream, attach, sender)
            self._scope.spawn(self._run(attach.session, hop))
            arrived = self._awaited.pop(attach.session, None)
            if arrived is not None:
                arrived.set()
        else:
            hop.attach(upstream, attach, sender)
        return hop

    def take_receipt(self, receipt: Receipt, sealed: bytes) -> None:
        """Take what a session's client signed for (S7), and let the machine behind it hear of it.

        Raises:
            RemoteProtocolError: this node did not compute so much of it.
        """
        claim = self._context.receipts.take(receipt, sealed)
        if claim is not None and (channel := claim.next_channel()) is not None:
            self._scope.spawn(send_receipt(channel, sealed, PASS_S))

    def info(self) -> NodeInfo:
        """What this node serves, how much room it has and what it has done."""
        model, identity = self._context.model, self._identity
        return NodeInfo(
            **asdict(identity),
            span=model.span,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            numeric_class=model.numeric_class,
            version=VERSION,
            kv_tokens_total=self.kv_tokens,
            kv_tokens_free=self.kv_tokens_free,
            sessions=len(self),
            counters=self._context.counters.to_message(model.forwards, model.rows_in),
        )

    async def drain(self, seconds: float) -> bool:
        """Take no new session and ask every client to move its own; whether all had left in time."""
        self.draining = True
        for hop in self._open.values():
            hop.warn(self.because)
        try:
            async with asyncio.timeout(seconds):
                while self._open:
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def close_all(self, reason: str) -> None:
        """End every session."""
        for hop in list(self._open.values()):
            hop.leave(reason)

    def end(self) -> None:
        """Keep nothing any more: the layers are others from now on, or none."""
        self._forgetting.cancel()
        self.pool.clear()

    def _reserve(self, attach: Attach, owner: str) -> HopSession:
        asked = attach.open
        if self.draining:
            raise HopClosed(self._context.peer, str(attach.route[attach.index].span), self.because)
        credits = Credits(asked.window_tokens, min(asked.sweeps, MAX_SWEEPS), min(asked.nodes, MAX_NODES))
        reservation = Reservation(owner, self._context.kv_tokens(credits, asked.expected_tokens))
        self._make_room(attach, reservation)
        hop = HopSession(self._context, attach, credits, owner, self)
        self._open[attach.session] = hop
        self._reserved[hop] = reservation
        return hop

    def _make_room(self, attach: Attach, asked: Reservation) -> None:
        """Take one of the owner's sessions; where the node is full, end the sessions that must give way.

        Raises:
            Busy: nobody has to.
        """
        peer, span, quota = self._context.peer, str(attach.route[attach.index].span), self.admission.quota
        own = [hop for hop, one in self._reserved.items() if one.key == asked.key]
        if not quota.has_room(SESSIONS, asked.key):
            idlest = max(own, key=self._idle_s)
            if self._idle_s(idlest) < IDLE_S:
                full = Busy(peer, span, f"has {len(own)} sessions of this address already; {RETRY}")
                raise full.asking_again(MOST_RETRY_S)
            self._evict(idlest)
        place = WaitingPlace(asked.key, attach.ticket or attach.session)
        gone = self._giving_way(place, asked)
        if gone is None:
            raise self._full(Busy(peer, span, self._why_full(asked)), place, asked)
        self._waiting.leave(place)
        for hop in gone:
            self._evict(hop)
        taken = quota.take(SESSIONS, asked.key)
        assert taken, "as many sessions are allowed as there is room for"
        self.pool.shrink(self.room() - (asked.tokens if self._host_tokens is None else 0))

    def _giving_way(self, place: WaitingPlace, asked: Reservation) -> list[HopSession] | None:
        """The sessions that must go so that another fits; None where it has to wait: nobody has to go, or others wait.

        Who waits before it has the first claim to room that is free, and to sessions that must give way.
        """
        ahead = self._waiting.ahead_of(place, self._sessions_held())
        if not ahead:
            room = Room(self.kv_tokens, MAX_SESSIONS)
            return victims(self._reserved, asked, room, self._idle_s, standing_of)
        has_tokens = self._waiting.kept(ahead) + asked.tokens <= self.kv_tokens_free
        return [] if has_tokens and len(self._reserved) < MAX_SESSIONS else None

    def _full(self, busy: Busy, place: WaitingPlace, asked: Reservation) -> Busy:
        """The refusal, with a place among those that wait if there is one: who can never fit waits for nothing."""
        can_fit = asked.tokens <= self.kv_tokens
        turn = self._waiting.join(place, asked.tokens, self._sessions_held()) if can_fit else None
        if turn is None:
            return busy.asking_again(MOST_RETRY_S if can_fit else None)
        return busy.asking_again(turn.retry_after_s, turn.position, turn.expected_s)

    def _why_full(self, asked: Reservation) -> str:
        free, full = self.kv_tokens_free, len(self._reserved) >= MAX_SESSIONS
        needs = f"needs KV for {asked.tokens} tokens, {free} of {self.kv_tokens} are free"
        return f"{f'has {MAX_SESSIONS} sessions already' if full else needs}; {RETRY}"

    def _sessions_held(self) -> Counter[str]:
        return Counter(one.key for one in self._reserved.values())

    def _evict(self, hop: HopSession) -> None:
        """End a session here, so that another has its room at once: the client may go on with another machine."""
        hop.give_way()

    async def _forget_old(self) -> None:
        while True:
            await asyncio.sleep(KEPT_S / 30)
            self.pool.forget_old()

    async def _run(self, session: SessionId, hop: HopSession) -> None:
        try:
            await hop.run()
        except Exception as error:  # a mistake in one session must not end the others
            logger.error("a session failed", exc_info=error)
            hop.fail(error)
        finally:
            self.over(hop)
            if self._open.get(session) is hop:
                del self._open[session]
            self._ended.set()
            self._ended.clear()

    def _check_what_travels(self, opened: Open, span: Span) -> None:
        """Refuse rows beside a node's own that there cannot be, and to keep token ids from layers that read them."""
        model = self._context.model
        for layer in opened.aux_layers:
            if not 0 < layer < model.num_layers or layer not in model.borders.starts:
                raise RemoteProtocolError("aux_layers", f"no span of the model's {model.num_layers} begins at {layer}")
        if opened.ends_only and model.needs_ids and span.start > 0:
            raise RemoteProtocolError(
                "ends_only", "this model's layers read token ids, so they must come with the rows"
            )

    def _check(self, attach: Attach) -> None:
        """Refuse what cannot be this node's part of a chain, before anything is allocated."""
        route, hop, model = attach.route, attach.route[attach.index], self._context.model
        if attach.open.fingerprint != self._identity.fingerprint:
            theirs, ours = attach.open.fingerprint[:12], self._identity.fingerprint[:12]
            raise ModelMismatch(f"the session is for model {theirs}, node {self._context.peer} serves {ours}")
        if place_in(attach, self._context.peer) != attach.index:
            raise RemoteProtocolError("route", f"hop {attach.index} is {hop.peer}, this is {self._context.peer}")
        if not model.span.contains(hop.span):
            raise RemoteProtocolError("route", f"layers {hop.span} are not within {model.span} of {self._context.peer}")
        if not model.borders.allow(hop.span):
            raise RemoteProtocolError("route", f"layers {hop.span} cut layers apart that use each other's keys")
        if len({other.peer for other in route}) < len(route):
            raise RemoteProtocolError("route", "a node stands in it twice")
        ends = [0, *(other.span.end for other in route)]
        if (
            any(other.span.start != end for other, end in zip(route, ends, strict=False))
            or ends[-1] != model.num_layers
        ):
            raise RemoteProtocolError("route", f"its spans do not cover layers 0-{model.num_layers} one after another")
        self._check_what_travels(attach.open, hop.span)
        window_tokens = attach.open.window_tokens
        if model.max_positions is not None and window_tokens > model.max_positions:
            raise ContextFull(f"{window_tokens} tokens; the model's context is {model.max_positions}")
