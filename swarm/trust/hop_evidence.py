"""The evidence of one hop's part of a text: what it signed that it received and sent, and the rows of both, as bytes.

    settlement           the hop's one signature, over the heads of what it received and of what it sent
    received, sent       messages of its two streams as far as rows are shown, digests of those behind
    entering, leaving    rows along the text, cut behind the first place that differs

It accuses by the hop's own words alone: whose layers make other rows of what it says entered has said something wrong.
Strangers send this to nodes, so lengths are bounded before anything is made of them, and nothing is nested. Owns no
file and no network; `swarm.trust.claims` makes of it what can be recomputed.

Decision: docs/decisions/0096-evidence-travels.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgpack

from swarm.base.declared import ListForm
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.protocol.limits import HASH_BYTES, MAX_SETTLED_BYTES, MAX_WIDTH
from swarm.protocol.messages import Rows, Sampling
from swarm.trust.commitment import (
    COMMITTED,
    NODE_BYTES,
    PICK,
    ROW,
    TOKEN,
    TOKEN_BYTES,
    Committed,
    PlacedNode,
    first_head,
    leaf,
    link_head,
    rules_digest,
)
from swarm.trust.evidence import EvidenceError
from swarm.trust.settlement import SettledStream, Settlement, opened

MAGIC: Final = b"canopy-hop-evidence\n"
MAX_SHOWN: Final = 4_096
"""Messages of one stream, and positions of the text, that evidence shows."""
MAX_RULES_BYTES: Final = 64 << 10
"""How a tail was to pick."""
_COLUMNS: Final = 6
_SAMPLING: Final = ListForm(Sampling, EvidenceError, "sampling")


@dataclass(frozen=True, slots=True)
class ShownStream:
    """One stream of a hop.

    Attributes:
        messages: the first ones, whole.
        rest: digests of those behind, 32 bytes each.
    """

    messages: tuple[Committed, ...]
    rest: bytes = b""

    @classmethod
    def of(cls, messages: Sequence[Committed], nodes: Iterable[TreeNodeId]) -> ShownStream:
        """A stream that is shown as far as some nodes are in it."""
        wanted = set(nodes)
        shown = max((place for place, one in enumerate(messages) if wanted & set(one.ids)), default=-1) + 1
        return cls(tuple(messages[:shown]), b"".join(one.digest for one in messages[shown:]))


@dataclass(frozen=True, slots=True)
class HopEvidence:
    """What one hop signed of a text, and what that was.

    Attributes:
        settlement: as the hop sealed it.
        received: its stream from the machine before, or from the client.
        sent: its stream to the machine behind; a tail's replies.
        nodes: [n] along the text, from its first position on.
        tokens: [n] ids, where the hop begins the model; else empty.
        entering: [n] rows; None where ids entered.
        leaving: [n] rows; None at the tail.
        sampling: how the tail was to pick; None elsewhere.
    """

    settlement: bytes
    received: ShownStream
    sent: ShownStream
    nodes: tuple[TreeNodeId, ...]
    tokens: tuple[int, ...] = ()
    entering: Rows | None = None
    leaving: Rows | None = None
    sampling: Sampling | None = None

    def dump(self) -> bytes:
        """The file."""
        sampling = b"" if self.sampling is None else msgpack.packb(_SAMPLING.encode(self.sampling))
        rows = [_rows_bytes(one) for one in (self.entering, self.leaving)]
        streams = [_stream_bytes(one) for one in (self.received, self.sent)]
        numbers = _packed("Q", self.nodes), _packed("I", self.tokens)
        return MAGIC + _joined((self.settlement, *streams, *numbers, *rows, sampling))


@dataclass(frozen=True, slots=True)
class CheckedHop:
    """Hop evidence whose signatures hold: rows, ids and picks are those that the hop signed.

    Attributes:
        settlement: opened.
        evidence: the rest.
        picks: (position, token picked after it) along the text, by the evidence's sampling.
    """

    settlement: Settlement
    evidence: HopEvidence
    picks: tuple[tuple[int, int], ...]


def is_hop_evidence(data: bytes) -> bool:
    """Whether a file is of this kind."""
    return data.startswith(MAGIC)


def check_hop(data: bytes) -> CheckedHop:
    """Read hop evidence, and check that the hop signed all of it.

    Raises:
        RemoteProtocolError: it is none, or a part of it is not what was signed.
    """
    if not is_hop_evidence(data):
        raise EvidenceError("evidence", "is none of a hop")
    parts = _split(data[len(MAGIC) :], 8)
    if len(parts) != 8 or len(parts[0]) > MAX_SETTLED_BYTES or len(parts[7]) > MAX_RULES_BYTES:
        raise EvidenceError("evidence", "has other parts")
    try:
        settlement = opened(parts[0])
    except RemoteProtocolError as error:
        raise EvidenceError(error.field, error.reason) from None
    received, sent = (_stream(one) for one in parts[1:3])
    nodes, tokens = tuple(map(TreeNodeId, _unpacked("Q", parts[3]))), _unpacked("I", parts[4])
    entering, leaving = (_rows(one, settlement, len(nodes)) for one in parts[5:7])
    evidence = HopEvidence(parts[0], received, sent, nodes, tokens, entering, leaving, _sampling(parts[7]))
    _check_shape(evidence, settlement)
    entered = _leaves(settlement, received, settlement.received, is_sent=False)
    left = _leaves(settlement, sent, settlement.sent, is_sent=True)
    picks: list[tuple[int, int]] = []
    for position, node in enumerate(nodes):
        at = PlacedNode(node, position, nodes[position - 1] if position else None)
        if evidence.entering is None:
            _check_leaf(settlement, entered, at, TOKEN, tokens[position].to_bytes(TOKEN_BYTES))
        else:
            _check_leaf(settlement, entered, at, ROW, evidence.entering.row(position).data)
        if evidence.leaving is not None:
            _check_leaf(settlement, left, at, ROW, evidence.leaving.row(position).data)
        elif (pick := _pick(evidence, settlement, left, at)) is not None:
            picks.append((position, pick))
    return CheckedHop(settlement, evidence, tuple(picks))


_Leaves = Mapping[TreeNodeId, tuple[Committed, int]]
"""By node, the message that has its leaf, and the place there."""


def _leaves(
    settlement: Settlement, shown: ShownStream, streams: Sequence[SettledStream], *, is_sent: bool
) -> dict[TreeNodeId, tuple[Committed, int]]:
    """The leaves of the one stream of a side, whose head is the signed one.

    A text that was never repaired has one stream on each side, no snapshot behind its first message, and each node
    once: else two words of the hop about one node could be put together to a lie that it never told.
    """
    name = "sent" if is_sent else "received"
    if len(streams) != 1 or streams[0].is_broken:
        raise EvidenceError(name, "has not one whole stream: the text was repaired")
    stream, me = streams[0], settlement.peer
    ends = (me, stream.other) if is_sent else (stream.other, me)
    head, found = first_head(settlement.session, stream.since, *ends), dict[TreeNodeId, tuple[Committed, int]]()
    for number, message in enumerate(shown.messages):
        head = link_head(head, message.digest)
        if message.is_snapshot and number:
            raise EvidenceError(name, "has a snapshot behind its first message")
        for place, node in enumerate(message.ids):
            if node in found:
                raise EvidenceError(name, f"has node {node} twice")
            found[node] = message, place
    rest = [shown.rest[at : at + HASH_BYTES] for at in range(0, len(shown.rest), HASH_BYTES)]
    for digest in rest:
        head = link_head(head, digest)
    if len(shown.messages) + len(rest) != stream.count or head != stream.head:
        raise EvidenceError(name, f"{me} signed other messages")
    return found


def _check_leaf(
    settlement: Settlement, leaves: _Leaves, at: PlacedNode, kind: bytes, content: bytes | bytearray | memoryview
) -> None:
    message, place = leaves.get(at.node, (None, 0))
    if message is None or _part(message.leaves, place) != leaf(settlement.session, at, kind, content):
        raise EvidenceError("rows", f"of node {at.node} are not what {settlement.peer} signed")


def _pick(evidence: HopEvidence, settlement: Settlement, leaves: _Leaves, at: PlacedNode) -> int | None:
    """What the tail picked after a node, by the evidence's sampling; None where it did not."""
    message, place = leaves.get(at.node, (None, 0))
    if message is None or evidence.sampling is None or message.rules != rules_digest(evidence.sampling):
        return None
    token = message.tokens[place]
    _check_leaf(settlement, leaves, at, PICK, _part(message.final, place) + token.to_bytes(TOKEN_BYTES))
    return token


