"""The wire: typed messages to protobuf bytes and back. Owns bytes; no I/O and no session rules.

Most messages are written and read by their declarations (`swarm.base.declared`). Sweeps, replies and snapshots are by
hand here, since they are hot, or made of columns. Decoding trusts nothing: counts, lengths, ranges, finite numbers and
texts are checked, and `RemoteProtocolError` names the field. A value that the wire cannot hold is a bug here:
`LocalProtocolError`. Row values are not in these bytes: `swarm.protocol.frames` carries them behind the head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from swarm.base.declared import ProtoForm
from swarm.base.errors import LocalProtocolError, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.base.version import unknown_here
from swarm.protocol.limits import (
    BLOCK_TOKENS,
    ID_END,
    MAX_HEADERS,
    MAX_HOP_MS,
    MAX_HOPS,
    MAX_NODES,
    MAX_TELL_NODES,
    MAX_WIDTH,
    NAME_BYTES,
    TOKEN_END,
    HeadLimits,
)
from swarm.protocol.limits import PART_BYTES as PART_BYTES
from swarm.protocol.manifest import MAX_MANIFEST_BYTES, Manifest
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Close,
    Codec,
    Fault,
    Frame,
    Heads,
    Held,
    Hold,
    HopTime,
    NodeInfo,
    Ping,
    Pong,
    Ready,
    RepliesRequest,
    RepliesUp,
    Reply,
    Reroute,
    Rows,
    Sampling,
    Settle,
    Settled,
    Show,
    ShowReply,
    Snapshot,
    Sweep,
    SweepFrame,
    Tell,
    Upstream,
    Want,
)
from swarm.protocol.pick_rules import MAX_CANDIDATES, MAX_DRAWS, MAX_TOP_LOG_PROBS, DraftDistribution
from swarm.protocol.v1 import node_pb2 as pb

SERVICE: Final = "swarm.wire.v1.Node"
HELLO: Final = f"/{SERVICE}/Hello"
"""Unary, raw bytes both ways: `swarm.directory.address_proof` defines them."""
INFO: Final = f"/{SERVICE}/Info"
"""Unary: the request is empty bytes, the answer is for `decode_info`."""
MANIFEST: Final = f"/{SERVICE}/Manifest"
"""Unary: the request is empty bytes, the answer is for `decode_manifest`."""
LINK: Final = f"/{SERVICE}/Link"
"""Stream of parts down, stream of `decode_upstream` back."""
REPLIES: Final = f"/{SERVICE}/Replies"
"""Stream of `decode_replies_up` from the client, stream of parts back."""
HOLD: Final = f"/{SERVICE}/Hold"
"""Unary: `decode_hold`, `decode_held`."""
SETTLE: Final = f"/{SERVICE}/Settle"
"""Unary: `decode_settle`, `decode_settled`."""
SHOW: Final = f"/{SERVICE}/Show"
"""Unary: `decode_show`, `decode_shown`."""
REPORT: Final = f"/{SERVICE}/Report"
"""Stream of raw bytes, pieces of hop evidence (`swarm.trust.hop_evidence`); the answer is empty bytes (S6)."""
RECEIPT: Final = f"/{SERVICE}/Receipt"
"""Unary: the request is what `swarm.trust.receipt` seals, the answer is empty (S7)."""

CODECS: Final[dict[Codec, int]] = {codec: pb.Codec.Value(f"CODEC_{codec.name}") for codec in Codec}
LENGTH_DELIMITED = 2  # protobuf's wire type of a `bytes` field
DATA_KEY = bytes([pb.Part.DATA_FIELD_NUMBER << 3 | LENGTH_DELIMITED])
TIP = -1
"""The tip as a parent on the wire."""
MAX_FLOAT32 = 3.5e38
"""More than any finite float32."""

FAULT: Final = ProtoForm(Fault, pb.Fault)
FRAME_FORMS: Final[dict[str, ProtoForm[Any]]] = {
    "attach": ProtoForm(Attach, pb.Attach),
    "reroute": ProtoForm(Reroute, pb.Reroute),
    "close": ProtoForm(Close, pb.Close),
    "ping": ProtoForm(Ping, pb.Ping),
    "fault": FAULT,
}
UPSTREAM_FORMS: Final[dict[str, ProtoForm[Any]]] = {
    "attached": ProtoForm(Attached, pb.Attached),
    "ready": ProtoForm(Ready, pb.Ready),
    "ack": ProtoForm(Ack, pb.Ack),
    "pong": ProtoForm(Pong, pb.Pong),
    "fault": FAULT,
}
REPLIES_UP_FORMS: Final[dict[str, ProtoForm[Any]]] = {
    "request": ProtoForm(RepliesRequest, pb.RepliesRequest),
    "pong": UPSTREAM_FORMS["pong"],
}
HOLD_FORM: Final = ProtoForm(Hold, pb.HoldRequest)
HELD_FORM: Final = ProtoForm(Held, pb.HoldReply)
SETTLE_FORM: Final = ProtoForm(Settle, pb.SettleRequest)
SETTLED_FORM: Final = ProtoForm(Settled, pb.SettleReply)
SHOW_FORM: Final = ProtoForm(Show, pb.ShowRequest)
SHOWN_FORM: Final = ProtoForm(ShowReply, pb.ShowReply)
HEADS: Final = ProtoForm(Heads, pb.Heads)
INFO_FORM: Final = ProtoForm(NodeInfo, pb.InfoReply)
MANIFEST_FORM: Final = ProtoForm(Manifest, pb.ManifestReply)
SAMPLING: Final = ProtoForm(Sampling, pb.Sampling)
WANT: Final = ProtoForm(Want, pb.Want)
FORMS: Final[tuple[ProtoForm[Any], ...]] = (
    *(*FRAME_FORMS.values(), *UPSTREAM_FORMS.values(), REPLIES_UP_FORMS["request"]),
    *(HOLD_FORM, HELD_FORM, SETTLE_FORM, SETTLED_FORM, SHOW_FORM, SHOWN_FORM, INFO_FORM, MANIFEST_FORM),
    *(SAMPLING, WANT, HEADS),
)
"""All messages that are written by their declarations."""

M = TypeVar("M", bound=Message)
S = TypeVar("S", bound=Sized)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FramePart:
    """The next bytes of a frame (F2).

    Attributes:
        head_bytes: bytes of the whole head in a frame's first part, 0 in the others.
        rows_bytes: bytes of row values behind the head, in the first part only.
        data: at most `PART_BYTES` of head, then rows.
    """

    head_bytes: int
    rows_bytes: int
    data: bytes


def encode_frame(message: Frame) -> bytes:
    """The head of a frame: everything but its row values."""
    return _bytes(_frame, message)


def encode_upstream(message: Upstream) -> bytes:
    """One message from a link's downstream side."""
    return _bytes(lambda one: pb.Upstream(**_by_kind(UPSTREAM_FORMS, one)), message)


