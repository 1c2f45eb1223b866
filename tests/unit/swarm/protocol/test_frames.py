"""Frames in parts: large ones, and parts that lie."""

from __future__ import annotations

import tracemalloc

import pytest

from swarm.base.errors import LocalProtocolError, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.protocol.frames import PART_OVERHEAD_BYTES, FrameAssembler, FrameLimits, split, with_rows
from swarm.protocol.messages import Close, Codec, Frame, Ping, Reply, Rows, Sampling, Snapshot, Sweep, SweepFrame
from swarm.protocol.packed_rows import pack, unpack
from swarm.protocol.wire import PART_BYTES, encode_frame, encode_part

MIB = 1 << 20


def sweep_of(count: int) -> Sweep:
    parents = (None, *map(TreeNodeId, range(count - 1)))[:count]
    return Sweep(1, 0, TreeNodeId(0), tuple(range(count)), parents, TreeNodeId(0))


def frame_of(count: int, width: int, codec: Codec = Codec.FP32) -> SweepFrame:
    size = count * width * codec.item_bytes
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    return SweepFrame(sweep_of(count), rows=Rows(codec, count, width, data))


def join(joiner: FrameAssembler, frame: Frame) -> Frame | None:
    message = None
    for part in split(frame):
        assert message is None
        message = joiner.feed(part)
    return message


@pytest.mark.parametrize("codec", [Codec.BF16, Codec.FP32])
def test_2048_rows_of_8192(codec: Codec) -> None:
    frame = frame_of(2048, 8192, codec)
    parts = list(split(frame))
    assert len(parts) == 2048 * 8192 * codec.item_bytes // MIB + 1
    assert max(map(len, parts)) <= PART_BYTES + PART_OVERHEAD_BYTES
    assert join(FrameAssembler(), frame) == frame


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_frames_that_end_near_a_parts_border(extra: int) -> None:
    size = PART_BYTES - len(encode_frame(frame_of(1, 520_000, Codec.BF16))) + 2 * extra
    frame = frame_of(1, size // 2, Codec.BF16)
    assert len(list(split(frame))) == (2 if extra > 0 else 1)
    assert join(FrameAssembler(), frame) == frame


def test_a_head_larger_than_a_part() -> None:
    count = 60_000
    wide = 2**62
    ids = tuple(map(TreeNodeId, range(wide, wide + count)))
    snapshot = Snapshot(
        *(count, 1, 0, TreeNodeId(count), Sampling(), ids, (0,) * count, ids, ids, ()),
        rows=Rows(Codec.BF16, count, 1, bytes(2 * count)),
    )
    assert len(encode_frame(snapshot)) > MIB
    assert join(FrameAssembler(), snapshot) == snapshot


@pytest.mark.parametrize("part_bytes", [1, 7, 4_096, PART_BYTES])
def test_a_frame_may_be_cut_into_smaller_parts(part_bytes: int) -> None:
    frame, joiner = frame_of(16, 40), FrameAssembler()
    *first, last = split(frame, part_bytes)
    assert max(map(len, [*first, last])) <= part_bytes + PART_OVERHEAD_BYTES
    assert all(joiner.feed(part) is None for part in first)
    assert joiner.feed(last) == frame


def test_one_joiner_takes_many_messages() -> None:
    joiner = FrameAssembler()
    reply = Reply(1, 0, ((TreeNodeId(0), 1),), row_ids=(TreeNodeId(0),), rows=Rows(Codec.FP16, 1, 2, b"abcd"))
    frames: list[Frame] = [Ping(1), frame_of(3, 4), Close("done"), frame_of(300, 1000), SweepFrame(sweep_of(0)), reply]
    assert [join(joiner, frame) for frame in frames] == frames
    assert [len(list(split(frame))) for frame in frames] == [1, 1, 1, 2, 1, 1]


def test_rows_of_no_nodes() -> None:
    frame = SweepFrame(sweep_of(1), kept=(False,), rows=Rows(Codec.BF16, 0, 8, b""))
    assert join(FrameAssembler(), frame) == frame


@pytest.mark.parametrize("announced", [31, 33, 0])
def test_an_announcement_that_differs_from_the_header(announced: int) -> None:
    head = encode_frame(frame_of(2, 4))
    with pytest.raises(RemoteProtocolError, match="32"):
        FrameAssembler().feed(encode_part(len(head), announced, [head]))


def test_rows_announced_for_a_message_that_has_none() -> None:
    head = encode_frame(Ping(1))
    with pytest.raises(RemoteProtocolError, match="rows"):
        FrameAssembler().feed(encode_part(len(head), 4, [head, b"abcd"]))


@pytest.mark.parametrize("limits", [FrameLimits(head_bytes=8), FrameLimits(rows_bytes=31)])
def test_frames_over_the_limit(limits: FrameLimits) -> None:
    head = encode_frame(frame_of(2, 4))
    with pytest.raises(RemoteProtocolError, match="limits"):
        FrameAssembler(limits).feed(encode_part(len(head), 32, [head]))


def test_nothing_is_allocated_for_a_lie() -> None:
    huge = SweepFrame(sweep_of(64), rows=Rows(Codec.FP32, 64, MIB, b""))
    head = encode_frame(huge)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            FrameAssembler(FrameLimits(rows_bytes=128 * MIB)).feed(encode_part(len(head), 256 * MIB, [head]))
        with pytest.raises(RemoteProtocolError):
            FrameAssembler(FrameLimits(rows_bytes=512 * MIB)).feed(encode_part(len(head), 255 * MIB, [head]))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_parts_out_of_place() -> None:
    first, *rest = split(frame_of(300, 1000))
    with pytest.raises(RemoteProtocolError, match="no frame"):
        FrameAssembler().feed(rest[0])
    joiner = FrameAssembler()
    joiner.feed(first)
    with pytest.raises(RemoteProtocolError, match="inside another"):
        joiner.feed(first)


@pytest.mark.parametrize("data", [b"", b"x" * 1_000_000], ids=["none", "too much"])
def test_continuations_of_the_wrong_size(data: bytes) -> None:
    first, _ = split(frame_of(300, 1000))
    joiner = FrameAssembler()
    joiner.feed(first)
    with pytest.raises(RemoteProtocolError, match="part"):
        joiner.feed(encode_part(0, 0, [data]))


def test_a_part_that_is_too_large() -> None:
    with pytest.raises(RemoteProtocolError, match="1 MiB"):
        FrameAssembler().feed(encode_part(5, 2 * MIB, [bytes(2 * MIB)]))


def test_values_that_are_not_what_the_rows_say_are_our_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="rows"):
        list(split(SweepFrame(sweep_of(1), rows=Rows(Codec.FP32, 1, 4, bytes(15)))))


