"""A gated-fusion head as a source: every frontier node has a hidden row that the head predicted (Dovetail)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from client.drafting.heads.modules import Head
from client.drafting.search.ranking import Ranker
from client.drafting.search.source import Search
from client.drafting.search.tree import TokenTree
from client.drafting.sources.head_state import HeadSource


class DgfSource(HeadSource):
    """Expands the frontier in batches, as a model does, but from states instead of KV."""

    weighs = True

    def __init__(self, head: Head, ranker: Ranker) -> None:
        super().__init__(head, ranker)
        self._rows = torch.empty(0)
        self._states: dict[int | None, torch.Tensor] = {}

    def begin(self, search: Search) -> bool:
        """Candidates below the text's last token, where the target's row before it is known."""
        self.ranker.begin()
        self._states = {}
        start = self._start(search.sequence)
        if start is None:
            return False
        self._rows, state = start
        self._states[TokenTree.ROOT] = state[0]
        self.ranker.add(search, [TokenTree.ROOT], self.head.score(self._rows, state))
        return True

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """One pass for all whose parents have states; a parent in the same batch has none yet and costs another."""
        tree, states = search.tree, self._states
        waiting = [node for node in nodes if tree.parents[node] in states or tree.parents[node] in nodes]
        is_asked = False
        while ready := [node for node in waiting if tree.parents[node] in states]:
            before = torch.stack([states[tree.parents[node]] for node in ready])
            tokens = torch.tensor([tree.tokens[node] for node in ready], device=before.device)
            after = self.head.step(before, tokens)
            states |= dict(zip(ready, after, strict=True))
            self.ranker.add(search, ready, self.head.score(self._rows.expand(len(ready), -1), after))
            waiting = [node for node in waiting if node not in states]
            is_asked = True
        return is_asked

    def remember(self, search: Search) -> Sequence[int]:
        """Nothing."""
        return ()

    def is_free(self, search: Search, node: int) -> bool:
        """Never."""
        return False
