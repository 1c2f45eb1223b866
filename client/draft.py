"""Drafters: grow a token tree under the pending token with a small model (DESIGN §6). Never decides what is accepted.

`ModelDrafter` keeps its own KV across sweeps by the rules that hops keep (`swarm.session`, `swarm.arena`):

    [0, n)   committed: the sequence of the last tree, its pending token included
    live     every node of that tree that was expanded: when the target picks it, its KV is there already
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from swarm.arena import Arena
from swarm.budget import EVERYTHING, Worth
from swarm.chance import Candidates, ChanceModel, Evidence, SoftmaxPrior
from swarm.errors import IncompatibleDraft
from swarm.ids import TreeNodeId
from swarm.lookup import Lookup, Seen
from swarm.messages import Sampling, Sweep
from swarm.noise import gumbel_row
from swarm.ragged import RaggedModel, Work
from swarm.sampling import ranking_scores
from swarm.session import Limits, Parent, SessionState
from swarm.tree import DraftTree, TokenTree

EXPANSIONS = 16
"""Frontier nodes in one draft forward."""

CHILDREN = 8
"""Most candidates below one node."""

MAX_LEVELS = 48
"""Most levels of a tree below its root."""

PREFILL_ROWS = 512
"""Most certain tokens in one draft forward."""

FIRST_WINDOW_TOKENS = 2_048
"""Sequence length for which KV is reserved at first."""


class Drafter(Protocol):
    """Anything that guesses what comes next; a bad guess costs time, never text."""

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: Worth = EVERYTHING
    ) -> DraftTree:
        """The best tree of at most `nodes` nodes in `depth` levels below the last token of `sequence`.

        sequence: every certain token, prompt and emitted ones, the pending one last. worth: where to stop before.
        """
        ...

    def learn(self, tree: DraftTree, picks: Mapping[int | None, int]) -> None:
        """Learn what the target picked after the nodes of a tree that `grow` made; None is its root.

        Changes which trees grow later, never a text. Runs where `grow` does, not beside it.
        """
        ...


class NoDrafter:
    """Plain decoding: no tree at all."""

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: Worth = EVERYTHING
    ) -> DraftTree:
        """An empty tree."""
        return DraftTree()

    def learn(self, tree: DraftTree, picks: Mapping[int | None, int]) -> None:
        """There is nothing to learn."""


class LookupDrafter:
    """Trees of what followed before in the text itself: a draft without a model."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: Worth = EVERYTHING
    ) -> DraftTree:
        """The best tree of at most `nodes` nodes in `depth` levels below the last token of `sequence`."""
        levels = min(depth, MAX_LEVELS)
        if nodes == 0 or levels <= 0:
            return DraftTree()
        tree = TokenTree(sequence[-1], nodes, levels, worth.least)
        seen = self._lookup.fill(tree, sequence, sampling)
        chosen = tree.best_nodes(nodes)
        return replace(tree.cut(chosen), seen=_seen_in(seen, chosen))

    def learn(self, tree: DraftTree, picks: Mapping[int | None, int]) -> None:
        """How often the look-up was right."""
        self._lookup.learn(tree.seen, picks)


class LocalSession:
    """One session of a whole model in this process: the same sweeps as a hop's, without a network."""

    def __init__(self, model: RaggedModel, limits: Limits) -> None:
        self.model = model
        self.state = SessionState(limits)
        self.arena = Arena(model.layout, limits.window_tokens + limits.nodes)
        self.rows = 0

    def run(self, sweep: Sweep) -> torch.Tensor:
        """Apply a sweep; the hidden rows [nodes, width] of its nodes."""
        work = self._work(sweep)
        return torch.empty(0) if work is None else self.model.forward([work])

    def score(self, sweep: Sweep, last: int) -> torch.Tensor:
        """Apply a sweep; the logits [last, vocab_size] of its last nodes."""
        work = self._work(sweep)
        return torch.empty(0) if work is None else self.model.scores(work, last)

    def _work(self, sweep: Sweep) -> Work | None:
        applied = self.state.apply(sweep)
        if applied.truncated_to is not None:
            self.arena.truncate(applied.truncated_to)
        if applied.path:
            self.arena.commit(applied.path, applied.survivors)
        if not applied.appended:
            return None
        self.rows += len(sweep.tokens)
        ids = torch.tensor(sweep.tokens, device=self.model.device)
        return Work(self.arena, applied.appended, sweep.parents, applied.positions, ids, None)

    def next(
        self, tokens: Sequence[int], parents: Sequence[Parent], commit_to: Parent = None, truncate_to: int | None = None
    ) -> Sweep:
        """The next sweep, made of these parts; every earlier one counts as answered."""
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


