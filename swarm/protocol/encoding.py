"""Typed messages to protobuf bytes. A value that the wire cannot hold is a bug here: `LocalProtocolError`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TypeVar, assert_never

import numpy as np
from google.protobuf.message import Message

from swarm.errors import LocalProtocolError
from swarm.ids import TreeNodeId
from swarm.protocol import pick_rules
from swarm.protocol.checks import TIP
from swarm.protocol.faults import one_line
from swarm.protocol.hold import Held, Hold
from swarm.protocol.limits import MAX_HOP_MS, REASON_CHARACTERS
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Close,
    Codec,
    Fault,
    FaultKind,
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
)
from swarm.protocol.node_info import NodeInfo
from swarm.protocol.pick_rules import GrammarKind, PickRules
from swarm.protocol.v1 import node_pb2 as pb

CODECS: dict[Codec, pb.Codec.ValueType] = {
    Codec.FP32: pb.CODEC_FP32,
    Codec.FP16: pb.CODEC_FP16,
    Codec.BF16: pb.CODEC_BF16,
    Codec.INT8: pb.CODEC_INT8,
}
FAULT_KINDS: dict[FaultKind, pb.FaultKind.ValueType] = {
    kind: pb.FaultKind.Value(f"FAULT_KIND_{kind.name}") for kind in FaultKind
}
GRAMMAR_KINDS: dict[GrammarKind, pb.GrammarKind.ValueType] = {
    kind: pb.GrammarKind.Value(f"GRAMMAR_KIND_{kind.upper()}") for kind in pick_rules.GRAMMAR_KINDS
}
LENGTH_DELIMITED = 2  # protobuf's wire type of a `bytes` field
DATA_KEY = bytes([pb.Part.DATA_FIELD_NUMBER << 3 | LENGTH_DELIMITED])
T = TypeVar("T")


def encode_frame(message: Frame) -> bytes:
    """The head of a frame: everything but its row values."""
    return _bytes(_frame, message)


def encode_upstream(message: Upstream) -> bytes:
    """One message from a link's downstream side."""
    return _bytes(_upstream, message)


def encode_replies_up(message: RepliesUp) -> bytes:
    """One message of the client on a reply stream."""
    return _bytes(_replies_up, message)


def encode_info(info: NodeInfo) -> bytes:
    """The answer to Info."""
    return _bytes(_info, info)


def encode_hold(hold: Hold) -> bytes:
    """The request of Hold."""
    return _bytes(
        lambda h: pb.HoldRequest(session=h.session, generation=h.generation, ttl_s=h.ttl_s, release=h.is_release), hold
    )


def encode_held(held: Held) -> bytes:
    """The answer to Hold."""
    return _bytes(
        lambda h: pb.HoldReply(
            held=h.held,
            generation=h.generation,
            ready=h.is_ready,
            received=h.received,
            passed=h.passed,
            working=h.working,
        ),
        held,
    )


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


def _varint(value: int) -> bytes:
    septets = bytearray()
    while value > 0x7F:
        septets.append(value & 0x7F | 0x80)
        value >>= 7
    septets.append(value)
    return bytes(septets)


def _bytes(build: Callable[[T], Message], message: T) -> bytes:
    try:
        return build(message).SerializeToString()
    except (ValueError, TypeError, OverflowError) as error:
        raise LocalProtocolError(type(message).__name__, f"does not fit the wire: {error}") from error


def _frame(message: Frame) -> pb.Frame:
    match message:
        case SweepFrame():
            frame = _sweep_frame(message)
            return pb.Frame(ruled_sweep=frame) if _has_rules(message.sweep) else pb.Frame(sweep=frame)
        case Reply():
            return pb.Frame(reply=_reply(message))
        case Attach():
            attach = _attach(message)
            return pb.Frame(wide_attach=attach) if message.open.aux_layers else pb.Frame(attach=attach)
        case Reroute():
            reroute = _reroute(message)
            return pb.Frame(wide_reroute=reroute) if message.open.aux_layers else pb.Frame(reroute=reroute)
        case Snapshot():
            snapshot = _snapshot(message)
            return pb.Frame(ruled_snapshot=snapshot) if _has_rules(message) else pb.Frame(snapshot=snapshot)
        case Close():
            return pb.Frame(close=pb.Close(reason=_reason(message.reason), dismissed=message.dismissed))
        case Ping():
            return pb.Frame(ping=pb.Ping(nonce=message.nonce, padding=message.padding))
        case Fault():
            return pb.Frame(fault=_fault(message))
    assert_never(message)


