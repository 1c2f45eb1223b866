"""A drafter that says what its model ran for each tree."""

from __future__ import annotations

from collections.abc import Sequence

from client.drafting.drafter import TreeDrafter
from client.drafting.search.source import Search
from client.drafting.search.tree import NO_LIMIT, DraftTree, StopRule
from client.drafting.sources.model import ModelSource
from swarm.protocol.messages import Sampling


class CountedDrafter(TreeDrafter):
    """A drafter one of whose sources is a model.

    Attributes:
        passes: Passes of the model for the last tree.
        rows: Rows that it ran for the last tree.
    """

    def __init__(self, drafter: TreeDrafter) -> None:
        super().__init__(drafter.sources)
        self._model = next(source for source in drafter.sources if isinstance(source, ModelSource))
        self.passes = self.rows = 0

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        self.passes = self.rows = 0
        return super().grow(sequence, nodes, depth, sampling, stop_rule)

    def _begin(self, search: Search) -> Search:
        first = self._model.session.state.next_id
        begun = super()._begin(search)
        self._ran(begun.rounds, first)
        return begun

    def _round(self, search: Search, nodes: Sequence[int]) -> bool:
        first = self._model.session.state.next_id
        has_passed = super()._round(search, nodes)
        self._ran(int(has_passed), first)
        return has_passed

    def _ran(self, passes: int, first: int) -> None:
        """The model ran, from that node of its session on."""
        self.passes += passes
        self.rows += max(self._model.session.state.next_id - first, 0)
