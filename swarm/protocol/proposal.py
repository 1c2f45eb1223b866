"""What a draft drew after one node, as it travels with a sweep. A plain value and its checks.

`swarm.inference.multistep_sampling` says what it is for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOP = 32
MOST_DRAWS = 16


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """What a draft drew after one node of a sweep.

    offset: the node's place in its sweep. tokens: [n], n <= TOP, what could be drawn. weights: [n] float32 values above
    0, of which draft probabilities are the shares. draws: places in `tokens`, in order; repeats count.
    """

    offset: int
    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    draws: tuple[int, ...]

    def complaint(self, vocab_size: int) -> str | None:
        """What is wrong with it, if anything."""
        count = len(self.tokens)
        if not 1 <= count <= TOP or len(self.weights) != count or len(set(self.tokens)) != count:
            return f"{count} tokens and {len(self.weights)} weights: as many, 1 to {TOP}, no token twice"
        if not all(0 <= token < vocab_size for token in self.tokens):
            return f"token ids must be below {vocab_size}"
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            return "weights must be finite and above 0"
        if len(self.draws) > MOST_DRAWS or not all(0 <= draw < count for draw in self.draws):
            return f"draws are at most {MOST_DRAWS} places in the {count} tokens"
        return None
