"""The evidence of one text as a file: what its client told, what its machines signed, and rows where they were kept.

    text          what the client told, packed once; its session's key signs that
    settlements   what machines signed, as they sealed it
    replies       what each tail picked, with the hash of the final row before each pick
    links         optional: leaves and rows of what hops sent

`load` reads a file and believes nothing: sizes are bounded and every column has the length of its neighbours.
`verify_signatures` says what the signatures cover, or which part of the file is not what was signed. It recomputes no
row: whether machines computed what they signed, `swarm verify` finds out with the model's weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Final

import msgpack

from swarm.base.declared import Broken, ListForm, Size, Within, exactly
from swarm.base.errors import RemoteProtocolError, SwarmError
from swarm.base.ids import PeerId, SessionId, TreeNodeId
from swarm.protocol.authority import is_signed, session_of
from swarm.protocol.limits import (
    HASH_BYTES,
    MAX_NODES,
    MAX_SETTLED_BYTES,
    SESSION_KEY_BYTES,
    SESSION_SIGNATURE_BYTES,
    TOKEN_END,
    WORD_END,
    Natural,
    TokenNumber,
)
from swarm.protocol.messages import PeerName, RouteHop, RouteHops, Rows, Sampling, ShortText, Sweep
from swarm.protocol.numeric_class import without_rounding
from swarm.protocol.session import Limits, SessionState
from swarm.trust.commitment import (
    PICK,
    ROW,
    Committed,
    PlacedNode,
    commit_tokens,
    first_head,
    leaf,
    next_head,
    placed,
    rules_digest,
)
from swarm.trust.settlement import SettledStream, Settlement, opened

VERSION: Final = 1
TEXT: Final = b"canopy-text\n"
MAX_TELLS: Final = 1 << 20
MAX_TOKENS: Final = 1 << 22
MAX_PARTS: Final = 4_096
MAX_FILE_BYTES: Final = 1 << 32
MAX_ROWS_BYTES: Final = 64 << 20
"""Rows of one part of a file."""
_FREE: Final = Limits(TOKEN_END, WORD_END - 1, 1 << 40, 1 << 40)
"""No limits of a session: hops kept them while it ran."""


class EvidenceError(RemoteProtocolError):
    """A file that is no evidence, or is not what was signed; `field` names the part at fault."""


@dataclass(frozen=True, slots=True)
class ToldSweep:
    """One sweep as the client made it.

    Attributes:
        sequence: 1, 2, 3 …
        committed: tokens after truncation and commit.
        first_id: of its nodes.
        tokens: [n] of its nodes.
        parents: [n] one more than the parent's id; 0 is the tip.
        picks_from: first node whose pick was asked for.
        truncate_to: as in a sweep.
        commit_to: likewise.
        sampling: how to pick from now on; None: as before.
    """

    sequence: Natural
    committed: Natural
    first_id: Natural
    tokens: Annotated[tuple[TokenNumber, ...], Size(MAX_NODES)]
    parents: Annotated[tuple[Natural, ...], Size(MAX_NODES)]
    picks_from: Natural
    truncate_to: Natural | None
    commit_to: Natural | None
    sampling: Sampling | None

    @classmethod
    def of(cls, sweep: Sweep) -> ToldSweep:
        """What a sweep told."""
        parents = tuple(0 if parent is None else parent + 1 for parent in sweep.parents)
        numbers = (sweep.sequence, sweep.committed, sweep.first_id, tuple(sweep.tokens), parents, sweep.picks_from)
        return cls(*numbers, sweep.truncate_to, sweep.commit_to, sweep.sampling)

    @property
    def sweep(self) -> Sweep:
        """The sweep, as far as its rules go."""
        return Sweep(
            self.sequence,
            self.committed,
            TreeNodeId(self.first_id),
            self.tokens,
            tuple(TreeNodeId(parent - 1) if parent else None for parent in self.parents),
            TreeNodeId(self.picks_from),
            truncate_to=self.truncate_to,
            commit_to=None if self.commit_to is None else TreeNodeId(self.commit_to),
            sampling=self.sampling,
        )


@dataclass(frozen=True, slots=True)
class ToldRoute:
    """The machines of one generation.

    Attributes:
        generation: its number.
        hops: machines and layers, hop 0 first.
    """

    generation: Natural
    hops: RouteHops


@dataclass(frozen=True, slots=True)
class ToldStream:
    """What left for one hop 0.

    Attributes:
        since: generation in which its stream was attached.
        peer: the machine.
        messages: sequence of each sweep or snapshot, and whether it was a snapshot; rising.
    """

    since: Natural
    peer: PeerName
    messages: Annotated[tuple[tuple[Natural, bool], ...], Size(MAX_TELLS)]

    def check(self) -> None:
        """Refuse an order in which nothing travels."""
        if any(one[0] >= other[0] for one, other in pairwise(self.messages)):
            raise Broken("messages", "do not rise")


@dataclass(frozen=True, slots=True)
class ToldText:
    """What a client says of its text.

    Attributes:
        version: of this form.
        session_key: that commands the session: the name of the text's author, and of nobody.
        fingerprint: of the model.
        adopted: tokens that machines held already (P15): their rows did not travel, and nobody signed them.
        routes: by generation.
        streams: to hop 0, oldest first.
        tells: all sweeps, from the session's first.
        prompt_tokens: how many of `tokens` are the prompt.
        tokens: of the prompt and the answer.
    """

    version: Annotated[int, Within(VERSION, VERSION)]
    session_key: Annotated[bytes, exactly(SESSION_KEY_BYTES)]
    fingerprint: ShortText
    adopted: Annotated[tuple[TokenNumber, ...], Size(MAX_TOKENS)]
    routes: Annotated[tuple[ToldRoute, ...], Size(MAX_PARTS, 1)]
    streams: Annotated[tuple[ToldStream, ...], Size(MAX_PARTS)]
    tells: Annotated[tuple[ToldSweep, ...], Size(MAX_TELLS, 1)]
    prompt_tokens: Annotated[int, Within(1, MAX_TOKENS)]
    tokens: Annotated[tuple[TokenNumber, ...], Size(MAX_TOKENS, 1)]

    @property
    def session(self) -> SessionId:
        """The session's name."""
        return session_of(self.session_key)


