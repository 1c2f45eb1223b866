"""A ranker that shows what a source's layers said, and proposes what a test wants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from client.draft.search.calibration import Calibration
from client.draft.search.ranking import Ranker
from client.draft.search.source import Search


class Noting(Ranker):
    """Keeps the logits below each node of a search, which come once, and takes fixed candidates."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(128, Calibration())
        self.tokens, self.seen = tokens, dict[int, torch.Tensor]()

    def begin(self) -> None:
        super().begin()
        self.seen.clear()

    def add(self, search: Search, nodes: Sequence[int], logits: torch.Tensor, hidden: object = None) -> None:
        for node, row in zip(nodes, logits, strict=True):
            assert node not in self.seen
            self.seen[node] = row
            search.tree.weigh_children(node, [(token, 0.5) for token in self.tokens])
