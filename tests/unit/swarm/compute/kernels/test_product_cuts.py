"""Every cut fits its card, and what bits depend on is what it was."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from swarm.compute.kernels.packed_words import GROUP_SIZES, INPUT_DTYPES, WHOLE_BITS
from swarm.compute.kernels.product_cuts import (
    TILE_ROWS,
    CardClass,
    chunk_of,
    cut_of,
    most_partial_columns,
    ranges_of,
    shared_bytes,
    step_of,
    steps_of,
    tile_rows,
)

FORMS = [
    *((bits, group, dtype) for bits, group, dtype in product((4, 8), GROUP_SIZES, INPUT_DTYPES)),
    *((bits, 0, dtype) for bits, dtypes in WHOLE_BITS.items() for dtype in dtypes),
]


@pytest.mark.parametrize("card", CardClass)
@pytest.mark.parametrize("rows", [1, 17, 64, 4096])
def test_every_cut_fits_its_card_with_a_tile_under_way(card: CardClass, rows: int) -> None:
    for bits, group, dtype in FORMS:
        tile = tile_rows(rows, bits, dtype)
        cut = cut_of(card, bits, group, dtype, tile)
        assert shared_bytes(card, cut, bits, group, dtype, tile) <= card.value, (bits, group, dtype)
        assert cut.stages >= 2, (bits, group, dtype)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("tile", [16, 32])
def test_two_programs_of_few_rows_fit_a_processor_of_100_kb(bits: int, tile: int) -> None:
    group = {4: 64, 8: 128, 16: 0}[bits]
    cut = cut_of(CardClass.SMALL, bits, group, torch.bfloat16, tile)
    barriers, reserved = 1024, 1024
    used = shared_bytes(CardClass.SMALL, cut, bits, group, torch.bfloat16, tile) - barriers + reserved
    assert 2 * used <= 100 * 1024


@pytest.mark.parametrize(
    ("kilobytes", "card"),
    [
        (227, CardClass.LARGE),
        (163, CardClass.MEDIUM),
        (99, CardClass.SMALL),
        (64, CardClass.SMALL),
        (200, CardClass.MEDIUM),
    ],
)
def test_a_card_has_the_class_that_it_holds(kilobytes: int, card: CardClass) -> None:
    assert CardClass.of(kilobytes * 1024) is card


@pytest.mark.parametrize(
    ("n", "k", "of_16", "of_8", "of_4"),
    [(6144, 4096, 1, 4, 4), (4096, 4096, 2, 4, 4), (28672, 4096, 1, 1, 1), (4096, 14336, 2, 8, 8), (96, 576, 1, 1, 1)],
)
def test_ranges_of_an_8b_shape(n: int, k: int, of_16: int, of_8: int, of_4: int) -> None:
    """Bits depend on these: another number here is another `KERNEL_VERSION`."""
    assert [ranges_of(n, k, 16, 0), ranges_of(n, k, 8, 128), ranges_of(n, k, 4, 64)] == [of_16, of_8, of_4]
    assert [step_of(bits, group) for bits, group in ((16, 0), (8, 128), (4, 64), (32, 0))] == [128, 256, 256, 32]


def test_ranges_have_steps_enough_and_partial_sums_fit_the_scratch() -> None:
    for n, k in product((1, 64, 65, 1000, 4096, 10_000, 128_256), (16, 512, 4096, 28_672)):
        for bits, group, _ in FORMS:
            ranges = ranges_of(n, k, bits, group)
            assert ranges & (ranges - 1) == 0
            assert ranges == 1 or ranges <= steps_of(k, bits, group) // 4
            assert ranges == 1 or ranges * n <= most_partial_columns()


def test_products_are_of_whole_groups_but_in_float32() -> None:
    assert [chunk_of(4, 64, dtype) for dtype in INPUT_DTYPES] == [32, 64, 64]
    assert [chunk_of(16, 0, torch.bfloat16), chunk_of(32, 0, torch.float32), chunk_of(8, 16, torch.float32)] == [
        128,
        32,
        16,
    ]


def test_programs_have_as_few_rows_as_do() -> None:
    assert [tile_rows(rows, 16, torch.bfloat16) for rows in (1, 16, 17, 32, 33, 500)] == [16, 16, 32, 32, 64, 64]
    assert {tile_rows(rows, 4, torch.float32) for rows in (1, 500)} == {TILE_ROWS[0]}
