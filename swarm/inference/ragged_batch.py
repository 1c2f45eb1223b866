"""New tree nodes of several sessions through one model in one forward. Owns no session, no network and no sampling.

    batch ──▶ forward ──▶ hidden rows after the last layer used ──▶ logits (at the tail, for rows that are asked for)

The model is Hugging Face's own class. Layers that a forward does not use are pass-through layers, and the last one
before the first layer used is where rows from the previous machine come in. The head runs as the same model with every
layer passing through, so norm, soft caps and scales are the class's own and happen exactly once.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from swarm.errors import UnsupportedModel
from swarm.inference.devices import numeric_class_of
from swarm.inference.kv_cache import KvLayout
from swarm.inference.tree_attention import NAME, AttentionStep, SessionRange, StaticStep, use_canopy
from swarm.kernels.support import kernel_support
from swarm.layers import Span
from swarm.models.families import max_positions
from swarm.models.whole_model import load_causal_lm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from swarm.ids import TreeNodeId
    from swarm.inference.kv_cache import KvCache

MAX_LOGITS_BYTES = 64 << 20
"""Memory that the head's output may take at a time."""
PLAIN_PATH = "plain"
"""`RaggedModel.path` without kernels."""


@dataclass(frozen=True, slots=True)
class SessionRows:
    """One session's r new nodes in a forward.

    Attributes:
        kv_cache: the session's.
        node_ids: [r] in id order.
        parents: [r] their parents; None is the tip.
        positions: [r] their positions.
        token_ids: int64 [r], on the machine with layer 0, which embeds them; best on the CPU, whence they travel with
            the rest of a batch.
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
    """Another way through the same layers: `swarm.inference.static_forward`.

    Attributes:
        buckets: numbers of rows that it runs, rising; a forward of fewer rows costs what the next of these costs.
    """

    buckets: tuple[int, ...]

    def forward(self, batch: Sequence[SessionRows], sub: Span) -> torch.Tensor:
        """As `RaggedModel.forward`."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """As `RaggedModel.logits`."""

    def head_output(self, work: SessionRows, last: int) -> HeadOutput:
        """As `RaggedModel.head_output`."""

    def replay(self, rows: int, *, head: bool = False) -> None:
        """Compute the last forward of so many rows again, or the head's: for measuring the device alone."""

    def close(self) -> None:
        """Give its memory up."""


class PassThroughLayer(nn.Module):
    """Stands where a layer is not used: passes hidden states on, or replaces them by `rows` [1, R, hidden_size]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.rows: torch.Tensor | None = None
        for name, value in vars(layer).items():  # model classes read some of these from their layers
            if name in {"attention_type", "layer_type", "is_sliding", "config"}:
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return what came in, or the rows from elsewhere."""
        return hidden_states if self.rows is None else self.rows


