"""Runs the few instructions of our assembly in numpy: no card is needed to see what a register holds after them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch

Register = np.ndarray[tuple[int], np.dtype[np.uint32]]


def run(text: str, outputs: int, given: Register) -> list[Register]:
    """What an assembly text leaves in `$0` …, its outputs, for the values of the one register behind them."""
    held: dict[str, Register] = {f"${outputs}": given}
    for line in (each.strip() for each in re.split(r"[;\n]", text.strip("{} \n"))):
        if line and not line.startswith(".reg"):
            name, *operands = line.replace(",", " ").split()
            target, *sources = operands
            values = [held[one] if one in held else np.full_like(given, int(one, 0)) for one in sources]
            held[target] = INSTRUCTIONS[name](*values)
    return [held[f"${place}"] for place in range(outputs)]


def halves(register: Register) -> torch.Tensor:
    """The two bfloat16 numbers of each value, [n, 2]: the low half first."""
    return torch.from_numpy(register.view(np.uint16).astype(np.int32).astype(np.int16)).view(torch.bfloat16).view(-1, 2)


def _prmt(a: Register, b: Register, chosen: Register) -> Register:
    eight = b.astype(np.uint64) << 32 | a
    made = np.zeros_like(a)
    for byte in range(4):
        nibble = chosen >> np.uint32(4 * byte) & 15
        assert not (nibble & 8).any(), "a sign that is repeated is not what is meant"
        made |= ((eight >> (8 * nibble.astype(np.uint64))).astype(np.uint32) & 0xFF) << np.uint32(8 * byte)
    return made


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    assert (table == 0xEA).all()
    return a & b | c


def _fma(a: Register, b: Register, c: Register) -> Register:
    exact = halves(a).double() * halves(b).double() + halves(c).double()
    bits = exact.bfloat16().view(torch.int16).numpy().reshape(-1).astype(np.uint16)
    return bits.view(np.uint32)


INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma,
}