def encode_replies_up(message: RepliesUp) -> bytes:
    """One message of the client on a reply stream."""
    return _bytes(_replies_up, message)


def encode_manifest(manifest: Manifest) -> bytes:
    """The answer to Manifest.

    Raises:
        LocalProtocolError: the wire cannot hold it.
    """
    data = _bytes(MANIFEST_FORM.encode, manifest)
    try:
        decode_manifest(data)
    except RemoteProtocolError as error:
        raise LocalProtocolError(error.field, error.reason) from error
    return data


def encode_part(head_bytes: int, rows_bytes: int, data: Sequence[bytes | memoryview]) -> bytes:
    """One part of a frame, without the copies that protobuf makes of a `bytes` field.

    Protobuf reads concatenated encodings as one message, so the data is put behind the numbers with a single copy.

    Args:
        head_bytes: see `FramePart`.
        rows_bytes: see `FramePart`.
        data: pieces that are joined.
    """
    numbers = pb.Part(head_bytes=head_bytes, rows_bytes=rows_bytes).SerializeToString()
    return b"".join((numbers, DATA_KEY, _varint(sum(map(len, data))), *data))


# Every decoder raises `RemoteProtocolError` with the field that breaks the wire's rules.


def decode_frame(data: bytes | bytearray, limits: HeadLimits | None = None) -> Frame:
    """A frame's head; `Rows.data` is still empty, and a ping's padding is dropped.

    Args:
        data: the head's bytes.
        limits: what it may hold; what holds more is refused before any of it is decoded.
    """
    frame = _parsed(pb.Frame(), data)
    kind = str(frame.WhichOneof("kind"))
    if limits is not None:
        _check_counts(frame, kind, limits)
    match kind.removeprefix("ruled_").removeprefix("wide_").removeprefix("ends_"):
        case "sweep":
            return _sweep_frame(getattr(frame, kind))
        case "reply":
            return _reply(frame.reply)
        case "snapshot":
            return _snapshot(getattr(frame, kind))
        case "None":
            raise _no_known_kind(frame)
        case name:
            found: Frame = FRAME_FORMS[name].decode(getattr(frame, kind))
            return Ping(found.nonce) if isinstance(found, Ping) else found


