"""The types that GGUF stores values in: bytes of a block, and a block's values. A row is whole blocks.

Types whose values lie on a line are declared by their codes, steps and offsets (`_LINEAR`), from which they are decoded
and packed for products. transformers decodes the others. All give the very values of the `gguf` library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy
import torch

from swarm.files.linear_codes import LinearCodes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FP4_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the sixteen codes of FP4."""
IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Of the sixteen codes of iq4."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A type of values.

    Attributes:
        block: values of a block; 1 where each is stored alone.
        block_bytes: bytes of a block.
        dtype: torch's type for the same bytes; None where it has none.
    """

    kind: int
    name: str
    block: int
    block_bytes: int
    dtype: torch.dtype | None = None

    @property
    def grain(self) -> tuple[int, int] | None:
        """Bits of a code, and the columns that share a step, where values lie on a line."""
        made = self.linear_codes(torch.zeros(1, self.block_bytes, dtype=torch.uint8))
        return None if made is None else (made.bits, made.codes.shape[-1])

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row; `columns` are whole blocks."""
        return columns // self.block * self.block_bytes

    def decode(self, blocks: torch.Tensor) -> torch.Tensor:
        """Values of some rows.

        Args:
            blocks: uint8 [rows, bytes of a row].

        Returns:
            float32 [rows, columns].
        """
        if self.dtype is not None:
            return blocks.contiguous().view(self.dtype).float()
        linear = self.linear_codes(blocks)
        if linear is not None:
            return linear.values()
        return _by_library(self, blocks.reshape(-1, self.block_bytes)).reshape(len(blocks), -1)

    def linear_codes(self, blocks: torch.Tensor) -> LinearCodes | None:
        """Codes of some rows, uint8 [rows, bytes of a row]; None of a type whose values lie on no line."""
        own = _LINEAR.get(self.name)
        if own is None:
            return None
        made, rows = own(blocks.reshape(-1, self.block_bytes)), len(blocks)
        least = None if made.least is None else made.least.reshape(rows, -1)
        codes = made.codes.reshape(rows, -1, made.codes.shape[-1])
        return replace(made, codes=codes, steps=made.steps.reshape(rows, -1), least=least)


