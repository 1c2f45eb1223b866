"""Packed rows are the rows bit for bit, and nothing that claims to be packed rows raises anything else or grows."""

from __future__ import annotations

import contextlib
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import RemoteProtocolError
from swarm.compute.row_codec import DTYPES, encode_rows
from swarm.protocol.messages import Codec, Rows
from swarm.protocol.packed_rows import BLOCK, LEAST_ROWS, least_packed_bytes, pack, unpack

FLOATS = tuple(DTYPES)
ODD = {
    Codec.FP32: (0x7FC00000, 0x7F800001, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0),
    Codec.BF16: (0x7FC0, 0x7F81, 0xFF80, 0x8000, 0x0001, 0x807F, 0x7F7F, 0),
    Codec.FP16: (0x7E00, 0x7C01, 0xFC00, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0),
}
"""NaN, signalling NaN, -infinity, -0, the least and a large denormal, the largest number, 0."""


def hidden(codec: Codec, count: int, width: int, seed: int = 0) -> Rows:
    """Rows as a model has them: a few large channels, and noise."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(1, width, generator=generator).exp()
    return encode_rows(torch.randn(count, width, generator=generator).mul(scales).to(DTYPES[codec]), codec)


@st.composite
def rows_to_pack(draw: st.DrawFn) -> Rows:
    """Any number of rows, with odd values at any places."""
    codec, count, width = draw(st.sampled_from(FLOATS)), draw(st.integers(0, 40)), draw(st.integers(1, 70))
    data = np.frombuffer(bytearray(hidden(codec, count, width, draw(st.integers(0, 9))).data), f"<u{codec.item_bytes}")
    for place in draw(st.lists(st.integers(0, max(data.size - 1, 0)), max_size=50)) if data.size else ():
        data[place] = draw(st.sampled_from(ODD[codec]) | st.integers(0, (1 << 8 * codec.item_bytes) - 1))
    return Rows(codec, count, width, data.tobytes())


@given(rows_to_pack())
def test_any_rows_come_back_bit_for_bit(rows: Rows) -> None:
    sent = pack(rows)
    assert sent.is_packed or sent is rows
    back = unpack(sent)
    assert (back.codec, back.count, back.width, back.is_packed) == (rows.codec, rows.count, rows.width, False)
    assert bytes(back.data) == bytes(rows.data)


@pytest.mark.parametrize(("codec", "most"), [(Codec.FP32, 0.86), (Codec.BF16, 0.72), (Codec.FP16, 0.90)])
@pytest.mark.parametrize("width", [257, 3 * BLOCK // LEAST_ROWS + 1])
def test_rows_of_a_model_get_smaller(codec: Codec, most: float, width: int) -> None:
    rows = hidden(codec, LEAST_ROWS, width)
    sent = pack(rows)
    assert sent.is_packed
    assert least_packed_bytes(rows) < len(sent.data) < most * rows.size_bytes
    assert bytes(unpack(sent).data) == bytes(rows.data)


def test_what_does_not_pay_travels_as_it_is() -> None:
    few, int8 = hidden(Codec.BF16, LEAST_ROWS - 1, 64), Rows(Codec.INT8, 32, 32, bytes(32 * 34))
    noise = Rows(Codec.BF16, 64, 64, np.random.default_rng(0).bytes(2 * 64 * 64))
    packed = pack(hidden(Codec.BF16, 64, 64))
    assert [pack(rows) is rows for rows in (few, int8, noise, packed)] == [True] * 4
    assert packed.is_packed


@given(st.sampled_from(FLOATS), st.integers(0, 10_000), st.data())
def test_broken_packed_rows_are_a_protocol_error(codec: Codec, place: int, data: st.DataObject) -> None:
    rows = hidden(codec, 20, 33)
    octets = bytearray(pack(rows).data)
    match data.draw(st.sampled_from(("change", "cut", "extend"))):
        case "change":
            octets[place % len(octets)] ^= data.draw(st.integers(1, 255))
        case "cut":
            del octets[max(least_packed_bytes(rows), place % len(octets)) :]
        case _:
            octets += data.draw(st.binary(min_size=1, max_size=20))
    with contextlib.suppress(RemoteProtocolError):
        assert unpack(replace(rows, data=octets, is_packed=True)).size_bytes == rows.size_bytes


@pytest.mark.parametrize("codec", FLOATS)
@pytest.mark.parametrize("more", [-1, 1, 50 << 20])
def test_a_stream_of_another_length_is_refused_before_it_grows(codec: Codec, more: int) -> None:
    rows = hidden(codec, 20, 33)
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = coder.compress(bytes(20 * 33 + more)) + coder.flush()
    data = bytes(least_packed_bytes(rows)) + bomb
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match="not exactly 660") as caught:
        unpack(replace(rows, data=data, is_packed=True))
    assert caught.value.field == "rows"
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_what_follows_the_stream_is_refused() -> None:
    packed = pack(hidden(Codec.BF16, 20, 33))
    with pytest.raises(RemoteProtocolError, match="not exactly"):
        unpack(replace(packed, data=bytes(packed.data) + b"\0"))
    with pytest.raises(RemoteProtocolError, match="not exactly"):
        unpack(replace(packed, data=bytes(packed.data)[:-1]))
