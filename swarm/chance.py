"""Where a tree node gets its chance: how likely the target is to pick it after its parent. Pure.

A drafter hands over the best ranking scores of each parent and gets one chance per candidate. The prior below is a
fixed rule. A model that learns from verified nodes (every pick is a label) is one more `ChanceModel`: it takes the
prior's place in the drafter's constructor and gets its labels from whoever reads the replies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ChanceModel(Protocol):
    """Turns ranking scores into chances."""

    def chances(
        self, scores: NDArray[np.float64], log_mass: NDArray[np.float64] | None, depths: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """The chance of each candidate given that its parent is reached.

        Args:
            scores: [parents, candidates], each row falling; −inf marks a token that cannot be picked.
            log_mass: [parents], log Σ exp(score) over the whole vocabulary; None for coupled scores, where the noise
                already decides and only the best candidates compete.
            depths: [parents], levels below the root; the root's own depth is 0.

        Returns:
            [parents, candidates], each row within [0, 1] and not above 1 in sum.
        """
        ...


class SoftmaxPrior:
    """Softmax of the ranking scores × `decay` per level: a draft is a little less right than it believes.

    Source: the offline prototype behind the demo pair's acceptance table.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay

    def chances(
        self, scores: NDArray[np.float64], log_mass: NDArray[np.float64] | None, depths: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """The same at every depth."""
        if log_mass is None:
            weights = np.exp(scores - scores[:, :1])
            return np.asarray(self.decay * weights / weights.sum(axis=1, keepdims=True))
        return np.asarray(self.decay * np.exp(scores - log_mass[:, None]))
