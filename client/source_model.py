"""A small model as a source: expands the frontier in batches, with KV of its own that it keeps across sweeps.

    [0, n)   committed: the sequence of the last tree, its pending token included
    live     every node of that tree that was expanded: when the target picks it, its KV is there already

The rules are those that hops keep (`swarm.session`, `swarm.arena`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from client.local import LocalSession
from client.ranking import Ranker
from client.source import Places, Search, Source
from swarm.chance import ChanceModel, SoftmaxPrior
from swarm.ids import TreeNodeId
from swarm.ragged import RaggedModel
from swarm.session import Limits, Parent
from swarm.tree import Lesson, TokenTree

PREFILL_ROWS = 512
"""Most certain tokens in one draft forward."""

FIRST_WINDOW_TOKENS = 2_048
"""Sequence length for which KV is reserved at first."""


class ModelSource(Source):
    """Candidates of a draft model, ranked by what the target's own score would be (DESIGN §5, coupling)."""

    def __init__(
        self,
        model: RaggedModel,
        vocab_tokens: int,
        window_tokens: int,
        live_nodes: int = 2560,
        ranker: Ranker | None = None,
    ) -> None:
        """A source for sequences of up to `window_tokens`; about longer ones it says nothing.

        KV for that many tokens is only reserved as sequences grow, by doubling.

        vocab_tokens: ids that draft and target share; those above are padding.
        live_nodes: most nodes expanded for one tree.
        ranker: the coupled one with the fixed prior by default.
        """
        self._model = model
        self._window_tokens = window_tokens
        first_window = min(window_tokens, FIRST_WINDOW_TOKENS)
        self._limits = Limits(vocab_tokens, first_window, sweeps=1, nodes=max(live_nodes, PREFILL_ROWS))
        self._ranker = ranker or Ranker(vocab_tokens, SoftmaxPrior())
        self._placed: dict[int | None, Parent] = {}
        self.session = LocalSession(model, self._limits)

    @property
    def chances(self) -> ChanceModel:
        """What its lessons teach."""
        return self._ranker.chances

    def begin(self, search: Search) -> bool:
        """Catch up with the sequence; candidates below its last token."""
        self._ranker.begin()
        self._placed = {}
        if len(search.sequence) > self._window_tokens:
            return False
        self._fit(len(search.sequence) + search.levels)
        logits = self._catch_up(search.sequence)
        self._placed = {TokenTree.ROOT: None}
        self._ranker.add(search, [TokenTree.ROOT], logits)
        return True

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """One pass for all of them that there is room for."""
        tree, placed, state = search.tree, self._placed, self.session.state
        chosen: list[int] = []
        for node in nodes:
            is_able = tree.parents[node] in placed and search.position(node) <= self._window_tokens
            if is_able and len(state.live) + len(chosen) < self._limits.nodes:
                placed[node] = TreeNodeId(state.next_id + len(chosen))
                chosen.append(node)
        if not chosen:
            return False
        tokens, parents = [tree.tokens[node] for node in chosen], [placed[tree.parents[node]] for node in chosen]
        self._ranker.add(search, chosen, self.session.score(self.session.next(tokens, parents), last=len(chosen)))
        return True

    def lesson(self, places: Places) -> Lesson | None:
        """Every candidate below a node whose pick is known is a label."""
        return self._ranker.lesson(places)

    def forget(self) -> None:
        """Rules and KV may have parted half-way through a sweep."""
        self.session = LocalSession(self._model, self._limits)

    def _fit(self, tokens: int) -> None:
        """Make room for longer sequences; the KV so far is made again, which doubling keeps rare."""
        window, tokens = self._limits.window_tokens, min(tokens, self._window_tokens)
        if tokens > window:
            while window < tokens:
                window *= 2
            self._limits = replace(self._limits, window_tokens=min(window, self._window_tokens))
            self.session = LocalSession(self._model, self._limits)

    def _catch_up(self, sequence: Sequence[int]) -> torch.Tensor:
        """Make the sequence committed, running only tokens that lack KV; the logits [1, vocab_size] of the last one."""
        session, state = self.session, self.session.state
        known = _common_prefix([token.token for token in state.committed], sequence[:-1])
        confirmed: Parent = None
        if known == len(state.committed):
            while known < len(sequence) - 1 and (child := state.child(confirmed, sequence[known])) is not None:
                confirmed, known = child, known + 1
        if confirmed is not None:
            session.run(session.next((), (), commit_to=confirmed))
        # Whatever is live now is off the sequence or is the pending token, which runs again for its candidates.
        session.run(session.next((), (), truncate_to=known))
        logits = torch.empty(0)
        for start in range(known, len(sequence), PREFILL_ROWS):
            part = sequence[start : start + PREFILL_ROWS]
            first = state.next_id
            sweep = session.next(part, [None, *(TreeNodeId(first + row) for row in range(len(part) - 1))])
            logits = session.score(sweep, last=1)
            session.run(session.next((), (), commit_to=TreeNodeId(state.next_id - 1)))
        return logits


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
