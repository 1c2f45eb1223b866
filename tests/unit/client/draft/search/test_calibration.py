"""Chances: the fixed prior, and what a calibration makes of labels. Simulated targets with seeded draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from client.draft.search.calibration import (
    MAX_WEIGHT,
    MEMORY_LABELS,
    MIN_GAP,
    TEMPERATURES,
    Calibration,
    Candidates,
    SoftmaxPrior,
)

CANDIDATES = 8
LESSON_PARENTS = 16


def rows(rng: np.random.Generator, parents: int, temperature: float = 1.0) -> Candidates:
    """Candidates of a draft that is sometimes sure and sometimes not."""
    spread = rng.uniform(0.3, 3, size=(parents, 1))
    scores = -np.sort(-spread * rng.normal(size=(parents, CANDIDATES)), axis=1)
    mass = np.log(np.exp(scores).sum(axis=1) + 2) if temperature == 0 else None
    return Candidates(scores, mass, temperature)


def sharper(candidates: Candidates, slope: float) -> NDArray[np.float64]:
    """A target that is sure by another `slope` than its draft, and picks none of the candidates once in 50 times."""
    weights = np.exp(slope * (candidates.scores - candidates.scores[:, :1]))
    return np.asarray(0.98 * weights / weights.sum(axis=1, keepdims=True))


def draw(rng: np.random.Generator, target_probs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Labels: at most one pick per row."""
    below = np.cumsum(target_probs, axis=1)
    uniform = rng.uniform(size=(len(target_probs), 1))
    return np.asarray((uniform < below) & (uniform >= below - target_probs))


def taught(rng: np.random.Generator, slope: float, lessons: int, temperature: float = 1.0) -> Calibration:
    calibration = Calibration()
    teach(calibration, rng, slope, lessons, temperature)
    return calibration


def teach(
    calibration: Calibration, rng: np.random.Generator, slope: float, lessons: int, temperature: float = 1.0
) -> None:
    for _ in range(lessons):
        candidates = rows(rng, LESSON_PARENTS, temperature)
        calibration.learn(candidates, draw(rng, sharper(candidates, slope)))


def distance(calibration: Calibration | SoftmaxPrior, slope: float, temperature: float = 1.0) -> float:
    """Mean distance in chance from the law of `sharper`, on rows of its own."""
    candidates = rows(np.random.default_rng(99), 500, temperature)
    return float(np.abs(calibration.acceptance_probs(candidates) - sharper(candidates, slope)).mean())


def test_prior_is_the_softmax_of_the_whole_vocabulary_or_of_the_best() -> None:
    logits = np.log(np.array([[0.4, 0.2, 0.1]]))
    prior = SoftmaxPrior(decay=0.5)
    greedy, warm = Candidates(logits + 7, np.array([7.0]), 0.0), Candidates(logits + 7, None, 1.0)
    np.testing.assert_allclose(prior.acceptance_probs(greedy), [[0.2, 0.1, 0.05]])
    np.testing.assert_allclose(prior.acceptance_probs(warm).sum(), 0.5)


