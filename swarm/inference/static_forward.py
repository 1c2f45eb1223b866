"""Forwards through fixed addresses, held as CUDA graphs: one launch per sweep (docs/design/kernels.md, "Graphs").

    batch ──▶ pieces that fit a bucket ──▶ plan, one copy ──▶ replay ──▶ a copy of the rows
                                                │
                 address table ◀── sessions     └── rows behind the batch's are nobody's: they store nothing

The model stays Hugging Face's: a graph records what `RaggedModel.run_layers` starts. Any topological cut of a batch
gives the same result (F3), so what does not fit is cut. Owns no session: a cache is known only while it lives.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from swarm.errors import LocalProtocolError
from swarm.inference.graphs.address_table import AddressTable
from swarm.inference.graphs.captures import GraphKey, SweepGraphs
from swarm.inference.graphs.compiled_layers import CompiledLayers
from swarm.inference.graphs.fixed_memory import FixedMemory, StaticLimits
from swarm.inference.ragged_batch import HeadOutput, SessionRows
from swarm.inference.tree_attention import ADDRESSES
from swarm.kernels.batch_plan import BatchPlan, PlannedSession, plan_batch
from swarm.kernels.support import on_device
from swarm.models.pretrained import first_line

if TYPE_CHECKING:
    from swarm.inference.ragged_batch import RaggedModel
    from swarm.layers import Span

logger = logging.getLogger(__name__)

HEAD_BUCKET = 128
"""The largest bucket of the head, whose output is large."""


@dataclass(frozen=True, slots=True)
class StaticOutput:
    """What a recorded call leaves where the next replay overwrites it.

    Attributes:
        values: [bucket, hidden_size], or the head's logits, float32 [bucket, vocab_size].
        entered: the head only: [bucket, width], the hidden rows that its matrix took, if it has one.
    """

    values: torch.Tensor
    entered: torch.Tensor | None = None


class StaticForward:
    """A model's forwards in buckets of rows. One thread at a time.

    Attributes:
        limits: what its memory was laid out for.
        buckets: numbers of rows that it runs, rising.
        head_buckets: those of the head.
        table: lines of the sessions that ran.
        layers: the model's, as they run.
        has_graphs: whether replays are recorded; on a CPU each starts its kernels one by one.
        prove_late: what is wrong with a graph that was recorded while sessions run; empty if nothing is.
    """

    def __init__(self, model: RaggedModel, limits: StaticLimits, *, backend: str | None = None) -> None:
        """Take the memory; nothing runs.

        Args:
            model: whose layers. Its attention modules get their lines of the address table.
            limits: of a batch.
            backend: torch's name of the compiler that the layers go through; None leaves them as they are.
        """
        from swarm.kernels.tree_attention import tile_rows  # registers the op; imports Triton

        self.limits = limits
        self.buckets = limits.buckets
        self.has_graphs = model.device.type == "cuda"
        self.prove_late: Callable[[GraphKey], str] = lambda _: ""
        self._model = model
        group = max(model.config.num_attention_heads // layer.kv_heads for layer in model.layout.layers)
        self._tile = tile_rows(group, model.dtype)
        self._memory = FixedMemory(model, limits, self._tile)
        self.table = AddressTable(model.layout, limits.sessions)
        for module, addresses in zip(model.attention, self.table.table, strict=True):
            module.register_buffer(ADDRESSES, addresses, persistent=False)
        self.layers = CompiledLayers((*model.layers, *_outer_norms(model)), backend)
        self._graphs: SweepGraphs[StaticOutput] = SweepGraphs(model.device)
        self.head_buckets = tuple(
            bucket for bucket in self.buckets if bucket <= max(self.buckets[0], min(HEAD_BUCKET, model.head_rows))
        )
        self._logits: torch.Tensor | None = None
        if model.span.end == model.num_layers:
            self._logits = torch.empty(self.head_buckets[-1], model.vocab_size, device=model.device)

    @torch.inference_mode()
    def record(self) -> None:
        """Record every bucket of the whole span, and the head's: the largest first, whose memory the others share.

        Raises:
            RuntimeError: one cannot be recorded, or whatever the model raises.
        """
        keys = [GraphKey(self._model.span, bucket) for bucket in self.buckets]
        if self._logits is not None:
            keys += [GraphKey(None, bucket) for bucket in self.head_buckets]
        self._graphs.kept = set(keys)
        for key in sorted(keys, key=lambda one: -one.bucket):
            self._put_nobody(key.bucket)
            self._graphs.record(key, partial(self._start, key))

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[SessionRows], sub: Span, *, at_least: int = 0, eager: bool = False
    ) -> torch.Tensor:
        """Run new nodes and keep their KV; a forward that fails leaves no node behind in any session.

        Args:
            batch: at most one entry per session; R rows in all.
            sub: the layers to run.
            at_least: rows of the smallest bucket to use, for the proof.
            eager: start the kernels one by one, for the proof.

        Returns:
            [R, hidden_size] in the compute dtype, before the final norm: the sessions' rows, one after the other.

        Raises:
            LocalProtocolError: a session has more tokens than there is memory for.
        """
        return self.forward_parts(batch, (sub,), at_least=at_least, eager=eager)[0]

    @torch.inference_mode()
    def forward_parts(
        self, batch: Sequence[SessionRows], parts: Sequence[Span], *, at_least: int = 0, eager: bool = False
    ) -> list[torch.Tensor]:
        """As `forward`, through parts of the layers, one after the other: the rows that leave each part."""
        outputs: list[list[torch.Tensor]] = [[] for _ in parts]
        appended: list[SessionRows] = []
        waiting = deque(_pieces(batch, self.buckets[-1], self.limits.sessions))
        try:
            while waiting:
                piece = waiting.popleft()
                rows = sum(len(work.node_ids) for work in piece)
                bucket = next(size for size in self.buckets if size >= max(rows, at_least))
                keys = [GraphKey(part, bucket) for part in parts]
                for key in keys:
                    self._record_late(key)
                plan = self._plan(piece, bucket, appended)
                if not self._memory.fits(plan):
                    if rows == 1:
                        raise LocalProtocolError(
                            "nodes", f"position {plan.positions[0]} exceeds what graphs have room for"
                        )
                    _withdraw(appended, len(piece))
                    waiting.extendleft(reversed(_pieces(piece, rows // 2, self.limits.sessions)))
                    continue
                self._put(piece, plan, keys[0])
                for place, key in enumerate(keys):
                    if place:
                        self._memory.put_rows(outputs[place - 1][-1], bucket)
                    output = self._start(key) if eager else self._graphs.run(key, partial(self._start, key))
                    outputs[place].append(output.values[:rows].clone())
        except BaseException:
            _withdraw(appended, len(appended))
            raise
        return [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in outputs]

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The head on rows [r, hidden_size] of the last layer: float32 [r, vocab_size]."""
        return self.head(rows).logits

    @torch.inference_mode()
    def head_output(self, work: SessionRows, last: int) -> HeadOutput:
        """Run new nodes through a whole model; what its head gives for the last ones."""
        return self.head(self.forward([work], self._model.span)[-last:])

    def head(self, rows: torch.Tensor, *, at_least: int = 0, eager: bool = False) -> HeadOutput:
        """The head in buckets.

        Args:
            rows: [r, hidden_size] of the last layer.
            at_least: as in `forward`.
            eager: likewise.
        """
        logits, entered = [], []
        for piece in torch.split(rows, self.head_buckets[-1]):
            bucket = next(size for size in self.head_buckets if size >= max(len(piece), at_least))
            key = GraphKey(None, bucket)
            self._record_late(key)
            self._memory.put_rows(piece, bucket)
            output = self._start(key) if eager else self._graphs.run(key, partial(self._start, key))
            logits.append(output.values[: len(piece)].clone())
            if output.entered is not None:
                entered.append(output.entered[: len(piece)].float())
        return HeadOutput(logits[0] if len(logits) == 1 else torch.cat(logits), torch.cat(entered) if entered else None)

    @torch.inference_mode()
    def replay(self, rows: int, *, head: bool = False) -> None:
        """Compute the last forward again: the same keys and values go to the same slots, while its sessions live.

        Args:
            rows: of that forward, no more than the largest bucket.
            head: the head's instead.
        """
        buckets = self.head_buckets if head else self.buckets
        key = GraphKey(None if head else self._model.span, next(bucket for bucket in buckets if bucket >= rows))
        self._graphs.run(key, partial(self._start, key))

    def close(self) -> None:
        """Give the graphs up; the model's own path needs nothing of this."""
        self._graphs.clear()
        self.prove_late = lambda _: ""  # which knows this object: nothing would free its memory at once

    def _start(self, key: GraphKey) -> StaticOutput:
        """Start a bucket's kernels one by one, on what lies in the fixed memory."""
        memory, bucket = self._memory, key.bucket
        with on_device(self._model.device), self.layers.in_place():
            if key.sub is None:
                return self._start_head(bucket)
            entering = memory.rows if key.sub.start else memory.token_ids
            hidden = self._model.run_layers(memory.step, key.sub, entering[:bucket], memory.positions[:bucket])
        return StaticOutput(hidden)

    def _start_head(self, bucket: int) -> StaticOutput:
        assert self._logits is not None, "this span has no head"
        with self._model.entering_head() as entered:
            logits = self._model.run_head(self._memory.rows[:bucket])
        values = self._logits[:bucket]
        values.copy_(logits)
        return StaticOutput(values, entered[0].flatten(0, -2) if entered else None)

    def _record_late(self, key: GraphKey) -> None:
        """Record what was not asked for before: parts of the span that sessions use (R12).

        What cannot be recorded, or fails its proof, runs the same kernels one by one.
        """
        if key in self._graphs:
            return
        self._put_nobody(key.bucket)
        try:
            self._graphs.record(key, partial(self._start, key))
            failure = self.prove_late(key)
        except Exception as error:  # noqa: BLE001 - such as no memory: the kernels are the same without a graph
            failure = first_line(error)
        if failure:
            logger.warning("layers %s: %d rows are not held as a graph: %s", key.sub, key.bucket, failure)
            self._graphs.do_without(key)

    def _put_nobody(self, bucket: int) -> None:
        empty = torch.zeros(0, dtype=torch.int64)
        self._memory.put(plan_batch([], bucket, self._tile), bucket, empty)
        self._memory.put_rows(self._memory.rows[:0], bucket)

    def _plan(self, piece: Sequence[SessionRows], bucket: int, appended: list[SessionRows]) -> BatchPlan:
        """Give a piece's nodes their slots, and lay it out."""
        together = [work.kv_cache for work in piece]
        planned = []
        for work in piece:
            slots = work.kv_cache.slots
            visible = slots.append(work.node_ids, work.parents, work.positions)
            appended.append(work)
            planned.append(PlannedSession(self.table.line(work.kv_cache, together), slots.committed, visible))
        return plan_batch(planned, bucket, self._tile)

    def _put(self, piece: Sequence[SessionRows], plan: BatchPlan, key: GraphKey) -> None:
        """Copy what a replay reads."""
        assert key.sub is not None
        if key.sub.start == 0:
            ids = [work.token_ids for work in piece if work.token_ids is not None]
            self._memory.put(plan, key.bucket, ids[0] if len(ids) == 1 else torch.cat(ids))
            return
        rows = [work.rows for work in piece if work.rows is not None]
        self._memory.put(plan, key.bucket)
        self._memory.put_rows(rows[0] if len(rows) == 1 else torch.cat(rows), key.bucket)


