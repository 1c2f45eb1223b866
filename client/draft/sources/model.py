"""A small model as a source: expands the frontier in batches, with KV of its own that it keeps across sweeps.

    [0, n)   committed: the sequence of the last tree, its pending token included
    live     every node of that tree that was expanded: when the target picks it, its KV is there already
    ranked   the candidates below these: a search that goes on below one of them begins with it, without a pass

The rules are those that hops keep (`swarm.protocol.session`, `swarm.compute.kv_cache`). All of these are the model's
own tokens. Where they are not the target's, the sequence is how the model reads the text
(`client.draft.vocabulary`). Below it a node of the session is a node of the tree, as ever.

`LocalSession` is one session of a whole model in this process: the same sweeps as a hop's, without a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch

from client.draft.search.calibration import AcceptanceModel, SoftmaxPrior
from client.draft.search.ranking import Adapter, Hidden, Ranker, Row, gather
from client.draft.search.source import DraftPass, Passes, Places, Search, Source, alone
from client.draft.search.tree import Lesson, TokenTree
from client.draft.vocabulary.matching import SharedVocabulary, common_prefix
from swarm.base.ids import TreeNodeId
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import HeadOutput, RaggedModel, SessionRows
from swarm.protocol.messages import Sampling, Sweep
from swarm.protocol.session import Limits, Parent, SessionState


class LocalSession:
    """A model's KV by the rules that hops keep.

    Attributes:
        model: the whole model.
        state: which tokens are committed, which nodes live.
        kv: their keys and values.
        rows: how many nodes it has run.
    """

    def __init__(self, model: RaggedModel, limits: Limits) -> None:
        self.model = model
        self.state = SessionState(limits)
        self.kv_cache = KvCache(model.layout, limits.window_tokens + limits.nodes)
        self.rows = 0

    def run(self, sweep: Sweep) -> torch.Tensor:
        """Apply a sweep. Returns the hidden rows [nodes, width] of its nodes."""
        work = self._work(sweep)
        return torch.empty(0) if work is None else self.model.forward([work])

    def score(self, sweep: Sweep, last: int) -> HeadOutput:
        """Apply a sweep. Returns logits [last, vocab_size] of its last nodes, and the hidden rows behind them."""
        return self.scoring(sweep, last).run()

    def scoring(self, sweep: Sweep, last: int) -> DraftPass:
        """Apply a sweep; the pass that gives what `score` does is still to be run."""
        work = self._work(sweep)
        assert work is not None
        return DraftPass(self.model, work, last)

    def _work(self, sweep: Sweep) -> SessionRows | None:
        applied = self.state.apply(sweep)
        if applied.truncated_to is not None:
            self.kv_cache.truncate(applied.truncated_to)
        if applied.path:
            self.kv_cache.commit(applied.path, applied.survivors)
        if not applied.appended:
            return None
        self.rows += len(sweep.tokens)
        ids = torch.tensor(sweep.tokens)
        return SessionRows(self.kv_cache, applied.appended, sweep.parents, applied.positions, ids, None)

    def next(
        self, tokens: Sequence[int], parents: Sequence[Parent], commit_to: Parent = None, truncate_to: int | None = None
    ) -> Sweep:
        """Make the next sweep; every earlier one counts as answered.

        Args:
            tokens: of new nodes.
            parents: of new nodes.
            commit_to: the live node that the sequence now goes to; None commits nothing.
            truncate_to: committed tokens to keep; None keeps all.
        """
        state = self.state
        kept = len(state.committed) if truncate_to is None else truncate_to
        return Sweep(
            sequence=state.sequence + 1,
            committed=kept + (len(state.path_to(commit_to)) if commit_to is not None else 0),
            first_id=state.next_id,
            tokens=tuple(tokens),
            parents=tuple(parents),
            picks_from=state.next_id,
            acked=state.sequence,
            truncate_to=truncate_to,
            commit_to=commit_to,
        )


PREFILL_ROWS = 512
"""Certain tokens in one forward of the draft, at most."""
MAX_LIVE_NODES = 2_560
"""Nodes expanded for one tree, at most."""

FIRST_WINDOW_TOKENS = 2_048
"""Sequence length for which KV is reserved at first."""
MAX_REREAD_TOKENS = 64
"""Tokens at a text's end that a draft of another tokenizer may read again, when the text that follows joins them."""