def decode_upstream(data: bytes) -> Upstream:
    """One message from a link's downstream side."""
    found: Upstream = _of_kind(UPSTREAM_FORMS, _parsed(pb.Upstream(), data))
    return found


def decode_replies_up(data: bytes) -> RepliesUp:
    """One message of the client on a reply stream, at most `PART_BYTES` long."""
    message = _parsed(pb.RepliesUp(), _at_most(data, PART_BYTES, "bytes"))
    if message.WhichOneof("kind") == "tell":
        return _tell(message.tell)
    found: RepliesUp = _of_kind(REPLIES_UP_FORMS, message)
    return found


def decode_manifest(data: bytes) -> Manifest:
    """The answer to Manifest; whether it is the manifest that was asked for, its digest says."""
    _at_most(data, MAX_MANIFEST_BYTES, "bytes")
    return MANIFEST_FORM.decode(_parsed(pb.ManifestReply(), data))


def decode_part(data: bytes) -> FramePart:
    """One part of a frame."""
    part = _parsed(pb.Part(), data)
    return FramePart(part.head_bytes, part.rows_bytes, part.data)


# Kinds and bytes


def _bytes(build: Callable[[T], Message], message: T) -> bytes:
    try:
        return build(message).SerializeToString()
    except (ValueError, TypeError, OverflowError) as error:
        raise LocalProtocolError(type(message).__name__, f"does not fit the wire: {error}") from error


def _by_kind(forms: dict[str, ProtoForm[Any]], message: object) -> dict[str, Any]:
    return next({kind: form.encode(message)} for kind, form in forms.items() if form.kind is type(message))


def _of_kind(forms: dict[str, ProtoForm[Any]], message: Message) -> Any:  # noqa: ANN401
    kind = message.WhichOneof("kind")
    if kind is None:
        raise _no_known_kind(message)
    return forms[kind].decode(getattr(message, kind))


def _frame(message: Frame) -> pb.Frame:
    """A head, of another kind where releases that would read past what is new in it must refuse it whole (V2)."""
    match message:
        case SweepFrame():
            frame = _put_sweep_frame(message)
            return pb.Frame(ruled_sweep=frame) if _has_rules(message.sweep) else pb.Frame(sweep=frame)
        case Reply():
            return pb.Frame(reply=_put_reply(message))
        case Snapshot():
            snapshot = _put_snapshot(message)
            return pb.Frame(ruled_snapshot=snapshot) if _has_rules(message) else pb.Frame(snapshot=snapshot)
        case Attach() | Reroute() if message.open.ends_only or message.open.aux_layers:
            prefix = "ends" if message.open.ends_only else "wide"
            return pb.Frame(**{f"{prefix}_{kind}": body for kind, body in _by_kind(FRAME_FORMS, message).items()})
        case _:
            return pb.Frame(**_by_kind(FRAME_FORMS, message))