# Packed rows (F6)


def packed_frame(count: int = 64, width: int = 32) -> SweepFrame:
    rows = Rows(Codec.BF16, count, width, bytes(2 * count * width))
    frame = SweepFrame(sweep_of(count), rows=pack(rows))
    assert frame.rows is not None
    assert frame.rows.is_packed
    return frame


@pytest.mark.parametrize("part_bytes", [1_000, PART_BYTES])
def test_packed_rows_arrive_unpacked(part_bytes: int) -> None:
    frame, joiner = packed_frame(), FrameAssembler(FrameLimits(rows_bytes=2 * 64 * 32))
    *first, last = split(frame, part_bytes)
    assert all(joiner.feed(part) is None for part in first)
    assert joiner.feed(last) == with_rows(frame, unpack)


@pytest.mark.parametrize("size", [0, 64 * 32, 2 * 64 * 32])
def test_packed_rows_have_a_least_and_a_most_size(size: int) -> None:
    head = encode_frame(packed_frame())
    with pytest.raises(RemoteProtocolError, match=f"{size} bytes announced, packed of 4096"):
        FrameAssembler().feed(encode_part(len(head), size, (head,)))


def test_packed_rows_are_bounded_by_what_they_become() -> None:
    frame = packed_frame()
    with pytest.raises(RemoteProtocolError, match="the limit is 4095"):
        join(FrameAssembler(FrameLimits(rows_bytes=2 * 64 * 32 - 1)), frame)


def test_int8_rows_are_never_packed() -> None:
    rows = Rows(Codec.INT8, 16, 32, bytes(16 * 34), is_packed=True)
    with pytest.raises(RemoteProtocolError, match="int8 rows are never packed"):
        join(FrameAssembler(), SweepFrame(sweep_of(16), rows=rows))