def _part(column: bytes, place: int) -> bytes:
    return column[place * HASH_BYTES : (place + 1) * HASH_BYTES]


def _check_shape(evidence: HopEvidence, settlement: Settlement) -> None:
    begins, count = settlement.span.start == 0, len(evidence.nodes)
    if not count or len(evidence.tokens) != (count if begins else 0) or (evidence.entering is None) != begins:
        raise EvidenceError("entering", f"is not what enters layers {settlement.span} at {count} positions")
    if (evidence.leaving is None) != settlement.is_tail or (evidence.sampling is None) == settlement.is_tail:
        raise EvidenceError("leaving", f"is not what leaves layers {settlement.span}")


# Bytes: pieces behind one another, each after its length


def _joined(pieces: Iterable[bytes]) -> bytes:
    return b"".join(part for piece in pieces for part in (struct.pack(">I", len(piece)), piece))


def _split(data: bytes, most: int) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at < len(data):
        if len(found) == most or len(data) - at < 4:
            raise EvidenceError("evidence", f"has more than {most} pieces, or half of one")
        end = at + 4 + int(struct.unpack_from(">I", data, at)[0])
        if end > len(data):
            raise EvidenceError("evidence", "ends within a piece")
        found.append(data[at + 4 : end])
        at = end
    return found


