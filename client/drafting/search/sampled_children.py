"""Children drawn from a draft's own probabilities, for `swarm.inference.multistep_sampling` at the tail.

How many are drawn after a node is settled before the first one, and every guess travels whose node does, whatever came
of its draws: a choice by their outcome would bias what the tail picks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from client.drafting.search.source import Places, Search
from client.drafting.search.tree import Picks
from swarm.inference.multistep_sampling import draw_children
from swarm.inference.sampling import target_probs
from swarm.protocol.draft_distribution import DraftDistribution

DRAWS = 4
PRIOR = (0.6, 0.15, 0.07, 0.04)
"""Chances of the first, second … different token that was drawn, until picks are known."""
PRIOR_WEIGHT = 10.0

Drawn = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawLesson:
    """What was drawn after nodes of a settled tree: different tokens, in order."""

    draws: SampledChildren
    places: Places
    drawn: Mapping[int | None, Drawn]

    def learn(self, picks: Picks, others: Picks) -> None:
        """Which draw it was, if any."""
        for node, pick in picks.items():
            if (drawn := self.drawn.get(self.places[node])) is not None:
                self.draws.learn(drawn, pick)


class SampledChildren:
    """Draws for one source."""

    def __init__(self) -> None:
        self._tried = np.full(DRAWS, PRIOR_WEIGHT)
        self._right = np.array(PRIOR) * PRIOR_WEIGHT
        self._seed: int | None = None
        self._rng = np.random.default_rng(0)
        self._drawn: dict[int | None, Drawn] = {}

    def begin(self) -> None:
        """Another search: nothing was drawn in it."""
        self._drawn = {}

    def add(self, search: Search, nodes: Sequence[int], draft_logits: torch.Tensor) -> None:
        """Draw children below nodes of which no other source drew; draft_logits: [nodes, vocab_size]."""
        tree, sampling = search.tree, search.sampling
        if self._seed != sampling.seed:
            self._seed, self._rng = sampling.seed, np.random.default_rng([DRAWS, sampling.seed])
        chances = np.minimum(self._right / self._tried, 1.0)
        chances *= min(1.0, 1.0 / chances.sum())
        for node, draft_probs in zip(nodes, target_probs(draft_logits, sampling), strict=True):
            if node in tree.guesses:
                continue
            made: DraftDistribution = draw_children(0, draft_probs, DRAWS, self._rng)
            tree.guesses[node] = made
            self._drawn[node] = tokens = tuple(dict.fromkeys(made.tokens[draw] for draw in made.draws))
            tree.add_children(node, zip(tokens, chances.tolist(), strict=False))

    def learn(self, drawn: Drawn, pick: int) -> None:
        """A label for each token that was drawn."""
        self._tried[: len(drawn)] += 1
        if pick in drawn:
            self._right[drawn.index(pick)] += 1

    def lesson(self, places: Places) -> DrawLesson:
        """What there is to learn from a settled tree."""
        return DrawLesson(self, places, self._drawn)