def _replies_up(message: RepliesUp) -> pb.RepliesUp:
    if isinstance(message, Tell):
        return pb.RepliesUp(tell=_put_tell(message))
    return pb.RepliesUp(**_by_kind(REPLIES_UP_FORMS, message))


def _has_rules(message: Sweep | Snapshot) -> bool:
    return message.sampling is not None and message.sampling.rules is not None


def _varint(value: int) -> bytes:
    septets = bytearray()
    while value > 0x7F:
        septets.append(value & 0x7F | 0x80)
        value >>= 7
    septets.append(value)
    return bytes(septets)


def _parsed(message: M, data: bytes | bytearray) -> M:
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        raise RemoteProtocolError("bytes", f"not a {message.DESCRIPTOR.name} message") from error
    return message


def _unary(form: ProtoForm[T]) -> tuple[Callable[[T], bytes], Callable[[bytes], T]]:
    return (lambda value: _bytes(form.encode, value)), (lambda data: form.decode(_parsed(form.message(), data)))


encode_hold, decode_hold = _unary(HOLD_FORM)
encode_held, decode_held = _unary(HELD_FORM)
encode_settle, decode_settle = _unary(SETTLE_FORM)
encode_settled, decode_settled = _unary(SETTLED_FORM)
encode_show, decode_show = _unary(SHOW_FORM)
encode_shown, decode_shown = _unary(SHOWN_FORM)
encode_info, decode_info = _unary(INFO_FORM)


def _no_known_kind(message: Message) -> RemoteProtocolError:
    """Names what a later release put in the place of a kind; the number, since only that one knows its name."""
    unknown: Any = UnknownFieldSet(message)  # its stubs do not say that it is a sequence
    numbers = sorted({field.field_number for field in unknown})
    name = message.DESCRIPTOR.name
    if not numbers:
        return RemoteProtocolError("kind", f"{name} of no kind")
    return RemoteProtocolError("kind", unknown_here(f"{name} of kind {numbers[0]}"))


# Sweeps, replies and snapshots as protobuf messages


def _put_parents(parents: Iterable[TreeNodeId | None]) -> list[int]:
    return [TIP if parent is None else parent for parent in parents]


def _put_sweep(sweep: Sweep) -> pb.Sweep:
    return pb.Sweep(
        sequence=sweep.sequence,
        generation=sweep.generation,
        truncate_to=sweep.truncate_to,
        commit_to=sweep.commit_to,
        committed=sweep.committed,
        acked=sweep.acked,
        sampling=None if sweep.sampling is None else SAMPLING.encode(sweep.sampling),
        first_id=sweep.first_id,
        tokens=sweep.tokens,
        parents=_put_parents(sweep.parents),
        picks_from=sweep.picks_from,
        want=None if sweep.want is None else WANT.encode(sweep.want),
        guesses=_put_guesses(sweep.guesses),
        names=sweep.names,
    )


def _put_guesses(guesses: Iterable[DraftDistribution]) -> list[pb.Guess]:
    return [
        pb.Guess(offset=guess.offset, tokens=guess.tokens, weights=guess.weights, draws=guess.draws)
        for guess in guesses
    ]


def _put_tell(tell: Tell) -> pb.Tell:
    return pb.Tell(
        sequence=tell.sequence,
        ids=tell.ids,
        tokens=tell.tokens,
        sampling=None if tell.sampling is None else SAMPLING.encode(tell.sampling),
        want=None if tell.want is None else WANT.encode(tell.want),
        guesses=_put_guesses(tell.guesses),
        has_more=tell.has_more,
    )


def _put_rows(rows: Rows | None) -> pb.Rows | None:
    if rows is None:
        return None
    return pb.Rows(codec=cast("Any", CODECS[rows.codec]), count=rows.count, width=rows.width, packed=rows.is_packed)


