"""New tree nodes of several sessions through one model in one forward. Owns no session, no network and no sampling.

    batch ──▶ forward ──▶ hidden rows after the last layer used ──▶ logits (at the tail, for rows that are asked for)

The model is Hugging Face's own class; `swarm.compute.layers.layered_model` runs its layers and its head.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from swarm.base.layers import Span
from swarm.compute.devices import numeric_class_of
from swarm.compute.kernels.support import kernel_support
from swarm.compute.layers.layered_model import LayeredModel
from swarm.compute.tree_attention import AttentionStep, SessionRange, use_canopy
from swarm.compute.weights.experts import PackedExperts
from swarm.compute.weights.stored_weight import StoredWeight
from swarm.files.families import max_positions
from swarm.files.whole_model import load_causal_lm
from swarm.protocol.numeric_class import with_rounding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from swarm.base.ids import TreeNodeId
    from swarm.compute.kv_cache import KvCache

MAX_LOGITS_BYTES = 64 << 20
"""Memory that the head's output may take at a time."""
APART = 0.01
"""How much a row may change with another one, as a part of the largest value: rounding, and no more."""
PLAIN_PATH = "plain"
"""`RaggedModel.path` without kernels."""


@dataclass(frozen=True, slots=True)
class SessionRows:
    """One session's r new nodes in a forward.

    Attributes:
        node_ids: [r] in id order.
        parents: [r] their parents; None is the tip.
        positions: [r] their positions.
        token_ids: int64 [r], on the machine with layer 0, which embeds them, and wherever the layers need them
            (`RaggedModel.needs_ids`); best on the CPU, whence they travel with the rest of a batch.
        rows: [r, hidden_size], on every other machine.
    """

    kv_cache: KvCache
    node_ids: Sequence[TreeNodeId]
    parents: Sequence[TreeNodeId | None]
    positions: Sequence[int]
    token_ids: torch.Tensor | None = None
    rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """What a model's head gives for r nodes.

    Attributes:
        logits: float32 [r, vocab_size]
        rows: float32 [r, width], the hidden rows that the output matrix made them of; None where a model has no such
            matrix (`RaggedModel.output`).
    """

    logits: torch.Tensor
    rows: torch.Tensor | None


class StaticPath(Protocol):
    """Another way through the same layers: `swarm.compute.static_forward`.

    Attributes:
        buckets: numbers of rows that it runs, rising; a forward of fewer rows costs what the next of these costs.
    """

    buckets: tuple[int, ...]

    def forward(self, batch: Sequence[SessionRows], sub: Span) -> torch.Tensor:
        """As `RaggedModel.forward`."""

    def forward_parts(self, batch: Sequence[SessionRows], parts: Sequence[Span]) -> list[torch.Tensor]:
        """As `RaggedModel.forward_parts`."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """As `RaggedModel.logits`."""

    def head_output(self, work: SessionRows, last: int) -> HeadOutput:
        """As `RaggedModel.head_output`."""

    def replay(self, rows: int, *, head: bool = False) -> None:
        """Compute the last forward of so many rows again, or the head's: for measuring the device alone."""

    def close(self) -> None:
        """Give its memory up."""


