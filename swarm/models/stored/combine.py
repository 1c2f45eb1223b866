"""How the tensors of a quantised module become one: a function per format. Reads no file.

Each takes the module's tensors by the ends of their names, and the config's `quantization_config`. A KeyError or a
ValueError says that something is missing or does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from swarm.models.stored.eight_bits import KNOWN, TYPES, Fp8Matrix
from swarm.models.stored.fp4 import Fp4Matrix, LookupMatrix
from swarm.models.stored.grouped import GroupedMatrix, awq_codes, bytes_of_words, column_order, nibbles, words_along
from swarm.models.stored.matrix import PartedMatrix, bits_of
from swarm.models.stored.source import StoredTensor

Parts = Mapping[str, torch.Tensor]
"""The tensors that make one, by the ends of their names that the format adds."""
Config = Mapping[str, Any]
WORD_BITS = (4, 8)
"""Of integers in words of 32 bits: what is handled."""
INT8_FACTOR = 7.874015718698502e-3
"""1 / 127, as bitsandbytes writes it."""


def fp8(parts: Parts, config: Config) -> StoredTensor | torch.Tensor:
    """DeepSeek's block scales, and those of rows or of a whole matrix; experts may be stacked, or FP4 in bytes."""
    weight = parts[".weight"] if ".weight" in parts else parts[""]
    scales = [tensor for end, tensor in parts.items() if end not in ("", ".weight")][0]  # noqa: RUF015 - IndexError
    if weight.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return weight  # a scale that came with a weight that is not quantised
    if weight.dtype is torch.int8:
        matrix = _fp4("mxfp4", weight.reshape(-1, weight.shape[-1]), scales.reshape(-1, scales.shape[-1]))
        return StoredTensor(replace(matrix, result=torch.float32), (*weight.shape[:-1], 2 * weight.shape[-1]))
    if weight.dtype not in TYPES:
        raise ValueError(f"its type is {weight.dtype}")
    height, width = config.get("weight_block_size") or KNOWN
    return StoredTensor(Fp8Matrix.of(weight, scales, torch.float32, (height, width)), tuple(weight.shape))


def mxfp4(parts: Parts, _: Config) -> StoredTensor:
    """gpt-oss: blocks [experts, rows, groups, bytes] and scales [experts, rows, groups]; its class has them turned."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    if blocks.ndim != 4 or blocks.shape[:3] != scales.shape or blocks.dtype != torch.uint8:
        raise ValueError(f"blocks {list(blocks.shape)} and scales {list(scales.shape)}")
    experts, rows, groups, size = blocks.shape
    matrix = _fp4("mxfp4", blocks.reshape(-1, groups * size), scales.reshape(-1, groups))
    return StoredTensor(matrix, (experts, rows, groups * size * 2), is_transposed=True)


def compressed(parts: Parts, _: Config) -> StoredTensor | torch.Tensor:
    """compressed-tensors: `weight_packed` of integers or of FP4, or a plain weight of 8 bits with a scale."""
    scales = parts[".weight_scale"]
    if ".weight_packed" not in parts:
        return _compressed_bytes(parts[".weight"], scales, parts)
    packed = parts[".weight_packed"]
    if packed.dtype == torch.uint8:
        overall = parts.get(".weight_global_scale")
        encoding = "mxfp4" if overall is None else "nvfp4"
        return _whole(_fp4(encoding, packed, scales, overall))
    rows, columns = (int(size) for size in parts[".weight_shape"])
    bits = word_bits(packed.shape[1], columns)
    codes = packed.contiguous().view(torch.uint8)[:, : columns * bits // 8]
    zeros: torch.Tensor | int = 1 << (bits - 1)
    if (words := parts.get(".weight_zero_point")) is not None:
        zeros = words_along(words.t(), bits)[:, :rows].t()
    return _whole(GroupedMatrix.of(f"ct{bits}", codes, scales.reshape(rows, -1), zeros, _order(parts, scales)))


def _compressed_bytes(weight: torch.Tensor, scales: torch.Tensor, parts: Parts) -> StoredTensor | torch.Tensor:
    if weight.dtype in TYPES:
        result = torch.bfloat16 if scales.dtype == torch.uint8 else scales.dtype
        return _whole(Fp8Matrix.of(weight, scales, result))
    if weight.dtype != torch.int8:
        return _plain(weight)
    rows = len(weight)
    of_rows = scales.reshape(rows, -1) if scales.numel() > 1 else scales.reshape(1, 1).expand(rows, 1)
    zeros: torch.Tensor | int = 0
    if (given := parts.get(".weight_zero_point")) is not None:
        zeros = (given.reshape(rows, -1) if given.numel() > 1 else given.reshape(1, 1).expand(rows, 1)).to(torch.int8)
    return _whole(GroupedMatrix.of("ct8", weight, of_rows, zeros, _order(parts, scales)))


def modelopt(parts: Parts, _: Config) -> StoredTensor | torch.Tensor:
    """NVIDIA's ModelOpt: FP8 with a scale, or NVFP4, whose second scale multiplies the first.

    Scales of FP8's blocks have a side of 1 behind each side of theirs.
    """
    weight, scales = parts[".weight"], parts[".weight_scale"]
    if weight.dtype in TYPES:
        of_blocks = scales.ndim == weight.ndim + 2 and scales.shape[-1] == scales.shape[-3] == 1
        return _whole(Fp8Matrix.of(weight, scales[..., 0, :, 0] if of_blocks else scales, torch.float32))
    if weight.dtype != torch.uint8:
        return _plain(weight)
    matrix = _fp4("nvfp4", weight, scales, parts[".weight_scale_2"])
    return _whole(replace(matrix, divides=False, result=torch.float32))


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """A weight that is not quantised, whatever its scales are for."""
    if not weight.is_floating_point():
        raise ValueError(f"its type is {weight.dtype}")
    return weight


def gptq(parts: Parts, config: Config) -> StoredTensor:
    """GPTQ: words along inputs, zeros in words along outputs; the first version of the format holds zero - 1.

    Modules of one checkpoint may differ in their bits (`dynamic` in its config), so these are found from the zeros.
    """
    words, scales = parts[".qweight"], parts[".scales"].t()
    bits = word_bits(parts[".qzeros"].shape[1], len(scales))
    codes = bytes_of_words(words, bits)
    zeros = words_along(parts[".qzeros"], bits).t()[: len(codes)]
    if config.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) & ((1 << bits) - 1)
    g_idx = parts.get(".g_idx")
    order = None if g_idx is None else column_order(g_idx, scales.shape[1])
    return _whole(GroupedMatrix.of(f"gptq{bits}", codes, scales, zeros, order))


def word_bits(words: int, values: int) -> int:
    """How many bits each of so many values has, that fill so many words of 32 bits.

    Raises:
        ValueError: these are not handled.
    """
    for bits in WORD_BITS:
        if words == -(-values * bits // 32):
            return bits
    raise ValueError(f"{32 * words // max(values, 1)} bits of a weight are not handled, 4 and 8 are")


def awq(parts: Parts, _: Config) -> StoredTensor:
    """AutoAWQ's GEMM form: words along outputs, for weights and for zeros."""
    scales = parts[".scales"].t()
    codes = nibbles(awq_codes(parts[".qweight"]).t())
    zeros: torch.Tensor | int = 8
    if (words := parts.get(".qzeros")) is not None:
        zeros = awq_codes(words).t()
    return _whole(GroupedMatrix.of("awq4", codes, scales, zeros))


