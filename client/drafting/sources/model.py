"""A small model as a source: expands the frontier in batches, with KV of its own that it keeps across sweeps.

    [0, n)   committed: the sequence of the last tree, its pending token included
    live     every node of that tree that was expanded: when the target picks it, its KV is there already
    ranked   what was found below these: a search that goes on below one of them begins with it, without a pass

The rules are those that hops keep (`swarm.protocol.session`, `swarm.inference.kv_cache`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from client.drafting.search.adapter import Adapter, Hidden
from client.drafting.search.calibration import ChanceModel, SoftmaxPrior
from client.drafting.search.local_session import LocalSession
from client.drafting.search.ranking import Ranker, Row, gather
from client.drafting.search.source import Places, Search, Source
from client.drafting.search.tree import Lesson, TokenTree
from swarm.ids import TreeNodeId
from swarm.inference.ragged_batch import HeadOutput, RaggedModel
from swarm.protocol.messages import Sampling
from swarm.protocol.session import Limits, Parent

PREFILL_ROWS = 512
"""Most certain tokens in one draft forward."""
LIVE_NODES = 2_560
"""Most nodes expanded for one tree."""

FIRST_WINDOW_TOKENS = 2_048
"""Sequence length for which KV is reserved at first."""


class ModelSource(Source):
    """Candidates of a draft model, ranked by what the target's own score would be (docs/design/drafting.md)."""

    weighs = True

    def __init__(
        self,
        model: RaggedModel,
        vocab_tokens: int,
        window_tokens: int,
        ranker: Ranker | None = None,
        *,
        adapt: bool = False,
    ) -> None:
        """A source for sequences of up to `window_tokens`; about longer ones, and ids not shared, it says nothing.

        KV for that many tokens is only reserved as sequences grow, by doubling.

        vocab_tokens: ids that draft and target share; those above are padding.
        ranker: the coupled one with the fixed prior by default.
        adapt: learn where the target picks otherwise than the model, if its output matrix can be seen.
        """
        self._model = model
        self._window_tokens = window_tokens
        first_window = min(window_tokens, FIRST_WINDOW_TOKENS)
        self._limits = Limits(vocab_tokens, first_window, sweeps=1, nodes=LIVE_NODES)
        self.ranker = ranker or Ranker(vocab_tokens, SoftmaxPrior())
        self._placed: dict[int | None, Parent] = {}
        self._own: dict[TreeNodeId, float] = {}
        self._tree: TokenTree | None = None
        self._ranked: dict[TreeNodeId, Row] = {}
        self._sampling: Sampling | None = None
        self.adapter = Adapter(model.output) if adapt and model.output is not None else None
        self.session = LocalSession(model, self._limits)

    @property
    def chances(self) -> ChanceModel:
        """What its lessons teach."""
        return self.ranker.chances

    def begin(self, search: Search) -> bool:
        """Catch up with the sequence; candidates below its last token."""
        self.ranker.begin()
        before, self._tree = self._tree, search.tree
        if before is not None:
            placed = ((there, node) for node, there in self._placed.items() if node and there is not None)
            self._own |= {there: before.own(node) for there, node in placed}
        self._placed = {}
        if len(search.sequence) > self._window_tokens or max(search.sequence) >= self._limits.vocab_size:
            return False
        self._fit(len(search.sequence) + search.levels)
        if search.sampling != self._sampling:
            self._ranked, self._sampling = {}, search.sampling
        scores, state = self._catch_up(search), self.session.state
        tip = state.committed[-1].id
        self._keep({tip, *state.live})
        self._placed = {TokenTree.ROOT: None}
        if scores is None:
            self._recall(search, {TokenTree.ROOT: tip})
        else:
            self._add(search, [TokenTree.ROOT], [tip], scores)
        return scores is not None

    def remember(self, search: Search) -> Sequence[int]:
        """What the last search expanded and is live still, with the chances that it had then."""
        tree, placed, live = search.tree, self._placed, self.session.state.live
        if not placed:
            return ()
        found: dict[Parent, int] = {None: TokenTree.ROOT}
        for there, node in live.items():
            parent, own = found.get(node.parent), self._own.get(there)
            if parent is None or own is None or there not in self._ranked or tree.depths[parent] >= tree.levels:
                continue
            if own and tree.chances[parent] * own >= tree.unwanted:
                found[there] = child = tree.remember(parent, node.token, own)
                placed[child] = there
        return [node for node in placed if node]

    def is_free(self, search: Search, node: int) -> bool:
        """Whether it was expanded for an earlier tree."""
        return self._known(search, node) is not None

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """One pass for all of them that there is room for; none for those that an earlier tree had."""
        tree, placed, state = search.tree, self._placed, self.session.state
        chosen: list[int] = []
        recalled: dict[int, TreeNodeId] = {}
        for node in nodes:
            if (there := self._known(search, node)) is not None:
                placed[node] = recalled[node] = there
                continue
            is_able = tree.parents[node] in placed and search.position(node) <= self._window_tokens
            is_able &= tree.tokens[node] < self._limits.vocab_size
            if is_able and len(state.live) + len(chosen) < self._limits.nodes:
                placed[node] = TreeNodeId(state.next_id + len(chosen))
                chosen.append(node)
        if recalled:
            self._recall(search, recalled)
        if not chosen:
            return False
        tokens, parents = [tree.tokens[node] for node in chosen], [placed[tree.parents[node]] for node in chosen]
        sweep = self.session.next(tokens, parents)
        ids = [TreeNodeId(sweep.first_id + row) for row in range(len(chosen))]
        self._add(search, chosen, ids, self.session.score(sweep, last=len(chosen)))
        return True

    def lesson(self, places: Places) -> Lesson | None:
        """Every candidate below a node whose pick is known is a label."""
        return self.ranker.lesson(places)

    def forget(self) -> None:
        """Rules and KV may have parted half-way through a sweep; and no text was before the next one."""
        self._begin_session()
        if self.adapter is not None:
            self.adapter.forget()

    def _fit(self, tokens: int) -> None:
        """Make room for longer sequences; the KV so far is made again, which doubling keeps rare."""
        window, tokens = self._limits.window_tokens, min(tokens, self._window_tokens)
        if tokens > window:
            while window < tokens:
                window *= 2
            self._limits = replace(self._limits, window_tokens=min(window, self._window_tokens))
            self._begin_session()

    def _begin_session(self) -> None:
        self.session, self._ranked, self._own = LocalSession(self._model, self._limits), {}, {}

    def _known(self, search: Search, node: int) -> TreeNodeId | None:
        """The live node that a node of the search's tree was for an earlier one."""
        tree, parent = search.tree, search.tree.parents[node]
        if parent not in self._placed:
            return None
        there = self.session.state.child(self._placed[parent], tree.tokens[node])
        return there if there in self._ranked else None

    def _add(self, search: Search, nodes: Sequence[int], ids: Sequence[TreeNodeId], scores: HeadOutput) -> None:
        """Add candidates below nodes, and remember them by the session's ids."""
        hidden = None if self.adapter is None or scores.rows is None else Hidden(self.adapter, scores.rows)
        ranked = self.ranker.add(search, nodes, scores.logits, hidden)
        if ranked is not None:
            self._ranked |= {node: (ranked, row) for row, node in enumerate(ids)}

    def _recall(self, search: Search, known: Mapping[int, TreeNodeId]) -> None:
        """Add candidates below nodes that are remembered by the session's ids."""
        search.recalled += len(known)
        self.ranker.recall(search, {node: self._ranked[there] for node, there in known.items()})

    def _keep(self, able: Set[TreeNodeId]) -> None:
        """Remember nothing else, and that in one piece: else what a few nodes are ranked with would stay with them."""
        if kept := {node: row for node, row in self._ranked.items() if node in able}:
            nodes, ranked = gather(kept)
            ranked = ranked.afresh()
            kept = {node: (ranked, row) for row, node in enumerate(nodes)}
        self._ranked, self._own = kept, {node: own for node, own in self._own.items() if node in kept}

    def _catch_up(self, search: Search) -> HeadOutput | None:
        """Make the search's sequence committed, running only tokens that lack KV.

        Returns:
            What the model says after the last one; None where its candidates are remembered, and the nodes below it.
        """
        session, state, sequence = self.session, self.session.state, search.sequence
        known = _common_prefix([token.token for token in state.committed], sequence)
        search.has_read |= known == 0 or known < len(state.committed)
        confirmed: Parent = None
        if known == len(state.committed):
            while known < len(sequence) and (child := state.child(confirmed, sequence[known])) is not None:
                confirmed, known = child, known + 1
        if confirmed is not None:
            session.run(session.next((), (), commit_to=confirmed))
        if len(state.committed) == known == len(sequence) and state.committed[-1].id in self._ranked:
            return None
        # Whatever is live now is off the sequence, and the last token runs again for its candidates.
        known = min(known, len(sequence) - 1)
        session.run(session.next((), (), truncate_to=known))
        scores: HeadOutput | None = None
        for start in range(known, len(sequence), PREFILL_ROWS):
            part = sequence[start : start + PREFILL_ROWS]
            first = state.next_id
            sweep = session.next(part, [None, *(TreeNodeId(first + row) for row in range(len(part) - 1))])
            scores = session.score(sweep, last=1)
            session.run(session.next((), (), commit_to=TreeNodeId(state.next_id - 1)))
        return scores


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
