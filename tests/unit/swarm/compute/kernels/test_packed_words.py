"""The card's form of quantised weights holds every code, and says what it cannot hold."""

from __future__ import annotations

import pytest
import torch

from swarm.compute.kernels.packed_words import arrange, disarrange, takes
from tests.kernels.products import make_codes


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 16), (8, 128), (8, 32)])
@pytest.mark.parametrize("groups", [1, 4, 7])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_words_hold_every_code(bits: int, group: int, groups: int, lead: tuple[int, ...]) -> None:
    codes, scales = make_codes(lead, 5, groups * group, bits, group)
    words, arranged = arrange(codes, scales, bits, group)
    steps = -(-groups * bits // 16)
    assert words.dtype == torch.int16
    assert words.shape == (*lead, 5, steps * group)
    assert torch.equal(disarrange(words, bits, group, groups * group), codes)
    assert torch.equal(arranged[..., :groups, :], scales)
    assert not arranged[..., groups:, :].any()
    assert not disarrange(words, bits, group, steps * 16 // bits * group)[..., groups * group :].any()


def test_a_word_holds_a_code_of_each_of_four_neighbouring_groups() -> None:
    codes = torch.full((1, 128), -8, dtype=torch.int8)
    codes[0, [3, 32 + 3, 64 + 3, 96 + 3]] = torch.tensor([-7, -6, 7, -5], dtype=torch.int8)
    words, _ = arrange(codes, torch.ones(4, 1, dtype=torch.bfloat16), 4, 32)
    assert words[0].nonzero().flatten().tolist() == [3]
    assert words[0, 3].item() == 0x3F21


def test_a_word_holds_both_signs_of_eight_bits() -> None:
    codes = torch.tensor([[-1] * 16 + [-128] * 16, [127] * 16 + [5] * 16], dtype=torch.int8)
    words, _ = arrange(codes, torch.ones(2, 2, dtype=torch.bfloat16), 8, 16)
    assert [word & 0xFFFF for word in words[:, 0].tolist()] == [0x80FF, 0x057F]


@pytest.mark.parametrize(
    ("k", "bits", "group", "dtype", "taken"),
    [
        (576, 4, 64, torch.bfloat16, True),
        (576, 8, 128, torch.bfloat16, False),
        (576, 8, 64, torch.float16, True),
        (576, 4, 64, torch.float64, False),
        (576, 4, 96, torch.float32, False),
        (1024, 4, 256, torch.float32, False),
        (1024, 4, 8, torch.float32, False),
        (1024, 3, 64, torch.float32, False),
        (1001, 16, 0, torch.bfloat16, True),
        (1001, 16, 0, torch.float32, False),
        (1001, 32, 0, torch.float32, True),
        (1001, 32, 0, torch.bfloat16, False),
        (0, 32, 0, torch.float32, False),
    ],
)
def test_what_the_kernels_take(k: int, bits: int, group: int, dtype: torch.dtype, taken: bool) -> None:
    assert takes(10, k, bits, group, dtype) is taken
