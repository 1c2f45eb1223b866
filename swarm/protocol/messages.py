"""The messages between client and hops, as typed values (docs/reference/protocol.md). Owns no bytes and no rules.

`swarm.protocol.wire` turns them into protobuf and back, `swarm.protocol.session` says which of them are legal. Limits
are in `swarm.protocol.limits`. Node ids, sequences and generations are below 2^63, token ids below 2^31.
A parent of None is the tip: the last committed node after the sweep's own commit.
"""

from __future__ import annotations

import enum
from dataclasses import astuple, dataclass, replace
from typing import Annotated

from swarm.base.declared import RISING, Broken, Printable, Rule, Size, Within, Written, below, exactly
from swarm.base.ids import PeerId, SessionId, TreeNodeId
from swarm.base.layers import Span
from swarm.protocol.limits import (
    HASH_BYTES,
    MAX_AUX_LAYERS,
    MAX_BORDERS,
    MAX_HOLD_S,
    MAX_HOPS,
    MAX_KEY_BYTES,
    MAX_LAYERS,
    MAX_RECORD_BYTES,
    MAX_SETTLED_BYTES,
    MAX_SHOWN_NODES,
    MAX_SIGNATURE_BYTES,
    MAX_WIDTH,
    NAME_BYTES,
    PADDING_BYTES,
    PEER_CHARACTERS,
    PEER_ID,
    REASON_CHARACTERS,
    SESSION_BYTES,
    SESSION_KEY_BYTES,
    SESSION_SIGNATURE_BYTES,
    SHOWN_BYTES,
    TEXT_CHARACTERS,
    TICKET_BYTES,
    TOKEN_END,
    WORD_END,
    Counted,
    Granted,
    HopMs,
    Natural,
    WaitS,
)
from swarm.protocol.pick_rules import DraftDistribution
from swarm.protocol.pick_rules import Sampling as Sampling
from swarm.protocol.pick_rules import Want as Want

SessionName = Annotated[SessionId, exactly(SESSION_BYTES)]
Signature = Annotated[bytes, exactly(SESSION_SIGNATURE_BYTES)]
Nonce = Annotated[int, below(1 << 64)]
PeerName = Annotated[PeerId, Printable(PEER_CHARACTERS, 1)]
"""A peer id where it is only compared."""
SignedMachine = Annotated[PeerId, Printable(PEER_CHARACTERS, 1, PEER_ID)]
ShortText = Annotated[str, Printable(TEXT_CHARACTERS)]
ReasonText = Annotated[str, Printable(REASON_CHARACTERS, cut=True)]
HopSpan = Annotated[Span, Rule(f"within {MAX_LAYERS} layers", lambda span: span.end <= MAX_LAYERS)]

INT8_BLOCK = 32
"""Values of a row that share a scale in `Codec.INT8`."""
INT8_SCALE_BYTES = 2
"""Bytes of such a scale: bf16."""


class Codec(enum.Enum):
    """How hidden rows travel; part of the numeric class. INT8 is lossy, see `swarm.compute.int8`."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"

    @property
    def item_bytes(self) -> int:
        """Bytes per value on the wire, scales not counted."""
        return {Codec.FP32: 4, Codec.INT8: 1}.get(self, 2)

    def row_bytes(self, width: int) -> int:
        """Bytes that a row of `width` values takes."""
        scales = -(-width // INT8_BLOCK) if self is Codec.INT8 else 0
        return width * self.item_bytes + scales * INT8_SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Rows:
    """Hidden states of tree nodes: a matrix [count, width] in row-major order.

    Attributes:
        codec: how each row is encoded; values are little-endian.
        count: rows.
        width: values per row: the model's hidden size, times `Open.row_parts`.
        data: the encoded rows; may share memory with the tensor or frame it came from, so never write to it.
        is_packed: on a link alone, `data` is what `swarm.protocol.packed_rows` made of the rows.
    """

    codec: Codec
    count: int
    width: int
    data: bytes | bytearray | memoryview
    is_packed: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes that `count` rows take unpacked, whatever `data` holds."""
        return self.count * self.codec.row_bytes(self.width)

    def first(self, count: int) -> Rows:
        """The first rows alone."""
        return Rows(self.codec, count, self.width, memoryview(self.data)[: count * self.codec.row_bytes(self.width)])

    def row(self, place: int) -> Rows:
        """One of the rows alone."""
        size = self.codec.row_bytes(self.width)
        return Rows(self.codec, 1, self.width, memoryview(self.data)[place * size : (place + 1) * size])