class RaggedModel(LayeredModel):
    """A causal LM, or a span of one, that runs several sessions' nodes together. One thread at a time.

    Attributes:
        max_positions: tokens of a session, None for no limit.
        rows_in: how many rows they had in all.
        packed_bytes: of the weights that are held as integers, when it was loaded.
        static: the fast path, where there is one (`swarm.compute.fast_path.use_static`).
        weight_bits: of a weight where weights are not of `dtype`: 16, 8 or 4; 0 where they are.
        stored_as: format of weights that are held as a quantised checkpoint has them; empty where none are.
        codes_version: of a CPU's products with the integers of that format; 0 where it has none.
        varies: why texts of a CPU that multiplies with integers are not promised; empty where they are.
        rounding: mark of the processor where the class leaves rounding to it (`swarm.compute.rounding`); else empty.
        kernel_version: of the kernels that all its forwards run (`swarm.compute.kernels.support`); 0 on the plain path.
        path: how its forwards run, in words for people: `plain`, `kernels` or `graphs + kernels`.
        path_reason: why they do not run a faster way; empty where there is none.
    """

    def __init__(self, model: PreTrainedModel, span: Span, *, examine: bool = True) -> None:
        """Find out what the layers keep.

        Args:
            examine: whether the model will serve sessions; else layers run one row once, and no state is looked into.
        """
        super().__init__(model, span, examine=examine)
        self.max_positions = max_positions(model.config)
        self.weight_bytes = sum(weight.numel() * weight.itemsize for weight in model.parameters())
        self.packed_bytes = sum(one.numel() * one.itemsize for one in model.parameters() if not one.is_floating_point())
        self.forwards = 0
        self.rows_in = 0
        head = cast("Any", model).get_output_embeddings()
        self._head_matrix = head if isinstance(head, nn.Linear) and head.weight.is_floating_point() else None
        self.weight_bits = 0
        self.stored_as = ""
        self.codes_version = 0
        self.varies = ""
        self.rounding = ""
        self.kernel_version = 0
        self.static: StaticPath | None = None
        self.path = PLAIN_PATH
        self.path_reason = kernel_support(self.device).reason

    @property
    def numeric_class(self) -> str:
        """What changes the last bits of a result (`swarm.protocol.numeric_class`)."""
        return str(numeric_class_of(self.device, self.dtype, self.weight_bits, self.kernel_version, self.stored_as))

    @property
    def signed_class(self) -> str:
        """The same with the processor's mark, as what it computes is signed."""
        return with_rounding(self.numeric_class, self.rounding)

    @property
    def reads_codes(self) -> bool:
        """Whether products read published weights as they are packed, and expand none of them."""
        roots: tuple[nn.Module, ...] = (self.model, *self.layers)
        return not any(isinstance(part, StoredWeight) for root in roots for part in root.modules())

    @property
    def has_host_experts(self) -> bool:
        """Whether the CPU computes a mixture's experts, wherever the other layers are."""
        return any(isinstance(part, PackedExperts) and part.is_on_host for part in self.model.modules())

    def use_plain(self, reason: str) -> None:
        """Run by the plain path from now on, and say why."""
        if self.static is not None:
            self.static.close()
        self.static, self.kernel_version = None, self.codes_version
        self.path, self.path_reason = PLAIN_PATH, reason

    @property
    def head_rows(self) -> int:
        """How many rows of logits fit the head's memory bound; more rows are computed piece by piece."""
        return max(1, MAX_LOGITS_BYTES // (4 * self.vocab_size))

    @torch.inference_mode()
    def forward(self, batch: Sequence[SessionRows], sub: Span | None = None) -> torch.Tensor:
        """Run new nodes and keep their KV. A forward that fails leaves no node behind in any session.

        Args:
            batch: at most one entry per session; R rows in all.
            sub: the layers to run, None for the whole span.

        Returns:
            [R, hidden_size] in the compute dtype, before the final norm: the sessions' rows, one after the other.
        """
        sub = sub or self.span
        assert self.span.contains(sub)
        static = self.static
        hidden = self.plain_forward(batch, sub) if static is None else static.forward(batch, sub)
        self.forwards += 1
        self.rows_in += len(hidden)
        return hidden

    @torch.inference_mode()
    def forward_parts(self, batch: Sequence[SessionRows], parts: Sequence[Span]) -> list[torch.Tensor]:
        """`forward` through parts of the layers, one after the other: the rows that leave each part, as `forward`'s.

        Args:
            batch: at most one entry per session; R rows in all.
            parts: each begins where the one before ends.
        """
        assert self.span.contains(Span(parts[0].start, parts[-1].end))
        static = self.static
        leaving = self.plain_parts(batch, parts) if static is None else static.forward_parts(batch, parts)
        self.forwards += 1
        self.rows_in += len(leaving[-1])
        return leaving

    @torch.inference_mode()
    def plain_forward(self, batch: Sequence[SessionRows], sub: Span) -> torch.Tensor:
        """`forward` by the plain path, whatever path there is: what others are compared with."""
        return self.plain_parts(batch, (sub,))[-1]

    @torch.inference_mode()
    def plain_parts(self, batch: Sequence[SessionRows], parts: Sequence[Span]) -> list[torch.Tensor]:
        """`forward_parts` by the plain path."""
        ranges: list[SessionRange] = []
        try:
            for work in batch:
                ranges.append(_append(work, ranges[-1].end if ranges else 0))
            positions = torch.tensor([at for work in batch for at in work.positions], device=self.device)
            embeds = parts[0].start == 0
            entering = torch.cat([work.token_ids if embeds else work.rows for work in batch])  # type: ignore[misc]
            ids = None
            if self.needs_ids and (not embeds or len(parts) > 1):
                ids = torch.cat([work.token_ids for work in batch])  # type: ignore[misc]
            return self.run_parts(AttentionStep(tuple(ranges), ids), parts, entering, positions)
        except BaseException:
            for each in ranges:
                each.kv_cache.withdraw(each.rows)
            raise

    @property
    def output(self) -> torch.Tensor | None:
        """The matrix [vocab_size, width] that makes logits of hidden rows, up to a scale; None if there is none."""
        return None if self._head_matrix is None else self._head_matrix.weight.detach()

    @torch.inference_mode()
    def head_output(self, work: SessionRows, last: int) -> HeadOutput:
        """Run new nodes through a whole model and keep their KV.

        One call of the model where memory allows, which for small models is faster than `forward` and `logits`.

        Args:
            work: the nodes, by token ids.
            last: of how many nodes, the last ones, the output is asked for.
        """
        assert len(self.span) == self.num_layers
        if self.static is not None:
            self.forwards += 1
            self.rows_in += len(work.node_ids)
            return self.static.head_output(work, last)
        if self._head_matrix is None:
            return HeadOutput(self._whole_logits(work, last), None)
        with self.entering_head() as entered:
            logits = self._whole_logits(work, last)
        return HeadOutput(logits, torch.cat([rows.flatten(0, -2) for rows in entered])[-last:].float())

    @contextmanager
    def entering_head(self) -> Iterator[list[torch.Tensor]]:
        """Within, note the hidden rows [1, r, width] that the output matrix makes logits of, call by call.

        Nothing is noted where a model has no such matrix (`output`).
        """
        entered: list[torch.Tensor] = []
        if self._head_matrix is None:
            yield entered
            return
        head = cast("nn.Module", cast("Any", self.model).get_output_embeddings())
        hook = head.register_forward_pre_hook(lambda _head, inputs: entered.append(inputs[0]))
        try:
            yield entered
        finally:
            hook.remove()

    def _whole_logits(self, work: SessionRows, last: int) -> torch.Tensor:
        """The logits of the last nodes, float32 [last, vocab_size]."""
        assert work.token_ids is not None
        is_cut = len(self.borders.starts) < self.num_layers  # whose class may leave rows out that it needs no more
        has_states = bool(self.layout.states)  # whose class may hand its layers other arguments than the model below it
        if last > self.head_rows or self.attends_itself or is_cut or has_states:
            return self.logits(self.forward([work])[-last:])
        positions = torch.tensor(work.positions, device=self.device)
        self.forwards += 1
        self.rows_in += len(positions)
        self._arrange(0, self.num_layers)
        inputs = self._inputs(positions, AttentionStep((_append(work, 0),)))
        ids = work.token_ids[None].to(self.device)
        logits: torch.Tensor = self.model(input_ids=ids, **inputs, logits_to_keep=last).logits
        return logits[0].float()

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The head on some rows of the last layer; no more than `head_rows` are computed at a time.

        Args:
            rows: [r, hidden_size]; the caller bounds r.

        Returns:
            float32 [r, vocab_size]
        """
        if self.static is not None:
            return self.static.logits(rows)
        pieces = [
            self.run_head(piece).float() for piece in torch.split(rows.to(self.device, self.dtype), self.head_rows)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def load_whole(model: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> RaggedModel:
    """Load a whole model (a draft) from a folder or the hub.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: Canopy cannot run it.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    whole = load_causal_lm(model, dtype, device, use_canopy)
    return RaggedModel(whole, Span(0, whole.config.num_hidden_layers))


def _append(work: SessionRows, start: int) -> SessionRange:
    """Give a session's nodes their slots, and its rows in the forward from `start` on."""
    slots = work.kv_cache.slots
    # A chain into an empty session sees exactly the lower triangle.
    is_prefill = slots.used == 0 and [*work.parents] == [None, *work.node_ids[:-1]]
    visible = work.kv_cache.append(work.node_ids, work.parents, work.positions)
    positions = torch.from_numpy(slots.positions)
    return SessionRange(work.kv_cache, start, start + len(work.node_ids), visible, positions, is_prefill)
