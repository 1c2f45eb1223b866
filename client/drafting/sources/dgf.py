"""A gated-fusion head as a source: every frontier node has a hidden row that the head predicted.

Source: Dovetail (arXiv 2412.18934); the network itself is in `client.drafting.heads.modules`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from client.drafting.heads.modules import Head
from client.drafting.search.ranking import Ranker
from client.drafting.search.source import Search
from client.drafting.search.tree import TokenTree
from client.drafting.sources.head_state import HeadSource


class DgfSource(HeadSource):
    """Expands the frontier in batches, as a model does, but from a state per node instead of KV."""

    weighs = True

    def __init__(self, head: Head, ranker: Ranker) -> None:
        super().__init__(head, ranker)
        self._rows = torch.empty(0)  # [1, hidden_size], the target's
        self._states: dict[int | None, torch.Tensor] = {}  # by node, [width]

    def begin(self, search: Search) -> bool:
        """Add candidates below the text's last token, where the target's hidden row before it is known."""
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
        """Run one pass for all nodes whose parents have states; a parent in the same batch costs another pass."""
        tree, states = search.tree, self._states
        waiting = [node for node in nodes if tree.parents[node] in states or tree.parents[node] in nodes]
        has_run = False
        while ready := [node for node in waiting if tree.parents[node] in states]:
            before = torch.stack([states[tree.parents[node]] for node in ready])
            tokens = torch.tensor([tree.tokens[node] for node in ready], device=before.device)
            after = self.head.step(before, tokens)
            states |= dict(zip(ready, after, strict=True))
            self.ranker.add(search, ready, self.head.score(self._rows.expand(len(ready), -1), after))
            waiting = [node for node in waiting if node not in states]
            has_run = True
        return has_run

    def remember(self, search: Search) -> Sequence[int]:
        """No node: states are not kept between searches."""
        return ()

    def is_free(self, search: Search, node: int) -> bool:
        """No node is: expanding always takes a pass."""
        return False
