"""How a product is cut: what its bits depend on, by the weight's shape alone, and what may differ per card.

Fixed by shape and form, for every card and any number of rows, because sums follow it:
  `step_of`   K in one step; quantised, one group of each plane
  `chunk_of`  K in one product of the matrix unit
  `ranges_of` into how many ranges K is cut, each summed by a program of its own; and where: `steps · i // ranges`
A change there changes bits: raise `swarm.compute.kernels.support.KERNEL_VERSION` with it.

Chosen per card, because no sum follows it:
  `cut_of`    outputs and rows of a program, stages of its pipeline, and its warps
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

TILE_ROWS = (16, 32, 64)
"""Rows of one program; more rows are several programs'."""
_RANGE_COLUMNS = 64
_PROGRAMS = {4: 512, 8: 512, 16: 160, 32: 512}
"""How many programs of `_RANGE_COLUMNS` outputs are enough, by bits: ranges of K are for products with fewer."""
_LEAST_STEPS = 4
_MOST_RANGES = 16


def step_of(bits: int, group: int) -> int:
    """K in one step of a program's loop."""
    return {16: 128, 32: 32}.get(bits) or 16 // bits * group


def chunk_of(bits: int, group: int, dtype: torch.dtype) -> int:
    """K in one product: a group, or less in float32, whose products hold their operands in registers."""
    whole = group if bits < 16 else step_of(bits, group)
    return min(whole, 32) if dtype == torch.float32 else whole


def steps_of(k: int, bits: int, group: int) -> int:
    """Steps of a row of K; the last may end past K."""
    return -(-k // step_of(bits, group))


def ranges_of(n: int, k: int, bits: int, group: int) -> int:
    """Into how many ranges K is cut: a power of two, each of at least 4 steps."""
    tiles = -(-n // _RANGE_COLUMNS)
    most = min(_PROGRAMS[bits] // tiles, steps_of(k, bits, group) // _LEAST_STEPS, _MOST_RANGES)
    return 1 << max(most, 1).bit_length() - 1


def most_partial_columns() -> int:
    """Ranges × N of any product that has several ranges, at most."""
    return max(_PROGRAMS.values()) * _RANGE_COLUMNS


class CardClass(Enum):
    """Cards by the shared memory that one program may have, in bytes."""

    LARGE = 227 * 1024
    """sm_90 and sm_100."""
    MEDIUM = 163 * 1024
    """sm_80 and sm_87."""
    SMALL = 99 * 1024
    """sm_86, sm_89 and sm_120: the cards that people own."""

    @classmethod
    def of(cls, shared_bytes: int) -> CardClass:
        """The largest class whose cuts this much shared memory holds; the smallest where none does."""
        return next((one for one in cls if one.value <= shared_bytes), cls.SMALL)


@dataclass(frozen=True, slots=True)
class ProductCut:
    """What one program of a product is.

    Attributes:
        stages: tiles of weights and inputs that are under way or in use at once.
        warps: of 32 threads.
    """

    columns: int
    stages: int
    warps: int = 4


_FLOAT32 = {16: ProductCut(64, 3), 32: ProductCut(64, 3), 64: ProductCut(64, 3, 8)}
"""Inputs in float32, whatever the weight's bits: no matrix unit multiplies them exactly."""
_CUTS = {
    (CardClass.LARGE, 16): {16: ProductCut(64, 5), 32: ProductCut(64, 4), 64: ProductCut(64, 4)},
    (CardClass.LARGE, 8): {16: ProductCut(64, 3), 32: ProductCut(64, 3), 64: ProductCut(128, 3, 8)},
    (CardClass.LARGE, 4): {16: ProductCut(64, 3), 32: ProductCut(64, 3), 64: ProductCut(64, 3)},
    (CardClass.MEDIUM, 16): {16: ProductCut(64, 5), 32: ProductCut(64, 4), 64: ProductCut(64, 4)},
    (CardClass.MEDIUM, 8): {16: ProductCut(64, 3), 32: ProductCut(64, 3), 64: ProductCut(64, 3, 8)},
    (CardClass.MEDIUM, 4): {16: ProductCut(64, 3), 32: ProductCut(64, 3), 64: ProductCut(64, 3, 8)},
    (CardClass.SMALL, 16): {16: ProductCut(64, 3), 32: ProductCut(64, 3), 64: ProductCut(64, 2)},
    (CardClass.SMALL, 8): {16: ProductCut(64, 3), 32: ProductCut(64, 2), 64: ProductCut(64, 2, 8)},
    (CardClass.SMALL, 4): {16: ProductCut(64, 3), 32: ProductCut(64, 3), 64: ProductCut(64, 2, 8)},
}
"""Large cards: as tuned on an H200 (16 bits at 64 rows: the second best). The others: two programs fit on a processor
at up to 32 rows, and no register spills (found by compiling); not measured on a card yet."""


def tile_rows(rows: int, bits: int, dtype: torch.dtype) -> int:
    """Rows of a program, for a product of this many. Codes in float32 fill the registers at more than 16."""
    most = 16 if dtype == torch.float32 and bits < 16 else TILE_ROWS[-1]
    return next((tile for tile in TILE_ROWS if tile >= min(rows, most)), most)


def cut_of(card: CardClass, bits: int, group: int, dtype: torch.dtype, tile: int) -> ProductCut:
    """The cut for programs of `tile` rows: the table's, with fewer stages where a large group's would not fit."""
    cut = _FLOAT32[tile] if dtype == torch.float32 else _CUTS[card, bits][tile]
    while cut.stages > 1 and shared_bytes(card, cut, bits, group, dtype, tile) > card.value:
        cut = replace(cut, stages=cut.stages - 1)
    return cut


def shared_bytes(  # noqa: PLR0913
    card: CardClass, cut: ProductCut, bits: int, group: int, dtype: torch.dtype, tile: int
) -> int:
    """What a program's pipeline holds at most: tiles of weights and of inputs, a pair per stage.

    From sm_90 on the matrix unit reads shared memory itself, so the tile in use stays there beside those under way; so
    do the operands of float32. A KiB is for barriers.
    """
    step = step_of(bits, group)
    of_a_step = cut.columns * step * bits // 8 + tile * step * dtype.itemsize
    in_place = card is CardClass.LARGE or dtype == torch.float32
    return of_a_step * (cut.stages if in_place else cut.stages - 1) + 1024
