"""The kernels of coupled picks: the law's noise, bounds that hold, the law's picks, what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

import swarm.compute.kernels.coupled_picks as kernels
from swarm.compute.gumbel import gumbel_row
from swarm.compute.kernels.support import kernel_support
from swarm.compute.picks import device_picks as module
from swarm.compute.picks.device_picks import PickRequest, device_picks, noise_rows, plain_picks
from swarm.compute.sampling import pick
from swarm.protocol.messages import Sampling
from tests.devices import DEVICE

CPU = torch.device("cpu")
SEEDS = (0, 11, 2**64 - 3)
LAST = 2**32 - 1


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few tokens make several."""
    monkeypatch.setattr(kernels, "BLOCK", 64)


def table(rows: Sequence[tuple[int, int, float]]) -> torch.Tensor:
    requests = [PickRequest(row, [at], Sampling(seed, warmth)) for row, (seed, at, warmth) in enumerate(rows)]
    return torch.from_numpy(module._table(requests))


def picked(logits: torch.Tensor, requests: torch.Tensor) -> list[int]:
    """What the kernels pick; the law itself is asked on the CPU, so these are other programs on a card too."""
    picks: list[int] = kernels.coupled_picks(logits.to(DEVICE), requests.to(DEVICE)).tolist()
    return picks


def random_logits(rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows + vocab_size)) * scale


@pytest.mark.parametrize(("seed", "vocab_size"), [(0, 1), (11, 64), (2**64 - 3, 101)])
def test_noise_is_the_law(seed: int, vocab_size: int) -> None:
    exact = noise_rows(seed, [7, LAST], vocab_size, CPU, torch.float64)
    rough = noise_rows(seed, [7, LAST], vocab_size, CPU, torch.float32)
    for row, position in enumerate((7, LAST)):
        law = gumbel_row(seed, position, vocab_size)
        assert np.allclose(exact[row].numpy(), law, rtol=4e-16, atol=1e-15)
        assert np.abs(rough[row].numpy() - law).max() < 2**-16


@pytest.mark.parametrize("scale", [3.0, 0.01])
def test_picks_are_the_laws_for_sessions_of_any_seed_and_temperature(scale: float) -> None:
    rows = [(SEEDS[row % 3], row * 1_000_003 % 2**32, (0.0, 0.01, 0.7, 1.0, 50.0)[row % 5]) for row in range(10)]
    logits, requests = random_logits(10, 150, scale), table(rows)
    expected = [
        pick(logits[row : row + 1], [at], Sampling(seed, warmth))[0] for row, (seed, at, warmth) in enumerate(rows)
    ]
    strided = torch.cat([logits, torch.full((10, 5), 99.0)], dim=1).to(DEVICE)[:, :150]
    assert strided.stride(0) == 155
    assert picked(strided, requests) == expected
    assert plain_picks(strided, requests.to(DEVICE)).tolist() == expected


def test_near_ties_are_settled_in_float64() -> None:
    """The best two scores, in blocks far apart, differ by less than float32's rounding of either."""
    noise, step = gumbel_row(3, 5, 140), 2.0**-19  # of float32 at 20
    for first, second in ((9, 130), (130, 9)):
        logits = torch.full((6, 140), -30.0)
        logits[:, first] = 20.0
        logits[:, second] = float(20.0 + noise[first] - noise[second]) + torch.arange(-3, 3) * step
        scores = logits.double().numpy() + noise
        assert (np.abs(scores[:, first] - scores[:, second]) < 4 * step).all()
        expected = scores.argmax(axis=1).tolist()
        assert set(expected) == {first, second}
        assert picked(logits, table([(3, 5, 1.0)] * 6)) == expected


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_ties_across_blocks_go_to_the_lowest_id(temperature: float) -> None:
    logits = torch.zeros(2, 140)
    logits[0, [70, 99, 131]] = 2.0
    logits[1, 139] = 1.0
    expected = pick(logits, [4, 4], Sampling(8, temperature))
    assert picked(logits, table([(8, 4, temperature)] * 2)) == expected
    if temperature == 0:
        assert expected == [70, 139]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits(dtype: torch.dtype) -> None:
    logits = random_logits(2, 100).to(dtype)
    expected = pick(logits.float(), range(2), Sampling(5, 0.9))
    assert picked(logits, table([(5, row, 0.9) for row in range(2)])) == expected


