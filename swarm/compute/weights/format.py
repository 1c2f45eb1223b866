"""How many bytes weights take in memory, by the format that they are held in. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self

import torch

from swarm.compute.kernels.support import kernel_support
from swarm.compute.quantisation import group_of
from swarm.files.stored.source import StoredSize

WeightsName = Literal["auto", "bf16", "int8", "int4"]
BITS: Final[dict[WeightsName, int]] = {"auto": 0, "bf16": 16, "int8": 8, "int4": 4}
"""Of a weight, by the format's name; 0 is the compute type. No model that was measured makes int4 a default."""
SCALE_BYTES: Final = 2
MAX_INT8_ENDS: Final = 0.14
"""Up to this share of a model's weights, embedding and head are held in int8 where layers are held in int4: the head's
rounding costs most, and the whole stays below 0.3 of bfloat16."""
TORCH_GROUPS: Final = (32, 64, 128)
TORCH_ROWS: Final = 16
"""What torch's own int4 product on a CPU takes: these groups, and a multiple of so many rows."""

Matrix = tuple[int, int]
"""Rows and columns of a weight; experts lie one below the other."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What weights are held in.

    Attributes:
        dtype: compute type, and that of every weight that is not packed.
        bits: of a packed weight: 4 and 8 with scales, 16 is bfloat16; 0 where none is packed.
        on_cpu: whether a CPU holds them.
        with_kernels: whether products are those of `swarm.compute.kernels`, which want weights in words of 16 bits.
        stored: format in which a quantised checkpoint's weights are held as they are; empty where none are.
        stored_sizes: weights that are held so, and their bytes, by the name of the module; where they are known.
        host_experts: whether a mixture's experts stay in host memory, where the CPU computes them.
    """

    dtype: torch.dtype
    bits: int = 0
    on_cpu: bool = True
    with_kernels: bool = False
    stored: str = ""
    stored_sizes: Mapping[str, StoredSize] = field(default_factory=dict)
    host_experts: bool = False

    @classmethod
    def of(cls, name: WeightsName, dtype: torch.dtype, device: torch.device, stored: str = "") -> Self:
        """The format of a name on the command line; `stored` is the checkpoint's own, which auto keeps."""
        with_kernels = kernel_support(device).kernels
        if stored and name == "auto":
            return cls(dtype, 0, device.type == "cpu", with_kernels, stored)
        bits = BITS[name]
        bits = 0 if bits == dtype.itemsize * 8 else bits  # a weight of float16 takes no more
        return cls(dtype, bits, device.type == "cpu", with_kernels)

    def with_stored_sizes(self, sizes: Mapping[str, StoredSize]) -> Self:
        """The same format, knowing what modules take as they are stored."""
        return replace(self, stored_sizes=sizes)

    @property
    def product_bits(self) -> int:
        """Of weights in products: those of the compute type too, where kernels multiply with it as it is."""
        return self.bits or (self.dtype.itemsize * 8 if self.with_kernels else 0)

    def size_bytes(self, weights: int, matrices: Iterable[Matrix], bits: int | None = None) -> int:
        """What a module takes.

        Args:
            weights: how many it has in all.
            matrices: those of its weights that can be packed.
            bits: of these, where they are held in others than `self.bits`.
        """
        bits = self.bits if bits is None else bits
        size = weights * self.dtype.itemsize
        for rows, columns in matrices:
            if is_packed(columns, bits):
                size += self._packed_bytes(rows, columns, bits) - rows * columns * self.dtype.itemsize
        return size

    def ends_bits(self, share: float) -> int:
        """The bits of embedding and head, which have that share of a model's weights."""
        return 8 if self.bits == 4 and share <= MAX_INT8_ENDS else self.bits

    def _packed_bytes(self, rows: int, columns: int, bits: int) -> int:
        group = group_of(columns, bits) if bits < 16 else None
        if group is None:
            return rows * columns * bits // 8
        groups, scale_bytes = columns // group, SCALE_BYTES
        if self.with_kernels:
            groups = -(-groups * bits // 16) * 16 // bits  # a word holds a code of each of so many neighbouring groups
        elif self.on_cpu and is_torchs(rows, bits, group, self.dtype):
            scale_bytes *= 2
        return rows * groups * (group * bits // 8 + scale_bytes)


def is_packed(columns: int, bits: int) -> bool:
    """Whether a weight of so many columns is held in so many bits; else it stays as it is."""
    return bits >= 16 or (bits > 0 and group_of(columns, bits) is not None)


def is_torchs(rows: int, bits: int, group: int, dtype: torch.dtype) -> bool:
    """Whether torch's own product on a CPU takes a weight; in float32 it is ten times slower than restoring."""
    return bits == 4 and dtype is torch.bfloat16 and group in TORCH_GROUPS and rows % TORCH_ROWS == 0
