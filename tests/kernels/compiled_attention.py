"""Compile the attention kernels for cards that this machine has not got: python -m tests.kernels.compiled_attention

Prints for each kernel the shared memory of a program, and what its card allows. Triton must not interpret here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swarm.compute.kernels import attention_kernels as kernels
from swarm.compute.kernels import kv_moves
from swarm.compute.kernels.attention_cuts import AttentionShape, block_positions, cut_for, tile_rows

SHARED_BYTES = {86: 99 << 10, 90: 227 << 10, 120: 99 << 10}
LLAMA = AttentionShape(4, 128, 128, torch.bfloat16)
WIDE = AttentionShape(2, 192, 128, torch.float32)
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
STRIDES = ("q_head", "q_row", "k_head", "k_row", "v_head", "v_row")
Compiled = tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]
"""A kernel, the types of its arguments, its constants, and how it is cut."""


def kernels_of(shape: AttentionShape, card: int, *, is_merged: bool) -> Iterator[Compiled]:
    """The kernels that one layer starts on a card."""
    element, heads = TYPES[shape.dtype], 8
    tile = tile_rows(shape.group, shape.dtype)
    cut = cut_for(shape, tile, 56, SHARED_BYTES[card], same_lanes=False)
    widths = (shape.key_width, shape.value_width, *shape.padded, 16, 16)
    common = {"widths": widths, "rules": (1024, 30.0, block_positions(shape))}
    parts = {"part_out": "*fp32", "part_ml": "*fp32"}
    query = {"query": f"*{element}", "addresses": "*i64", "plan": "*i32", **parts, "q_head": "i32", "q_row": "i32"}
    query |= {"scale": "fp32"}
    shared = {"kv_heads": heads, "group": shape.group, **common}
    how = {"num_warps": cut.warps, "num_stages": cut.stages}
    yield kernels.items, query, {**shared, "tile": tile, "lanes": cut.lanes, "merged": is_merged}, how
    if not is_merged:
        how = {"num_warps": cut.own_warps, "num_stages": cut.own_stages}
        yield kernels.own_blocks, query, {**shared, "lanes": cut.own_lanes}, how
    many = {"heads": heads * shape.group, "at_once": 4, "has_sinks": True, **common}
    yield kernels.combine, {**parts, "plan": "*i32", "sinks": "*fp32", "result": f"*{element}"}, many, {"num_warps": 4}
    new = {"key": f"*{element}", "value": f"*{element}", "addresses": "*i64", "plan": "*i32"}
    yield kernels.store, new | dict.fromkeys(STRIDES[2:], "i32"), {"widths": widths}, {"num_warps": 1}


def move_kernel() -> Compiled:
    """The kernel of a commit."""
    types = {"table": "*i64", "moves": "*i64", "count": "i32", "start": "i32", "capacity": "i32"}
    return kv_moves._move, types, {"at_once": kv_moves.ROWS_AT_ONCE, "padded": 128}, {"num_warps": 4}


def compiled(card: int, kernel: Compiled) -> Mapping[str, object]:
    """Compile one kernel, with what it is told of its arguments when it is started."""
    function, types, constants, how = kernel
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name in STRIDES]
    attrs = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=how)
    product = "wgmma" if "wgmma.mma" in made.asm["ptx"] else "mma.sync" if "mma.sync" in made.asm["ptx"] else "fma"
    name = f"sm_{card} {function.__name__}"
    return {"name": name, "shared": made.metadata.shared, "limit": SHARED_BYTES[card], "product": product}


def main() -> None:
    cases = [(86, kernel) for kernel in kernels_of(LLAMA, 86, is_merged=True)]
    cases += [(90, kernel) for kernel in list(kernels_of(LLAMA, 90, is_merged=False))[:2]]
    cases += [(120, kernel) for kernel in list(kernels_of(WIDE, 120, is_merged=False))[:2]]
    sys.stdout.write(json.dumps([compiled(card, kernel) for card, kernel in [*cases, (86, move_kernel())]]))


if __name__ == "__main__":
    main()