@dataclass(frozen=True, slots=True)
class StreamLeaves:
    """All messages of one stream that a hop sent.

    Attributes:
        settlement: whose, by its place in the file.
        stream: which of those that it sent.
        messages: in order.
    """

    settlement: Natural
    stream: Natural
    messages: Annotated[tuple[Committed, ...], Size(MAX_TELLS)]


@dataclass(frozen=True, slots=True)
class SentRows:
    """Rows that one hop sent.

    Attributes:
        settlement: whose, by its place in the file.
        width: values of a row.
        nodes: [n] whose rows these are, along the text.
        data: n rows in the settlement's codec.
    """

    settlement: Natural
    width: Annotated[int, Within(1, 1 << 20)]
    nodes: Annotated[tuple[Natural, ...], Size(MAX_NODES)]
    data: Annotated[bytes, Size(MAX_ROWS_BYTES)]


@dataclass(frozen=True, slots=True)
class _EvidenceParts:
    """A file's parts, as they are written.

    Attributes:
        text: msgpack of `ToldText`.
        signature: the session key's.
        settlements: as machines sealed them.
        replies: of tails.
        leaves: of what other hops sent.
        rows: likewise.
    """

    text: Annotated[bytes, Size(MAX_FILE_BYTES)]
    signature: Annotated[bytes, exactly(SESSION_SIGNATURE_BYTES)]
    settlements: Annotated[tuple[Annotated[bytes, Size(MAX_SETTLED_BYTES)], ...], Size(MAX_PARTS)]
    replies: Annotated[tuple[StreamLeaves, ...], Size(MAX_PARTS)]
    leaves: Annotated[tuple[StreamLeaves, ...], Size(MAX_PARTS)] = ()
    rows: Annotated[tuple[SentRows, ...], Size(MAX_TOKENS)] = ()


