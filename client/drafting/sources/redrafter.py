"""A recurrent head as a source: beam search from the target's last hidden row, prefixes shared, then into the tree.

Beams rank by acceptance probability, which comes from the coupled scores (`client.drafting.search.ranking`), so that a
beam is a path that the target's own noise favours. Beams that a better one replaces stay as shorter ones: the tree
takes the best of all.

Source: ReDrafter (arXiv 2403.09919), section 3.2.
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
"""Tokens of a beam, at most."""
MIN_BEAMS, MAX_BEAMS = 4, 64
"""Beams per level."""
MIN_PATH_PROBABILITY = 1e-3
"""A beam that is less likely is not followed."""


@dataclass(frozen=True, slots=True)
class Beams:
    """The beams of one level.

    Attributes:
        paths: [beams, level], tokens.
        probs: [beams], acceptance probabilities of the whole paths.
        states: [beams, width], after the last tokens.
    """

    paths: torch.Tensor
    probs: torch.Tensor
    states: torch.Tensor

    def padded(self, beams: torch.Tensor) -> torch.Tensor:
        """Paths of some beams, filled up with `EMPTY`: [beams, LEVELS]."""
        return F.pad(self.paths[beams], (0, LEVELS - self.paths.shape[1]), value=EMPTY)


class ReDrafterSource(HeadSource):
    """Runs the whole beam search when a search begins, and again for a larger tree."""

    weighs = True

    def __init__(self, head: Head, ranker: Ranker) -> None:
        super().__init__(head, ranker)
        self._searched_for = 0
        self._added: set[int] = set()

    def begin(self, search: Search) -> bool:
        """Search with as many beams as the tree's size suggests."""
        self.ranker.begin()
        self._searched_for, self._added = 0, set()
        return self._search(search)

    def widen(self, search: Search) -> None:
        """Search again, with more beams, if the tree is larger than the last search was for."""
        if search.tree.max_nodes > self._searched_for:
            self._search(search)

    def _search(self, search: Search) -> bool:
        start = self._start(search.sequence)
        if start is None:
            return False
        self._searched_for = search.tree.max_nodes
        row, state = start
        none = torch.empty(1, 0, dtype=torch.long, device=row.device)
        beams = Beams(none, torch.ones(1, dtype=torch.float64, device=row.device), state)
        paths, asked = [], []
        threshold = max(MIN_PATH_PROBABILITY, search.tree.min_probability)
        found = torch.empty(0, dtype=torch.float64, device=row.device)
        for level in range(min(LEVELS, search.levels)):
            logits = self.head.score(row.expand(len(beams.states), -1), beams.states)
            ranked = self.ranker.rank(logits, [len(search.sequence) + level] * len(logits), search.sampling)
            asked.append((beams.paths, ranked))
            beams, left = self._extend(beams, ranked, threshold, _beam_count(search))
            found = torch.cat([found, beams.probs])
            if len(found) >= search.tree.max_nodes:  # a beam below the tree's floor is not followed
                threshold = max(threshold, float(found.topk(search.tree.max_nodes).values[-1]))
            paths.append(left)
            if len(beams.probs) == 0:
                break
        paths.append(beams.padded(torch.arange(len(beams.probs), device=row.device)))
        self._add_paths(search, torch.cat(paths), asked)
        return True

    def _extend(self, beams: Beams, ranked: Ranked, threshold: float, max_beams: int) -> tuple[Beams, torch.Tensor]:
        """The best beams of the next level, and the paths of this one that none of them goes on from."""
        device = beams.states.device
        probs = self.ranker.acceptance_model.acceptance_probs(ranked.candidates)
        tokens, own = torch.from_numpy(ranked.tokens).to(device), torch.from_numpy(probs).to(device)
        joint = (beams.probs[:, None] * own).flatten()  # [beams · candidates]
        best, place = joint.topk(min(max_beams, len(joint)))
        place = place[best >= threshold]
        before, token = place // tokens.shape[1], tokens.flatten()[place]
        is_left = torch.ones(len(beams.probs), dtype=torch.bool, device=device)
        is_left[before] = False
        after = Beams(
            torch.cat([beams.paths[before], token[:, None]], dim=1),
            joint[place],
            self.head.step(beams.states[before], token),
        )
        return after, beams.padded(is_left.nonzero()[:, 0])

    def _add_paths(self, search: Search, paths: torch.Tensor, asked: list[tuple[torch.Tensor, Ranked]]) -> None:
        """Put what was ranked below every prefix into the tree, level by level, each prefix once.

        A prefix that other sources' candidates make too unlikely is left out, with all behind it.

        Args:
            search: the tree to add to.
            paths: [paths, LEVELS], filled up with `EMPTY`.
            asked: per level, the beams' paths [beams, level] and what was ranked below each.
        """
        prefixes, nodes = shared_prefixes(paths), list[int | None]()
        tokens, parents, levels = (part.tolist() for part in (prefixes.tokens, prefixes.parents, prefixes.levels))
        for level, (beams, ranked) in enumerate(asked):
            below = [nodes[found] for found in prefixes.find(beams).tolist()] if level else [TokenTree.ROOT]
            new = {node: row for row, node in enumerate(below) if node is not None and node not in self._added}
            if new:
                self.ranker.add_ranked(search, list(new), ranked.rows(list(new.values())), MIN_PATH_PROBABILITY)
                self._added.update(new)
            while len(nodes) < len(tokens) and levels[len(nodes)] == level:
                parent, token = parents[len(nodes)], tokens[len(nodes)]
                above = nodes[parent] if parent != EMPTY else TokenTree.ROOT
                is_there = above is not None and token in search.tree.child_probs(above)
                nodes.append(search.tree.child(above, token) if above is not None and is_there else None)


def _beam_count(search: Search) -> int:
    """Half as many beams as nodes: no level of a best tree has many more."""
    return max(MIN_BEAMS, min(search.tree.max_nodes // 2, MAX_BEAMS))