def _upstream(message: Upstream) -> pb.Upstream:
    match message:
        case Attached():
            return pb.Upstream(attached=pb.Attached(generation=message.generation, received=message.received))
        case Ready():
            credits_ = pb.Credits(**asdict(message.credits))
            return pb.Upstream(ready=pb.Ready(generation=message.generation, credits=credits_))
        case Ack():
            return pb.Upstream(ack=pb.Ack(sequence=message.sequence, parts=message.parts, working=message.working))
        case Pong():
            return pb.Upstream(pong=pb.Pong(nonce=message.nonce))
        case Fault():
            return pb.Upstream(fault=_fault(message))
    assert_never(message)


def _replies_up(message: RepliesUp) -> pb.RepliesUp:
    match message:
        case RepliesRequest():
            return pb.RepliesUp(request=pb.RepliesRequest(**asdict(message)))
        case Pong():
            return pb.RepliesUp(pong=pb.Pong(nonce=message.nonce))
    assert_never(message)


def _has_rules(message: Sweep | Snapshot) -> bool:
    """Whether a release that knows no rules must refuse it: it would read past them, and pick without (V2)."""
    return message.sampling is not None and message.sampling.rules is not None


def _sampling(sampling: Sampling | None) -> pb.Sampling | None:
    if sampling is None:
        return None
    return pb.Sampling(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        multistep=sampling.multistep,
        rules=None if sampling.rules is None else _rules(sampling.rules),
    )


def _rules(rules: PickRules) -> pb.PickRules:
    grammar = rules.grammar
    return pb.PickRules(
        start=rules.start,
        frequency_penalty=rules.frequency_penalty,
        presence_penalty=rules.presence_penalty,
        repetition_penalty=rules.repetition_penalty,
        bias_tokens=[token for token, _ in rules.logit_bias],
        biases=[bias for _, bias in rules.logit_bias],
        grammar=None if grammar is None else pb.Grammar(kind=GRAMMAR_KINDS[grammar.kind], text=grammar.text),
        end_tokens=rules.end_tokens,
    )


def _parents(parents: Iterable[TreeNodeId | None]) -> list[int]:
    return [TIP if parent is None else parent for parent in parents]


def _sweep(sweep: Sweep) -> pb.Sweep:
    want = None if sweep.want is None else pb.Want(**asdict(sweep.want))
    return pb.Sweep(
        sequence=sweep.sequence,
        generation=sweep.generation,
        truncate_to=sweep.truncate_to,
        commit_to=sweep.commit_to,
        committed=sweep.committed,
        acked=sweep.acked,
        sampling=_sampling(sweep.sampling),
        first_id=sweep.first_id,
        tokens=sweep.tokens,
        parents=_parents(sweep.parents),
        picks_from=sweep.picks_from,
        want=want,
        guesses=[pb.Guess(**asdict(guess)) for guess in sweep.guesses],
    )


def _rows(rows: Rows | None) -> pb.Rows | None:
    return None if rows is None else pb.Rows(codec=CODECS[rows.codec], count=rows.count, width=rows.width)


def _times(times: Iterable[HopTime]) -> list[pb.HopTime]:
    """What receivers take: a machine that stood still for minutes may have measured more."""
    return [pb.HopTime(**{part: min(max(ms, 0.0), MAX_HOP_MS) for part, ms in asdict(time).items()}) for time in times]


def _sweep_frame(frame: SweepFrame) -> pb.SweepFrame:
    kept = _bitmap(frame.kept)
    return pb.SweepFrame(sweep=_sweep(frame.sweep), kept=kept, rows=_rows(frame.rows), times=_times(frame.times))