@dataclass(frozen=True, slots=True)
class Heads:
    """What a hop committed to up to one sweep (S3), of the streams that it hears and writes now.

    Attributes:
        sequence: the last sweep that both include.
        received_since: generation in which the stream was attached by which its sweeps come.
        received: the head of what came by it.
        sent_since: the same of the stream to the next hop; at the tail, of its replies.
        sent: the head of what left by it.
    """

    sequence: Natural
    received_since: Natural
    received: Annotated[bytes, exactly(HASH_BYTES)]
    sent_since: Natural
    sent: Annotated[bytes, exactly(HASH_BYTES)]


@dataclass(frozen=True, slots=True)
class HopTime:
    """Where one hop's time went for one sweep: durations in milliseconds, because clocks differ (F4).

    Attributes:
        queue_ms: waiting for the engine.
        compute_ms: the sweep's share of forwards.
        other_ms: encoding, and a sweep's messages on average.
        link_ms: half the shortest recent round trip to the successor; at the tail, to the client.
        heads: what it committed to, one sweep late; None from a hop that does not.
    """

    queue_ms: HopMs
    compute_ms: HopMs
    other_ms: HopMs
    link_ms: HopMs
    heads: Heads | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """One pass of new tree nodes through the chain (a verification pass).

    Attributes:
        sequence: 1, 2, 3 … per session, without gaps.
        committed: committed length in tokens after truncation and commit: a check.
        first_id: node `i` of the sweep has id `first_id + i`.
        tokens: [n] token ids of the new nodes; () on links that carry structure alone (P17).
        parents: [n] their parents.
        picks_from: first id whose pick the client asks for.
        generation: of the session's route; only the client raises it (R1).
        acked: the client holds every reply up to this sequence.
        truncate_to: committed length to cut back to first, None for no cut.
        commit_to: live node that becomes committed with its ancestors, None for no commit.
        sampling: how to pick from now on; None leaves it as it is.
        want: what to send beside picks; None for nothing.
        guesses: what a draft drew after nodes of this sweep, at most one per node, by rising offsets.
        names: of the blocks that are whole with this sweep's commit (P15), in order; () from who names none.
    """

    sequence: int
    committed: int
    first_id: TreeNodeId
    tokens: tuple[int, ...]
    parents: tuple[TreeNodeId | None, ...]
    picks_from: TreeNodeId
    generation: int = 0
    acked: int = 0
    truncate_to: int | None = None
    commit_to: TreeNodeId | None = None
    sampling: Sampling | None = None
    want: Want | None = None
    guesses: tuple[DraftDistribution, ...] = ()
    names: tuple[bytes, ...] = ()

    @property
    def count(self) -> int:
        """How many new nodes it has."""
        return len(self.parents)

    @property
    def end_id(self) -> TreeNodeId:
        """The id after that of its last node."""
        return TreeNodeId(self.first_id + len(self.parents))

    @property
    def nodes(self) -> tuple[TreeNodeId, ...]:
        """[n] ids of its new nodes."""
        return tuple(map(TreeNodeId, range(self.first_id, self.end_id)))

    def without_settings(self) -> Sweep:
        """What hop 0 needs of it where the tail hears the client itself (P17)."""
        return replace(self, sampling=None, want=None, guesses=())

    def structure(self) -> Sweep:
        """What the hops between the ends need of it (P17)."""
        return replace(self, tokens=(), sampling=None, want=None, guesses=())

    @property
    def prompt_nodes(self) -> range:
        """Ids of the forced tokens whose hidden rows are asked for: the last ones before `picks_from` (P10)."""
        count = 0 if self.want is None else self.want.prompt_rows
        return range(max(self.first_id, self.picks_from - count), self.picks_from)


