"""The types that GGUF stores values in: bytes of a block, and a block's values. A row is whole blocks.

transformers decodes most of them. Here are those that it lacks, and those that most files have, in half its time. All
give the very values of the `gguf` library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MXFP4_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the sixteen codes."""


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
        rows = blocks.shape[0]
        if self.dtype is not None:
            return blocks.contiguous().view(self.dtype).float()
        single = blocks.reshape(-1, self.block_bytes)
        own = _OWN.get(self.name)
        return (_by_library(self, single) if own is None else own(single)).reshape(rows, -1)


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


def _fives(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """32 integers of five bits, as float32: the fifth bits lie in four bytes before the nibbles."""
    bits = torch.arange(256, device=blocks.device)[:, None] >> torch.arange(8, device=blocks.device)
    sixteens = (bits.to(torch.uint8) & 1) << 4  # [256, 8]: of each byte
    fifth = sixteens.index_select(0, blocks[:, start : start + 4].reshape(-1).int())
    return _nibbles(blocks[:, None, start + 4 :])[:, 0].bitwise_or_(fifth.view(-1, 32)).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, None, 2:])[:, 0].float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, None, 4:])[:, 0].float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _fives(blocks, 2).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _fives(blocks, 4).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of the eight groups of a block, float32 [blocks, 8, 1]: six bits each, in twelve bytes."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (high & 0xF) | (low >> 6 << 4)], 1)
    offsets = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * offsets)[..., None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, offsets = _k_scales(blocks)
    values = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return values.float().mul_(scales).sub_(offsets)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, offsets = _k_scales(blocks)
    values, fifth = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32), blocks[:, 16:48]
    for group in range(8):
        values[:, group].bitwise_or_((fifth >> group & 1) << 4)
    return values.float().mul_(scales).sub_(offsets)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = blocks[:, :128].view(-1, 2, 64), blocks[:, 128:192].view(-1, 2, 32)
    values = _nibbles(low).view(-1, 2, 4, 32)
    for group in range(4):
        values[:, :, group].bitwise_or_((high >> 2 * group & 3) << 4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return values.float().sub_(32).view(-1, 16, 16).mul_(scales[..., None])


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor(MXFP4_VALUES, dtype=torch.float32, device=blocks.device)
    codes, exponent = _nibbles(blocks[:, None, 1:]), blocks[:, :1].int()
    # 2 ** (exponent - 128) by its bits; the two smallest are subnormal
    scale = torch.where(exponent < 2, 1 << 21 << exponent.clamp(max=1), exponent - 1 << 23).view(torch.float32)
    return numbers.index_select(0, codes.view(-1).int()).view(-1, 32).mul_(scale)


_OWN: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
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
