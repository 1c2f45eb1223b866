"""A drafter that says what its model ran for each tree."""

from __future__ import annotations

from collections.abc import Sequence

from client.draft import TreeDrafter
from client.source_model import ModelSource
from swarm.budget import EVERYTHING, Worth
from swarm.messages import Sampling
from swarm.tree import DraftTree


class CountedDrafter(TreeDrafter):
    """A drafter of which one source is a model. passes, rows: of that, for the last tree."""

    def __init__(self, drafter: TreeDrafter) -> None:
        super().__init__(drafter.sources)
        self._model = next(source for source in drafter.sources if isinstance(source, ModelSource))
        self.passes = self.rows = 0

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: Worth = EVERYTHING
    ) -> DraftTree:
        """As ever."""
        search, rounds = self._search, self._search.rounds if self._search is not None else 0
        first = self._model.session.state.next_id
        tree = super().grow(sequence, nodes, depth, sampling, worth)
        has_gone_on = search is not None and self._search is search
        self.passes = tree.rounds - rounds * has_gone_on
        self.rows = max(self._model.session.state.next_id - first, 0)
        return tree
