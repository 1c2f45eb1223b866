"""The cache that a mixer sees in one call: the states before it, and afterwards those behind it."""

from __future__ import annotations

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from swarm.inference.states.session_states import StateKey


class MixerCache(Cache):
    """States of a batch of sequences in one mixer. A class may change the tensors in place.

    Attributes:
        states: by name, each [batch, …]; empty where the sequences begin.
    """

    def __init__(self, states: dict[StateKey, torch.Tensor] | None = None) -> None:
        super().__init__(layers=[])
        self.states = dict(states or {})

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last columns that a convolution saw; None where the sequences begin."""
        del layer_idx
        return self.states.get(("conv", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Keep the last columns, and give back all that a convolution must see: those before, and the new ones.

        Args:
            conv_states: [batch, …, n] new columns.
            layer_idx: not used.
            state_idx: which state.
            conv_kernel_size: columns to keep, where none are kept yet; None is n.
        """
        del layer_idx
        before = self.states.get(("conv", state_idx))
        if before is None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            seen = pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = before.shape[-1]
            seen = torch.cat([before, conv_states], dim=-1)
        self.states["conv", state_idx] = seen[..., seen.shape[-1] - width :].clone()
        return seen

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrent state; None where the sequences begin."""
        del layer_idx
        return self.states.get(("recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Keep a state [batch, …]."""
        del layer_idx
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The state under the name that one class has for it."""
        del layer_idx
        return self.states.get(("linear", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Keep a state [batch, …]."""
        del layer_idx
        self.states["linear", 0] = linear_cache

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a state, or this state."""
        del layer_idx
        return any(state_idx is None or number == state_idx for _, number in self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether states can be taken back by the class: never."""
        del layer_idx
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the class thinks are cached: none, positions are given."""
        del layer_idx
        return 0
