"""Protobuf bytes to typed messages. The bytes are untrusted: whatever is wrong with them is a `RemoteProtocolError`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId
from swarm.protocol import checks, encoding
from swarm.protocol.counts import check_counts
from swarm.protocol.hold import Held, Hold
from swarm.protocol.limits import (
    MAX_AUX_LAYERS,
    MAX_COUNT,
    MAX_HEADERS,
    MAX_HOLD_S,
    MAX_HOPS,
    MAX_LAYERS,
    MAX_NODES,
    MAX_PROMPT_ROWS,
    MAX_RECORD_BYTES,
    MAX_SIGNATURE_BYTES,
    MAX_TEMPERATURE,
    MAX_WIDTH,
    PADDING_BYTES,
    PEER_CHARACTERS,
    REASON_CHARACTERS,
    SESSION_KEY_BYTES,
    SESSION_SIGNATURE_BYTES,
    TEXT_CHARACTERS,
    TOKEN_DIGEST_BYTES,
    HeadLimits,
)
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Close,
    Codec,
    Credits,
    Fault,
    Fork,
    Frame,
    Hedge,
    HopTime,
    Open,
    Ping,
    Pong,
    Ready,
    RepliesRequest,
    RepliesUp,
    Reply,
    Reroute,
    RouteHop,
    Rows,
    Sampling,
    Snapshot,
    Sweep,
    SweepFrame,
    Upstream,
    Want,
)
from swarm.protocol.node_info import Counters, NodeInfo
from swarm.protocol.pick_rules import MAX_TOP_LOG_PROBS
from swarm.protocol.picks import decode_guesses, decode_log_probs, decode_rules
from swarm.protocol.v1 import node_pb2 as pb
from swarm.runtime.version import unknown_here

CODECS = {int(value): codec for codec, value in encoding.CODECS.items()}
FAULT_KINDS = {int(value): kind for kind, value in encoding.FAULT_KINDS.items()}
M = TypeVar("M", bound=Message)


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


def decode_frame(data: bytes | bytearray, limits: HeadLimits | None = None) -> Frame:
    """A frame's head; `Rows.data` is still empty.

    Args:
        data: the head's bytes.
        limits: what it may hold; what holds more is refused before any of it is decoded.

    Raises:
        RemoteProtocolError: the field that breaks the wire's rules.
    """
    frame = _parsed(pb.Frame(), data)
    if limits is not None:
        check_counts(frame, limits)
    match frame.WhichOneof("kind"):
        case "sweep" | "ruled_sweep" as kind:
            return _sweep_frame(getattr(frame, kind))
        case "reply":
            return _reply(frame.reply)
        case "attach" | "wide_attach" as kind:
            return _attach(getattr(frame, kind))
        case "reroute" | "wide_reroute" as kind:
            return _reroute(getattr(frame, kind))
        case "snapshot" | "ruled_snapshot" as kind:
            return _snapshot(getattr(frame, kind))
        case "close":
            reason = checks.printable(checks.at_most(frame.close.reason, REASON_CHARACTERS, "reason"), "reason")
            return Close(reason, frame.close.dismissed)
        case "ping":
            checks.at_most(frame.ping.padding, PADDING_BYTES, "padding")
            return Ping(frame.ping.nonce)
        case "fault":
            return _fault(frame.fault)
    raise _no_known_kind(frame)


def decode_upstream(data: bytes) -> Upstream:
    """One message from a link's downstream side.

    Raises:
        RemoteProtocolError: the field that breaks the wire's rules.
    """
    upstream = _parsed(pb.Upstream(), data)
    match upstream.WhichOneof("kind"):
        case "attached":
            received = upstream.attached.received if upstream.attached.HasField("received") else None
            return Attached(
                generation=checks.number(upstream.attached.generation, "generation"),
                received=None if received is None else checks.number(received, "received"),
            )
        case "ready":
            checks.present(upstream.ready, "credits")
            credits_ = upstream.ready.credits
            return Ready(
                generation=checks.number(upstream.ready.generation, "generation"),
                credits=Credits(
                    checks.positive(credits_.window_tokens, "window_tokens"),
                    checks.positive(credits_.sweeps, "sweeps"),
                    checks.positive(credits_.nodes, "nodes"),
                    credits_.forked,
                ),
            )
        case "ack":
            ack = upstream.ack
            return Ack(
                checks.number(ack.sequence, "sequence"),
                checks.number(ack.parts, "parts"),
                checks.number(ack.working, "working"),
            )
        case "pong":
            return Pong(upstream.pong.nonce)
        case "fault":
            return _fault(upstream.fault)
    raise _no_known_kind(upstream)


def decode_replies_up(data: bytes) -> RepliesUp:
    """One message of the client on a reply stream.

    Raises:
        RemoteProtocolError: the field that breaks the wire's rules.
    """
    message = _parsed(pb.RepliesUp(), data)
    match message.WhichOneof("kind"):
        case "request":
            return RepliesRequest(
                session=checks.session_id(message.request.session),
                generation=checks.number(message.request.generation, "generation"),
                acked=checks.number(message.request.acked, "acked"),
                may_wait=message.request.may_wait,
            )
        case "pong":
            return Pong(message.pong.nonce)
    raise _no_known_kind(message)


def decode_hold(data: bytes) -> Hold:
    """The request of Hold.

    Raises:
        RemoteProtocolError: the field that breaks the wire's rules.
    """
    hold = _parsed(pb.HoldRequest(), data)
    return Hold(
        session=checks.session_id(hold.session),
        generation=checks.number(hold.generation, "generation"),
        ttl_s=checks.between(hold.ttl_s, "ttl_s", 0.0, MAX_HOLD_S),
        is_release=hold.release,
    )


def decode_held(data: bytes) -> Held:
    """The answer to Hold.

    Raises:
        RemoteProtocolError: the field that breaks the wire's rules.
    """
    held = _parsed(pb.HoldReply(), data)
    return Held(
        held=held.held,
        generation=checks.number(held.generation, "generation"),
        is_ready=held.ready,
        received=checks.number(held.received, "received"),
        passed=checks.number(held.passed, "passed"),
        working=checks.number(held.working, "working"),
    )


def decode_part(data: bytes) -> FramePart:
    """One part of a frame.

    Raises:
        RemoteProtocolError: not a Part.
    """
    part = _parsed(pb.Part(), data)
    return FramePart(part.head_bytes, part.rows_bytes, part.data)


def decode_info(data: bytes) -> NodeInfo:
    """The answer to Info.

    Raises:
        RemoteProtocolError: the field that breaks the wire's rules.
    """
    info = _parsed(pb.InfoReply(), data)
    checks.present(info, "counters")
    counters = {
        field.name: checks.number(getattr(info.counters, field.name), field.name, MAX_COUNT + 1)
        for field in fields(Counters)
    }
    kv_tokens = checks.number(info.kv_tokens_total, "kv_tokens_total", MAX_COUNT + 1)
    return NodeInfo(
        name=_text(info.name, "name"),
        fingerprint=_text(info.fingerprint, "fingerprint"),
        config_digest=_text(info.config_digest, "config_digest"),
        weights_digest=_text(info.weights_digest, "weights_digest"),
        tokenizer_digest=_text(info.tokenizer_digest, "tokenizer_digest"),
        num_layers=checks.positive(info.num_layers, "num_layers", MAX_LAYERS + 1),
        span=checks.layers(info.span.start, info.span.end, info.num_layers),
        vocab_size=checks.positive(info.vocab_size, "vocab_size", checks.TOKEN_END + 1),
        hidden_size=checks.positive(info.hidden_size, "hidden_size", MAX_WIDTH + 1),
        numeric_class=_text(info.numeric_class, "numeric_class"),
        version=_text(info.version, "version"),
        kv_tokens_total=kv_tokens,
        kv_tokens_free=checks.number(info.kv_tokens_free, "kv_tokens_free", kv_tokens + 1),
        sessions=info.sessions,
        counters=Counters(**counters),
    )


def _parsed(message: M, data: bytes | bytearray) -> M:
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        raise RemoteProtocolError("bytes", f"not a {message.DESCRIPTOR.name} message") from error
    return message


def _no_known_kind(message: Message) -> RemoteProtocolError:
    """Names what a later release put in the place of a kind; the number, since only that one knows its name."""
    unknown: Any = UnknownFieldSet(message)  # its stubs do not say that it is a sequence
    numbers = sorted({field.field_number for field in unknown})
    name = message.DESCRIPTOR.name
    if not numbers:
        return RemoteProtocolError("kind", f"{name} of no kind")
    return RemoteProtocolError("kind", unknown_here(f"{name} of kind {numbers[0]}"))


def _text(value: str, field: str) -> str:
    return checks.at_most(value, TEXT_CHARACTERS, field)


def _codec(value: int) -> Codec:
    if value not in CODECS:
        known = ", ".join(codec.value for codec in Codec)
        raise RemoteProtocolError("codec", f"{unknown_here(f'codec {value}')}; it has {known}")
    return CODECS[value]


def _sweep(sweep: pb.Sweep) -> Sweep:
    tokens = checks.numbers(sweep.tokens, "tokens", checks.TOKEN_END)
    checks.same_length(len(sweep.parents), len(tokens), "parents", "tokens")
    checks.number(sweep.first_id + len(tokens), "first_id")
    return Sweep(
        sequence=checks.number(sweep.sequence, "sequence"),
        committed=checks.number(sweep.committed, "committed"),
        first_id=checks.node_id(sweep.first_id, "first_id"),
        tokens=tokens,
        parents=checks.parents(sweep.parents, "parents"),
        picks_from=checks.node_id(sweep.picks_from, "picks_from"),
        generation=checks.number(sweep.generation, "generation"),
        acked=checks.number(sweep.acked, "acked"),
        truncate_to=checks.number(sweep.truncate_to, "truncate_to") if sweep.HasField("truncate_to") else None,
        commit_to=checks.node_id(sweep.commit_to, "commit_to") if sweep.HasField("commit_to") else None,
        sampling=_sampling(sweep.sampling) if sweep.HasField("sampling") else None,
        want=_want(sweep.want) if sweep.HasField("want") else None,
        guesses=decode_guesses(sweep.guesses, len(tokens)),
    )


def _sampling(sampling: pb.Sampling) -> Sampling:
    top_k = sampling.top_k if sampling.HasField("top_k") else None
    if top_k == 0:
        raise RemoteProtocolError("top_k", "0 would leave no token")
    return Sampling(
        seed=sampling.seed,
        temperature=checks.between(sampling.temperature, "temperature", 0.0, MAX_TEMPERATURE),
        top_k=top_k,
        top_p=checks.fraction(sampling.top_p, "top_p") if sampling.HasField("top_p") else None,
        min_p=checks.fraction(sampling.min_p, "min_p") if sampling.HasField("min_p") else None,
        multistep=sampling.multistep,
        rules=decode_rules(sampling.rules) if sampling.HasField("rules") else None,
    )


def _want(want: pb.Want) -> Want:
    return Want(
        log_probs=want.log_probs,
        hidden_rows=want.hidden_rows,
        top_log_probs=checks.number(want.top_log_probs, "want", MAX_TOP_LOG_PROBS + 1),
        prompt_rows=checks.number(want.prompt_rows, "want", MAX_PROMPT_ROWS + 1),
    )


def _kept(bitmap: bytes, nodes: int) -> tuple[bool, ...]:
    checks.same_length(len(bitmap), (nodes + 7) // 8, "kept", f"bytes in a bitmap of {nodes} nodes")
    flags = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little")
    if flags[nodes:].any():
        raise RemoteProtocolError("kept", f"bits beyond the sweep's {nodes} nodes are set")
    return tuple(flags[:nodes].astype(bool).tolist())


def _rows(rows: pb.Rows, expected: int, of: str) -> Rows:
    checks.same_length(rows.count, expected, "rows", of)
    checks.number(rows.count, "rows", MAX_NODES + 1)
    if not 1 <= rows.width <= MAX_WIDTH:
        raise RemoteProtocolError("rows", f"width {rows.width} is not in 1 … {MAX_WIDTH}")
    return Rows(_codec(rows.codec), rows.count, rows.width, b"")


def _times(times: Collection[pb.HopTime]) -> tuple[HopTime, ...]:
    return tuple(
        HopTime(
            checks.milliseconds(time.queue_ms, "queue_ms"),
            checks.milliseconds(time.compute_ms, "compute_ms"),
            checks.milliseconds(time.other_ms, "other_ms"),
            checks.milliseconds(time.link_ms, "link_ms"),
        )
        for time in checks.at_most(times, MAX_HOPS, "times")
    )


def _sweep_frame(frame: pb.SweepFrame) -> SweepFrame:
    checks.present(frame, "sweep")
    sweep = _sweep(frame.sweep)
    kept = _kept(frame.kept, len(sweep.tokens)) if frame.HasField("kept") else None
    count = len(sweep.tokens) if kept is None else sum(kept)
    rows = _rows(frame.rows, count, "kept nodes") if frame.HasField("rows") else None
    return SweepFrame(sweep, kept, rows, _times(frame.times))


def _reply(reply: pb.Reply) -> Reply:
    ids = checks.node_ids(reply.ids, "ids")
    tokens = checks.numbers(reply.tokens, "tokens", checks.TOKEN_END)
    checks.same_length(len(tokens), len(ids), "tokens", "ids")
    log_probs, top = decode_log_probs(reply.log_probs, len(ids)) if reply.HasField("log_probs") else (None, None)
    row_ids = checks.node_ids(reply.row_ids, "row_ids")
    rows = _rows(reply.rows, len(row_ids), "row ids") if reply.HasField("rows") else None
    if row_ids and rows is None:
        raise RemoteProtocolError("rows", f"are missing for {len(row_ids)} row ids")
    return Reply(
        sequence=checks.number(reply.sequence, "sequence"),
        generation=checks.number(reply.generation, "generation"),
        picks=tuple(zip(ids, tokens, strict=True)),
        times=_times(reply.times),
        log_probs=log_probs,
        row_ids=row_ids,
        rows=rows,
        top_log_probs=top,
    )


def _route(route: Collection[pb.RouteHop]) -> tuple[RouteHop, ...]:
    hops = checks.at_most(route, MAX_HOPS, "route")
    if not hops or not all(hop.peer for hop in hops):
        raise RemoteProtocolError("route", "is empty or has a hop without a peer id")
    return tuple(
        RouteHop(PeerId(checks.at_most(hop.peer, PEER_CHARACTERS, "peer")), checks.layers(hop.span.start, hop.span.end))
        for hop in hops
    )


def _attach(attach: pb.Attach) -> Attach:
    route = _route(attach.route)
    return Attach(
        session=checks.session_id(attach.session),
        generation=checks.number(attach.generation, "generation"),
        route=route,
        index=checks.number(attach.index, "index", len(route)),
        open=_open(attach.open),
        hedge=_hedge(attach, route),
        records=_records(attach.records, route),
        signature=checks.exactly(attach.signature, SESSION_SIGNATURE_BYTES, "signature"),
    )


def _reroute(reroute: pb.Reroute) -> Reroute:
    route = _route(reroute.route)
    return Reroute(
        generation=checks.number(reroute.generation, "generation"),
        route=route,
        open=_open(reroute.open),
        hedge=_hedge(reroute, route),
        records=_records(reroute.records, route),
        signature=checks.exactly(reroute.signature, SESSION_SIGNATURE_BYTES, "signature"),
    )


def _open(opened: pb.Open) -> Open:
    return Open(
        fingerprint=_text(opened.fingerprint, "fingerprint"),
        window_tokens=checks.positive(opened.window_tokens, "window_tokens"),
        sweeps=checks.positive(opened.sweeps, "sweeps"),
        nodes=checks.positive(opened.nodes, "nodes"),
        codec=_codec(opened.codec),
        session_key=checks.exactly(opened.session_key, SESSION_KEY_BYTES, "session_key"),
        aux_layers=_aux_layers(opened.aux_layers),
        fork=_fork(opened.fork) if opened.HasField("fork") else None,
    )


def _fork(fork: pb.Fork) -> Fork:
    return Fork(
        session=checks.session_id(fork.session),
        tokens=checks.positive(fork.tokens, "fork"),
        digest=checks.exactly(fork.digest, TOKEN_DIGEST_BYTES, "fork"),
        signature=checks.exactly(fork.signature, SESSION_SIGNATURE_BYTES, "fork"),
    )


def _aux_layers(layers: Collection[int]) -> tuple[int, ...]:
    found = tuple(checks.at_most(layers, MAX_AUX_LAYERS, "aux_layers"))
    if any(before >= after for before, after in pairwise((0, *found, MAX_LAYERS))):
        raise RemoteProtocolError("aux_layers", f"rise within 1 … {MAX_LAYERS - 1}")
    return found


def _records(records: Collection[bytes], route: Collection[RouteHop]) -> tuple[bytes, ...]:
    """Sealed records, one per hop and one for a replica: their signatures are checked where one is used."""
    limited = checks.at_most(records, len(route) + 1, "records")
    return tuple(checks.at_most(record, MAX_RECORD_BYTES, "records") for record in limited)


def _hedge(message: pb.Attach | pb.Reroute, route: Collection[RouteHop]) -> Hedge | None:
    if not message.HasField("hedge"):
        return None
    replica = PeerId(checks.at_most(message.hedge.replica, PEER_CHARACTERS, "replica"))
    if not replica or replica in {hop.peer for hop in route}:
        raise RemoteProtocolError(
            "replica", f"{replica or 'nobody'} is no second machine: it stands in the route itself"
        )
    return Hedge(checks.number(message.hedge.index, "hedge", len(route)), replica)


def _snapshot(snapshot: pb.Snapshot) -> Snapshot:
    checks.present(snapshot, "sampling")
    ids = checks.node_ids(snapshot.ids, "ids")
    for field in ("tokens", "sequences", "parents"):
        checks.same_length(len(getattr(snapshot, field)), len(ids), field, "ids")
    kept = _kept(snapshot.kept, len(ids)) if snapshot.HasField("kept") else None
    count = len(ids) if kept is None else sum(kept)
    return Snapshot(
        committed=checks.number(snapshot.committed, "committed", len(ids) + 1),
        sequence=checks.number(snapshot.sequence, "sequence"),
        acked=checks.number(snapshot.acked, "acked"),
        next_id=checks.node_id(snapshot.next_id, "next_id"),
        sampling=_sampling(snapshot.sampling),
        ids=ids,
        tokens=checks.numbers(snapshot.tokens, "tokens", checks.TOKEN_END),
        sequences=checks.numbers(snapshot.sequences, "sequences"),
        parents=checks.parents(snapshot.parents, "parents"),
        headers=tuple(_sweep(header) for header in checks.at_most(snapshot.headers, MAX_HEADERS, "headers")),
        kept=kept,
        rows=_rows(snapshot.rows, count, "kept nodes") if snapshot.HasField("rows") else None,
    )


def _fault(fault: pb.Fault) -> Fault:
    if fault.kind not in FAULT_KINDS:
        raise RemoteProtocolError("kind", unknown_here(f"kind of fault {int(fault.kind)}"))
    return Fault(
        generation=checks.number(fault.generation, "generation"),
        peer=checks.peer_id(fault.peer, "peer"),
        kind=FAULT_KINDS[fault.kind],
        field=checks.printable(_text(fault.field, "field"), "field"),
        reason=checks.printable(checks.at_most(fault.reason, REASON_CHARACTERS, "reason"), "reason"),
        reporter=checks.peer_id(fault.reporter, "reporter") if fault.reporter else None,
        signature=checks.at_most(fault.signature, MAX_SIGNATURE_BYTES, "signature"),
    )
