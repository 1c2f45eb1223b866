"""Matrices as formats store them: rows that are chosen, joined and found again keep their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from swarm.compute.weights.stored_rows import DecodedMatrix, StoredRows
from swarm.compute.weights.stored_weight import StoredWeight
from swarm.files.gguf.encodings import ENCODINGS
from swarm.files.stored.combine import NUMBERS, Fp4Matrix, GroupedMatrix, LookupMatrix, compressed, fp8, modelopt
from swarm.files.stored.eight_bits import Fp8Matrix
from swarm.files.stored.gguf_source import GgufMatrix
from swarm.files.stored.matrix import PartedMatrix
from swarm.files.stored.quantised import format_name, refusal
from swarm.files.stored.source import StoredTensor

ROWS, COLUMNS = 12, 128


def numbers(*shape: int, seed: int, most: int = 256) -> torch.Tensor:
    made = torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))
    return made.to(torch.uint8)


def scales(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype)


def fp8_matrix(seed: int) -> PartedMatrix:
    weight = numbers(ROWS, COLUMNS, seed=seed, most=120).view(torch.float8_e4m3fn)
    return Fp8Matrix.of(weight, scales(3, 4, seed=seed), block=(4, 32))


def ordered_matrix(seed: int) -> PartedMatrix:
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(seed)) // 32
    own = scales(ROWS, 4, seed=seed, dtype=torch.float16)
    return GroupedMatrix.of(
        "gptq4", numbers(ROWS, COLUMNS // 2, seed=seed), own, numbers(ROWS, 4, seed=9, most=15), order
    )


def nested_matrix(seed: int) -> PartedMatrix:
    return LookupMatrix(
        rows=ROWS,
        columns=COLUMNS,
        encoding="nf4",
        codes=numbers(ROWS, COLUMNS // 2, seed=seed),
        scales=numbers(ROWS, 4, seed=seed + 1),
        place=torch.arange(ROWS, dtype=torch.int32) * 4,
        nested=scales(3, seed=seed).view(torch.int32),
        offset=torch.full((ROWS,), 0.25 * seed).view(torch.int32),
        block=32,
        numbers=NUMBERS,
        nested_numbers=tuple(map(float, range(256))),
        nested_block=20,
        result=torch.bfloat16,
    )


def fp4_matrix(seed: int) -> PartedMatrix:
    own = scales(ROWS, COLUMNS // 16, seed=seed).to(torch.float8_e4m3fn).view(torch.uint8)
    overall = torch.full((ROWS,), 3.0).view(torch.int32)
    codes = numbers(ROWS, COLUMNS // 2, seed=seed)
    return Fp4Matrix(ROWS, COLUMNS, "nvfp4", codes, own, overall, 16, torch.float8_e4m3fn, True, torch.float32)


def eight_bit_matrix(seed: int) -> PartedMatrix:
    codes = numbers(ROWS, COLUMNS, seed=seed).view(torch.int8)
    return replace(GroupedMatrix.of("bnb8", codes, scales(ROWS, 1, seed=seed)), factor=1 / 127)


MATRICES: dict[str, Callable[[int], PartedMatrix]] = {
    "fp8": fp8_matrix,
    "order": ordered_matrix,
    "nested": nested_matrix,
    "fp4": fp4_matrix,
    "int8": eight_bit_matrix,
}


@pytest.mark.parametrize("kind", ["order", "fp4", "int8"])
def test_integers_on_a_line_stand_for_the_values(kind: str) -> None:
    matrix = MATRICES[kind](1)
    codes = matrix.linear_codes(2, ROWS)
    assert codes is not None
    assert int(codes.codes.max()) < 1 << codes.bits
    values = matrix.decode(2, ROWS)
    ordered = values if codes.order is None else values.index_select(1, codes.order)
    torch.testing.assert_close(codes.values(), ordered, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES)
def test_chosen_and_joined_rows_keep_their_values(make: Callable[[int], PartedMatrix]) -> None:
    one, other = make(1), make(2)
    both = torch.cat([one.decode(0, ROWS), other.decode(0, ROWS)])
    assert one.joins(other)
    joined = one.join([other])
    assert torch.equal(joined.decode(0, 2 * ROWS), both)
    assert torch.equal(joined.decode(5, 19), both[5:19])
    picked = torch.randperm(2 * ROWS, generator=torch.Generator().manual_seed(0))[:17]
    assert torch.equal(joined.select(picked).decode(0, 17), both[picked])
    assert all(not part.is_floating_point() for part in joined.parts().values())
    assert not one.joins(replace(other, encoding="other"))


@pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES)
def test_rows_are_found_wherever_a_class_puts_them(make: Callable[[int], PartedMatrix]) -> None:
    matrices = [make(seed) for seed in (1, 2, 3)]
    values = [matrix.decode(0, ROWS) for matrix in matrices]
    stored = StoredRows(DecodedMatrix(*pair) for pair in zip(matrices, values, strict=True))
    woven = torch.stack(values[:2], 1).flatten(0, 1)
    for weight in (values[2], values[1][3:9], torch.cat(values), woven, woven.flip(0), values[0][[2, 2, 2]]):
        pieces = stored.find(weight)
        assert pieces is not None
        held = StoredWeight(pieces, torch.float32)
        assert torch.equal(held.restored(), weight)
        ids = torch.tensor([0, len(weight) - 1, 1])
        assert torch.equal(held.take(ids), weight[ids])
        x = torch.randn(3, COLUMNS)
        bias = torch.randn(len(weight))
        assert torch.allclose(held.product(x, bias), x @ weight.t() + bias, atol=1e-3)
        assert torch.allclose(held.product_of(x, 1, 3), held.product(x)[:, 1:3], atol=1e-2)
    assert stored.find(torch.cat([values[0], torch.ones(1, COLUMNS)])) is None
    assert stored.find(values[0][:, :64]) is None
    off = values[0].clone()
    off[5, 1::2] += 1  # beside the columns that keys are made of
    assert stored.find(off) is None


def test_rows_that_differ_beside_the_columns_of_their_keys_are_told_apart() -> None:
    """As those of a vocabulary's tokens that were never trained, which are zeros but for a few columns."""
    own = torch.zeros(6, 256, dtype=torch.bfloat16)
    own[:, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 2.0])
    own[2, 1] = own[4, 3] = 3.0
    matrix = GgufMatrix(own.view(torch.uint8), ENCODINGS[30])
    values = matrix.decode(0, 6)
    pieces = StoredRows([DecodedMatrix(matrix, values)]).find(values.flip(0))
    assert pieces is not None
    assert torch.equal(StoredWeight(pieces, torch.float32).restored(), values.flip(0))


@pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES)
def test_many_threads_read_the_same_values(
    make: Callable[[int], PartedMatrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = make(1).decode(0, ROWS)
    taken: list[torch.Tensor] = []
    take = torch.take

    def noted(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        taken.append(codes)
        return take(table, codes)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "take", noted)
    assert torch.equal(make(1).decode(0, ROWS), values)
    assert bool(taken) == (make not in (ordered_matrix, eight_bit_matrix)), "which have no table"


def test_matrices_of_two_formats_lie_one_below_the_other() -> None:
    matrices = [fp8_matrix(1), nested_matrix(2), fp8_matrix(3)]
    values = torch.cat([matrix.decode(0, ROWS) for matrix in matrices])
    stored = StoredRows(DecodedMatrix(one, one.decode(0, ROWS)) for one in matrices)
    pieces = stored.find(values)
    assert pieces is not None
    assert [piece.encoding for piece in pieces] == ["fp8", "nf4", "fp8"]
    assert torch.equal(StoredWeight(pieces, torch.float32).restored(), values)


def test_the_last_block_of_fp8_may_be_cut_off() -> None:
    """As in DeepSeek-V3, whose key and value projection has 576 rows in blocks of 128."""
    weight = numbers(10, 70, seed=3, most=120).view(torch.float8_e4m3fn)
    own = scales(3, 3, seed=3)
    spread = own.repeat_interleave(4, 0)[:10].repeat_interleave(32, 1)[:, :70]
    matrix = Fp8Matrix.of(weight, own, block=(4, 32))
    assert torch.equal(matrix.decode(0, 10), weight.float() * spread)
    with pytest.raises(ValueError, match="do not fit"):
        Fp8Matrix.of(weight, scales(11, 3, seed=3))


def test_scales_that_are_exponents_are_powers_of_two() -> None:
    weight = numbers(2, 64, seed=4, most=120).view(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 130], [120, 0]], dtype=torch.uint8)
    matrix = Fp8Matrix.of(weight, exponents, torch.float32, (1, 32))
    powers = torch.tensor([[1.0, 8.0], [2.0**-7, 2.0**-127]]).repeat_interleave(32, 1)
    assert torch.equal(matrix.decode(0, 2), weight.float() * powers)


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["matrix", "experts"])
def test_experts_of_an_fp8_checkpoint_may_be_fp4(shape: tuple[int, ...]) -> None:
    """As transformers reads them: two codes a byte, and a power of two for each 32 columns."""
    codes, exponents = numbers(*shape, 32, seed=7).view(torch.int8), numbers(*shape, 2, seed=8, most=8) + 124
    made = fp8({"": codes, "_scale_inv": exponents}, {})
    own: Any = Fp8Dequantize
    assert isinstance(made, StoredTensor)
    assert torch.equal(made.decode(), own(None)._dequantize_one(codes, exponents, torch.float32))