class ModelSource(Source):
    """Proposes a draft model's candidates, ranked by what the target's own score would be (docs/design/drafting.md).

    Attributes:
        ranker: from the model's logits to candidates.
        adapter: learns where the target picks otherwise than the model; None where it is off.
        session: the model's KV.
    """

    weighs = True

    def __init__(
        self,
        model: RaggedModel,
        tokens: int | SharedVocabulary,
        window_tokens: int,
        ranker: Ranker | None = None,
        *,
        adapt: bool = False,
    ) -> None:
        """Make a source. It proposes nothing for longer sequences.

        Args:
            model: the draft model.
            tokens: which ones it shares with the target. A number is that of ids which mean the same to both; then it
                proposes nothing for sequences with other ids.
            window_tokens: tokens of the longest sequence. KV is reserved as sequences grow, by doubling.
            ranker: the coupled one with the fixed prior by default.
            adapt: whether to learn where the target picks otherwise than the model, if its output matrix is known.
        """
        self._model = model
        self._window_tokens = window_tokens
        first_window = min(window_tokens, FIRST_WINDOW_TOKENS)
        vocab_tokens = tokens if isinstance(tokens, int) else tokens.vocab_tokens
        translation = None if isinstance(tokens, int) else tokens.translation
        self._map = None if translation is None else translation.token_map
        self._context = None if translation is None else translation.make_context()
        self._rereads = MAX_REREAD_TOKENS if translation is not None and not translation.is_aligned else 0
        own_tokens = vocab_tokens if self._map is None else self._map.draft_rows
        self._limits = Limits(own_tokens, first_window, sweeps=1, nodes=MAX_LIVE_NODES)
        self._sequence: tuple[int, ...] = ()  # the search's, in the model's own tokens
        self._ahead = 0  # by how much it is longer than the search's
        self.ranker = ranker or Ranker(vocab_tokens, SoftmaxPrior())
        self._placed: dict[int | None, Parent] = {}  # from nodes of the search's tree to nodes of the session
        self._conditional_probs: dict[TreeNodeId, float] = {}  # of session nodes, as the last search had them
        self._tree: TokenTree | None = None
        self._ranked: dict[TreeNodeId, Row] = {}  # the candidates below session nodes
        self._sampling: Sampling | None = None
        output_rows = None if self._map is None else self._map.draft_of
        self.adapter = Adapter(model.output, output_rows) if adapt and model.output is not None else None
        self.session = LocalSession(model, self._limits)

    @property
    def acceptance_model(self) -> AcceptanceModel:
        """What its lessons teach."""
        return self.ranker.acceptance_model

    def begin(self, search: Search) -> bool:
        """Catch up with the sequence; add candidates below its last token."""
        return alone(self.beginning(search))

    def beginning(self, search: Search) -> Passes[bool]:
        """The same, pass by pass."""
        self.ranker.begin()
        before, self._tree = self._tree, search.tree
        if before is not None:
            placed = ((there, node) for node, there in self._placed.items() if node and there is not None)
            self._conditional_probs |= {there: before.conditional_prob(node) for there, node in placed}
        self._placed = {}
        if not self._read(search.sequence):
            return False
        self._fit(len(self._sequence) + search.levels)
        ahead = len(self._sequence) - len(search.sequence)
        # What was ranked with the noise of other positions is of no use.
        if search.sampling != self._sampling or (ahead != self._ahead and search.sampling.temperature > 0):
            self._ranked = {}
        self._sampling, self._ahead = search.sampling, ahead
        scores, state = (yield from self._catch_up(search)), self.session.state
        tip = state.committed[-1].id
        self._keep({tip, *state.live})
        self._placed = {TokenTree.ROOT: None}
        if scores is None:
            self._add_remembered(search, {TokenTree.ROOT: tip})
        else:
            self._add(search, [TokenTree.ROOT], [tip], scores)
        return scores is not None

    def remember(self, search: Search) -> Sequence[int]:
        """Put in what the last search expanded and is live still, with the probabilities of that search."""
        tree, placed, live = search.tree, self._placed, self.session.state.live
        if not placed:
            return ()
        found: dict[Parent, int] = {None: TokenTree.ROOT}
        for there, node in live.items():
            parent, prob = found.get(node.parent), self._conditional_probs.get(there)
            if parent is None or prob is None or there not in self._ranked or tree.depths[parent] >= tree.levels:
                continue
            token = node.token if self._map is None else self._map.target_id(node.token)
            if token is not None and prob and tree.acceptance_probs[parent] * prob >= tree.prune_below:
                found[there] = child = tree.remember(parent, token, prob)
                placed[child] = there
        return [node for node in placed if node]

    def is_free(self, search: Search, node: int) -> bool:
        """Whether it was expanded for an earlier tree."""
        return self._known(search, node) is not None

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Run one pass for all nodes that there is room for, but for those that were expanded for an earlier tree."""
        return alone(self.expanding(search, nodes))

    def expanding(self, search: Search, nodes: Sequence[int]) -> Passes[bool]:
        """The same, pass by pass."""
        tree, placed, state = search.tree, self._placed, self.session.state
        chosen: list[int] = []
        tokens: list[int] = []
        remembered: dict[int, TreeNodeId] = {}
        for node in nodes:
            if (there := self._known(search, node)) is not None:
                placed[node] = remembered[node] = there
                continue
            own = self._own_id(tree.tokens[node])
            is_able = tree.parents[node] in placed and search.position(node) + self._ahead <= self._window_tokens
            if own is not None and is_able and len(state.live) + len(chosen) < self._limits.nodes:
                placed[node] = TreeNodeId(state.next_id + len(chosen))
                chosen.append(node)
                tokens.append(own)
        if remembered:
            self._add_remembered(search, remembered)
        if not chosen:
            return False
        parents = [placed[tree.parents[node]] for node in chosen]
        sweep = self.session.next(tokens, parents)
        ids = [TreeNodeId(sweep.first_id + row) for row in range(len(chosen))]
        self._add(search, chosen, ids, (yield self.session.scoring(sweep, last=len(chosen))))
        return True

    def lesson(self, places: Places) -> Lesson | None:
        """Every candidate below a node whose pick is known is a label."""
        return self.ranker.lesson(places)

    def forget(self) -> None:
        """Start with an empty session: the last sweep may have failed half-way, so that state and KV differ."""
        self._begin_session()
        if self.adapter is not None:
            self.adapter.forget()

    def _read(self, sequence: tuple[int, ...]) -> bool:
        """Read a sequence of the target's in the model's own tokens. Returns whether the model can go on from there."""
        if self._context is not None:
            self._sequence = self._context.follow(sequence)
        else:
            self._sequence = sequence
            if max(sequence) >= self._limits.vocab_size:
                return False
        return len(self._sequence) <= self._window_tokens

    def _own_id(self, token: int) -> int | None:
        """The model's own id of one of the target's tokens; None where it has none."""
        if self._map is not None:
            return self._map.draft_id(token)
        return token if token < self._limits.vocab_size else None

    def _fit(self, tokens: int) -> None:
        """Make room for longer sequences; the KV so far is computed again, which doubling keeps rare."""
        window, tokens = self._limits.window_tokens, min(tokens, self._window_tokens)
        if tokens > window:
            while window < tokens:
                window *= 2
            self._limits = replace(self._limits, window_tokens=min(window, self._window_tokens))
            self._begin_session()

    def _begin_session(self) -> None:
        self.session, self._ranked, self._conditional_probs = LocalSession(self._model, self._limits), {}, {}

    def _known(self, search: Search, node: int) -> TreeNodeId | None:
        """The live session node of a node of the search's tree, if an earlier tree had it and it was expanded."""
        tree, parent = search.tree, search.tree.parents[node]
        if parent not in self._placed:
            return None
        own = self._own_id(tree.tokens[node])
        there = None if own is None else self.session.state.child(self._placed[parent], own)
        return there if there in self._ranked else None

    def _add(self, search: Search, nodes: Sequence[int], ids: Sequence[TreeNodeId], scores: HeadOutput) -> None:
        """Add candidates below nodes, and keep them by the session's ids."""
        hidden = None if self.adapter is None or scores.rows is None else Hidden(self.adapter, scores.rows)
        logits = scores.logits if self._map is None else self._map.target_logits(scores.logits)
        ranked = self.ranker.add(search, nodes, logits, hidden)
        if ranked is not None:
            self._ranked |= {node: (ranked, row) for row, node in enumerate(ids)}

    def _add_remembered(self, search: Search, known: Mapping[int, TreeNodeId]) -> None:
        """Add candidates below nodes that were kept by the session's ids."""
        search.remembered += len(known)
        self.ranker.add_remembered(search, {node: self._ranked[there] for node, there in known.items()})

    def _keep(self, able: Set[TreeNodeId]) -> None:
        """Keep candidates of these nodes alone, copied together: a row would keep all others of its batch in memory."""
        if kept := {node: row for node, row in self._ranked.items() if node in able}:
            nodes, ranked = gather(kept)
            ranked = ranked.with_fresh_logit_delta()
            kept = {node: (ranked, row) for row, node in enumerate(nodes)}
        self._ranked = kept
        self._conditional_probs = {node: prob for node, prob in self._conditional_probs.items() if node in kept}

    def _catch_up(self, search: Search) -> Passes[HeadOutput | None]:
        """Make the search's sequence committed, running only tokens that lack KV.

        Returns:
            Logits after the last one; None where its candidates, and the nodes below it, were kept.
        """
        session, state, sequence = self.session, self.session.state, self._sequence
        known = common_prefix(tuple([token.told for token in state.committed]), sequence)
        search.has_read |= known == 0 or known < len(state.committed) - self._rereads
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
            scores = yield session.scoring(sweep, last=1)
            session.run(session.next((), (), commit_to=TreeNodeId(state.next_id - 1)))
        return scores
