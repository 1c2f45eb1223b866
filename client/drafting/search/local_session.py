"""One session of a whole model in this process: the same sweeps as a hop's, without a network."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm.inference.kv_cache import KvCache
from swarm.inference.ragged_batch import HeadOutput, RaggedModel, SessionRows
from swarm.protocol.messages import Sweep
from swarm.protocol.session import Limits, Parent, SessionState


class LocalSession:
    """A model's KV by the rules that hops keep.

    Attributes:
        model: the whole model.
        state: which tokens are committed, which nodes live.
        kv: their keys and values.
        rows: how many nodes it has run.
    """

    def __init__(self, model: RaggedModel, limits: Limits) -> None:
        self.model = model
        self.state = SessionState(limits)
        self.kv_cache = KvCache(model.layout, limits.window_tokens + limits.nodes)
        self.rows = 0

    def run(self, sweep: Sweep) -> torch.Tensor:
        """Apply a sweep. Returns the hidden rows [nodes, width] of its nodes."""
        work = self._work(sweep)
        return torch.empty(0) if work is None else self.model.forward([work])

    def score(self, sweep: Sweep, last: int) -> HeadOutput:
        """Apply a sweep. Returns logits [last, vocab_size] of its last nodes, and the hidden rows behind them."""
        work = self._work(sweep)
        assert work is not None
        return self.model.head_output(work, last)

    def _work(self, sweep: Sweep) -> SessionRows | None:
        applied = self.state.apply(sweep)
        if applied.truncated_to is not None:
            self.kv_cache.truncate(applied.truncated_to)
        if applied.path:
            self.kv_cache.commit(applied.path, applied.survivors)
        if not applied.appended:
            return None
        self.rows += len(sweep.tokens)
        ids = torch.tensor(sweep.tokens)
        return SessionRows(self.kv_cache, applied.appended, sweep.parents, applied.positions, ids, None)

    def next(
        self, tokens: Sequence[int], parents: Sequence[Parent], commit_to: Parent = None, truncate_to: int | None = None
    ) -> Sweep:
        """Make the next sweep; every earlier one counts as answered.

        Args:
            tokens: of new nodes.
            parents: of new nodes.
            commit_to: the live node that the sequence now goes to; None commits nothing.
            truncate_to: committed tokens to keep; None keeps all.
        """
        state = self.state
        kept = len(state.committed) if truncate_to is None else truncate_to
        return Sweep(
            sequence=state.sequence + 1,
            committed=kept + (len(state.path_to(commit_to)) if commit_to is not None else 0),
            first_id=state.next_id,
            tokens=tuple(tokens),
            parents=tuple(parents),
            picks_from=state.next_id,
            acked=state.sequence,
            truncate_to=truncate_to,
            commit_to=commit_to,
        )
