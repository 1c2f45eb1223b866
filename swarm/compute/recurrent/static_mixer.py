"""Mixers whose states kernels read and write at fixed places: a batch is one call of the class's forward.

The class is called for a batch of single tokens that go on from a state, as when it decodes. Of what it computes, two
things reach from token to token, and every class has them under the same names: its convolution's step and its
recurrence's. Where these are given a `StateHandle` in place of a state, kernels do them
(`swarm.compute.kernels.state_steps`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.nn.functional import silu
from transformers.cache_utils import Cache

from swarm.base.errors import UnsupportedModel
from swarm.compute.tree_attention import NAME

if TYPE_CHECKING:
    from torch import nn

    from swarm.compute.state_slots import StateKey, StatePart
    from swarm.compute.state_step import StateStep

STEPS: Final = ("causal_conv1d_update", "torch_recurrent_gated_delta_rule", "mamba2_selective_state_update")
"""What transformers calls the functions in which a state goes from token to token."""
OTHER_STEPS: Final = re.compile(r"conv1d_update$|^(?:torch_)?recurrent_|selective_state_update$")
"""How such functions are called, with others in which a class may differ."""
SILU: Final = ("silu", "swish")


@dataclass(frozen=True, slots=True, eq=False)
class StateHandle:
    """What a class gets in place of a state.

    Attributes:
        addresses: int64 [lines], of each session's states of this part.
        shape: of one state.
        like: an empty tensor of the states' type.
        step: the batch.
    """

    addresses: torch.Tensor
    shape: tuple[int, ...]
    like: torch.Tensor
    step: StateStep


class StaticStates(Cache):
    """The cache that a class gets: handles in place of states. What it computes is kept by the kernels."""

    def __init__(self, handles: Mapping[StateKey, StateHandle]) -> None:
        super().__init__(layers=[])
        self.handles = dict(handles)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> StateHandle:  # type: ignore[override]
        """The handle of a convolution's state."""
        del layer_idx
        return self.handles["conv", state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> StateHandle | None:  # type: ignore[override]
        """The handle of a recurrence's state."""
        del layer_idx
        return self.handles.get(("recurrent", state_idx))

    def update_recurrent_state(  # type: ignore[override]
        self, recurrent_states: object, layer_idx: int, state_idx: int = 0, **_: object
    ) -> object:
        """Nothing: see the class."""
        del layer_idx, state_idx
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a state: always, as a kernel says what is before a text."""
        del layer_idx, state_idx
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether states can be taken back by the class: never."""
        del layer_idx
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the class thinks are cached: none, positions are given."""
        del layer_idx
        return 0


class StaticMixer:
    """One mixer's call on fixed memory.

    Attributes:
        rows: int64 [lines], where each session keeps what the mixer is given.
    """

    def __init__(
        self,
        module: nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        rows: torch.Tensor,
        parts: Sequence[tuple[StatePart, torch.Tensor]],
    ) -> None:
        """Prepare it.

        Args:
            call: arguments of a call of the module.
            parts: of its state, and int64 [lines] where each session's are.

        Raises:
            UnsupportedModel: its class is none that kernels can run.
        """
        if lacks := lacks_steps(module):
            raise UnsupportedModel(lacks)
        if len(given := _tensors(*call)) != 1:
            raise UnsupportedModel(f"{type(module).__name__} is given {len(given)} tensors")
        use_kernel_steps(module)
        module.layer_idx = 0  # type: ignore[assignment]  # caches ignore it, and one program serves all layers
        self.rows = rows
        self._parts = [
            (part.key, where, part.shape, torch.empty(0, dtype=part.dtype, device=rows.device)) for part, where in parts
        ]

    def run(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], step: StateStep) -> Any:  # noqa: ANN401
        """The module's own result for rows [1, B, …]; the rows are kept beside the KV."""
        rows = _tensors(args, kwargs)[0][0]
        shape = rows.shape
        kept = torch.ops.canopy.store_state_rows(rows.flatten(1), self.rows, step.line, step.slot).view(shape)
        cache = StaticStates({key: StateHandle(where, size, like, step) for key, where, size, like in self._parts})
        args, kwargs = with_rows(args, kwargs, kept[:, None])
        args = tuple(cache if isinstance(one, Cache) else one for one in args)
        kwargs = {name: cache if isinstance(one, Cache) else one for name, one in kwargs.items() if name != NAME}
        return _turned(own(*args, **kwargs), shape[0])


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]


