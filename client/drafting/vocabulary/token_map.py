"""From a draft's ids to the target's and back, for the tokens that both share. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

NOT_SHARED = -1
"""Stands for an id that the other side does not have."""


class TokenMap:
    """Pairs of ids, one of the target and one of the draft, that mean the same token.

    Attributes:
        width: 1 + the highest id of the target that is shared.
        draft_rows: rows of the draft's embedding.
        draft_of: int64 [width], the draft's id of each of the target's, or `NOT_SHARED`.
        target_of: int64 [draft_rows], the reverse.
        shared: how many pairs there are.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], draft_rows: int) -> None:
        """Make a map.

        Args:
            pairs: at least one: an id of the target, and the draft's id of the same token. No id stands twice.
            draft_rows: rows of the draft's embedding; the draft's ids are below it.
        """
        target_ids, draft_ids = np.array(pairs, np.int64).T
        self.width = int(target_ids.max()) + 1
        self.draft_rows = draft_rows
        self.draft_of: NDArray[np.int64] = np.full(self.width, NOT_SHARED, np.int64)
        self.target_of: NDArray[np.int64] = np.full(draft_rows, NOT_SHARED, np.int64)
        self.draft_of[target_ids], self.target_of[draft_ids] = draft_ids, target_ids
        self.shared = len(pairs)
        self._is_aligned = bool((target_ids == draft_ids).all())
        missing = self.draft_of == NOT_SHARED
        self._has_gaps = bool(missing.any())
        self._index = torch.from_numpy(np.where(missing, 0, self.draft_of))
        self._missing = torch.from_numpy(missing)

    def draft_id(self, token: int) -> int | None:
        """The draft's id of one of the target's tokens; None where it has none."""
        if not 0 <= token < self.width:
            return None
        found = int(self.draft_of[token])
        return None if found == NOT_SHARED else found

    def target_id(self, token: int) -> int | None:
        """The target's id of one of the draft's tokens; None where it has none."""
        found = int(self.target_of[token])
        return None if found == NOT_SHARED else found

    def target_logits(self, draft_logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits of the target's tokens: what the draft thinks, given that the next token is a shared one.

        A softmax over them is the draft's distribution without the other tokens, renormalised.

        Args:
            draft_logits: [rows, draft_rows]

        Returns:
            [rows, width]: −∞ for tokens that are not shared.
        """
        if self._is_aligned:
            logits = draft_logits[:, : self.width]
            return logits.masked_fill(self._there(logits)[1], -torch.inf) if self._has_gaps else logits
        index, missing = self._there(draft_logits)
        return draft_logits.index_select(1, index).masked_fill_(missing, -torch.inf)

    def _there(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index and mask on the device of some logits."""
        if self._index.device != logits.device:
            self._index, self._missing = self._index.to(logits.device), self._missing.to(logits.device)
        return self._index, self._missing
