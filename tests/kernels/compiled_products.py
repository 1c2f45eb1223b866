"""A program that compiles the product kernels for cards that this machine has not got, and prints what each needs.

    python -m tests.kernels.compiled_products        # a JSON list; without TRITON_INTERPRET

It shows that they compile, how much shared memory they take and which instructions multiply; only a card can run them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swarm.compute.kernels import expert_product, packed_product
from swarm.compute.kernels.product_cuts import CardClass, chunk_of, cut_of, shared_bytes

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CLASSES = {80: CardClass.MEDIUM, 86: CardClass.SMALL, 89: CardClass.SMALL, 90: CardClass.LARGE, 120: CardClass.SMALL}
POINTERS = {
    "scales": "*bf16",
    "zeros": "*bf16",
    "sums": "*fp32",
    "partial": "*fp32",
    "tickets": "*i32",
    "order": "*i32",
    "bounds": "*i32",
}
ALIGNED = ("x", "w", "scales", "bias", "out", "columns", "size", "x_row", "w_row")
"""Addresses and sizes that divide by 16, as most models' do."""


@dataclass(frozen=True)
class Form:
    """One kernel for one card: capability, weight, input and rows of a program."""

    capability: int
    bits: int
    group: int
    dtype: torch.dtype
    tile: int
    experts: bool = False
    numbers: str = ""
    has_zeros: bool = False

    def compiled(self) -> dict[str, Any]:
        """What the kernel needs there."""
        kernel = (expert_product if self.experts else packed_product)._product
        card = CLASSES[self.capability]
        cut = cut_of(card, self.bits, self.group, self.dtype, self.tile)
        constants: dict[str, Any] = {
            **({"share": 2} if self.experts else {"ranges": 2}),
            **{"bits": self.bits, "group": self.group, "chunk": chunk_of(self.bits, self.group, self.dtype)},
            **{"bm": self.tile, "bn": cut.columns, "has_bias": True, "even_k": True, "even_n": True},
            **{"interpreted": False, "w_column": 1, "has_zeros": self.has_zeros, "numbers": self.numbers},
        }
        names = kernel.arg_names
        element = TYPES[self.dtype]
        pointers = POINTERS | dict.fromkeys(("x", "bias", "out"), f"*{element}")
        pointers["w"] = "*i16" if self.bits < 16 else f"*{element}"
        source = ASTSource(
            kernel,
            {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names},
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED},
        )
        options = {"num_warps": cut.warps, "num_stages": cut.stages}
        made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        code = made.asm["ptx"]
        more = filter(None, ("experts" * self.experts, self.numbers, "zeros" * self.has_zeros))
        return {
            "name": f"sm_{self.capability} {self.bits} bits {element} {self.tile} rows {' '.join(more)}",
            "shared": made.metadata.shared,
            "by_arithmetic": shared_bytes(card, cut, self.bits, self.group, self.dtype, self.tile),
            "limit": card.value,
            "unit": next((unit for unit in ("wgmma", "mma.sync") if unit in code), "fma"),
            "unpacks": "fma.rn.bf16x2" in code or "prmt.b32" in code,
        }


FORMS = (
    Form(80, 8, 128, torch.bfloat16, 64),
    Form(86, 4, 64, torch.bfloat16, 64),
    Form(86, 32, 0, torch.float32, 32),
    Form(89, 4, 64, torch.bfloat16, 16, experts=True),
    Form(90, 8, 128, torch.bfloat16, 64),
    Form(120, 4, 64, torch.bfloat16, 32),
    Form(80, 4, 32, torch.bfloat16, 16, has_zeros=True),
    Form(86, 4, 128, torch.bfloat16, 64, has_zeros=True),
    Form(86, 8, 16, torch.bfloat16, 16),
    Form(89, 8, 128, torch.bfloat16, 16, numbers="e4m3"),
    Form(90, 4, 32, torch.bfloat16, 64, has_zeros=True),
    Form(120, 4, 32, torch.bfloat16, 16, experts=True, numbers="fp4"),
    Form(120, 4, 32, torch.bfloat16, 64, experts=True, has_zeros=True),
)

if __name__ == "__main__":
    json.dump([form.compiled() for form in FORMS], sys.stdout)
