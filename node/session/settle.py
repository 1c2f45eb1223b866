"""What one session's hop commits to, signs at the end, and keeps for a while after it (PROTOCOL S1–S5).

Places of nodes are noted in the event loop, since states change there. All hashing is done on a thread of its own, once
a message was handed on: no sweep waits for it. Owns no journal: rows that were sent are where they always were.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import msgpack

from swarm.base.ids import PeerId, SessionId, TreeNodeId
from swarm.compute.compute_thread import ComputeThread
from swarm.link.hedged_link import CLIENT
from swarm.protocol.limits import SHOWN_BYTES
from swarm.protocol.messages import Heads, Reply, Rows, Show, Shown, ShowReply, Snapshot, SweepFrame
from swarm.protocol.session import SessionState
from swarm.trust.commitment import (
    COMMITTED,
    Committed,
    CommittedStream,
    commit_picks,
    commit_rows,
    commit_tokens,
    placed,
    rules_digest,
)
from swarm.trust.settlement import MAX_STREAMS, SettledStream, settled

SETTLE_S = 30.0
"""How long a hop keeps what it settled, after its session."""
MAX_SETTLED = 256
"""Sessions that are over, of which something is kept."""
PICKED_BYTES = 2 << 20
"""Final rows of a session's newest picks that a tail keeps, for a client that asks for some once it has the picks."""
MAX_BEHIND = 256
"""Messages that wait to be hashed; the next one is hashed at once, so memory stays bounded."""


