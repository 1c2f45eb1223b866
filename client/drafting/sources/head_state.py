"""What sources of trained heads share: the target's newest hidden row, and the state at the end of the text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from client.drafting.heads.modules import Head
from client.drafting.search.ranking import Ranker
from client.drafting.search.source import Places, Source
from client.drafting.search.tree import Lesson

MAX_TOKENS_BEHIND = 8
"""Tokens that the text may be ahead of the newest hidden row; heads are not trained to guess further."""


class HeadSource(Source):
    """Holds a head, on whatever device it is, and the hidden row that it goes on from.

    Attributes:
        head: the network.
        ranker: from its logits to candidates.
    """

    wants_rows = True

    def __init__(self, head: Head, ranker: Ranker) -> None:
        self.head = head
        self.ranker = ranker
        self._sequence: tuple[int, ...] = ()
        self._row = torch.empty(0)

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Keep the last row; rows of another width are not those of the head's target and are ignored."""
        if rows.shape[1] == self.head.config.hidden_size:
            self._sequence, self._row = tuple(sequence), rows[-1:].to(self._device, torch.float32)

    def lesson(self, places: Places) -> Lesson | None:
        """Every candidate below a node whose pick is known is a label."""
        return self.ranker.lesson(places)

    def forget(self) -> None:
        """Propose nothing until the next row comes."""
        self._sequence = ()

    @property
    def _device(self) -> torch.device:
        return self.head.out_norm.weight.device

    def _start(self, sequence: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The hidden row [1, hidden_size] and the state [1, width] at the end of a text; None without a recent row."""
        known = len(self._sequence)
        if known == 0 or not 0 < len(sequence) - known <= MAX_TOKENS_BEHIND or sequence[:known] != self._sequence:
            return None
        behind = torch.tensor(sequence[known:], device=self._device)
        state = self.head.begin(self._row, behind[:1])
        for place in range(1, len(behind)):
            state = self.head.step(state, behind[place : place + 1])
        return self._row, state
