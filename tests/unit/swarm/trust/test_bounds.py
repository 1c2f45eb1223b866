"""What follows from distances and gaps: each rule on numbers, without a model."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch

from swarm.trust.bounds import (
    FEWEST,
    FLOOR,
    MEDIAN_ROOM,
    PICK_FLOOR,
    ROOM,
    WINDOW,
    Agrees,
    Bounds,
    Differs,
    Judgement,
    Unclear,
    bounds_of,
    is_exact,
    judge_picks,
    judge_rows,
    row_distances,
    together,
)
from swarm.trust.replay import undecidable

EXACT = Bounds("cpu-float32", "cpu-float32")
MEDIAN = 0.012
COARSE = Bounds("cpu-bfloat16", "cpu-bfloat16", row=0.04, median=MEDIAN)


def distances(count: int, value: float = 1e-7, **others: float) -> torch.Tensor:
    found = torch.full((count,), value, dtype=torch.float64)
    for place, other in others.items():
        found[int(place[1:])] = other
    return found


def near(found: Judgement, expected: Judgement) -> bool:
    """Whether two verdicts are the same, but for the last digits of their numbers."""
    values = [pytest.approx(value) if isinstance(value, float) else value for value in astuple(expected)]
    return type(found) is type(expected) and [*astuple(found)] == values


def test_a_distance_is_relative_to_what_was_recomputed() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    claimed = torch.tensor([[3.3, 4.4], [0.0, 0.0], [1.0, 0.0], [1.0, math.nan]])
    assert row_distances(rows, claimed).tolist() == pytest.approx([0.1, 0.0, math.inf, math.inf])


def test_one_row_beyond_the_bound_differs_and_is_named() -> None:
    assert near(judge_rows(distances(32), EXACT), Agrees(32, 1e-7, FLOOR))
    found = judge_rows(distances(32, _9=2e-5), EXACT, first=100)
    assert near(found, Differs("rows", (109,), 1, 2e-5, FLOOR))
    assert isinstance(judge_rows(distances(32, _9=math.inf), EXACT), Differs)


def test_few_rows_and_a_first_row_alone_say_nothing() -> None:
    assert isinstance(judge_rows(distances(FEWEST - 1, 1.0), EXACT), Unclear)
    assert isinstance(judge_rows(distances(FEWEST, _0=1.0), EXACT), Unclear)
    assert isinstance(judge_rows(distances(FEWEST, _0=1.0, _1=1.0), EXACT), Differs)
    assert isinstance(judge_rows(distances(FEWEST, _0=1.0), EXACT, first=512), Differs)
    assert isinstance(judge_rows(distances(FEWEST, _0=math.inf), EXACT), Differs), "no honest row is that"


def test_a_coarse_class_is_judged_by_medians_and_by_rows_that_lie_far_out() -> None:
    assert near(judge_rows(distances(WINDOW, 8e-3, _5=3e-2), COARSE), Agrees(WINDOW, 8e-3, MEDIAN))
    assert isinstance(judge_rows(distances(WINDOW, 8e-3, _5=5e-2), COARSE), Differs)
    shifted = torch.cat([distances(WINDOW, 8e-3), distances(WINDOW, 1.4e-2)])
    assert near(judge_rows(shifted, COARSE), Differs("rows", (WINDOW,), WINDOW, 1.4e-2, MEDIAN))


def test_the_last_window_reaches_back_over_rows_that_are_left_over() -> None:
    rows = torch.cat([distances(WINDOW, 8e-3), distances(WINDOW // 2 + 8, 2e-2)])
    found = judge_rows(rows, COARSE)
    assert isinstance(found, Differs)
    assert found.places == (WINDOW // 2 + 8,)


def test_bounds_follow_from_what_honest_texts_differ_by() -> None:
    exact, coarse = ("cpu-float32",) * 2, ("cpu-float32", "cpu-bfloat16")
    assert bounds_of(*exact, [distances(64)]).row == FLOOR
    assert bounds_of(*exact, [distances(64, _3=4e-6)]).row == pytest.approx(ROOM * 4e-6)
    assert bounds_of(*exact, [distances(64)], [0.1]).pick == pytest.approx(0.3)
    found = bounds_of(*coarse, [distances(64, 8e-3, _3=2e-2), distances(64, 1e-2)])
    assert found.row == pytest.approx(4e-2)
    assert found.median == pytest.approx(MEDIAN_ROOM * 1e-2)
    assert Bounds.known(*coarse) is None
    assert Bounds.known(*exact) == EXACT


@pytest.mark.parametrize(
    ("one", "other", "exact"),
    [
        ("cpu-float32", "cpu-float32", True),
        ("cpu-float32+w8", "cpu-float32+w8", True),
        ("cpu-float32", "cpu-float32+w8", False),
        ("cpu-float32", "cuda-float32", False),
        ("cpu-bfloat16", "cpu-bfloat16", False),
        ("cuda-sm90-bfloat16-k2", "cuda-sm90-bfloat16-k2", True),
        ("cpu-bfloat16-k2+gguf", "cpu-bfloat16-k2+gguf", False),
        ("cpu-float32+int8", "cpu-float32+int8", False),
        ("of a later release", "of a later release", False),
    ],
)
def test_rows_differ_in_last_bits_alone_in_float32_and_within_one_kind_of_processor(
    one: str, other: str, exact: bool
) -> None:
    assert is_exact(one, other) is exact


def test_a_class_of_cpus_that_promises_texts_allows_for_another_kind_of_processor() -> None:
    """With AVX2 in place of AVX-512, rows of SmolLM2's GGUF were up to 2.4e-2 apart, medians of 64 up to 1.2e-2."""
    bounds = Bounds.known("cpu-bfloat16-k2+gguf", "cpu-bfloat16-k2+gguf")
    assert bounds is not None
    assert isinstance(judge_rows(distances(WINDOW), bounds), Agrees)
    assert isinstance(judge_rows(distances(WINDOW, 1.2e-2, _7=2.4e-2), bounds), Agrees)
    assert isinstance(judge_rows(distances(WINDOW, 0.2), bounds), Differs), "weights of four bits"
    assert isinstance(judge_picks(torch.tensor([0.375]), [5], bounds), Agrees)
    assert isinstance(judge_picks(torch.tensor([1.4]), [5], bounds), Differs)
    assert Bounds.known("cpu-bfloat16-k1+gguf", "cpu-bfloat16-k1+gguf") is None


