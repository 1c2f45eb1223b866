"""A head that is one decoder layer as a source: it attends to the text as far as its hidden rows came, and to its tree.

    [0, run)      entries of the layer's KV, from the target's own rows; entry j is token `base + 1 + j` of the text
    live nodes    tokens behind the newest row, and the tree: from the layer's own rows, gone with the next search

Rows come with replies alone, so the layer's text begins where the first one came. Where one is missing it begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from client.drafting.heads.layer_head import LayerHead
from client.drafting.search.ranking import Ranker
from client.drafting.search.source import Places, Search, Source
from client.drafting.search.tree import Lesson, TokenTree
from client.drafting.sources.head_state import MAX_TOKENS_BEHIND
from swarm.ids import TreeNodeId
from swarm.inference.kv_cache import KvCache
from swarm.inference.ragged_batch import SessionRows

MAX_TEXT_BYTES = 256 << 20
"""Memory for rows, keys and values of one text."""
MIN_WINDOW_TOKENS, MAX_WINDOW_TOKENS = 128, 8_192
"""Tokens of the text that the layer attends to, at least and at most."""
LIVE_NODES = 1_024
"""Nodes that one search may run."""
CATCH_UP_ROWS = 256
"""Entries of one forward while it catches up with the text."""


class LayerHeadSource(Source):
    """Expands the frontier in batches; every node's state is the row that the layer predicts for it.

    Attributes:
        head: the layer; several sources share it.
        ranker: from its logits to candidates.
        window_tokens: rows that are kept; where a text has more, the older half is dropped.
    """

    wants_rows = True
    weighs = True

    def __init__(self, head: LayerHead, ranker: Ranker) -> None:
        self.head = head
        self.aux_layers = head.aux_layers
        self.ranker = ranker
        model = head.model
        per_token = model.layout.bytes_per_token + head.row_width * model.dtype.itemsize
        self.window_tokens = max(MIN_WINDOW_TOKENS, min(MAX_TEXT_BYTES // per_token, MAX_WINDOW_TOKENS))
        self._buffer = torch.empty(0)  # [window_tokens, width], the target's own, taken with the first row
        self._kv_cache: KvCache | None = None
        self.forget()

    def forget(self) -> None:
        """Begin with an empty text, and with new KV: the last pass may have failed half-way."""
        self._kv_cache, self._next_id = None, 0
        self._text: tuple[int, ...] = ()
        self._base = self._count = self._run = 0  # rows are of tokens `[base, base + count)`, which end the text
        self._states: dict[int | None, torch.Tensor] = {}  # by node of the search, [width]
        self._ids: dict[int | None, TreeNodeId | None] = {}

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Keep rows that follow those so far; what the text has changed behind a common beginning is dropped."""
        model, text, start = self.head.model, tuple(sequence), len(sequence) - len(rows)
        if rows.shape[1] != self.head.row_width or text == self._text[: len(text)]:
            return
        self._keep(text)
        if self._count == 0 or start > self._base + self._count:
            self._base, self._count, self._run = start, 0, 0
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
        self._run = min(self._run, max(0, common - self._base - 1))  # entries are of the tokens behind their rows

    def _drop(self, count: int) -> None:
        """Forget the oldest rows. All entries are computed again, which halves keep rare."""
        kept = max(0, self._count - count)
        self._buffer[:kept] = self._buffer[self._count - kept : self._count].clone()
        self._base, self._count, self._run = self._base + self._count - kept, kept, 0

    def begin(self, search: Search) -> bool:
        """Catch up with the rows that came, and add candidates below the text's last token."""
        self.ranker.begin()
        self._states, self._ids = {}, {}
        sequence = search.sequence
        self._keep(sequence[:-1])  # an earlier text may have gone on further, or elsewhere
        known = self._base + self._count
        is_recent = self._count > 0 and len(sequence) - known <= MAX_TOKENS_BEHIND
        if not is_recent or max(sequence[self._base :]) >= self.head.vocab_size:
            return False
        logits, row = self._catch_up(sequence[self._base + 1 : known + 1])
        at: TreeNodeId | None = None
        for token in sequence[known + 1 :]:
            logits, row, [at] = self._run_nodes([token], row, [at], [self._used])
        self._ids[TokenTree.ROOT], self._states[TokenTree.ROOT] = at, row[0]
        self.ranker.add(search, [TokenTree.ROOT], logits)
        return True

    def _catch_up(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Make entries of the tokens behind all rows; the last one runs again. Its logits and its row [1, …]."""
        kv_cache = self._kv_cache
        if kv_cache is None:
            capacity = self.window_tokens + LIVE_NODES
            kv_cache = self._kv_cache = KvCache(self.head.model.layout, capacity, LIVE_NODES)
        self._run = min(self._run, len(tokens) - 1)
        kv_cache.truncate(self._run)
        for start in range(self._run, len(tokens), CATCH_UP_ROWS):
            part = tokens[start : start + CATCH_UP_ROWS]
            rows, first = self.head.normed(self._buffer[start : start + len(part)]), self._next_id
            parents = [None, *(TreeNodeId(first + place) for place in range(len(part) - 1))]
            logits, row, ids = self._run_nodes(part, rows, parents, range(start, start + len(part)), last=1)
            kv_cache.commit(ids, ())
            self._run = start + len(part)
        return logits, row

    def _run_nodes(
        self,
        tokens: Sequence[int],
        rows: torch.Tensor,
        parents: Sequence[TreeNodeId | None],
        positions: Sequence[int],
        last: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, list[TreeNodeId]]:
        """Run tokens, each behind a row [n, width]: logits and rows of the last ones (0: of all), and their ids."""
        assert self._kv_cache is not None
        ids = [TreeNodeId(self._next_id + place) for place in range(len(tokens))]
        self._next_id += len(tokens)
        work = SessionRows(self._kv_cache, ids, parents, positions)
        return *self.head.run(work, torch.tensor(tokens), rows, last or len(tokens)), ids

    @property
    def _used(self) -> int:
        return 0 if self._kv_cache is None else self._kv_cache.slots.used

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Run one pass for all nodes whose parents have states; a parent in the same batch costs another pass."""
        tree, states = search.tree, self._states
        waiting = [node for node in nodes if tree.parents[node] in states or tree.parents[node] in nodes]
        has_run = False
        while ready := [node for node in waiting if tree.parents[node] in states]:
            ready = ready[: max(0, self.window_tokens + LIVE_NODES - self._used)]
            if not ready:
                break
            above = [tree.parents[node] for node in ready]
            logits, rows, ids = self._run_nodes(
                [tree.tokens[node] for node in ready],
                torch.stack([states[parent] for parent in above]),
                [self._ids[parent] for parent in above],
                [search.position(node) - self._base - 2 for node in ready],
            )
            states |= dict(zip(ready, rows, strict=True))
            self._ids |= dict(zip(ready, ids, strict=True))
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
