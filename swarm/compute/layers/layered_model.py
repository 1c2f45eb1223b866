"""A causal LM of which this machine runs some layers, one call of its class at a time. Knows no session's bookkeeping.

Layers that a call does not use are pass-through layers, and the last one before the first layer used is where rows
from the previous machine come in. The head runs as the same model with every layer passing through, so norm, soft caps
and scales are the class's own and happen exactly once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from swarm.base.errors import UnsupportedModel
from swarm.base.layers import Span, SpanBorders
from swarm.compute.class_attention import ClassCalls, taken_by
from swarm.compute.kv_cache import KvLayout
from swarm.compute.layers.pass_through import PassThroughLayer, as_rows, find_layers
from swarm.compute.recurrent.mixer import PROBE_ROWS, RecurrentMixer, examined, put_mixers, remove_mixers
from swarm.compute.step_cache import CacheUse, StepCache, cache_argument
from swarm.compute.tree_attention import NAME, OF_CLASS, AttentionStep, StaticStep
from swarm.files.families import AttentionBy, attention_by, compression_rates, keeps_states, needs_ids, span_starts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel


APART = 0.01
"""How much a row may change with another one, as a part of the largest value: rounding, and no more."""


class LayeredModel:
    """Some layers of Hugging Face's model, probed for what they keep. One thread at a time.

    Attributes:
        model: Hugging Face's model; its list of layers changes with each forward.
        span: the layers that this machine has.
        hidden_size: values of a hidden row between layers.
        vocab_size: token ids are below it.
        layout: what its layers keep per token.
        attention: each layer's attention module, as in `layout`; none where the class attends itself.
        mixers: what stands before its modules that keep a state.
        asks_length: whether layers ask their cache where their rows are.
        needs_ids: whether layers take what the tokens' ids give, wherever they are in the model.
        borders: where the model can be cut.
    """

    def __init__(self, model: PreTrainedModel, span: Span, *, examine: bool) -> None:
        """Find out what the layers keep.

        Args:
            examine: whether the model will serve sessions; else layers run one row once, and no state is looked into.
        """
        assert not model.training
        self.model = model.requires_grad_(requires_grad=False)
        self.span = span
        self.config = model.config
        self.num_layers: int = model.config.num_hidden_layers
        self.hidden_size = 0
        self.vocab_size: int = model.config.vocab_size
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        layers = model.get_submodule(find_layers(model))
        assert isinstance(layers, nn.ModuleList)
        self._layers = layers
        self._owned = {index: layers[index] for index in range(span.start, span.end)}
        self._pass_through = [PassThroughLayer(layer) for layer in layers]
        self._arranged: tuple[int, int] | None = None  # the layers `[start, end)` that are in place
        self._cache_argument = cache_argument(self.model.base_model)
        self._class_calls: ClassCalls | None = None
        self.asks_length = False
        self.mixers: tuple[RecurrentMixer, ...] = ()
        self.needs_ids = needs_ids(model.config)
        self.borders = SpanBorders(span_starts(model.config), self.num_layers)
        self.layout, self.attention = self._probe_ways(examine=examine)

    @property
    def attends_itself(self) -> bool:
        """Whether attention is computed by the model's class, not by our function."""
        return self._class_calls is not None

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers that this machine has, in order."""
        return tuple(self._owned.values())

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
            inputs = self._inputs(positions, AttentionStep()) | self._behind(1, len(rows))
            logits: torch.Tensor = self.model(**inputs).logits
        finally:
            entry.rows = None
        return logits[0]

    def run_layers(
        self,
        step: AttentionStep | StaticStep,
        sub: Span,
        entering: torch.Tensor,
        positions: torch.Tensor,
        use: CacheUse | None = None,
    ) -> torch.Tensor:
        """One forward through the layers of `sub`.

        Args:
            entering: token ids [R] when `sub` starts the model, else rows [R, hidden_size].
            positions: [R]
            use: takes notes of the cache, in a probing forward.

        Returns:
            [R, hidden_size]
        """
        if self._class_calls is not None:
            assert isinstance(step, AttentionStep)
            return self._class_calls.run(step, partial(self._through, sub), entering, positions)
        ids = step.ids[None] if isinstance(step, AttentionStep) and step.ids is not None else None
        return self._through(sub, entering[None], self._inputs(positions, step, use), ids)[0]

    def run_parts(
        self, step: AttentionStep, parts: Sequence[Span], entering: torch.Tensor, positions: torch.Tensor
    ) -> list[torch.Tensor]:
        """One forward through parts of the layers, one after the other: the rows that leave each, as `run_layers`'."""
        leaving: list[torch.Tensor] = []
        is_plain = self._class_calls is not None or len(parts) == 1
        arguments = None if is_plain else self._inputs(positions, step)
        ids = None if step.ids is None else step.ids[None]
        for part in parts:
            if arguments is None:
                entering = self.run_layers(step, part, entering, positions)
            else:  # the same ones for all parts: they have the plan by which mixers run these rows
                entering = self._through(part, entering[None], arguments, ids)[0]
            leaving.append(entering)
        return leaving

    def _through(
        self, sub: Span, entering: torch.Tensor, arguments: dict[str, Any], ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One call of the model's class, for the layers of `sub`.

        Args:
            entering: token ids [batch, rows] when `sub` starts the model, else rows [batch, rows, hidden_size].
            arguments: of the call, besides what enters.
            ids: token ids [batch, rows], where rows enter and the layers need them.

        Returns:
            [batch, rows, hidden_size]
        """
        self._arrange(sub.start, sub.end)
        outputs: list[Any] = []
        hook = self._layers[sub.end - 1].register_forward_hook(lambda _layer, _inputs, output: outputs.append(output))
        entry = self._pass_through[sub.start - 1] if sub.start else None
        if entry is not None:
            entry.rows = entering.to(self.device, self.dtype)
            arguments = arguments | self._behind(entering.shape[0], entering.shape[1], ids)
        else:
            arguments = arguments | {"input_ids": entering.to(self.device)}
        try:
            self.model.base_model(**arguments)
        finally:
            hook.remove()
            if entry is not None:
                entry.rows = None
        output = outputs[0] if len(outputs) == 1 else None
        if isinstance(output, tuple):
            self._return_tuples()
            output = output[0]
        if not isinstance(output, torch.Tensor):
            raise UnsupportedModel(f"{self.config.model_type}: its layers do not return hidden states alone")
        rows = as_rows(output, entering.shape[0], entering.shape[1])
        self.hidden_size = rows.shape[-1]
        return rows

    def _return_tuples(self) -> None:
        """Let pass-through layers return what the class's own return."""
        for pass_through in self._pass_through:
            pass_through.as_tuple = True

    def _behind(self, batch: int, rows: int, ids: torch.Tensor | None = None) -> dict[str, Any]:
        """What the class embeds where rows enter further on: zeros, or tokens where later layers need them."""
        if self.needs_ids:
            zeros = torch.zeros(batch, rows, dtype=torch.long, device=self.device)
            return {"input_ids": zeros if ids is None else ids.to(self.device)}
        width: int = cast("Any", self.model.get_input_embeddings()).embedding_dim
        return {"inputs_embeds": torch.zeros(batch, rows, width, dtype=self.dtype, device=self.device)}

    def _inputs(
        self, positions: torch.Tensor, step: AttentionStep | StaticStep, use: CacheUse | None = None
    ) -> dict[str, Any]:
        """Arguments of the model besides what enters; positions [R]."""
        inputs: dict[str, Any] = {"position_ids": positions[None], "use_cache": False, NAME: step}
        if self._class_calls is not None:
            return taken_by(self.model, inputs)
        if self._cache_argument is not None and (isinstance(step, AttentionStep) or step.states is not None):
            places = torch.arange(len(positions), device=positions.device)
            offsets = positions - places if self.asks_length else None
            inputs[self._cache_argument] = StepCache(step, self.num_layers, use, offsets)
        return inputs

    def _arrange(self, start: int, end: int) -> None:
        """Put owned layers at `[start, end)` and pass-through layers everywhere else."""
        if self._arranged == (start, end):
            return
        for index, pass_through in enumerate(self._pass_through):
            self._layers[index] = self._owned[index] if start <= index < end else pass_through
        self._arranged = start, end

    @torch.inference_mode()
    def _probe_ways(self, *, examine: bool) -> tuple[KvLayout, tuple[nn.Module, ...]]:
        """Probe with our attention function, or with the class's own where it takes no other."""
        by, own = attention_by(self.config), self.config._attn_implementation
        failures: list[Exception] = []
        for way in (by,) if by is not AttentionBy.INTERFACE or keeps_states(self.config) else (by, AttentionBy.MASKED):
            if way is not AttentionBy.INTERFACE:
                self._attend_by(OF_CLASS)
                self._class_calls = ClassCalls(way, self.model, self.device, self.dtype, compression_rates(self.config))
            for as_tuples in (False, True):
                if as_tuples:
                    self._return_tuples()
                try:
                    if self._class_calls is not None:
                        return self._probe_class(self._class_calls)
                    return self._probe(examine=examine)
                except Exception as failure:  # noqa: BLE001 - any class may raise anything, and another way be its own
                    failures.append(failure)
            for pass_through in self._pass_through:
                pass_through.as_tuple = False
        self._attend_by(own)  # which layers have, whoever takes them over
        raise failures[0]

    def _attend_by(self, implementation: str | None) -> None:
        """Tell the class and its layers who attends: layers that were read one by one have configs of their own."""
        configs = {id(config): config for part in self.model.modules() if (config := getattr(part, "config", None))}
        for config in (self.config, *configs.values()):
            config._attn_implementation = implementation

    def _probe_class(self, calls: ClassCalls) -> tuple[KvLayout, tuple[nn.Module, ...]]:
        """As `_probe`, where the class attends itself."""
        call, probe = calls.probe()
        entering = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        if self.span.start:
            entering = torch.zeros(1, 1, self.hidden_size, dtype=self.dtype, device=self.device)
        self._through(self.span, entering, calls.arguments(call, torch.zeros(1, 1, dtype=torch.long)))
        if [layer.index for layer in probe.seen] != list(self._owned):
            raise UnsupportedModel(f"{self.config.model_type}: its layers do not each keep KV of their own")
        return KvLayout(tuple(probe.seen), self.dtype, self.device, tuple(probe.rows)), ()

    @torch.inference_mode()
    def _probe(self, *, examine: bool) -> tuple[KvLayout, tuple[nn.Module, ...]]:
        """Run a few rows to see what each layer would keep of them, and which modules attend; no KV is stored."""
        remove_mixers(self.layers)
        step, use = self._watch_one_row()
        attending = [layer.index for layer in step.seen]
        if attending != sorted(set(attending)):
            raise UnsupportedModel(f"{self.config.model_type}: its layers do not each attend once with KV of their own")
        kept = KvLayout(tuple(step.seen), self.dtype, self.device, tuple(use.rows))
        if (attending == list(self._owned) and not keeps_states(self.config)) or not examine:
            return kept, tuple(step.modules)
        self.mixers = tuple(put_mixers(self._owned, use.mixers, step.modules))
        self._check_rows_apart()
        rows, states = examined(self.mixers)
        return replace(kept, rows=kept.rows + rows, states=states), tuple(step.modules)

    def _watch_one_row(self) -> tuple[AttentionStep, CacheUse]:
        """Run one row with a cache; without one, where the class asks too much of it or does not need it."""
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        row = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
        entering = row if self.span.start else zero
        step, use = AttentionStep(), CacheUse()
        self._cache_argument = cache_argument(self.model.base_model)
        try:
            with use.watching(self.layers):
                self.run_layers(step, self.span, entering, zero, use)
        except UnsupportedModel:
            raise
        except Exception:
            if self._cache_argument is None:
                raise
            self._cache_argument = None
            step, use = AttentionStep(), CacheUse()
            self.run_layers(step, self.span, entering, zero)
        self.asks_length = use.asks_length
        if not use.is_needed:
            self._cache_argument = None
        return step, use

    def _check_rows_apart(self) -> None:
        """Run mixers once, and check that rows reach each other only by attention and mixers: both are idle then.

        In coarser types than float32 nothing is checked: rounding, by which a router may choose another expert, is all
        that a family differs by which ran in float32 (`node.model.family_check`).

        Raises:
            UnsupportedModel: a row changes when another one does.
        """
        positions = torch.arange(PROBE_ROWS, device=self.device)
        random = torch.Generator().manual_seed(0)
        rows = torch.randn(PROBE_ROWS, self.hidden_size, generator=random).to(self.device, self.dtype)
        entering = rows if self.span.start else positions % self.vocab_size
        one = self.run_layers(AttentionStep(), self.span, entering, positions)
        if self.dtype.itemsize < torch.float32.itemsize:
            return
        other = entering.clone()
        other[0] = entering[-1]
        two = self.run_layers(AttentionStep(), self.span, other, positions)
        if not float((one - two)[1:].abs().max()) <= APART * float(one.abs().max()):
            reason = "a layer's rows reach each other by a way of its own"
            raise UnsupportedModel(f"{self.config.model_type}: {reason}, not by AttentionInterface or its cache")