def test_modelopts_second_scale_multiplies_the_first() -> None:
    codes, first = numbers(2, 16, seed=5), scales(2, 2, seed=5).to(torch.float8_e4m3fn)
    second = torch.tensor(0.125)
    made = modelopt({".weight": codes, ".weight_scale": first, ".weight_scale_2": second}, {})
    assert isinstance(made, StoredTensor)
    table = torch.tensor(NUMBERS)
    plain = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(1)
    assert torch.equal(made.decode(), plain * (first.float() * second).repeat_interleave(16, 1))


def test_modelopts_scales_of_blocks_have_sides_of_1_between() -> None:
    """As its FP8_2D_BLOCKWISE_WEIGHT_ONLY writes them: [row blocks, 1, column blocks, 1]."""
    weight = numbers(128, 256, seed=9, most=100).to(torch.float8_e4m3fn)
    for blocks in ((1, 2), (2, 1), (1, 1)):
        of_blocks = scales(*blocks, seed=10)
        made = modelopt({".weight": weight, ".weight_scale": of_blocks[:, None, :, None]}, {})
        assert isinstance(made, StoredTensor)
        sides = (128 // blocks[0], 256 // blocks[1])
        spread = of_blocks.repeat_interleave(sides[0], 0).repeat_interleave(sides[1], 1)
        assert torch.equal(made.decode(), weight.float() * spread)
    with pytest.raises(ValueError, match="do not fit a weight"):
        modelopt({".weight": weight, ".weight_scale": torch.ones(1, 1, 1)}, {})


def test_integers_whose_format_is_not_known_are_no_weights() -> None:
    weight = torch.ones(4, 32, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"its type is torch\.int8"):
        modelopt({".weight": weight, ".weight_scale": torch.ones(4)}, {})
    with pytest.raises(ValueError, match=r"its type is torch\.int16"):
        compressed({".weight": weight.short(), ".weight_scale": torch.ones(4)}, {})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"quant_method": "hqq"},
            r"\(hqq\), which is not handled; take the model in 16 bits, or in one of these: fp8, ",
        ),
        ({}, r"\(unknown method\)"),
        (["int4"], "its quantization_config cannot be read"),
        ({"quant_method": "awq", "version": "gemv"}, "form gemv, which is not handled; gemm is"),
        ({"quant_method": "awq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "2 bits"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "as W4A16_AWQ, which is not handled; FP8 and NVFP4"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "form marlin, which is not handled; gptq is"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, "transforms"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: object, reason: str) -> None:
    said = refusal(config)
    assert said is not None
    assert re.search(reason, said)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "gptq", "bits": 8}, "gptq8"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "compressed-tensors"}, "ct"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"num_bits": 4, "type": "int"}},
                    "b": {"weights": {"num_bits": 8, "type": "float"}},
                },
            },
            "ct4_fp8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_checkpoint_has_one_name_for_the_class(config: dict[str, Any], name: str) -> None:
    assert refusal(config) is None
    assert format_name(config) == name