@dataclass(frozen=True, slots=True)
class SweepFrame:
    """A sweep on a link; the client sends hop 0 the bare sweep.

    Attributes:
        sweep: as the client made it.
        kept: [n] whether each node of the sweep was not pruned; None when all were kept.
        rows: one hidden row per kept node, in id order; None from the client.
        times: [hops so far] in chain order.
    """

    sweep: Sweep
    kept: tuple[bool, ...] | None = None
    rows: Rows | None = None
    times: tuple[HopTime, ...] = ()

    def without_settings(self) -> SweepFrame:
        """What hop 0 needs of it where the tail hears the client itself (P17)."""
        return replace(self, sweep=self.sweep.without_settings())


@dataclass(frozen=True, slots=True)
class Reply:
    """The target's picks for one sweep.

    Attributes:
        sequence: the sweep's.
        generation: of the session's route.
        picks: (node, token picked after it) of each kept node from `Sweep.picks_from` on, in id order.
        times: [hops] in chain order.
        log_probs: [len(picks)] natural logarithms of the target's own probabilities; None unless asked for.
        top_log_probs: [len(picks)] the likeliest tokens and theirs, best first; None unless asked for.
        row_ids: nodes of `rows`, root first.
        rows: final hidden rows of the accepted path; None unless asked for.
    """

    sequence: int
    generation: int
    picks: tuple[tuple[TreeNodeId, int], ...]
    times: tuple[HopTime, ...] = ()
    log_probs: tuple[float, ...] | None = None
    row_ids: tuple[TreeNodeId, ...] = ()
    rows: Rows | None = None
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One hop of a route.

    Attributes:
        peer: the machine.
        span: which of its layers this session uses (R12).
    """

    peer: PeerName
    span: HopSpan


@dataclass(frozen=True, slots=True)
class Border:
    """A beginning of a text that machines may hold (P15).

    Attributes:
        tokens: how many; a multiple of `BLOCK_TOKENS`.
        name: of its last block, over all of it, 16 bytes (`swarm.protocol.prefix`).
    """

    tokens: Granted
    name: Annotated[bytes, exactly(NAME_BYTES)]


@dataclass(frozen=True, slots=True)
class Open:
    """What a session asks every hop to reserve (P8, F1).

    Attributes:
        fingerprint: the model's.
        window_tokens: KV tokens.
        sweeps: sweeps that the client asks to have unanswered at a time.
        nodes: tree nodes that it asks to have live or unanswered at a time.
        codec: of the rows between hops.
        session_key: the public key that commands the session (R14), 32 bytes; b"" until its client signs.
        aux_layers: at most `MAX_AUX_LAYERS`, rising, none of them the first: what enters these travels beside each row
            from there on (P14).
        expected_tokens: KV tokens that it is expected to take, tree nodes too; 0: its whole window and all nodes.
        ends_only: token ids go to the first hop and the tail alone, and how to pick to the tail (P17).
        prefix: beginnings of the text, the longest first: a hop begins with the longest that it holds, in generation 0.
    """

    fingerprint: ShortText
    window_tokens: Granted
    sweeps: Granted
    nodes: Granted
    codec: Codec
    session_key: Annotated[bytes, exactly(SESSION_KEY_BYTES)] = b""
    aux_layers: Annotated[tuple[Annotated[int, Within(1, MAX_LAYERS - 1)], ...], Size(MAX_AUX_LAYERS), RISING] = ()
    prefix: Annotated[tuple[Border, ...], Size(MAX_BORDERS)] = ()
    expected_tokens: Annotated[int, below(WORD_END)] = 0
    ends_only: bool = False

    def row_parts(self, layer: int) -> int:
        """How many rows of the model's width stand side by side where rows enter a layer: its own and earlier ones."""
        return 1 + sum(each < layer for each in self.aux_layers)


@dataclass(frozen=True, slots=True)
class Hedge:
    """A second machine for one hop of a route: it gets every sweep too, and the first answer counts (H1).

    Attributes:
        index: the hop's place in the route.
        replica: the machine that stands at that place in the other route.
    """

    index: Natural
    replica: PeerName