def with_rows(
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with other rows in place of its tensor."""
    return (
        tuple(rows if isinstance(one, torch.Tensor) else one for one in args),
        {name: rows if isinstance(one, torch.Tensor) else one for name, one in kwargs.items()},
    )


def _turned(output: Any, rows: int) -> Any:  # noqa: ANN401 - what a module returns
    """Rows of a batch [B, 1, …] as those of one sequence [1, B, …]."""
    if isinstance(output, torch.Tensor):
        return output.transpose(0, 1) if output.shape[:2] == (rows, 1) else output
    if isinstance(output, (tuple, list)):
        return tuple(_turned(one, rows) for one in output)
    return output


def lacks_steps(module: nn.Module) -> str:
    """Why kernels cannot run a mixer; empty where they can: its class has the functions that they stand in for."""
    known = {name for name in vars(sys.modules[type(module).__module__]) if OTHER_STEPS.search(name)}
    if STEPS[0] not in known or known.difference(STEPS):
        return f"{type(module).__name__} goes on from token to token in a way of its own"
    return ""


def use_kernel_steps(module: nn.Module) -> None:
    """Let the functions of a mixer's class take handles; what is given a state runs as before."""
    known = vars(sys.modules[type(module).__module__])
    kernels: tuple[Callable[..., Any], ...] = (_convolved, _delta, _scanned)
    for name, ours in zip(STEPS, kernels, strict=True):
        own = known.get(name)
        if own is not None and not hasattr(own, "takes_handles"):
            known[name] = _dispatching(own, ours, name)


def _dispatching(own: Callable[..., Any], ours: Callable[..., Any], name: str) -> Callable[..., Any]:
    places = {STEPS[0]: 1, STEPS[1]: None, STEPS[2]: 0}

    @wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the class's own signature
        at = places[name]
        state = kwargs.get("initial_state") if at is None else args[at]
        return ours(*args, **kwargs) if isinstance(state, StateHandle) else own(*args, **kwargs)

    step.takes_handles = True  # type: ignore[attr-defined]
    return step


def _convolved(
    hidden_states: torch.Tensor,
    conv_state: StateHandle,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """As transformers' `causal_conv1d_update`: [B, channels, 1]."""
    step, kept = conv_state.step, conv_state.shape[-1]
    x = hidden_states[:, :, 0].to(conv_state.like.dtype)
    given = conv_state.addresses, kept, step.line, step.base, step.keep, step.sources
    out: torch.Tensor = torch.ops.canopy.convolve_paths(x, weight, bias, *given)
    if activation is not None:
        out = silu(out) if activation in SILU else _activation(activation)(out)
    return out.to(hidden_states.dtype)[:, :, None]


def _delta(  # noqa: PLR0913 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: StateHandle,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """As transformers' `torch_recurrent_gated_delta_rule`, of one token each: [B, 1, heads, value]."""
    del output_final_state
    if not use_qk_l2norm_in_kernel or initial_state.like.dtype is not torch.float32:
        raise UnsupportedModel("this delta rule is not the one that kernels know")
    rows = query[:, 0], key[:, 0], value[:, 0], g[:, 0], beta[:, 0]
    return torch.ops.canopy.delta_paths(*rows, initial_state.addresses, *_of(initial_state.step))[:, None], None


def _scanned(  # noqa: PLR0913 - transformers' signature
    state: StateHandle,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """As transformers' `mamba2_selective_state_update`: [B, heads, width]; along a head, what is expanded is one."""
    if D is None or dt_bias is None or not dt_softplus:
        raise UnsupportedModel("this state space is not the one that kernels know")
    given = hidden_states, dt[:, :, 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0], state.like, state.addresses
    out: torch.Tensor = torch.ops.canopy.scan_paths(*given, *_of(state.step))
    return out if z is None else out * silu(z)


def _of(step: StateStep) -> tuple[torch.Tensor, ...]:
    return step.line, step.parent, step.base, step.keep, step.spill, step.segments, step.scratch


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    from transformers.activations import ACT2FN  # brings every model's base: a client without a draft needs none

    return cast("Callable[[torch.Tensor], torch.Tensor]", ACT2FN[name])