def _bitmap(flags: Sequence[bool] | None) -> bytes | None:
    return None if flags is None else np.packbits(np.array(flags, dtype=bool), bitorder="little").tobytes()


def _reply(reply: Reply) -> pb.Reply:
    return pb.Reply(
        sequence=reply.sequence,
        generation=reply.generation,
        ids=[node for node, _ in reply.picks],
        tokens=[token for _, token in reply.picks],
        times=_times(reply.times),
        log_probs=_log_probs(reply),
        row_ids=reply.row_ids,
        rows=_rows(reply.rows),
    )


def _log_probs(reply: Reply) -> pb.LogProbs | None:
    if reply.log_probs is None:
        return None
    top = [one for best in reply.top_log_probs or () for one in best]
    return pb.LogProbs(
        values=reply.log_probs, top_tokens=[token for token, _ in top], top_values=[value for _, value in top]
    )


def _route(route: Iterable[RouteHop]) -> list[pb.RouteHop]:
    return [pb.RouteHop(peer=hop.peer, span=pb.Span(start=hop.span.start, end=hop.span.end)) for hop in route]


def _attach(attach: Attach) -> pb.Attach:
    return pb.Attach(
        session=attach.session,
        generation=attach.generation,
        route=_route(attach.route),
        index=attach.index,
        open=_open(attach.open),
        hedge=_hedge(attach.hedge),
        records=attach.records,
        signature=attach.signature,
    )


def _reroute(reroute: Reroute) -> pb.Reroute:
    return pb.Reroute(
        generation=reroute.generation,
        route=_route(reroute.route),
        open=_open(reroute.open),
        hedge=_hedge(reroute.hedge),
        records=reroute.records,
        signature=reroute.signature,
    )


def _open(opened: Open) -> pb.Open:
    return pb.Open(
        fingerprint=opened.fingerprint,
        window_tokens=opened.window_tokens,
        sweeps=opened.sweeps,
        nodes=opened.nodes,
        codec=CODECS[opened.codec],
        session_key=opened.session_key,
        aux_layers=opened.aux_layers,
        fork=None if opened.fork is None else pb.Fork(**asdict(opened.fork)),
    )


def _hedge(hedge: Hedge | None) -> pb.Hedge | None:
    return None if hedge is None else pb.Hedge(index=hedge.index, replica=hedge.replica)


def _snapshot(snapshot: Snapshot) -> pb.Snapshot:
    return pb.Snapshot(
        committed=snapshot.committed,
        sequence=snapshot.sequence,
        acked=snapshot.acked,
        next_id=snapshot.next_id,
        sampling=_sampling(snapshot.sampling),
        ids=snapshot.ids,
        tokens=snapshot.tokens,
        sequences=snapshot.sequences,
        parents=_parents(snapshot.parents),
        headers=[_sweep(header) for header in snapshot.headers],
        kept=_bitmap(snapshot.kept),
        rows=_rows(snapshot.rows),
    )


def _reason(reason: str) -> str:
    """The text within its limit and printable, so that a fault can always be sent."""
    return one_line(reason, REASON_CHARACTERS)


def _fault(fault: Fault) -> pb.Fault:
    return pb.Fault(
        generation=fault.generation,
        peer=fault.peer,
        kind=FAULT_KINDS[fault.kind],
        field=fault.field,
        reason=_reason(fault.reason),
        reporter=fault.reporter or "",
        signature=fault.signature,
    )


def _info(info: NodeInfo) -> pb.InfoReply:
    return pb.InfoReply(
        name=info.name,
        fingerprint=info.fingerprint,
        config_digest=info.config_digest,
        weights_digest=info.weights_digest,
        tokenizer_digest=info.tokenizer_digest,
        num_layers=info.num_layers,
        span=pb.Span(start=info.span.start, end=info.span.end),
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        numeric_class=info.numeric_class,
        version=info.version,
        kv_tokens_total=info.kv_tokens_total,
        kv_tokens_free=info.kv_tokens_free,
        sessions=info.sessions,
        counters=pb.Counters(**asdict(info.counters)),
    )
