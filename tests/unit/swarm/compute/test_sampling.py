"""Picks: ties, filters at their edges, padding, shared noise, the path taken by top-p, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm.base.errors import ConfigError
from swarm.compute.gumbel import gumbel_row
from swarm.compute.picks import filters as module
from swarm.compute.sampling import Noise, check, pick, ranking_scores
from swarm.protocol.messages import Sampling
from tests.oracle import oracle_pick

LARGE = 5_000
WARM = Sampling(seed=5, temperature=1.0)


def random_logits(rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows * vocab_size)) * scale


def kept(logits: torch.Tensor, sampling: Sampling) -> list[list[int]]:
    """Ids that the filters leave, per row."""
    scores = ranking_scores(logits, range(len(logits)), sampling)
    return [row.isfinite().nonzero()[:, 0].tolist() for row in scores]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e-7}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 2**32}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.01}, "min_p"),
        ({"min_p": 1.01}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_options_without_meaning_are_refused_by_name(change: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} "):
        check(replace(WARM, **change), 32)  # type: ignore[arg-type]


def test_options_at_their_limits_are_taken() -> None:
    check(Sampling(), 1)
    check(Sampling(seed=2**64 - 1, temperature=1e-6, top_k=1, top_p=1.0, min_p=1.0), 32)
    check(Sampling(temperature=100.0, top_k=10**9, top_p=1e-9, min_p=0.0), 32)
    with pytest.raises(ConfigError, match="vocab_size"):
        check(Sampling(), 0)


@pytest.mark.parametrize("vocab_size", [2, 17, 1000, 40_001])
def test_greedy_ties_go_to_the_lowest_id(vocab_size: int) -> None:
    first = vocab_size // 2
    logits = torch.zeros(3, vocab_size)
    logits[1, first:] = 1.0
    logits[2, [first, vocab_size - 1]] = 2.0
    assert pick(logits, [0, 0, 0], Sampling()) == [0, first, first]


def test_sampled_ties_go_to_the_lowest_id() -> None:
    def silent(seed: int, position: int, vocab_size: int) -> Noise:
        return np.zeros(vocab_size)

    logits = torch.zeros(2, 3_000)
    logits[1, 7:] = 1.0
    assert pick(logits, [0, 1], WARM, noise=silent) == [0, 7]


def test_scores_are_compared_in_float64() -> None:
    def faint(seed: int, position: int, vocab_size: int) -> Noise:
        return np.linspace(0.0, 1e-10, vocab_size)

    assert pick(torch.full((1, 50), 100.0), [0], WARM, noise=faint) == [49]


@pytest.mark.parametrize("valid", [1, 3, 64])
@pytest.mark.parametrize("sampling", [Sampling(), WARM, replace(WARM, top_k=2), replace(WARM, top_p=0.5, min_p=0.01)])
def test_padded_ids_change_nothing_and_are_never_picked(sampling: Sampling, valid: int) -> None:
    logits = random_logits(20, 64)
    padded = torch.cat([logits[:, :valid], torch.full((20, 36), 99.0)], dim=1)
    assert pick(padded, range(20), sampling, valid) == pick(logits[:, :valid], range(20), sampling)


def test_rows_are_independent_of_their_neighbours_order_and_strides() -> None:
    sampling = replace(WARM, top_k=30, top_p=0.9, min_p=0.01)
    logits = random_logits(40, 300)
    positions = [(7 * row) % 5 for row in range(40)]
    together = pick(logits, positions, sampling)
    assert together == [pick(logits[row : row + 1], positions[row : row + 1], sampling)[0] for row in range(40)]
    assert together == pick(logits.T.contiguous().T, positions, sampling)
    assert together == pick(logits.flip(0), positions[::-1], sampling)[::-1]


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(50, 100)
    base = pick(logits, range(50), WARM)
    assert base == pick(logits, range(50), WARM)
    assert base != pick(logits, range(50), replace(WARM, seed=6))
    assert base[1:] == pick(logits, range(1, 51), WARM)[:-1]
    assert len(set(pick(logits, [3] * 50, WARM))) == 1


def test_noise_is_made_once_per_distinct_position() -> None:
    asked: list[tuple[int, int, int]] = []

    def counted(seed: int, position: int, vocab_size: int) -> Noise:
        asked.append((seed, position, vocab_size))
        return gumbel_row(seed, position, vocab_size)

    logits = random_logits(60, 50)
    positions = [row % 3 for row in range(60)]
    assert pick(logits, positions, WARM, 40, noise=counted) == pick(logits[:, :40], positions, WARM)
    assert asked == [(5, 0, 40), (5, 1, 40), (5, 2, 40)]
    pick(logits, positions, Sampling(), noise=counted)
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (replace(WARM, top_k=1), [1]),
        (replace(WARM, top_k=2), [1, 2]),  # 2 and 3 are equal: the lower id stays
        (replace(WARM, top_k=4), [0, 1, 2, 3]),
        (replace(WARM, top_k=99), [0, 1, 2, 3, 4]),
        (replace(WARM, top_p=1e-9), [1]),
        (replace(WARM, top_p=0.49), [1]),
        (replace(WARM, top_p=0.51), [1, 2]),
        (replace(WARM, top_p=0.68), [1, 2]),  # 11/16 of the mass lies before token 3
        (replace(WARM, top_p=0.69), [1, 2, 3]),
        (replace(WARM, top_p=0.94), [0, 1, 2, 3, 4]),
        (replace(WARM, top_p=1.0), [0, 1, 2, 3, 4]),
        (replace(WARM, top_k=3, top_p=0.78), [1, 2]),  # of the three that top-k leaves, 11/14 lies before token 3
        (replace(WARM, top_k=3, top_p=0.79), [1, 2, 3]),
        (replace(WARM, min_p=0.0), [0, 1, 2, 3, 4]),
        (replace(WARM, min_p=0.12), [0, 1, 2, 3, 4]),
        (replace(WARM, min_p=0.37), [1, 2, 3]),
        (replace(WARM, min_p=0.38), [1]),
        (replace(WARM, min_p=1.0), [1]),
        (replace(WARM, min_p=0.37, top_k=2), [1, 2]),
        (replace(WARM, temperature=2.0, min_p=0.6), [1, 2, 3]),  # filters see the tempered law
        (replace(WARM, temperature=2.0, top_p=0.35), [1, 2]),
    ],
)
def test_filters(sampling: Sampling, expected: list[int]) -> None:
    probs = torch.tensor([[1, 8, 3, 3, 1]]) / 16
    assert kept(probs.log(), sampling) == [expected]


@pytest.mark.parametrize(
    ("sampling", "count"),
    [
        (replace(WARM, top_p=0.25), 1),
        (replace(WARM, top_p=0.5), 2),  # the mass before the third is 0.5: not below
        (replace(WARM, top_p=math.nextafter(0.5, 1)), 3),
        (replace(WARM, min_p=1.0), 4),
    ],
)
def test_filters_exactly_at_their_edge(sampling: Sampling, count: int) -> None:
    assert kept(torch.full((1, 4), 2.5), sampling) == [list(range(count))]


@pytest.mark.parametrize(
    "sampling",
    [
        replace(WARM, temperature=0.7, top_k=20),
        replace(WARM, temperature=1.3, top_p=0.8),
        replace(WARM, min_p=0.05),
        replace(WARM, temperature=0.9, top_k=40, top_p=0.95, min_p=0.02),
    ],
)
def test_filters_keep_what_hugging_face_keeps(sampling: Sampling) -> None:
    logits = random_logits(30, 200).double()
    warpers = [
        TemperatureLogitsWarper(sampling.temperature),
        TopKLogitsWarper(sampling.top_k or 200),
        TopPLogitsWarper(sampling.top_p or 1.0),
        MinPLogitsWarper(sampling.min_p or 0.0),
    ]
    warped = logits
    for warper in warpers:
        warped = warper(torch.zeros(30, 1, dtype=torch.long), warped)
    expected = [row.isfinite().nonzero()[:, 0].tolist() for row in warped]
    assert kept(logits, sampling) == expected
    assert 1 < sum(map(len, expected)) / 30 < 60


def test_top_p_sorts_only_the_rows_whose_nucleus_outgrows_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows: list[int] = []
    whole_sort = module._sorted

    def counted(logits: torch.Tensor) -> torch.Tensor:
        sorted_rows.append(len(logits))
        return whole_sort(logits)

    monkeypatch.setattr(module, "_sorted", counted)
    sampling = replace(WARM, top_p=0.9)
    steep = random_logits(6, LARGE, scale=6.0)
    flat = random_logits(6, LARGE, scale=0.1)
    expected = [oracle_pick(row.numpy(), 3, sampling) for row in (*steep, *flat)]

    assert pick(steep, [3] * 6, sampling) == expected[:6]
    assert sorted_rows == []
    mixed = torch.stack([steep[0], flat[0], steep[1], flat[1], flat[2]])
    assert pick(mixed, [3] * 5, sampling) == [expected[i] for i in (0, 6, 1, 7, 8)]
    assert sorted_rows == [3]
    assert len(kept(flat, sampling)[0]) > module._HEAD_TOKENS
    sorted_rows.clear()
    pick(flat, [3] * 6, replace(sampling, top_k=2_000))
    pick(flat, [3] * 6, replace(WARM, top_k=20, min_p=0.1))
    pick(flat[:, :1000], [3] * 6, sampling)
    assert sorted_rows == []


def test_ties_across_the_end_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nucleus or top-k that ends amid equal logits keeps the lowest ids of them."""
    monkeypatch.setattr(module, "_HEAD_TOKENS", 8)
    logits = torch.zeros(1, 100)
    logits[0, 60:64] = 3.0
    lowest = [*range(6), *range(60, 64)]
    assert kept(logits, replace(WARM, top_k=10)) == [lowest]
    mass = 4 * math.exp(3) + 96
    assert kept(logits, replace(WARM, top_p=(4 * math.exp(3) + 5.5) / mass)) == [lowest]
    assert kept(torch.zeros(2, 64), replace(WARM, top_p=0.25)) == [list(range(16))] * 2