def _outer_norms(model: RaggedModel) -> list[nn.Module]:
    """Norms in front of the layers and behind them, as that of the head: torch cuts their sums by the rows."""
    inside = {id(part) for layer in model.layers for part in layer.modules()}
    parts = cast("nn.Module", model.model).modules()
    return [part for part in parts if "Norm" in type(part).__name__ and id(part) not in inside]


def _pieces(batch: Sequence[SessionRows], rows: int, sessions: int) -> list[list[SessionRows]]:
    """Cut a batch, in order, into pieces of so many rows and sessions at most."""
    pieces: list[list[SessionRows]] = [[]]
    room = rows
    for work in batch:
        start = 0
        while start < len(work.node_ids):
            if room == 0 or len(pieces[-1]) == sessions:
                pieces.append([])
                room = rows
            end = min(start + room, len(work.node_ids))
            pieces[-1].append(work if end - start == len(work.node_ids) else _part(work, start, end))
            room -= end - start
            start = end
    return pieces


def _part(work: SessionRows, start: int, end: int) -> SessionRows:
    """The nodes `[start, end)` of a session's new ones."""
    return replace(
        work,
        node_ids=work.node_ids[start:end],
        parents=work.parents[start:end],
        positions=work.positions[start:end],
        token_ids=None if work.token_ids is None else work.token_ids[start:end],
        rows=None if work.rows is None else work.rows[start:end],
    )


def _withdraw(appended: list[SessionRows], count: int) -> None:
    """Remove the nodes of the last `count` entries again."""
    for _ in range(count):
        work = appended.pop()
        work.kv_cache.withdraw(len(work.node_ids))
