"""What every replay reads and what its kernels write in passing, at addresses that never change.

    staged, pinned   [positions 2·B | token ids 2·B | plan words]   int32, written by the host
    device           the same                                       one copy, as long as the plan is
    rows             [B, hidden_size]                               where the layers begin elsewhere
    partial sums     float32                                        of the attention

B is the largest bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from swarm.inference.tree_attention import StaticStep
from swarm.kernels.batch_plan import part_count, plan_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarm.inference.ragged_batch import RaggedModel
    from swarm.kernels.batch_plan import BatchPlan

SHORT_TOKENS = 8_192
"""Every bucket has room for sessions of so many tokens; a batch of many rows of longer ones may have to be cut."""


@dataclass(frozen=True, slots=True)
class StaticLimits:
    """What fixed memory is laid out for.

    Attributes:
        max_tokens: of one session, live nodes included.
        sessions: that have a line of the address table at a time, and run together at most.
        buckets: numbers of rows that are run, rising; a batch is filled up to the next one.
    """

    max_tokens: int
    sessions: int
    buckets: tuple[int, ...]


class FixedMemory:
    """Inputs and scratch of all graphs of a model.

    Attributes:
        positions: int64 [B] on the device.
        token_ids: int64 [B] on the device.
        rows: [B, hidden_size] on the device, in the compute dtype.
        step: what travels through the model in place of an `AttentionStep`.
    """

    def __init__(self, model: RaggedModel, limits: StaticLimits, tile: int) -> None:
        """Take the memory.

        Args:
            model: whose forwards.
            limits: of a batch.
            tile: rows of a session that one work item of the attention takes.
        """
        most, short = limits.buckets[-1], min(limits.max_tokens, SHORT_TOKENS)
        rooms = [(limits.buckets[0], limits.max_tokens), *((bucket, short) for bucket in limits.buckets)]
        self._parts = max(part_count(*room) for room in rooms)
        words = max(plan_words(*room) for room in rooms)
        device, layers = model.device, model.layout.layers
        heads = model.config.num_attention_heads
        width = max(layer.value_width for layer in layers)
        self._device = torch.zeros(4 * most + words, dtype=torch.int32, device=device)
        self.positions = self._device[: 2 * most].view(torch.int64)
        self.token_ids = self._device[2 * most : 4 * most].view(torch.int64)
        self.rows = torch.zeros(most, model.hidden_size, dtype=model.dtype, device=device)
        self.step = StaticStep(
            plan=self._device[4 * most :],
            part_out=torch.empty(self._parts * heads * width, device=device),
            part_ml=torch.empty(self._parts * heads * 2, device=device),
            tile=tile,
        )
        self._staged = torch.zeros(4 * most + words, dtype=torch.int32, pin_memory=device.type == "cuda")
        staged: NDArray[np.int32] = self._staged.numpy()
        self._staged_positions = staged[: 2 * most].view(np.int64)
        self._staged_ids = staged[2 * most : 4 * most].view(np.int64)
        self._staged_words = staged[4 * most :]
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fits(self, plan: BatchPlan) -> bool:
        """Whether there is room for a plan and for the partial sums that it makes."""
        return len(plan.words) <= len(self._staged_words) and plan.parts <= self._parts

    def put(self, plan: BatchPlan, bucket: int, token_ids: torch.Tensor | None = None) -> None:
        """Copy a batch's plan to the device, and its token ids: one copy, which nothing waits for.

        Args:
            plan: of r rows.
            bucket: rows behind r are nobody's: at position 0, with token 0.
            token_ids: int64 [r]
        """
        if self._copied is not None:
            self._copied.synchronize()  # what was staged before has left
        _fill(self._staged_positions, plan.positions, bucket)
        if token_ids is not None:
            _fill(self._staged_ids, token_ids.cpu().numpy(), bucket)
        end = len(self._staged) - len(self._staged_words) + len(plan.words)
        self._staged_words[: len(plan.words)] = plan.words
        self._device[:end].copy_(self._staged[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))

    def put_rows(self, rows: torch.Tensor, bucket: int) -> None:
        """Copy hidden rows [r, hidden_size] to the device; those behind r become zeros."""
        self.rows[: len(rows)].copy_(rows, non_blocking=True)
        self.rows[len(rows) : bucket].zero_()


def _fill(into: NDArray[np.int64], values: NDArray[np.int64], bucket: int) -> None:
    into[: len(values)] = values
    into[len(values) : bucket] = 0