class ModelDrafter:
    """Best-first trees from a draft model, ranked by what the target's own score would be (DESIGN §5, coupling)."""

    def __init__(
        self,
        model: RaggedModel,
        vocab_tokens: int,
        window_tokens: int,
        live_nodes: int = 2560,
        chances: ChanceModel | None = None,
    ) -> None:
        """A drafter for sequences of up to `window_tokens`; for longer ones its trees are empty.

        KV for that many tokens is only reserved as sequences grow, by doubling.

        vocab_tokens: ids that draft and target share; those above are padding.
        live_nodes: most nodes expanded for one tree; then the tree is made of what is there.
        chances: what `learn` teaches; the fixed prior by default.
        """
        self._model = model
        self._vocab_tokens = vocab_tokens
        self._window_tokens = window_tokens
        first_window = min(window_tokens, FIRST_WINDOW_TOKENS)
        self._limits = Limits(vocab_tokens, first_window, sweeps=1, nodes=max(live_nodes, PREFILL_ROWS))
        self._chances = chances or SoftmaxPrior()
        self.lookup: Lookup | None = None
        """A second source, whose candidates merge with the model's."""
        self._noise = lru_cache(maxsize=32)(gumbel_row)
        self.session = LocalSession(model, self._limits)
        self._search: _Search | None = None

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: Worth = EVERYTHING
    ) -> DraftTree:
        """The best tree of at most `nodes` nodes in `depth` levels below the last token of `sequence`."""
        levels = min(depth, MAX_LEVELS, self._window_tokens - len(sequence) + 1)
        if nodes == 0 or levels <= 0:
            return DraftTree()
        key = tuple(sequence), levels, sampling
        search, self._search = self._search, None
        try:
            with torch.inference_mode():
                if search is None or search.key != key:
                    self._fit(len(sequence) + levels)
                    search = self._begin(key, nodes, worth)
                else:
                    search.tree.widen(nodes, worth.least)
                    if self.lookup is not None:
                        search.seen |= self.lookup.fill(search.tree, sequence, sampling)
                is_settled = self._go_on(search, worth)
        except BaseException:
            # Rules and KV may have parted half-way through a sweep; the next tree starts afresh.
            self.session = LocalSession(self._model, self._limits)
            raise
        self._search = search
        return replace(search.settle(), is_settled=is_settled)

    def learn(self, tree: DraftTree, picks: Mapping[int | None, int]) -> None:
        """Every candidate below a node whose pick is known is a label, also those that did not get into the tree."""
        if self.lookup is not None:
            self.lookup.learn(tree.seen, picks)
        if tree.evidence is None:
            return
        known = [row for row, node in enumerate(tree.evidence.nodes) if node in picks]
        if known:
            evidence = tree.evidence.rows(known)
            picked = np.array([picks[node] for node in evidence.nodes])
            self._chances.learn(evidence.candidates, evidence.tokens == picked[:, None])

    def _fit(self, tokens: int) -> None:
        """Make room for longer sequences; the KV so far is made again, which doubling keeps rare."""
        window = self._limits.window_tokens
        if tokens > window:
            while window < tokens:
                window *= 2
            self._limits = replace(self._limits, window_tokens=min(window, self._window_tokens))
            self.session = LocalSession(self._model, self._limits)

    def _begin(self, key: SearchKey, nodes: int, worth: Worth) -> _Search:
        """Everything that is proposed below the sequence's last token itself."""
        sequence, levels, sampling = key
        tree = TokenTree(sequence[-1], nodes, levels, worth.least)
        search = _Search(key, tree, {} if self.lookup is None else self.lookup.fill(tree, sequence, sampling))
        logits = self._catch_up(sequence)
        search.considered.append(self._add_candidates(tree, tree.frontier(1), logits, (len(sequence), sampling)))
        return search

    def _go_on(self, search: _Search, worth: Worth) -> bool:
        """Expand the best nodes until the tree is settled, which it returns, or no further round is worth it now."""
        tree, placed, state = search.tree, search.placed, self.session.state
        sequence, _, sampling = search.key
        for past in itertools.count():
            chosen = tree.frontier(min(EXPANSIONS, self._limits.nodes - len(state.live)))
            if not chosen:
                return True
            promise = sum(tree.chances[node] for node in chosen)
            if past == worth.rounds or not worth.per_round <= promise < worth.alone:
                tree.put_back(chosen)
                return False
            placed.update((node, TreeNodeId(state.next_id + row)) for row, node in enumerate(chosen))
            expand = [tree.tokens[node] for node in chosen], [placed[tree.parents[node]] for node in chosen]
            logits = self.session.score(self.session.next(*expand), last=len(chosen))
            search.considered.append(self._add_candidates(tree, chosen, logits, (len(sequence), sampling)))
        raise AssertionError("a search ends")

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

    def _add_candidates(
        self, tree: TokenTree, nodes: list[int], logits: torch.Tensor, at: tuple[int, Sampling]
    ) -> Evidence:
        first_position, sampling = at
        logits = logits[:, : self._vocab_tokens]
        scores = ranking_scores(logits, [first_position + tree.depths[node] for node in nodes], sampling, self._noise)
        best = scores.topk(min(CHILDREN, scores.shape[1]))
        mass = scores.logsumexp(dim=1).cpu().numpy() if sampling.temperature == 0 else None
        candidates = Candidates(best.values.cpu().numpy(), mass, sampling.temperature)
        chances = self._chances.chances(candidates).tolist()
        for node, tokens, row in zip(nodes, best.indices.tolist(), chances, strict=True):
            tree.add_children(node, [(token, chance) for token, chance in zip(tokens, row, strict=True) if chance > 0])
        return Evidence(tuple(nodes), best.indices.cpu().numpy(), candidates)


