"""Products with integers as they are: every format's values, each row by itself, and rows taken out again."""

from __future__ import annotations

import gguf
import numpy
import pytest
import torch

from swarm.compute.weights.codes_weight import MOST_ROWS, CodesKind, CodesWeight, codes_bytes
from swarm.compute.weights.stored_weight import StackedWeight, StoredWeight, hold
from swarm.files.gguf.encodings import ENCODINGS, Encoding
from swarm.files.stored.combine import GroupedMatrix
from swarm.files.stored.gguf_source import GgufMatrix
from swarm.files.stored.matrix import StoredMatrix
from swarm.files.stored.source import StoredSize

ROWS, COLUMNS = 200, 512
ON_A_LINE = [one for one in ENCODINGS.values() if one.grain is not None]
ROUNDED = 0.004
"""Of a product, relative to its size: steps and results in bfloat16."""
HALVES = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Where blocks have a float16 step."""


def drawn(encoding: Encoding, rows: int = ROWS, seed: int = 0) -> GgufMatrix:
    """Random codes with steps of one size."""
    raw = numpy.random.default_rng(seed).integers(0, 256, (rows, encoding.row_bytes(COLUMNS)), numpy.uint8)
    blocks = torch.from_numpy(raw).view(-1, encoding.block_bytes)
    step = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if encoding.name == "mxfp4":
        blocks[:, 0] = 120
    for start in HALVES.get(encoding.name, (0, 2) if encoding.name in ("q4_1", "q5_1") else (0,)):
        if encoding.name != "mxfp4":
            blocks[:, start : start + 2] = step
    return GgufMatrix(blocks.view(rows, -1), encoding)


def grouped(name: str, group: int, *, is_ordered: bool = False) -> GroupedMatrix:
    """A matrix of GPTQ's kind, whose columns may lie in any order."""
    draw = torch.Generator().manual_seed(3)
    bits = int(name[-1])
    codes = torch.randint(0, 256, (ROWS, COLUMNS * bits // 8), generator=draw).to(torch.uint8)
    scales = (torch.rand(ROWS, COLUMNS // group, generator=draw) * 0.01 + 0.005).to(torch.float16)
    zeros = torch.randint(0, 1 << bits, (ROWS, COLUMNS // group), generator=draw).to(torch.uint8)
    order = torch.randperm(COLUMNS, generator=draw) // group if is_ordered else None
    return GroupedMatrix.of(name, codes, scales, zeros, order)


MATRICES: dict[str, StoredMatrix] = {
    **{one.name: drawn(one) for one in ON_A_LINE},
    "gptq4": grouped("gptq4", 128),
    "ordered": grouped("gptq4", 64, is_ordered=True),
    "int8": grouped("ct8", COLUMNS),
}


def held(matrix: StoredMatrix) -> CodesWeight:
    kind = CodesKind.of(matrix)
    assert kind is not None
    return CodesWeight(kind, [matrix], torch.bfloat16)


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).bfloat16()


def test_most_published_types_are_integers_on_a_line() -> None:
    names = {one.name for one in ON_A_LINE}
    assert names >= {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS + 1])
def test_a_product_is_the_formats_own_but_for_rounded_steps(name: str, rows: int) -> None:
    matrix, x = MATRICES[name], inputs(rows)
    exact = x.double() @ matrix.decode(0, ROWS).double().t()
    own = held(matrix).product(x).double()
    assert own.shape == exact.shape
    assert float((own - exact).norm() / exact.norm()) <= ROUNDED


@pytest.mark.parametrize("name", MATRICES)
def test_a_rows_bits_depend_on_nothing_beside_it(name: str) -> None:
    weight, x = held(MATRICES[name]), inputs(64)
    every = weight.product(x)
    for start, end in ((0, 1), (63, 64), (10, 12), (5, 22), (0, 64)):
        assert torch.equal(weight.product(x[start:end]), every[start:end])


@pytest.mark.parametrize("name", MATRICES)
def test_rows_are_taken_out_of_what_products_read(name: str) -> None:
    matrix, weight = MATRICES[name], held(MATRICES[name])
    ids = torch.tensor([0, 199, 63, 64, 64, 127])
    taken = weight.take(ids)
    assert torch.equal(taken, weight.restored()[ids])
    values = matrix.decode(0, ROWS)[ids]
    assert float((taken.float() - values).norm() / values.norm()) <= ROUNDED


def test_x_may_have_more_dimensions_and_a_bias_is_added() -> None:
    weight, x = held(MATRICES["q4_k"]), inputs(6)
    bias = torch.arange(ROWS).bfloat16()
    flat = weight.product(x)
    assert torch.equal(weight.product(x.view(1, 2, 3, COLUMNS)), flat.view(1, 2, 3, ROWS))
    assert torch.equal(weight.product(x[None].transpose(0, 1)), flat[:, None])
    assert torch.equal(weight.product(x, bias), flat + bias)
    many = inputs(MOST_ROWS + 3)
    assert torch.equal(weight.product(many, bias), weight.product(many) + bias)


def test_matrices_of_one_kind_share_a_product_and_others_stand_below() -> None:
    q4, q6, other = MATRICES["q4_k"], MATRICES["q6_k"], drawn(ENCODINGS[16])
    x = inputs(3)
    joined = hold([q4, q4, q6, other], torch.bfloat16, codes=True)
    assert isinstance(joined, StackedWeight)
    parts = [held(q4).product(x)] * 2 + [held(q6).product(x), StoredWeight([other], torch.bfloat16).product(x)]
    assert torch.equal(joined.product(x), torch.cat(parts, 1))
    assert torch.equal(
        joined.take(torch.tensor([450, 3])),
        torch.cat([held(q6).take(torch.tensor([50])), held(q4).take(torch.tensor([3]))]),
    )
    assert isinstance(hold([q4, q4], torch.bfloat16, codes=True), CodesWeight)
    assert isinstance(hold([q4], torch.bfloat16, codes=False), StoredWeight)


@pytest.mark.parametrize("encoding", ON_A_LINE, ids=lambda one: one.name)
def test_what_it_takes_is_known_before(encoding: Encoding) -> None:
    rows = 128  # whole tiles
    matrix = drawn(encoding, rows)
    size = StoredSize(rows * COLUMNS, matrix.size_bytes, *(encoding.grain or ()))
    assert codes_bytes(size) == sum(part.numel() * part.itemsize for part in held(matrix).parameters())


def test_a_codes_weight_knows_what_gguf_calls_its_values() -> None:
    """The library's own decoding, not ours."""
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).numpy() * 0.05
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
    theirs = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_0))
    own = held(GgufMatrix(torch.from_numpy(raw), ENCODINGS[2])).restored().float()
    assert float((own - theirs).norm() / theirs.norm()) <= ROUNDED