_FILE: Final = ListForm(_EvidenceParts, EvidenceError, "evidence")
_TEXT: Final = ListForm(ToldText, EvidenceError, "text")
_MAGIC: Final = b"canopy-evidence\n"


@dataclass(frozen=True, slots=True)
class TextEvidence:
    """A file's content, whose bounds hold; see `verify_signatures` for whether it is true.

    Attributes:
        told: what the client says.
        text: the bytes that it signed.
        signature: the session key's, of these.
        settlements: as machines sealed them.
        replies: of tails.
        leaves: of what other hops sent; empty without rows.
        rows: likewise.
    """

    told: ToldText
    text: bytes
    signature: bytes
    settlements: tuple[bytes, ...]
    replies: tuple[StreamLeaves, ...]
    leaves: tuple[StreamLeaves, ...] = ()
    rows: tuple[SentRows, ...] = ()

    def dump(self) -> bytes:
        """The file."""
        parts = _EvidenceParts(self.text, self.signature, self.settlements, self.replies, self.leaves, self.rows)
        packed: bytes = msgpack.packb(_FILE.encode(parts))
        return _MAGIC + packed


def told_bytes(told: ToldText) -> bytes:
    """The bytes of which a client signs `TEXT` and their SHA-256."""
    packed: bytes = msgpack.packb(_TEXT.encode(told))
    return packed


def signed_part(text: bytes) -> bytes:
    """What the session's key signs."""
    return TEXT + hashlib.sha256(text).digest()


def load(data: bytes) -> TextEvidence:
    """Read a file.

    Raises:
        EvidenceError: it is none, or breaks a bound.
    """
    if not data.startswith(_MAGIC) or len(data) > MAX_FILE_BYTES:
        raise EvidenceError("evidence", "is no evidence of a text")
    parts = _FILE.decode(_unpacked(data[len(_MAGIC) :], "evidence"))
    told = _TEXT.decode(_unpacked(parts.text, "text"))
    return TextEvidence(told, parts.text, parts.signature, parts.settlements, parts.replies, parts.leaves, parts.rows)


def _unpacked(data: bytes, name: str) -> Any:  # noqa: ANN401
    try:
        return msgpack.unpackb(data)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise EvidenceError(name, "is malformed") from error


# What the signatures of a file cover


@dataclass(frozen=True, slots=True)
class DifferingLink:
    """Two neighbours signed different heads of one stream: the link is at fault, and nothing tells which end.

    Attributes:
        since: generation in which the stream was attached.
        sender: the machine before.
        receiver: the machine behind.
    """

    since: int
    sender: PeerId
    receiver: PeerId


@dataclass(frozen=True, slots=True)
class Checked:
    """What is signed of a text.

    Attributes:
        session: its session's name.
        settlements: what machines signed, in the order of the file.
        unsigned: (generation, machine) of routes that nobody answers for: they died, or refused.
        adopted: tokens at the beginning that were taken over from an earlier text.
        signed_picks: tokens of the answer that a tail signed.
        unsigned_picks: positions of those that nobody signed.
        differing: links whose two ends signed different heads.
        apart: links whose two ends signed a different number of messages, so that heads say nothing.
        sampling: by which the answer was picked, the last one told.
        path: the nodes along the text, by position; shorter than the text where its end was no node.
    """

    session: SessionId
    settlements: tuple[Settlement, ...]
    unsigned: tuple[tuple[int, PeerId], ...]
    adopted: int
    signed_picks: int
    unsigned_picks: tuple[int, ...]
    differing: tuple[DifferingLink, ...]
    apart: tuple[DifferingLink, ...]
    sampling: Sampling
    path: tuple[TreeNodeId, ...]


