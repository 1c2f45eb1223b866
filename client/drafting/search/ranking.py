"""From a draft's logits to children of tree nodes: ranked, given a chance, and remembered for the lesson.

What other sources said about a node counts too: their candidates join the draft's own, and the chances of all of them
are the ranker's (`client.drafting.search.calibration`), which learns how far they are to be believed.

Coupled, candidates rank by the target's own score, `logit / T + g`: the client knows the noise. Ranking by
probability alone is SpecExec's rule (arXiv 2406.02532, algorithm 2); it accepts less and is here to be compared with.
Design: docs/design/drafting.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from client.drafting.search.adapter import Hidden
from client.drafting.search.calibration import Candidates, ChanceModel
from client.drafting.search.sampled_children import SampledChildren
from client.drafting.search.source import Places, Search
from client.drafting.search.tree import Lesson, Picks
from swarm.inference.gumbel import gumbel_row
from swarm.inference.sampling import ranking_scores
from swarm.protocol.messages import Sampling

CHILDREN = 8
"""Most candidates of one source below one node."""
NO_TOKEN = -1

Number = TypeVar("Number", bound=np.generic)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Candidates below some nodes: tokens [nodes, candidates], best first; −1 and a score of −∞ is none.

    hidden: the draft's rows there, where an adapter learns from them.
    """

    tokens: NDArray[np.int64]
    candidates: Candidates
    hidden: Hidden | None = None

    def rows(self, rows: Sequence[int]) -> Ranked:
        """What is below some of them."""
        return Ranked(self.tokens[rows], self.candidates.rows(rows), self.hidden and self.hidden.at(rows))

    def shifted(self) -> Ranked:
        """The same with what an adapter knows by now, if it was not asked before."""
        if self.hidden is None or self.candidates.shift is not None:
            return self
        shift = self.hidden.adapter.shift(self.hidden.rows, self.tokens)
        return replace(self, candidates=replace(self.candidates, shift=shift))

    def afresh(self) -> Ranked:
        """The same with what an adapter knows by now, whatever it said before."""
        return replace(self, candidates=replace(self.candidates, shift=None)).shifted()

    def with_said(self, said: Sequence[Mapping[int, float]]) -> Ranked:
        """The same and what others said below each node, tokens with chances; the draft's last score bounds theirs.

        A bound, not their score: so it is the same whether the draft's logits are at hand or only what was ranked.
        """
        if not any(said):
            return self
        own, count = self.tokens.tolist(), self.tokens.shape[1]
        others = [_others(row, tokens) if row else () for row, tokens in zip(said, own, strict=True)]
        width = count + max(map(len, others))
        tokens, scores = _wide(self.tokens, width, NO_TOKEN), _wide(self.candidates.scores, width, -np.inf)
        bounds = np.where(np.isfinite(self.candidates.scores), self.candidates.scores, np.inf).min(axis=1).tolist()
        heard = np.zeros(scores.shape)
        for place, (row, line, new) in enumerate(zip(said, own, others, strict=True)):
            if new:
                tokens[place, count : count + len(new)] = new
                scores[place, count : count + len(new)] = bounds[place] if bounds[place] < np.inf else -np.inf
            if row:
                heard[place, : count + len(new)] = [row.get(token, 0.0) for token in (*line, *new)]
        shift = self.candidates.shift if width == count else None
        return Ranked(tokens, replace(self.candidates, scores=scores, said=heard, shift=shift), self.hidden)


Row = tuple[Ranked, int]
"""What is below one node: one row of what was ranked with others."""


def gather(rows: Mapping[T, Row]) -> tuple[list[T], Ranked]:
    """What is below some nodes, at least one, together; as many candidates as the widest has.

    Returns:
        The nodes in the order of its rows, which is that of what they were ranked with.
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

    ranked: by the search's nodes, with what others said; it grows while the search goes on.
    """

    places: Places
    ranked: Mapping[int, Row]
    chances: ChanceModel

    def learn(self, picks: Picks, others: Picks) -> None:
        """Also from candidates that did not get into the tree; a chance is one of a node that is reached.

        An adapter learns everywhere: of a row it matters what follows, not whether the text comes by.
        """
        if known := self.known(picks):
            nodes, heard = gather(known)
            self.chances.learn(heard.candidates, heard.tokens == _picked(picks, nodes))
        everywhere = {**picks, **others}
        if known := self.known(everywhere):
            nodes, heard = gather(known)
            if heard.hidden is not None:
                seen, picked = heard.candidates, _picked(everywhere, nodes)[:, 0]
                heard.hidden.adapter.learn(heard.hidden.rows, heard.tokens, seen.scores, picked, seen.temperature)

    def known(self, nodes: Iterable[int | None]) -> dict[int | None, Row]:
        """What was proposed below some of the settled tree's nodes."""
        found = ((node, self.ranked.get(self.places[node])) for node in nodes)
        return {node: row for node, row in found if row is not None}


