"""Codes on a line, held as torch's own 4-bit product on a CPU reads them, in bfloat16.

    value = step × (code - 8) + zero            a step and a zero for each group of places, codes of 0 to 15

Codes are exact; steps and zeros are rounded to bfloat16. A code of more bits is two, 16 × high + low:

    form        places of a row                                  x at these places
    one         [codes]                                          [x]
    planes      [high codes | low codes], steps 16 s and s       [x | x]
    halves      groups of 16 high and 16 low codes, step s       16 x and x, by turns: for formats with groups of 16

Formats with groups of 16 and few bits have halves too: the product knows no smaller group than 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, Self

import torch
from torch import nn
from torch.nn.functional import linear

from swarm.base.errors import UnsupportedModel
from swarm.compute.weights.packed_weight import BLOCK, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swarm.files.linear_codes import LinearCodes
    from swarm.files.stored.matrix import StoredMatrix
    from swarm.files.stored.source import StoredSize

GROUPS: Final = (256, 128, 64, 32)
"""Places that may share a step."""
HALF: Final = 16
TILE: Final = 64
"""Rows that every processor's layout keeps together: fewer are filled up."""
OFFSET: Final = 8
"""What is taken off a code."""
MOST_ROWS: Final = 128
"""More rows are multiplied with whole weights: their product, which reads them once for all rows, then pays."""
_PRODUCT: Final = torch.ops.aten._weight_int4pack_mm_for_cpu.default
PAIR_BYTES: Final = 4
MOST_HALVES_BITS: Final = 6
"""Codes of more bits have no signed halves."""


@dataclass(frozen=True, slots=True)
class CodesForm:
    """How codes lie, and what a product does with x. Matrices of one form and order can share a product.

    Attributes:
        columns: inputs of a product.
        group: places that share a step.
        places: of a row.
    """

    kind: Literal["one", "planes", "halves"]
    columns: int
    group: int
    places: int

    @classmethod
    def of(cls, codes: LinearCodes) -> Self | None:
        """The form for codes; None where the product takes none."""
        return cls.made(codes.bits, codes.codes.shape[2], codes.codes.shape[1] * codes.codes.shape[2])

    @classmethod
    def made(cls, bits: int, width: int, columns: int) -> Self | None:
        """As `of`, of codes of so many bits, where so many of a row's columns share a step."""
        if width == HALF and bits <= MOST_HALVES_BITS and columns % (2 * HALF) == 0:
            return cls("halves", columns, 2 * HALF, 2 * columns)
        group = next((group for group in GROUPS if width % group == 0), None)
        if group is None:
            return None
        return cls("one", columns, group, columns) if bits <= 4 else cls("planes", columns, group, 2 * columns)


@dataclass(frozen=True, slots=True)
class CodesKind:
    """What matrices have in common that one product can serve.

    Attributes:
        order: which column of a matrix each place of x takes; empty where they lie in order.
    """

    form: CodesForm
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, matrix: StoredMatrix) -> Self | None:
        """A matrix's; None where the product does not take it."""
        codes = matrix.linear_codes(0, 1)
        form = None if codes is None else CodesForm.of(codes)
        if codes is None or form is None:
            return None
        return cls(form, () if codes.order is None else tuple(codes.order.tolist()))


def codes_bytes(size: StoredSize) -> int:
    """What stored weights take as the product has them; what is no such code stays as it is stored."""
    if not size.bits:
        return size.size_bytes
    form = CodesForm.made(size.bits, size.width, GROUPS[0] * size.width)
    if form is None:
        return size.size_bytes
    return size.weights * form.places * (form.group + 2 * PAIR_BYTES) // (2 * form.group * form.columns)