@dataclass(slots=True)
class _Replay:
    """The tells of a text, applied one after the other.

    Attributes:
        state: after all of them.
        places: of every node that was ever told.
        sampling: in force at each sequence.
        heads: of each stream to hop 0, after each number of messages.
    """

    state: SessionState
    places: dict[TreeNodeId, PlacedNode] = field(default_factory=dict)
    sampling: dict[int, Sampling] = field(default_factory=dict)
    heads: dict[tuple[int, PeerId], list[bytes]] = field(default_factory=dict)


def verify_signatures(evidence: TextEvidence) -> Checked:
    """What is signed in a file.

    Raises:
        EvidenceError: a part is not what was signed: `signature`, `text` are the client's, `settlement`, `sealed` and
            `voucher` a machine's own, `route`, `session`, `fingerprint`, `numeric_class` and `codec` say where it does
            not belong, `tells` what hop 0 received, `replies`, `leaves` and `rows` what was sent.
    """
    told = evidence.told
    if told_bytes(told) != evidence.text:
        raise EvidenceError("text", "is not written in its one form")
    if not is_signed(told.session_key, signed_part(evidence.text), evidence.signature):
        raise EvidenceError("signature", "of what was told is not the session key's")
    replay = _replayed(told)
    settlements = _opened(evidence)
    for settlement in settlements:
        if settlement.span.start == 0:
            _check_told(settlement, replay)
    picks = _picks(evidence, settlements, replay)
    path = _path(told, replay.state)
    unsigned_picks = _check_text(told, path, picks)
    leaves = _check_leaves(evidence, settlements)
    _check_rows(evidence, settlements, replay, leaves)
    differing, apart = _links(settlements)
    signed = {settlement.peer for settlement in settlements}
    hops = {(route.generation, hop.peer) for route in told.routes for hop in route.hops if hop.peer not in signed}
    return Checked(
        told.session,
        settlements,
        tuple(sorted(hops)),
        len(told.adopted),
        len(told.tokens) - told.prompt_tokens - len(unsigned_picks),
        unsigned_picks,
        differing,
        apart,
        replay.state.sampling,
        path,
    )


def _replayed(told: ToldText) -> _Replay:
    """Apply all tells; what leads nowhere is refused as hops would refuse it."""
    replay = _Replay(SessionState.begun(_FREE, told.adopted, ()))
    for place in range(len(told.adopted)):
        node = TreeNodeId(place)
        replay.places[node] = PlacedNode(node, place, TreeNodeId(place - 1) if place else None)
    waiting = {(stream.since, stream.peer): list(reversed(stream.messages)) for stream in told.streams}
    if len(waiting) < len(told.streams):
        raise EvidenceError("streams", "one stands there twice")
    heads = {(since, peer): [first_head(told.session, since, "", peer)] for since, peer in waiting}
    try:
        for tell in told.tells:
            sweep = tell.sweep
            applied = replay.state.apply(sweep)
            replay.sampling[sweep.sequence] = replay.state.sampling
            replay.places |= {at.node: at for at in placed(replay.state, applied.appended) or ()}
            for key, left in waiting.items():
                if left and left[-1][0] == sweep.sequence:
                    message = _to_hop0(told.session, sweep, replay, is_snapshot=left.pop()[1])
                    heads[key].append(next_head(heads[key][-1], message))
    except SwarmError as error:
        raise EvidenceError("tells", str(error)) from None
    if any(waiting.values()):
        raise EvidenceError("streams", "hold a sweep that was never told")
    replay.heads = heads
    return replay


def _to_hop0(session: SessionId, sweep: Sweep, replay: _Replay, *, is_snapshot: bool) -> Committed:
    state = replay.state
    if not is_snapshot:
        first, tokens = sweep.first_id, sweep.tokens
        nodes = [replay.places[TreeNodeId(first + offset)] for offset in range(len(tokens))]
    else:
        nodes = [replay.places[node] for node in (*(one.id for one in state.committed), *state.live)]
        tokens = (*(one.token for one in state.committed), *(one.token for one in state.live.values()))
    return commit_tokens(session, sweep.sequence, nodes, tokens, snapshot=is_snapshot)


