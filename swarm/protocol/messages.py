"""What client and hops say to each other, as typed values (docs/reference/protocol.md). Owns no bytes and no rules.

`swarm.wire` turns them into protobuf and back, `swarm.protocol.session` says which of them are legal.
A parent of None is the tip: the last committed node after the sweep's own commit.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from swarm.ids import PeerId, SessionId, TreeNodeId
from swarm.layers import Span
from swarm.protocol.proposal import DraftDistribution

BLOCK, SCALE_BYTES = 32, 2
"""Of `Codec.INT8`: values of a row that share a scale, and a scale's bytes."""


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
        scales = -(-width // BLOCK) if self is Codec.INT8 else 0
        return width * self.item_bytes + scales * SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tail picks: temperature 0 is greedy, None is no filter, multistep another rule.

    Design: docs/design/session-protocol.md.
    """

    seed: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    multistep: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """What a sweep asks for beside picks."""

    log_probs: bool = False
    hidden_rows: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Hidden states of `count` tree nodes: one row of `width` values after the other, little-endian, as `codec` says.

    `data` may share memory with the tensor or frame it came from: never write to it.
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
    """Where one hop's time went for one sweep, in milliseconds: durations only, clocks differ.

    compute_ms: its share of forwards. other_ms: encoding, messages. link_ms: half the least round trip of late, onward.
    """

    queue_ms: float
    compute_ms: float
    other_ms: float
    link_ms: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """One pass of new tree nodes through the chain.

    Lengths: tokens and parents are equally long; node `i` has id `first_id + i`. guesses: by rising offsets.
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


@dataclass(frozen=True, slots=True)
class SweepFrame:
    """A sweep on a link. Client to hop 0: the bare sweep. Hop to hop: kept nodes and their hidden rows too.

    kept: one flag per node of the sweep, None when all are; `rows.count` = kept nodes.
    """

    sweep: Sweep
    kept: tuple[bool, ...] | None = None
    rows: Rows | None = None
    times: tuple[HopTime, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """The target's picks for one sweep: one per kept node from `picks_from` on, in id order.

    When wanted: `log_probs`, natural logarithms, one per pick, and final hidden `rows` of the nodes `row_ids`.
    """

    sequence: int
    generation: int
    picks: tuple[tuple[TreeNodeId, int], ...]
    times: tuple[HopTime, ...] = ()
    log_probs: tuple[float, ...] | None = None
    row_ids: tuple[TreeNodeId, ...] = ()
    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One hop of a route: who, and which of its layers this session uses (R12)."""

    peer: PeerId
    span: Span


@dataclass(frozen=True, slots=True)
class Open:
    """What a session asks every hop to reserve."""

    fingerprint: str
    window_tokens: int
    sweeps: int
    nodes: int
    codec: Codec


@dataclass(frozen=True, slots=True)
class Hedge:
    """A second machine for one hop of a route: it gets every sweep too, and whoever is first is heard (H1).

    index: the hop's place in the route. replica: the machine that stands there in the other route.
    """

    index: int
    replica: PeerId


@dataclass(frozen=True, slots=True)
class Attach:
    """First message on a link: this stream is the session's upstream from now on (R3), beside its replica's (H2).

    records: signed records of machines of the route, so that no hop need ask the directory where the next one is.
    """

    session: SessionId
    generation: int
    route: tuple[RouteHop, ...]
    index: int
    open: Open
    hedge: Hedge | None = None
    records: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Reroute:
    """A new route for a running session, passed down the chain in band (R2). Fields as in `Attach`."""

    generation: int
    route: tuple[RouteHop, ...]
    hedge: Hedge | None = None
    records: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a fresh hop needs to continue a session (R5): committed and live nodes with their rows.

    ids, tokens, sequences and parents: committed nodes first, in order, then live ones. next_id: of the next sweep.
    kept: one flag per node, None when all are; a node that was pruned has no row. `rows.count` = kept nodes.
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
    """The session is over; its KV is free.

    dismissed: only here. The chain goes on without this hop; those behind it are not told and wait for a new upstream.
    """

    reason: str
    dismissed: bool = False


@dataclass(frozen=True, slots=True)
class Ping:
    """Measures a link: the other side answers with the same number at once. Its padding is thrown away on arrival."""

    nonce: int
    padding: bytes = b""


Downstream = Attach | SweepFrame | Reroute | Snapshot | Close | Ping
"""What travels from a link's upstream side to its downstream side."""


@dataclass(frozen=True, slots=True)
class Credits:
    """What the client may have unanswered (F1): the least over the hops."""

    window_tokens: int
    sweeps: int
    nodes: int

    def least(self, other: Credits) -> Credits:
        """What both allow."""
        ours, theirs = (self.window_tokens, self.sweeps, self.nodes), (other.window_tokens, other.sweeps, other.nodes)
        return Credits(*map(min, ours, theirs))


@dataclass(frozen=True, slots=True)
class Attached:
    """This hop took the stream; `received` is the last sequence it received, queued ones included (R4)."""

    generation: int
    received: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """This hop and all behind it are attached for `generation` (also the answer to Reroute)."""

    generation: int
    credits: Credits


@dataclass(frozen=True, slots=True)
class Ack:
    """Receipt of all so far, sent by the event loop: alive, whatever the compute thread does (R10).

    sequence: the last received. parts: of frames, taken from this stream. working: the sweep in work, 0 for none.
    """

    sequence: int
    parts: int = 0
    working: int = 0


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to Ping."""

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
    """Something is wrong at `peer`; passed upstream to the client, which alone decides (R1)."""

    generation: int
    peer: PeerId
    kind: FaultKind
    field: str
    reason: str


Upstream = Attached | Ready | Ack | Pong | Fault
"""What travels from a link's downstream side back to its upstream side."""

Frame = Downstream | Reply | Fault
"""What travels in parts (F2): a link's downstream messages (faults too, R1) and what the tail sends to the client."""


@dataclass(frozen=True, slots=True)
class RepliesRequest:
    """First message on a reply stream: it carries the session's replies from now on, those > `acked` again (R6).

    may_wait: the session may reach this hop a little later than the request.
    """

    session: SessionId
    generation: int = 0
    acked: int = 0
    may_wait: bool = False


RepliesUp = RepliesRequest | Pong
"""What the client sends on a reply stream."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep a session `ttl_s` more seconds although its upstream is lost (R9)."""

    session: SessionId
    generation: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """Answer to Hold: whether the hop has the session."""

    held: bool


@dataclass(frozen=True, slots=True)
class Counters:
    """What a node has done since it started: numbers that only rise.

    replays, catch_ups: snapshots and sweeps sent again to a new hop. restores, restored_nodes: snapshots taken.
    replay_us: of their forwards. doubles: sweeps that had come from a replica. differences: those with other rows.
    """

    sweeps: int = 0
    frames_in: int = 0
    frames_out: int = 0
    forwards: int = 0
    tree_nodes: int = 0
    rows_in_forwards: int = 0
    pruned_nodes: int = 0
    errors: int = 0
    replays: int = 0
    catch_ups: int = 0
    restores: int = 0
    restored_nodes: int = 0
    replay_us: int = 0
    doubles: int = 0
    differences: int = 0


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node serves and how much room it has: the answer to Info."""

    name: str
    fingerprint: str
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    num_layers: int
    span: Span
    vocab_size: int
    hidden_size: int
    numeric_class: str
    version: str
    kv_tokens_total: int
    kv_tokens_free: int
    sessions: int
    counters: Counters