class CodesWeight(PackedWeight):
    """Matrices of one kind, one below the other.

    Attributes:
        words: uint8 [rows, places / 2], rows filled up to whole tiles, in an order that depends on the processor.
        pairs: int32 [places / group, rows]: the bits of a bfloat16 step and zero.
        order: int32 [columns], which column each place of x takes; None where they lie in order.
        is_ordered: whether a row's bits may not depend on how many others there are.
    """

    def __init__(self, kind: CodesKind, matrices: Sequence[StoredMatrix], dtype: torch.dtype) -> None:
        super().__init__(sum(one.rows for one in matrices), kind.form.columns, 4, dtype)
        self.form = form = kind.form
        made = [_placed(part, form) for one in matrices for part in _parts(one)]
        codes, steps, zeros = (torch.cat(parts) for parts in zip(*made, strict=True))
        filled = (0, 0, 0, -self.rows % TILE)
        codes = nn.functional.pad(codes, filled, value=OFFSET)
        pairs = torch.stack((nn.functional.pad(steps, filled), nn.functional.pad(zeros, filled)), -1)
        at_once = max(1, BLOCK // (TILE * form.places)) * TILE
        words = [
            torch.ops.aten._convert_weight_to_int4pack_for_cpu(one.int(), 1) for one in torch.split(codes, at_once)
        ]
        self.words = _frozen(words[0] if len(words) == 1 else torch.cat(words))
        self.pairs = _frozen(pairs.transpose(0, 1).bfloat16().contiguous().view(torch.int32)[..., 0])
        self._pairs: torch.Tensor | None = None
        self.is_ordered = False
        self.order = _frozen(torch.tensor(kind.order, dtype=torch.int32)) if kind.order else None

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = x.view(-1, self.columns) if x.is_contiguous() else x.reshape(-1, self.columns)
        if len(flat) > MOST_ROWS and not self.is_ordered:
            return self._expanded(flat, bias).view(*x.shape[:-1], self.rows)
        if self.form.kind != "one" or self.order is not None:
            flat = self._placed(flat)
        out: torch.Tensor = _PRODUCT(flat, self.words, self.form.group, self._read_pairs())
        if out.shape[1] != self.rows:
            out = out[:, : self.rows]
        return (out if bias is None else out + bias).view(*x.shape[:-1], self.rows)

    def _read_pairs(self) -> torch.Tensor:
        """The pairs as the product takes them, bfloat16 [places / group, rows, 2]; the same memory."""
        if self._pairs is None or self._pairs.data_ptr() != self.pairs.data_ptr():
            self._pairs = self.pairs.data.view(torch.bfloat16).view(*self.pairs.shape, 2)
        return self._pairs

    def _expanded(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product of many rows [n, columns]: whole weights, some tiles at a time, and the library's own product."""
        at_once = max(1, BLOCK // (TILE * self.columns))
        made = [self._tiles(start, start + at_once) for start in range(0, len(self.words) // TILE, at_once)]
        out = torch.cat([linear(x, weights) for weights in made], 1)[:, : self.rows]
        return out if bias is None else out + bias

    def _tiles(self, start: int, end: int) -> torch.Tensor:
        """The weights of some tiles' rows, [rows, columns] in the compute type."""
        together, order = _layout()
        packed = self.words.view(-1, self.form.places, together // 2)[start * TILE // together : end * TILE // together]
        halves = torch.stack((packed & 15, packed >> 4), 3).flatten(2)  # [blocks, places, together], rows as they lie
        codes = halves.transpose(1, 2).index_select(1, order)
        rows = slice(start * TILE, min(end * TILE, self.pairs.shape[1]))
        steps, zeros = self._read_pairs()[:, rows].float().unbind(2)
        values = codes.flatten(0, 1).float().sub_(OFFSET).view(rows.stop - rows.start, -1, self.form.group)
        values = values.mul_(steps.t()[..., None]).add_(zeros.t()[..., None])
        return self._columns(values.flatten(1)).to(self.dtype)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows, [n, columns] of int64 [n], in the compute type."""
        together, halves = _layout()
        place = halves[ids % together]
        packed = self.words.view(-1, self.form.places, together // 2)[ids // together, :, place // 2]
        codes = packed >> (place % 2 * 4).to(torch.uint8)[:, None] & 15
        pairs = self.pairs[:, ids].t().contiguous().view(torch.bfloat16).float().view(len(ids), -1, 2)
        values = (codes.float() - OFFSET).view(len(ids), -1, self.form.group)
        values = values.mul_(pairs[..., :1]).add_(pairs[..., 1:]).view(len(ids), -1)
        return self._columns(values).to(self.dtype)

    def restored(self) -> torch.Tensor:
        return self._tiles(0, len(self.words) // TILE)[: self.rows]

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [n, columns] at the places of a row, [n, places]."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if self.form.kind == "planes":
            return torch.cat((x, x), 1)
        if self.form.kind == "halves":
            halves = x.view(len(x), -1, 1, HALF)
            return torch.cat((halves * HALF, halves), 2).view(len(x), -1)
        return x.contiguous()

    def _columns(self, values: torch.Tensor) -> torch.Tensor:
        """Values at places, float32 [n, places], as a row of the matrix has them."""
        if self.form.kind == "planes":
            values = values.view(len(values), 2, -1).sum(1)
        elif self.form.kind == "halves":
            high, low = values.view(len(values), -1, 2, HALF).unbind(2)
            values = (high * HALF + low).flatten(1)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order.long(), values)


def _parts(matrix: StoredMatrix) -> Iterator[LinearCodes]:
    """A matrix's codes, some rows at a time: what a step leaves is larger than they are."""
    at_once = max(TILE, BLOCK // matrix.columns)
    for start in range(0, matrix.rows, at_once):
        codes = matrix.linear_codes(start, min(start + at_once, matrix.rows))
        assert codes is not None, "its kind says that there are some"
        yield codes


def _placed(codes: LinearCodes, form: CodesForm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [rows, places], steps and zeros [rows, places / group]."""
    placed, steps, zeros = _PLACED[form.kind](codes, form)
    return placed.to(torch.uint8), steps, zeros


def _one(codes: LinearCodes, form: CodesForm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_placed`: the value is s (code - 8) + zero."""
    steps, middle = _steps(codes, form.group)
    return codes.codes.flatten(1), steps, middle - steps * (_half(codes) - OFFSET)


def _planes(codes: LinearCodes, form: CodesForm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_placed`: the value is 16 s (high - 8) + s (low - 8) + zero, with low of 0 to 15."""
    steps, middle = _steps(codes, form.group)
    values = codes.codes.flatten(1).short() - _half(codes)
    both = torch.cat((values.div(16, rounding_mode="floor") + OFFSET, values % 16), 1)
    return both, torch.cat((16 * steps, steps), 1), torch.cat((torch.zeros_like(steps), middle + OFFSET * steps), 1)


def _halves(codes: LinearCodes, _: CodesForm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_placed`: the value is s (16 (high - 8) + low - 8) + 17 zero, with low - 8 of -8 to 7."""
    steps, middle = _steps(codes, HALF)
    values = codes.codes.short() - _half(codes)
    high = (values + OFFSET).div(16, rounding_mode="floor")
    both = torch.stack((high + OFFSET, values - 16 * high + OFFSET), 2)
    return both.flatten(1), steps, middle / (HALF + 1)


_PLACED: Final = {"one": _one, "planes": _planes, "halves": _halves}


def _half(codes: LinearCodes) -> int:
    """The middle one of all codes."""
    return 1 << codes.bits - 1


def _steps(codes: LinearCodes, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps as the product has them, and what the middle code stands for, float32 [rows, columns / group].

    The rounding of a step moves values away from the middle one, which stays where it is.
    """
    times = codes.codes.shape[2] // group
    middle = codes.steps * (_half(codes) - codes.shift)
    middle = middle if codes.least is None else middle + codes.least
    return codes.steps.bfloat16().float().repeat_interleave(times, 1), middle.repeat_interleave(times, 1)


@cache
def _layout() -> tuple[int, torch.Tensor]:
    """How many rows the processor's layout keeps together, and which half byte of a place, low ones first, each has.

    Learned from the packing itself, which is another one for another processor: rows that are told apart by their
    codes are packed, low bits and high bits of their numbers. Where rows lie together, all places look alike.
    """
    with torch.inference_mode(mode=False):
        rows, places = torch.arange(TILE, dtype=torch.int32), GROUPS[-1]
        packed = []
        for shift in (0, 4):
            codes = ((rows >> shift) & 15)[:, None].expand(-1, places).contiguous()
            packed.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1).flatten())
        for together in (TILE, TILE // 2, TILE // 4):
            low, high = (one.view(-1, places, together // 2) for one in packed)
            if all(bool((one == one[:, :1]).all()) for one in (low, high)):
                bits = [torch.stack((one[0, 0] & 15, one[0, 0] >> 4), 1).flatten().long() for one in (low, high)]
                return together, torch.argsort(bits[0] + (bits[1] << 4))
    raise UnsupportedModel("this processor packs weights of 4 bits in a way that is not known; use --dtype float32")


def _frozen(words: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(words, requires_grad=False)
