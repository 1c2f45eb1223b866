"""What a hop received and what it sent, as hashes that nobody can change later (PROTOCOL S1–S3).

    leaf      SHA-256 of session, node, position, parent, and a row's bytes as they travelled (a token id, a pick)
    sweep     SHA-256 of a message's sequence, the nodes whose rows travelled in it, and their leaves
    head      SHA-256 of the head before it and of a message's: one chain per stream of one session between two machines

A leaf is a node's and not a sweep's: a row that is sent again, after a sweep or in a snapshot, has the same leaf. Two
leaves of one node signed by one machine are proof by themselves. Pure: whoever hashes chooses the thread.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Final, NamedTuple

import msgpack

from swarm.base.declared import Broken, ListForm, Size
from swarm.base.ids import SessionId, TreeNodeId
from swarm.protocol.limits import HASH_BYTES, MAX_NODES, Natural
from swarm.protocol.messages import Rows, Sampling
from swarm.protocol.session import SessionState

_LEAF: Final = b"canopy-leaf\n"
_SWEEP: Final = b"canopy-sweep\n"
_STREAM: Final = b"canopy-stream\n"
_HEAD: Final = b"canopy-head\n"
ROW, TOKEN, PICK = b"r", b"t", b"p"
"""What a leaf is of: a row, a token id that hop 0 embeds, or a final row's hash and the token picked after it."""
NODE_BYTES: Final = 8
TOKEN_BYTES: Final = 4
HEADS_KEPT: Final = 64
"""Heads of so many late messages are known by their sequences: more than hashing is ever behind."""

_SAMPLING: Final = ListForm(Sampling)


class PlacedNode(NamedTuple):
    """A node where it stands in its session: its parent by id, also where that is the tip; None before the first."""

    node: TreeNodeId
    position: int
    parent: TreeNodeId | None