class Ranker:
    """Ranks one source's candidates. chances: learns how far that source is to be believed."""

    def __init__(
        self, vocab_tokens: int, chances: ChanceModel, *, coupled: bool = True, children: int = CHILDREN
    ) -> None:
        """A ranker of ids below `vocab_tokens`; those above are padding. children: most candidates below one node."""
        self.chances = chances
        self.vocab_tokens = vocab_tokens
        self._coupled = coupled
        self._children = children
        self._noise = lru_cache(maxsize=32)(gumbel_row if coupled else _no_noise)
        self._rounded = lru_cache(maxsize=32)(self._round)
        self._considered: dict[int, Row] = {}
        self._draws = SampledChildren()

    def begin(self) -> None:
        """Another search: nothing was proposed in it."""
        self._considered = {}
        self._draws.begin()

    def rank(self, logits: torch.Tensor, positions: Sequence[int], sampling: Sampling) -> Ranked:
        """The best candidates of each row of `logits` [rows, vocab_size]; positions: of those candidates."""
        logits = logits[:, : self.vocab_tokens]
        scores = self._scores(logits, positions, sampling)
        best = scores.topk(min(self._children, scores.shape[1]))
        is_whole = sampling.temperature == 0 or not self._coupled
        mass = scores.logsumexp(dim=1).double().cpu().numpy() if is_whole else None
        candidates = Candidates(best.values.double().cpu().numpy(), mass, sampling.temperature)
        return Ranked(best.indices.cpu().numpy(), candidates)

    def _scores(self, logits: torch.Tensor, positions: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """[rows, vocab_size]; float32 where no filter asks for more: a guess may be off by a rounding, a pick not."""
        if sampling.temperature == 0:
            return logits.float()
        if (sampling.top_k, sampling.top_p, sampling.min_p) != (None, None, None):
            return ranking_scores(logits, positions, sampling, self._noise)
        places = sorted(set(positions))
        noise = torch.stack([self._rounded(sampling.seed, place, logits.shape[1], logits.device) for place in places])
        rows = noise if len(places) == 1 else noise[[places.index(position) for position in positions]]
        return torch.add(rows, logits.float(), alpha=1 / sampling.temperature)

    def _round(self, seed: int, position: int, vocab_size: int, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(self._noise(seed, position, vocab_size)).float().to(device)

    def add(
        self, search: Search, nodes: Sequence[int], logits: torch.Tensor, hidden: Hidden | None = None
    ) -> Ranked | None:
        """Add the best candidates below some nodes to the tree, or such as are drawn where sampling is multi-step.

        hidden: the rows that the logits came of, for an adapter.

        Returns:
            What was ranked, without what others said; None where it was drawn, which holds for this search alone.
        """
        if search.sampling.multistep and search.sampling.temperature > 0:
            self._draws.add(search, nodes, logits[:, : self.vocab_tokens])
            return None
        ranked = self.rank(logits, [search.position(node) for node in nodes], search.sampling)
        ranked = replace(ranked, hidden=hidden)
        self.plant(search, nodes, ranked)
        return ranked

    def recall(self, search: Search, known: Mapping[int, Row]) -> None:
        """Add what was ranked below nodes at the same positions before, by what was learned since."""
        self.plant(search, *gather(known))

    def plant(self, search: Search, nodes: Sequence[int], ranked: Ranked, least: float = 0.0) -> None:
        """Add what was ranked below some nodes, and what others said there, to the tree; remember it for the lesson.

        least: what is less likely to be reached stays out, unless others proposed it, as does what nobody will ask for.
        """
        tree = search.tree
        said = [tree.said(node) for node in nodes]
        heard = ranked.with_said(said).shifted()
        chances = self.chances.chances(heard.candidates)
        least = max(least, tree.unwanted)
        for node, others, tokens, row in zip(nodes, said, heard.tokens.tolist(), chances.tolist(), strict=True):
            bound = least / max(tree.chances[node], least) if least else 0.0
            pairs = zip(tokens, row, strict=True)
            able = [pair for pair in pairs if pair[1] > bound or (pair[1] > 0.0 and pair[0] in others)]
            tree.weigh_children(node, able)
        self._considered |= {node: (heard, row) for row, node in enumerate(nodes)}

    def lesson(self, places: Places) -> Lesson | None:
        """The candidates below those nodes of a settled tree that were expanded."""
        if not self._considered:
            return self._draws.lesson(places)
        return RankLesson(places, self._considered, self.chances)


def _together(parts: Sequence[Ranked]) -> Ranked:
    """As many candidates as the widest has."""
    seen = [part.candidates for part in parts]
    masses = [part.log_mass for part in seen if part.log_mass is not None]
    width = max(part.scores.shape[1] for part in seen)
    scores = np.concatenate([_wide(part.scores, width, -np.inf) for part in seen])
    said, shift = (_filled(heard, seen, width) for heard in ([p.said for p in seen], [p.shift for p in seen]))
    candidates = Candidates(scores, np.concatenate(masses) if masses else None, seen[0].temperature, said, shift)
    tokens = np.concatenate([_wide(part.tokens, width, NO_TOKEN) for part in parts])
    return Ranked(tokens, candidates, Hidden.together([part.hidden for part in parts]))


def _picked(picks: Picks, nodes: Sequence[int | None]) -> NDArray[np.int64]:
    """[nodes, 1]."""
    return np.array([[picks[node]] for node in nodes])


def _filled(
    known: Sequence[NDArray[np.float64] | None], parts: Sequence[Candidates], width: int
) -> NDArray[np.float64] | None:
    """What is known of some candidates, 0 of others; None where nothing is."""
    if all(one is None for one in known):
        return None
    rows = (np.zeros(part.scores.shape) if one is None else one for one, part in zip(known, parts, strict=True))
    return np.concatenate([_wide(one, width, 0.0) for one in rows])


def _others(said: Mapping[int, float], own: Sequence[int]) -> list[int]:
    """The tokens that others said alone, the likeliest first."""
    return sorted(said.keys() - set(own), key=lambda token: (-said[token], token))


def _wide(rows: NDArray[Number], width: int, empty: float) -> NDArray[Number]:
    """As many columns as that."""
    if rows.shape[1] == width:
        return rows
    wide = np.full((len(rows), width), empty, dtype=rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide


def _no_noise(_seed: int, _position: int, vocab_size: int) -> NDArray[np.float64]:
    return np.zeros(vocab_size)
