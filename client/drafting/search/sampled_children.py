"""Children drawn from a draft's own probabilities, for `swarm.inference.multistep_sampling` at the tail.

How many are drawn after a node is fixed before the first draw. A distribution travels whenever its node does, whatever
was drawn from it: a choice by the outcome would bias what the tail picks.
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
from swarm.protocol.pick_rules import DraftDistribution

DRAWS = 4
"""Draws with replacement after one node."""
PRIOR = (0.6, 0.15, 0.07, 0.04)
"""Probabilities that the target picks the first, second … different token that was drawn, until picks are known."""
PRIOR_WEIGHT = 10.0
"""Labels that the prior counts for."""

Drawn = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawLesson:
    """What to learn from a settled tree: which draw the target picked.

    Attributes:
        children: learns it.
        places: as in `client.drafting.search.source`.
        drawn: by node of the search, the different tokens that were drawn, in order.
    """

    children: SampledChildren
    places: Places
    drawn: Mapping[int | None, Drawn]

    def learn(self, picks: Picks, others: Picks) -> None:
        """Which draw the target picked, if any; picks elsewhere than on the text's path do not count."""
        for node, pick in picks.items():
            if (drawn := self.drawn.get(self.places[node])) is not None:
                self.children.learn(drawn, pick)


class SampledChildren:
    """Draws children for one source, and learns how often the first, second … is picked."""

    def __init__(self) -> None:
        self._tried = np.full(DRAWS, PRIOR_WEIGHT)
        self._right = np.array(PRIOR) * PRIOR_WEIGHT
        self._seed: int | None = None
        self._rng = np.random.default_rng(0)
        self._drawn: dict[int | None, Drawn] = {}

    def begin(self) -> None:
        """Begin another search, in which nothing was drawn yet."""
        self._drawn = {}

    def add(self, search: Search, nodes: Sequence[int], draft_logits: torch.Tensor) -> None:
        """Draw children below nodes where no other source drew any, from `draft_logits` [nodes, vocab_size]."""
        tree, sampling = search.tree, search.sampling
        if self._seed != sampling.seed:
            self._seed, self._rng = sampling.seed, np.random.default_rng([DRAWS, sampling.seed])
        probs = np.minimum(self._right / self._tried, 1.0)
        probs *= min(1.0, 1.0 / probs.sum())
        for node, draft_probs in zip(nodes, target_probs(draft_logits, sampling), strict=True):
            if node in tree.guesses:
                continue
            drawn: DraftDistribution = draw_children(0, draft_probs, DRAWS, self._rng)
            tree.guesses[node] = drawn
            self._drawn[node] = tokens = tuple(dict.fromkeys(drawn.tokens[draw] for draw in drawn.draws))
            tree.add_children(node, zip(tokens, probs.tolist(), strict=False))

    def learn(self, drawn: Drawn, pick: int) -> None:
        """Count each token that was drawn as tried, and the pick as right."""
        self._tried[: len(drawn)] += 1
        if pick in drawn:
            self._right[drawn.index(pick)] += 1

    def lesson(self, places: Places) -> DrawLesson:
        """What there is to learn from a settled tree."""
        return DrawLesson(self, places, self._drawn)
