"""Every type of values, against the format's own library, bit for bit."""

from __future__ import annotations

import gguf
import numpy
import pytest
import torch

from swarm.files.gguf.encodings import ENCODINGS, Encoding
from swarm.files.stored.gguf_source import GgufMatrix

PLAIN = {"f32": numpy.float32, "f16": numpy.float16}
PACKED = [one for one in ENCODINGS.values() if one.dtype is None]


def drawn(encoding: Encoding, rows: int, blocks: int) -> numpy.ndarray[tuple[int, int], numpy.dtype[numpy.uint8]]:
    """Rows of random bytes, which are values in every type, infinite and none among them."""
    return numpy.random.default_rng(encoding.kind).integers(0, 256, (rows, blocks * encoding.block_bytes), numpy.uint8)


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda one: one.name)
def test_a_type_decodes_to_the_very_bits_of_the_library(encoding: Encoding) -> None:
    kind = gguf.GGMLQuantizationType(encoding.kind)
    assert kind.name.lower() == encoding.name
    assert gguf.GGML_QUANT_SIZES[kind] == (encoding.block, encoding.block_bytes)
    raw = drawn(encoding, 64, 4)
    if encoding.name in PLAIN:
        theirs = raw.view(PLAIN[encoding.name]).astype(numpy.float32)
    else:
        with numpy.errstate(all="ignore"):
            theirs = gguf.quants.dequantize(raw, kind)
    ours = encoding.decode(torch.from_numpy(raw)).numpy()
    assert ours.shape == theirs.shape
    is_none = numpy.isnan(theirs)
    assert (numpy.isnan(ours) == is_none).all()
    assert (ours[~is_none].view(numpy.int32) == theirs[~is_none].view(numpy.int32)).all()


@pytest.mark.parametrize("encoding", PACKED, ids=lambda one: one.name)
def test_any_row_decodes_by_itself(encoding: Encoding) -> None:
    matrix = GgufMatrix(torch.from_numpy(drawn(encoding, 12, 2)), encoding)
    whole = matrix.decode(0, 12)
    assert (matrix.rows, matrix.columns, matrix.encoding) == (12, 2 * encoding.block, encoding.name)
    order = torch.tensor([7, 0, 11])
    torch.testing.assert_close(matrix.select(order).decode(0, 3), whole[order], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(matrix.decode(5, 9), whole[5:9], rtol=0, atol=0, equal_nan=True)
    assert matrix.size_bytes == 12 * 2 * encoding.block_bytes
