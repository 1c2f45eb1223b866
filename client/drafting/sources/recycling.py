"""Token recycling as a source: the table fills the tree at once, then adds to what other sources propose."""

from __future__ import annotations

from collections.abc import Sequence

from client.drafting.search.source import Places, Search, Source
from client.drafting.search.tree import Lesson
from client.drafting.sources.lesson import ProposalLesson
from client.drafting.sources.recycling_table import Proposed, Recycling


class RecycleSource(Source):
    """Candidates after every node that stands in the tree, whoever put it there; labels from every node too."""

    def __init__(self, table: Recycling) -> None:
        self._table = table
        self._seen: dict[int | None, Proposed] = {}
        self._search: Search | None = None

    def begin(self, search: Search) -> bool:
        """Everything that it knows, for nothing."""
        self._seen, self._search = {}, search
        self.widen(search)
        return False

    def widen(self, search: Search) -> None:
        """What a larger tree has room for."""
        self._seen |= self._table.fill(search.tree, search.sequence, search.sampling)

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Below nodes that others proposed."""
        tree, temperature = search.tree, search.sampling.temperature
        for node in nodes:
            if node not in self._seen and tree.depths[node] < tree.levels:
                self._seen[node] = self._table.propose(tree, node, temperature, tree.chances[node])
        return False

    def lesson(self, places: Places) -> Lesson | None:
        """What is picked after any node, whether or not anything was proposed there."""
        if self._search is None:
            return None
        tokens, temperature, seen = self._search.tree.tokens, self._search.sampling.temperature, self._seen
        return ProposalLesson(self._table, places, lambda node: seen.get(node, (tokens[node], (), temperature)))
