"""Where a tree node gets its chance: how likely the target is to pick it after its parent. Pure.

A drafter hands over the best candidates of each parent and gets one chance per candidate; once the target's picks are
known, it hands the same candidates back with what was picked. `SoftmaxPrior` is a fixed rule. `Calibration` begins
with that rule and learns, for one pair of draft and target and per range of temperatures, how far it is off, and how
far other sources are to be believed that said something about the same places before (the look-up, another draft).

    odds(candidate) = prior × exp(weights · (gap, log rank, is said, log odds said, shift))
    odds(no candidate) = (1 − Σ prior) × exp(weights · (1, log best))

    gap: its score − the best one's, never above 0. said: the chance that others gave it, 0 and 0 where they gave none
    best: the prior of the best candidate
    shift: what an adapter would add to its log chance (`client.drafting.search.adapter`), 0 where there is none

A chance is an odd over the sum of the row's odds, so a row never exceeds 1. Where nobody else spoke, weights of 0 give
the prior. These numbers predict better than tables in buckets of rank and gap, and learn from fewer labels; depth adds
nothing. Sources that agree are worth more than the surer one alone, and of two that contradict each other not both can
be right: the higher of both chances, which is simpler, claims up to 1.3 tokens after a place.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from client.drafting.search.temperatures import TEMPERATURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

START = (0.0, 0.0, 0.0, 0.0, 1.4, 0.75, 0.0)
"""Weights before the first lesson: gap, log rank; no candidate, its log best; is said, log odds said; shift."""
WEIGHTS = len(START)
CONFIDENCE = 4.0
"""Curvature of the pull towards `START`: that holds until a few labels speak against it."""

MEMORY_LABELS = 4_000
"""Labels after which an old one counts 1/e."""

MAX_STEP = 1.0
MAX_WEIGHT = 20.0
"""Bounds of a weight's change by one lesson and of a weight, so that exp() stays finite whatever is taught."""

MIN_GAP = -20.0
MIN_BEST = 1e-6
LEAST_SAID, MOST_SAID = 1e-3, 0.999
MOST_SHIFT = 10.0
MAX_INFORMATION = 1e7
"""Above what MEMORY_LABELS labels with features within these bounds amount to."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The best candidates of some parents, all of one generation.

    scores: [parents, candidates], each row falling; −inf marks a token that cannot be picked.
    log_mass: [parents], log Σ exp(score) over the whole vocabulary; None for coupled scores, where the noise already
        decides and only the best candidates compete.
    temperature: of the target's picks; 0 is greedy.
    said: [parents, candidates], the chance that other sources gave each, 0 for none; None where nobody said anything.
    shift: [parents, candidates], what an adapter would add to each logit; None where there is none.
    """

    scores: NDArray[np.float64]
    log_mass: NDArray[np.float64] | None
    temperature: float
    said: NDArray[np.float64] | None = None
    shift: NDArray[np.float64] | None = None

    def rows(self, rows: Sequence[int]) -> Candidates:
        """Those of some parents."""
        mass, said, shift = self.log_mass, self.said, self.shift
        return Candidates(
            self.scores[rows],
            None if mass is None else mass[rows],
            self.temperature,
            None if said is None else said[rows],
            None if shift is None else shift[rows],
        )


class ChanceModel(Protocol):
    """Turns candidates into chances."""

    def chances(self, candidates: Candidates) -> NDArray[np.float64]:
        """The chance of each candidate given that its parent is reached.

        Returns:
            [parents, candidates], each row within [0, 1] and not above 1 in sum.
        """
        ...

    def learn(self, candidates: Candidates, hits: NDArray[np.bool_]) -> None:
        """Take labels: `hits` [parents, candidates] marks what the target picked, no candidate in some rows."""
        ...


