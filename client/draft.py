"""Drafters: grow a token tree under the pending token with a small model (DESIGN §6). Never decides what is accepted.

`ModelDrafter` keeps its own KV across sweeps by the rules that hops keep (`swarm.session`, `swarm.arena`):

    [0, n)   committed: the sequence of the last tree, its pending token included
    live     every node of that tree that was expanded: when the target picks it, its KV is there already
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from swarm.arena import Arena
from swarm.chance import Candidates, ChanceModel, Evidence, SoftmaxPrior
from swarm.errors import IncompatibleDraft
from swarm.ids import TreeNodeId
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

MAX_LEVELS = 16
"""Most levels of a tree below its root."""

PREFILL_ROWS = 512
"""Most certain tokens in one draft forward."""

FIRST_WINDOW_TOKENS = 2_048
"""Sequence length for which KV is reserved at first."""


class Drafter(Protocol):
    """Anything that guesses what comes next; a bad guess costs time, never text."""

    def grow(self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling) -> DraftTree:
        """The best tree of at most `nodes` nodes in `depth` levels below the last token of `sequence`.

        sequence: every certain token, prompt and emitted ones, the pending one last.
        """
        ...

    def learn(self, tree: DraftTree, picks: Mapping[int | None, int]) -> None:
        """Learn what the target picked after the nodes of a tree that `grow` made; None is its root.

        Changes which trees grow later, never a text. Runs where `grow` does, not beside it.
        """
        ...


class NoDrafter:
    """Plain decoding: no tree at all."""

    def grow(self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling) -> DraftTree:
        """An empty tree."""
        return DraftTree()

    def learn(self, tree: DraftTree, picks: Mapping[int | None, int]) -> None:
        """There is nothing to learn."""


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
        self._noise = lru_cache(maxsize=32)(gumbel_row)
        self.session = LocalSession(model, self._limits)

    def grow(self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling) -> DraftTree:
        """The best tree of at most `nodes` nodes in `depth` levels below the last token of `sequence`."""
        levels = min(depth, MAX_LEVELS, self._window_tokens - len(sequence) + 1)
        if nodes == 0 or levels <= 0:
            return DraftTree()
        self._fit(len(sequence) + levels)
        try:
            with torch.inference_mode():
                return self._search(sequence, TokenTree(sequence[-1], nodes, levels), sampling)
        except BaseException:
            # Rules and KV may have parted half-way through a sweep; the next tree starts afresh.
            self.session = LocalSession(self._model, self._limits)
            raise

    def learn(self, tree: DraftTree, picks: Mapping[int | None, int]) -> None:
        """Every candidate below a node whose pick is known is a label, also those that did not get into the tree."""
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

    def _search(self, sequence: Sequence[int], tree: TokenTree, sampling: Sampling) -> DraftTree:
        logits = self._catch_up(sequence)
        state = self.session.state
        placed: dict[int | None, Parent] = {TokenTree.ROOT: None}
        chosen = tree.frontier(1)
        considered: list[Evidence] = []
        while True:
            considered.append(self._add_candidates(tree, chosen, logits, (len(sequence), sampling)))
            chosen = tree.frontier(min(EXPANSIONS, self._limits.nodes - len(state.live)))
            if not chosen:
                return _settle(tree, considered)
            placed.update((node, TreeNodeId(state.next_id + row)) for row, node in enumerate(chosen))
            expand = [tree.tokens[node] for node in chosen], [placed[tree.parents[node]] for node in chosen]
            logits = self.session.score(self.session.next(*expand), last=len(chosen))

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


def _settle(tree: TokenTree, considered: list[Evidence]) -> DraftTree:
    """The best tree, with the candidates below those of its nodes that were expanded."""
    chosen = tree.best_nodes(tree.nodes)
    index: dict[int | None, int | None] = {node: place for place, node in enumerate(chosen)}
    index[TokenTree.ROOT] = None
    parts = [part.rows([row for row, node in enumerate(part.nodes) if node in index]) for part in considered]
    masses = [part.candidates.log_mass for part in parts if part.candidates.log_mass is not None]
    candidates = Candidates(
        np.concatenate([part.candidates.scores for part in parts]),
        np.concatenate(masses) if masses else None,
        parts[0].candidates.temperature,
    )
    nodes = tuple(index[node] for part in parts for node in part.nodes)
    evidence = Evidence(nodes, np.concatenate([part.tokens for part in parts]), candidates)
    return replace(tree.cut(chosen), evidence=evidence)


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
