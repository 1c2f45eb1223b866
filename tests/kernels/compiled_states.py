"""A program that compiles the kernels of mixers for cards that this machine has not got, and prints what each needs.

python -m tests.kernels.compiled_states        # a JSON list; without TRITON_INTERPRET
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swarm.compute.kernels import group_sums, state_steps

INTEGERS = ("line", "slot", "parent", "base", "keep", "spill", "sources", "segments")
FLOATS = ("decay", "scratch", "sums", "scale")
DELTA = {"heads": 32, "key_heads": 16, "key": 128, "value": 128, "padded": 128, "block": 32}
SCAN = {"heads": 48, "groups": 1, "width": 64, "size": 128, "padded": 128, "block": 32}
CONVOLUTION = {"width": 4, "kept": 4, "has_bias": True, "block": 256}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "store": (state_steps._store, {"block": 256}),
    "convolution": (state_steps._convolve, CONVOLUTION | {"interpreted": False}),
    "delta": (state_steps._delta, DELTA | {"interpreted": False}),
    "scan": (state_steps._scan, SCAN | {"interpreted": False}),
    "sums": (group_sums._group_sums, {"group": 32, "block": 64}),
}
"""With the shapes of Qwen3-Next, Granite 4 and a group of 32."""
CAPABILITIES = (80, 86, 89, 90, 120)
NUMBERS = (
    "rows",
    "groups",
    "size",
    "x_row",
    "x_channel",
    "channels",
    "taps",
    "width",
    "q_row",
    "k_row",
    "v_row",
    "dt_row",
    "b_row",
    "c_row",
)


def kind(name: str, kernel: str) -> str:
    """The type of an argument, as Triton writes it."""
    if name == "scale":
        return "fp32"
    if name == "addresses":
        return "*i64"
    if name in INTEGERS:
        return "*i32"
    if name in NUMBERS and not (kernel == "store" and name == "rows"):
        return "i32"
    return "*fp32" if name in FLOATS or (name in ("a", "like") and kernel == "scan") else "*bf16"


def compiled(name: str, capability: int) -> dict[str, Any]:
    """What a kernel needs on a card."""
    kernel, constants = KERNELS[name]
    names = kernel.arg_names
    signature = {one: "constexpr" if one in constants else kind(one, name) for one in names}
    source = ASTSource(kernel, signature, {(names.index(one),): value for one, value in constants.items()}, {})
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    return {"name": name, "capability": capability, "shared": made.metadata.shared}


if __name__ == "__main__":
    json.dump([compiled(name, capability) for name in KERNELS for capability in CAPABILITIES], sys.stdout)
