"""Int8 blocks: their bytes, their error, that a row never depends on another, and what is refused."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import LocalProtocolError, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.compute.int8 import MAX_SCALE, MIN_SCALE
from swarm.compute.row_codec import decode_rows, encode_rows
from swarm.protocol.frames import FrameAssembler, FrameLimits, split
from swarm.protocol.messages import Codec, Rows, Sweep, SweepFrame
from swarm.protocol.wire import PART_BYTES, encode_frame, encode_part
from tests.devices import DEVICES

WIDTHS = [1, 31, 32, 33, 192, 8192]


def rows_like_a_models(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different sizes, with outliers."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(count, width, generator=generator) * 10.0 ** torch.arange(-3, count - 3)[:, None]
    rows[:, width // 2] *= 200
    return rows.to(dtype)


def scales_of(rows: Rows) -> torch.Tensor:
    """The scales [n, blocks] as they stand in the bytes."""
    blocks = -(-rows.width // 32)
    octets = np.frombuffer(rows.data, np.uint8).reshape(rows.count, -1)
    return torch.from_numpy(octets[:, : 2 * blocks].copy().view(np.int16)).view(torch.bfloat16).float()


def step_of(rows: Rows) -> torch.Tensor:
    """The scale of each value [n, d]."""
    return scales_of(rows).repeat_interleave(32, dim=1)[:, : rows.width]


def bf16(scale: float) -> bytes:
    return struct.pack("<f", scale)[2:]


def crafted(scale: float, level: int) -> Rows:
    """One row of 33 values whose second block has this scale and this one level."""
    return Rows(Codec.INT8, 1, 33, bf16(1.0) + bf16(scale) + bytes(32) + struct.pack("b", level))


def test_bytes_scales_first_then_levels_ties_to_even() -> None:
    row = torch.zeros(1, 34)
    row[0, :7] = torch.tensor([254.0, 1.0, 3.0, -5.0, 5.1, -254.0, -1.0])
    row[0, 32:] = torch.tensor([-127.0, 0.6])
    rows = encode_rows(row, Codec.INT8)
    levels = struct.pack("7b", 127, 0, 2, -2, 3, -127, 0) + bytes(25) + struct.pack("2b", -127, 1)
    assert bytes(rows.data) == bf16(2.0) + bf16(1.0) + levels
    back = decode_rows(rows, torch.float32)
    assert back[0, :7].tolist() == [254, 0, 4, -4, 6, -254, 0]
    assert back[0, 32:].tolist() == [-127, 1]


@pytest.mark.parametrize("width", WIDTHS)
def test_sizes(width: int) -> None:
    rows = encode_rows(rows_like_a_models(3, width), Codec.INT8)
    assert Codec.INT8.row_bytes(width) == width + 2 * math.ceil(width / 32)
    assert len(rows.data) == rows.size_bytes == 3 * Codec.INT8.row_bytes(width)
    assert decode_rows(rows, torch.float32).shape == (3, width)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", MAX_SCALE)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_value_is_off_by_more_than_half_a_step(width: int, dtype: torch.dtype, device: str) -> None:
    values = rows_like_a_models(5, width, dtype)
    rows = encode_rows(values.to(device), Codec.INT8)
    back = decode_rows(rows, torch.float32, device).cpu()
    off = (back - values.float()).abs()
    assert (off <= step_of(rows) * 0.500001).all()
    assert (scales_of(rows).amax(1) <= values.float().abs().amax(1) / 127 * (1 + 2**-8)).all()
    decoded = decode_rows(rows, dtype, device)
    assert (decoded.dtype, decoded.device.type) == (dtype, device)
    assert torch.equal(decoded.cpu(), back.to(dtype))


def any_values(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    """Rows [n, d] of any bits that are finite, extremes and subnormals too."""
    limit = torch.finfo(dtype).max

    def of_bits(shape: tuple[int, int], bits: bytes) -> torch.Tensor:
        values = torch.frombuffer(bytearray(bits), dtype=dtype)[: shape[0] * shape[1]].view(shape)
        return values.nan_to_num(nan=1.0, posinf=limit, neginf=-limit)

    shapes = st.tuples(st.integers(1, 4), st.integers(1, 70))
    return shapes.flatmap(lambda shape: st.builds(of_bits, st.just(shape), bits_of(shape[0] * shape[1] * 4)))


def bits_of(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


@given(st.sampled_from(list(MAX_SCALE)), st.data())
def test_all_that_is_finite_stays_so_and_near(dtype: torch.dtype, data: st.DataObject) -> None:
    """Within half a step, a whole one where a greater scale would overflow, and the compute dtype's own rounding."""
    values = data.draw(any_values(dtype))
    rows = encode_rows(values, Codec.INT8)
    steps, back = step_of(rows).double(), decode_rows(rows, dtype).double()
    reach = torch.where(steps >= MAX_SCALE[dtype], 1.0, 0.5) * steps
    rounding = back.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    assert ((back - values.double()).abs() <= reach * 1.000001 + rounding).all()


@given(any_values(torch.float32), st.integers(0, 4))
def test_a_rows_bytes_do_not_depend_on_the_rows_beside_it(values: torch.Tensor, cut: int) -> None:
    """Nor on their order, nor on how a sweep is cut into slices."""
    count, width = values.shape
    size = Codec.INT8.row_bytes(width)
    joint = bytes(encode_rows(values, Codec.INT8).data)
    alone = [bytes(encode_rows(row[None], Codec.INT8).data) for row in values]
    assert [joint[start : start + size] for start in range(0, len(joint), size)] == alone
    slices = [bytes(encode_rows(piece, Codec.INT8).data) for piece in (values[:cut], values[cut:])]
    assert b"".join(slices) == joint
    assert bytes(encode_rows(values.flip(0), Codec.INT8).data) == b"".join(reversed(alone))
    together = decode_rows(Rows(Codec.INT8, count, width, joint), torch.float32)
    apart = [decode_rows(Rows(Codec.INT8, 1, width, one), torch.float32) for one in alone]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize("width", WIDTHS)
