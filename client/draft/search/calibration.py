"""From a draft's scores to acceptance probabilities: how likely the target picks a node after its parent. Pure.

A drafter hands over the best candidates of each parent and gets one probability per candidate. Once the target's picks
are known, it hands the same candidates back with what was picked. `SoftmaxPrior` is a fixed rule. `Calibration` begins
with that rule and learns how far it is off, for one pair of draft and target and per range of temperatures. It also
learns how far to believe other sources that proposed candidates at the same nodes (the look-up, another draft).

    mass(candidate)    = prior × exp(weights · (gap, log rank, is proposed, log odds of other_prob, logit delta))
    mass(no candidate) = (1 − Σ prior) × exp(weights · (1, log best))

    gap          its score − the best one's, never above 0
    is proposed  1 where other sources propose the candidate, else 0
    other_prob   the other sources' probability of it; its log odds count as 0 where they propose none
    logit delta  what an adapter would add to its log-probability (`client.draft.search.ranking`), 0 without one
    best         the prior of the best candidate

A probability is a mass over the sum of its row's masses, so a row never exceeds 1. Weights of 0 give the prior where no
other source proposes anything. Sources that agree count for more than the surer one alone. Of two that contradict
each other not both can be right, which the higher of both probabilities would ignore.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

TEMPERATURES = (0.0, 0.45, 0.8, 1.25)
"""Upper ends of the ranges that are learned apart; the last range has none."""


START = (0.0, 0.0, 0.0, 0.0, 1.4, 0.75, 0.0)
"""Weights before the first lesson: gap, log rank; no candidate, log best; is proposed, log odds; logit delta."""
WEIGHTS = len(START)
CONFIDENCE = 4.0
"""Curvature of the pull towards `START`: a few labels outweigh it."""

MEMORY_LABELS = 4_000
"""Labels after which an old one counts 1/e."""

MAX_STEP = 1.0
MAX_WEIGHT = 20.0
"""Bounds of a weight's change by one lesson and of a weight, so that exp() stays finite whatever is taught."""

MIN_GAP = -20.0
MIN_BEST = 1e-6
MIN_OTHER_PROB, MAX_OTHER_PROB = 1e-3, 0.999
MAX_LOGIT_DELTA = 10.0
MAX_INFORMATION = 1e7
"""Above what MEMORY_LABELS labels with features within these bounds amount to."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The best candidates of some parents, all of one generation.

    Attributes:
        scores: [parents, candidates], each row falling; −inf marks a token that cannot be picked.
        log_mass: [parents], log Σ exp(score) over the whole vocabulary; None for coupled scores, where the noise
            already decides and only the best candidates compete.
        temperature: of the target's picks; 0 is greedy.
        other_probs: [parents, candidates], the other sources' probability of each, 0 where they do not propose it;
            None where they propose nothing at all.
        logit_delta: [parents, candidates], what an adapter would add to each logit; None without an adapter.
    """

    scores: NDArray[np.float64]
    log_mass: NDArray[np.float64] | None
    temperature: float
    other_probs: NDArray[np.float64] | None = None
    logit_delta: NDArray[np.float64] | None = None

    def rows(self, rows: Sequence[int]) -> Candidates:
        """Those of some parents."""
        mass, other_probs, logit_delta = self.log_mass, self.other_probs, self.logit_delta
        return Candidates(
            self.scores[rows],
            None if mass is None else mass[rows],
            self.temperature,
            None if other_probs is None else other_probs[rows],
            None if logit_delta is None else logit_delta[rows],
        )


class AcceptanceModel(Protocol):
    """Turns candidates into acceptance probabilities."""

    def acceptance_probs(self, candidates: Candidates) -> NDArray[np.float64]:
        """The probability of each candidate, given that the target's picks reach its parent.

        Returns:
            [parents, candidates], within [0, 1]; no row's sum is above 1.
        """
        ...

    def learn(self, candidates: Candidates, hits: NDArray[np.bool_]) -> None:
        """Learn from labels.

        Args:
            candidates: as they were handed to `acceptance_probs`.
            hits: [parents, candidates], whether the target picked each; a row without one marks another pick.
        """
        ...


