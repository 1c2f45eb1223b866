"""From a draft's logits to children of tree nodes: ranked, given probabilities, and kept for the lesson.

Other sources' candidates at a node join the draft's own. The ranker sets the probabilities of all of them by an
`AcceptanceModel` (`client.draft.search.calibration`), which learns how far to believe each.

Coupled, candidates rank by the target's own score, `logit / T + g`: the client knows the noise. Ranking by
probability alone is SpecExec's rule (arXiv 2406.02532, algorithm 2); it is kept as the baseline of
`python -m benchmarks drafters`. Design: docs/design/drafting.md.

`Adapter`, between a draft's last hidden row and its scores, is a matrix that learns where the target picks otherwise.

    score(token | row)  =  output[token] · row  +  output[token] · (rowᵀ · weights)
                           the draft's logit       the logit delta

The weights begin at 0 and follow the gradient of the picks' log-likelihood among the draft's best candidates. Each
row's step is divided by the squared norms involved, so that a rate means the same for any model. Every verified node is
a label, also behind dead branches, where most are: a pick there is evidence for similar rows elsewhere. The weight of
the deltas is learned apart, on the text's own path (`client.draft.search.calibration`), so a wrong one costs little.

Sources: Liu et al., Online Speculative Decoding (arXiv 2310.07177), for a draft that learns from its target's
corrections; Widrow and Hoff (1960) for the rule, in its normalized form.

`SampledChildren` are drawn from a draft's own probabilities, for `swarm.compute.multistep_sampling` at the tail. How
many are drawn after a node is fixed before the first draw. A distribution travels whenever its node does, whatever was
drawn from it: a choice by the outcome would bias what the tail picks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding

from client.draft.search.calibration import AcceptanceModel, Candidates
from client.draft.search.source import Places, Search
from client.draft.search.tree import Lesson, Picks
from swarm.compute.devices import with_float64
from swarm.compute.gumbel import gumbel_row
from swarm.compute.multistep_sampling import draw_children
from swarm.compute.picks.device_picks import noise_rows, picks_on, to_device
from swarm.compute.sampling import ranking_scores, target_probs
from swarm.protocol.messages import Sampling
from swarm.protocol.pick_rules import DraftDistribution

RATE = 3.0
"""Learning rate: each of a lesson's n rows moves by RATE / √n, at most by MAX_RATE."""
MAX_RATE = 1.0
FADE = 0.003
"""Part of the weights that every lesson takes away."""
MIN_SQUARED_NORM = 1e-12