def _computed(settlement: Settlement) -> tuple[str, int]:
    """In which class, whatever its processor, and how many layers the model has."""
    return without_rounding(settlement.numeric_class), settlement.num_layers


def _opened(evidence: TextEvidence) -> tuple[Settlement, ...]:
    """The settlements, each of which belongs to this text."""
    told = evidence.told
    if len(set(evidence.settlements)) < len(evidence.settlements):
        raise EvidenceError("settlements", "one stands there twice")
    found: list[Settlement] = []
    for sealed in evidence.settlements:
        try:
            one = opened(sealed)
        except RemoteProtocolError as error:
            raise EvidenceError(error.field, error.reason) from None
        if one.session != told.session:
            raise EvidenceError("session", f"{one.peer} settled another one")
        if one.fingerprint != told.fingerprint:
            raise EvidenceError("fingerprint", f"{one.peer} computed another model")
        routes = [route for route in told.routes if RouteHop(PeerId(one.peer), one.span) in route.hops]
        if not routes:
            raise EvidenceError("route", f"{one.peer} {one.span} stands in none")
        if one.generation not in {route.generation for route in routes}:
            raise EvidenceError("route", f"{one.peer} settled generation {one.generation}, which was not its own")
        if found and _computed(one) != _computed(found[0]):
            raise EvidenceError("numeric_class", f"{one.peer} computed in another one")
        if found and one.codec is not found[0].codec:
            raise EvidenceError("codec", f"{one.peer} has another one")
        found.append(one)
    return tuple(found)


def _check_told(settlement: Settlement, replay: _Replay) -> None:
    """That hop 0 received what the client says that it told."""
    for stream in settlement.received:
        heads = replay.heads.get((stream.since, PeerId(settlement.peer)))
        if stream.other or heads is None or stream.count >= len(heads):
            raise EvidenceError("tells", f"{settlement.peer} received more than was told")
        if heads[stream.count] != stream.head:
            raise EvidenceError("tells", f"{settlement.peer} received other tokens")


def _picks(evidence: TextEvidence, settlements: Sequence[Settlement], replay: _Replay) -> dict[TreeNodeId, int]:
    """What was picked after each node, by the tail that was the first to sign it."""
    session, found = evidence.told.session, dict[TreeNodeId, int]()
    for part in evidence.replies:
        settlement, stream = _stream(settlements, part, "replies")
        if not settlement.is_tail:
            raise EvidenceError("replies", f"{settlement.peer} was no tail")
        for message in part.messages:
            nodes, tokens = message.ids, message.tokens
            known = [replay.places.get(node) for node in nodes]
            if not message.rules or None in known or len(tokens) != len(nodes):
                raise EvidenceError("replies", f"to sweep {message.sequence} have picks of nodes that nobody told")
            for place, at in enumerate(known):
                row = slice(place * HASH_BYTES, (place + 1) * HASH_BYTES)
                content = message.final[row] + tokens[place].to_bytes(4)
                if at is None or leaf(session, at, PICK, content) != message.leaves[row]:
                    raise EvidenceError("replies", f"a pick of sweep {message.sequence} is not what its leaf says")
            _check_rules(message, stream, replay)
            for node, token in zip(nodes, tokens, strict=True):
                found.setdefault(node, token)
        _check_head(session, settlement, stream, part.messages, "replies")
    shown = {(part.settlement, part.stream) for part in evidence.replies}
    tails = {(place, number) for place, one in enumerate(settlements) if one.is_tail for number in range(len(one.sent))}
    if shown != tails or len(shown) < len(evidence.replies):
        raise EvidenceError("replies", "are not those of the tails that settled")
    return found


def _check_rules(message: Committed, stream: SettledStream, replay: _Replay) -> None:
    """That a tail picked as it was told; one that came later may answer earlier sweeps by the newest sampling."""
    told = [replay.sampling[message.sequence]] if message.sequence in replay.sampling else []
    if stream.since:
        told += [one for sequence, one in replay.sampling.items() if sequence > message.sequence]
    if message.rules not in {rules_digest(one) for one in told}:
        raise EvidenceError("replies", f"to sweep {message.sequence} were picked by another sampling than was told")