class SoftmaxPrior:
    """Softmax of the ranking scores × `decay` per level: a draft is a little less right than it believes.

    Source: the offline prototype behind the demo pair's acceptance table.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay

    def acceptance_probs(self, candidates: Candidates) -> NDArray[np.float64]:
        """The prior, or the other sources' probability where that is higher; nothing is learned."""
        own = self.own_probs(candidates)
        if candidates.other_probs is None:
            return own
        higher = np.maximum(own, np.where(np.isfinite(candidates.scores), candidates.other_probs, 0.0))
        return np.asarray(higher / np.maximum(higher.sum(axis=1, keepdims=True), 1.0))

    def own_probs(self, candidates: Candidates) -> NDArray[np.float64]:
        """The prior alone [parents, candidates], whatever other sources propose."""
        scores, log_mass = candidates.scores, candidates.log_mass
        if log_mass is None:
            weights = np.exp(scores - scores[:, :1])
            return np.asarray(self.decay * weights / weights.sum(axis=1, keepdims=True))
        weights = np.exp(scores - log_mass[:, None])
        # Other sources' candidates have a bound in place of the draft's score: a row's sum may exceed the whole mass.
        return np.asarray(self.decay * weights / np.maximum(weights.sum(axis=1, keepdims=True), 1.0))

    def learn(self, candidates: Candidates, hits: NDArray[np.bool_]) -> None:
        """A fixed rule learns nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What was learned in one range of temperatures.

    Attributes:
        weights: [7], see the module.
        information: [7, 7], how sure they are: the labels' Fisher information, fading, plus the pull towards `START`.
    """

    weights: NDArray[np.float64] = field(default_factory=lambda: np.array(START))
    information: NDArray[np.float64] = field(default_factory=lambda: CONFIDENCE * np.eye(WEIGHTS))

    @property
    def is_sound(self) -> bool:
        """Whether lessons can lead to these numbers; those of a file may be anything."""
        if self.weights.shape != (WEIGHTS,) or self.information.shape != (WEIGHTS, WEIGHTS):
            return False
        if not (np.abs(self.weights) <= MAX_WEIGHT).all() or not np.isfinite(self.information).all():
            return False
        smallest, *_, largest = np.linalg.eigvalsh(self.information)
        symmetric = np.allclose(self.information, self.information.T)
        return bool(symmetric and smallest > CONFIDENCE / 2 and largest < MAX_INFORMATION)

    def pick_probs(self, prior: NDArray[np.float64], features: NDArray[np.float64]) -> NDArray[np.float64]:
        """[parents, candidates + 1], the last column for no candidate; every row sums to 1."""
        mass = np.column_stack((prior, 1 - prior.sum(axis=1))) * np.exp(features @ self.weights)
        return np.asarray(mass / mass.sum(axis=1, keepdims=True))

    def after(self, prior: NDArray[np.float64], features: NDArray[np.float64], picked: NDArray[np.float64]) -> Fit:
        """The fit after one more lesson: one Newton step on the fading log-likelihood, which is concave.

        Args:
            prior: [parents, candidates].
            features: [parents, candidates + 1, 7].
            picked: [parents, candidates + 1], 1 where the target's pick is, else 0.
        """
        probs = self.pick_probs(prior, features)
        slope = np.tensordot(picked - probs, features, 2)  # [7]: the gradient of the log-likelihood
        weighed = probs[:, :, None] * features
        average = weighed.sum(axis=1)  # [parents, 7]: the expected features of each row
        curvature = np.tensordot(weighed, features, ((0, 1), (0, 1))) - average.T @ average
        kept = np.exp(-len(prior) / MEMORY_LABELS)
        pull = CONFIDENCE * np.eye(WEIGHTS)
        information = pull + kept * (self.information - pull) + curvature
        # Labels that fade leave the pull the stronger, so it has its own part in the slope.
        step = np.linalg.solve(information, slope - (1 - kept) * CONFIDENCE * (self.weights - np.array(START)))
        weights = self.weights + step.clip(-MAX_STEP, MAX_STEP)
        return Fit(weights.clip(-MAX_WEIGHT, MAX_WEIGHT), information)


