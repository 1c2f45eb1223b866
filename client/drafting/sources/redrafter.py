"""A recurrent head as a source: beam search from the target's last hidden row, prefixes shared, then into the tree.

Beams rank by chance, which comes from the coupled scores (`client.drafting.search.ranking`), so that a beam is a path
that the target's own noise favours. Beams that a better one replaced stay as shorter ones: the tree takes what is best
of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

from client.drafting.heads.beam_search import EMPTY, shared_prefixes
from client.drafting.heads.modules import Head
from client.drafting.search.ranking import Ranked, Ranker
from client.drafting.search.source import Search
from client.drafting.search.tree import TokenTree
from client.drafting.sources.head_state import HeadSource

LEVELS = 8
"""Tokens of a beam."""
LEAST_BEAMS, MOST_BEAMS = 4, 64
LEAST_CHANCE = 1e-3
"""A beam that is less likely is not followed."""


@dataclass(frozen=True, slots=True)
class Beams:
    """The beams of one level, at most as many as the tree has room for.

    paths: [beams, level], tokens. chances: [beams], of the whole path. states: [beams, width], after its last token.
    """

    paths: torch.Tensor
    chances: torch.Tensor
    states: torch.Tensor

    def leave(self, beams: torch.Tensor) -> torch.Tensor:
        """Paths of some of them, filled up to `LEVELS`: [beams, LEVELS]."""
        return F.pad(self.paths[beams], (0, LEVELS - self.paths.shape[1]), value=EMPTY)


class ReDrafterSource(HeadSource):
    """All its guesses are made when a search begins, and made again for a larger tree."""

    weighs = True

    def __init__(self, head: Head, ranker: Ranker) -> None:
        super().__init__(head, ranker)
        self._made_for = 0
        self._planted: set[int] = set()

    def begin(self, search: Search) -> bool:
        """Beams as many as the tree has room for."""
        self.ranker.begin()
        self._made_for, self._planted = 0, set()
        return self._make(search)

    def widen(self, search: Search) -> None:
        """More beams than before, or none."""
        if search.tree.nodes > self._made_for:
            self._make(search)

    def _make(self, search: Search) -> bool:
        start = self._start(search.sequence)
        if start is None:
            return False
        self._made_for = search.tree.nodes
        row, state = start
        none = torch.empty(1, 0, dtype=torch.long, device=row.device)
        beams = Beams(none, torch.ones(1, dtype=torch.float64, device=row.device), state)
        paths, asked = [], []
        least, found = max(LEAST_CHANCE, search.tree.least), torch.empty(0, dtype=torch.float64, device=row.device)
        for level in range(min(LEVELS, search.levels)):
            logits = self.head.score(row.expand(len(beams.states), -1), beams.states)
            ranked = self.ranker.rank(logits, [len(search.sequence) + level] * len(logits), search.sampling)
            asked.append((beams.paths, ranked))
            beams, left = self._extend(beams, ranked, least, _beams_of(search))
            found = torch.cat([found, beams.chances])
            if len(found) >= search.tree.nodes:  # what is less likely than as many as there is room for is not followed
                least = max(least, float(found.topk(search.tree.nodes).values[-1]))
            paths.append(left)
            if len(beams.chances) == 0:
                break
        paths.append(beams.leave(torch.arange(len(beams.chances), device=row.device)))
        self._plant(search, torch.cat(paths), asked)
        return True

    def _extend(self, beams: Beams, ranked: Ranked, least: float, most: int) -> tuple[Beams, torch.Tensor]:
        """The best beams of the next level, and those of this one that none of them goes on from."""
        device = beams.states.device
        chances = self.ranker.chances.chances(ranked.candidates)
        tokens, own = torch.from_numpy(ranked.tokens).to(device), torch.from_numpy(chances).to(device)
        joint = (beams.chances[:, None] * own).flatten()
        best, place = joint.topk(min(most, len(joint)))
        place = place[best >= least]
        before, token = place // tokens.shape[1], tokens.flatten()[place]
        is_left = torch.ones(len(beams.chances), dtype=torch.bool, device=device)
        is_left[before] = False
        after = Beams(
            torch.cat([beams.paths[before], token[:, None]], dim=1),
            joint[place],
            self.head.step(beams.states[before], token),
        )
        return after, beams.leave(is_left.nonzero()[:, 0])

    def _plant(self, search: Search, paths: torch.Tensor, asked: list[tuple[torch.Tensor, Ranked]]) -> None:
        """Put what was ranked below every prefix into the tree, level by level, each prefix once.

        A prefix that what others said makes too unlikely is left out, with all behind it.
        """
        prefixes, nodes = shared_prefixes(paths), list[int | None]()
        tokens, parents, levels = (part.tolist() for part in (prefixes.tokens, prefixes.parents, prefixes.levels))
        for level, (beams, ranked) in enumerate(asked):
            below = [nodes[found] for found in prefixes.find(beams).tolist()] if level else [TokenTree.ROOT]
            new = {node: row for row, node in enumerate(below) if node is not None and node not in self._planted}
            if new:
                self.ranker.plant(search, list(new), ranked.rows(list(new.values())), LEAST_CHANCE)
                self._planted.update(new)
            while len(nodes) < len(tokens) and levels[len(nodes)] == level:
                parent, token = parents[len(nodes)], tokens[len(nodes)]
                above = nodes[parent] if parent != EMPTY else TokenTree.ROOT
                is_there = above is not None and token in search.tree.said(above)
                nodes.append(search.tree.child(above, token) if above is not None and is_there else None)


def _beams_of(search: Search) -> int:
    """Half as many as nodes: no level of a best tree has many more."""
    return max(LEAST_BEAMS, min(search.tree.nodes // 2, MOST_BEAMS))