@dataclass(frozen=True, slots=True)
class OwnerProof:
    """That an identity owns a session (R18): it signed the session's name, which nobody else can use.

    Attributes:
        public_key: the identity's, as libp2p encodes it.
        signature: the identity's.
    """

    public_key: Annotated[bytes, Size(MAX_KEY_BYTES, 1)]
    signature: Annotated[bytes, Size(MAX_SIGNATURE_BYTES, 1)]


RouteHops = Annotated[tuple[RouteHop, ...], Size(MAX_HOPS, 1)]
Records = Annotated[tuple[Annotated[bytes, Size(MAX_RECORD_BYTES)], ...], Size(MAX_HOPS + 1)]


@dataclass(frozen=True, slots=True)
class Attach:
    """First message on a link: this stream is the session's upstream from now on (R3), beside its replica's (H2).

    Attributes:
        session: 16 bytes: the hash of the session's key.
        generation: of the route.
        route: all hops, hop 0 first.
        index: the place in the route of the receiver, or of the hop whose replica it is.
        open: what to reserve.
        hedge: the hop with a replica, None without.
        records: signed records of machines of the route, so that no hop asks the directory where the next one is.
        signature: of the session's key, over all of this but `index`, `ticket`, `payer` and `owner` (R14).
        ticket: by which a full machine knows again who asks anew (P16); empty: by the session's name.
        payer: whose session it is, in hop 0's words, which name nobody to others (F3); empty where it does not say.
        owner: whose session it is by name, where its client says so.
    """

    session: SessionName
    generation: Natural
    route: RouteHops
    index: Natural
    open: Open
    hedge: Hedge | None = None
    records: Records = ()
    signature: Signature = b""
    ticket: Annotated[bytes, Size(TICKET_BYTES)] = b""
    payer: Annotated[bytes, Size(TICKET_BYTES)] = b""
    owner: OwnerProof | None = None

    def check(self) -> None:
        """Refuse a receiver, a replica or records that are not the route's."""
        if self.index >= len(self.route):
            raise Broken("index", f"{self.index} is not in a route of {len(self.route)}")
        _check_route(self)


@dataclass(frozen=True, slots=True)
class Reroute:
    """A new route for a running session, passed down the chain in band (R2).

    Attributes:
        generation: of the new route: greater than the old one's.
        route: all hops, hop 0 first.
        open: what a new hop is to reserve.
        hedge: the hop with a replica, None without.
        records: as in `Attach`.
        signature: as in `Attach`.
    """

    generation: Natural
    route: RouteHops
    open: Open
    hedge: Hedge | None = None
    records: Records = ()
    signature: Signature = b""

    def check(self) -> None:
        """Refuse a replica or records that are not the route's."""
        _check_route(self)


def _check_route(message: Attach | Reroute) -> None:
    if len(message.records) > len(message.route) + 1:
        raise Broken("records", f"{len(message.records)} for a route of {len(message.route)}")
    hedge = message.hedge
    if hedge is not None and hedge.index >= len(message.route):
        raise Broken("hedge", f"{hedge.index} is not in a route of {len(message.route)}")
    if hedge is not None and hedge.replica in {hop.peer for hop in message.route}:
        raise Broken("replica", f"{hedge.replica} is no second machine: it stands in the route itself")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a new hop needs to continue a session (R5).

    It has n nodes: the committed ones first, in order, then the live ones.

    Attributes:
        committed: how many of the nodes are committed.
        sequence: the last sweep that they include.
        acked: the client holds every reply up to this sequence.
        next_id: the id that the next sweep begins with.
        sampling: how to pick; the default where the tail hears the client itself (P17).
        ids: [n] rising.
        tokens: [n] token ids; () on links that carry structure alone (P17).
        sequences: [n] the sweep that appended each node.
        parents: [n] their parents.
        headers: of every sweep beyond `acked`.
        kept: [n] whether each node has a row; None when all have. A pruned node has none.
        rows: one hidden row per kept node; None when the receiver embeds the tokens itself.
        names: of the blocks of its committed nodes, as far as the client gave any (P15).
    """

    committed: int
    sequence: int
    acked: int
    next_id: TreeNodeId
    sampling: Sampling
    ids: tuple[TreeNodeId, ...]
    tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    parents: tuple[TreeNodeId | None, ...]
    headers: tuple[Sweep, ...]
    kept: tuple[bool, ...] | None = None
    rows: Rows | None = None
    names: tuple[bytes, ...] = ()

    def without_settings(self) -> Snapshot:
        """What a new hop 0 needs of it where the tail hears the client itself (P17)."""
        headers = tuple(header.without_settings() for header in self.headers)
        return replace(self, sampling=Sampling(), headers=headers)


@dataclass(frozen=True, slots=True)
class Close:
    """The session is over on this hop; its KV is free.

    Attributes:
        reason: for the log.
        dismissed: the chain goes on without this hop: it does not pass the Close on, and the hops behind it wait for a
            new upstream.
    """

    reason: ReasonText
    dismissed: bool = False


@dataclass(frozen=True, slots=True)
class Ping:
    """Measures a link: the other side answers at once.

    Attributes:
        nonce: what the Pong repeats.
        padding: ignored on arrival; brings a cold connection up to speed (F2).
    """

    nonce: Nonce
    padding: Annotated[bytes, Size(PADDING_BYTES)] = b""


Downstream = Attach | SweepFrame | Reroute | Snapshot | Close | Ping
"""What travels from a link's upstream side to its downstream side."""


