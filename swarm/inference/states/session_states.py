"""The states of one session on one machine, as tensors. `state_slots` says which entry is after which token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from swarm.inference.states.state_slots import StateSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

StateKey = tuple[Literal["conv", "recurrent", "linear"], int]
"""A state of a mixer: what its cache calls it, and its number."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state.

    Attributes:
        key: which.
        shape: for one sequence, without the batch.
        dtype: of it.
    """

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Memory for one."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MixerState:
    """What a mixer keeps of a text.

    Attributes:
        index: the layer's number in the whole model.
        name: of the mixer in its layer.
        parts: its tensors.
    """

    index: int
    name: str
    parts: tuple[StatePart, ...]

    @property
    def size_bytes(self) -> int:
        """Memory for one state."""
        return sum(part.size_bytes for part in self.parts)


class SessionStates:
    """States of one session in every mixer of a span, allocated at once.

    Attributes:
        slots: which entry is after which token.
    """

    def __init__(self, mixers: Sequence[MixerState], entries: int, device: torch.device) -> None:
        self.slots = StateSlots(entries)
        self._parts = {
            (mixer.index, mixer.name): [
                torch.empty(entries, *part.shape, dtype=part.dtype, device=device) for part in mixer.parts
            ]
            for mixer in mixers
        }

    def read(self, layer: int, name: str, entries: torch.Tensor) -> list[torch.Tensor]:
        """A mixer's states at some entries, copied: each [len(entries), *shape]."""
        return [part.index_select(0, entries) for part in self._parts[layer, name]]

    def write(self, layer: int, name: str, entries: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Keep a mixer's states, each [len(entries), *shape]."""
        for part, state in zip(self._parts[layer, name], states, strict=True):
            part.index_copy_(0, entries, state.to(part.dtype))