def _by_library(encoding: Encoding, blocks: torch.Tensor) -> torch.Tensor:
    # Here, because a client that reads a file's tokenizer decodes nothing.
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    if encoding.kind in GGML_BLOCK:
        values: torch.Tensor = dequantize(blocks, encoding.kind, torch.float32)
        return values
    from gguf import GGMLQuantizationType, quants

    with numpy.errstate(all="ignore"):
        decoded = quants.dequantize(blocks.cpu().numpy(), GGMLQuantizationType(encoding.kind))
    return torch.from_numpy(decoded).to(blocks.device)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """A float16 of each block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low halves of the bytes of each group, and the high ones behind them.

    Args:
        packed: uint8 [blocks, groups, n]. Integers stay bytes until the last step, which is what makes it fast.

    Returns:
        uint8 [blocks, groups, 2 n].
    """
    blocks, groups, count = packed.shape
    out = torch.empty(blocks, groups, 2, count, dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(packed, 0xF, out=out[:, :, 0])
    torch.bitwise_right_shift(packed, 4, out=out[:, :, 1])
    return out.view(blocks, groups, 2 * count)


def _planes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes cut into so many bits, the lowest first: uint8 [blocks, groups, n] to [blocks, groups, 8 / bits, n]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return packed[:, :, None] >> shifts[:, None] & (1 << bits) - 1


def _fives(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """32 codes of five bits, uint8 [blocks, 1, 32]: the fifth bits lie in four bytes before the nibbles."""
    bits = torch.arange(256, device=blocks.device)[:, None] >> torch.arange(8, device=blocks.device)
    sixteens = (bits.to(torch.uint8) & 1) << 4  # [256, 8]: of each byte
    fifth = sixteens.index_select(0, blocks[:, start : start + 4].reshape(-1).int())
    return _nibbles(blocks[:, None, start + 4 :]).bitwise_or_(fifth.view(-1, 1, 32))


def _q4_0(blocks: torch.Tensor) -> LinearCodes:
    return LinearCodes(_nibbles(blocks[:, None, 2:]), 4, 8, _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> LinearCodes:
    return LinearCodes(_nibbles(blocks[:, None, 4:]), 4, 0, _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> LinearCodes:
    return LinearCodes(_fives(blocks, 2), 5, 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> LinearCodes:
    return LinearCodes(_fives(blocks, 4), 5, 0, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> LinearCodes:
    return LinearCodes(blocks[:, None, 2:] ^ 128, 8, 128, _half(blocks, 0))  # int8 + 128


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and offsets of the eight groups of a block, float32 [blocks, 8]: six bits each, in twelve bytes."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (high & 0xF) | (low >> 6 << 4)], 1)
    offsets = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    return _half(blocks, 0) * scales, (_half(blocks, 2) * offsets).neg_()


def _q2_k(blocks: torch.Tensor) -> LinearCodes:
    scales = blocks[:, :16]
    codes = _planes(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return LinearCodes(codes, 2, 0, _half(blocks, 80) * (scales & 15), (_half(blocks, 82) * (scales >> 4)).neg_())


def _q3_k(blocks: torch.Tensor) -> LinearCodes:
    low = _planes(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    codes = (low | _planes(blocks[:, None, :32], 1)[:, 0] << 2).reshape(-1, 16, 16)
    fours = _planes(blocks[:, None, 96:104], 4).reshape(-1, 16)
    twos = _planes(blocks[:, None, 104:108], 2).reshape(-1, 16)
    return LinearCodes(codes, 3, 4, _half(blocks, 108) * ((fours | twos << 4).to(torch.int8) - 32))


def _q4_k(blocks: torch.Tensor) -> LinearCodes:
    return LinearCodes(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32), 4, 0, *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> LinearCodes:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    codes |= _planes(blocks[:, None, 16:48], 1)[:, 0] << 4
    return LinearCodes(codes, 5, 0, *_k_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> LinearCodes:
    codes = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    codes |= _planes(blocks[:, 128:192].reshape(-1, 2, 32), 2) << 4
    return LinearCodes(codes.view(-1, 16, 16), 6, 32, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8))


def _of_table(values: tuple[int, ...], shift: int, packed: torch.Tensor) -> torch.Tensor:
    """Codes of nibbles, uint8 [blocks, groups, 2 n]: the values of a table, higher by the shift."""
    table = torch.tensor([shift + value for value in values], dtype=torch.uint8, device=packed.device)
    nibbles = _nibbles(packed)
    return table.index_select(0, nibbles.view(-1).int()).view(nibbles.shape)


def _iq4_nl(blocks: torch.Tensor) -> LinearCodes:
    return LinearCodes(_of_table(IQ4_VALUES, 128, blocks[:, None, 2:]), 8, 128, _half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> LinearCodes:
    fours = _planes(blocks[:, 4:8, None], 4).reshape(-1, 8)
    twos = _planes(blocks[:, 2:4, None], 2).reshape(-1, 8)
    steps = _half(blocks, 0) * ((fours | twos << 4).to(torch.int8) - 32)
    return LinearCodes(_of_table(IQ4_VALUES, 128, blocks[:, 8:].reshape(-1, 8, 16)), 8, 128, steps)


def _mxfp4(blocks: torch.Tensor) -> LinearCodes:
    exponent = blocks[:, :1].int()
    # 2 ** (exponent - 128) by its bits; the two smallest are subnormal
    step = torch.where(exponent < 2, 1 << 21 << exponent.clamp(max=1), exponent - 1 << 23).view(torch.float32)
    return LinearCodes(_of_table(FP4_VALUES, 12, blocks[:, None, 1:]), 5, 12, step)


_LINEAR: Final[Mapping[str, Callable[[torch.Tensor], LinearCodes]]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}

ENCODINGS: Final[Mapping[int, Encoding]] = {
    one.kind: one
    for one in (
        Encoding(0, "f32", 1, 4, torch.float32),
        Encoding(1, "f16", 1, 2, torch.float16),
        Encoding(30, "bf16", 1, 2, torch.bfloat16),
        Encoding(2, "q4_0", 32, 18),
        Encoding(3, "q4_1", 32, 20),
        Encoding(6, "q5_0", 32, 22),
        Encoding(7, "q5_1", 32, 24),
        Encoding(8, "q8_0", 32, 34),
        Encoding(10, "q2_k", 256, 84),
        Encoding(11, "q3_k", 256, 110),
        Encoding(12, "q4_k", 256, 144),
        Encoding(13, "q5_k", 256, 176),
        Encoding(14, "q6_k", 256, 210),
        Encoding(16, "iq2_xxs", 256, 66),
        Encoding(17, "iq2_xs", 256, 74),
        Encoding(18, "iq3_xxs", 256, 98),
        Encoding(19, "iq1_s", 256, 50),
        Encoding(20, "iq4_nl", 32, 18),
        Encoding(21, "iq3_s", 256, 110),
        Encoding(22, "iq2_s", 256, 82),
        Encoding(23, "iq4_xs", 256, 136),
        Encoding(29, "iq1_m", 256, 56),
        Encoding(34, "tq1_0", 256, 54),
        Encoding(35, "tq2_0", 256, 66),
        Encoding(39, "mxfp4", 32, 17),
        Encoding(40, "nvfp4", 64, 36),
    )
}
"""All types that are read, by their numbers."""
