"""Matrices of the stored formats, and how the tensors of a quantised module become one. Reads no file.

A function per format takes the module's tensors by the ends of their names, and the config's `quantization_config`. A
KeyError or a ValueError says that something is missing or does not fit.

Values, in float32 and then rounded to `result`:

    mxfp4   number × 2^(scale - 127)                    gpt-oss and compressed-tensors; exact in bfloat16
    nvfp4   number × (scale / overall), to bfloat16     compressed-tensors
    nvfp4   number × (scale × overall)                  ModelOpt
    groups  (code - zero) × scale                       GPTQ, AWQ and compressed-tensors; `result` is the scale's type
    int8    code × scale × 1 / 127                      bitsandbytes
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Final, Self

import torch

from swarm.files.linear_codes import LinearCodes
from swarm.files.stored.eight_bits import KNOWN, TYPES, Fp8Matrix, scale_values
from swarm.files.stored.matrix import PartedMatrix, bits_of, look_up, rounded
from swarm.files.stored.source import StoredTensor

NUMBERS: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, eq=False)
class LookupMatrix(PartedMatrix):
    """A matrix in nf4 or bitsandbytes' fp4.

    Attributes:
        encoding: `nf4` or `bnbfp4`.
        codes: uint8 [rows, columns / 2], an even column in a byte's high half.
        scales: [rows, columns / block]: bits of float32, int32, or uint8 where they are quantised again.
        place: int32 [rows], the number of a row's first block in `nested`; None where scales are float32.
        nested: int32 [n], bits of float32, for so many blocks each.
        offset: int32 [rows], bits of float32, added to a scale.
        numbers: what the 16 codes mean.
        nested_numbers: what the 256 bytes of scales mean.
        nested_block: scales that share an entry of `nested`.
        result: the type to which values are rounded.
    """

    TABLES: ClassVar[tuple[str, ...]] = ("nested",)

    scales: torch.Tensor
    place: torch.Tensor | None
    nested: torch.Tensor | None
    offset: torch.Tensor | None
    block: int
    numbers: tuple[float, ...]
    nested_numbers: tuple[float, ...]
    nested_block: int
    result: torch.dtype

    @property
    def places_per_entry(self) -> int:
        return self.nested_block

    def decode(self, start: int, end: int) -> torch.Tensor:
        values = pairs_of(self.numbers, self.codes[start:end], high_first=True)
        scales = self.block_scales(start, end)
        values.view(len(values), -1, self.block).mul_(scales[..., None])
        return rounded(values, self.result)

    def block_scales(self, start: int, end: int) -> torch.Tensor:
        """float32 [end - start, columns / block]"""
        scales = self.scales[start:end]
        if self.place is None or self.nested is None or self.offset is None:
            return scales.view(torch.float32)
        numbers = torch.tensor(self.nested_numbers, dtype=torch.float32, device=scales.device)
        found = look_up(numbers, scales)
        which = (self.place[start:end, None] + torch.arange(scales.shape[1], device=scales.device)) // self.nested_block
        found.mul_(self.nested.view(torch.float32).index_select(0, which.reshape(-1).int()).view(scales.shape))
        return found.add_(self.offset[start:end].view(torch.float32)[:, None])


@dataclass(frozen=True, eq=False)
class Fp4Matrix(PartedMatrix):
    """A matrix in FP4.

    Attributes:
        encoding: `mxfp4` or `nvfp4`.
        codes: uint8 [rows, columns / 2], an even column in a byte's low half.
        scales: uint8 [rows, columns / group], bits of scales.
        overall: int32 [rows], a float32 for the whole matrix; None where there is none.
        scale_type: what a scale is; uint8 is a power of two.
        divides: whether scales are divided by `overall`, and not multiplied.
        result: the type to which values are rounded.
    """

    scales: torch.Tensor
    overall: torch.Tensor | None
    group: int
    scale_type: torch.dtype
    divides: bool
    result: torch.dtype

    def decode(self, start: int, end: int) -> torch.Tensor:
        values = pairs_of(NUMBERS, self.codes[start:end], high_first=False)
        values.view(len(values), -1, self.group).mul_(self._scales(start, end)[..., None])
        return rounded(values, self.result)

    def linear_codes(self, start: int, end: int) -> LinearCodes | None:
        codes = (pairs_of(NUMBERS, self.codes[start:end], high_first=False) * 2 + 12).to(torch.uint8)
        return LinearCodes(codes.view(len(codes), -1, self.group), 5, 12, self._scales(start, end) / 2)

    def _scales(self, start: int, end: int) -> torch.Tensor:
        """float32 [end - start, columns / group]"""
        scales = scale_values(self.scales[start:end], self.scale_type)
        if self.overall is None:
            return scales
        overall = self.overall[start:end].view(torch.float32)[:, None]
        return scales / overall if self.divides else scales * overall


def pairs_of(numbers: tuple[float, ...], codes: torch.Tensor, *, high_first: bool) -> torch.Tensor:
    """What bytes [n, columns / 2] of two codes each mean: float32 [n, columns].

    Args:
        numbers: of the 16 codes.
        codes: uint8.
        high_first: whether a byte's high half is the first column.
    """
    return look_up(_pair_table(numbers, high_first, codes.device), codes).view(torch.float32)


@cache
def _pair_table(numbers: tuple[float, ...], high_first: bool, device: torch.device) -> torch.Tensor:
    """int64 [256]: the bits of two float32 for each byte, so that one look-up gives both."""
    with torch.inference_mode(mode=False):
        byte = torch.arange(256)
        low, high = (torch.tensor(numbers)[half] for half in (byte & 15, byte >> 4))
        pair = torch.stack((high, low) if high_first else (low, high), -1)
        return pair.contiguous().view(torch.int64).flatten().to(device)


AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of an AWQ word holds which of eight neighbouring outputs."""


