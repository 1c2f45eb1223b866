"""Every message survives the wire, and no bytes whatever raise anything but RemoteProtocolError."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.declared import Fact, ProtoForm, facts
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.protocol import wire
from swarm.protocol.frames import FrameAssembler, FrameLimits, split
from swarm.protocol.limits import MAX_COUNT, MAX_HOP_MS, MAX_LAYERS
from swarm.protocol.manifest import Manifest, WeightFile
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Border,
    Close,
    Codec,
    Counters,
    Credits,
    Fault,
    FaultKind,
    Frame,
    Heads,
    Hedge,
    Held,
    Hold,
    HopTime,
    NodeInfo,
    Open,
    OwnerProof,
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
    Settle,
    Settled,
    Show,
    Shown,
    ShowReply,
    Snapshot,
    Sweep,
    SweepFrame,
    Upstream,
    Want,
)
from swarm.protocol.pick_rules import DraftDistribution, Grammar, PickRules
from swarm.protocol.v1 import node_pb2 as pb
from tests.declarations import broken_messages, values_of
from tests.frozen.wire_samples import ROUTE, SESSION, A, B, C

naturals = st.integers(0, 2**63 - 1)
tokens = st.integers(0, 2**31 - 1)
node_ids = naturals.map(TreeNodeId)
parents = st.none() | node_ids
samplings = values_of(Sampling)
times = st.lists(values_of(HopTime), max_size=3).map(tuple)
routes = values_of(RouteHop).map(lambda hop: (hop,))
hedges = st.none() | values_of(Hedge, index=st.just(0))
records = st.lists(st.binary(max_size=8), max_size=2).map(tuple)
routed: dict[str, st.SearchStrategy[Any]] = {"route": routes, "hedge": hedges, "records": records}


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
        want=draw(st.none() | values_of(Want)),
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
    values_of(Attach, index=st.just(0), **routed),
    values_of(Reroute, **routed),
    values_of(Close),
    values_of(Ping, padding=st.just(b"")),
    values_of(Fault),
)
upstreams: st.SearchStrategy[Upstream] = st.one_of(*map(values_of, (Attached, Ready, Ack, Pong, Fault)))
replies_up: st.SearchStrategy[RepliesUp] = st.one_of(*map(values_of, (RepliesRequest, Pong)))
counts = st.integers(0, MAX_COUNT)
infos = st.tuples(counts, counts).flatmap(
    lambda free: values_of(
        NodeInfo,
        num_layers=st.integers(200, MAX_LAYERS),
        kv_tokens_total=st.just(max(free)),
        kv_tokens_free=st.just(min(free)),
    )
)
manifests = st.builds(
    Manifest.of,
    st.lists(values_of(WeightFile), min_size=1, max_size=9, unique_by=lambda file: file.name),
    st.sampled_from(["", "c0ffee" + "0" * 34, "ab" * 32]),
)


DECODERS: tuple[Callable[[bytes], object], ...] = (
    wire.decode_frame,
    wire.decode_upstream,
    wire.decode_replies_up,
    wire.decode_hold,
    wire.decode_held,
    wire.decode_info,
    wire.decode_manifest,
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


@given(values_of(Settle), values_of(Settled), values_of(Show), values_of(ShowReply))
def test_what_settles_survives(settle: Settle, settled: Settled, show: Show, shown: ShowReply) -> None:
    assert wire.decode_settle(wire.encode_settle(settle)) == settle
    assert wire.decode_settled(wire.encode_settled(settled)) == settled
    assert wire.decode_show(wire.encode_show(show)) == show
    assert wire.decode_shown(wire.encode_shown(shown)) == shown


@given(values_of(Hold), values_of(Held), infos, manifests)
def test_unary_messages_survive(hold: Hold, held: Held, info: NodeInfo, manifest: Manifest) -> None:
    assert wire.decode_hold(wire.encode_hold(hold)) == hold
    assert wire.decode_held(wire.encode_held(held)) == held
    assert wire.decode_info(wire.encode_info(info)) == info
    read = wire.decode_manifest(wire.encode_manifest(manifest))
    assert (read, read.commit, read.digest) == (manifest, manifest.commit, manifest.digest)


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
    infos.map(wire.encode_info),
)


@given(encodings, st.data())
def test_truncated_and_mutated_encodings_are_refused_by_name(encoding: bytes, data: st.DataObject) -> None:
    decode_with_everything(encoding[: data.draw(st.integers(0, len(encoding)))])
    place = data.draw(st.integers(0, len(encoding)))
    inserted = data.draw(st.binary(max_size=3))
    decode_with_everything(encoding[:place] + inserted + encoding[place + data.draw(st.integers(0, 3)) :])


TIMES = [fact for fact in facts(HopTime) if fact.hint is float]
NO_TIMES = [math.nan, math.inf, -math.inf, -5e-324, -1.0, 120_000.01, 1e308]


@given(replies(), st.sampled_from([fact.name for fact in TIMES]), st.sampled_from(NO_TIMES))
def test_hop_times_outside_of_their_range_are_refused_by_name(reply: Reply, field: str, value: float) -> None:
    frame = pb.Frame.FromString(wire.encode_frame(reply))
    given: dict[str, Any] = {field: value}
    frame.reply.times.append(pb.HopTime(**given))
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_frame(frame.SerializeToString())
    assert caught.value.field == field


@given(st.sampled_from([math.inf, -math.inf, -1.0, 1e308, 119_999.0]), st.sampled_from(TIMES))
def test_what_a_hop_measured_can_always_be_sent(value: float, fact: Fact) -> None:
    given: dict[str, Any] = {fact.name: value}
    reply = Reply(1, 0, (), (replace(HopTime(1.0, 2.0, 3.0, 4.0), **given),))
    (time,) = wire.decode_frame(wire.encode_frame(reply)).times  # type: ignore[union-attr]
    assert getattr(time, fact.name) == min(max(value, 0.0), MAX_HOP_MS)


# Every bound of every declaration, broken one by one in a message that has all fields

OPEN = Open("f", 64, 4, 64, Codec.FP32, bytes(32), (1, 2), (Border(640, b"n" * 16),))
RULES = PickRules(7, 1.0, 1.0, 1.5, ((1, 1.0), (2, 2.0)), Grammar("regex", "x"), (1, 2))
OWNER = OwnerProof(b"k", b"s")
FULL: list[tuple[ProtoForm[Any], Any]] = [
    (wire.FRAME_FORMS["attach"], Attach(SESSION, 1, ROUTE, 0, OPEN, Hedge(1, C), (b"r",), bytes(64), owner=OWNER)),
    (wire.FRAME_FORMS["reroute"], Reroute(1, ROUTE, OPEN, Hedge(1, C), (b"r",), bytes(64))),
    (wire.FRAME_FORMS["close"], Close("done")),
    (wire.FRAME_FORMS["ping"], Ping(1, b"x")),
    (wire.FAULT, Fault(1, A, FaultKind.BUSY, "f", "full", B, b"s")),
    (wire.UPSTREAM_FORMS["attached"], Attached(1, 2)),
    (wire.UPSTREAM_FORMS["ready"], Ready(1, Credits(3, 2, 1, 1))),
    (wire.UPSTREAM_FORMS["ack"], Ack(1, 2, 3)),
    (wire.REPLIES_UP_FORMS["request"], RepliesRequest(SESSION, 1, 2)),
    (wire.HOLD_FORM, Hold(SESSION, 1, 2.0)),
    (wire.HELD_FORM, Held(True, 1, True, 2, 3, 4)),
    (wire.SETTLE_FORM, Settle(SESSION)),
    (wire.SETTLED_FORM, Settled(True, b"s")),
    (wire.SHOW_FORM, Show(SESSION, True, 1, 2, (3, 4))),
    (wire.SHOWN_FORM, ShowReply(Shown.HERE, b"d")),
    (wire.HEADS, Heads(1, 2, bytes(32), 3, bytes(32))),
    (wire.INFO_FORM, NodeInfo("m", "f", "c", "w", "t", 12, Span(0, 4), 9, 9, "cpu", "0", 9, 5, 1, Counters())),
    (wire.MANIFEST_FORM, Manifest.of([WeightFile("a", 7, "ab" * 32)], "c0" * 20)),
    (wire.SAMPLING, Sampling(1, 0.5, 4, 0.5, 0.5, True, RULES)),
    (wire.WANT, Want(True, True, 2, 3)),
]


@pytest.mark.parametrize(("form", "full"), FULL, ids=lambda one: type(one).__name__)
def test_what_breaks_a_bound_is_refused_by_the_fields_name(form: ProtoForm[Any], full: Any) -> None:  # noqa: ANN401
    message = form.encode(full)
    assert form.decode(message) == full
    broken = list(broken_messages(form.kind, message))
    assert broken
    for field, one in broken:
        with pytest.raises(RemoteProtocolError) as caught:
            form.decode(one)
        assert caught.value.field == field, one
