"""A weight as the product kernels on a GPU read it, in memory. Knows no layer, and imports Triton where it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from swarm.compute.quantisation import quantise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BITS_TYPES = {2: torch.int16, 4: torch.int32}
"""By the size of a floating type: what its bits are held as, for what changes a model's type must not change them."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of some rows before they are arranged in words: value = scale · what the code means + zero.

    Attributes:
        codes: int8 [..., rows, columns], as `swarm.compute.kernels.packed_words.arrange` takes them.
        scales: floating, [..., groups, rows].
        zeros: of the same type and shape; None adds nothing.
        numbers: what codes mean (`swarm.compute.kernels.code_numbers`).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    numbers: str = ""


class KernelForm(nn.Module):
    """A matrix, or one for each expert.

    Attributes:
        words: int16 [..., rows, n], as `swarm.compute.kernels.packed_words` arranges codes; or the weight itself.
        scales: bits of `scale_type` [..., groups, rows]; None of a weight that is held as it is.
        zeros: the same; None where nothing is added.
        bits: of a code: 4 or 8; 16 and 32 of a weight itself.
        group: columns that share a scale; 0 without scales.
        numbers: what codes mean.
    """

    def __init__(self, words: torch.Tensor, bits: int, columns: int) -> None:
        super().__init__()
        self.words = words if isinstance(words, nn.Parameter) else nn.Parameter(words, requires_grad=False)
        self.bits, self.columns, self.group, self.numbers = bits, columns, 0, ""
        self.scales: nn.Parameter | None = None
        self.zeros: nn.Parameter | None = None
        self.scale_type = torch.bfloat16

    @classmethod
    def whole(cls, weight: torch.Tensor) -> Self:
        """A weight [..., rows, columns] of 16 or 32 bits as it is."""
        return cls(
            weight if isinstance(weight, nn.Parameter) else weight.detach(), weight.itemsize * 8, weight.shape[-1]
        )

    @classmethod
    def rounded(cls, weight: torch.Tensor, bits: int) -> Self:
        """A weight [..., rows, columns] rounded to 4 or 8 bits."""
        made = quantise(weight, bits)
        return cls.of(Codes(made.codes, made.scales, made.zeros, bits, made.group))

    @classmethod
    def of(cls, codes: Codes) -> Self:
        """Arrange codes."""
        from swarm.compute.kernels.packed_words import arrange, whole_words

        words, scales = arrange(codes.codes, codes.scales, codes.bits, codes.group)
        zeros = None if codes.zeros is None else whole_words(codes.zeros, codes.bits)
        return cls.arranged(words, scales, zeros, codes)

    @classmethod
    def arranged(cls, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, like: Codes) -> Self:
        """Hold what is arranged already; `like` says what it means."""
        form = cls(words, like.bits, like.codes.shape[-1])
        form.group, form.numbers, form.scale_type = like.group, like.numbers, scales.dtype
        held = [None if one is None else one.view(BITS_TYPES[one.itemsize]) for one in (scales, zeros)]
        form.scales, form.zeros = (None if one is None else nn.Parameter(one, requires_grad=False) for one in held)
        return form

    @property
    def kind(self) -> tuple[object, ...]:
        """What the kernels are compiled for: forms of one kind and of one width can lie one below the other."""
        return self.bits, self.group, self.numbers, self.scale_type, self.zeros is not None

    @classmethod
    def below(cls, forms: Sequence[KernelForm]) -> KernelForm:
        """Matrices of one kind and width, one below the other."""
        joined = cls(torch.cat([form.words for form in forms]), forms[0].bits, forms[0].columns)
        joined._take_groups(forms[0], lambda name: torch.cat([getattr(form, name) for form in forms], 1))
        return joined

    def first(self, rows: int) -> KernelForm:
        """The first rows of a matrix."""
        made = type(self)(self.words[:rows].contiguous(), self.bits, self.columns)
        made._take_groups(self, lambda name: getattr(self, name)[:, :rows].contiguous())
        return made

    def by_experts(self, experts: int) -> KernelForm:
        """A matrix for each expert, of as many that lie one below the other."""
        made = type(self)(self.words.view(experts, -1, self.words.shape[-1]), self.bits, self.columns)
        made._take_groups(
            self, lambda name: (held := getattr(self, name)).view(len(held), experts, -1).transpose(0, 1).contiguous()
        )
        return made

    def _take_groups(self, like: KernelForm, made: Callable[[str], torch.Tensor]) -> None:
        """Be of a kind, with the scales and zeros that are made of its."""
        self.group, self.numbers, self.scale_type = like.group, like.numbers, like.scale_type
        for name in ("scales", "zeros"):
            if getattr(like, name) is not None:
                setattr(self, name, nn.Parameter(made(name), requires_grad=False))

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., columns] with the transposed matrix, plus bias [rows]: [..., rows]."""
        import swarm.compute.kernels.packed_product  # noqa: F401 - registers the operator

        scales, zeros = self._of_groups()
        given = self.words, scales, bias, self.bits, self.group, zeros, self.numbers
        out: torch.Tensor = torch.ops.canopy.packed_product(x, *given)
        return out

    def expert_product(self, x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Rows with their chosen experts' matrices, as `swarm.compute.weights.experts.PackedExperts.product`."""
        import swarm.compute.kernels.expert_product  # noqa: F401 - registers the operator

        scales, zeros = self._of_groups()
        given = self.words, scales, bias, self.bits, self.group, zeros, self.numbers
        out: torch.Tensor = torch.ops.canopy.expert_product(x, chosen, *given)
        return out

    def values(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of a matrix by their numbers int64 [n], or all: float32 [n, columns]; a weight itself in its type."""
        words = self.words if rows is None else self.words.index_select(0, rows)
        scales, zeros = self._of_groups()
        if scales is None:
            return words
        from swarm.compute.kernels.code_numbers import numbers_of
        from swarm.compute.kernels.packed_words import disarrange

        made = numbers_of(disarrange(words, self.bits, self.group, self.columns), self.numbers)
        grouped = made.view(len(made), -1, self.group)
        grouped.mul_(self._chosen(scales, rows))
        return made if zeros is None else grouped.add_(self._chosen(zeros, rows)).view_as(made)

    def _chosen(self, of_groups: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """float32 [n, groups, 1]: a number of each of some rows' groups."""
        own = of_groups[: self.columns // self.group]
        own = own if rows is None else own.index_select(1, rows)
        return own.float().t()[..., None]

    def _of_groups(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        scales = None if self.scales is None else self.scales.view(self.scale_type)
        return scales, None if self.zeros is None else self.zeros.view(self.scale_type)