def _stream(settlements: Sequence[Settlement], part: StreamLeaves, name: str) -> tuple[Settlement, SettledStream]:
    if part.settlement >= len(settlements) or part.stream >= len(settlements[part.settlement].sent):
        raise EvidenceError(name, "are of a stream that nobody settled")
    settlement = settlements[part.settlement]
    return settlement, settlement.sent[part.stream]


def _check_head(
    session: SessionId, settlement: Settlement, stream: SettledStream, messages: Sequence[Committed], name: str
) -> None:
    head = first_head(session, stream.since, settlement.peer, stream.other)
    for message in messages:
        head = next_head(head, message)
    if len(messages) != stream.count or head != stream.head:
        raise EvidenceError(name, f"{settlement.peer} signed others")


def _path(told: ToldText, state: SessionState) -> tuple[TreeNodeId, ...]:
    """The nodes along the text."""
    held = [one.token for one in state.committed]
    if tuple(held) != told.tokens[: len(held)]:
        raise EvidenceError("text", "is not what the sweeps committed")
    nodes, above = [one.id for one in state.committed], None
    for token in told.tokens[len(held) :]:
        child = state.child(above, token)
        if child is None:
            break
        nodes.append(child)
        above = child
    return tuple(nodes)


def _check_text(told: ToldText, path: Sequence[TreeNodeId], picks: Mapping[TreeNodeId, int]) -> tuple[int, ...]:
    """That each token of the answer was picked after the node before it; returns the positions that nobody signed."""
    if told.prompt_tokens > len(told.tokens):
        raise EvidenceError("text", "is shorter than its prompt")
    unsigned: list[int] = []
    for position in range(told.prompt_tokens, len(told.tokens)):
        if position > len(path):
            raise EvidenceError("text", f"has a token at {position} that follows no node")
        pick = picks.get(path[position - 1])
        if pick is None:
            unsigned.append(position)
        elif pick != told.tokens[position]:
            raise EvidenceError("text", f"has another token at {position} than its tail picked")
    return tuple(unsigned)


def _check_leaves(evidence: TextEvidence, settlements: Sequence[Settlement]) -> dict[tuple[int, TreeNodeId], bytes]:
    """The leaves of what hops sent, by settlement and node."""
    found: dict[tuple[int, TreeNodeId], bytes] = {}
    for part in evidence.leaves:
        settlement, stream = _stream(settlements, part, "leaves")
        _check_head(evidence.told.session, settlement, stream, part.messages, "leaves")
        for message in part.messages:
            for place, node in enumerate(message.ids):
                found[part.settlement, node] = message.leaves[place * HASH_BYTES : (place + 1) * HASH_BYTES]
    return found


def _check_rows(
    evidence: TextEvidence,
    settlements: Sequence[Settlement],
    replay: _Replay,
    leaves: Mapping[tuple[int, TreeNodeId], bytes],
) -> None:
    """That rows are those of their leaves."""
    for part in evidence.rows:
        if part.settlement >= len(settlements):
            raise EvidenceError("rows", "are of a machine that did not settle")
        rows = rows_in(part, settlements[part.settlement])
        for place, node in enumerate(map(TreeNodeId, part.nodes)):
            at, signed = replay.places.get(node), leaves.get((part.settlement, node))
            if at is None or signed is None:
                raise EvidenceError("rows", f"of node {node}, which was not sent")
            if leaf(evidence.told.session, at, ROW, rows.row(place).data) != signed:
                raise EvidenceError("rows", f"of node {node} are not what {settlements[part.settlement].peer} signed")


def rows_in(part: SentRows, settlement: Settlement) -> Rows:
    """The rows of a part, [nodes, width].

    Raises:
        EvidenceError: there are not as many bytes.
    """
    rows = Rows(settlement.codec, len(part.nodes), part.width, part.data)
    if rows.size_bytes != len(part.data):
        raise EvidenceError("rows", f"{len(part.data)} bytes instead of {rows.size_bytes}")
    return rows


