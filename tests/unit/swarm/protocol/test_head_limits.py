"""A head holds what its session's credits allow: the largest legal one fits, a larger one is refused undecoded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId, SessionId, TreeNodeId
from swarm.base.layers import Span
from swarm.protocol import wire
from swarm.protocol.frames import FrameAssembler, FrameLimits, split
from swarm.protocol.limits import MAX_HEAD_BYTES, MAX_HOP_MS, OPENING_HEAD_BYTES, HeadLimits
from swarm.protocol.messages import (
    Attach,
    Codec,
    Frame,
    HopTime,
    Open,
    Reroute,
    RouteHop,
    Sampling,
    Snapshot,
    Sweep,
    SweepFrame,
    Want,
)
from swarm.protocol.pick_rules import (
    MAX_BIASES,
    MAX_CANDIDATES,
    MAX_DRAWS,
    MAX_END_TOKENS,
    MAX_GRAMMAR_BYTES,
    DraftDistribution,
    Grammar,
    PickRules,
)
from swarm.protocol.wire import encode_frame

BIG = 2**62
TOKEN = 2**31 - 1
LIMITS = HeadLimits(window_tokens=700, sweeps=8, nodes=240)
RULES = PickRules(
    BIG, 2.0, 2.0, 2.0,
    tuple((TOKEN - MAX_BIASES + place, 100.0) for place in range(MAX_BIASES)),
    Grammar("json_schema", "x" * MAX_GRAMMAR_BYTES),
    tuple(range(TOKEN - MAX_END_TOKENS, TOKEN)),
)  # fmt: skip
SAMPLING = Sampling(2**64 - 1, 1.0, 2**31, 1.0, 1.0, multistep=True, rules=RULES)


def fattest_sweep(nodes: int) -> Sweep:
    drawn = tuple(range(TOKEN - MAX_CANDIDATES, TOKEN)), (1.0,) * MAX_CANDIDATES, (MAX_CANDIDATES - 1,) * MAX_DRAWS
    return Sweep(
        BIG, BIG, TreeNodeId(BIG), (TOKEN,) * nodes, (TreeNodeId(BIG),) * nodes, TreeNodeId(BIG), BIG, BIG, BIG,
        TreeNodeId(BIG), SAMPLING, Want(True, True, 20),
        tuple(DraftDistribution(offset, *drawn) for offset in range(nodes)),
    )  # fmt: skip


def fattest_snapshot(limits: HeadLimits) -> Snapshot:
    count, per_sweep = limits.window_tokens + limits.nodes, limits.nodes // limits.sweeps
    many, ids = (TOKEN,) * count, (TreeNodeId(BIG),) * count
    fattest = fattest_sweep(per_sweep)
    headers = (*(replace(fattest, sampling=None),) * (limits.sweeps - 1), fattest)  # the journal leaves one
    kept = (True,) * count
    return Snapshot(count, BIG, BIG, TreeNodeId(BIG), SAMPLING, ids, many, (BIG,) * count, ids, headers, kept)


@pytest.mark.parametrize("limits", [LIMITS, HeadLimits(8_000, 64, 2_048), HeadLimits(1, 1, 1)])
def test_the_largest_legal_heads_fit(limits: HeadLimits) -> None:
    times = (HopTime(MAX_HOP_MS, MAX_HOP_MS, MAX_HOP_MS, MAX_HOP_MS),) * 256
    frames: list[Frame] = [SweepFrame(fattest_sweep(limits.nodes), (True,) * limits.nodes, None, times)]
    frames.append(fattest_snapshot(limits))
    for frame in frames:
        assert len(encode_frame(frame)) <= limits.head_bytes < MAX_HEAD_BYTES
        assembler = FrameAssembler(FrameLimits.of_session(limits, 0))
        assert [assembler.feed(part) for part in split(frame)][-1] == frame


def test_an_attach_over_twenty_machines_fits_the_opening() -> None:
    route = tuple(RouteHop(PeerId("Qm" + "x" * 44), Span(place, place + 1)) for place in range(20))
    attach = Attach(SessionId(b"s" * 16), 0, route, 0, Open("f" * 64, 1, 1, 1, Codec.FP16), None, (b"r" * 2_500,) * 21)
    assert len(encode_frame(attach)) < OPENING_HEAD_BYTES


@pytest.mark.parametrize(
    ("field", "frame"),
    [
        ("tokens", SweepFrame(fattest_sweep(241))),
        ("headers", replace(fattest_snapshot(LIMITS), headers=(fattest_sweep(0),) * 9)),
        ("headers", replace(fattest_snapshot(LIMITS), headers=(fattest_sweep(121),) * 2)),
        ("tokens", replace(fattest_snapshot(LIMITS), headers=(fattest_sweep(241),))),
        ("ids", fattest_snapshot(HeadLimits(701, 8, 240))),
        ("tokens", replace(fattest_snapshot(LIMITS), tokens=(1,) * 941)),
    ],
)
def test_more_than_the_credits_is_refused_before_it_is_decoded(
    field: str, frame: Frame, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object) -> None:
        raise AssertionError("it was decoded")

    head = encode_frame(frame)
    for name in ("_sweep", "_sweep_frame", "_snapshot"):
        monkeypatch.setattr(wire, name, decode)
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_frame(head, LIMITS)
    assert caught.value.field == field


def test_a_head_beyond_the_credits_is_refused_at_its_first_part() -> None:
    parts = list(split(fattest_snapshot(HeadLimits(20_000, 64, 2_048))))
    with pytest.raises(RemoteProtocolError, match="the limits are") as caught:
        FrameAssembler(FrameLimits.of_session(LIMITS, 0)).take(parts[0])
    assert caught.value.field == "part"


def test_no_more_records_than_machines_and_a_replica() -> None:
    route = (RouteHop(PeerId("a"), Span(0, 1)),)
    reroute = Reroute(1, route, Open("f", 1, 1, 1, Codec.FP32, bytes(32)), None, (b"r",) * 2, bytes(64))
    wire.decode_frame(encode_frame(reroute))
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_frame(encode_frame(replace(reroute, records=(b"r",) * 3)))
    assert caught.value.field == "records"


def test_only_the_part_that_completes_a_head_is_decoded() -> None:
    frame = fattest_snapshot(HeadLimits(20_000, 64, 2_048))
    parts = list(split(frame))
    assembler = FrameAssembler()
    assert len(parts) == 2
    assert assembler.take(parts[0]) == 0
    assert assembler.finish() is None
    assert assembler.take(parts[1]) == len(encode_frame(frame))
    assert assembler.finish() == frame