def _put_times(times: Iterable[HopTime]) -> list[pb.HopTime]:
    """What receivers take: a machine that stood still for minutes may have measured more."""
    return [
        pb.HopTime(
            queue_ms=min(max(time.queue_ms, 0.0), MAX_HOP_MS),
            compute_ms=min(max(time.compute_ms, 0.0), MAX_HOP_MS),
            other_ms=min(max(time.other_ms, 0.0), MAX_HOP_MS),
            link_ms=min(max(time.link_ms, 0.0), MAX_HOP_MS),
            heads=None if time.heads is None else HEADS.encode(time.heads),
        )
        for time in times
    ]


def _put_kept(flags: Sequence[bool] | None) -> bytes | None:
    return None if flags is None else np.packbits(np.array(flags, dtype=bool), bitorder="little").tobytes()


def _put_sweep_frame(frame: SweepFrame) -> pb.SweepFrame:
    kept, rows = _put_kept(frame.kept), _put_rows(frame.rows)
    return pb.SweepFrame(sweep=_put_sweep(frame.sweep), kept=kept, rows=rows, times=_put_times(frame.times))


def _put_reply(reply: Reply) -> pb.Reply:
    return pb.Reply(
        sequence=reply.sequence,
        generation=reply.generation,
        ids=[node for node, _ in reply.picks],
        tokens=[token for _, token in reply.picks],
        times=_put_times(reply.times),
        log_probs=_put_log_probs(reply),
        row_ids=reply.row_ids,
        rows=_put_rows(reply.rows),
    )


def _put_log_probs(reply: Reply) -> pb.LogProbs | None:
    if reply.log_probs is None:
        return None
    top = [one for best in reply.top_log_probs or () for one in best]
    tokens, values = [token for token, _ in top], [value for _, value in top]
    return pb.LogProbs(values=reply.log_probs, top_tokens=tokens, top_values=values)


def _put_snapshot(snapshot: Snapshot) -> pb.Snapshot:
    return pb.Snapshot(
        committed=snapshot.committed,
        sequence=snapshot.sequence,
        acked=snapshot.acked,
        next_id=snapshot.next_id,
        sampling=SAMPLING.encode(snapshot.sampling),
        ids=snapshot.ids,
        tokens=snapshot.tokens,
        sequences=snapshot.sequences,
        parents=_put_parents(snapshot.parents),
        headers=[_put_sweep(header) for header in snapshot.headers],
        kept=_put_kept(snapshot.kept),
        rows=_put_rows(snapshot.rows),
        names=snapshot.names,
    )


# What a head holds, counted on the parsed message before any of it is decoded


def _check_counts(frame: pb.Frame, kind: str, limits: HeadLimits) -> None:
    if kind in ("sweep", "ruled_sweep"):
        _check_sweep_counts(getattr(frame, kind).sweep, limits)
    elif kind in ("snapshot", "ruled_snapshot"):
        snapshot: pb.Snapshot = getattr(frame, kind)
        _at_most(snapshot.headers, limits.sweeps, "headers")
        _at_most(snapshot.ids, limits.window_tokens + limits.nodes, "ids")
        _same_columns(snapshot)
        for header in snapshot.headers:
            _check_sweep_counts(header, limits)
        _number(sum(len(header.parents) for header in snapshot.headers), "headers", limits.nodes + 1)


