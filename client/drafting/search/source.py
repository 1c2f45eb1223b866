"""What a source of draft tokens is, and the search that several of them share. Owns no model.

    begin      a new search: catch up with the text, add what can be said at once
    remember   what an earlier search expanded is there at once
    expand     add children below frontier nodes, in batches, until the tree is settled
    lesson     what of the settled tree the target's picks will teach
    observe    the target's hidden rows of tokens that are certain now

A source is one small file: subclass `Source`, override what it can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from client.drafting.search.tree import Lesson, TokenTree
from swarm.protocol.messages import Sampling

Places = Mapping[int | None, int]
"""Which nodes of a search's tree stand where in the settled one; its root stands at None."""


@dataclass(slots=True)
class Search:
    """One best-first search, which may go on when a larger tree of the same sequence is wanted.

    sequence: every certain token; the tree's root is the last one. rounds: batches that sources computed. recalled:
    nodes expanded without one, because an earlier search had them. is_early: a source lacks a hidden row. has_read: a
    source had to read a text from its beginning.
    """

    sequence: tuple[int, ...]
    levels: int
    sampling: Sampling
    tree: TokenTree
    rounds: int = 0
    recalled: int = 0
    is_early: bool = False
    has_read: bool = False

    @property
    def key(self) -> tuple[tuple[int, ...], int, Sampling]:
        """What it is for."""
        return self.sequence, self.levels, self.sampling

    def position(self, node: int) -> int:
        """The position of the token that follows a node."""
        return len(self.sequence) + self.tree.depths[node]


class Source:
    """Guesses what comes next. A bad guess costs time, never text; by default it guesses nothing.

    wants_rows: whether it needs `observe`, for which the target sends hidden rows along. weighs: whether its chances
    take into account what others said about the same nodes, who are asked before it, therefore.
    """

    wants_rows = False
    weighs = False

    def begin(self, search: Search) -> bool:
        """A new search: forget the last one, and add what can be said at once; whether that took a model's pass."""
        return False

    def remember(self, search: Search) -> Sequence[int] | None:
        """Put into the tree what an earlier search expanded, so that no pass is needed: which nodes, parents first.

        None where expanding never takes one.
        """
        return None

    def widen(self, search: Search) -> None:
        """The same search is to give a larger tree now."""

    def is_stale(self) -> bool:
        """Whether it learned so much since the search began that it would say other things now."""
        return False

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Add children below nodes of the frontier, best first; whether that took a model's pass."""
        return False

    def is_free(self, search: Search, node: int) -> bool:
        """Whether expanding a node takes no model's pass, as far as is known now."""
        return True

    def lesson(self, places: Places) -> Lesson | None:
        """What there is to learn from a settled tree, once the picks after its nodes are known.

        Not every settled tree is sent: what a lesson is made of is put together when it is learned.
        """
        return None

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Take the target's hidden rows [n, width] of the last n tokens of `sequence`."""

    def forget(self) -> None:
        """A search broke off half-way, or texts before are not to count: be as new, but for whom to believe."""
