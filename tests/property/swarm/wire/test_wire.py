"""Every message survives the wire, and no bytes whatever raise anything but RemoteProtocolError."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from swarm import wire
from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId, SessionId, TreeNodeId
from swarm.layers import Span
from swarm.protocol.draft_distribution import DraftDistribution
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
    Held,
    Hold,
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
from swarm.wire.frames import FrameAssembler, FrameLimits, split

naturals = st.integers(0, 2**63 - 1)
words = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
tokens = st.integers(0, 2**31 - 1)
node_ids = naturals.map(TreeNodeId)
parents = st.none() | node_ids
durations = st.floats(0, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
peers = texts.map(PeerId)
session_ids = st.binary(min_size=16, max_size=16).map(SessionId)
samplings = st.builds(
    Sampling,
    seed=uint64,
    temperature=durations,
    top_k=st.none() | st.integers(1, 2**32 - 1),
    top_p=st.none() | st.floats(0, 1),
    min_p=st.none() | st.floats(0, 1),
    multistep=st.booleans(),
)
times = st.lists(st.builds(HopTime, durations, durations, durations, durations), max_size=3).map(tuple)
spans = st.tuples(st.integers(0, 99), st.integers(1, 99)).map(lambda t: Span(t[0], t[0] + t[1]))
routes = st.lists(st.builds(RouteHop, texts.filter(bool).map(PeerId), spans), min_size=1, max_size=4).map(tuple)
hedges = st.none() | st.builds(Hedge, st.just(0), st.integers(0, 99).map(lambda number: PeerId(f"{number:0>100}")))
sealed = st.lists(st.binary(max_size=8), max_size=2).map(tuple)
faults = st.builds(Fault, naturals, peers, st.sampled_from(FaultKind), texts, texts)
opens = st.builds(Open, texts, words, words, words, st.sampled_from(Codec), st.binary(min_size=32, max_size=32))
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
        want=draw(st.none() | st.builds(Want, st.booleans(), st.booleans())),
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
    log_probs = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=len(picks))
    row_ids = tuple(draw(st.lists(node_ids, max_size=5)))
    return Reply(
        sequence=draw(naturals),
        generation=draw(naturals),
        picks=picks,
        times=draw(times),
        log_probs=draw(st.none() | log_probs.map(lambda values: tuple(values[: len(picks)]))),
        row_ids=row_ids,
        rows=draw(rows_of(len(row_ids))) if row_ids else None,
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
    st.builds(Close, texts, st.booleans()),
    st.builds(Ping, uint64),
    faults,
)
upstreams: st.SearchStrategy[Upstream] = st.one_of(
    st.builds(Attached, naturals, st.none() | naturals),
    st.builds(Ready, naturals, st.builds(Credits, words, words, words)),
    st.builds(Ack, naturals, naturals, naturals),
    st.builds(Pong, uint64),
    faults,
)
replies_up: st.SearchStrategy[RepliesUp] = st.one_of(
    st.builds(RepliesRequest, session_ids, naturals, naturals, st.booleans()), st.builds(Pong, uint64)
)
holds = st.builds(Hold, session_ids, naturals, durations)
counters = st.builds(Counters, *[naturals] * 8)
infos = st.builds(NodeInfo, *[texts] * 5, words, spans, words, words, texts, texts, naturals, naturals, words, counters)
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


@given(holds, st.booleans(), infos)
def test_unary_messages_survive(hold: Hold, held: bool, info: NodeInfo) -> None:
    assert wire.decode_hold(wire.encode_hold(hold)) == hold
    assert wire.decode_held(wire.encode_held(Held(held))) == Held(held)
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
    infos.map(wire.encode_info),
)


@given(encodings, st.data())
def test_truncated_and_mutated_encodings_are_refused_by_name(encoding: bytes, data: st.DataObject) -> None:
    decode_with_everything(encoding[: data.draw(st.integers(0, len(encoding)))])
    place = data.draw(st.integers(0, len(encoding)))
    inserted = data.draw(st.binary(max_size=3))
    decode_with_everything(encoding[:place] + inserted + encoding[place + data.draw(st.integers(0, 3)) :])