class Calibration:
    """An `AcceptanceModel` that learns how often the target picks what one draft ranks first, second …

    Not for several threads at once, but `fits` may be read at any time.

    Source: Ljung and Söderström, Theory and Practice of Recursive Identification, on forgetting.
    """

    def __init__(self, fits: tuple[Fit, ...] | None = None) -> None:
        """A calibration that goes on from `fits`, one per range of temperatures; by default nothing is learned yet."""
        self._prior = SoftmaxPrior()
        self.fits = fits or tuple(Fit() for _ in range(len(TEMPERATURES) + 1))

    def acceptance_probs(self, candidates: Candidates) -> NDArray[np.float64]:
        """The prior corrected by what was learned; the prior itself before the first lesson."""
        prior = self._prior.own_probs(candidates)
        fit = self.fits[bisect_left(TEMPERATURES, candidates.temperature)]
        return fit.pick_probs(prior, _features(candidates, prior))[:, :-1]

    def learn(self, candidates: Candidates, hits: NDArray[np.bool_]) -> None:
        """Learn from labels; a hit that the prior rules out counts as none, and NaN scores teach nothing."""
        prior = self._prior.own_probs(candidates)
        if not np.isfinite(prior).all():
            return
        hits = hits & (prior > 0)
        picked = np.column_stack((hits, ~hits.any(axis=1))).astype(np.float64)
        place = bisect_left(TEMPERATURES, candidates.temperature)
        fit = self.fits[place].after(prior, _features(candidates, prior), picked)
        self.fits = (*self.fits[:place], fit, *self.fits[place + 1 :])


def _features(candidates: Candidates, prior: NDArray[np.float64]) -> NDArray[np.float64]:
    """[parents, candidates + 1, 7]; the last column stands for no candidate."""
    scores = candidates.scores
    features = np.zeros((len(scores), scores.shape[1] + 1, WEIGHTS))
    features[:, :-1, 0] = np.maximum(scores - scores[:, :1], MIN_GAP)
    features[:, :-1, 1] = np.log(np.arange(1, scores.shape[1] + 1))
    features[:, -1, 2] = 1
    features[:, -1, 3] = np.log(np.maximum(prior[:, 0], MIN_BEST))
    if candidates.other_probs is not None:
        probs = candidates.other_probs.clip(MIN_OTHER_PROB, MAX_OTHER_PROB)
        features[:, :-1, 4] = candidates.other_probs > 0
        features[:, :-1, 5] = np.where(candidates.other_probs > 0, np.log(probs / (1 - probs)), 0.0)
    if candidates.logit_delta is not None:
        features[:, :-1, 6] = _centred(candidates.logit_delta / (candidates.temperature or 1.0), prior)
    return features


def _centred(delta: NDArray[np.float64], prior: NDArray[np.float64]) -> NDArray[np.float64]:
    """Changes of scores as changes of log-probabilities, among candidates that can be picked."""
    bounded = delta.clip(-MAX_LOGIT_DELTA, MAX_LOGIT_DELTA)
    mass = prior.sum(axis=1, keepdims=True)
    able = np.maximum(mass, MIN_BEST)
    level = np.log(np.maximum((prior * np.exp(bounded)).sum(axis=1, keepdims=True) / able, np.exp(-MAX_LOGIT_DELTA)))
    return np.where(prior > 0, bounded - level, 0.0)
