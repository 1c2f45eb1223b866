"""New tree nodes of several sessions through one model in one forward. Owns no session, no network and no sampling.

    works ──▶ forward ──▶ hidden rows after the last layer used ──▶ logits (whoever has the head, for wanted rows only)

The model is Hugging Face's own class. Layers that a forward does not use are holes: they pass hidden states on, and
the last hole before the first layer used is where rows from the previous machine come in. The head runs as the same
model with every layer a hole, so norm, soft caps and scales are the class's own and happen exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from swarm.errors import UnsupportedModel
from swarm.inference.kv_cache import KvLayout
from swarm.inference.tree_attention import NAME, AttentionStep, SessionRange, use_canopy
from swarm.layers import Span
from swarm.models.families import max_positions
from swarm.models.whole_model import load_causal_lm

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from swarm.ids import TreeNodeId
    from swarm.inference.kv_cache import KvCache

LOGITS_BYTES = 64 << 20
"""How much memory the head's output may take at a time."""


@dataclass(frozen=True, slots=True)
class SessionRows:
    """One session's new nodes in a forward, in id order; a parent of None is the tip.

    ids: int64 [r], what the first layer's machine embeds. rows: [r, hidden_size], what every other machine gets.
    """

    arena: KvCache
    node_ids: Sequence[TreeNodeId]
    parents: Sequence[TreeNodeId | None]
    positions: Sequence[int]
    ids: torch.Tensor | None = None
    rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Logits [r, vocab_size] and the hidden rows [r, width] that the output matrix made them of, float32.

    rows: None where a model has no such matrix (`RaggedModel.output`).
    """

    logits: torch.Tensor
    rows: torch.Tensor | None


class PassThroughLayer(nn.Module):
    """Stands where a layer is not used: passes hidden states on, or lets `rows` [1, R, hidden_size] in."""

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
    """Name of the module list that holds the decoder layers: the outermost one of the right length."""
    count = model.config.num_hidden_layers
    lists: list[str] = [
        name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if not lists:
        raise UnsupportedModel(f"{model.config.model_type}: its list of {count} layers was not found")
    return min(lists, key=lambda name: name.count("."))


class RaggedModel:
    """A causal LM, or a span of one, that runs several sessions' nodes together. One thread at a time.

    forwards, rows_in: how many forwards ran, and how many rows they had in all.
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
        self._holes = [PassThroughLayer(layer) for layer in layers]
        self._arranged: tuple[int, int] | None = None
        self.layout = self._probe()

    @property
    def numeric_class(self) -> str:
        """What changes the last bits of a result: device kind and dtype."""
        return f"{self.device.type}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def head_rows(self) -> int:
        """How many rows of logits fit the head's memory bound; more rows are computed in several goes."""
        return max(1, LOGITS_BYTES // (4 * self.vocab_size))

    @torch.inference_mode()
    def forward(self, works: Sequence[SessionRows], sub: Span | None = None) -> torch.Tensor:
        """Run new nodes through the layers of `sub` (the whole span when None) and keep their KV.

        A forward that fails leaves no node behind in any session.

        Returns:
            [R, hidden_size] in the compute dtype, before the final norm: the rows of all works, one after the other.
        """
        sub = sub or self.span
        assert self.span.contains(sub)
        parts: list[SessionRange] = []
        try:
            for work in works:
                parts.append(_part(work, parts[-1].end if parts else 0))
            positions = torch.tensor([at for work in works for at in work.positions], device=self.device)
            enters_ids = sub.start == 0
            entering = torch.cat([work.ids if enters_ids else work.rows for work in works])  # type: ignore[misc]
            hidden = self._run(AttentionStep(tuple(parts)), sub, entering, positions)
        except BaseException:
            for part in parts:
                part.arena.withdraw(part.rows)
            raise
        self.forwards += 1
        self.rows_in += len(positions)
        return hidden

    @property
    def output(self) -> torch.Tensor | None:
        """The matrix [vocab_size, width] that makes logits of hidden rows, up to a scale; None if there is no such."""
        return None if self._head_matrix is None else self._head_matrix.weight.detach()

    @torch.inference_mode()
    def scores(self, work: SessionRows, last: int) -> HeadOutput:
        """Run new nodes through a whole model and keep their KV; what it says of the last nodes.

        One call of the model where memory allows, which for small models is faster than `forward` and `logits`.
        """
        assert len(self.span) == self.num_layers
        if self._head_matrix is None:
            return HeadOutput(self._scores(work, last), None)
        entered: list[torch.Tensor] = []
        enter = self._head_matrix.register_forward_pre_hook(lambda _head, inputs: entered.append(inputs[0]))
        try:
            logits = self._scores(work, last)
        finally:
            enter.remove()
        return HeadOutput(logits, torch.cat([rows.flatten(0, -2) for rows in entered])[-last:].float())

    def _scores(self, work: SessionRows, last: int) -> torch.Tensor:
        assert work.ids is not None
        if last > self.head_rows:
            return self.logits(self.forward([work])[-last:])
        positions = torch.tensor(work.positions, device=self.device)
        self.forwards += 1
        self.rows_in += len(positions)
        self._arrange(0, self.num_layers)
        inputs = self._inputs(work.ids, positions, AttentionStep((_part(work, 0),)))
        logits: torch.Tensor = self.model(**inputs, logits_to_keep=last).logits
        return logits[0].float()

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The head on some rows of the last layer: [r, hidden_size] to float32 [r, vocab_size].

        The caller bounds r; no more than `head_rows` are computed at a time.
        """
        assert self.span.end == self.num_layers
        self._arrange(self.num_layers, self.num_layers)
        pieces = [self._head(piece) for piece in torch.split(rows.to(self.device, self.dtype), self.head_rows)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _head(self, rows: torch.Tensor) -> torch.Tensor:
        door = self._holes[-1]
        door.rows = rows[None]
        positions = torch.zeros(len(rows), dtype=torch.long, device=self.device)
        try:
            logits: torch.Tensor = self.model(**self._inputs(None, positions, AttentionStep())).logits
        finally:
            door.rows = None
        return logits[0].float()

    def _run(self, step: AttentionStep, sub: Span, entering: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """entering: ids [R] when `sub` starts the model, else rows [R, hidden_size]."""
        self._arrange(sub.start, sub.end)
        left: list[torch.Tensor] = []
        leave = self._layers[sub.end - 1].register_forward_hook(lambda _layer, _inputs, output: left.append(output))
        door = self._holes[sub.start - 1] if sub.start else None
        if door is not None:
            door.rows = entering[None].to(self.device, self.dtype)
        try:
            self.model.base_model(**self._inputs(None if door else entering, positions, step))
        finally:
            leave.remove()
            if door is not None:
                door.rows = None
        if len(left) != 1 or not isinstance(left[0], torch.Tensor):
            raise UnsupportedModel(f"{self.config.model_type}: its layers do not return hidden states alone")
        return left[0][0]

    def _inputs(self, ids: torch.Tensor | None, positions: torch.Tensor, step: AttentionStep) -> dict[str, Any]:
        """Arguments of the model; embeddings of zeros stand in where rows enter further on."""
        inputs: dict[str, Any] = {"position_ids": positions[None], "use_cache": False, NAME: step}
        if ids is not None:
            return inputs | {"input_ids": ids[None].to(self.device)}
        width: int = cast("Any", self.model.get_input_embeddings()).embedding_dim
        return inputs | {"inputs_embeds": torch.zeros(1, len(positions), width, dtype=self.dtype, device=self.device)}

    def _arrange(self, start: int, end: int) -> None:
        """Put owned layers at `[start, end)` and holes everywhere else."""
        if self._arranged == (start, end):
            return
        for index, hole in enumerate(self._holes):
            self._layers[index] = self._owned[index] if start <= index < end else hole
        self._arranged = start, end

    @torch.inference_mode()
    def _probe(self) -> KvLayout:
        """Run one row to see what each layer keeps; nothing is kept."""
        step = AttentionStep()
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        row = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
        self._run(step, self.span, row if self.span.start else zero, zero)
        if [layer.index for layer in step.seen] != list(self._owned):
            raise UnsupportedModel(f"{self.config.model_type}: its layers do not each attend once with KV of their own")
        return KvLayout(tuple(step.seen), self.dtype, self.device)


def load_whole(model: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> RaggedModel:
    """Load a whole model (a draft) from a folder or the hub.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: Canopy cannot run it.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    whole = load_causal_lm(model, dtype, device, use_canopy)
    return RaggedModel(whole, Span(0, whole.config.num_hidden_layers))


def _part(work: SessionRows, start: int) -> SessionRange:
    """Give a work its slots, and its rows in the forward from `start` on."""
    slots = work.arena.slots
    # A chain into an empty session sees exactly the lower triangle.
    is_prefill = slots.used == 0 and [*work.parents] == [None, *work.node_ids[:-1]]
    visible = work.arena.append(work.node_ids, work.parents, work.positions)
    positions = torch.from_numpy(slots.positions)
    return SessionRange(work.arena, start, start + len(work.node_ids), visible, positions, is_prefill)
