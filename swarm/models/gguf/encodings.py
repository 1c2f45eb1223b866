"""The types that GGUF stores values in: bytes of a block, and a block's values. A row is whole blocks.

transformers decodes most of them; here are those that it lacks. All give the very values of the `gguf` library.
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
MXFP4_BIAS: Final = 128
"""Of the exponent; one more than the format's 127, since the codes' values are doubled."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A type of values.

    Attributes:
        kind: its number in GGUF files.
        name: its name, in small letters.
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
    """The low halves of all bytes, and the high ones behind them: [blocks, n] to [blocks, 2 n]."""
    return torch.cat([packed & 0xF, packed >> 4], dim=1)


def _fives(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """32 integers of five bits: the fifth bits lie in four bytes before the nibbles."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[:, start : start + 4, None] >> bits) & 1  # [blocks, 4, 8]
    return _nibbles(blocks[:, start + 4 :]) | fifth.reshape(-1, 32) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_fives(blocks, 2).to(torch.int8) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _fives(blocks, 4) + _half(blocks, 2)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(MXFP4_VALUES, dtype=torch.float32, device=blocks.device)
    return torch.ldexp(values[_nibbles(blocks[:, 1:]).int()], blocks[:, :1].int() - MXFP4_BIAS)


_OWN: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {"q5_0": _q5_0, "q5_1": _q5_1, "mxfp4": _mxfp4}

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