def _links(settlements: Sequence[Settlement]) -> tuple[tuple[DifferingLink, ...], tuple[DifferingLink, ...]]:
    """Links whose two ends signed different heads, or a different number of messages."""
    sent = {(one.since, each.peer, one.other): one for each in settlements for one in each.sent if one.other}
    differing, apart = [], []
    for each in settlements:
        for one in each.received:
            other = sent.get((one.since, PeerId(one.other), each.peer))
            if other is None or not one.other:
                continue
            link = DifferingLink(one.since, PeerId(one.other), PeerId(each.peer))
            if one.count != other.count or one.is_broken or other.is_broken:
                apart.append(link)
            elif one.head != other.head:
                differing.append(link)
    return tuple(differing), tuple(apart)


# What a file says of each span, for whoever computes it again


@dataclass(frozen=True, slots=True)
class EvidencedSpan:
    """What one machine signed that entered its layers and left them, along the text's P nodes.

    Attributes:
        settlement: its own.
        tokens: [P] ids of the text.
        entering: [P] rows, as the machine before sent them; None for the first layers, or where `missing`.
        leaving: [P] rows; None at the tail, or where `missing`.
        picks: at the tail, (position of the node, token picked after it), as far as it picked along this path.
        missing: why something is not there; empty where all is.
    """

    settlement: Settlement
    tokens: tuple[int, ...]
    entering: Rows | None = None
    leaving: Rows | None = None
    picks: tuple[tuple[int, int], ...] = ()
    missing: str = ""


def spans_in(evidence: TextEvidence, checked: Checked) -> tuple[EvidencedSpan, ...]:
    """Each machine's part of the text, in the order of the file.

    Args:
        checked: what `verify_signatures` said of this file: rows are those of their leaves.
    """
    rows: dict[int, dict[int, bytes]] = {}
    widths: dict[int, int] = {}
    for part in evidence.rows:
        found = rows_in(part, checked.settlements[part.settlement])
        own = rows.setdefault(part.settlement, {})
        own |= {node: bytes(found.row(place).data) for place, node in enumerate(part.nodes)}
        widths[part.settlement] = part.width
    return tuple(_span_in(evidence, checked, place, (rows, widths)) for place in range(len(checked.settlements)))


def _span_in(
    evidence: TextEvidence, checked: Checked, place: int, held: tuple[dict[int, dict[int, bytes]], dict[int, int]]
) -> EvidencedSpan:
    settlement, path = checked.settlements[place], checked.path
    rows, widths = held

    def along(places: Sequence[int]) -> Rows | None:
        """The rows of the whole path, each from the first of these machines that has it."""
        found = [next((rows[one][node] for one in places if node in rows.get(one, {})), None) for node in path]
        width = next((widths[one] for one in places if one in widths), 1)
        whole = [row for row in found if row is not None]
        return Rows(settlement.codec, len(path), width, b"".join(whole)) if len(whole) == len(path) else None

    entering, leaving = None, None
    missing: list[str] = []
    if settlement.span.start:
        before = {stream.other for stream in settlement.received}
        entering = along([one for one, other in enumerate(checked.settlements) if other.peer in before])
        missing += [] if entering is not None else ["rows that entered them were not kept"]
    if not settlement.is_tail:
        leaving = along([place])
        missing += [] if leaving is not None else ["rows that left them were not kept"]
    picked: dict[int, int] = {}
    for part in evidence.replies:
        if part.settlement == place:
            for message in part.messages:
                for node, token in zip(message.ids, message.tokens, strict=True):
                    picked.setdefault(node, token)
    picks = tuple((position, picked[node]) for position, node in enumerate(path) if node in picked)
    tokens = evidence.told.tokens[: len(path)]
    return EvidencedSpan(settlement, tokens, entering, leaving, picks, "; ".join(missing))