def test_a_top_p_within_rounding_of_one_keeps_every_token_of_weight() -> None:
    """Sums of other orders may end below top_p of the total: no token is then lost for it, nor a tie."""
    logits = random_logits(100, 300).clamp(min=-4.0)
    for sampling in (WARM, replace(WARM, top_k=299)):
        expected = kept(logits, sampling)
        assert kept(logits, replace(sampling, top_p=math.nextafter(1.0, 0.0))) == expected


def test_ranking_scores_are_the_scores_that_pick_maximises() -> None:
    logits = random_logits(12, 80)
    positions = [row // 2 for row in range(12)]
    for sampling in (WARM, replace(WARM, temperature=0.5, top_k=9), replace(WARM, top_p=0.6, min_p=0.1), Sampling()):
        scores = ranking_scores(logits, positions, sampling)
        assert scores.dtype == torch.float64
        assert scores.argmax(dim=1).tolist() == pick(logits, positions, sampling)
    expected = logits[3].double().numpy() / 1.0 + gumbel_row(5, 1, 80)
    assert np.array_equal(ranking_scores(logits, positions, WARM)[3].numpy(), expected)
    assert torch.equal(ranking_scores(logits, positions, Sampling()), logits.double())


def test_inputs_are_left_alone() -> None:
    logits = random_logits(4, 30)
    before = logits.clone()
    for sampling in (Sampling(), replace(WARM, temperature=0.5, top_k=3, top_p=0.5, min_p=0.2)):
        pick(logits, range(4), sampling)
        pick(logits.double(), range(4), sampling)
        ranking_scores(logits.double(), range(4), sampling)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("sampling", [Sampling(), WARM, replace(WARM, top_p=0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float, sampling: Sampling) -> None:
    logits = random_logits(2, 16)
    logits[1, 3] = bad
    with pytest.raises(ConfigError, match="not finite"):
        pick(logits, [0, 1], sampling)


def test_forbidden_tokens_are_never_picked() -> None:
    logits = torch.full((200, 10), -math.inf)
    logits[:, [2, 5]] = 0.0
    for sampling in (WARM, replace(WARM, top_k=4), replace(WARM, top_p=0.99), replace(WARM, min_p=0.0)):
        assert set(pick(logits, range(200), sampling)) == {2, 5}


def test_no_rows_and_a_wrong_number_of_positions() -> None:
    assert pick(torch.empty(0, 8), [], WARM) == []
    with pytest.raises(ValueError, match="2 positions for 1 rows"):
        pick(torch.zeros(1, 8), [0, 1], WARM)