class SoftmaxPrior:
    """Softmax of the ranking scores × `decay` per level: a draft is a little less right than it believes.

    Source: the offline prototype behind the demo pair's acceptance table.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay

    def chances(self, candidates: Candidates) -> NDArray[np.float64]:
        """The same whatever was picked before; of a candidate that others gave more, as much as they did."""
        own = self.own(candidates)
        if candidates.said is None:
            return own
        higher = np.maximum(own, np.where(np.isfinite(candidates.scores), candidates.said, 0.0))
        return np.asarray(higher / np.maximum(higher.sum(axis=1, keepdims=True), 1.0))

    def own(self, candidates: Candidates) -> NDArray[np.float64]:
        """Whatever others said."""
        scores, log_mass = candidates.scores, candidates.log_mass
        if log_mass is None:
            weights = np.exp(scores - scores[:, :1])
            return np.asarray(self.decay * weights / weights.sum(axis=1, keepdims=True))
        weights = np.exp(scores - log_mass[:, None])
        # What others said has a bound of the draft's score in its place: together they may claim more than there is.
        return np.asarray(self.decay * weights / np.maximum(weights.sum(axis=1, keepdims=True), 1.0))

    def learn(self, candidates: Candidates, hits: NDArray[np.bool_]) -> None:
        """A fixed rule learns nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What was learned in one range of temperatures.

    weights: [7], see the module. information: [7, 7], how sure they are: the labels' Fisher information, fading, plus
    the pull towards `START`.
    """

    weights: NDArray[np.float64] = field(default_factory=lambda: np.array(START))
    information: NDArray[np.float64] = field(default_factory=lambda: CONFIDENCE * np.eye(WEIGHTS))

    @property
    def is_sound(self) -> bool:
        """Whether lessons can lead here; what comes from a file may be anything."""
        if self.weights.shape != (WEIGHTS,) or self.information.shape != (WEIGHTS, WEIGHTS):
            return False
        if not (np.abs(self.weights) <= MAX_WEIGHT).all() or not np.isfinite(self.information).all():
            return False
        least, *_, most = np.linalg.eigvalsh(self.information)
        symmetric = np.allclose(self.information, self.information.T)
        return bool(symmetric and least > CONFIDENCE / 2 and most < MAX_INFORMATION)

    def chances(self, prior: NDArray[np.float64], features: NDArray[np.float64]) -> NDArray[np.float64]:
        """[parents, candidates + 1], the last column for no candidate; every row sums to 1."""
        odds = np.column_stack((prior, 1 - prior.sum(axis=1))) * np.exp(features @ self.weights)
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))

    def after(self, prior: NDArray[np.float64], features: NDArray[np.float64], picked: NDArray[np.float64]) -> Fit:
        """The fit after one more lesson: one Newton step on the fading log-likelihood, which is concave.

        picked: [parents, candidates + 1], 1 where the target's pick is.
        """
        chances = self.chances(prior, features)
        slope = np.tensordot(picked - chances, features, 2)
        weighed = chances[:, :, None] * features
        average = weighed.sum(axis=1)
        curvature = np.tensordot(weighed, features, ((0, 1), (0, 1))) - average.T @ average
        kept = np.exp(-len(prior) / MEMORY_LABELS)
        pull = CONFIDENCE * np.eye(WEIGHTS)
        information = pull + kept * (self.information - pull) + curvature
        # Labels that fade leave the pull the stronger, so it has its own part in the slope.
        step = np.linalg.solve(information, slope - (1 - kept) * CONFIDENCE * (self.weights - np.array(START)))
        weights = self.weights + step.clip(-MAX_STEP, MAX_STEP)
        return Fit(weights.clip(-MAX_WEIGHT, MAX_WEIGHT), information)


class Calibration:
    """A `ChanceModel` that learns how often the target picks what one draft ranks first, second …

    Not for several threads at once, but `fits` may be read at any time.
    Source: Ljung and Söderström, Theory and Practice of Recursive Identification, on forgetting.
    """

    def __init__(self, fits: tuple[Fit, ...] | None = None) -> None:
        """A calibration that knows `fits`, one per range of temperatures; nothing by default."""
        self._prior = SoftmaxPrior()
        self.fits = fits or tuple(Fit() for _ in range(len(TEMPERATURES) + 1))

    def chances(self, candidates: Candidates) -> NDArray[np.float64]:
        """The prior corrected by what was learned; the prior itself before the first lesson."""
        prior = self._prior.own(candidates)
        fit = self.fits[bisect_left(TEMPERATURES, candidates.temperature)]
        return fit.chances(prior, _features(candidates, prior))[:, :-1]

    def learn(self, candidates: Candidates, hits: NDArray[np.bool_]) -> None:
        """Learn from labels; a hit that the prior rules out counts as none, and a draft gone NaN teaches nothing."""
        prior = self._prior.own(candidates)
        if not np.isfinite(prior).all():
            return
        hits = hits & (prior > 0)
        picked = np.column_stack((hits, ~hits.any(axis=1))).astype(np.float64)
        place = bisect_left(TEMPERATURES, candidates.temperature)
        fit = self.fits[place].after(prior, _features(candidates, prior), picked)
        self.fits = (*self.fits[:place], fit, *self.fits[place + 1 :])


def _features(candidates: Candidates, prior: NDArray[np.float64]) -> NDArray[np.float64]:
    """[parents, candidates + 1, 7]; the last candidate is none of them."""
    scores = candidates.scores
    features = np.zeros((len(scores), scores.shape[1] + 1, WEIGHTS))
    features[:, :-1, 0] = np.maximum(scores - scores[:, :1], MIN_GAP)
    features[:, :-1, 1] = np.log(np.arange(1, scores.shape[1] + 1))
    features[:, -1, 2] = 1
    features[:, -1, 3] = np.log(np.maximum(prior[:, 0], MIN_BEST))
    if candidates.said is not None:
        said = candidates.said.clip(LEAST_SAID, MOST_SAID)
        features[:, :-1, 4] = candidates.said > 0
        features[:, :-1, 5] = np.where(candidates.said > 0, np.log(said / (1 - said)), 0.0)
    if candidates.shift is not None:
        features[:, :-1, 6] = _centred(candidates.shift / (candidates.temperature or 1.0), prior)
    return features


def _centred(shift: NDArray[np.float64], prior: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shifts of scores as shifts of log chances, among candidates that can be picked."""
    bounded = shift.clip(-MOST_SHIFT, MOST_SHIFT)
    mass = prior.sum(axis=1, keepdims=True)
    able = np.maximum(mass, MIN_BEST)
    level = np.log(np.maximum((prior * np.exp(bounded)).sum(axis=1, keepdims=True) / able, np.exp(-MOST_SHIFT)))
    return np.where(prior > 0, bounded - level, 0.0)
