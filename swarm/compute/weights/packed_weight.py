"""A weight in fewer bits than the compute type, and products with it. Knows no layer and no model.

    form         memory                                         product
    Restored     codes in K's order, two int4 to a byte         blocks of rows are restored, then torch's own product
    TorchInt4    as torch's int4 product on a CPU wants them    torch's, in bfloat16 (in float32 it is ten times slower
                                                                than restoring)
    Kernel       as `swarm.compute.kernels.packed_product` wants them   one kernel that reads the packed weight

Restoring never holds more than a block of a weight, so memory is what the packed weight takes. Blocks depend on a
weight's shape alone, so machines with the same weight add up in the same order. Everything packed is an integer
parameter: it moves, streams and counts as other weights do, and nothing that changes a model's type changes it.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Final

import torch
from torch import nn
from torch.nn.functional import linear

from swarm.compute.quantisation import group_of, quantise
from swarm.compute.weights.format import is_torchs
from swarm.compute.weights.kernel_form import KernelForm

BLOCK: Final = 1 << 20
"""Weights that are restored at a time: 4 MiB, which stay in a core's cache until the product has read them."""
MIN_BLOCK_ROWS: Final = 16
OFFSET: Final = 8
"""An int4 code is held as code + 8, a nibble without a sign."""


class PackedWeight(nn.Module):
    """A matrix [rows, columns]."""

    def __init__(self, rows: int, columns: int, bits: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = rows
        self.columns = columns
        self.bits = bits
        self.dtype = dtype

    @abstractmethod
    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., columns] with the transposed matrix, plus bias [rows]: [..., rows]."""

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows, [n, columns] of int64 [n], in the compute type; not in every form."""
        raise NotImplementedError

    @abstractmethod
    def restored(self) -> torch.Tensor:
        """The whole matrix [rows, columns] in the compute type: for code that reads a weight by itself."""