class HopCommitments:
    """The streams of one session at one hop."""

    def __init__(self, session: SessionId, peer: PeerId, thread: ComputeThread) -> None:
        """Commit to nothing yet."""
        self._session, self._peer, self._thread = session, peer, thread
        self._received: list[CommittedStream] = []
        self._sent: list[CommittedStream] = []
        self._final: dict[TreeNodeId, Rows] = {}
        self._picked: dict[TreeNodeId, Rows] = {}  # replied already, the oldest first
        self._begun = self._done = 0  # messages: counted in the event loop, and on the thread
        self._is_stopped = False
        self.is_settled = False

    @property
    def size_bytes(self) -> int:
        """Memory of leaves, and of final rows that were picked after."""
        return sum([stream.size_bytes for stream in (*self._received, *self._sent)]) + self._picked_bytes

    @property
    def _picked_bytes(self) -> int:
        return len(self._picked) * next(iter(self._picked.values())).size_bytes if self._picked else 0

    def drop(self) -> None:
        """Give leaves up for want of memory."""
        for stream in (*self._received, *self._sent):
            stream.drop()

    def forget_picked(self) -> int:
        """Give final rows up, for want of memory or at the end; how many bytes that was."""
        freed, self._picked = self._picked_bytes, {}
        return freed

    def stop(self) -> None:
        """Commit to nothing any more: two machines of one hop send what none of them answers for alone."""
        self._is_stopped = True
        self._received.clear()
        self._sent.clear()

    # What is committed to

    def listen(self, since: int, sender: str) -> None:
        """Sweeps come by another stream from now on."""
        self._begin(self._received, since, sender, self._peer)

    def received(self, message: SweepFrame | Snapshot, state: SessionState) -> None:
        """A message came by that stream; `state` has it."""
        if self._received and not self._is_stopped:
            self._commit(self._received[-1], message, state)

    def refused(self) -> None:
        """A message came by that stream that has no place in the session's state."""
        if self._received:
            self._received[-1].is_broken = True

    def sent(self, receiver: str, since: int, message: SweepFrame | Snapshot, state: SessionState) -> None:
        """A message left for the next hop, by the stream that was attached to it in that generation."""
        if self._is_stopped:
            return
        if not self._sent or (self._sent[-1].since, self._sent[-1].receiver) != (since, receiver):
            self._begin(self._sent, since, self._peer, receiver)
        self._commit(self._sent[-1], message, state)

    def computed(self, final: Mapping[TreeNodeId, Rows]) -> None:
        """At the tail: rows of the last layer after which it picks."""
        self._final |= final

    def replied(self, since: int, reply: Reply, state: SessionState) -> None:
        """At the tail: a reply is there; those rows answer it."""
        if self._is_stopped:
            return
        if not self._sent:
            self._begin(self._sent, since, self._peer, CLIENT)
        nodes = placed(state, (node for node, _ in reply.picks))
        rows = [self._final.get(node) for node, _ in reply.picks]
        stream, rules = self._sent[-1], rules_digest(state.sampling)
        if nodes is None or None in rows:
            stream.is_broken = True
            return
        found = [row.data for row in rows if row is not None]
        picks = [token for _, token in reply.picks]

        def make() -> Committed:
            picked = [(hashlib.sha256(row).digest(), pick) for row, pick in zip(found, picks, strict=True)]
            return commit_picks(self._session, reply.sequence, nodes, picked, rules)

        self._hash(stream, make)

    def answered(self) -> None:
        """At the tail: what was picked after these rows was replied; the newest are kept for a while."""
        self._picked |= self._final
        self._final = {}
        while self._picked_bytes > PICKED_BYTES:
            del self._picked[next(iter(self._picked))]

    def _begin(self, side: list[CommittedStream], since: int, sender: str, receiver: str) -> None:
        if not self._is_stopped:
            side.append(CommittedStream(self._session, since, sender, receiver))
            del side[:-MAX_STREAMS]

    def _commit(self, stream: CommittedStream, message: SweepFrame | Snapshot, state: SessionState) -> None:
        is_snapshot = isinstance(message, Snapshot)
        sequence = message.sequence if isinstance(message, Snapshot) else message.sweep.sequence
        nodes = placed(state, _nodes_of(message))
        if nodes is None:
            stream.is_broken = True
            return
        if (rows := message.rows) is not None:
            self._hash(stream, partial(commit_rows, self._session, sequence, nodes, rows, snapshot=is_snapshot))
        else:
            tokens = message.tokens if isinstance(message, Snapshot) else message.sweep.tokens
            self._hash(stream, partial(commit_tokens, self._session, sequence, nodes, tokens, snapshot=is_snapshot))

    def _hash(self, stream: CommittedStream, make: Callable[[], Committed]) -> None:
        if stream.is_broken:
            return

        def add() -> None:
            try:
                stream.add(make())
            finally:
                self._done += 1

        self._begun += 1
        hashing = self._thread.submit(add)
        if self._begun - self._done > MAX_BEHIND:
            hashing.result()

    # What is said of it

    def heads(self) -> Heads | None:
        """What the next reply says: of the last sweep that is hashed on both sides."""
        if not self._received or not self._sent:
            return None
        received, sent = self._received[-1], self._sent[-1]
        for sequence in reversed(list(sent.heads)):
            head, other = sent.heads.get(sequence), received.heads.get(sequence)
            if head is not None and other is not None:
                return Heads(sequence, received.since, other, sent.since, head)
        return None

    async def settle(self) -> tuple[tuple[SettledStream, ...], tuple[SettledStream, ...]]:
        """What was received and sent so far, once all of it is hashed; leaves stay from now on."""
        await self._thread.run(int)
        self.is_settled = True
        received, sent = ([settled(one, self._peer) for one in side] for side in (self._received, self._sent))
        return tuple(received), tuple(sent)

    def picked(self, nodes: Sequence[int]) -> Rows | None:
        """Final rows after which it picked; None where one is not kept."""
        rows = [self._picked.get(TreeNodeId(node)) for node in nodes]
        if not rows or None in rows:
            return None
        found = [row for row in rows if row is not None]
        return replace(found[0], count=len(found), data=b"".join([bytes(row.data) for row in found]))

    def stream(self, show: Show) -> CommittedStream | None:
        """The stream that is asked for."""
        side = self._sent if show.sent else self._received
        return side[show.stream] if show.stream < len(side) else None


class KeptRows(Protocol):
    """Where rows that were sent lie: a session's journal."""

    @property
    def is_dropped(self) -> bool:
        """Whether they were given up."""

    @property
    def size_bytes(self) -> int:
        """Memory of all of them."""

    def drop(self) -> None:
        """Give them up."""

    def find(self, nodes: Sequence[TreeNodeId]) -> Rows | None:
        """Those of some nodes; None where one is missing."""