def find_layers(model: PreTrainedModel) -> str:
    """Name of the module list that holds the decoder layers: the outermost one of the right length.

    Raises:
        UnsupportedModel: there is none.
    """
    count = model.config.num_hidden_layers
    lists: list[str] = [
        name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if not lists:
        raise UnsupportedModel(f"{model.config.model_type}: its list of {count} layers was not found")
    return min(lists, key=lambda name: name.count("."))


class RaggedModel:
    """A causal LM, or a span of one, that runs several sessions' nodes together. One thread at a time.

    Attributes:
        model: Hugging Face's model; its list of layers changes with each forward.
        span: the layers that this machine has.
        config: the model's.
        num_layers: layers of the whole model.
        hidden_size: values of a hidden row.
        vocab_size: token ids are below it.
        max_positions: tokens of a session, None for no limit.
        dtype: of weights and hidden rows.
        device: where it runs.
        weight_bytes: memory of its parameters.
        forwards: how many forwards ran.
        rows_in: how many rows they had in all.
        layout: what its layers keep per token.
        attention: each layer's attention module, as in `layout`.
        static: the fast path, where there is one (`swarm.inference.fast_path.use_static`).
        weight_bits: of a weight where weights are not of `dtype`: 16, 8 or 4; 0 where they are.
        stored_as: format of weights that are held as a quantised checkpoint has them; empty where none are.
        kernel_version: of the kernels that all its forwards run (`swarm.kernels.support.KERNEL_VERSION`); 0 on the
            plain path.
        path: how its forwards run, in words for people: `plain`, `kernels` or `graphs + kernels`.
        path_reason: why they do not run a faster way; empty where there is none.
    """

    def __init__(self, model: PreTrainedModel, span: Span) -> None:
        assert not model.training
        self.model = model.requires_grad_(requires_grad=False)
        self.span = span
        self.config = model.config
        self.num_layers: int = model.config.num_hidden_layers
        self.hidden_size: int = model.config.hidden_size
        self.vocab_size: int = model.config.vocab_size
        self.max_positions = max_positions(model.config)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.weight_bytes = sum(weight.numel() * weight.itemsize for weight in model.parameters())
        self.forwards = 0
        self.rows_in = 0
        layers = model.get_submodule(find_layers(model))
        assert isinstance(layers, nn.ModuleList)
        self._layers = layers
        head = cast("Any", model).get_output_embeddings()
        self._head_matrix = head if isinstance(head, nn.Linear) and head.weight.is_floating_point() else None
        self._owned = {index: layers[index] for index in range(span.start, span.end)}
        self._pass_through = [PassThroughLayer(layer) for layer in layers]
        self._arranged: tuple[int, int] | None = None  # the layers `[start, end)` that are in place
        self.weight_bits = 0
        self.stored_as = ""
        self.kernel_version = 0
        self.static: StaticPath | None = None
        self.path = PLAIN_PATH
        self.path_reason = kernel_support(self.device).reason
        self.layout, self.attention = self._probe()

    @property
    def numeric_class(self) -> str:
        """What changes the last bits of a result (`swarm.protocol.numeric_class`)."""
        return str(numeric_class_of(self.device, self.dtype, self.weight_bits, self.kernel_version, self.stored_as))

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers that this machine has, in order."""
        return tuple(self._owned.values())

    def use_plain(self, reason: str) -> None:
        """Run by the plain path from now on, and say why."""
        if self.static is not None:
            self.static.close()
        self.static, self.kernel_version = None, 0
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
    def plain_forward(self, batch: Sequence[SessionRows], sub: Span) -> torch.Tensor:
        """`forward` by the plain path, whatever path there is: what others are compared with."""
        parts: list[SessionRange] = []
        try:
            for work in batch:
                parts.append(_append(work, parts[-1].end if parts else 0))
            positions = torch.tensor([at for work in batch for at in work.positions], device=self.device)
            embeds = sub.start == 0
            entering = torch.cat([work.token_ids if embeds else work.rows for work in batch])  # type: ignore[misc]
            return self.run_layers(AttentionStep(tuple(parts)), sub, entering, positions)
        except BaseException:
            for part in parts:
                part.kv_cache.withdraw(part.rows)
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
        if last > self.head_rows:
            return self.logits(self.forward([work])[-last:])
        positions = torch.tensor(work.positions, device=self.device)
        self.forwards += 1
        self.rows_in += len(positions)
        self._arrange(0, self.num_layers)
        inputs = self._inputs(work.token_ids, positions, AttentionStep((_append(work, 0),)))
        logits: torch.Tensor = self.model(**inputs, logits_to_keep=last).logits
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

    def run_head(self, rows: torch.Tensor) -> torch.Tensor:
        """The head alone, once.

        Args:
            rows: [r, hidden_size] of the last layer.

        Returns:
            [r, vocab_size] in the type that the model's class gives.
        """
        assert self.span.end == self.num_layers
        self._arrange(self.num_layers, self.num_layers)
        entry = self._pass_through[-1]
        entry.rows = rows[None]
        positions = torch.zeros(len(rows), dtype=torch.long, device=self.device)
        try:
            logits: torch.Tensor = self.model(**self._inputs(None, positions, AttentionStep())).logits
        finally:
            entry.rows = None
        return logits[0]

    def run_layers(
        self, step: AttentionStep | StaticStep, sub: Span, entering: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """One forward through the layers of `sub`.

        Args:
            step: whose rows.
            sub: the layers.
            entering: token ids [R] when `sub` starts the model, else rows [R, hidden_size].
            positions: [R]

        Returns:
            [R, hidden_size]
        """
        self._arrange(sub.start, sub.end)
        outputs: list[torch.Tensor] = []
        hook = self._layers[sub.end - 1].register_forward_hook(lambda _layer, _inputs, output: outputs.append(output))
        entry = self._pass_through[sub.start - 1] if sub.start else None
        if entry is not None:
            entry.rows = entering[None].to(self.device, self.dtype)
        try:
            self.model.base_model(**self._inputs(None if entry else entering, positions, step))
        finally:
            hook.remove()
            if entry is not None:
                entry.rows = None
        if len(outputs) != 1 or not isinstance(outputs[0], torch.Tensor):
            raise UnsupportedModel(f"{self.config.model_type}: its layers do not return hidden states alone")
        return outputs[0][0]

    def _inputs(
        self, ids: torch.Tensor | None, positions: torch.Tensor, step: AttentionStep | StaticStep
    ) -> dict[str, Any]:
        """Arguments of the model; embeddings of zeros stand in where rows enter further on."""
        inputs: dict[str, Any] = {"position_ids": positions[None], "use_cache": False, NAME: step}
        if ids is not None:
            return inputs | {"input_ids": ids[None].to(self.device)}
        width: int = cast("Any", self.model.get_input_embeddings()).embedding_dim
        return inputs | {"inputs_embeds": torch.zeros(1, len(positions), width, dtype=self.dtype, device=self.device)}

    def _arrange(self, start: int, end: int) -> None:
        """Put owned layers at `[start, end)` and pass-through layers everywhere else."""
        if self._arranged == (start, end):
            return
        for index, pass_through in enumerate(self._pass_through):
            self._layers[index] = self._owned[index] if start <= index < end else pass_through
        self._arranged = start, end

    @torch.inference_mode()
    def _probe(self) -> tuple[KvLayout, tuple[nn.Module, ...]]:
        """Run one row to see what each layer would keep of it, and which modules attend; no KV is stored."""
        step = AttentionStep()
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        row = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
        self.run_layers(step, self.span, row if self.span.start else zero, zero)
        if [layer.index for layer in step.seen] != list(self._owned):
            raise UnsupportedModel(f"{self.config.model_type}: its layers do not each attend once with KV of their own")
        return KvLayout(tuple(step.seen), self.dtype, self.device), tuple(step.modules)


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
