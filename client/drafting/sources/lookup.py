"""The look-up as a source: it fills the tree at once, then says what followed before wherever others went."""

from __future__ import annotations

from collections.abc import Sequence

from client.drafting.search.source import Places, Search, Source
from client.drafting.search.tree import Lesson
from client.drafting.sources.lesson import ProposalLesson
from client.drafting.sources.suffix_lookup import Lookup, LookupState


class LookupSource(Source):
    """What followed before in the text itself."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._filling: LookupState | None = None

    def begin(self, search: Search) -> bool:
        """Everything that it knows, for nothing."""
        self._filling = self._lookup.fill(search.tree, search.sequence, search.sampling)
        return False

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Below nodes that others proposed, or think likelier than it did."""
        assert self._filling is not None, "a search begins first"
        for node in nodes:
            self._filling.below(node)
        return False

    def lesson(self, places: Places) -> Lesson | None:
        """Whether it was right."""
        return None if self._filling is None else ProposalLesson(self._lookup, places, self._filling.seen.get)