SearchKey = tuple[tuple[int, ...], int, Sampling]
"""What a search is for: the sequence, the levels of its tree, and the sampling."""


@dataclass(slots=True)
class _Search:
    """One best-first search, which may go on when a larger tree of the same sequence is wanted.

    placed: the session's nodes of those that were expanded. considered: candidates, a part for each pass of the model.
    """

    key: SearchKey
    tree: TokenTree
    seen: Seen
    placed: dict[int | None, Parent] = field(default_factory=lambda: {TokenTree.ROOT: None})
    considered: list[Evidence] = field(default_factory=list)

    def settle(self) -> DraftTree:
        """The best tree, with the candidates below those of its nodes that were expanded."""
        tree = self.tree
        chosen = tree.best_nodes(tree.nodes)
        index: dict[int | None, int | None] = {node: place for place, node in enumerate(chosen)}
        index[TokenTree.ROOT] = None
        parts = [part.rows([row for row, node in enumerate(part.nodes) if node in index]) for part in self.considered]
        masses = [part.candidates.log_mass for part in parts if part.candidates.log_mass is not None]
        candidates = Candidates(
            np.concatenate([part.candidates.scores for part in parts]),
            np.concatenate(masses) if masses else None,
            parts[0].candidates.temperature,
        )
        nodes = tuple(index[node] for part in parts for node in part.nodes)
        evidence = Evidence(nodes, np.concatenate([part.tokens for part in parts]), candidates)
        seen, rounds = _seen_in(self.seen, chosen), len(self.considered)
        return replace(tree.cut(chosen), rounds=rounds, evidence=evidence, seen=seen)


def _seen_in(seen: Seen, chosen: Sequence[int]) -> Seen:
    """What was proposed below the chosen nodes, by their places in the tree, and below its root."""
    places: dict[int | None, int | None] = {node: place for place, node in enumerate(chosen)}
    places[TokenTree.ROOT] = None
    return {places[node]: proposed for node, proposed in seen.items() if node in places}


class Tokens(Protocol):
    """A tokenizer, as far as compatibility goes."""

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id, added ones included."""
        ...


def check_compatible(target: Tokens, draft: Tokens, target_vocab: int, draft_vocab: int) -> None:
    """Check that draft and target map token ids to the same tokens.

    target_vocab, draft_vocab: rows of the models' embeddings; ids above the tokenizer's are padding.

    Raises:
        IncompatibleDraft: names the first id that differs.
    """
    ours = {token_id: token for token, token_id in target.get_vocab().items()}
    theirs = {token_id: token for token, token_id in draft.get_vocab().items()}
    differing = [token_id for token_id in ours.keys() | theirs.keys() if ours.get(token_id) != theirs.get(token_id)]
    if differing:
        first = min(differing)
        mine, other = (repr(tokens[first]) if first in tokens else "unknown" for tokens in (ours, theirs))
        raise IncompatibleDraft(
            f"this draft cannot serve this target: token id {first} is {mine} to the target and {other} to the draft; "
            "choose a draft with the same tokenizer, or none"
        )
    if max(ours) >= min(target_vocab, draft_vocab):
        raise IncompatibleDraft(
            f"token id {max(ours)} has no embedding: the target has {target_vocab}, the draft {draft_vocab}; "
            "choose another draft, or none"
        )


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