LEAST_SWEEPS, LEAST_NODES = 2, 1_024
"""A hop grants at least so many, or what was asked for where that is less."""


@dataclass(frozen=True, slots=True)
class Credits:
    """What the client may have unanswered (F1): the minimum over the hops.

    Attributes:
        window_tokens: the session's window.
        sweeps: unanswered sweeps.
        nodes: live nodes, and nodes of unanswered sweeps.
        held: tokens that the session begins with (P15).
    """

    window_tokens: Granted
    sweeps: Granted
    nodes: Granted
    held: Annotated[int, below(WORD_END)] = 0

    def min_with(self, other: Credits) -> Credits:
        """Each credit's minimum: what both allow."""
        return Credits(*map(min, astuple(self), astuple(other)))

    def suffice(self, asked: Open, *, in_use: bool) -> bool:
        """Whether these are enough for a session that asked for so much: half of the nodes hold a whole sweep.

        Args:
            asked: what it asked for.
            in_use: whether it uses all of that already.
        """
        if in_use:
            asked_for = Credits(asked.window_tokens, asked.sweeps, asked.nodes)
            return self.min_with(asked_for) == asked_for
        return (
            self.window_tokens >= asked.window_tokens
            and self.sweeps >= min(asked.sweeps, LEAST_SWEEPS)
            and self.nodes >= min(asked.nodes // 2, LEAST_NODES)
        )


@dataclass(frozen=True, slots=True)
class Attached:
    """This hop took the stream.

    Attributes:
        generation: of the route.
        received: the last sequence that it received, queued sweeps included; None if it lacks the session (R4).
        reads_packed: rows may travel packed on this link (F6).
    """

    generation: Natural
    received: Natural | None
    reads_packed: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """This hop and all behind it are attached; also the answer to Reroute.

    Attributes:
        generation: of the route.
        credits: of this hop and all behind it.
    """

    generation: Natural
    credits: Credits


@dataclass(frozen=True, slots=True)
class Ack:
    """Receipt of everything so far, sent by the event loop whatever the compute thread does (R10).

    Attributes:
        sequence: of the last sweep received.
        parts: parts of frames taken from this stream.
        working: sequence of the sweep that is being computed, 0 for none.
    """

    sequence: Natural
    parts: Natural = 0
    working: Natural = 0


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to Ping, with its nonce."""

    nonce: Nonce


class FaultKind(enum.Enum):
    """Why a hop gave up, as a typed status."""

    PROTOCOL = "protocol"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    CLOSED = "closed"
    INTERNAL = "internal"
    CONTEXT_FULL = "context_full"
    MODEL_MISMATCH = "model_mismatch"
    DRAINING = "draining"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something is wrong at a machine; passed on to the client, which alone decides (R1).

    Attributes:
        generation: of the route.
        peer: the machine at fault.
        kind: what is wrong, as a typed status.
        field: the part of a message at fault, for `FaultKind.PROTOCOL`, else empty; printable.
        reason: one line for the user; printable.
        reporter: the machine that says so; None where nobody signed.
        signature: the reporter's, of `swarm.protocol.faults.statement`; empty where nobody signed.
        retry_after_s: for `FaultKind.BUSY`, as of `Busy` (P16); advice, which nobody signs.
        expected_s: likewise.
        position: likewise.
    """

    generation: Natural
    peer: SignedMachine
    kind: FaultKind
    field: ShortText
    reason: ReasonText
    reporter: SignedMachine | None = None
    signature: Annotated[bytes, Size(MAX_SIGNATURE_BYTES)] = b""
    retry_after_s: WaitS | None = None
    expected_s: WaitS | None = None
    position: Annotated[int, Within(1, WORD_END - 1)] | None = None


Upstream = Attached | Ready | Ack | Pong | Fault
"""What travels from a link's downstream side back to its upstream side."""

Frame = Downstream | Reply | Fault
"""What travels in parts (F2): a link's downstream messages (faults too, R1) and what the tail sends to the client."""


@dataclass(frozen=True, slots=True)
class RepliesRequest:
    """First message on a reply stream: it carries the session's replies from now on (R6).

    Attributes:
        session: whose replies.
        generation: of the route.
        acked: cached replies beyond it are sent again.
        may_wait: the session may reach this hop a little later than the request.
        reads_packed: rows of replies may travel packed (F6).
    """

    session: SessionName
    generation: Natural = 0
    acked: Natural = 0
    may_wait: bool = False
    reads_packed: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    """What the tail alone has to know of a sweep, from the client itself (P17).

    One that is larger than `MAX_TELL_NODES` comes in parts. A new tail is told first what came before the sweeps that
    are unanswered, in the same form: all nodes that were alive then, and how to pick.

    Attributes:
        sequence: the sweep's; of what came before, the last one's.
        ids: [n] its nodes, rising.
        tokens: [n] their token ids.
        sampling: as in `Sweep`, in the last part.
        want: as in `Sweep`, in the last part.
        guesses: as in `Sweep`, in whichever part.
        has_more: another part of it follows.
    """

    sequence: int
    ids: tuple[TreeNodeId, ...]
    tokens: tuple[int, ...]
    sampling: Sampling | None = None
    want: Want | None = None
    guesses: tuple[DraftDistribution, ...] = ()
    has_more: bool = False


RepliesUp = RepliesRequest | Pong | Tell
"""What the client sends on a reply stream."""


# Unary calls: Hold (R9, R17), Settle and Show (S4, S5), and Info


@dataclass(frozen=True, slots=True)
class Hold:
    """What a client wants of a hop whose upstream may be lost (R9), besides the answer (R17).

    Attributes:
        session: the session's id.
        generation: of its route; a hop that heard of a newer one does nothing.
        ttl_s: keep the session for so many more seconds; with 0 it is only asked.
        is_release: end it on this hop, which is needed no more.
    """

    session: SessionName
    generation: Natural
    ttl_s: Annotated[float, Within(0.0, MAX_HOLD_S)] = 0.0
    is_release: Annotated[bool, Written("release")] = False


@dataclass(frozen=True, slots=True)
class Held:
    """Answer to Hold: whether the hop has the session, and how far that is there (R17).

    Attributes:
        held: whether it has the session; all else is 0 where not.
        generation: the newest of which it heard.
        is_ready: whether it and all hops behind it are attached for that generation.
        received: the last sequence that arrived.
        passed: the last sequence that the next hop has, or at the tail that was answered.
        working: the oldest sequence that it computes, sends, or has in a queue; 0 for none.
    """

    held: bool
    generation: Natural = 0
    is_ready: Annotated[bool, Written("ready")] = False
    received: Natural = 0
    passed: Natural = 0
    working: Natural = 0


@dataclass(frozen=True, slots=True)
class Settle:
    """Asks for a hop's signature over what it received and sent of a session (S4).

    Attributes:
        session: the session's id.
    """

    session: SessionName


@dataclass(frozen=True, slots=True)
class Settled:
    """Answer to Settle.

    Attributes:
        held: whether the hop has the session, or settled it lately.
        sealed: what it signed, with its keys (`swarm.trust.settlement`); empty where it is not held.
    """

    held: bool
    sealed: Annotated[bytes, Size(MAX_SETTLED_BYTES)] = b""


@dataclass(frozen=True, slots=True)
class Show:
    """Asks for leaves, or for rows, of what a hop settled (S5).

    Attributes:
        session: the session's id.
        sent: of what it sent; else of what it received.
        stream: which of the settled streams of that side.
        first: leaves from this message of the stream on.
        nodes: whose rows are asked for, as they were sent; empty: leaves are.
    """

    session: SessionName
    sent: bool
    stream: Annotated[int, below(WORD_END)] = 0
    first: Natural = 0
    nodes: Annotated[tuple[Natural, ...], Size(MAX_SHOWN_NODES)] = ()


class Shown(enum.Enum):
    """Whether a hop still has what it settled."""

    HERE = "here"
    DROPPED = "dropped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ShowReply:
    """Answer to Show.

    Attributes:
        state: whether anything follows.
        data: msgpack of messages or rows, as many as `SHOWN_BYTES` hold and one at least.
    """

    state: Shown
    data: Annotated[bytes, Size(2 * SHOWN_BYTES)] = b""


@dataclass(frozen=True, slots=True)
class Counters:
    """What a node has done since it started: numbers that only rise.

    Attributes:
        sweeps: sweeps finished.
        frames_in: frames received.
        frames_out: frames sent.
        forwards: forwards run.
        tree_nodes: tree nodes received.
        rows_in_forwards: rows that went into forwards.
        pruned_nodes: tree nodes that were not run because a queued commit had killed them.
        errors: errors in sessions.
        replays: snapshots sent to a new hop.
        catch_ups: sweeps sent again to a new hop.
        restores: snapshots that this node was restored from.
        restored_nodes: tree nodes of those snapshots.
        replay_us: compute of those snapshots, in microseconds.
        doubles: sweeps that had come from a replica already.
        differences: those of them whose rows were not the replica's.
    """

    sweeps: Counted = 0
    frames_in: Counted = 0
    frames_out: Counted = 0
    forwards: Counted = 0
    tree_nodes: Counted = 0
    rows_in_forwards: Counted = 0
    pruned_nodes: Counted = 0
    errors: Counted = 0
    replays: Counted = 0
    catch_ups: Counted = 0
    restores: Counted = 0
    restored_nodes: Counted = 0
    replay_us: Counted = 0
    doubles: Counted = 0
    differences: Counted = 0


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node serves and how much room it has.

    Attributes:
        name: the model's hub id, or its folder's name.
        fingerprint: the model's, over the three digests below.
        config_digest: hex digest of config.json.
        weights_digest: hex digest of the weights.
        tokenizer_digest: hex digest of the tokenizer.
        num_layers: layers of the whole model.
        span: layers that this node serves.
        vocab_size: token ids are below it.
        hidden_size: values of a hidden row.
        numeric_class: what decides the last bits (`swarm.protocol.numeric_class`).
        version: of the program.
        kv_tokens_total: KV tokens for all sessions together.
        kv_tokens_free: KV tokens that no session has reserved.
        sessions: sessions open now.
        counters: what it has done so far.
    """

    name: ShortText
    fingerprint: ShortText
    config_digest: ShortText
    weights_digest: ShortText
    tokenizer_digest: ShortText
    num_layers: Annotated[int, Within(1, MAX_LAYERS)]
    span: Span
    vocab_size: Annotated[int, Within(1, TOKEN_END)]
    hidden_size: Annotated[int, Within(1, MAX_WIDTH)]
    numeric_class: ShortText
    version: ShortText
    kv_tokens_total: Counted
    kv_tokens_free: Counted
    sessions: Annotated[int, below(WORD_END)]
    counters: Counters

    def check(self) -> None:
        """Refuse layers that the model does not have, and more free tokens than there are."""
        if self.span.end > self.num_layers:
            raise Broken("span", f"{self.span} of {self.num_layers} layers")
        if self.kv_tokens_free > self.kv_tokens_total:
            raise Broken("kv_tokens_free", f"{self.kv_tokens_free} of {self.kv_tokens_total}")