def test_decoded_rows_encode_to_the_same_bytes(width: int) -> None:
    rows = encode_rows(rows_like_a_models(6, width), Codec.INT8)
    again = encode_rows(decode_rows(rows, torch.float32), Codec.INT8)
    assert bytes(again.data) == bytes(rows.data)


def test_zeros_are_exact_and_tiny_values_do_no_harm() -> None:
    values = torch.zeros(3, 64)
    values[0, 0] = 127.0
    values[1] = -0.0
    values[2, 3], values[2, 40] = 1e-40, -3e-37
    back = decode_rows(encode_rows(values, Codec.INT8), torch.float32)
    assert torch.equal(back[:2], values[:2])
    assert (back[2] - values[2]).abs().max() <= MIN_SCALE / 2


@pytest.mark.parametrize("dtype", MAX_SCALE)
def test_the_largest_values_of_a_dtype_stay_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([[largest, -largest, largest / 4, 0.0]], dtype=dtype)
    back = decode_rows(encode_rows(values, Codec.INT8), dtype).double()
    assert ((back - values.double()).abs() <= largest / 127).all()
    next_scale = torch.tensor(MAX_SCALE[dtype]).bfloat16().view(torch.int16).add(1).view(torch.bfloat16)
    assert not torch.isfinite((next_scale.double() * 127).to(dtype)), "no greater scale would do"


def test_views_are_encoded_as_they_look() -> None:
    whole = rows_like_a_models(6, 80)
    for view in (whole[1:3], whole[:, 1:42], whole.t(), whole[::2]):
        assert encode_rows(view, Codec.INT8).data == encode_rows(view.clone(), Codec.INT8).data


def test_encoding_changes_no_row() -> None:
    values = rows_like_a_models(4, 64)
    before = values.clone()
    encode_rows(values, Codec.INT8)
    assert torch.equal(values, before)


@pytest.mark.parametrize("width", [8, 32])
def test_no_rows(width: int) -> None:
    rows = encode_rows(torch.empty(0, width), Codec.INT8)
    assert rows == Rows(Codec.INT8, 0, width, b"")
    assert decode_rows(rows, torch.float32).shape == (0, width)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1000, 64 * 33 - 1])
def test_values_that_are_not_finite_are_not_encoded(bad: float, place: int, device: str) -> None:
    values = torch.ones(64, 33, device=device)
    values.view(-1)[place] = bad
    with pytest.raises(LocalProtocolError, match="not finite"):
        encode_rows(values, Codec.INT8)


@pytest.mark.parametrize("level", [0, 1, -127])
@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_is_refused(scale: float, level: int) -> None:
    with pytest.raises(RemoteProtocolError, match="not finite"):
        decode_rows(crafted(scale, level), torch.float32)


@pytest.mark.parametrize("scale", [-1.0, -0.0, 0.0, -math.inf])
def test_a_scale_that_is_not_positive_is_refused(scale: float) -> None:
    with pytest.raises(RemoteProtocolError, match="not positive"):
        decode_rows(crafted(scale, 1), torch.float32)


def test_a_value_too_large_for_the_compute_dtype() -> None:
    assert decode_rows(crafted(512.0, 127), torch.float16)[0, 32] == 65_024
    with pytest.raises(RemoteProtocolError, match=r"not finite in torch\.float16"):
        decode_rows(crafted(512.0, -128), torch.float16)
    with pytest.raises(RemoteProtocolError, match=r"not finite in torch\.float32"):
        decode_rows(crafted(2.0**122, 127), torch.float32)


@pytest.mark.parametrize("size", [0, 36, 38, 33 * 4])
def test_a_wrong_number_of_bytes_is_refused(size: int) -> None:
    rows = Rows(Codec.INT8, 1, 33, bytes(size))
    with pytest.raises(RemoteProtocolError, match=f"{size} bytes of values instead of 37"):
        decode_rows(rows, torch.float32)
    with pytest.raises(LocalProtocolError, match="instead of 37"):
        list(split(frame_of(rows)))


def frame_of(rows: Rows) -> SweepFrame:
    ids = tuple(map(TreeNodeId, range(rows.count)))
    return SweepFrame(Sweep(1, 0, TreeNodeId(0), ids, (None, *ids[:-1]), TreeNodeId(0)), rows=rows)


@pytest.mark.parametrize("announced", [64 * 8192, 64 * 8704 - 1, 64 * 8192 * 4])
def test_nothing_is_allocated_for_another_size_than_the_header_says(announced: int) -> None:
    head = encode_frame(frame_of(Rows(Codec.INT8, 64, 8192, b"")))
    joiner = FrameAssembler()
    with pytest.raises(RemoteProtocolError, match=f"{announced} bytes announced, the header says {64 * 8704}"):
        joiner.feed(encode_part(len(head), announced, (head,)))


def test_many_rows_through_parts() -> None:
    values = rows_like_a_models(8, 8192).repeat(64, 1)
    sent = encode_rows(values, Codec.INT8)
    parts = list(split(frame_of(sent)))
    assert len(parts) == sent.size_bytes // PART_BYTES + 1
    joiner = FrameAssembler(FrameLimits(rows_bytes=sent.size_bytes))
    message = [joiner.feed(part) for part in parts][-1]
    assert isinstance(message, SweepFrame)
    assert message.rows is not None
    assert torch.equal(decode_rows(message.rows, torch.float32), decode_rows(sent, torch.float32))
