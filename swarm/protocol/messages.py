"""The messages between client and hops, as typed values (docs/reference/protocol.md). Owns no bytes and no rules.

`swarm.protocol.wire` turns them into protobuf and back, `swarm.protocol.session` says which of them are legal. Limits
are in `swarm.protocol.limits`. Node ids, sequences and generations are below 2^63, token ids below 2^31.
A parent of None is the tip: the last committed node after the sweep's own commit.
"""

from __future__ import annotations

import enum
from dataclasses import astuple, dataclass

from swarm.ids import PeerId, SessionId, TreeNodeId
from swarm.layers import Span
from swarm.protocol.draft_distribution import DraftDistribution
from swarm.protocol.pick_rules import Sampling as Sampling
from swarm.protocol.pick_rules import Want as Want

INT8_BLOCK = 32
"""Values of a row that share a scale in `Codec.INT8`."""
INT8_SCALE_BYTES = 2
"""Bytes of such a scale: bf16."""


class Codec(enum.Enum):
    """How hidden rows travel; part of the numeric class. INT8 is lossy, see `swarm.inference.int8`."""

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
    """

    codec: Codec
    count: int
    width: int
    data: bytes | bytearray | memoryview

    @property
    def size_bytes(self) -> int:
        """Bytes that `count` rows take, whatever `data` holds."""
        return self.count * self.codec.row_bytes(self.width)


@dataclass(frozen=True, slots=True)
class HopTime:
    """Where one hop's time went for one sweep: durations in milliseconds, because clocks differ (F4).

    Attributes:
        queue_ms: waiting for the engine.
        compute_ms: the sweep's share of forwards.
        other_ms: encoding, and a sweep's messages on average.
        link_ms: half the shortest recent round trip to the successor; at the tail, to the client.
    """

    queue_ms: float
    compute_ms: float
    other_ms: float
    link_ms: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """One pass of new tree nodes through the chain (a verification pass).

    Attributes:
        sequence: 1, 2, 3 … per session, without gaps.
        committed: committed length in tokens after truncation and commit: a check.
        first_id: node `i` of the sweep has id `first_id + i`.
        tokens: [n] token ids of the new nodes.
        parents: [n] their parents.
        picks_from: first id whose pick the client asks for.
        generation: of the session's route; only the client raises it (R1).
        acked: the client holds every reply up to this sequence.
        truncate_to: committed length to cut back to first, None for no cut.
        commit_to: live node that becomes committed with its ancestors, None for no commit.
        sampling: how to pick from now on; None leaves it as it is.
        want: what to send beside picks; None for nothing.
        guesses: what a draft drew after nodes of this sweep, at most one per node, by rising offsets.
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

    peer: PeerId
    span: Span


@dataclass(frozen=True, slots=True)
class Fork:
    """A running session of the same client whose first tokens a new one begins with (P15).

    Attributes:
        session: the running one.
        tokens: how many of its committed tokens.
        digest: of these, 16 bytes (`swarm.protocol.authority.token_digest`).
        signature: of the running session's key, over all of this and the new session's name.
    """

    session: SessionId
    tokens: int
    digest: bytes
    signature: bytes = b""


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
        fork: what to begin with, in generation 0; None for nothing. It has a signature of its own.
    """

    fingerprint: str
    window_tokens: int
    sweeps: int
    nodes: int
    codec: Codec
    session_key: bytes = b""
    aux_layers: tuple[int, ...] = ()
    fork: Fork | None = None

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

    index: int
    replica: PeerId


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
        signature: of the session's key, over all of this but `index` (R14).
    """

    session: SessionId
    generation: int
    route: tuple[RouteHop, ...]
    index: int
    open: Open
    hedge: Hedge | None = None
    records: tuple[bytes, ...] = ()
    signature: bytes = b""


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

    generation: int
    route: tuple[RouteHop, ...]
    open: Open
    hedge: Hedge | None = None
    records: tuple[bytes, ...] = ()
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a new hop needs to continue a session (R5).

    It has n nodes: the committed ones first, in order, then the live ones.

    Attributes:
        committed: how many of the nodes are committed.
        sequence: the last sweep that they include.
        acked: the client holds every reply up to this sequence.
        next_id: the id that the next sweep begins with.
        sampling: how to pick.
        ids: [n] rising.
        tokens: [n] token ids.
        sequences: [n] the sweep that appended each node.
        parents: [n] their parents.
        headers: of every sweep beyond `acked`.
        kept: [n] whether each node has a row; None when all have. A pruned node has none.
        rows: one hidden row per kept node; None when the receiver embeds the tokens itself.
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


@dataclass(frozen=True, slots=True)
class Close:
    """The session is over on this hop; its KV is free.

    Attributes:
        reason: for the log.
        dismissed: the chain goes on without this hop: it does not pass the Close on, and the hops behind it wait for a
            new upstream.
    """

    reason: str
    dismissed: bool = False


@dataclass(frozen=True, slots=True)
class Ping:
    """Measures a link: the other side answers at once.

    Attributes:
        nonce: what the Pong repeats.
        padding: ignored on arrival; brings a cold connection up to speed (F2).
    """

    nonce: int
    padding: bytes = b""


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
        forked: tokens that the session began with (P15).
    """

    window_tokens: int
    sweeps: int
    nodes: int
    forked: int = 0

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
    """

    generation: int
    received: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """This hop and all behind it are attached; also the answer to Reroute.

    Attributes:
        generation: of the route.
        credits: of this hop and all behind it.
    """

    generation: int
    credits: Credits


@dataclass(frozen=True, slots=True)
class Ack:
    """Receipt of everything so far, sent by the event loop whatever the compute thread does (R10).

    Attributes:
        sequence: of the last sweep received.
        parts: parts of frames taken from this stream.
        working: sequence of the sweep that is being computed, 0 for none.
    """

    sequence: int
    parts: int = 0
    working: int = 0


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to Ping, with its nonce."""

    nonce: int


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
    """

    generation: int
    peer: PeerId
    kind: FaultKind
    field: str
    reason: str
    reporter: PeerId | None = None
    signature: bytes = b""


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
    """

    session: SessionId
    generation: int = 0
    acked: int = 0
    may_wait: bool = False


RepliesUp = RepliesRequest | Pong
"""What the client sends on a reply stream."""