def _packed(form: str, numbers: Sequence[int]) -> bytes:
    return struct.pack(f">{len(numbers)}{form}", *numbers)


def _unpacked(form: str, data: bytes) -> tuple[int, ...]:
    size = NODE_BYTES if form == "Q" else TOKEN_BYTES
    if len(data) % size or len(data) > MAX_SHOWN * size:
        raise EvidenceError("evidence", f"has {len(data)} bytes of numbers; at most {MAX_SHOWN} are taken")
    return struct.unpack(f">{len(data) // size}{form}", data)


def _stream_bytes(stream: ShownStream) -> bytes:
    columns = [
        (struct.pack(">Q?", one.sequence, one.is_snapshot), one.nodes, one.leaves, one.rules, one.final, one.picks)
        for one in stream.messages
    ]
    return _joined((stream.rest, *(piece for message in columns for piece in message)))


def _stream(data: bytes) -> ShownStream:
    pieces = _split(data, 1 + _COLUMNS * MAX_SHOWN)
    if len(pieces) % _COLUMNS != 1 or len(pieces[0]) % HASH_BYTES:
        raise EvidenceError("messages", "are cut")
    messages: list[Committed] = []
    for at in range(1, len(pieces), _COLUMNS):
        if len(pieces[at]) != 9:
            raise EvidenceError("messages", "have no number")
        messages.append(COMMITTED.decode([*struct.unpack(">Q?", pieces[at]), *pieces[at + 1 : at + _COLUMNS]]))
    return ShownStream(tuple(messages), pieces[0])


def _rows_bytes(rows: Rows | None) -> bytes:
    return b"" if rows is None else struct.pack(">I", rows.width) + bytes(rows.data)


def _rows(data: bytes, settlement: Settlement, count: int) -> Rows | None:
    if not data:
        return None
    if len(data) < 4:
        raise EvidenceError("rows", "have no width")
    rows = Rows(settlement.codec, count, int(struct.unpack_from(">I", data)[0]), memoryview(data)[4:])
    if not 0 < rows.width <= MAX_WIDTH or rows.size_bytes != len(rows.data):
        raise EvidenceError("rows", f"are {len(rows.data)} bytes, not {count} of {rows.width} values")
    return rows


def _sampling(data: bytes) -> Sampling | None:
    try:
        return _SAMPLING.decode(msgpack.unpackb(data)) if data else None
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise EvidenceError("sampling", "is malformed") from error