@dataclass(frozen=True, eq=False)
class GroupedMatrix(PartedMatrix):
    """A matrix of 4-bit or 8-bit integers.

    Attributes:
        encoding: such as `gptq4`, `awq4`, `ct4`, `bnb8`.
        codes: uint8 [rows, columns / 2], an even column in a byte's low half; or [rows, columns], uint8 or int8.
        scales: bits of scales, an integer type, [rows, groups].
        zeros: [rows, groups], uint8 or int8; None where every group has `zero`.
        order: int32 [n, columns], the group of each column; None where neighbours are a group.
        place: int32 [rows], which row of `order` is this row's; None without.
        bits: of a code: 4 or 8.
        zero: what stands for 0, where `zeros` is None.
        result: the type to which values are rounded.
        factor: what values are multiplied with at the end.
    """

    TABLES: ClassVar[tuple[str, ...]] = ("order",)

    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    place: torch.Tensor | None
    bits: int
    zero: int
    scale_type: torch.dtype
    result: torch.dtype
    factor: float = 1.0

    @classmethod
    def of(
        cls,
        encoding: str,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | int = 0,
        order: torch.Tensor | None = None,
    ) -> Self:
        """Hold codes [rows, columns], or [rows, columns / 2] of 4 bits, with scales [rows, groups].

        Args:
            encoding: the format's name, which ends with the bits of a code.
            zeros: [rows, groups], or what stands for 0 everywhere.
            order: int [columns], the group of each column, if neighbours need not be of one.

        Raises:
            ValueError: the shapes do not fit each other.
        """
        bits = int(encoding[-1])
        rows, columns = len(codes), codes.shape[1] * 8 // bits
        if scales.shape[0] != rows or (order is None and columns % scales.shape[1]):
            raise ValueError(f"scales {list(scales.shape)} do not fit {rows} rows of {columns} columns")
        if isinstance(zeros, torch.Tensor) and zeros.shape != scales.shape:
            raise ValueError(f"zeros {list(zeros.shape)} do not fit scales {list(scales.shape)}")
        if isinstance(zeros, torch.Tensor) and zeros.numel() and bool((zeros == zeros.flatten()[0]).all()):
            zeros = int(zeros.flatten()[0])  # of a format that is symmetric, and need not be held
        if order is not None and len(order) != columns:
            raise ValueError(f"an order of {len(order)} columns does not fit {columns}")
        if order is not None and not 0 <= int(order.min()) <= int(order.max()) < scales.shape[1]:
            raise ValueError("a column's group has no scale")
        return cls(
            rows=rows,
            columns=columns,
            encoding=encoding,
            codes=codes.contiguous(),
            scales=bits_of(scales.contiguous()),
            zeros=None if isinstance(zeros, int) else zeros.contiguous(),
            order=None if order is None else order.int()[None],
            place=None if order is None else torch.zeros(rows, dtype=torch.int32),
            bits=bits,
            zero=zeros if isinstance(zeros, int) else 0,
            scale_type=scales.dtype,
            result=scales.dtype,
        )

    def decode(self, start: int, end: int) -> torch.Tensor:
        codes = self.codes[start:end]
        values = torch.empty(len(codes), self.columns, device=codes.device)
        if self.bits == 4:
            pairs = values.view(len(codes), -1, 2)
            pairs[..., 0], pairs[..., 1] = codes & 15, codes >> 4
        else:
            values.copy_(codes)
        scales = self.scales[start:end].view(self.scale_type).float()
        zeros = None if self.zeros is None else self.zeros[start:end].float()
        if self.order is None or self.place is None:
            grouped = values.view(len(values), scales.shape[1], -1)
            grouped.sub_(self.zero if zeros is None else zeros[..., None]).mul_(scales[..., None])
        elif len(self.order) == 1:
            values.sub_(self.zero if zeros is None else zeros.index_select(1, self.order[0]))
            values.mul_(scales.index_select(1, self.order[0]))
        else:
            groups = self.order.index_select(0, self.place[start:end]).long()
            values.sub_(self.zero if zeros is None else zeros.gather(1, groups)).mul_(scales.gather(1, groups))
        if self.factor != 1.0:
            values.mul_(self.factor)
        return rounded(values, self.result)

    def linear_codes(self, start: int, end: int) -> LinearCodes | None:
        """As `StoredMatrix.linear_codes`: columns of a group come to lie side by side, if all groups have as many."""
        groups, order = self.scales.shape[1], None
        if self.order is not None:
            counts = torch.bincount(self.order[0], minlength=groups)
            if len(self.order) > 1 or bool((counts != counts[0]).any()):
                return None
            order = torch.argsort(self.order[0], stable=True)
        codes = self.codes[start:end]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        is_signed = codes.dtype is torch.int8
        codes = codes.view(torch.uint8) ^ 128 if is_signed else codes
        shift = self.zero + 128 * is_signed
        steps = self.scales[start:end].view(self.scale_type).float() * self.factor
        least = None
        if self.zeros is not None:
            least = self.zeros[start:end].float().neg_().mul_(steps)
        if order is not None:
            codes = codes.index_select(1, order)
        return LinearCodes(codes.reshape(len(codes), groups, -1), self.bits, shift, steps, least, order)


def column_order(g_idx: torch.Tensor, groups: int) -> torch.Tensor | None:
    """The group of each column, [columns]; None where neighbours are a group, so that nothing need be held."""
    plain = torch.arange(len(g_idx)) // max(1, len(g_idx) // groups)
    return None if torch.equal(g_idx.long(), plain) else g_idx


def bytes_of_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words along inputs, [columns × bits / 32, rows], as bytes of rows, [rows, columns × bits / 8]."""
    assert bits in (4, 8)
    return words.t().contiguous().view(torch.uint8)


def words_along(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in int32 words along the last dimension, [n, m] as uint8 [n, m × 32 / bits]."""
    as_bytes = words.contiguous().view(torch.uint8)
    return torch.stack((as_bytes & 15, as_bytes >> 4), -1).flatten(1) if bits == 4 else as_bytes


def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """Codes in AWQ's words along outputs, [n, rows / 8], in the order of outputs: uint8 [n, rows]."""
    eights = words_along(words, 4).view(len(words), -1, 8)
    return eights[..., list(AWQ_ORDER)].flatten(1)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [n, columns] of 4-bit codes as [n, columns / 2], an even column in a byte's low half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


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
