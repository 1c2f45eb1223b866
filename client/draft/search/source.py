"""What a source of draft tokens is, and the search that several of them share. Owns no model.

    begin      starts a search: catches up with the text, adds what takes no further pass
    remember   puts into the tree what an earlier search expanded
    expand     adds children below frontier nodes, in batches, until the tree is settled
    lesson     keeps what the target's picks will teach about the settled tree
    observe    takes the target's hidden rows of tokens that are certain now

A source is one small file: subclass `Source`, override what it can do.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

from client.draft.search.tree import Lesson, TokenTree
from swarm.compute.ragged_batch import HeadOutput, RaggedModel, SessionRows
from swarm.protocol.messages import Sampling

Places = Mapping[int | None, int]
"""From nodes of a settled `DraftTree`, None for its root, to nodes of the search's `TokenTree`."""


@dataclass(frozen=True, slots=True)
class DraftPass:
    """A pass that a search waits for: logits after the last nodes of some rows."""

    model: RaggedModel
    work: SessionRows
    last: int

    @property
    def rows(self) -> int:
        """How many it computes."""
        return len(self.work.node_ids)

    def run(self) -> HeadOutput:
        """Run it by itself."""
        return self.model.head_output(self.work, self.last)


T = TypeVar("T")
Passes: TypeAlias = Generator[DraftPass, HeadOutput, T]
"""Work that hands out a pass whenever it needs one, and goes on with what that gave."""


def alone(passes: Passes[T]) -> T:
    """Run such work with its passes by themselves."""
    try:
        wanted = next(passes)
        while True:
            wanted = passes.send(wanted.run())
    except StopIteration as end:
        value: T = end.value
        return value


@dataclass(slots=True)
class Search:
    """One best-first search, which may go on when a larger tree of the same sequence is asked for.

    Attributes:
        sequence: every certain token; the tree's root is the last one.
        levels: of the tree below its root, at most.
        sampling: how the target picks.
        tree: what was found so far.
        rounds: batches that sources computed.
        remembered: nodes that were expanded without a batch, because an earlier search had expanded them.
        is_early: whether a source lacks a hidden row.
        has_read: whether a source had to read the text from its beginning.
    """

    sequence: tuple[int, ...]
    levels: int
    sampling: Sampling
    tree: TokenTree
    rounds: int = 0
    remembered: int = 0
    is_early: bool = False
    has_read: bool = False

    @property
    def key(self) -> tuple[tuple[int, ...], int, Sampling]:
        """What tells searches apart; one with the same key can go on."""
        return self.sequence, self.levels, self.sampling

    def position(self, node: int) -> int:
        """The position in the text of the token that follows a node."""
        return len(self.sequence) + self.tree.depths[node]


class Source:
    """Proposes what comes next. A bad guess costs time, never text; by default it proposes nothing.

    Attributes:
        wants_rows: whether it needs `observe`; the target then sends hidden rows along.
        prompt_rows: of how many of a prompt's last tokens it can use the rows.
        aux_layers: layers of which it observes what enters them, side by side in this order; none: the last's output.
        weighs: whether its probabilities take the other sources' into account. Such sources are asked last.
    """

    wants_rows = False
    prompt_rows = 0
    aux_layers: tuple[int, ...] = ()
    weighs = False

    def begin(self, search: Search) -> bool:
        """Start a search: forget the last one, add what takes no further pass. Returns whether a model ran."""
        return False

    def beginning(self, search: Search) -> Passes[bool]:
        """As `begin`, pass by pass; what runs no such model has none."""
        yield from ()
        return self.begin(search)

    def expanding(self, search: Search, nodes: Sequence[int]) -> Passes[bool]:
        """As `expand`, pass by pass."""
        yield from ()
        return self.expand(search, nodes)

    def remember(self, search: Search) -> Sequence[int] | None:
        """Put into the tree what an earlier search expanded.

        Returns:
            Nodes that can be expanded without a pass, parents first; None where expanding never takes one.
        """
        return None

    def widen(self, search: Search) -> None:
        """Go on with the same search, for a larger tree."""

    def is_stale(self) -> bool:
        """Whether it learned so much since the search began that it would propose other tokens now."""
        return False

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Add children below nodes of the frontier, best first. Returns whether a model ran."""
        return False

    def is_free(self, search: Search, node: int) -> bool:
        """Whether expanding a node takes no model's pass, as far as is known now."""
        return True

    def lesson(self, places: Places) -> Lesson | None:
        """What there is to learn from a settled tree, once the picks after its nodes are known.

        Not every settled tree is sent, so a lesson should compute nothing before `learn`.
        """
        return None

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Take the target's hidden rows [n, width] of the last n tokens of `sequence`."""

    def forget(self) -> None:
        """Drop all state of texts and searches; calibrations stay. Also called after a search that failed half-way."""
