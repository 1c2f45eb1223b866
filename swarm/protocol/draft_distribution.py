"""What a draft drew after one node, as it travels with a sweep: a plain value and its checks. Draws nothing itself.

`swarm.inference.multistep_sampling` makes it and uses it. Source: SpecInfer (arXiv 2305.09781), algorithm 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_CANDIDATES = 32
"""Tokens of a draft's distribution that travel, the most probable ones."""
MAX_DRAWS = 16
"""Children drawn after one node, repeats counted."""


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """A draft's distribution after one node of a sweep, and what was drawn from it.

    Attributes:
        offset: the node's place in its sweep.
        tokens: [n], n <= MAX_CANDIDATES, each once: what could be drawn.
        weights: [n] finite float32 values above 0; draft probabilities are `weights / sum(weights)`.
        draws: at most MAX_DRAWS places in `tokens`, in the order of drawing; repeats count.
    """

    offset: int
    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    draws: tuple[int, ...]

    def problem(self, vocab_size: int) -> str | None:
        """What is wrong with it, if anything."""
        count = len(self.tokens)
        if not 1 <= count <= MAX_CANDIDATES or len(self.weights) != count or len(set(self.tokens)) != count:
            return f"{count} tokens and {len(self.weights)} weights: as many, 1 to {MAX_CANDIDATES}, no token twice"
        if not all(0 <= token < vocab_size for token in self.tokens):
            return f"token ids must be below {vocab_size}"
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            return "weights must be finite and above 0"
        if len(self.draws) > MAX_DRAWS or not all(0 <= draw < count for draw in self.draws):
            return f"draws are at most {MAX_DRAWS} places in the {count} tokens"
        return None
