"""Trained heads with a state per node as sources: they go on from the target's newest hidden row.

`DgfSource` expands nodes in batches: every frontier node has a hidden row that the head predicted. Source: Dovetail
(arXiv 2412.18934); the networks are in `client.draft.heads.files`.

`ReDrafterSource` is a beam search from the target's last hidden row, prefixes shared, then into the tree. Beams rank by
acceptance probability, which comes from the coupled scores (`client.draft.search.ranking`), so that a beam is a path
that the target's own noise favours. Beams that a better one replaces stay as shorter ones: the tree takes the best of
all.

Source: ReDrafter (arXiv 2403.09919), section 3.2 and appendix A.1: prefixes are found by comparing all beams at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

from client.draft.heads.files import Head
from client.draft.search.ranking import Ranked, Ranker
from client.draft.search.source import Places, Search, Source
from client.draft.search.tree import Lesson, TokenTree

MAX_TOKENS_BEHIND = 8
"""Tokens that the text may be ahead of the newest hidden row; heads are not trained to guess further."""


class HeadSource(Source):
    """Holds a head, on whatever device it is, and the hidden row that it goes on from.

    Attributes:
        head: the network.
        ranker: from its logits to candidates.
    """

    wants_rows = True

    def __init__(self, head: Head, ranker: Ranker) -> None:
        self.head = head
        self.ranker = ranker
        self._sequence: tuple[int, ...] = ()
        self._row = torch.empty(0)

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Keep the last row; rows of another width are not those of the head's target and are ignored."""
        if rows.shape[1] == self.head.config.hidden_size:
            self._sequence, self._row = tuple(sequence), rows[-1:].to(self._device, torch.float32)

    def lesson(self, places: Places) -> Lesson | None:
        """Every candidate below a node whose pick is known is a label."""
        return self.ranker.lesson(places)

    def forget(self) -> None:
        """Propose nothing until the next row comes."""
        self._sequence = ()

    @property
    def _device(self) -> torch.device:
        return self.head.out_norm.weight.device

    def _start(self, sequence: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The hidden row [1, hidden_size] and the state [1, width] at the end of a text; None without a recent row."""
        known = len(self._sequence)
        if known == 0 or not 0 < len(sequence) - known <= MAX_TOKENS_BEHIND or sequence[:known] != self._sequence:
            return None
        behind = torch.tensor(sequence[known:], device=self._device)
        state = self.head.begin(self._row, behind[:1])
        for place in range(1, len(behind)):
            state = self.head.step(state, behind[place : place + 1])
        return self._row, state


class DgfSource(HeadSource):
    """Expands the frontier in batches, as a model does, but from a state per node instead of KV."""

    weighs = True

    def __init__(self, head: Head, ranker: Ranker) -> None:
        super().__init__(head, ranker)
        self._rows = torch.empty(0)  # [1, hidden_size], the target's
        self._states: dict[int | None, torch.Tensor] = {}  # by node, [width]

    def begin(self, search: Search) -> bool:
        """Add candidates below the text's last token, where the target's hidden row before it is known."""
        self.ranker.begin()
        self._states = {}
        start = self._start(search.sequence)
        if start is None:
            return False
        self._rows, state = start
        self._states[TokenTree.ROOT] = state[0]
        self.ranker.add(search, [TokenTree.ROOT], self.head.score(self._rows, state))
        return True

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Run one pass for all nodes whose parents have states; a parent in the same batch costs another pass."""
        tree, states = search.tree, self._states
        waiting = [node for node in nodes if tree.parents[node] in states or tree.parents[node] in nodes]
        has_run = False
        while ready := [node for node in waiting if tree.parents[node] in states]:
            before = torch.stack([states[tree.parents[node]] for node in ready])
            tokens = torch.tensor([tree.tokens[node] for node in ready], device=before.device)
            after = self.head.step(before, tokens)
            states |= dict(zip(ready, after, strict=True))
            self.ranker.add(search, ready, self.head.score(self._rows.expand(len(ready), -1), after))
            waiting = [node for node in waiting if node not in states]
            has_run = True
        return has_run

    def remember(self, search: Search) -> Sequence[int]:
        """No node: states are not kept between searches."""
        return ()

    def is_free(self, search: Search, node: int) -> bool:
        """No node is: expanding always takes a pass."""
        return False


EMPTY = -1
"""Fills up a beam that was dropped before the last level."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Different prefixes of some beams, shorter ones first; the empty one is left out.

    Attributes:
        tokens: [prefixes], the last token of each.
        parents: [prefixes], the prefix without that token; `EMPTY` where that is the empty one.
        beams: [prefixes], the first beam that begins with it.
        levels: [prefixes], the level at which it ends.
        place: [beams, levels], the prefix that ends there; `EMPTY` behind a beam's end.
        paths: [beams, levels], the beams themselves.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    beams: torch.Tensor
    levels: torch.Tensor
    place: torch.Tensor
    paths: torch.Tensor

    def find(self, paths: torch.Tensor) -> torch.Tensor:
        """The prefixes [n] that equal these paths [n, level]; some beam must begin with each."""
        level = paths.shape[1]
        beam = (self.paths[None, :, :level] == paths[:, None]).all(dim=2).to(torch.int8).argmax(dim=1)
        return self.place[beam, level - 1]


def shared_prefixes(beams: torch.Tensor) -> Prefixes:
    """Every prefix of `beams` [beams, levels] once; `EMPTY` fills a beam up behind its end."""
    count, levels = beams.shape
    same = (beams[:, None, :] == beams[None, :, :]).cumprod(dim=2)  # [i, j, l]: i and j agree up to level l
    first = same.argmax(dim=1)  # the first beam with that prefix
    is_own = (first == torch.arange(count, device=beams.device)[:, None]) & (beams != EMPTY)
    level, beam = is_own.T.nonzero(as_tuple=True)  # by level, so that parents come before their children
    place = torch.full((count, levels), EMPTY, device=beams.device)
    place[beam, level] = torch.arange(len(beam), device=beams.device)
    place = place.gather(0, first).where(beams != EMPTY, EMPTY)
    parents = place[beam, level - 1].where(level > 0, EMPTY)
    return Prefixes(beams[beam, level], parents, beam, level, place, beams)


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
