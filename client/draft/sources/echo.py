"""Proposes the last token again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from client.draft.search.source import Search, Source

PROBABILITY: Final = 0.1
"""That a token is followed by itself."""


class EchoSource(Source):
    """Proposes after each node what it holds."""

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Add one child below nodes of the frontier."""
        for node in nodes:
            search.tree.add_children(node, [(search.tree.tokens[node], PROBABILITY)])
        return False
