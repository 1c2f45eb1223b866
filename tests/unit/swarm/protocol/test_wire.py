"""What the wire refuses, field by field, and what it costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarm.base.errors import LocalProtocolError, RemoteProtocolError
from swarm.base.ids import PeerId, SessionId, TreeNodeId
from swarm.base.layers import Span
from swarm.protocol import wire
from swarm.protocol.limits import PADDING_BYTES
from swarm.protocol.manifest import MAX_MANIFEST_BYTES, Manifest, WeightFile
from swarm.protocol.messages import (
    Attach,
    Border,
    Close,
    Codec,
    Counters,
    Credits,
    Fault,
    FaultKind,
    NodeInfo,
    Open,
    Ping,
    Ready,
    Reply,
    Reroute,
    RouteHop,
    Rows,
    Sampling,
    Snapshot,
    Sweep,
    SweepFrame,
)
from swarm.protocol.v1 import node_pb2 as pb

SWEEP = Sweep(
    sequence=3,
    committed=5,
    first_id=TreeNodeId(10),
    tokens=(7, 8, 9),
    parents=(None, TreeNodeId(10), TreeNodeId(0)),
    picks_from=TreeNodeId(10),
)
FRAME = SweepFrame(SWEEP, kept=(True, False, True), rows=Rows(Codec.BF16, 2, 4, bytes(16)))
ROUTE = (RouteHop(PeerId("a"), Span(0, 4)), RouteHop(PeerId("b"), Span(4, 8)))
ATTACH = Attach(SessionId(bytes(16)), 0, ROUTE, 1, Open("f", 64, 4, 64, Codec.FP32, bytes(32)), signature=bytes(64))
REPLY = Reply(3, 0, ((TreeNodeId(10), 8), (TreeNodeId(11), 9)), log_probs=(-1.0, -2.0))
SNAPSHOT = Snapshot(1, 3, 2, TreeNodeId(4), Sampling(), (TreeNodeId(0),), (7,), (1,), (None,), ())
PEER = PeerId("Qm" + "a" * 44)
FAULT = Fault(1, PEER, FaultKind.BUSY, "", "full", PEER, bytes(256))
INFO = NodeInfo("m", "f", "c", "w", "t", 12, Span(0, 4), 100, 64, "cpu", "0", 10, 5, 1, Counters())


def parsed(frame: SweepFrame | Attach | Reply | Snapshot | Fault | Close) -> pb.Frame:
    return pb.Frame.FromString(wire.encode_frame(frame))


def refused(frame: pb.Frame) -> str:
    """The field for which a frame is refused."""
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_frame(frame.SerializeToString())
    return caught.value.field


def test_zero_is_an_id_and_absent_is_none() -> None:
    zero = wire.decode_frame(wire.encode_frame(SweepFrame(replace(SWEEP, commit_to=TreeNodeId(0), truncate_to=0))))
    absent = wire.decode_frame(wire.encode_frame(SweepFrame(SWEEP)))
    assert isinstance(zero, SweepFrame)
    assert isinstance(absent, SweepFrame)
    assert (zero.sweep.commit_to, zero.sweep.truncate_to) == (0, 0)
    assert (absent.sweep.commit_to, absent.sweep.truncate_to) == (None, None)
    assert absent.sweep.parents == (None, 10, 0)


def test_names_of_a_prefix_travel_whole_or_not_at_all() -> None:
    border = Border(640, b"n" * 16)
    attach = replace(ATTACH, open=replace(ATTACH.open, prefix=(border, Border(64, b"m" * 16))))
    assert wire.decode_frame(wire.encode_frame(attach)) == attach
    assert wire.decode_upstream(wire.encode_upstream(Ready(1, Credits(9, 8, 7, 6)))) == Ready(1, Credits(9, 8, 7, 6))
    for broken, field in (
        ((replace(border, tokens=0),), "tokens"),
        ((replace(border, name=b"n" * 15),), "name"),
        ((border,) * 65, "prefix"),
    ):
        assert refused(parsed(replace(ATTACH, open=replace(ATTACH.open, prefix=broken)))) == field


@pytest.mark.parametrize("names", [(b"n" * 16,) * 3, (b"n" * 15,)], ids=["more than blocks", "too short"])
def test_names_are_those_of_committed_blocks(names: tuple[bytes, ...]) -> None:
    sweep = replace(SWEEP, committed=191, names=(b"n" * 16,) * 2)
    assert wire.decode_frame(wire.encode_frame(SweepFrame(sweep))) == SweepFrame(sweep)
    assert refused(parsed(SweepFrame(replace(sweep, names=names)))) == "names"


def test_a_header_of_2048_nodes_is_small() -> None:
    count = 2048
    parents = (None, *(TreeNodeId(100_000 + i) for i in range(count - 1)))
    sweep = replace(SWEEP, first_id=TreeNodeId(100_000), tokens=tuple(range(120_000, 120_000 + count)), parents=parents)
    assert len(wire.encode_frame(SweepFrame(sweep, kept=(True,) * count))) < 20_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence", 2**64 - 1),
        ("generation", 2**64 - 1),
        ("committed", 2**63),
        ("acked", 2**63),
        ("truncate_to", 2**63),
        ("commit_to", 2**63),
        ("first_id", 2**63 - 2),
        ("picks_from", 2**63),
    ],
)
def test_numbers_out_of_range(field: str, value: int) -> None:
    frame = parsed(FRAME)
    setattr(frame.sweep.sweep, field, value)
    assert refused(frame) == field


@pytest.mark.parametrize(("field", "value"), [("tokens", 2**31), ("parents", -2), ("parents", 2**62 * -2)])
def test_list_entries_out_of_range(field: str, value: int) -> None:
    frame = parsed(FRAME)
    getattr(frame.sweep.sweep, field)[1] = value
    assert refused(frame) == field


def test_lists_of_different_lengths() -> None:
    frame = parsed(FRAME)
    frame.sweep.sweep.parents.append(0)
    assert refused(frame) == "parents"
    frame = parsed(REPLY)
    frame.reply.tokens.append(0)
    assert refused(frame) == "tokens"
    frame = parsed(REPLY)
    frame.reply.log_probs.values.append(0)
    assert refused(frame) == "log_probs"
    frame = parsed(SNAPSHOT)
    frame.snapshot.sequences.append(0)
    assert refused(frame) == "sequences"


def test_absurd_counts() -> None:
    frame = parsed(FRAME)
    del frame.sweep.sweep.parents[:]
    frame.sweep.sweep.tokens[:] = [1] * 65_537
    assert refused(frame) == "tokens"
    frame = parsed(FRAME)
    frame.sweep.times.extend([pb.HopTime()] * 257)
    assert refused(frame) == "times"
    frame = parsed(ATTACH)
    frame.attach.route.extend([frame.attach.route[0]] * 255)
    assert refused(frame) == "route"


@pytest.mark.parametrize("bitmap", [b"", b"\x05\x00", b"\x0d"], ids=["short", "long", "beyond"])
def test_kept_is_one_bit_per_node(bitmap: bytes) -> None:
    frame = parsed(FRAME)
    frame.sweep.kept = bitmap
    assert refused(frame) == "kept"


def test_rows_go_with_the_kept_nodes() -> None:
    frame = parsed(FRAME)
    frame.sweep.kept = b"\x07"
    assert refused(frame) == "rows"
    frame = parsed(REPLY)
    frame.reply.row_ids.append(10)
    assert refused(frame) == "rows"


@pytest.mark.parametrize("width", [0, 2**20 + 1])
def test_absurd_width(width: int) -> None:
    frame = parsed(FRAME)
    frame.sweep.rows.width = width
    assert refused(frame) == "rows"


@pytest.mark.parametrize("codec", [pb.CODEC_UNSPECIFIED, 5, 99])
def test_codecs_of_another_version(codec: pb.Codec.ValueType) -> None:
    frame = parsed(FRAME)
    frame.sweep.rows.codec = codec
    assert refused(frame) == "codec"
    frame = parsed(ATTACH)
    frame.attach.open.codec = codec
    assert refused(frame) == "codec"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_floats_are_finite_and_not_negative(value: float) -> None:
    frame = parsed(SNAPSHOT)
    frame.snapshot.sampling.temperature = value
    assert refused(frame) == "temperature"
    frame = parsed(SNAPSHOT)
    frame.snapshot.sampling.top_p = value
    assert refused(frame) == "top_p"
    frame = parsed(FRAME)
    frame.sweep.times.add(compute_ms=value)
    assert refused(frame) == "compute_ms"
    with pytest.raises(RemoteProtocolError, match="ttl_s"):
        wire.decode_hold(pb.HoldRequest(session=bytes(16), ttl_s=value).SerializeToString())


def test_an_unknown_codec_is_told_what_there_is() -> None:
    frame = parsed(FRAME)
    frame.sweep.rows.codec = pb.Codec.ValueType(5)
    with pytest.raises(RemoteProtocolError, match=r"codec 5 is unknown to release .*; it has fp32, fp16, bf16, int8"):
        wire.decode_frame(frame.SerializeToString())


def test_log_probs_are_finite() -> None:
    frame = parsed(REPLY)
    frame.reply.log_probs.values[0] = math.nan
    assert refused(frame) == "log_probs"


def test_routes() -> None:
    """What no bound of one field says, `check` does."""
    frame = parsed(ATTACH)
    frame.attach.index = 2
    assert refused(frame) == "index"
    frame = parsed(ATTACH)
    frame.attach.route[0].span.start = 4
    assert refused(frame) == "span"
    frame = parsed(ATTACH)
    frame.attach.route[0].span.end = 2**16 + 1
    assert refused(frame) == "span"
    frame = parsed(ATTACH)
    frame.attach.hedge.index = 2
    frame.attach.hedge.replica = "c"
    assert refused(frame) == "hedge"
    frame.attach.hedge.index = 1
    frame.attach.hedge.replica = "a"
    assert refused(frame) == "replica"
    frame = parsed(ATTACH)
    del frame.attach.route[:]
    assert refused(frame) == "route"


def test_layers_whose_rows_travel_are_few_and_rise() -> None:
    asked = replace(ATTACH, open=replace(ATTACH.open, aux_layers=(1, 2, 9, 511)))
    frame = parsed(asked)
    assert frame.WhichOneof("kind") == "wide_attach", "a release that knows none has to refuse it"
    assert wire.decode_frame(frame.SerializeToString()) == asked
    assert parsed(ATTACH).WhichOneof("kind") == "attach"
    for wrong in ([0, 2], [2, 2], [3, 2], [512], [1, 2, 3, 4, 5]):
        frame.wide_attach.open.aux_layers[:] = wrong
        assert refused(frame) == "aux_layers"
    reroute = Reroute(1, ROUTE, asked.open, signature=bytes(64))
    data = wire.encode_frame(reroute)
    assert pb.Frame.FromString(data).WhichOneof("kind") == "wide_reroute"
    assert wire.decode_frame(data) == reroute


def test_kinds_that_nobody_knows() -> None:
    assert refused(pb.Frame()) == "kind"
    frame = parsed(FAULT)
    frame.fault.kind = pb.FAULT_KIND_UNSPECIFIED
    assert refused(frame) == "kind"
    with pytest.raises(RemoteProtocolError, match="kind"):
        wire.decode_upstream(b"")
    with pytest.raises(RemoteProtocolError, match="kind"):
        wire.decode_replies_up(b"")


def test_nested_messages_are_not_left_out() -> None:
    assert refused(pb.Frame(sweep=pb.SweepFrame())) == "sweep"
    assert refused(pb.Frame(snapshot=pb.Snapshot())) == "sampling"
    with pytest.raises(RemoteProtocolError, match="credits"):
        wire.decode_upstream(pb.Upstream(ready=pb.Ready()).SerializeToString())
    info = pb.InfoReply.FromString(wire.encode_info(INFO))
    info.ClearField("counters")
    with pytest.raises(RemoteProtocolError, match="counters"):
        wire.decode_info(info.SerializeToString())


def test_committed_nodes_of_a_snapshot_are_among_its_nodes() -> None:
    frame = parsed(SNAPSHOT)
    frame.snapshot.committed = 2
    assert refused(frame) == "committed"


def test_a_faults_own_text_never_stops_it() -> None:
    fault = wire.decode_upstream(wire.encode_upstream(replace(FAULT, reason="\udc80" + "x" * 5000)))
    assert isinstance(fault, Fault)
    assert fault.reason == "\ufffd" + "x" * 1023


@pytest.mark.parametrize(
    "sweep", [replace(SWEEP, sequence=-1), replace(SWEEP, tokens=(-1, 0, 0)), replace(SWEEP, committed=2**64)]
)
def test_our_own_mistakes_are_local(sweep: Sweep) -> None:
    with pytest.raises(LocalProtocolError):
        wire.encode_frame(SweepFrame(sweep))


def test_padding_is_bounded_and_thrown_away() -> None:
    padded = wire.encode_frame(Ping(7, bytes(PADDING_BYTES)))
    assert len(padded) > PADDING_BYTES
    assert wire.decode_frame(padded) == Ping(7)
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_frame(wire.encode_frame(Ping(7, bytes(PADDING_BYTES + 1))))
    assert caught.value.field == "padding"


def test_manifests_have_each_file_once_and_fit_in_one_answer() -> None:
    for names in ("zy", "zz"):
        files = [pb.WeightFile(name=name, size_bytes=1, sha256=bytes(32)) for name in names]
        with pytest.raises(RemoteProtocolError, match="files: must be in the order of their names"):
            wire.decode_manifest(pb.ManifestReply(files=files).SerializeToString())
    for data in (bytes(MAX_MANIFEST_BYTES + 1), b"\xff"):
        with pytest.raises(RemoteProtocolError, match="bytes"):
            wire.decode_manifest(data)
    for file in (WeightFile("", 7, "ab" * 32), WeightFile("a", 7, "no hex"), WeightFile("a", -1, "ab" * 32)):
        with pytest.raises(LocalProtocolError):
            wire.encode_manifest(Manifest.of([file]))