def _nodes_of(message: SweepFrame | Snapshot) -> Iterable[TreeNodeId]:
    """The nodes whose rows, or token ids, travel in a message."""
    if isinstance(message, Snapshot):
        ids: Sequence[int] = message.ids
    else:
        first = message.sweep.first_id
        ids = range(first, first + len(message.sweep.parents))
    kept = message.kept
    return [TreeNodeId(node) for place, node in enumerate(ids) if kept is None or kept[place]]


def show(asked: Show, commitments: HopCommitments, journal: KeptRows) -> ShowReply:
    """Leaves of a stream, or rows that were sent; of a tail, those of its newest picks, settled or not (S5)."""
    if (rows := commitments.picked(asked.nodes)) is not None and rows.size_bytes <= SHOWN_BYTES:
        return _packed(rows)
    if not commitments.is_settled:
        return ShowReply(Shown.UNKNOWN)
    return _rows(asked, journal) if asked.nodes else _leaves(asked, commitments)


def _leaves(asked: Show, commitments: HopCommitments) -> ShowReply:
    stream = commitments.stream(asked)
    if stream is None:
        return ShowReply(Shown.UNKNOWN)
    if stream.is_dropped:
        return ShowReply(Shown.DROPPED)
    found: list[object] = []
    size = 0
    for message in stream.messages[asked.first :]:
        if found and size + message.size_bytes > SHOWN_BYTES:
            break
        found.append(COMMITTED.encode(message))
        size += message.size_bytes
    return ShowReply(Shown.HERE, msgpack.packb(found))


def _rows(asked: Show, journal: KeptRows) -> ShowReply:
    if journal.is_dropped:
        return ShowReply(Shown.DROPPED)
    nodes = [TreeNodeId(node) for node in asked.nodes]
    one = journal.find(nodes[:1])
    if one is None:
        return ShowReply(Shown.UNKNOWN)
    rows = journal.find(nodes[: max(SHOWN_BYTES // max(one.size_bytes, 1), 1)])
    if rows is None:
        return ShowReply(Shown.UNKNOWN)
    return _packed(rows)


def _packed(rows: Rows) -> ShowReply:
    return ShowReply(Shown.HERE, msgpack.packb([rows.codec.value, rows.count, rows.width, bytes(rows.data)]))


@dataclass(slots=True)
class _OverSession:
    """A session that is over.

    Attributes:
        sealed: what was signed of it.
        commitments: its leaves.
        journal: the rows that it sent.
        until_s: by the store's clock.
    """

    sealed: bytes
    commitments: HopCommitments
    journal: KeptRows
    until_s: float

    @property
    def size_bytes(self) -> int:
        return self.commitments.size_bytes + self.journal.size_bytes

    def drop(self) -> None:
        self.commitments.drop()
        self.journal.drop()


class SettledTexts:
    """What a node keeps of sessions that were settled and are over, for `SETTLE_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[SessionId, _OverSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Memory of all of it."""
        return sum(one.size_bytes for one in self._kept.values())

    def keep(self, session: SessionId, sealed: bytes, commitments: HopCommitments, journal: KeptRows) -> None:
        """A settled session is over."""
        self.forget()
        self._kept[session] = _OverSession(sealed, commitments, journal, self._clock() + SETTLE_S)
        while len(self._kept) > MAX_SETTLED:
            self._kept.popitem(last=False)
        asyncio.get_running_loop().call_later(SETTLE_S, self.forget)

    def forget(self) -> None:
        """Give up whatever is too old."""
        while self._kept and next(iter(self._kept.values())).until_s <= self._clock():
            self._kept.popitem(last=False)

    def give_way(self) -> bool:
        """Give up the rows and leaves of the oldest that has any; False where none has. It is known as dropped."""
        oldest = next((one for one in self._kept.values() if one.size_bytes), None)
        if oldest is not None:
            oldest.drop()
        return oldest is not None

    def sealed(self, session: SessionId) -> bytes | None:
        """What was signed of a session."""
        self.forget()
        return self._kept[session].sealed if session in self._kept else None

    def show(self, asked: Show) -> ShowReply:
        """Leaves or rows of a session."""
        self.forget()
        kept = self._kept.get(asked.session)
        return ShowReply(Shown.UNKNOWN) if kept is None else show(asked, kept.commitments, kept.journal)