@pytest.mark.parametrize("model", [SoftmaxPrior(), Calibration()])
def test_tokens_that_cannot_be_picked_have_no_chance(model: SoftmaxPrior | Calibration) -> None:
    scores = np.array([[1.0, -np.inf]])
    np.testing.assert_allclose(model.acceptance_probs(Candidates(scores, None, 1.0)), [[0.9, 0.0]])


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.6, 1.0, 2.0])
def test_before_the_first_lesson_chances_are_the_priors(temperature: float) -> None:
    candidates = rows(np.random.default_rng(1), 50, temperature)
    np.testing.assert_allclose(
        Calibration().acceptance_probs(candidates), SoftmaxPrior().acceptance_probs(candidates), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("slope", [0.5, 1.0, 3.0])
def test_chances_approach_the_targets_law(temperature: float, slope: float) -> None:
    """Measured: .001 to .004 after 250 lessons; the prior is .010 to .075 away."""
    calibration = taught(np.random.default_rng(2), slope, 250, temperature)
    assert distance(calibration, slope, temperature) < 0.25 * distance(SoftmaxPrior(), slope, temperature)


def test_a_few_lessons_suffice_where_the_prior_is_far_off() -> None:
    calibration = taught(np.random.default_rng(3), 3.0, 5)
    assert distance(calibration, 3.0) < 0.5 * distance(SoftmaxPrior(), 3.0)


def test_old_labels_fade() -> None:
    """Measured: .23 of the distance is left, and .42 where nothing fades."""
    rng = np.random.default_rng(4)
    calibration = taught(rng, 0.3, MEMORY_LABELS // LESSON_PARENTS)
    before = distance(calibration, 3.0)
    teach(calibration, rng, 3.0, 3 * MEMORY_LABELS // LESSON_PARENTS)
    assert distance(calibration, 3.0) < 0.3 * before


def test_ranges_of_temperature_learn_apart() -> None:
    calibration = taught(np.random.default_rng(5), 3.0, 20, temperature=0.6)
    for temperature, learned in ((0.0, False), (0.45, False), (0.46, True), (0.8, True), (0.81, False), (9.0, False)):
        candidates = rows(np.random.default_rng(6), 5, temperature)
        same = np.allclose(calibration.acceptance_probs(candidates), SoftmaxPrior().acceptance_probs(candidates))
        assert same is not learned, temperature


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whatever_is_taught_rows_stay_laws_and_state_stays_bounded(temperature: float) -> None:
    """Targets that never, always or only last pick what the draft is surest of, in turns."""
    calibration = Calibration()
    flat, steep = np.zeros((64, CANDIDATES)), np.full((64, CANDIDATES), 5 * MIN_GAP)
    steep[:, 0] = 0
    mass = np.zeros(64) + np.log(CANDIDATES) if temperature == 0 else None
    for _ in range(20):
        for scores in (flat, steep):
            for rank in (0, CANDIDATES - 1, None):
                hits = np.zeros((64, CANDIDATES), dtype=bool)
                if rank is not None:
                    hits[:, rank] = True
                candidates = Candidates(scores, mass, temperature)
                calibration.learn(candidates, hits)
                probabilities = calibration.acceptance_probs(candidates)
                assert ((probabilities >= 0) & (probabilities <= 1)).all()
                assert (probabilities.sum(axis=1) <= 1 + 1e-12).all()
                assert all(fit.is_sound for fit in calibration.fits)
    assert len(calibration.fits) == len(TEMPERATURES) + 1
    assert np.abs(calibration.fits[0].weights).max() <= MAX_WEIGHT


def test_a_pick_that_the_draft_rules_out_counts_as_no_candidate() -> None:
    scores = np.tile([[0.0, -1.0, -np.inf]], (40, 1))
    candidates = Candidates(scores, None, 1.0)
    impossible, none = Calibration(), Calibration()
    impossible.learn(candidates, np.tile([[False, False, True]], (40, 1)))
    none.learn(candidates, np.zeros((40, 3), dtype=bool))
    np.testing.assert_array_equal(impossible.acceptance_probs(candidates), none.acceptance_probs(candidates))
    assert none.acceptance_probs(candidates)[0].sum() < SoftmaxPrior().acceptance_probs(candidates)[0].sum()


def test_a_draft_gone_nan_teaches_nothing() -> None:
    calibration = Calibration()
    calibration.learn(Candidates(np.full((2, 3), np.nan), None, 1.0), np.ones((2, 3), dtype=bool))
    candidates = rows(np.random.default_rng(7), 5)
    np.testing.assert_allclose(calibration.acceptance_probs(candidates), SoftmaxPrior().acceptance_probs(candidates))


def heard(candidates: Candidates, said: list[float]) -> Candidates:
    """The same, and what others said about every parent's candidates."""
    return replace(candidates, other_probs=np.tile(said, (len(candidates.scores), 1)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("model", [SoftmaxPrior(), Calibration()])
def test_what_others_say_moves_a_chance_and_leaves_a_law(model: SoftmaxPrior | Calibration, temperature: float) -> None:
    candidates = rows(np.random.default_rng(10), 20, temperature)
    alone = model.acceptance_probs(candidates)
    nothing = heard(candidates, [0.0] * CANDIDATES)
    np.testing.assert_allclose(model.acceptance_probs(nothing), alone)
    surer = model.acceptance_probs(heard(candidates, [0.0] * 3 + [0.5] + [0.0] * 4))  # whose log odds are 0
    assert (surer[:, 3] > alone[:, 3]).all()
    assert (surer.sum(axis=1) <= 1 + 1e-12).all()
    everywhere = model.acceptance_probs(heard(candidates, [1.0] * CANDIDATES))
    assert np.isfinite(everywhere).all()
    assert (everywhere.sum(axis=1) <= 1 + 1e-12).all()


def test_bounds_in_the_place_of_scores_leave_a_law() -> None:
    """A flat draft, and four more candidates that others named: as many bounds as scores may sum to more than 1."""
    flat = Candidates(np.zeros((3, 12)), np.full(3, np.log(8)), 0.0, np.tile([0.0] * 8 + [0.2] * 4, (3, 1)))
    for model in (SoftmaxPrior(), Calibration()):
        assert (model.acceptance_probs(flat).sum(axis=1) <= 1 + 1e-12).all()
        assert (model.acceptance_probs(flat) > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_learns_what_the_others_are_worth(temperature: float) -> None:
    """Targets that follow the others half of the time they speak; measured: .50 of them, the law .52."""
    rng, calibration = np.random.default_rng(11), Calibration()
    for _ in range(60):
        candidates = rows(rng, LESSON_PARENTS, temperature)
        hits = draw(rng, sharper(candidates, 1.0))
        follows = rng.uniform(size=LESSON_PARENTS) < 0.5
        hits[follows] = np.arange(CANDIDATES) == 5
        calibration.learn(heard(candidates, [0.0] * 5 + [0.3] + [0.0] * 2), hits)
    unseen = rows(np.random.default_rng(12), 200, temperature)
    law = 0.5 * sharper(unseen, 1.0)
    law[:, 5] += 0.5
    ours = calibration.acceptance_probs(heard(unseen, [0.0] * 5 + [0.3] + [0.0] * 2))
    assert abs(ours[:, 5].mean() - law[:, 5].mean()) < 0.05
    assert np.abs(ours - law).mean() < 0.5 * np.abs(SoftmaxPrior().acceptance_probs(unseen) - law).mean()


def test_learning_is_a_function_of_its_lessons() -> None:
    replicas = [taught(np.random.default_rng(8), 2.0, 10) for _ in range(2)]
    candidates = rows(np.random.default_rng(9), 5)
    np.testing.assert_array_equal(replicas[0].acceptance_probs(candidates), replicas[1].acceptance_probs(candidates))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shift_is_believed_as_far_as_it_is_right(temperature: float) -> None:
    rng, truth = np.random.default_rng(11), np.random.default_rng(12)
    right, wrong, without = Calibration(), Calibration(), Calibration()
    loss = {"right": 0.0, "wrong": 0.0, "without": 0.0}
    for lesson in range(300):
        plain = rows(rng, LESSON_PARENTS, temperature)
        told = replace(plain, logit_delta=truth.normal(scale=2.0, size=plain.scores.shape))
        other = replace(plain, logit_delta=truth.normal(scale=2.0, size=plain.scores.shape))
        assert told.logit_delta is not None
        mass = None if plain.log_mass is None else np.log(np.exp(plain.scores + told.logit_delta).sum(axis=1) + 2)
        hits = draw(rng, sharper(Candidates(plain.scores + told.logit_delta, mass, temperature), 1.0))
        for name, calibration, seen in (("right", right, told), ("wrong", wrong, other), ("without", without, plain)):
            if lesson >= 100:
                probabilities = calibration.acceptance_probs(seen)
                assert probabilities.sum(axis=1).max() <= 1 + 1e-9
                known = np.where(hits.any(axis=1), (probabilities * hits).sum(axis=1), 1 - probabilities.sum(axis=1))
                loss[name] -= float(np.log(known.clip(1e-6)).mean()) / 200
            calibration.learn(seen, hits)
    assert loss["right"] < loss["without"] - 0.3
    assert abs(loss["wrong"] - loss["without"]) < 0.03


def test_a_shift_that_is_the_same_for_all_says_nothing() -> None:
    calibration, plain = taught(np.random.default_rng(13), 1.0, 20), rows(np.random.default_rng(14), 5)
    weights = calibration.fits[3].weights.copy()
    weights[6] = 1.0
    told = Calibration(tuple(replace(fit, weights=weights) for fit in calibration.fits))
    level = replace(plain, logit_delta=np.full(plain.scores.shape, 3.0))
    np.testing.assert_allclose(told.acceptance_probs(level), told.acceptance_probs(plain))
