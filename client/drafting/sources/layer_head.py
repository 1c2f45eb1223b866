"""A head that is one decoder layer as a source: it attends to the text as far as its hidden rows came, and to its tree.

Tokens up to the one behind the newest row have entries from the target's own rows. Further ones, and the tree, go on
from the layers' own rows (`client.drafting.sources.layer_entries`).

The tail sends rows of a prompt's last tokens too, so the layer's text begins where those begin. Where a row is missing
it begins anew: of a prompt whose beginning the session held already, or where a node sends none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch

from client.drafting.heads.layer_head import LayerHead
from client.drafting.search.ranking import Ranker
from client.drafting.search.source import Places, Search, Source
from client.drafting.search.tree import Lesson, TokenTree
from client.drafting.sources.head_state import MAX_TOKENS_BEHIND
from client.drafting.sources.layer_entries import EntryState, LayerEntries
from swarm.protocol.limits import MAX_PROMPT_ROWS, PROMPT_ROWS_BYTES

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
