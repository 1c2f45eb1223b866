"""How the attention kernels are cut for a card: programs, warps, lanes and stages. No bit depends on any of it.

What bits depend on is fixed in `batch_plan` (SPLIT, BLOCK, RUN), and here as functions of a layer's shape and dtype
alone: `tile_rows` and `block_positions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from swarm.compute.kernels.batch_plan import BLOCK

MATRIX_LANES = 64
"""Rows of a matrix product that one program fills: (row, query head) pairs. Exact products have no matrix unit."""
EXACT_LANES = 16
MIN_LANES = 16
"""What the matrix unit takes at least."""
LANES_PER_WARP = 16
"""So every row's sums are cut alike whatever the lanes: with other shares the order of additions changed."""
EXACT_WARPS = 4
BLOCK_BYTES = 64 << 10
"""Keys or values of one block: more fits no card's shared memory."""
SMALL_SHARED_BYTES = 99 << 10
"""What a program may have on cards that people own: sm_86, sm_89, sm_120."""
SPARE_BYTES = 2 << 10
"""What the compiler keeps for itself of the shared memory: barriers and sums across warps."""
PROGRAMS_PER_PROCESSOR = 2
INTERPRETED_PROGRAMS = 3
"""An odd number, so that tests see items shared out unevenly."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one layer's attention looks like to the kernels.

    Attributes:
        group: query heads per KV head.
    """

    group: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def padded(self) -> tuple[int, int]:
        """Widths of keys and values as the kernels hold them: powers of two."""
        return max(16, power_of_two(self.key_width)), max(16, power_of_two(self.value_width))


@dataclass(frozen=True, slots=True)
class AttentionCut:
    """How kernels are started.

    Attributes:
        programs: of the kernel that works off items.
        lanes: (row, query head) pairs of its programs.
        stages: blocks of keys and values in flight.
        own_lanes: of the kernel for single rows.
        own_warps: of the kernel for single rows.
        own_stages: of the kernel for single rows.
    """

    programs: int
    lanes: int
    warps: int
    stages: int
    own_lanes: int
    own_warps: int
    own_stages: int


def tile_rows(group: int, dtype: torch.dtype) -> int:
    """Rows of one session that an item takes.

    Args:
        group: query heads per KV head; the largest one, where layers differ.
    """
    return max(1, (EXACT_LANES if dtype == torch.float32 else MATRIX_LANES) // group)


def block_positions(shape: AttentionShape) -> int:
    """Positions at a time, for every card: fewer where rows are very wide. Bits depend on it."""
    block = BLOCK
    while block > 16 and block * max(shape.padded) * shape.dtype.itemsize > BLOCK_BYTES:
        block //= 2
    return block


def attention_cut(shape: AttentionShape, tile: int, device: torch.device) -> AttentionCut:
    """The cut for a layer on a device.

    Args:
        device: a CUDA device, or the CPU where kernels are interpreted.
    """
    if device.type != "cuda":
        return cut_for(shape, tile, INTERPRETED_PROGRAMS, SMALL_SHARED_BYTES, same_lanes=True)
    processors, shared_bytes, capability = _card(torch.cuda.current_device() if device.index is None else device.index)
    # From sm_100 on there are other matrix instructions for 64 lanes than for 16, except on cards that people own.
    same_lanes = capability[0] in {10, 11}
    return cut_for(shape, tile, processors * PROGRAMS_PER_PROCESSOR, shared_bytes, same_lanes=same_lanes)


def power_of_two(number: int) -> int:
    """The least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


@cache
def cut_for(shape: AttentionShape, tile: int, programs: int, shared_bytes: int, *, same_lanes: bool) -> AttentionCut:
    """The cut for a layer on a card.

    Args:
        programs: of the kernel that works off items.
        same_lanes: whether the kernel for single rows must have as many lanes as the other one.
    """
    lanes = max(MIN_LANES, power_of_two(tile * shape.group))
    own_lanes = lanes if same_lanes else max(MIN_LANES, power_of_two(shape.group))
    exact = shape.dtype == torch.float32
    return AttentionCut(
        programs=programs,
        lanes=lanes,
        warps=EXACT_WARPS if exact else lanes // LANES_PER_WARP,
        stages=_stages(shape, lanes, shared_bytes),
        own_lanes=own_lanes,
        own_warps=EXACT_WARPS if exact else own_lanes // LANES_PER_WARP,
        own_stages=min(2, _stages(shape, own_lanes, shared_bytes)),
    )


def _stages(shape: AttentionShape, lanes: int, shared_bytes: int) -> int:
    """Blocks in flight that fit beside the queries: 3 at most; exact products gain nothing from more than 1."""
    if shape.dtype == torch.float32:
        return 1
    keys, values = shape.padded
    block_bytes = block_positions(shape) * (keys + values) * shape.dtype.itemsize
    rest = shared_bytes - SPARE_BYTES - lanes * keys * shape.dtype.itemsize
    return max(1, min(3 if keys + values <= 256 else 2, rest // block_bytes))


@cache
def _card(index: int) -> tuple[int, int, tuple[int, int]]:
    """Processors, shared memory of a program in bytes, and capability."""
    card = torch.cuda.get_device_properties(index)
    shared_bytes = getattr(card, "shared_memory_per_block_optin", SMALL_SHARED_BYTES)
    return card.multi_processor_count, shared_bytes, (card.major, card.minor)