class Adapter:
    """The adapter of one draft, for all texts that it drafts, one after another. Not for several threads at once.

    Attributes:
        lessons: from how many it learned.
    """

    def __init__(self, output: torch.Tensor, rows_of: NDArray[np.int64] | None = None) -> None:
        """Make one.

        Args:
            output: [vocab_size, width], the matrix that turns hidden rows into logits.
            rows_of: [tokens], the row of the matrix of each token, −1 for none; None where they have the same numbers.
        """
        width = output.shape[1]
        self.lessons = 0
        self._output = output
        self._numbers = np.arange(len(output)) if rows_of is None else rows_of
        self._weights = torch.zeros(width, width, device=output.device)

    def forget(self) -> None:
        """Start over with weights of 0."""
        self._weights.zero_()
        self.lessons = 0

    @torch.inference_mode()
    def logit_delta(self, rows: torch.Tensor, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """What to add to logits of `tokens` [n, candidates] after hidden rows [n, width]; 0 for unknown tokens."""
        if self.lessons == 0:
            return np.zeros(tokens.shape)
        deltas = torch.einsum("nw,ncw->nc", rows @ self._weights, self._rows_of(tokens)).cpu().double().numpy()
        is_known = self._is_known(tokens)
        return np.asarray(deltas if is_known.all() else np.where(is_known, deltas, 0.0))

    @torch.inference_mode()
    def learn(
        self,
        rows: torch.Tensor,
        tokens: NDArray[np.int64],
        scores: NDArray[np.float64],
        picks: NDArray[np.int64],
        temperature: float,
    ) -> None:
        """Learn from what the target picked. A row whose pick the draft rules out teaches nothing.

        Args:
            rows: [n, width], the draft's hidden rows.
            tokens: [n, candidates], the draft's best.
            scores: [n, candidates], theirs, as in `client.draft.search.calibration.Candidates`.
            picks: [n]; one that is no candidate counts as if it had the score of the last, which is an upper bound.
            temperature: of the picks.
        """
        hits = tokens == picks[:, None]
        is_missed = ~hits.any(axis=1)
        last = np.where(np.isfinite(scores), scores, np.inf).min(axis=1)
        tokens, hits = np.column_stack((picks, tokens)), np.column_stack((is_missed, hits))
        scores = np.column_stack((np.where(is_missed, last, -np.inf), scores))
        is_able = (hits & np.isfinite(scores) & self._is_known(tokens)).any(axis=1)
        known = np.flatnonzero(is_able & ~np.isnan(scores).any(axis=1))
        if len(known) == 0:
            return
        rows, output, slope = rows[torch.from_numpy(known)], self._rows_of(tokens[known]), 1 / (temperature or 1.0)
        deltas = torch.einsum("nw,ncw->nc", rows @ self._weights, output)
        own, picked = (torch.from_numpy(part[known]).to(deltas) for part in (scores, hits))
        # [n, width]: the gradient of each pick's log-likelihood with respect to rowᵀ · weights
        pulls = torch.einsum("nc,ncw->nw", picked - torch.softmax(own + slope * deltas, dim=1), output)
        rate = min(RATE / len(known) ** 0.5, MAX_RATE) / slope
        steps = rows.T @ pulls * (rate / (_square(rows) * _square(output)).clamp_min(MIN_SQUARED_NORM))
        if not torch.isfinite(steps).all():
            return
        self._weights.mul_(1 - FADE).add_(steps)
        self.lessons += 1

    def _is_known(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the matrix has a row for each: −1 is no token, and the target may know more tokens than the draft."""
        return self._rows_at(tokens) >= 0

    def _rows_of(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """[n, candidates, width]; the row of some other token where one has none."""
        able = torch.from_numpy(self._rows_at(tokens).clip(0)).to(self._output.device)
        return embedding(able, self._output).float()

    def _rows_at(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each token's row; −1 where it has none."""
        numbers = self._numbers
        found = numbers[tokens.clip(0, len(numbers) - 1)]
        return np.asarray(np.where((tokens >= 0) & (tokens < len(numbers)), found, -1))


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """A draft's hidden rows [n, width], as its output matrix got them, and the adapter that learns from them."""

    adapter: Adapter
    rows: torch.Tensor

    def at(self, places: Sequence[int]) -> Hidden:
        """Some of them."""
        return Hidden(self.adapter, self.rows[list(places)])

    @staticmethod
    def together(parts: Sequence[Hidden | None]) -> Hidden | None:
        """All of one draft's rows; None where some are not known."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return Hidden(known[0].adapter, torch.cat([part.rows for part in known]))


def _square(rows: torch.Tensor) -> torch.Tensor:
    """Mean squared norm."""
    return rows.square().sum(dim=-1).mean()


DRAWS = 4
"""Draws with replacement after one node."""
PRIOR = (0.6, 0.15, 0.07, 0.04)
"""Probabilities that the target picks the first, second … different token that was drawn, until picks are known."""
PRIOR_WEIGHT = 10.0
"""Labels that the prior counts for."""

Drawn = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawLesson:
    """What to learn from a settled tree: which draw the target picked.

    Attributes:
        children: learns it.
        places: as in `client.draft.search.source`.
        drawn: by node of the search, the different tokens that were drawn, in order.
    """

    children: SampledChildren
    places: Places
    drawn: Mapping[int | None, Drawn]

    def learn(self, picks: Picks, others: Picks) -> None:
        """Which draw the target picked, if any; picks elsewhere than on the text's path do not count."""
        for node, pick in picks.items():
            if (drawn := self.drawn.get(self.places[node])) is not None:
                self.children.learn(drawn, pick)


class SampledChildren:
    """Draws children for one source, and learns how often the first, second … is picked."""

    def __init__(self) -> None:
        self._tried = np.full(DRAWS, PRIOR_WEIGHT)
        self._right = np.array(PRIOR) * PRIOR_WEIGHT
        self._seed: int | None = None
        self._rng = np.random.default_rng(0)
        self._drawn: dict[int | None, Drawn] = {}

    def begin(self) -> None:
        """Begin another search, in which nothing was drawn yet."""
        self._drawn = {}

    def add(self, search: Search, nodes: Sequence[int], draft_logits: torch.Tensor) -> None:
        """Draw children below nodes where no other source drew any, from `draft_logits` [nodes, vocab_size]."""
        tree, sampling = search.tree, search.sampling
        if self._seed != sampling.seed:
            self._seed, self._rng = sampling.seed, np.random.default_rng([DRAWS, sampling.seed])
        probs = np.minimum(self._right / self._tried, 1.0)
        probs *= min(1.0, 1.0 / probs.sum())
        for node, draft_probs in zip(nodes, target_probs(draft_logits, sampling), strict=True):
            if node in tree.guesses:
                continue
            drawn: DraftDistribution = draw_children(0, draft_probs, DRAWS, self._rng)
            tree.guesses[node] = drawn
            self._drawn[node] = tokens = tuple(dict.fromkeys(drawn.tokens[draw] for draw in drawn.draws))
            tree.add_children(node, zip(tokens, probs.tolist(), strict=False))

    def learn(self, drawn: Drawn, pick: int) -> None:
        """Count each token that was drawn as tried, and the pick as right."""
        self._tried[: len(drawn)] += 1
        if pick in drawn:
            self._right[drawn.index(pick)] += 1

    def lesson(self, places: Places) -> DrawLesson:
        """What there is to learn from a settled tree."""
        return DrawLesson(self, places, self._drawn)


MAX_CHILDREN = 8
"""Candidates of one source below one node, at most."""
NO_TOKEN = -1
"""Fills up rows that have fewer candidates than others."""

Scalar = TypeVar("Scalar", bound=np.generic)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Candidates below some nodes.

    Attributes:
        tokens: [nodes, candidates], best first; `NO_TOKEN`, with a score of −∞, is none.
        candidates: their scores.
        hidden: the draft's hidden rows at the nodes; None where no adapter learns from them.
    """

    tokens: NDArray[np.int64]
    candidates: Candidates
    hidden: Hidden | None = None

    def rows(self, rows: Sequence[int]) -> Ranked:
        """The candidates below some of the nodes."""
        return Ranked(self.tokens[rows], self.candidates.rows(rows), self.hidden and self.hidden.at(rows))

    def with_logit_delta(self) -> Ranked:
        """The same with an adapter's logit delta, computed now unless it was before."""
        if self.hidden is None or self.candidates.logit_delta is not None:
            return self
        logit_delta = self.hidden.adapter.logit_delta(self.hidden.rows, self.tokens)
        return replace(self, candidates=replace(self.candidates, logit_delta=logit_delta))

    def with_fresh_logit_delta(self) -> Ranked:
        """The same with an adapter's logit delta, computed again."""
        return replace(self, candidates=replace(self.candidates, logit_delta=None)).with_logit_delta()

    def with_other_probs(self, other_probs: Sequence[Mapping[int, float]]) -> Ranked:
        """The same, with the other sources' candidates below each node: tokens and their probabilities.

        Tokens that the draft did not rank get its last score, which bounds theirs. A bound, not their score: so the
        result is the same whether the draft's logits are at hand or only what was ranked.
        """
        if not any(other_probs):
            return self
        own, count = self.tokens.tolist(), self.tokens.shape[1]
        added = [_added_tokens(probs, tokens) if probs else () for probs, tokens in zip(other_probs, own, strict=True)]
        width = count + max(map(len, added))
        tokens, scores = _wide(self.tokens, width, NO_TOKEN), _wide(self.candidates.scores, width, -np.inf)
        bounds = np.where(np.isfinite(self.candidates.scores), self.candidates.scores, np.inf).min(axis=1).tolist()
        others = np.zeros(scores.shape)  # [nodes, width]
        for place, (probs, line, new) in enumerate(zip(other_probs, own, added, strict=True)):
            if new:
                tokens[place, count : count + len(new)] = new
                scores[place, count : count + len(new)] = bounds[place] if bounds[place] < np.inf else -np.inf
            if probs:
                others[place, : count + len(new)] = [probs.get(token, 0.0) for token in (*line, *new)]
        delta = self.candidates.logit_delta if width == count else None
        candidates = replace(self.candidates, scores=scores, other_probs=others, logit_delta=delta)
        return Ranked(tokens, candidates, self.hidden)


Row = tuple[Ranked, int]
"""The candidates below one node: one row of what was ranked together."""


def gather(rows: Mapping[T, Row]) -> tuple[list[T], Ranked]:
    """Join the candidates below some nodes, at least one; all rows become as wide as the widest.

    Returns:
        The nodes, in the order of the joined rows, and the rows. Nodes that were ranked together stay together.
    """
    parts: dict[int, tuple[Ranked, list[T], list[int]]] = {}
    for node, (ranked, row) in rows.items():
        _, nodes, places = parts.setdefault(id(ranked), (ranked, [], []))
        nodes.append(node)
        places.append(row)
    found = [ranked.rows(places) for ranked, _, places in parts.values()]
    together = found[0] if len(found) == 1 else _together(found)
    return [node for _, nodes, _ in parts.values() for node in nodes], together


@dataclass(frozen=True, slots=True, eq=False)
class RankLesson:
    """What one source proposed below nodes of a settled tree: every candidate there is a label.

    Attributes:
        places: as in `client.draft.search.source`.
        ranked: by node of the search, with the other sources' candidates; it grows while the search goes on.
        acceptance_model: learns.
    """

    places: Places
    ranked: Mapping[int, Row]
    acceptance_model: AcceptanceModel

    def learn(self, picks: Picks, others: Picks) -> None:
        """Learn also from candidates that did not get into the tree.

        The acceptance model learns from the text's own path alone, since its probabilities are given that the parent is
        reached. An adapter learns from all picks: what follows a hidden row does not depend on the text's path.
        """
        if known := self.known(picks):
            nodes, ranked = gather(known)
            self.acceptance_model.learn(ranked.candidates, ranked.tokens == _picked(picks, nodes))
        everywhere = {**picks, **others}
        if known := self.known(everywhere):
            nodes, ranked = gather(known)
            if ranked.hidden is not None:
                seen, picked = ranked.candidates, _picked(everywhere, nodes)[:, 0]
                ranked.hidden.adapter.learn(ranked.hidden.rows, ranked.tokens, seen.scores, picked, seen.temperature)

    def known(self, nodes: Iterable[int | None]) -> dict[int | None, Row]:
        """The candidates below those of the settled tree's nodes where there were any."""
        found = ((node, self.ranked.get(self.places[node])) for node in nodes)
        return {node: row for node, row in found if row is not None}


class Ranker:
    """Ranks one source's candidates.

    Attributes:
        acceptance_model: learns how far to believe that source.
        vocab_tokens: ids that are ranked; those above are padding.
    """

    def __init__(
        self,
        vocab_tokens: int,
        acceptance_model: AcceptanceModel,
        *,
        coupled: bool = True,
        max_children: int = MAX_CHILDREN,
    ) -> None:
        """Make a ranker.

        Args:
            vocab_tokens: ids to rank.
            acceptance_model: from scores to probabilities.
            coupled: whether to rank with the noise of the picks.
            max_children: candidates below one node.
        """
        self.acceptance_model = acceptance_model
        self.vocab_tokens = vocab_tokens
        self._coupled = coupled
        self._max_children = max_children
        self._noise = lru_cache(maxsize=32)(gumbel_row if coupled else _no_noise)
        self._rounded = lru_cache(maxsize=32)(self._round)
        self._ranked: dict[int, Row] = {}
        self._sampled = SampledChildren()

    def begin(self) -> None:
        """Begin another search, in which nothing was proposed yet."""
        self._ranked = {}
        self._sampled.begin()

    def rank(self, logits: torch.Tensor, positions: Sequence[int], sampling: Sampling) -> Ranked:
        """The best candidates of each row of `logits`.

        Args:
            logits: [rows, vocab_size].
            positions: [rows], of the tokens that they are candidates for.
            sampling: how the target picks.
        """
        logits = with_float64(logits[:, : self.vocab_tokens])
        scores = self._scores(logits, positions, sampling)
        best = scores.topk(min(self._max_children, scores.shape[1]))
        # From a card in one copy: float64 holds every id exactly.
        parts = [best.values.double(), best.indices.double()]
        if sampling.temperature == 0 or not self._coupled:
            parts.append(scores.logsumexp(dim=1, keepdim=True).double())
        found, count = torch.cat(parts, dim=1).cpu().numpy(), best.values.shape[1]
        mass = found[:, 2 * count] if len(parts) > 2 else None
        candidates = Candidates(found[:, :count], mass, sampling.temperature)
        return Ranked(found[:, count : 2 * count].astype(np.int64), candidates)

    def _scores(self, logits: torch.Tensor, positions: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """[rows, vocab_size]; float32 unless a filter needs more: a guess may be off by a rounding, a pick may not."""
        if sampling.temperature == 0:
            return logits.float()
        if (sampling.top_k, sampling.top_p, sampling.min_p) != (None, None, None):
            made_there = self._coupled and picks_on(logits.device)
            return ranking_scores(logits, positions, sampling, None if made_there else self._noise)
        places = sorted(set(positions))
        noise = torch.stack([self._rounded(sampling.seed, place, logits.shape[1], logits.device) for place in places])
        rows_of = [places.index(position) for position in positions]
        rows = noise if len(places) == 1 else noise[to_device(rows_of, logits.device)]
        return torch.add(rows, logits.float(), alpha=1 / sampling.temperature)

    def _round(self, seed: int, position: int, vocab_size: int, device: torch.device) -> torch.Tensor:
        if self._coupled and picks_on(device):
            return noise_rows(seed, [position], vocab_size, device, torch.float32)[0]
        return torch.from_numpy(self._noise(seed, position, vocab_size)).float().to(device)

    def add(
        self, search: Search, nodes: Sequence[int], logits: torch.Tensor, hidden: Hidden | None = None
    ) -> Ranked | None:
        """Add the best candidates below some nodes to the tree, or draw some where sampling is multi-step.

        Args:
            search: the tree to add to.
            nodes: of that tree.
            logits: [nodes, vocab_size], after each.
            hidden: the rows that the logits were computed from, for an adapter.

        Returns:
            What was ranked, without other sources' candidates; None where children were drawn, which holds for this
            search alone.
        """
        if search.sampling.multistep and search.sampling.temperature > 0:
            self._sampled.add(search, nodes, with_float64(logits[:, : self.vocab_tokens]))
            return None
        ranked = self.rank(logits, [search.position(node) for node in nodes], search.sampling)
        ranked = replace(ranked, hidden=hidden)
        self.add_ranked(search, nodes, ranked)
        return ranked

    def add_remembered(self, search: Search, known: Mapping[int, Row]) -> None:
        """Add what an earlier search ranked below nodes at the same positions, with probabilities as learned by now."""
        self.add_ranked(search, *gather(known))

    def add_ranked(self, search: Search, nodes: Sequence[int], ranked: Ranked, min_probability: float = 0.0) -> None:
        """Add what was ranked below some nodes to the tree, weighed together with the other sources' candidates there.

        Args:
            search: the tree to add to.
            nodes: of that tree, one per row of `ranked`.
            ranked: the draft's candidates; kept for the lesson.
            min_probability: a token of a lower acceptance probability stays out, unless another source proposed it.
                The tree's `prune_below` counts where it is higher.
        """
        tree = search.tree
        other_probs = [tree.child_probs(node) for node in nodes]
        merged = ranked.with_other_probs(other_probs).with_logit_delta()
        probs = self.acceptance_model.acceptance_probs(merged.candidates)
        least = max(min_probability, tree.prune_below)
        for node, others, tokens, row in zip(nodes, other_probs, merged.tokens.tolist(), probs.tolist(), strict=True):
            bound = least / max(tree.acceptance_probs[node], least) if least else 0.0
            pairs = zip(tokens, row, strict=True)
            able = [pair for pair in pairs if pair[1] > bound or (pair[1] > 0.0 and pair[0] in others)]
            tree.weigh_children(node, able)
        self._ranked |= {node: (merged, row) for row, node in enumerate(nodes)}

    def lesson(self, places: Places) -> Lesson | None:
        """The candidates below those nodes of a settled tree that were expanded."""
        if not self._ranked:
            return self._sampled.lesson(places)
        return RankLesson(places, self._ranked, self.acceptance_model)


def _together(parts: Sequence[Ranked]) -> Ranked:
    """Join rows; all become as wide as the widest."""
    seen = [part.candidates for part in parts]
    masses = [part.log_mass for part in seen if part.log_mass is not None]
    width = max(part.scores.shape[1] for part in seen)
    scores = np.concatenate([_wide(part.scores, width, -np.inf) for part in seen])
    other_probs = _filled([part.other_probs for part in seen], seen, width)
    logit_delta = _filled([part.logit_delta for part in seen], seen, width)
    mass = np.concatenate(masses) if masses else None
    candidates = Candidates(scores, mass, seen[0].temperature, other_probs, logit_delta)
    tokens = np.concatenate([_wide(part.tokens, width, NO_TOKEN) for part in parts])
    return Ranked(tokens, candidates, Hidden.together([part.hidden for part in parts]))


def _picked(picks: Picks, nodes: Sequence[int | None]) -> NDArray[np.int64]:
    """The picks after some nodes [nodes, 1]."""
    return np.array([[picks[node]] for node in nodes])


def _filled(
    known: Sequence[NDArray[np.float64] | None], parts: Sequence[Candidates], width: int
) -> NDArray[np.float64] | None:
    """Join what is known of some parts' candidates, with 0 for the other parts; None where nothing is known."""
    if all(one is None for one in known):
        return None
    rows = (np.zeros(part.scores.shape) if one is None else one for one, part in zip(known, parts, strict=True))
    return np.concatenate([_wide(one, width, 0.0) for one in rows])


def _added_tokens(other_probs: Mapping[int, float], own: Sequence[int]) -> list[int]:
    """The tokens that only other sources propose, the likeliest first."""
    return sorted(other_probs.keys() - set(own), key=lambda token: (-other_probs[token], token))


def _wide(rows: NDArray[Scalar], width: int, empty: float) -> NDArray[Scalar]:
    """The rows with `width` columns, new ones filled with `empty`."""
    if rows.shape[1] == width:
        return rows
    wide = np.full((len(rows), width), empty, dtype=rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide


def _no_noise(_seed: int, _position: int, vocab_size: int) -> NDArray[np.float64]:
    return np.zeros(vocab_size)
