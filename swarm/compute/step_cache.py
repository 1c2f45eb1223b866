"""The cache that a model's class sees in a forward: it keeps nothing itself and sends each call to whom it concerns.

    update          keys and values come back as they are: the attention function stores them
    update_indexer  rows of an indexer go to the sessions' KV caches, beside keys and values
    linear states   are an error here: a mixer runs with a cache of its own (`swarm.compute.recurrent`)

In a probing forward it notes which module called what. Classes whose layers only attend get no cache at all.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from swarm.base.errors import UnsupportedModel
from swarm.compute.kv_cache import LayerRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from swarm.compute.tree_attention import AttentionStep, SessionRange, StaticStep

ARGUMENTS = ("past_key_values", "cache_params")
"""What model classes call the cache."""
INDEXER = "indexer"
"""Name of an indexer's rows in a KV cache."""


@dataclass(slots=True)
class CacheUse:
    """What the layers did with the cache in a probing forward.

    Attributes:
        rows: what they want kept per token beside keys and values.
        mixers: the modules that keep a state, and the layer of each.
        active: the modules whose forward runs now, the innermost last.
        asks_length: whether a layer asks how many tokens are cached, to learn its rows' positions.
    """

    rows: list[LayerRows] = field(default_factory=list)
    mixers: dict[nn.Module, int] = field(default_factory=dict)
    active: list[nn.Module] = field(default_factory=list)
    asks_length: bool = False

    @property
    def is_needed(self) -> bool:
        """Whether the model's class cannot do without a cache."""
        return bool(self.rows or self.mixers or self.asks_length)

    @contextmanager
    def watching(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        """Within, know which of these parts, and of the parts in them, run."""
        hooks = []
        for module in {module: None for part in parts for module in part.modules()}:
            hooks.append(module.register_forward_pre_hook(lambda ran, _: self.active.append(ran)))
            hooks.append(module.register_forward_hook(lambda *_: self._leave()))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.active.clear()

    def _leave(self) -> None:
        self.active.pop()


class StepCache(Cache):
    """One forward's cache.

    Attributes:
        use: what a probing forward notes; None in every other one.
        layers: one per layer of the whole model, always empty of keys.
        plan: in which order mixers run the rows: made by the first one that runs (`swarm.compute.recurrent.plan`).
        offsets: int64 [R], for layers that add it to a row's place in the forward to get its position; None if none do.
    """

    def __init__(
        self,
        step: AttentionStep | StaticStep,
        num_layers: int,
        use: CacheUse | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(num_layers)])  # type: ignore[no-untyped-call]
        self.step = step
        self.use = use
        self.plan: Any = None
        self.offsets = offsets

    @property
    def parts(self) -> Sequence[SessionRange]:
        """The rows of each session, on the plain path; empty in a probing forward."""
        return cast("AttentionStep", self.step).parts

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give keys and values back: what is cached of them is stored by the attention function."""
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store rows [1, R, width] of an indexer, session by session, and give them back."""
        rows = indexer_key_states[0].flatten(1)
        if self.use is not None:
            self.use.rows.append(LayerRows(layer_idx, INDEXER, rows.shape[1], rows.dtype))
        for part in self.parts:
            part.kv_cache.store_rows(layer_idx, INDEXER, part.used - part.rows, rows[part.start : part.end])
        return indexer_key_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """No state: see `_linear`."""
        del state_idx
        self._linear(layer_idx)
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """No state: see `_linear`."""
        del state_idx
        self._linear(layer_idx)
        return None

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """No state, under the name that one class has for it: see `_linear`."""
        self._linear(layer_idx)
        return None

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Note who keeps a state: see `_linear`."""
        del linear_cache
        self._linear(layer_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Give the rows back: see `_linear`."""
        del state_idx
        self._linear(layer_idx)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Give the state back: see `_linear`."""
        del state_idx
        self._linear(layer_idx)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a state exists: never."""
        del layer_idx, state_idx
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether states can be taken back by the class: never."""
        del layer_idx
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:  # type: ignore[override]
        """Tokens that the class thinks are cached: none, since positions are given; or those before each row."""
        del layer_idx
        if self.use is not None and self.use.active:
            self.use.asks_length = True
        return 0 if self.offsets is None else self.offsets

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As for an empty cache: masks are the attention function's."""
        del layer_idx
        return query_length, 0

    def _linear(self, layer_idx: int) -> None:
        """In a probing forward, note the innermost running module as a mixer.

        Raises:
            UnsupportedModel: this is no probing forward, so the call comes from a module that was never seen.
        """
        if self.use is None or not self.use.active:
            raise UnsupportedModel(f"layer {layer_idx} keeps a state that was not found when the model was loaded")
        self.use.mixers[self.use.active[-1]] = layer_idx


def cache_argument(model: Any) -> str | None:  # noqa: ANN401 - any class's base model
    """What a model's class calls the cache among the arguments of its forward; None if it takes none."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ARGUMENTS if name in taken), None)