@dataclass(frozen=True, slots=True)
class Committed:
    """One message of a stream: a sweep, a snapshot, or a tail's reply.

    Attributes:
        sequence: of the sweep; of a snapshot, the last that it includes.
        is_snapshot: whether it holds all of a session.
        nodes: [n · 8] ids of the nodes whose rows travelled, in the order of the message, big-endian.
        leaves: [n · 32] theirs.
        rules: SHA-256 of the sampling by which a tail picked; empty elsewhere.
        final: [n · 32] SHA-256 of the final rows after which a tail picked, as computed; empty elsewhere.
        picks: [n · 4] what it picked, big-endian; empty elsewhere.
    """

    sequence: Natural
    is_snapshot: bool
    nodes: Annotated[bytes, Size(2 * MAX_NODES * NODE_BYTES)]
    leaves: Annotated[bytes, Size(2 * MAX_NODES * HASH_BYTES)]
    rules: Annotated[bytes, Size(HASH_BYTES)] = b""
    final: Annotated[bytes, Size(2 * MAX_NODES * HASH_BYTES)] = b""
    picks: Annotated[bytes, Size(2 * MAX_NODES * TOKEN_BYTES)] = b""

    def check(self) -> None:
        """Refuse columns of different lengths."""
        count = len(self.nodes) // NODE_BYTES
        if len(self.nodes) % NODE_BYTES or len(self.leaves) != count * HASH_BYTES:
            raise Broken("leaves", f"{len(self.leaves)} bytes for {len(self.nodes)} bytes of nodes")
        if self.rules and (len(self.final), len(self.picks)) != (count * HASH_BYTES, count * TOKEN_BYTES):
            raise Broken("picks", f"are not those of {count} nodes")

    @property
    def ids(self) -> tuple[TreeNodeId, ...]:
        """The nodes."""
        return tuple(map(TreeNodeId, struct.unpack(f">{len(self.nodes) // NODE_BYTES}Q", self.nodes)))

    @property
    def tokens(self) -> tuple[int, ...]:
        """What was picked after each of them."""
        return struct.unpack(f">{len(self.picks) // TOKEN_BYTES}I", self.picks)

    @property
    def size_bytes(self) -> int:
        """Memory of its columns."""
        return len(self.nodes) + len(self.leaves) + len(self.final) + len(self.picks)

    @property
    def digest(self) -> bytes:
        """The commitment to this message."""
        numbers = struct.pack(">QBQ", self.sequence, self.is_snapshot, len(self.nodes) // NODE_BYTES)
        return hashlib.sha256(_SWEEP + numbers + self.rules + self.nodes + self.leaves).digest()


COMMITTED: Final = ListForm(Committed)


def placed(state: SessionState, nodes: Iterable[TreeNodeId]) -> tuple[PlacedNode, ...] | None:
    """Where nodes stand that are live or committed; None where one is neither."""
    committed, live = state.committed, state.live
    tip = committed[-1].id if committed else None
    found: list[PlacedNode] = []
    for node in nodes:
        if (known := live.get(node)) is not None:
            found.append(PlacedNode(node, known.position, tip if known.parent is None else known.parent))
            continue
        place = bisect_left(committed, node, key=lambda token: token.id)
        if place == len(committed) or committed[place].id != node:
            return None
        found.append(PlacedNode(node, place, committed[place - 1].id if place else None))
    return tuple(found)


def leaf(session: SessionId, at: PlacedNode, kind: bytes, content: bytes | bytearray | memoryview) -> bytes:
    """The leaf of one node.

    Args:
        kind: `ROW`, `TOKEN` or `PICK`.
        content: the row as it travelled; a token id, or a final row's SHA-256 and the pick, big-endian.
    """
    numbers = struct.pack(">QQQ", at.node, at.position, 0 if at.parent is None else at.parent + 1)
    made = hashlib.sha256(_LEAF + session + kind + numbers)
    made.update(content)
    return made.digest()


def commit_rows(
    session: SessionId, sequence: int, nodes: Sequence[PlacedNode], rows: Rows, *, snapshot: bool
) -> Committed:
    """A message with rows, one per node."""
    size, data = rows.codec.row_bytes(rows.width), memoryview(rows.data)
    leaves = [leaf(session, at, ROW, data[place * size : (place + 1) * size]) for place, at in enumerate(nodes)]
    return Committed(sequence, snapshot, _ids(nodes), b"".join(leaves))


def commit_tokens(
    session: SessionId, sequence: int, nodes: Sequence[PlacedNode], tokens: Iterable[int], *, snapshot: bool
) -> Committed:
    """A message to hop 0, which embeds ids: one per node."""
    pairs = zip(nodes, tokens, strict=True)
    leaves = [leaf(session, at, TOKEN, token.to_bytes(TOKEN_BYTES)) for at, token in pairs]
    return Committed(sequence, snapshot, _ids(nodes), b"".join(leaves))


def commit_picks(
    session: SessionId, sequence: int, nodes: Sequence[PlacedNode], picked: Sequence[tuple[bytes, int]], rules: bytes
) -> Committed:
    """A tail's reply.

    Args:
        picked: of each node, SHA-256 of the row of the last layer, as computed, before the final norm; and the pick.
        rules: `rules_digest` of the sampling that it picked by.
    """
    pairs = zip(nodes, picked, strict=True)
    leaves = [leaf(session, at, PICK, row + pick.to_bytes(TOKEN_BYTES)) for at, (row, pick) in pairs]
    rows, picks = b"".join(row for row, _ in picked), [pick for _, pick in picked]
    packed = struct.pack(f">{len(picks)}I", *picks)
    return Committed(sequence, False, _ids(nodes), b"".join(leaves), rules, rows, packed)


@lru_cache(64)
def rules_digest(sampling: Sampling) -> bytes:
    """SHA-256 of how a tail picks."""
    packed: bytes = msgpack.packb(_SAMPLING.encode(sampling))
    return hashlib.sha256(packed).digest()


def first_head(session: SessionId, since: int, sender: str, receiver: str) -> bytes:
    """The head of a stream before its first message.

    Args:
        since: generation in which it was attached.
        sender: peer id; empty for the client.
        receiver: peer id; empty for the client.
    """
    packed: bytes = msgpack.packb([session, since, sender, receiver])
    return hashlib.sha256(_STREAM + packed).digest()


def next_head(head: bytes, message: Committed) -> bytes:
    """The head of a stream after one more message."""
    return link_head(head, message.digest)


def link_head(head: bytes, digest: bytes) -> bytes:
    """The head of a stream after one more message, of which only its digest is known."""
    return hashlib.sha256(_HEAD + head + digest).digest()


@dataclass(slots=True)
class CommittedStream:
    """The messages of one stream, by the machine at one of its ends.

    Attributes:
        session: whose stream it is.
        since: generation in which it was attached.
        sender: peer id; empty for the client.
        receiver: peer id; empty for the client.
        head: of all messages.
        count: how many there were.
        messages: all of them, in order; empty once `is_dropped`.
        is_dropped: whether leaves were given up for want of memory; heads go on.
        is_broken: whether a message could not be committed to; nothing after it is.
    """

    session: SessionId
    since: int
    sender: str
    receiver: str
    head: bytes = b""
    count: int = 0
    messages: list[Committed] = field(default_factory=list)
    is_dropped: bool = False
    is_broken: bool = False
    size_bytes: int = 0
    heads: OrderedDict[int, bytes] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.head = first_head(self.session, self.since, self.sender, self.receiver)

    def add(self, message: Committed) -> None:
        """Commit to the next message."""
        self.head, self.count = next_head(self.head, message), self.count + 1
        self.heads[message.sequence] = self.head
        while len(self.heads) > HEADS_KEPT:
            self.heads.popitem(last=False)
        if not self.is_dropped:
            self.messages.append(message)
            self.size_bytes += message.size_bytes

    def drop(self) -> None:
        """Give the leaves up."""
        self.is_dropped, self.messages, self.size_bytes = True, [], 0


def _ids(nodes: Sequence[PlacedNode]) -> bytes:
    return struct.pack(f">{len(nodes)}Q", *[at.node for at in nodes])
