"""Keys and values of a head's layers for one text, and the rows that its layers hand on to each other.

    row_k(t) = layer k on row_{k-1}(t - 1) and token t, attending to its own entries before; row_{-1} is the target's
    layer k has an entry of token t where the target's rows reach from the text's first one to token t - 1 - k
    depth d    tokens behind the newest row: the one right behind it has depth 0, and is an entry itself

What follows a node at depth d is drafted by layer d, or the last one, which then goes on from its own row. Layers above
d run there too, as far as the rows of the node before reach: nodes below will attend to these entries.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from client.drafting.heads.layer_head import LayerHead
from swarm.ids import TreeNodeId
from swarm.inference.kv_cache import KvCache
from swarm.inference.ragged_batch import SessionRows

LIVE_NODES = 1_024
"""Nodes that one search may run."""
CATCH_UP_ROWS = 256
"""Entries of one forward while it catches up with the text."""

Above = tuple[Sequence[TreeNodeId | None], Sequence[int]]
"""Parents of nodes in one layer, and their positions there."""


@dataclass(frozen=True, slots=True)
class EntryState:
    """What nodes below a node need of it.

    Attributes:
        depth: behind the newest row.
        rows: [width], by layer: those that ran there.
        ids: of its live entries, by layer; none where an entry is committed.
    """

    depth: int
    rows: Mapping[int, torch.Tensor]
    ids: Mapping[int, TreeNodeId]


class LayerEntries:
    """Entries of every layer, of tokens that follow one another; live ones are gone with the next `catch_up`."""

    def __init__(self, head: LayerHead, window_tokens: int) -> None:
        """Make no entries yet; `window_tokens` is how many tokens a text may have."""
        self._layers = head.layers
        self._capacity = window_tokens + LIVE_NODES
        self.forget()

    def forget(self) -> None:
        """Begin anew, with new KV: the last pass may have failed half-way."""
        self._caches: list[KvCache] = []
        self._run = [0] * len(self._layers)  # entries that hold, by layer
        self._count = self._next_id = 0

    def keep(self, tokens: int) -> None:
        """Keep the entries of so many tokens of the text behind its first one."""
        self._run = [min(run, max(0, tokens - number)) for number, run in enumerate(self._run)]

    @property
    def room(self) -> int:
        """Live nodes that may still be run."""
        return self._capacity - max((cache.slots.used for cache in self._caches), default=0)

    def group(self, state: EntryState) -> int:
        """Nodes below states of one group can be run together: the same layers run there."""
        return min(state.depth + 1, len(self._layers))

    def catch_up(
        self, tokens: Sequence[int], rows: Callable[[int, int], torch.Tensor]
    ) -> tuple[torch.Tensor, EntryState]:
        """Make the entries that are missing; the last ones run again.

        Args:
            tokens: the text's behind its first one, at least one; the last has depth 0.
            rows: the target's, normed, of the tokens before `tokens[start:end]`, [end - start, width].

        Returns:
            Logits [1, vocab_size] of what follows the last token, and its state.
        """
        if not self._caches:
            self._caches = [KvCache(layer.model.layout, self._capacity, LIVE_NODES) for layer in self._layers]
        count = self._count = len(tokens)
        starts, newest, logits = self._starts(count), dict[int, torch.Tensor](), torch.empty(0)
        for cache, start in zip(self._caches, starts, strict=True):
            cache.truncate(start)
        for begin in range(starts[0], count, CATCH_UP_ROWS):
            at, stop = begin, min(begin + CATCH_UP_ROWS, count)
            entering = rows(begin, stop)
            for number, start in enumerate(starts):
                first, end = max(begin, start), min(stop, count - number)
                if first >= end:
                    break
                places, last = range(first, end), int(number == 0 and end == count)
                given = entering[first - at : end - at]
                found, entering = self._commit(number, tokens[first + number : end + number], given, places, last)
                at, newest[number], logits = first, entering[-1], found if last else logits
        return logits, EntryState(0, newest, {})

    def _starts(self, count: int) -> list[int]:
        """The first entry of every layer that runs: the layer before has to run from there too, for its rows."""
        starts, limit = [0] * len(self._layers), count
        for number in reversed(range(min(len(self._layers), count))):
            limit = starts[number] = min(self._run[number], count - 1 - number, limit)
        return starts

    def _commit(
        self, number: int, tokens: Sequence[int], rows: torch.Tensor, places: range, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = self._next_id
        parents = [None, *(TreeNodeId(first + place) for place in range(len(tokens) - 1))]
        logits, own, ids = self._pass(number, tokens, rows, (parents, places), last)
        self._caches[number].commit(ids, ())
        self._run[number] = places.stop
        return logits, own

    def run(self, tokens: Sequence[int], parents: Sequence[EntryState]) -> tuple[torch.Tensor, list[EntryState]]:
        """Run tokens, each below a node; all parents are of one group.

        Returns:
            Logits [n, vocab_size] of what follows each, and their states.
        """
        layers, group = len(self._layers), self.group(parents[0])
        rows: list[dict[int, torch.Tensor]] = [{} for _ in tokens]
        ids: list[dict[int, TreeNodeId]] = [{} for _ in tokens]
        logits = torch.empty(0)
        for number in range(min(group, layers - 1), layers):
            source = number if group == layers else number - 1
            if source not in parents[0].rows:
                break
            given = torch.stack([parent.rows[source] for parent in parents])
            positions = [self._count + parent.depth - number for parent in parents]
            above = [parent.ids.get(number) for parent in parents]
            is_asked = number == min(group, layers - 1)
            found, own, made = self._pass(number, tokens, given, (above, positions), len(tokens) if is_asked else 0)
            logits = found if is_asked else logits
            for place in range(len(tokens)):
                rows[place][number], ids[place][number] = own[place], made[place]
        depths = [parent.depth + 1 for parent in parents]
        return logits, [EntryState(*of) for of in zip(depths, rows, ids, strict=True)]

    def _pass(
        self, number: int, tokens: Sequence[int], rows: torch.Tensor, above: Above, last: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[TreeNodeId]]:
        """Run tokens through one layer: logits of the last ones, rows of all, and their ids."""
        ids = [TreeNodeId(self._next_id + place) for place in range(len(tokens))]
        self._next_id += len(tokens)
        work = SessionRows(self._caches[number], ids, *above)
        return *self._layers[number].run(work, torch.tensor(tokens), rows, last), ids