def test_rows_without_a_finite_maximum_are_named() -> None:
    logits = random_logits(6, 100)
    logits[0, 99] = math.nan
    logits[1, 70] = math.inf
    logits[2] = -math.inf
    logits[3, :99] = -math.inf
    logits[4, 3] = -math.inf
    for temperature in (0.0, 1.0):
        requests = table([(5, row, temperature) for row in range(6)])
        picks = picked(logits, requests)
        assert picks[:4] == [-1, -1, -1, 99]
        assert picks[4:] == pick(logits[4:], [4, 5], Sampling(5, temperature))
        assert plain_picks(logits.to(DEVICE), requests.to(DEVICE)).tolist() == picks


@pytest.mark.parametrize("temperature", [1e-6, 1e30, 1e300])
@pytest.mark.parametrize("scale", [1e-30, 1e37])
def test_scores_outside_float32_are_compared_all_the_same(temperature: float, scale: float) -> None:
    logits = random_logits(2, 100, scale)
    requests = table([(5, row, temperature) for row in range(2)])
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        picks = picked(logits, requests)
    assert picks == pick(logits, range(2), Sampling(5, temperature))


def words(values: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.array(values, dtype=np.uint64)
    return (numbers & 0xFFFFFFFF).astype(np.uint32), (numbers >> np.uint64(32)).astype(np.uint32)


def test_the_bounds_hold_at_the_ends_of_the_uniform() -> None:
    """64 x's at a time through the kernel's own arithmetic: ends, the seam at ½, and where the law rounds u."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def both(lo_at: tl.tensor, hi_at: tl.tensor, out: tl.tensor) -> None:
        place = tl.arange(0, 64)
        lo, hi = tl.load(lo_at + place).to(tl.uint32), tl.load(hi_at + place).to(tl.uint32)
        gumbel, slack = kernels._rough_gumbel(lo, hi)
        tl.store(out + place, gumbel.to(tl.float64))
        tl.store(out + 64 + place, slack + tl.zeros([64], tl.float64))
        tl.store(out + 128 + place, kernels._exact_gumbel(lo, hi))

    edges = [0, 1, 2, 3, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2**44]
    edges += [2**64 - 2**44 - 1, 2**64 - 2**43, 2**64 - 2**40, 2**64 - 2**12, 2**64 - 2**11, 2**64 - 2**10, 2**64 - 1]
    edges += [2**power + 12_345 for power in range(19, 63)]
    lo, hi = words((edges + [5] * 64)[:64])
    out = torch.empty(192, dtype=torch.float64, device=DEVICE)
    lo_at, hi_at = (torch.from_numpy(half.astype(np.int64)).to(DEVICE) for half in (lo, hi))
    both[(1,)](lo_at, hi_at, out)
    rough, slack, exact = out.cpu().view(3, 64).numpy()
    uniform = np.minimum((hi.astype(np.float64) * 2.0**32 + lo + 0.5) * 2.0**-64, 1 - 2.0**-53)
    law = -np.log(-np.log1p(-uniform))
    assert np.allclose(exact, law, rtol=4e-16, atol=1e-15)
    assert (np.abs(rough - law) < slack).all()
    plain = hi < 0xFFFFF000
    assert (np.abs(rough - law)[plain] < 2**-16).all()
    assert set(slack[plain]) == {2**-12}
    assert (law[~plain] < -2.6).all()


def test_the_path_by_kernels_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    true_picks = kernels.coupled_picks

    def counted(logits: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        asked.append(len(requests))
        picks: torch.Tensor = true_picks(logits, requests)
        return picks

    monkeypatch.setattr(module, "kernel_support", partial(kernel_support, interpreted=True))
    monkeypatch.setattr(kernels, "coupled_picks", counted)
    logits, warm, cold = random_logits(9, 60), Sampling(5, 1.0), Sampling(6)
    requests = [PickRequest(0, [1, 2, 3], warm), PickRequest(3, [1, 2], cold), PickRequest(7, [9, 9], warm)]
    expected = [pick(logits[one.first : one.end], one.positions, one.sampling) for one in requests]
    assert device_picks(logits.to(DEVICE), requests) == expected
    assert asked == [5, 2]  # two sessions in one launch; row 5 and 6 are nobody's
    assert device_picks(logits.to(DEVICE).double(), requests) == expected
    assert asked == [5, 2]  # float64 logits go the plain way


def test_a_vocabulary_of_no_rows() -> None:
    assert kernels.coupled_picks(torch.empty(0, 8), table([])).tolist() == []
    assert noise_rows(1, [], 8, CPU, torch.float64).shape == (0, 8)