def _check_sweep_counts(sweep: pb.Sweep, limits: HeadLimits) -> None:
    _at_most(sweep.tokens or sweep.parents, limits.nodes, "tokens")
    _at_most(sweep.names, limits.window_tokens // BLOCK_TOKENS, "names")
    _same_nodes(sweep)
    _check_guess_counts(sweep.guesses, len(sweep.parents))


def _same_nodes(sweep: pb.Sweep) -> None:
    """One parent per token, where there are tokens."""
    if sweep.tokens:
        _same_length(len(sweep.parents), len(sweep.tokens), "parents", "tokens")


def _same_columns(snapshot: pb.Snapshot) -> None:
    """One entry per id; of tokens none, where only structure travels."""
    for field in ("tokens", "sequences", "parents") if snapshot.tokens else ("sequences", "parents"):
        _same_length(len(getattr(snapshot, field)), len(snapshot.ids), field, "ids")


def _check_guess_counts(guesses: Collection[pb.Guess], nodes: int) -> None:
    for guess in _at_most(guesses, nodes, "guesses"):
        _at_most(guess.tokens, MAX_CANDIDATES, "guesses")
        _at_most(guess.weights, MAX_CANDIDATES, "guesses")
        _at_most(guess.draws, MAX_DRAWS, "guesses")


# Sweeps, replies and snapshots from protobuf messages


def _sweep(sweep: pb.Sweep) -> Sweep:
    tokens = _numbers(sweep.tokens, "tokens", TOKEN_END)
    _same_nodes(sweep)
    _number(sweep.first_id + len(sweep.parents), "first_id")
    return Sweep(
        sequence=_number(sweep.sequence, "sequence"),
        committed=_number(sweep.committed, "committed"),
        first_id=_node_id(sweep.first_id, "first_id"),
        tokens=tokens,
        parents=_parents(sweep.parents),
        picks_from=_node_id(sweep.picks_from, "picks_from"),
        generation=_number(sweep.generation, "generation"),
        acked=_number(sweep.acked, "acked"),
        truncate_to=_number(sweep.truncate_to, "truncate_to") if sweep.HasField("truncate_to") else None,
        commit_to=_node_id(sweep.commit_to, "commit_to") if sweep.HasField("commit_to") else None,
        sampling=SAMPLING.decode(sweep.sampling) if sweep.HasField("sampling") else None,
        want=WANT.decode(sweep.want) if sweep.HasField("want") else None,
        guesses=_guesses(sweep.guesses, len(sweep.parents)) if sweep.guesses else (),
        names=_names(sweep.names, sweep.committed) if sweep.names else (),
    )


def _tell(tell: pb.Tell) -> Tell:
    ids = cast("tuple[TreeNodeId, ...]", _numbers(tell.ids, "ids", most=MAX_TELL_NODES))
    _same_length(len(tell.tokens), len(ids), "tokens", "ids")
    _check_guess_counts(tell.guesses, MAX_TELL_NODES)
    return Tell(
        sequence=_number(tell.sequence, "sequence"),
        ids=ids,
        tokens=_numbers(tell.tokens, "tokens", TOKEN_END),
        sampling=SAMPLING.decode(tell.sampling) if tell.HasField("sampling") else None,
        want=WANT.decode(tell.want) if tell.HasField("want") else None,
        guesses=_guesses(tell.guesses, MAX_NODES) if tell.guesses else (),
        has_more=tell.has_more,
    )


def _guesses(guesses: Collection[pb.Guess], nodes: int) -> tuple[DraftDistribution, ...]:
    """At most one per node of a sweep, by rising offsets."""
    found: list[DraftDistribution] = []
    for sent in _at_most(guesses, nodes, "guesses"):
        guess = DraftDistribution(sent.offset, tuple(sent.tokens), tuple(sent.weights), tuple(sent.draws))
        problem = guess.problem(TOKEN_END)
        if problem is not None:
            raise RemoteProtocolError("guesses", problem)
        if guess.offset >= nodes or (found and guess.offset <= found[-1].offset):
            raise RemoteProtocolError("guesses", f"offset {guess.offset} is not below {nodes} or not rising")
        found.append(guess)
    return tuple(found)


def _kept(bitmap: bytes, nodes: int) -> tuple[bool, ...]:
    _same_length(len(bitmap), (nodes + 7) // 8, "kept", f"bytes in a bitmap of {nodes} nodes")
    flags = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little")
    if flags[nodes:].any():
        raise RemoteProtocolError("kept", f"bits beyond the sweep's {nodes} nodes are set")
    return tuple(flags[:nodes].astype(bool).tolist())


_CODECS: Final = {number: codec for codec, number in CODECS.items()}


def _rows(rows: pb.Rows, expected: int, of: str) -> Rows:
    _same_length(rows.count, expected, "rows", of)
    _number(rows.count, "rows", MAX_NODES + 1)
    if not 1 <= rows.width <= MAX_WIDTH:
        raise RemoteProtocolError("rows", f"width {rows.width} is not in 1 … {MAX_WIDTH}")
    if (codec := _CODECS.get(rows.codec)) is None:
        known = ", ".join(codec.value for codec in Codec)
        raise RemoteProtocolError("codec", f"{unknown_here(f'codec {rows.codec}')}; it has {known}")
    if rows.packed and codec is Codec.INT8:
        raise RemoteProtocolError("codec", f"{codec.value} rows are never packed")
    return Rows(codec, rows.count, rows.width, b"", rows.packed)


def _times(times: Collection[pb.HopTime]) -> tuple[HopTime, ...]:
    return tuple(
        HopTime(
            _between(time.queue_ms, "queue_ms", 0.0, MAX_HOP_MS),
            _between(time.compute_ms, "compute_ms", 0.0, MAX_HOP_MS),
            _between(time.other_ms, "other_ms", 0.0, MAX_HOP_MS),
            _between(time.link_ms, "link_ms", 0.0, MAX_HOP_MS),
            HEADS.decode(time.heads) if time.HasField("heads") else None,
        )
        for time in _at_most(times, MAX_HOPS, "times")
    )


def _sweep_frame(frame: pb.SweepFrame) -> SweepFrame:
    _present(frame, "sweep")
    sweep = _sweep(frame.sweep)
    kept = _kept(frame.kept, sweep.count) if frame.HasField("kept") else None
    count = sweep.count if kept is None else sum(kept)
    rows = _rows(frame.rows, count, "kept nodes") if frame.HasField("rows") else None
    return SweepFrame(sweep, kept, rows, _times(frame.times))


def _reply(reply: pb.Reply) -> Reply:
    ids = _node_ids(reply.ids, "ids")
    tokens = _numbers(reply.tokens, "tokens", TOKEN_END)
    _same_length(len(tokens), len(ids), "tokens", "ids")
    log_probs, top = _log_probs(reply.log_probs, len(ids)) if reply.HasField("log_probs") else (None, None)
    row_ids = _node_ids(reply.row_ids, "row_ids")
    rows = _rows(reply.rows, len(row_ids), "row ids") if reply.HasField("rows") else None
    if row_ids and rows is None:
        raise RemoteProtocolError("rows", f"are missing for {len(row_ids)} row ids")
    return Reply(
        sequence=_number(reply.sequence, "sequence"),
        generation=_number(reply.generation, "generation"),
        picks=tuple(zip(ids, tokens, strict=True)),
        times=_times(reply.times),
        log_probs=log_probs,
        row_ids=row_ids,
        rows=rows,
        top_log_probs=top,
    )


TopLogProbs = tuple[tuple[tuple[int, float], ...], ...]


def _log_probs(log_probs: pb.LogProbs, picks: int) -> tuple[tuple[float, ...], TopLogProbs | None]:
    """The log-probabilities of so many picks, and of the likeliest tokens at each; None where none were sent."""
    _same_length(len(log_probs.values), picks, "log_probs", "ids")
    values = tuple(_between(value, "log_probs", -MAX_FLOAT32, 0.0) for value in log_probs.values)
    tokens = _numbers(log_probs.top_tokens, "top_log_probs", TOKEN_END, MAX_NODES * MAX_TOP_LOG_PROBS)
    _same_length(len(log_probs.top_values), len(tokens), "top_log_probs", "tokens")
    if not tokens:
        return values, None
    top, rest = divmod(len(tokens), max(picks, 1))
    if rest or top > MAX_TOP_LOG_PROBS:
        raise RemoteProtocolError("top_log_probs", f"{len(tokens)} tokens for {picks} picks")
    theirs = (_between(value, "top_log_probs", -MAX_FLOAT32, 0.0) for value in log_probs.top_values)
    pairs = tuple(zip(tokens, theirs, strict=True))
    return values, tuple(pairs[start : start + top] for start in range(0, len(pairs), top))


def _snapshot(snapshot: pb.Snapshot) -> Snapshot:
    _present(snapshot, "sampling")
    ids = _node_ids(snapshot.ids, "ids")
    _same_columns(snapshot)
    kept = _kept(snapshot.kept, len(ids)) if snapshot.HasField("kept") else None
    count = len(ids) if kept is None else sum(kept)
    return Snapshot(
        committed=_number(snapshot.committed, "committed", len(ids) + 1),
        sequence=_number(snapshot.sequence, "sequence"),
        acked=_number(snapshot.acked, "acked"),
        next_id=_node_id(snapshot.next_id, "next_id"),
        sampling=SAMPLING.decode(snapshot.sampling),
        ids=ids,
        tokens=_numbers(snapshot.tokens, "tokens", TOKEN_END),
        sequences=_numbers(snapshot.sequences, "sequences"),
        parents=_parents(snapshot.parents),
        headers=tuple(_sweep(header) for header in _at_most(snapshot.headers, MAX_HEADERS, "headers")),
        kept=kept,
        rows=_rows(snapshot.rows, count, "kept nodes") if snapshot.HasField("rows") else None,
        names=_names(snapshot.names, snapshot.committed),
    )


def _names(names: Collection[bytes], committed: int) -> tuple[bytes, ...]:
    """Of blocks of so many tokens at most."""
    found = tuple(_at_most(names, committed // BLOCK_TOKENS, "names"))
    if any(len(name) != NAME_BYTES for name in found):
        raise RemoteProtocolError("names", f"one does not have {NAME_BYTES} bytes")
    return found


# Checks: each returns its value or raises `RemoteProtocolError` with the field's name


def _number(value: int, field: str, end: int = ID_END) -> int:
    """`value` in `[0, end)`."""
    if not 0 <= value < end:
        raise RemoteProtocolError(field, f"{value} is not in 0 … {end - 1}")
    return value


def _numbers(values: Collection[int], field: str, end: int = ID_END, most: int = MAX_NODES) -> tuple[int, ...]:
    """At most `most` values in `[0, end)`."""
    found = tuple(_at_most(values, most, field))
    if found:
        _number(min(found), field, end)
        _number(max(found), field, end)
    return found


def _at_most(values: S, limit: int, field: str) -> S:
    """No more than `limit` values."""
    if len(values) > limit:
        raise RemoteProtocolError(field, f"{len(values)} are too many, the limit is {limit}")
    return values


def _same_length(count: int, expected: int, field: str, of: str) -> None:
    """That a list has one entry per `of`."""
    if count != expected:
        raise RemoteProtocolError(field, f"{count}, but there are {expected} {of}")


def _between(value: float, field: str, low: float, high: float) -> float:
    """In `[low, high]`, so never infinite and never NaN."""
    if not low <= value <= high:
        raise RemoteProtocolError(field, f"{value} is not in {low:g} … {high:g}")
    return value


def _node_id(value: int, field: str) -> TreeNodeId:
    return TreeNodeId(_number(value, field))


def _node_ids(values: Collection[int], field: str) -> tuple[TreeNodeId, ...]:
    return cast("tuple[TreeNodeId, ...]", _numbers(values, field))


def _parents(values: Collection[int]) -> tuple[TreeNodeId | None, ...]:
    """Ids of parents; the wire's -1, the tip, becomes None."""
    found = tuple(_at_most(values, MAX_NODES, "parents"))
    if found and not TIP <= min(found) <= max(found) < ID_END:
        raise RemoteProtocolError("parents", "a parent is -1 (the tip) or an id below 2^63")
    return tuple(None if parent == TIP else TreeNodeId(parent) for parent in found)


def _present(message: Message, field: str) -> None:
    """That a nested message was not left out."""
    if not message.HasField(field):
        raise RemoteProtocolError(field, f"is missing in {message.DESCRIPTOR.name}")
