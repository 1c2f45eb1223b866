"""A head that is one decoder layer as a source: it attends to the text as far as its hidden rows came, and to its tree.

Tokens up to the one behind the newest row have entries from the target's own rows. Further ones, and the tree, go on
from the layers' own rows.

The tail sends rows of a prompt's last tokens too, so the layer's text begins where those begin. Where a row is missing
it begins anew: of a prompt whose beginning the session held already, or where a node sends none.

`LayerEntries` are keys and values of a head's layers for one text, and the rows that its layers hand on.

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
from itertools import compress

import torch

from client.draft.heads.layer_head import LayerHead
from client.draft.search.ranking import Ranker
from client.draft.search.source import Places, Search, Source
from client.draft.search.tree import Lesson, TokenTree
from client.draft.sources.recurrent import MAX_TOKENS_BEHIND
from swarm.base.ids import TreeNodeId
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import SessionRows
from swarm.protocol.limits import MAX_PROMPT_ROWS, PROMPT_ROWS_BYTES

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


MAX_TEXT_BYTES = 256 << 20
"""Memory for rows, keys and values of one text."""
MIN_WINDOW_TOKENS, MAX_WINDOW_TOKENS = 128, 8_192
"""Tokens of the text that the layer attends to, at least and at most."""


class LayerHeadSource(Source):
    """Expands the frontier in batches; every node's state is the row that the layer predicts for it.

    Attributes:
        head: the layer; several sources share it.
        ranker: from its logits to candidates.
        window_tokens: rows that are kept; where a text has more, the older half is dropped.
        prompt_rows: of a prompt's last tokens, whose rows a tail sends in one go whatever it computes in.
    """

    wants_rows = True
    weighs = True

    def __init__(self, head: LayerHead, ranker: Ranker) -> None:
        self.head = head
        self.aux_layers = head.aux_layers
        self.ranker = ranker
        model = head.model
        per_token = sum(layer.model.layout.bytes_per_token for layer in head.layers)
        per_token += head.row_width * model.dtype.itemsize
        self.window_tokens = max(MIN_WINDOW_TOKENS, min(MAX_TEXT_BYTES // per_token, MAX_WINDOW_TOKENS))
        in_reply_bytes = (1 + len(head.aux_layers)) * model.hidden_size * 4
        self.prompt_rows = min(self.window_tokens, MAX_PROMPT_ROWS, PROMPT_ROWS_BYTES // in_reply_bytes)
        self._buffer = torch.empty(0)  # [window_tokens, width], the target's own, taken with the first row
        self._entries = LayerEntries(head, self.window_tokens)
        self.forget()

    def forget(self) -> None:
        """Begin with an empty text, and with new KV: the last pass may have failed half-way."""
        self._entries.forget()
        self._text: tuple[int, ...] = ()
        self._base = self._count = 0  # rows are of tokens `[base, base + count)`, which end the text
        self._states: dict[int | None, EntryState] = {}  # by node of the search

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Keep rows that follow those so far; what the text has changed behind a common beginning is dropped.

        Rows from before the oldest one begin the text anew.
        """
        model, text, start = self.head.model, tuple(sequence), len(sequence) - len(rows)
        is_older = start < self._base
        if rows.shape[1] != self.head.row_width or (text == self._text[: len(text)] and not is_older):
            return
        self._keep(text)
        if self._count == 0 or is_older or start > self._base + self._count:
            self._base, self._count = start, 0
            self._entries.keep(0)
        new = rows[self._base + self._count - start :][-self.window_tokens :]
        if self._count + len(new) > self.window_tokens:
            self._drop(self._count + len(new) - self.window_tokens // 2)
        if len(self._buffer) == 0:
            self._buffer = torch.empty(self.window_tokens, self.head.row_width, dtype=model.dtype, device=model.device)
        self._buffer[self._count : self._count + len(new)] = new.to(model.device, model.dtype)
        self._count += len(new)
        self._base = len(text) - self._count
        self._text = text

    def _keep(self, text: tuple[int, ...]) -> None:
        """Keep the rows that a text has in common with those so far, and entries whose tokens it has too."""
        common = _common_prefix(self._text, text)
        self._text = self._text[:common]
        self._count = min(self._count, max(0, common - self._base))
        self._entries.keep(max(0, common - self._base - 1))  # entries are of the tokens behind their rows

    def _drop(self, count: int) -> None:
        """Forget the oldest rows. All entries are computed again, which halves keep rare."""
        kept = max(0, self._count - count)
        self._buffer[:kept] = self._buffer[self._count - kept : self._count].clone()
        self._base, self._count = self._base + self._count - kept, kept
        self._entries.keep(0)

    def begin(self, search: Search) -> bool:
        """Catch up with the rows that came, and add candidates below the text's last token."""
        self.ranker.begin()
        self._states = {}
        sequence = search.sequence
        self._keep(sequence[:-1])  # an earlier text may have gone on further, or elsewhere
        known = self._base + self._count
        is_recent = self._count > 0 and len(sequence) - known <= MAX_TOKENS_BEHIND
        if not is_recent or max(sequence[self._base :]) >= self.head.vocab_size:
            return False
        logits, state = self._entries.catch_up(sequence[self._base + 1 : known + 1], self._rows)
        for token in sequence[known + 1 :]:
            logits, [state] = self._entries.run([token], [state])
        self._states[TokenTree.ROOT] = state
        self.ranker.add(search, [TokenTree.ROOT], logits)
        return True

    def _rows(self, start: int, end: int) -> torch.Tensor:
        return self.head.normed(self._buffer[start:end])

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Run one pass for all nodes whose parents have states; a parent in the same batch costs another pass."""
        tree, states = search.tree, self._states
        waiting = [node for node in nodes if tree.parents[node] in states or tree.parents[node] in nodes]
        has_run = False
        while ready := [node for node in waiting if tree.parents[node] in states]:
            above = [states[tree.parents[node]] for node in ready]
            groups = [self._entries.group(state) for state in above]
            ready = list(compress(ready, [group == groups[0] for group in groups]))[: max(0, self._entries.room)]
            if not ready:
                break
            above = [states[tree.parents[node]] for node in ready]
            logits, found = self._entries.run([tree.tokens[node] for node in ready], above)
            states |= dict(zip(ready, found, strict=True))
            self.ranker.add(search, ready, logits)
            waiting = [node for node in waiting if node not in states]
            has_run = True
        return has_run

    def remember(self, search: Search) -> Sequence[int]:
        """No node: states are not kept between searches."""
        return ()

    def is_free(self, search: Search, node: int) -> bool:
        """No node is: expanding always takes a pass."""
        return False

    def lesson(self, places: Places) -> Lesson | None:
        """Every candidate below a node whose pick is known is a label."""
        return self.ranker.lesson(places)


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    count = min(len(ours), len(theirs))
    if ours[:count] == theirs[:count]:
        return count
    return next(place for place in range(count) if ours[place] != theirs[place])
