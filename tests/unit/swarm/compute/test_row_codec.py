"""Rows survive the lossless codecs bit for bit, and what is not finite is refused. Int8 has `test_int8.py`."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import LocalProtocolError, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.compute.row_codec import DTYPES, all_finite, check_width, decode_rows, encode_rows, lossless_codec
from swarm.protocol.frames import FrameAssembler, split
from swarm.protocol.messages import Codec, Rows, Sweep, SweepFrame
from tests.devices import DEVICES

SHAPES = st.tuples(st.integers(0, 5), st.integers(1, 7))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", DTYPES)
def test_the_lossless_codec_keeps_every_bit(codec: Codec, device: str) -> None:
    dtype = DTYPES[codec]
    values = torch.randn(2048, 64, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    values[0, :3] = torch.tensor([0.0, -0.0, torch.finfo(dtype).max], dtype=dtype)
    rows = encode_rows(values, lossless_codec(dtype))
    assert (rows.codec, rows.count, rows.width, len(rows.data)) == (codec, 2048, 64, rows.size_bytes)
    back = decode_rows(rows, dtype, device)
    assert back.device.type == device
    assert torch.equal(back, values)
    assert torch.equal(torch.signbit(back), torch.signbit(values))


@given(SHAPES, st.sampled_from(list(DTYPES)), st.data())
def test_all_finite_values_survive(shape: tuple[int, int], codec: Codec, data: st.DataObject) -> None:
    count = shape[0] * shape[1]
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=16 if codec is Codec.FP16 else 32)
    values = torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count))).reshape(shape)
    values = values.to(DTYPES[codec]).clamp(torch.finfo(DTYPES[codec]).min, torch.finfo(DTYPES[codec]).max)
    back = decode_rows(encode_rows(values, codec), values.dtype)
    assert torch.equal(back, values)


def test_bytes_are_little_endian_and_row_major() -> None:
    rows = encode_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), Codec.FP32)
    assert bytes(rows.data) == struct.pack("<4f", 1, 2, 3, 4)
    assert bytes(encode_rows(torch.tensor([[1.0]]), Codec.BF16).data) == b"\x80\x3f"
    assert bytes(encode_rows(torch.tensor([[1.0]]), Codec.FP16).data) == b"\x00\x3c"


def test_views_are_encoded_as_they_look() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    for view in (whole[1:3], whole[:, 1:4], whole.t(), whole[::2]):
        assert torch.equal(decode_rows(encode_rows(view.requires_grad_(False), Codec.FP32), torch.float32), view)


def test_encoding_a_matrix_copies_nothing() -> None:
    values = torch.zeros(2, 2)
    rows = encode_rows(values, Codec.FP32)
    values[0, 0] = 1
    assert bytes(rows.data)[:4] == struct.pack("<f", 1)


def test_a_narrower_codec_rounds_and_a_wider_one_is_exact() -> None:
    third = torch.tensor([[1 / 3]])
    narrow = decode_rows(encode_rows(third, Codec.BF16), torch.float32)
    assert torch.equal(narrow, third.bfloat16().float())
    assert not torch.equal(narrow, third)
    wide = decode_rows(encode_rows(third.bfloat16(), Codec.FP32), torch.bfloat16)
    assert torch.equal(wide, third.bfloat16())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", DTYPES)
@pytest.mark.parametrize("place", [0, 1000, 64 * 33 - 1])
def test_values_that_are_not_finite(codec: Codec, bad: float, place: int, device: str) -> None:
    values = torch.zeros(64, 33)
    values.view(-1)[place] = bad
    assert not all_finite(values)
    with pytest.raises(RemoteProtocolError, match="not finite"):
        decode_rows(encode_rows(values, codec), DTYPES[codec], device)


def test_a_value_too_large_for_the_compute_dtype() -> None:
    rows = encode_rows(torch.tensor([[1e6]]), Codec.FP32)
    with pytest.raises(RemoteProtocolError, match=r"not finite in torch\.float16"):
        decode_rows(rows, torch.float16)


def test_no_rows() -> None:
    rows = encode_rows(torch.empty(0, 8), Codec.BF16)
    assert rows == Rows(Codec.BF16, 0, 8, b"")
    assert decode_rows(rows, torch.float32).shape == (0, 8)


def test_wrong_sizes() -> None:
    with pytest.raises(RemoteProtocolError, match="15 bytes"):
        decode_rows(Rows(Codec.FP32, 1, 4, bytes(15)), torch.float32)
    with pytest.raises(RemoteProtocolError, match="width 4 instead of the model's 8"):
        check_width(Rows(Codec.FP32, 1, 4, bytes(16)), 8)
    check_width(Rows(Codec.FP32, 1, 4, bytes(16)), 4)
    with pytest.raises(LocalProtocolError, match="rows"):
        encode_rows(torch.zeros(4), Codec.FP32)


def test_no_codec_for_float64() -> None:
    with pytest.raises(LocalProtocolError, match="float64"):
        lossless_codec(torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_2048_rows_of_8192_through_parts(dtype: torch.dtype) -> None:
    values = torch.arange(2048 * 8192, dtype=torch.int32).view(2048, 8192).remainder_(251).to(dtype)
    parents = (None, *map(TreeNodeId, range(2047)))
    sweep = Sweep(1, 0, TreeNodeId(0), tuple(range(2048)), parents, TreeNodeId(0))
    joiner = FrameAssembler()
    messages = [joiner.feed(part) for part in split(SweepFrame(sweep, rows=encode_rows(values, lossless_codec(dtype))))]
    message = messages[-1]
    assert isinstance(message, SweepFrame)
    assert message.rows is not None
    assert torch.equal(decode_rows(message.rows, dtype), values)
