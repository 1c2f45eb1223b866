"""Between a draft's last hidden row and its scores: a matrix that learns, on the fly, where its target picks otherwise.

    score(token | row)  =  output[token] · row  +  output[token] · (rowᵀ · weights)
                           the draft's logit       the logit delta

The weights begin at 0 and follow the gradient of the picks' log-likelihood among the draft's best candidates. Each
row's step is divided by the squared norms involved, so that a rate means the same for any model. Every verified node is
a label, also behind dead branches, where most are: a pick there is evidence for similar rows elsewhere. The weight of
the deltas is learned apart, on the text's own path (`client.drafting.search.calibration`), so a wrong one costs little.

Sources: Liu et al., Online Speculative Decoding (arXiv 2310.07177), for a draft that learns from its target's
corrections; Widrow and Hoff (1960) for the rule, in its normalized form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding

RATE = 3.0
"""Learning rate: each of a lesson's n rows moves by RATE / √n, at most by MAX_RATE."""
MAX_RATE = 1.0
FADE = 0.003
"""Part of the weights that every lesson takes away."""
MIN_SQUARED_NORM = 1e-12


class Adapter:
    """The adapter of one draft, for all texts that it drafts, one after another. Not for several threads at once.

    Attributes:
        lessons: from how many it learned.
    """

    def __init__(self, output: torch.Tensor, rows_of: NDArray[np.int64] | None = None) -> None:
        """Make one.

        Args:
            output: [vocab_size, width], the matrix that turns hidden rows into logits.
            rows_of: [tokens], the row of the matrix of each token, −1 for none; None where they have the same numbers.
        """
        width = output.shape[1]
        self.lessons = 0
        self._output = output
        self._numbers = np.arange(len(output)) if rows_of is None else rows_of
        self._weights = torch.zeros(width, width, device=output.device)

    def forget(self) -> None:
        """Start over with weights of 0."""
        self._weights.zero_()
        self.lessons = 0

    @torch.inference_mode()
    def logit_delta(self, rows: torch.Tensor, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """What to add to logits of `tokens` [n, candidates] after hidden rows [n, width]; 0 for unknown tokens."""
        if self.lessons == 0:
            return np.zeros(tokens.shape)
        deltas = torch.einsum("nw,ncw->nc", rows @ self._weights, self._rows_of(tokens)).cpu().double().numpy()
        is_known = self._is_known(tokens)
        return np.asarray(deltas if is_known.all() else np.where(is_known, deltas, 0.0))

    @torch.inference_mode()
    def learn(
        self,
        rows: torch.Tensor,
        tokens: NDArray[np.int64],
        scores: NDArray[np.float64],
        picks: NDArray[np.int64],
        temperature: float,
    ) -> None:
        """Learn from what the target picked. A row whose pick the draft rules out teaches nothing.

        Args:
            rows: [n, width], the draft's hidden rows.
            tokens: [n, candidates], the draft's best.
            scores: [n, candidates], theirs, as in `client.drafting.search.calibration.Candidates`.
            picks: [n]; one that is no candidate counts as if it had the score of the last, which is an upper bound.
            temperature: of the picks.
        """
        hits = tokens == picks[:, None]
        is_missed = ~hits.any(axis=1)
        last = np.where(np.isfinite(scores), scores, np.inf).min(axis=1)
        tokens, hits = np.column_stack((picks, tokens)), np.column_stack((is_missed, hits))
        scores = np.column_stack((np.where(is_missed, last, -np.inf), scores))
        is_able = (hits & np.isfinite(scores) & self._is_known(tokens)).any(axis=1)
        known = np.flatnonzero(is_able & ~np.isnan(scores).any(axis=1))
        if len(known) == 0:
            return
        rows, output, slope = rows[torch.from_numpy(known)], self._rows_of(tokens[known]), 1 / (temperature or 1.0)
        deltas = torch.einsum("nw,ncw->nc", rows @ self._weights, output)
        own, picked = (torch.from_numpy(part[known]).to(deltas) for part in (scores, hits))
        # [n, width]: the gradient of each pick's log-likelihood with respect to rowᵀ · weights
        pulls = torch.einsum("nc,ncw->nw", picked - torch.softmax(own + slope * deltas, dim=1), output)
        rate = min(RATE / len(known) ** 0.5, MAX_RATE) / slope
        steps = rows.T @ pulls * (rate / (_square(rows) * _square(output)).clamp_min(MIN_SQUARED_NORM))
        if not torch.isfinite(steps).all():
            return
        self._weights.mul_(1 - FADE).add_(steps)
        self.lessons += 1

    def _is_known(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the matrix has a row for each: −1 is no token, and the target may know more tokens than the draft."""
        return self._rows_at(tokens) >= 0

    def _rows_of(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """[n, candidates, width]; the row of some other token where one has none."""
        able = torch.from_numpy(self._rows_at(tokens).clip(0)).to(self._output.device)
        return embedding(able, self._output).float()

    def _rows_at(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each token's row; −1 where it has none."""
        numbers = self._numbers
        found = numbers[tokens.clip(0, len(numbers) - 1)]
        return np.asarray(np.where((tokens >= 0) & (tokens < len(numbers)), found, -1))


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """A draft's hidden rows [n, width], as its output matrix got them, and the adapter that learns from them."""

    adapter: Adapter
    rows: torch.Tensor

    def at(self, places: Sequence[int]) -> Hidden:
        """Some of them."""
        return Hidden(self.adapter, self.rows[list(places)])

    @staticmethod
    def together(parts: Sequence[Hidden | None]) -> Hidden | None:
        """All of one draft's rows; None where some are not known."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return Hidden(known[0].adapter, torch.cat([part.rows for part in known]))


def _square(rows: torch.Tensor) -> torch.Tensor:
    """Mean squared norm."""
    return rows.square().sum(dim=-1).mean()