def test_only_float32_decides_what_another_class_computed() -> None:
    assert undecidable("cpu-bfloat16", "cpu-bfloat16") is None
    assert undecidable("cpu-float32", "cpu-bfloat16") is None
    assert undecidable("cpu-bfloat16", "cpu-float32") is not None
    assert undecidable("cpu-float32+w8", "cpu-float32") is not None


def test_a_verdict_of_several_is_the_worst() -> None:
    agrees, differs, unclear = Agrees(1, 0.0, 1.0), Differs("rows", (1,), 1, 2.0, 1.0), Unclear("why")
    assert together([agrees, unclear, differs]) == differs
    assert together([agrees, unclear]) == unclear
    assert together([agrees]) == agrees
    assert isinstance(together([]), Unclear)


def test_one_pick_beyond_the_bound_differs() -> None:
    gaps = torch.tensor([0.0, 2 * PICK_FLOOR], dtype=torch.float64)
    assert near(judge_picks(gaps, [5, 6], EXACT), Differs("picks", (6,), 1, 2 * PICK_FLOOR, PICK_FLOOR))
    assert judge_picks(gaps[:1], [5], EXACT) == Agrees(1, 0.0, PICK_FLOOR)
    assert isinstance(judge_picks(torch.tensor([math.inf]), [5], EXACT), Differs)
    assert isinstance(judge_picks(torch.empty(0), [], EXACT), Unclear)
