"""What the codes of a weight mean, and the assembly that unpacks two words of them into bfloat16.

    ""       integers of 4 or 8 bits with a sign
    "fp4"    twice the number of FP4 (e2m1): mxfp4 and nvfp4
    "iq4"    the integers of llama.cpp's iq4
    "nf4"    bitsandbytes' normal floats, rounded to bfloat16
    "e4m3"   FP8, a byte a number

All but nf4 are exact in bfloat16. A word has one code of every plane (`swarm.compute.kernels.packed_words`). Assembly
takes one register of two words, and gives one of two numbers for each plane; all its instructions are there from sm_80
on. Hardware converts FP8 to float16 alone, from sm_89 on; two more steps would cost what the bits cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import triton.language as tl

from swarm.files.gguf.encodings import FP4_VALUES, IQ4_VALUES

Sixteen = tuple[float, ...]
NF4_VALUES: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def _as_bfloat16(values: Sixteen) -> Sixteen:
    return tuple(torch.tensor(values, dtype=torch.float32).bfloat16().tolist())


TABLES: Final[Mapping[str, Sixteen]] = {
    "fp4": _as_bfloat16(FP4_VALUES),
    "iq4": _as_bfloat16(IQ4_VALUES),
    "nf4": _as_bfloat16(NF4_VALUES),
}
"""The numbers of sixteen codes."""
NUMBERS: Final = {4: ("", *TABLES), 8: ("", "e4m3")}
"""What codes of so many bits can mean."""
E4M3_NAN: Final = 0x7F
"""The seven low bits of FP8 that are no number."""


def numbers_of(codes: torch.Tensor, numbers: str) -> torch.Tensor:
    """The float32 numbers of codes.

    Args:
        codes: int8 as `packed_words.disarrange` gives them: of a table, the place in it less 8; of FP8, its byte.
        numbers: what they mean.
    """
    if numbers == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if numbers:
        table = torch.tensor(TABLES[numbers], device=codes.device)
        return table.index_select(0, codes.reshape(-1).int() + 8).view(codes.shape)
    return codes.float()


def _words(values: Sixteen, byte: int) -> list[str]:
    """One byte of the bfloat16 bits of sixteen numbers, as four registers of four."""
    bits = torch.tensor(values).bfloat16().view(torch.int16).tolist()
    chosen = [(one >> 8 * byte) & 0xFF for one in bits]
    return [
        f"0x{chosen[at + 3] << 24 | chosen[at + 2] << 16 | chosen[at + 1] << 8 | chosen[at]:08X}"
        for at in (0, 4, 8, 12)
    ]


def _looks_up(values: Sixteen) -> str:
    """Look 2 × 4 codes up in a table: `prmt` takes four bytes at a time out of eight, and two of it out of sixteen."""
    low, high = _words(values, 0), _words(values, 1)
    lines = [".reg .b32 w0, w1, s, t, i, a, b, l, h, p0, q0, p1, q1, " + ", ".join(f"t{at}" for at in range(8)) + ";"]
    lines += [f"mov.b32 t{at}, {value};" for at, value in enumerate([*low, *high])]
    lines += ["mov.b32 w0, $4;", "shr.u32 w1, $4, 16;"]
    for half in (0, 1):
        lines += [f"and.b32 s, w{half}, 0x7777;", f"shr.u32 t, w{half}, 1;"]
        lines += ["and.b32 t, t, 0x4444;", "or.b32 i, t, 0x3210;"]
        for name, at in (("l", 0), ("h", 4)):
            lines += [f"prmt.b32 a, t{at}, t{at + 1}, s;", f"prmt.b32 b, t{at + 2}, t{at + 3}, s;"]
            lines += [f"prmt.b32 {name}, a, b, i;"]
        lines += [f"prmt.b32 p{half}, l, h, 0x5140;", f"prmt.b32 q{half}, l, h, 0x7362;"]
    lines += ["prmt.b32 $0, p0, p1, 0x5410;", "prmt.b32 $1, p0, p1, 0x7632;"]
    lines += ["prmt.b32 $2, q0, q1, 0x5410;", "prmt.b32 $3, q0, q1, 0x7632;"]
    return "{ " + "\n".join(lines) + " }"


# bfloat16's exponent counts from -127 and that of e4m3 from -7: with its bits in place a number is 2^-120 of itself.
_E4M3 = """{ .reg .b32 s, t, a, b, up, none;
shl.b32 s, $2, 4; shl.b32 t, $2, 8; mov.b32 up, 0x7B807B80; mov.b32 none, 0x80008000;
and.b32 s, s, 0x07F007F0; lop3.b32 a, t, 0x80008000, s, 0xEA;
shr.u32 s, $2, 4; and.b32 s, s, 0x07F007F0; lop3.b32 b, $2, 0x80008000, s, 0xEA;
fma.rn.bf16x2 $0, a, up, none; fma.rn.bf16x2 $1, b, up, none; }"""
# 0x4300 | q is the bfloat16 128 + q, from which one fma takes 136.
_INT4 = """{ .reg .b32 s, t, u, a, b, c, d, one, off;
shr.u32 s, $4, 4; shr.u32 t, $4, 8; shr.u32 u, $4, 12; mov.b32 one, 0x3F803F80; mov.b32 off, 0xC308C308;
lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA; lop3.b32 b, s, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 c, t, 0x000F000F, 0x43004300, 0xEA; lop3.b32 d, u, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, a, one, off; fma.rn.bf16x2 $1, b, one, off;
fma.rn.bf16x2 $2, c, one, off; fma.rn.bf16x2 $3, d, one, off; }"""
# 0x4300 | the low 7 bits is 128 + q; the sign bit turns -128 into -256.
_INT8 = """{ .reg .b32 s, a, b, c, d, one;
shr.u32 s, $2, 8; mov.b32 one, 0x3F803F80;
lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, $2, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 c, s, 0x007F007F, 0x43004300, 0xEA; lop3.b32 d, s, 0x00800080, 0xC300C300, 0xEA;
fma.rn.bf16x2 $0, a, one, b; fma.rn.bf16x2 $1, c, one, d; }"""

ASSEMBLY: Final[Mapping[tuple[int, str], str]] = {
    (4, ""): _INT4,
    (8, ""): _INT8,
    (8, "e4m3"): _E4M3,
    **{(4, name): _looks_up(table) for name, table in TABLES.items()},
}
"""By bits and what codes mean."""

# Device functions read these by name.
INT4_ASSEMBLY = tl.constexpr(ASSEMBLY[4, ""])
INT8_ASSEMBLY = tl.constexpr(ASSEMBLY[8, ""])
E4M3_ASSEMBLY = tl.constexpr(ASSEMBLY[8, "e4m3"])
FP4_ASSEMBLY = tl.constexpr(ASSEMBLY[4, "fp4"])
IQ4_ASSEMBLY = tl.constexpr(ASSEMBLY[4, "iq4"])
NF4_ASSEMBLY = tl.constexpr(ASSEMBLY[4, "nf4"])
FP4_TABLE = tl.constexpr(TABLES["fp4"])
IQ4_TABLE = tl.constexpr(TABLES["iq4"])
NF4_TABLE = tl.constexpr(TABLES["nf4"])
