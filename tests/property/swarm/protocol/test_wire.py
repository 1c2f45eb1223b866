"""Every message survives the wire, and no bytes whatever raise anything but RemoteProtocolError."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId, SessionId, TreeNodeId
from swarm.layers import Span
from swarm.protocol import wire
from swarm.protocol.draft_distribution import DraftDistribution
from swarm.protocol.frames import FrameAssembler, FrameLimits, split
from swarm.protocol.hold import Held, Hold
from swarm.protocol.limits import (
    MAX_COUNT,
    MAX_HOLD_S,
    MAX_HOP_MS,
    MAX_LAYERS,
    MAX_PROMPT_ROWS,
    MAX_TEMPERATURE,
    MAX_WIDTH,
)
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Close,
    Codec,
    Credits,
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
    Want,
)
from swarm.protocol.node_info import Counters, NodeInfo
from swarm.protocol.pick_rules import GRAMMAR_KINDS, MAX_BIAS, MAX_PENALTY, REPETITION, Grammar, PickRules
from swarm.protocol.v1 import node_pb2 as pb

naturals = st.integers(0, 2**63 - 1)
words = st.integers(0, 2**32 - 1)
granted = st.integers(1, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
tokens = st.integers(0, 2**31 - 1)
node_ids = naturals.map(TreeNodeId)
parents = st.none() | node_ids
durations = st.floats(0, MAX_HOP_MS)
counts = st.integers(0, MAX_COUNT)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
peers = texts.map(PeerId)
session_ids = st.binary(min_size=16, max_size=16).map(SessionId)
grammars = st.builds(Grammar, st.sampled_from(GRAMMAR_KINDS), texts)
biases = st.dictionaries(tokens, st.floats(-MAX_BIAS, MAX_BIAS), max_size=5)
rules = st.builds(
    PickRules,
    start=naturals,
    frequency_penalty=st.floats(-MAX_PENALTY, MAX_PENALTY),
    presence_penalty=st.floats(-MAX_PENALTY, MAX_PENALTY),
    repetition_penalty=st.floats(*REPETITION),
    logit_bias=biases.map(lambda found: tuple(sorted(found.items()))),
    grammar=st.none() | grammars,
    end_tokens=st.sets(tokens, min_size=1, max_size=5).map(lambda found: tuple(sorted(found))),
)
samplings = st.builds(
    Sampling,
    seed=uint64,
    temperature=st.floats(0, MAX_TEMPERATURE),
    top_k=st.none() | st.integers(1, 2**32 - 1),
    top_p=st.none() | st.floats(0, 1),
    min_p=st.none() | st.floats(0, 1),
    multistep=st.booleans(),
    rules=st.none() | rules,
)
times = st.lists(st.builds(HopTime, durations, durations, durations, durations), max_size=3).map(tuple)
spans = st.tuples(st.integers(0, 99), st.integers(1, 99)).map(lambda t: Span(t[0], t[0] + t[1]))
routes = st.lists(st.builds(RouteHop, texts.filter(bool).map(PeerId), spans), min_size=1, max_size=4).map(tuple)
hedges = st.none() | st.builds(Hedge, st.just(0), st.integers(0, 99).map(lambda number: PeerId(f"{number:0>100}")))
sealed = st.lists(st.binary(max_size=8), max_size=2).map(tuple)
printable = texts.filter(str.isprintable)
peer_ids = st.text("123ABCabc", min_size=44, max_size=44).map(lambda text: PeerId(f"Qm{text}"))
faults = st.builds(
    Fault,
    naturals,
    peer_ids,
    st.sampled_from(FaultKind),
    printable,
    printable,
    st.none() | peer_ids,
    st.binary(max_size=16),
)
aux_layers = st.sets(st.integers(1, 511), max_size=4).map(lambda layers: tuple(sorted(layers)))
keys = st.binary(min_size=32, max_size=32)
opens = st.builds(Open, texts, granted, granted, granted, st.sampled_from(Codec), keys, aux_layers)
signatures = st.binary(min_size=64, max_size=64)


@st.composite
def rows_of(draw: st.DrawFn, count: int) -> Rows:
    rows = Rows(draw(st.sampled_from(Codec)), count, draw(st.integers(1, 5)), b"")
    return Rows(rows.codec, count, rows.width, draw(st.binary(min_size=rows.size_bytes, max_size=rows.size_bytes)))


@st.composite
def guesses(draw: st.DrawFn, offset: int) -> DraftDistribution:
    some = tuple(draw(st.lists(tokens, min_size=1, max_size=4, unique=True)))
    weights = st.floats(min_value=2.0**-100, max_value=1.0, width=32)
    shares = tuple(draw(st.lists(weights, min_size=len(some), max_size=len(some))))
    return DraftDistribution(offset, some, shares, tuple(draw(st.lists(st.integers(0, len(some) - 1), max_size=5))))


@st.composite
def sweeps(draw: st.DrawFn) -> Sweep:
    count = draw(st.integers(0, 20))
    return Sweep(
        sequence=draw(naturals),
        committed=draw(naturals),
        first_id=TreeNodeId(draw(st.integers(0, 2**63 - 100))),
        tokens=tuple(draw(st.lists(tokens, min_size=count, max_size=count))),
        parents=tuple(draw(st.lists(parents, min_size=count, max_size=count))),
        picks_from=draw(node_ids),
        generation=draw(naturals),
        acked=draw(naturals),
        truncate_to=draw(st.none() | naturals),
        commit_to=draw(st.none() | node_ids),
        sampling=draw(st.none() | samplings),
        want=draw(
            st.none()
            | st.builds(Want, st.booleans(), st.booleans(), st.integers(0, 20), st.integers(0, MAX_PROMPT_ROWS))
        ),
        guesses=tuple(draw(guesses(offset)) for offset in range(count) if draw(st.integers(0, 9)) == 0),
    )


@st.composite
def sweep_frames(draw: st.DrawFn) -> SweepFrame:
    sweep = draw(sweeps())
    count = len(sweep.tokens)
    kept = draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count).map(tuple))
    rows = draw(st.none() | rows_of(count if kept is None else sum(kept)))
    return SweepFrame(sweep, kept, rows, draw(times))


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    picks = tuple(draw(st.lists(st.tuples(node_ids, tokens), max_size=20)))
    log_prob = st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)
    log_probs = st.lists(log_prob, min_size=len(picks))
    values = draw(st.none() | log_probs.map(lambda values: tuple(values[: len(picks)])))
    best = st.lists(st.tuples(tokens, log_prob), min_size=2, max_size=2).map(tuple)
    top = st.lists(best, min_size=len(picks), max_size=len(picks)).map(tuple)
    row_ids = tuple(draw(st.lists(node_ids, max_size=5)))
    return Reply(
        sequence=draw(naturals),
        generation=draw(naturals),
        picks=picks,
        times=draw(times),
        log_probs=values,
        row_ids=row_ids,
        rows=draw(rows_of(len(row_ids))) if row_ids else None,
        top_log_probs=draw(st.none() | top) if values else None,
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    count = draw(st.integers(0, 10))

    def listed(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    kept = draw(st.none() | st.tuples(*[st.booleans()] * count))
    return Snapshot(
        committed=draw(st.integers(0, count)),
        sequence=draw(naturals),
        acked=draw(naturals),
        next_id=draw(node_ids),
        sampling=draw(samplings),
        ids=tuple(map(TreeNodeId, listed(naturals))),
        tokens=listed(tokens),
        sequences=listed(naturals),
        parents=tuple(draw(st.lists(parents, min_size=count, max_size=count))),
        headers=tuple(draw(st.lists(sweeps(), max_size=2))),
        kept=kept,
        rows=draw(st.none() | rows_of(count if kept is None else sum(kept))),
    )


frames: st.SearchStrategy[Frame] = st.one_of(
    sweep_frames(),
    replies(),
    snapshots(),
    st.builds(Attach, session_ids, naturals, routes, st.just(0), opens, hedges, sealed, signatures),
    st.builds(Reroute, naturals, routes, opens, hedges, sealed, signatures),
    st.builds(Close, texts.filter(str.isprintable), st.booleans()),
    st.builds(Ping, uint64),
    faults,
)
upstreams: st.SearchStrategy[Upstream] = st.one_of(
    st.builds(Attached, naturals, st.none() | naturals),
    st.builds(Ready, naturals, st.builds(Credits, granted, granted, granted)),
    st.builds(Ack, naturals, naturals, naturals),
    st.builds(Pong, uint64),
    faults,
)
replies_up: st.SearchStrategy[RepliesUp] = st.one_of(
    st.builds(RepliesRequest, session_ids, naturals, naturals, st.booleans()), st.builds(Pong, uint64)
)
holds = st.builds(Hold, session_ids, naturals, st.floats(0, MAX_HOLD_S), st.booleans())
counters = st.builds(Counters, *[counts] * 8)


@st.composite
def infos(draw: st.DrawFn) -> NodeInfo:
    total = draw(counts)
    layers, vocabularies, widths = st.integers(200, MAX_LAYERS), st.integers(1, 2**31), st.integers(1, MAX_WIDTH)
    sizes = (layers, spans, vocabularies, widths, texts, texts)
    rooms = (st.just(total), st.integers(0, total), words)
    return draw(st.builds(NodeInfo, *[texts] * 5, *sizes, *rooms, counters))


DECODERS: tuple[Callable[[bytes], object], ...] = (
    wire.decode_frame,
    wire.decode_upstream,
    wire.decode_replies_up,
    wire.decode_hold,
    wire.decode_held,
    wire.decode_info,
    wire.decode_part,
)


def joined(parts: list[bytes]) -> Frame:
    joiner = FrameAssembler()
    messages = [joiner.feed(part) for part in parts]
    assert all(message is None for message in messages[:-1])
    last = messages[-1]
    assert last is not None
    return last


@given(frames)
def test_frames_survive(frame: Frame) -> None:
    assert joined(list(split(frame))) == frame


@given(upstreams)
def test_upstream_messages_survive(message: Upstream) -> None:
    assert wire.decode_upstream(wire.encode_upstream(message)) == message


@given(replies_up)
def test_messages_on_reply_streams_survive(message: RepliesUp) -> None:
    assert wire.decode_replies_up(wire.encode_replies_up(message)) == message


@given(holds, st.builds(Held, st.booleans(), naturals, st.booleans(), naturals, naturals, naturals), infos())
def test_unary_messages_survive(hold: Hold, held: Held, info: NodeInfo) -> None:
    assert wire.decode_hold(wire.encode_hold(hold)) == hold
    assert wire.decode_held(wire.encode_held(held)) == held
    assert wire.decode_info(wire.encode_info(info)) == info


def decode_with_everything(data: bytes) -> None:
    """Fails when a decoder raises anything but RemoteProtocolError."""
    for decode in DECODERS:
        with contextlib.suppress(RemoteProtocolError):
            decode(data)
    with contextlib.suppress(RemoteProtocolError):
        FrameAssembler(FrameLimits(1 << 16, 1 << 16)).feed(data)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_by_name(data: bytes) -> None:
    decode_with_everything(data)


encodings = st.one_of(
    frames.map(wire.encode_frame),
    frames.map(lambda frame: next(split(frame))),
    upstreams.map(wire.encode_upstream),
    replies_up.map(wire.encode_replies_up),
    infos().map(wire.encode_info),
)


@given(encodings, st.data())
def test_truncated_and_mutated_encodings_are_refused_by_name(encoding: bytes, data: st.DataObject) -> None:
    decode_with_everything(encoding[: data.draw(st.integers(0, len(encoding)))])
    place = data.draw(st.integers(0, len(encoding)))
    inserted = data.draw(st.binary(max_size=3))
    decode_with_everything(encoding[:place] + inserted + encoding[place + data.draw(st.integers(0, 3)) :])


HOP_TIMES = ("queue_ms", "compute_ms", "other_ms", "link_ms")
NO_TIMES = st.sampled_from([math.nan, math.inf, -math.inf, -5e-324, -1.0, 120_000.01, 1e308]) | st.floats().filter(
    lambda value: not 0 <= value <= MAX_HOP_MS
)


@given(replies(), st.sampled_from(HOP_TIMES), NO_TIMES)
def test_hop_times_outside_of_their_range_are_refused_by_name(reply: Reply, field: str, value: float) -> None:
    frame = pb.Frame.FromString(wire.encode_frame(reply))
    frame.reply.times.append(pb.HopTime(**{field: value}))
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_frame(frame.SerializeToString())
    assert caught.value.field == field


@given(st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e308, 119_999.0]), st.sampled_from(HOP_TIMES))
def test_what_a_hop_measured_can_always_be_sent(value: float, field: str) -> None:
    if math.isnan(value):
        return
    reply = Reply(1, 0, (), (replace(HopTime(1.0, 2.0, 3.0, 4.0), **{field: value}),))
    (time,) = wire.decode_frame(wire.encode_frame(reply)).times  # type: ignore[union-attr]
    assert getattr(time, field) == min(max(value, 0.0), MAX_HOP_MS)


@given(
    st.sampled_from(["window_tokens", "sweeps", "nodes"]),
    st.tuples(st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1)),
)
def test_credits_of_zero_are_refused_by_name(field: str, other: tuple[int, int, int]) -> None:
    ready = pb.Upstream.FromString(wire.encode_upstream(Ready(1, Credits(*other))))
    setattr(ready.ready.credits, field, 0)
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_upstream(ready.SerializeToString())
    assert caught.value.field == field


NO_INFO = st.sampled_from(
    [
        *(("num_layers", 0), ("num_layers", MAX_LAYERS + 1), ("num_layers", 2**32 - 1)),
        *(("vocab_size", 0), ("vocab_size", 2**31 + 1), ("hidden_size", 0), ("hidden_size", MAX_WIDTH + 1)),
        *(("kv_tokens_total", MAX_COUNT + 1), ("kv_tokens_free", 2**64 - 1)),
        *((field.name, MAX_COUNT + 1) for field in fields(Counters)),
    ]
)


@given(infos(), NO_INFO)
def test_what_a_node_says_of_itself_is_bounded(info: NodeInfo, bad: tuple[str, int]) -> None:
    field, value = bad
    reply = pb.InfoReply.FromString(wire.encode_info(info))
    setattr(reply if hasattr(reply, field) else reply.counters, field, value)
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_info(reply.SerializeToString())
    assert caught.value.field == field


@given(
    st.sampled_from(
        [("temperature", math.nan), ("temperature", math.inf), ("temperature", 1.1e6), ("temperature", -1.0)]
    )
    | st.sampled_from([("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("top_k", 0)]),
    snapshots(),
)
def test_sampling_out_of_its_range_is_refused_by_name(bad: tuple[str, float], snapshot: Snapshot) -> None:
    frame = pb.Frame.FromString(wire.encode_frame(snapshot))
    setattr(frame.snapshot.sampling, *bad)
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_frame(frame.SerializeToString())
    assert caught.value.field == bad[0]
