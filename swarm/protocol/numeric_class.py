"""Numeric classes: everything that decides the last bits of a result, as one short word in a record. Pure.

    cpu-float32                    cuda-bfloat16                  cuda-sm90-bfloat16-k2+w4z
    device kind, compute type      the same, on the plain path    architecture, kernels of version 2, weights in 4 bits

    cpu-float32+mxfp4              weights as the checkpoint holds them; with kernels as codes, else expanded
    cpu-bfloat16-k1+gguf           multiplied as they are on a CPU, with steps rounded to bfloat16
    cpu-bfloat16-k2+gguf           the same, and each row's bits depend on its own path alone
    cpu-bfloat16-k2+gguf~1f03ac52  as a machine signs it: with its processor's mark (`swarm.compute.rounding`)

Machines of one class can replace each other in the middle of a text; a chain never mixes classes. Marks stand apart in
records: a chain mixes them where it must, and promises no text then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

EXACT: Final = "float32"
ORDERED: Final = 2
"""From this version of a CPU's products with stored integers on, a row's bits depend on its own path alone."""
LOSSY_ROWS: Final = "int8"
"""What a client that chose the lossy codec adds to its route's class."""
ROUNDED: Final = {16: "w16", 8: "w8", 4: "w4z"}
"""Weights that were rounded on load, by their bits. Another rounding is another name, which old machines do not know:
`w4` had groups of 64 without zeros."""
ROUNDING_DIGITS: Final = 8
"""Of a processor's mark."""
_FORM = re.compile(
    r"(?P<device>[a-z][a-z0-9_]*)(?:-(?P<arch>(?:sm|gfx)[0-9a-z_]+))?-(?P<dtype>b?float[0-9]+)"
    r"(?:-k(?P<kernels>[1-9][0-9]{0,3}))?(?:\+(?P<weights>w16|w8|w4z)|\+(?!int8|w[0-9])(?P<stored>[a-z][a-z0-9_]{1,31}))?"
    r"(?P<rows>\+int8)?(?:~(?P<rounding>[0-9a-f]{8}))?"
)


@dataclass(frozen=True, slots=True)
class NumericClass:
    """What decides the last bits of a hidden row.

    Attributes:
        device: kind: `cpu`, `cuda`, `rocm`, `mps`, `xpu`.
        dtype: compute type, such as `bfloat16`.
        arch: the GPU's architecture where kernels run, such as `sm90`; empty on the plain path.
        kernels: version of the kernels that make a row's bits independent of the rows beside it; 0 on the plain path.
            On a CPU, of the products with stored integers; below `ORDERED`, what else it computes depends on them.
        weights: bits of a weight where they are not of the compute type: 16, 8 or 4; 0 where they are.
        lossy_rows: whether rows travel in the int8 codec.
        stored: format of weights that are held as a quantised checkpoint has them, such as `mxfp4`; empty where none
            are. Weights that were rounded on load have `weights` instead: a published int4 and ours are two classes.
        rounding: mark of the processor, where the class names none and bits depend on it; else empty.
    """

    device: str
    dtype: str
    arch: str = ""
    kernels: int = 0
    weights: int = 0
    lossy_rows: bool = False
    stored: str = ""
    rounding: str = ""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read what `str` wrote; None for a class that this version does not know."""
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        return cls(
            found["device"],
            found["dtype"],
            found["arch"] or "",
            int(found["kernels"] or 0),
            next((bits for bits, name in ROUNDED.items() if name == found["weights"]), 0),
            found["rows"] is not None,
            found["stored"] or "",
            found["rounding"] or "",
        )

    def __str__(self) -> str:
        arch, kernels = f"-{self.arch}" if self.arch else "", f"-k{self.kernels}" if self.kernels else ""
        weights = f"+{ROUNDED[self.weights]}" if self.weights else f"+{self.stored}" if self.stored else ""
        rows = "+int8" if self.lossy_rows else ""
        return with_rounding(f"{self.device}{arch}-{self.dtype}{kernels}{weights}{rows}", self.rounding)

    @property
    def is_reproducible(self) -> bool:
        """Whether a text depends on model, prompt and seed alone, whatever the tree and the layout of the chain."""
        least = ORDERED if self.stored and self.device == "cpu" else 1
        return not self.lossy_rows and (self.dtype == EXACT or self.kernels >= least)

    @property
    def is_same_everywhere(self) -> bool:
        """Whether any two machines of the class differ in last bits alone: in fp32, or by one architecture's kernels.

        A CPU's coarse class names no processor, and kinds of processors round otherwise: with their mark, alike.
        """
        return self.is_reproducible and (self.dtype == EXACT or bool(self.arch or self.rounding))


def promises_texts(text: str) -> bool:
    """Whether a class is reproducible, as a record writes it; one that this version does not know promises nothing."""
    found = NumericClass.parse(text)
    return found is not None and found.is_reproducible


def with_rounding(numeric_class: str, rounding: str) -> str:
    """A class, as a record writes it, with a processor's mark; without one where that is empty."""
    return f"{numeric_class}~{rounding}" if rounding else numeric_class


def without_rounding(numeric_class: str) -> str:
    """A class without the mark, as records have it."""
    return numeric_class.partition("~")[0]
