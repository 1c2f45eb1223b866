"""How many bytes weights take in memory, by the format that they are held in. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, Literal, Self

import torch

from swarm.compute.kernels.support import kernel_support
from swarm.compute.quantisation import group_of

WeightsName = Literal["auto", "bf16", "int8", "int4"]
BITS: Final[dict[WeightsName, int]] = {"auto": 0, "bf16": 16, "int8": 8, "int4": 4}
"""Of a weight, by the format's name; 0 is the compute type. No model that was measured makes int4 a default."""
SCALE_BYTES: Final = 2
ENDS_BITS: Final = 8
"""Of embedding and head beside int4 layers: their rounding costs most."""
SMALL_SHARE: Final = 1 / 16
"""Of a layer's weights: its smallest matrices have 8 bits in an int4 layer, as many as have no more together. These are
keys and values that many queries share, latent projections, and attention beside experts. They decide much, and cost at
most 0.013 of bfloat16's bytes."""
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
        on_cpu: whether a CPU computes with them.
        with_kernels: whether products are those of `swarm.compute.kernels`, which want weights in words of 16 bits.
        stored: format in which a quantised checkpoint's weights are held as they are; empty where none are.
        codes: whether a CPU's own products read the integers of that format (`swarm.compute.weights.codes_weight`).
        stored_sizes: weights that are held so, and their bytes, by the name of the module; where they are known.
        host_experts: whether a mixture's experts stay in host memory, where the CPU computes them.
    """

    dtype: torch.dtype
    bits: int = 0
    on_cpu: bool = True
    with_kernels: bool = False
    stored: str = ""
    codes: bool = False
    stored_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    host_experts: bool = False

    @classmethod
    def of(
        cls, name: WeightsName, dtype: torch.dtype, device: torch.device, stored: str = "", *, has_codes: bool = False
    ) -> Self:
        """The format of a name on the command line.

        Args:
            stored: the checkpoint's own, which auto keeps.
            has_codes: whether all of its packed weights are integers on a line.
        """
        with_kernels = kernel_support(device).kernels
        if stored and name == "auto":
            codes = has_codes and dtype is torch.bfloat16 and computes_bfloat16(device)
            return cls(dtype, 0, device.type == "cpu", with_kernels, stored, codes)
        bits = BITS[name]
        bits = 0 if bits == dtype.itemsize * 8 else bits  # a weight of float16 takes no more
        return cls(dtype, bits, device.type == "cpu", with_kernels)

    def with_stored_sizes(self, sizes: Mapping[str, tuple[int, int]]) -> Self:
        """The same format, knowing how many weights of modules are held as they are stored, and their bytes."""
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
        bits, matrices = self.bits if bits is None else bits, tuple(matrices)
        size, small = weights * self.dtype.itemsize, small_size(matrices)
        for rows, columns in matrices:
            if is_packed(columns, bits):
                own_bits = bits_of(rows * columns, bits, small)
                size += self._packed_bytes(rows, columns, own_bits) - rows * columns * self.dtype.itemsize
        return size

    @property
    def ends_bits(self) -> int:
        """The bits of embedding and head."""
        return ENDS_BITS if self.bits == 4 else self.bits

    def _packed_bytes(self, rows: int, columns: int, bits: int) -> int:
        group = group_of(columns, bits) if bits < 16 else None
        if group is None:
            return rows * columns * bits // 8
        groups, scale_bytes = columns // group, SCALE_BYTES * (2 if bits == 4 else 1)
        if self.with_kernels:
            groups = -(-groups * bits // 16) * 16 // bits  # a word holds a code of each of so many neighbouring groups
        return rows * groups * (group * bits // 8 + scale_bytes)


def computes_bfloat16(device: torch.device) -> bool:
    """Whether it is a CPU whose library computes in bfloat16: those with AVX-512, and Arm's with bfloat16."""
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def small_size(matrices: Iterable[Matrix]) -> int:
    """Up to how many weights a matrix beside these is small (`SMALL_SHARE`); those of one size are together."""
    sizes = sorted(rows * columns for rows, columns in matrices)
    room, small = sum(sizes) * SMALL_SHARE, 0
    for size, alike in groupby(sizes):
        room -= sum(alike)
        if room < 0:
            break
        small = size
    return small


def bits_of(size: int, bits: int, small: int) -> int:
    """The bits of a matrix of so many weights in a layer of so many bits."""
    return ENDS_BITS if bits == 4 and size <= small else bits


def is_packed(columns: int, bits: int) -> bool:
    """Whether a weight of so many columns is held in so many bits; else it stays as it is."""
    return bits >= 16 or (bits > 0 and group_of(columns, bits) is not None)


def is_torchs(rows: int, bits: int, group: int, dtype: torch.dtype) -> bool:
    """Whether torch's own product on a CPU takes a weight; in float32 it is ten times slower than restoring."""
    return bits == 4 and dtype is torch.bfloat16 and group in TORCH_GROUPS and rows % TORCH_ROWS == 0