def bitsandbytes(parts: Parts, _: Config) -> StoredTensor | torch.Tensor:
    """bitsandbytes: nf4 and fp4 with their state, int8 with a magnitude for each row."""
    weight = parts[".weight"]
    if (magnitudes := parts.get(".SCB")) is not None:
        of_rows = magnitudes.float().reshape(-1, 1)
        return _whole(replace(GroupedMatrix.of("bnb8", weight.view(torch.int8), of_rows), factor=INT8_FACTOR))
    (end,) = (end for end in parts if end.startswith(".weight.quant_state"))
    state = json.loads(bytes(parts[end].tolist()))
    shape, block = tuple(state["shape"]), int(state["blocksize"])
    rows, columns = shape
    if columns % block:
        raise ValueError(f"a row of {columns} columns does not split into blocks of {block}")
    blocks = columns // block
    nested = parts.get(".weight.nested_absmax")
    numbers, nested_block = parts[".weight.quant_map"].tolist(), int(state.get("nested_blocksize", 1))
    nested_numbers = [] if nested is None else parts[".weight.nested_quant_map"].tolist()
    if len(numbers) != 16:
        raise ValueError(f"{len(numbers)} numbers for 16 codes")
    if nested is not None and (len(nested_numbers) != 256 or len(nested) * nested_block < rows * blocks):
        raise ValueError("the scales of its scales do not reach")
    scales = parts[".weight.absmax"].reshape(rows, blocks)
    matrix = LookupMatrix(
        rows=rows,
        columns=columns,
        encoding="nf4" if state["quant_type"] == "nf4" else "bnbfp4",
        codes=weight.contiguous().view(torch.uint8).reshape(rows, columns // 2),
        scales=bits_of(scales.float()) if nested is None else scales,
        place=None if nested is None else torch.arange(rows, dtype=torch.int32) * blocks,
        nested=None if nested is None else bits_of(nested.float()),
        offset=None if nested is None else _of_rows(torch.tensor(float(state["nested_offset"])), rows),
        block=block,
        numbers=tuple(numbers),
        nested_numbers=tuple(nested_numbers),
        nested_block=nested_block,
        result={"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[state["dtype"]],
    )
    return StoredTensor(matrix, shape)


def _fp4(encoding: str, codes: torch.Tensor, scales: torch.Tensor, overall: torch.Tensor | None = None) -> Fp4Matrix:
    """As compressed-tensors understands it: scales are divided by the one for all, and values are bfloat16."""
    rows, columns = len(codes), codes.shape[1] * 2
    if len(scales) != rows or columns % scales.shape[1]:
        raise ValueError(f"scales {list(scales.shape)} do not fit {rows} rows of {columns} columns")
    return Fp4Matrix(
        rows=rows,
        columns=columns,
        encoding=encoding,
        codes=codes.contiguous().view(torch.uint8),
        scales=bits_of(scales.contiguous()),
        overall=None if overall is None else _of_rows(overall.float(), rows),
        group=columns // scales.shape[1],
        scale_type=scales.dtype,
        divides=True,
        result=torch.bfloat16,
    )


def _of_rows(value: torch.Tensor, rows: int) -> torch.Tensor:
    """Bits of one float32 for each row."""
    return bits_of(value.reshape(1).expand(rows).contiguous())


def _order(parts: Parts, scales: torch.Tensor) -> torch.Tensor | None:
    g_idx = parts.get(".weight_g_idx")
    return None if g_idx is None or bool((g_idx < 0).any()) else column_order(g_idx, scales.shape[-1])


def _whole(matrix: PartedMatrix) -> StoredTensor:
    return StoredTensor(matrix, (matrix.rows, matrix.columns))
