"""Published weights as a GPU's product kernels read them: repacked when they are loaded, and never expanded after that.

    codes of 2 to 4 bits   4 bits
    codes of 5 to 8 bits   8 bits
    FP4, iq4, nf4          4 bits, a table in the kernel
    FP8 (e4m3)             8 bits, converted in the kernel

Steps and zeros are float16 or bfloat16 where that is exact of all steps, as the file's own mostly are; else float32 for
groups of 128, of which they are a byte in 32 or 16, and bfloat16 for smaller ones. A group is a power of two from 16 to
128; a larger one repeats its step. An offset is held as a zero per group, of codes that count from their middle, so
that it is small. Columns in another order (GPTQ) are put in order in the input.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from swarm.compute.weights.kernel_form import Codes, KernelForm
from swarm.compute.weights.packed_weight import PackedWeight
from swarm.files.gguf.encodings import ENCODINGS
from swarm.files.pretrained import first_line
from swarm.files.stored.combine import LookupMatrix
from swarm.files.stored.eight_bits import Fp8Matrix, scale_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarm.compute.weights.stored_weight import StoredWeight
    from swarm.files.linear_codes import LinearCodes
    from swarm.files.stored.matrix import StoredMatrix

logger = logging.getLogger(__name__)
MOST_GROUP: Final = 128
LEAST_GROUP: Final = 16
WEIGHTS_AT_ONCE: Final = 1 << 24
"""That are unpacked at a time: some 100 MiB beside the packed matrix."""
MORE_THAN_STORED: Final = 1.12
"""Times the bytes in the file, at most, of formats that store 4 or 8 bits: steps of every row, zeros of 16 bits."""
UNREAD: Final = ("bnbfp4",)
"""Formats that the kernels do not read."""
TRIED_ROWS: Final = 16
TRIED_ERROR: Final = 0.01
"""Of a product in the compute type, against one in float64: rounding, and no wrong code."""
_TRIED: dict[tuple[object, ...], bool] = {}
TABLE_OF: Final = {"mxfp4": "fp4", "nvfp4": "fp4", "iq4_nl": "iq4", "iq4_xs": "iq4"}
"""Encodings whose codes are places in a table of sixteen numbers, by the table's name."""


