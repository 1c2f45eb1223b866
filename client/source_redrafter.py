"""A recurrent head as a source: beam search from the target's last hidden row, prefixes shared, then into the tree.

Beams rank by chance, which comes from the coupled scores (`client.ranking`), so that a beam is a path that the target's
own noise favours. Beams that a better one replaced stay as shorter ones: the tree takes what is best of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

from client.beams import EMPTY, shared_prefixes
from client.head import Head
from client.ranking import Ranked, Ranker
from client.source import Search
from client.source_head import HeadSource
from swarm.tree import TokenTree

LEVELS = 8
"""Tokens of a beam."""
LEAST_BEAMS, MOST_BEAMS = 4, 64
LEAST_CHANCE = 1e-3
"""A beam that is less likely is not followed."""


@dataclass(frozen=True, slots=True)
class Beams:
    """The beams of one level, at most as many as the tree has room for.

    paths: [beams, level], tokens. own: [beams, level], each token's chance given those before. chances: [beams], of the
    whole path. states: [beams, width], after its last token.
    """

    paths: torch.Tensor
    own: torch.Tensor
    chances: torch.Tensor
    states: torch.Tensor

    def leave(self, beams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Some of them, filled up to `LEVELS`: paths and chances [beams, LEVELS]."""
        missing = LEVELS - self.paths.shape[1]
        return F.pad(self.paths[beams], (0, missing), value=EMPTY), F.pad(self.own[beams], (0, missing))


class ReDrafterSource(HeadSource):
    """All its guesses are made when a search begins, and made again for a larger tree."""

    def __init__(self, head: Head, ranker: Ranker) -> None:
        super().__init__(head, ranker)
        self._made_for = 0

    def begin(self, search: Search) -> bool:
        """Beams as many as the tree has room for."""
        self._made_for = 0
        return self._make(search)

    def widen(self, search: Search) -> None:
        """More beams than before, or none."""
        if search.tree.nodes > self._made_for:
            self._make(search)

    def _make(self, search: Search) -> bool:
        self.ranker.begin()
        start = self._start(search.sequence)
        if start is None:
            return False
        self._made_for = search.tree.nodes
        row, state = start
        none = torch.empty(1, 0, device=row.device)
        beams = Beams(none.long(), none, torch.ones(1, dtype=torch.float64, device=row.device), state)
        paths, owns, asked = [], [], []
        least, found = max(LEAST_CHANCE, search.tree.least), torch.empty(0, dtype=torch.float64, device=row.device)
        for level in range(min(LEVELS, search.levels)):
            logits = self.head.score(row.expand(len(beams.states), -1), beams.states)
            ranked = self.ranker.rank(logits, [len(search.sequence) + level] * len(logits), search.sampling)
            asked.append((beams.paths, ranked))
            beams, left = self._extend(beams, ranked, least, _beams_of(search))
            found = torch.cat([found, beams.chances])
            if len(found) >= search.tree.nodes:  # what is less likely than as many as there is room for is not followed
                least = max(least, float(found.topk(search.tree.nodes).values[-1]))
            paths.append(left[0])
            owns.append(left[1])
            if len(beams.chances) == 0:
                break
        left = beams.leave(torch.arange(len(beams.chances), device=row.device))
        self._plant(search, torch.cat([*paths, left[0]]), torch.cat([*owns, left[1]]), asked)
        return True

    def _extend(
        self, beams: Beams, ranked: Ranked, least: float, most: int
    ) -> tuple[Beams, tuple[torch.Tensor, torch.Tensor]]:
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
            torch.cat([beams.own[before], own.flatten()[place, None]], dim=1),
            joint[place],
            self.head.step(beams.states[before], token),
        )
        return after, beams.leave(is_left.nonzero()[:, 0])

    def _plant(
        self, search: Search, paths: torch.Tensor, owns: torch.Tensor, asked: list[tuple[torch.Tensor, Ranked]]
    ) -> None:
        """Put every prefix into the tree once, and remember what was ranked below which."""
        prefixes = shared_prefixes(paths)
        chances = owns[prefixes.beams, prefixes.levels].tolist()
        nodes: list[int] = []
        for token, parent, chance in zip(prefixes.tokens.tolist(), prefixes.parents.tolist(), chances, strict=True):
            above = nodes[parent] if parent != EMPTY else TokenTree.ROOT
            search.tree.add_children(above, [(token, min(chance, 1.0))])
            nodes.append(search.tree.child(above, token))
        for level, (beams, ranked) in enumerate(asked):
            if level == 0:
                self.ranker.note([TokenTree.ROOT], ranked)
                continue
            place = prefixes.find(beams)
            self.ranker.note([nodes[found] for found in place.tolist()], ranked)


def _beams_of(search: Search) -> int:
    """Half as many as nodes: no level of a best tree has many more."""
    return max(LEAST_BEAMS, min(search.tree.nodes // 2, MOST_BEAMS))