class RestoredWeight(PackedWeight):
    """A matrix that is restored block by block.

    Attributes:
        words: uint8 [rows, columns / 2] for int4: column j below column j + columns / 2; int8 [rows, columns]; or the
            bits of bfloat16, int16 [rows, columns].
        scales: the bits of bfloat16, int16 [rows, columns / group]; None for 16 bits.
    """

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        """Pack a matrix [rows, columns] of the compute type."""
        rows, columns = weight.shape
        super().__init__(rows, columns, bits, weight.dtype)
        self.scales: nn.Parameter | None = None
        self.group = group_of(self.columns, bits) or 0 if bits < 16 else 0
        if bits == 16:
            self.words = _frozen(weight.detach().to(torch.bfloat16).view(torch.int16))
            return
        quantised = quantise(weight, bits)
        self.words = _frozen(_nibbles(quantised.codes) if bits == 4 else quantised.codes)
        self.scales = _frozen(quantised.scales.t().contiguous().view(torch.int16))

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.product_of(x, 0, self.rows, bias)

    def product_of(self, x: torch.Tensor, start: int, end: int, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product with the rows `[start, end)` alone; bias [end - start]."""
        at_once = max(MIN_BLOCK_ROWS, BLOCK // self.columns)
        pieces = []
        for first in range(start, end, at_once):
            last = min(first + at_once, end)
            block = self._restore(self.words[first:last], None if self.scales is None else self.scales[first:last])
            pieces.append(linear(x, block, None if bias is None else bias[first - start : last - start]))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows, [n, columns] of int64 [n], in the compute type."""
        scales = None if self.scales is None else self.scales.index_select(0, ids)
        return self._restore(self.words.index_select(0, ids), scales, fresh=True)

    def restored(self) -> torch.Tensor:
        return self._restore(self.words, self.scales, fresh=True)

    def _restore(self, words: torch.Tensor, scales: torch.Tensor | None, *, fresh: bool = False) -> torch.Tensor:
        """Some rows [n, columns] in the compute type; in this thread's scratch, unless they are to be kept."""
        shape = (len(words), self.columns)
        out = torch.empty(shape, device=words.device) if fresh else _SCRATCH.take(shape, torch.float32, words.device)
        if scales is None:
            return out.copy_(words.view(torch.bfloat16)).to(self.dtype)
        grouped = out.view(len(words), -1, self.group)
        if self.bits == 4:
            half = self.columns // 2
            nibbles = _SCRATCH.take((len(words), half), torch.uint8, words.device)
            out[:, :half].copy_(torch.bitwise_and(words, 15, out=nibbles))
            out[:, half:].copy_(torch.bitwise_right_shift(words, 4, out=nibbles))
            grouped.sub_(OFFSET)
        else:
            out.copy_(words)
        grouped.mul_(scales.view(torch.bfloat16).float()[..., None])
        return out.to(self.dtype)


class TorchInt4Weight(PackedWeight):
    """A matrix as torch's own int4 product on a CPU takes it, in bfloat16.

    Attributes:
        words: uint8 [rows, columns / 2], in an order that depends on the processor.
        scales: int32 [columns / group, rows]: the bits of a bfloat16 scale and of a zero point, which is 0.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Pack a matrix [rows, columns] in bfloat16."""
        rows, columns = weight.shape
        super().__init__(rows, columns, 4, weight.dtype)
        quantised = quantise(weight, 4)
        self.group = quantised.group
        codes = quantised.codes.to(torch.int32).add_(OFFSET)
        self.words = _frozen(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
        pairs = torch.stack((quantised.scales, torch.zeros_like(quantised.scales)), -1)
        self.scales = _frozen(pairs.view(torch.int32)[..., 0].contiguous())

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        pairs = self.scales.view(torch.bfloat16).view(*self.scales.shape, 2)
        flat = x.reshape(-1, self.columns).contiguous()
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.words, self.group, pairs)
        return (out if bias is None else out + bias).view(*x.shape[:-1], self.rows)

    def restored(self) -> torch.Tensor:
        """As `PackedWeight.restored`: a product with the unit matrix."""
        return self.product(torch.eye(self.columns, dtype=self.dtype, device=self.words.device)).t()


class KernelWeight(PackedWeight):
    """A matrix that one kernel on a GPU reads as it is."""

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        """Pack a matrix [rows, columns] of the compute type; 16 and 32 bits are its own."""
        rows, columns = weight.shape
        super().__init__(rows, columns, bits, weight.dtype)
        if bits in (16, 32):
            assert weight.itemsize * 8 == bits
            self.form = KernelForm.whole(weight if isinstance(weight, nn.Parameter) else weight.contiguous())
        else:
            self.form = KernelForm.rounded(weight, bits)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.form.product(x, bias)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        return self.form.values(ids).to(self.dtype)

    def restored(self) -> torch.Tensor:
        return self.form.values().to(self.dtype)


def pack_weight(weight: torch.Tensor, bits: int, *, with_kernels: bool, by_rows: bool = False) -> PackedWeight:
    """Hold a matrix [rows, columns] of the compute type in so many bits, in the form whose product is fastest here.

    Args:
        bits: 4, 8, 16 (bfloat16), or those of the compute type itself, which kernels take too.
        with_kernels: whether the device runs the Triton kernels.
        by_rows: whether rows are taken out of it too.
    """
    rows, columns = weight.shape
    if with_kernels and kernels_take(rows, columns, bits, weight.dtype):
        return KernelWeight(weight, bits)
    group = group_of(columns, bits) if bits < 16 else None
    if group is not None and not by_rows and weight.device.type == "cpu" and is_torchs(rows, bits, group, weight.dtype):
        return TorchInt4Weight(weight)
    return RestoredWeight(weight, bits)


def kernels_take(rows: int, columns: int, bits: int, dtype: torch.dtype) -> bool:
    """Whether the product's kernel takes a matrix of this shape."""
    from swarm.compute.kernels.packed_product import takes  # only where Triton is there

    if bits in (16, 32) and bits != dtype.itemsize * 8:
        return False
    return bool(takes(rows, columns, bits, 0 if bits > 8 else group_of(columns, bits) or 0, dtype))


def _frozen(words: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(words, requires_grad=False)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """int8 [rows, columns] as uint8 [rows, columns / 2]; halves of a row, so that restoring never interleaves."""
    low, high = (codes + OFFSET).view(torch.uint8).chunk(2, -1)
    return low | (high << 4)


class _BlockScratch(threading.local):
    """Memory that every restored block uses again, by type and device; a thread has its own."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory, until the next call for the same type."""
        count = shape[0] * shape[1]
        block = self._blocks.get((dtype, device))
        if block is None or block.numel() < count:
            with torch.inference_mode(mode=False):  # else it could not be written to outside of that mode
                block = torch.empty(max(count, BLOCK), dtype=dtype, device=device)
            if count <= BLOCK:
                self._blocks[dtype, device] = block
        return block[:count].view(shape)


_SCRATCH: Final = _BlockScratch()
