"""Between a draft's last hidden row and its scores: a matrix that learns, on the fly, where its target picks otherwise.

    score(token | row)  =  output[token] · row  +  output[token] · (rowᵀ · weights)
                           the draft's own         the shift

The weights begin at 0 and follow the gradient of the picks' log-likelihood among the draft's best candidates, each
row's step divided by the squared norms involved, so that they mean the same for any model. Every verified node is a
label, also behind dead branches, where most are: what the target picks there says what it picks after rows like these.
What the shifts are worth is learned apart, on the text's own path (`client.drafting.search.calibration`), so a wrong
one costs little.

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
"""Of a lesson: n rows move by RATE / √n each, at most by MOST_RATE."""
MOST_RATE = 1.0
FADE = 0.003
"""Part that every lesson lets go."""
LEAST_SQUARE = 1e-12


class Adapter:
    """One draft's, for all texts that it drafts, one after another. Not for several threads at once.

    lessons: from how many it learned.
    """

    def __init__(self, output: torch.Tensor) -> None:
        """output: the matrix [vocab_size, width] that turns the draft's hidden rows into logits, wherever it is."""
        width = output.shape[1]
        self.lessons = 0
        self._output = output
        self._weights = torch.zeros(width, width, device=output.device)

    def forget(self) -> None:
        """Be as new."""
        self._weights.zero_()
        self.lessons = 0

    @torch.inference_mode()
    def shift(self, rows: torch.Tensor, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """What to add to the logits [n, candidates] of `tokens` after hidden rows [n, width]; 0 where there is none."""
        if self.lessons == 0:
            return np.zeros(tokens.shape)
        shifts = torch.einsum("nw,ncw->nc", rows @ self._weights, self._rows_of(tokens)).double().cpu().numpy()
        is_known = self._is_known(tokens)
        return np.asarray(shifts if is_known.all() else np.where(is_known, shifts, 0.0))

    @torch.inference_mode()
    def learn(
        self,
        rows: torch.Tensor,
        tokens: NDArray[np.int64],
        scores: NDArray[np.float64],
        picks: NDArray[np.int64],
        temperature: float,
    ) -> None:
        """Take what the target picked after hidden rows [n, width].

        tokens, scores: [n, candidates], the draft's own, as in `client.drafting.search.calibration.Candidates`. picks:
        [n]; one that is no candidate counts as if it had the score of the last, which is a bound. What cannot be a pick
        teaches nothing.
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
        shifts = torch.einsum("nw,ncw->nc", rows @ self._weights, output)
        given, picked = (torch.from_numpy(part[known]).to(shifts) for part in (scores, hits))
        pulls = torch.einsum("nc,ncw->nw", picked - torch.softmax(given + slope * shifts, dim=1), output)
        rate = min(RATE / len(known) ** 0.5, MOST_RATE) / slope
        steps = rows.T @ pulls * (rate / (_square(rows) * _square(output)).clamp_min(LEAST_SQUARE))
        if not torch.isfinite(steps).all():
            return
        self._weights.mul_(1 - FADE).add_(steps)
        self.lessons += 1

    def _is_known(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the matrix has a row for them: −1 is none, and a target may pick what the draft does not know."""
        return np.asarray((tokens >= 0) & (tokens < len(self._output)))

    def _rows_of(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """[n, candidates, width]; of some other token where there is none."""
        able = torch.from_numpy(tokens.clip(0, len(self._output) - 1)).to(self._output.device)
        return embedding(able, self._output).float()


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """A draft's hidden rows [n, width], as its output matrix got them, and who learns from them."""

    adapter: Adapter
    rows: torch.Tensor

    def at(self, places: Sequence[int]) -> Hidden:
        """Some of them."""
        return Hidden(self.adapter, self.rows[list(places)])

    @staticmethod
    def together(parts: Sequence[Hidden | None]) -> Hidden | None:
        """All of one draft's; None where some are not known."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return Hidden(known[0].adapter, torch.cat([part.rows for part in known]))


def _square(rows: torch.Tensor) -> torch.Tensor:
    """Mean squared norm."""
    return rows.square().sum(dim=-1).mean()