class KernelCodes(PackedWeight):
    """A matrix of pieces that lie one below the other, each in a form of its own.

    Attributes:
        order: int32 [columns], which column of the input stands at each place; None where they stand in order.
    """

    def __init__(self, forms: Sequence[KernelForm], dtype: torch.dtype, order: torch.Tensor | None = None) -> None:
        self.edges = (0, *accumulate(len(form.words) for form in forms))
        super().__init__(self.edges[-1], forms[0].columns, 0, dtype)
        self._forms = nn.ModuleList(forms)
        self.order = None if order is None else nn.Parameter(order.int(), requires_grad=False)

    @classmethod
    def of(cls, stored: StoredWeight) -> KernelCodes | None:
        """A stored weight's, on its device; None where a piece of it has no form that the kernels read."""
        forms, orders = [], []
        for matrix in stored.matrices():
            made = kernel_form(matrix)
            if made is None or not _is_right(made[0], stored.dtype):
                return None
            forms.append(made[0])
            orders.append(made[1])
        if any(not _is_same(orders[0], order) for order in orders):
            return None
        return cls(forms, stored.dtype, orders[0])

    @property
    def forms(self) -> tuple[KernelForm, ...]:
        """Of the pieces."""
        return tuple(form for form in self._forms if isinstance(form, KernelForm))

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        if len(self._forms) == 1:
            return self.forms[0].product(x, bias)
        biases = [
            None if bias is None else bias[start:end] for start, end in zip(self.edges, self.edges[1:], strict=False)
        ]
        return torch.cat([form.product(x, own) for form, own in zip(self.forms, biases, strict=True)], -1)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """As `PackedWeight.take`; no shape depends on the ids, so that a graph can hold it."""
        made = None
        for form, start, end in zip(self.forms, self.edges, self.edges[1:], strict=False):
            own = form.values((ids - start).clamp(0, end - start - 1))
            made = own if made is None else torch.where((ids >= start)[:, None], own, made)
        assert made is not None
        return self._in_order(made).to(self.dtype)

    def restored(self) -> torch.Tensor:
        return torch.cat([self._in_order(form.values()).to(self.dtype) for form in self.forms])

    def joins(self, other: KernelCodes) -> bool:
        """Whether the rows of another matrix can lie below these in one form."""
        if len(self.forms) > 1 or len(other.forms) > 1 or not _is_same(self.order, other.order):
            return False
        mine, its = self.forms[0], other.forms[0]
        return (mine.columns, mine.kind) == (its.columns, its.kind)

    def join(self, below: Sequence[KernelCodes]) -> KernelCodes:
        """A matrix of these rows and of those of others that `joins` takes, in order."""
        return KernelCodes([KernelForm.below([one.forms[0] for one in (self, *below)])], self.dtype, self.order)

    def _in_order(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.order is None else values.index_select(1, torch.argsort(self.order))


def expert_form(stored: StoredWeight, experts: int) -> KernelForm | None:
    """Experts' matrices, one below the other, as one form [experts, …]; None where no form takes them all."""
    made = KernelCodes.of(stored)
    if made is None or len(made.forms) > 1 or made.order is not None:
        return None
    return made.forms[0].by_experts(experts)


def kernel_form(matrix: StoredMatrix) -> tuple[KernelForm, torch.Tensor | None] | None:
    """A matrix as the kernels read it, and the order of its columns; None where they cannot."""
    from swarm.compute.kernels.packed_words import arrange, whole_words

    words, scales, zeros, codes, order = [], [], [], None, None
    at_once = max(1, WEIGHTS_AT_ONCE // matrix.columns)
    for start in range(0, matrix.rows, at_once):
        found = _codes_of(matrix, start, min(start + at_once, matrix.rows))
        if found is None:
            return None
        codes, order = found
        words.append(arrange(codes.codes, codes.scales, codes.bits, codes.group)[0])
        scales.append(codes.scales)
        zeros.append(codes.zeros)
    assert codes is not None
    steps = torch.cat(scales, 1)
    kind = _type_of(steps, codes.group)
    own = [one for one in zeros if one is not None]
    offsets = whole_words(torch.cat(own, 1).to(kind), codes.bits) if own else None
    made = KernelForm.arranged(torch.cat(words), whole_words(steps.to(kind), codes.bits), offsets, codes)
    return made, order


def card_bits(encoding: str) -> float | None:
    """Bits of a weight of one of GGUF's types as kernels read it; None where they do not."""
    own = next((one for one in ENCODINGS.values() if one.name == encoding), None)
    linear = None if own is None else own.linear_codes(torch.zeros(1, own.block_bytes, dtype=torch.uint8))
    found = None if linear is None else _linear_codes(linear, TABLE_OF.get(encoding, ""))
    if found is None:
        return None
    return found[0].bits + 16 * (1 + (found[0].zeros is not None)) / found[0].group


def _is_right(form: KernelForm, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies with such codes on this device: tried once for each kind, before one is trusted."""
    device = form.words.device
    key = device, dtype, form.kind
    if key not in _TRIED:
        few = form.first(TRIED_ROWS)
        x = torch.randn(TRIED_ROWS, form.columns, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        try:
            wanted = x.double() @ few.values().double().t()
            _TRIED[key] = bool((few.product(x).double() - wanted).norm() <= TRIED_ERROR * wanted.norm())
            why = "products are wrong"
        except Exception as failure:  # noqa: BLE001 - Triton, its compiler or the driver may raise anything
            _TRIED[key], why = False, first_line(failure)
        if not _TRIED[key]:
            logger.warning("%s: kernels on %s cannot read such codes: %s", form.kind, device, why)
    return _TRIED[key]


def group_within(columns: int, width: int) -> int | None:
    """The largest group of the kernels that neither a group of so many columns nor a row ends within."""
    group = gcd(MOST_GROUP, width, columns)
    return group if group >= LEAST_GROUP else None


def _codes_of(matrix: StoredMatrix, start: int, end: int) -> tuple[Codes, torch.Tensor | None] | None:
    """Codes of rows `[start, end)`, and the order of columns; scales and zeros in float32."""
    if isinstance(matrix, Fp8Matrix):
        return _fp8_codes(matrix, start, end)
    if isinstance(matrix, LookupMatrix):
        return _table_codes(matrix, start, end)
    linear = matrix.linear_codes(start, end)
    return None if linear is None else _linear_codes(linear, TABLE_OF.get(matrix.encoding, ""))


def _linear_codes(linear: LinearCodes, table: str) -> tuple[Codes, torch.Tensor | None] | None:
    rows, groups, width = linear.codes.shape
    group = group_within(groups * width, width)
    if group is None:
        return None
    bits = 4 if table or linear.bits <= 4 else 8
    if table:
        codes, zeros = _places(linear, table), None
    else:
        lowest, highest = -(1 << bits - 1), (1 << bits - 1) - 1
        fits = lowest <= -linear.shift and (1 << linear.bits) - 1 - linear.shift <= highest
        middle = linear.shift if fits and linear.least is None else 1 << linear.bits - 1
        codes = (linear.codes ^ 128 if bits == 8 and middle == 128 else linear.codes - middle).view(torch.int8)
        zeros = None
        if middle != linear.shift or linear.least is not None:
            zeros = linear.steps * (middle - linear.shift)
            zeros = zeros if linear.least is None else zeros + linear.least
    scales = _repeated(linear.steps, width // group)
    offsets = None if zeros is None else _repeated(zeros, width // group)
    return Codes(codes.reshape(rows, -1), scales, offsets, bits, group, table), linear.order


def _places(linear: LinearCodes, table: str) -> torch.Tensor:
    """int8: of each code the place in a table, less 8."""
    from swarm.compute.kernels.code_numbers import TABLES

    place_of = torch.zeros(256, dtype=torch.int8)
    for place, number in reversed([*enumerate(TABLES[table])]):  # of two zeros the first
        place_of[int(number) + linear.shift] = place - 8
    return place_of.to(linear.codes.device).index_select(0, linear.codes.reshape(-1).int()).view(linear.codes.shape)


def _fp8_codes(matrix: Fp8Matrix, start: int, end: int) -> tuple[Codes, torch.Tensor | None] | None:
    from swarm.compute.kernels.code_numbers import E4M3_NAN

    group = group_within(matrix.columns, matrix.width)
    codes = matrix.codes[start:end].view(torch.int8)
    if group is None or matrix.code_type is not torch.float8_e4m3fn or bool((codes & E4M3_NAN == E4M3_NAN).any()):
        return None
    scales = scale_values(matrix.scales.index_select(0, matrix.place[start:end]), matrix.scale_type)
    repeated = _repeated(scales, matrix.width // group)[: matrix.columns // group]
    return Codes(codes, repeated, None, 8, group, "e4m3"), None


def _table_codes(matrix: LookupMatrix, start: int, end: int) -> tuple[Codes, torch.Tensor | None] | None:
    from swarm.compute.kernels.code_numbers import NF4_VALUES

    group = group_within(matrix.columns, matrix.block)
    if group is None or torch.tensor(matrix.numbers).sub(torch.tensor(NF4_VALUES)).abs().max() > 1e-6:
        return None
    packed = matrix.codes[start:end]
    places = torch.stack((packed >> 4, packed & 15), -1).flatten(1).sub_(8).view(torch.int8)
    scales = _repeated(matrix.block_scales(start, end), matrix.block // group)
    return Codes(places, scales, None, 4, group, "nf4"), None


def _repeated(of_groups: torch.Tensor, times: int) -> torch.Tensor:
    """Numbers of groups [rows, groups] for groups that are smaller by a factor: [groups · times, rows]."""
    return of_groups.repeat_interleave(times, 1).t().contiguous()


def _type_of(scales: torch.Tensor, group: int) -> torch.dtype:
    """In what type scales are held: by the format, so that all matrices of one have the same."""
    for kind in (torch.bfloat16, torch.float16):
        if torch.equal(scales.to(kind).float(), scales):
            return kind
    return torch.float32 if group >= MOST_GROUP else torch.bfloat16


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
