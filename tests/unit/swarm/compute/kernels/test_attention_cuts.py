"""How the attention kernels are cut: what fits which card, and what no card may change."""

from __future__ import annotations

import pytest
import torch

from swarm.compute.kernels.attention_cuts import (
    SMALL_SHARED_BYTES,
    AttentionCut,
    AttentionShape,
    attention_cut,
    block_positions,
    cut_for,
    tile_rows,
)

SHAPES = [
    AttentionShape(group, key, value, dtype)
    for group in (1, 3, 4, 7, 16, 71)
    for key, value in ((64, 64), (80, 96), (128, 128), (192, 128), (256, 256), (512, 512))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
LARGE_SHARED_BYTES = 227 << 10
LLAMA = AttentionShape(4, 128, 128, torch.bfloat16)


def cuts(shape: AttentionShape) -> list[AttentionCut]:
    tile = tile_rows(shape.group, shape.dtype)
    return [cut_for(shape, tile, 56, size, same_lanes=False) for size in (SMALL_SHARED_BYTES, LARGE_SHARED_BYTES)]


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: f"{shape.group}-{shape.key_width}-{shape.value_width}-{shape.dtype}"
)
def test_a_cut_fits_small_cards_and_keeps_what_bits_depend_on(shape: AttentionShape) -> None:
    for cut in cuts(shape):
        assert cut.lanes >= tile_rows(shape.group, shape.dtype) * shape.group
        assert cut.own_lanes >= shape.group
        if shape.dtype == torch.float32:  # no matrix unit: the same share of lanes for all
            assert (cut.warps, cut.own_warps, cut.lanes) == (4, 4, cut.own_lanes)
        else:
            assert (cut.lanes // cut.warps, cut.own_lanes // cut.own_warps) == (16, 16)
    small = cuts(shape)[0]
    keys, values = shape.padded
    if small.stages > 1:
        in_flight = small.stages * block_positions(shape) * (keys + values)
        assert (in_flight + small.lanes * keys) * shape.dtype.itemsize <= SMALL_SHARED_BYTES


def test_a_large_card_has_more_blocks_in_flight() -> None:
    small, large = cuts(LLAMA)
    assert (small.stages, large.stages) == (2, 3)
    assert (small.lanes, small.own_lanes, small.warps, small.own_warps) == (64, 16, 4, 1)


def test_wide_rows_are_read_in_smaller_blocks_on_every_card() -> None:
    assert block_positions(LLAMA) == 64
    assert block_positions(AttentionShape(1, 512, 512, torch.float32)) == 32


def test_the_cpu_has_a_cut_for_interpreted_kernels() -> None:
    cut = attention_cut(LLAMA, tile_rows(4, torch.bfloat16), torch.device("cpu"))
    assert cut.lanes == cut.own_lanes
