"""A mixer (a module that keeps a state, not keys and values) that runs the trees of several sessions.

It stands where the module's forward is and calls that forward, the class's own, with a cache that holds the states
which each row starts from (`plan`). What the module is given per token is kept beside the KV: states are made of it
again where they are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from swarm.base.errors import UnsupportedModel
from swarm.compute.kv_cache import LayerRows
from swarm.compute.recurrent.plan import make_plan
from swarm.compute.recurrent.static_mixer import with_rows
from swarm.compute.state_slots import MixerState, StateKey, StatePart
from swarm.compute.step_cache import StepCache
from swarm.compute.tree_attention import NAME, StaticStep

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swarm.compute.kv_cache import KvCache
    from swarm.compute.recurrent.plan import MixerRun, StepPlan
    from swarm.compute.recurrent.static_mixer import StaticMixer


LINEAR = {"Linear", "PackedLinear", "Conv1D"}
"""Classes that treat each row alone, whatever stands beside it."""


PROBE_ROWS = 7
"""Rows of the forward in which a mixer is examined."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""How far a sequence may differ from the same rows one by one, as a part of the largest value: rounding, but no state
that is left out. Families prove that they are exact elsewhere (`node.model.family_check`)."""
COARSE_TOLERANCE = 0.2
"""The same in other types."""


@dataclass(frozen=True, slots=True)
class Projections:
    """Linear layers at a mixer's ends.

    Attributes:
        entering: each with the place of the rows that it reads among those that the mixer is given.
        leaving: the one whose result the mixer returns; None where there is none.
    """

    entering: tuple[tuple[nn.Module, int], ...] = ()
    leaving: nn.Module | None = None

    def project(self, inputs: Sequence[torch.Tensor]) -> dict[nn.Module, torch.Tensor]:
        """What the entering layers make of all rows.

        Args:
            inputs: rows that the mixer is given, each [n, …].
        """
        return {module: module(inputs[place][None])[0] for module, place in self.entering}

    @contextmanager
    def replaced(self, projected: Mapping[nn.Module, torch.Tensor], run: MixerRun) -> Iterator[None]:
        """Within, entering layers return the rows of one call that were made before, and the leaving one what it is
        given.
        """
        forwards: dict[nn.Module, Callable[..., torch.Tensor]] = {}
        for module, rows in projected.items():
            chosen = rows.index_select(0, run.rows)
            forwards[module] = _returning(chosen[None] if run.is_sequence else chosen[:, None])
        if self.leaving is not None:
            forwards[self.leaving] = _unchanged
        with _forwards(forwards):
            yield


class ProjectionWatch:
    """Sees which linear layers stand at a mixer's ends, in one call of it."""

    def __init__(self, module: nn.Module) -> None:
        self._linear = [part for part in module.modules() if type(part).__name__ in LINEAR]
        self._calls: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, note what linear layers read and return."""

        def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
            self._calls.append((module, inputs[0], output))

        hooks = [part.register_forward_hook(note) for part in self._linear]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def found(self, given: Sequence[torch.Tensor], returned: Sequence[torch.Tensor]) -> Projections:
        """The layers at the ends of the call that was watched.

        Args:
            given: the rows that the mixer was given.
        """
        calls = [module for module, _, _ in self._calls]
        once = [call for call in self._calls if calls.count(call[0]) == 1]
        entering = tuple(
            (module, place) for module, read, _ in once for place, rows in enumerate(given) if read is rows
        )
        leaving = [module for module, _, made in once if len(returned) == 1 and made is returned[0]]
        ends = {module for module, _ in entering}
        return Projections(entering, leaving[0] if leaving and leaving[0] not in ends else None)


@contextmanager
def _forwards(forwards: Mapping[nn.Module, Callable[..., torch.Tensor]]) -> Iterator[None]:
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward
            else:
                module.forward = own


def _returning(rows: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda *_, **__: rows


def _unchanged(rows: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return rows


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


@dataclass(frozen=True, slots=True)
class MixerFacts:
    """What an examination found.

    Attributes:
        state: what is kept of a text.
        rows: what the module is given per token.
        given: which of the tensors it is given these are, by their order in the call.
        returned: which of the tensors it returns are rows, by their order.
        in_sequences: whether a sequence may go on from a state.
        projections: linear layers that run once for all rows.
    """

    state: MixerState
    rows: tuple[LayerRows, ...]
    given: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    returned: tuple[int, ...]
    in_sequences: bool
    projections: Projections


class RecurrentMixer:
    """Takes the place of a module's forward.

    Attributes:
        facts: what was found when it was examined; None before.
        in_sequences: whether long chains run as sequences; all mixers of a model must have it alike.
        call: arguments of a probing call.
        static: how it runs by kernels; None before it is made ready for them.
    """

    def __init__(self, module: nn.Module, layer: int, name: str) -> None:
        """Stand before a module.

        Args:
            layer: its layer's number in the whole model.
        """
        self.facts: MixerFacts | None = None
        self.in_sequences = False
        self.static: StaticMixer | None = None
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._own: Callable[..., Any] = module.forward
        self._module = module
        self._layer = layer
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the module's own
        """Run the rows of a step: the signature is the module's."""
        step_cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, StepCache)), None)
        if step_cache is None:  # within another mixer, or alone
            return self._own(*args, **kwargs)
        if isinstance(step_cache.step, StaticStep):
            return self._run_static(args, kwargs, step_cache.step)
        call = _Call(self._own, args, kwargs)
        if not step_cache.parts:
            self.call = args, kwargs
            self.facts = self.facts or self._examine(call)
            return _changed(call.run(call.tensors, MixerCache()), torch.zeros_like)
        return self._run(call, step_cache)

    @property
    def module(self) -> nn.Module:
        """Before whose forward it stands."""
        return self._module

    @property
    def place(self) -> tuple[int, str]:
        """Its layer's number in the whole model, and its name there."""
        return self._layer, self._name

    def run_again(self, kv_cache: KvCache, slots: torch.Tensor, bucket: int, step: StaticStep) -> None:
        """Make a session's states again by kernels, from what the module was given for tokens at slots, int64 [n].

        Args:
            bucket: rows of the call; those behind n are nobody's.
        """
        assert self.facts is not None
        rows, shape = self.facts.rows[0], self.facts.shapes[0]
        kept = kv_cache.view_rows(self._layer, rows.name, kv_cache.slots.used).index_select(0, slots)
        given = kept.new_zeros(1, bucket, *shape)
        given[0, : len(slots)] = kept.view(-1, *shape)
        args, kwargs = with_rows(*self.call, given)
        cache = StepCache(step, 0)
        args = tuple(cache if isinstance(one, StepCache) else one for one in args)
        self._module(*args, **{name: cache if isinstance(one, StepCache) else one for name, one in kwargs.items()})

    def _run_static(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: StaticStep) -> Any:  # noqa: ANN401
        if self.static is None or step.states is None:
            raise UnsupportedModel(f"layer {self._layer}: {self._name} was not made ready for kernels")
        return self.static.run(self._own, args, kwargs, step.states)

    def _run(self, call: _Call, step_cache: StepCache) -> Any:  # noqa: ANN401
        facts = self.facts
        if facts is None or max(facts.given) >= len(call.tensors):
            raise UnsupportedModel(f"layer {self._layer}: {self._name} is not called as it was when it was loaded")
        given = [call.tensors[at] for at in facts.given]
        for part in step_cache.parts:
            start = part.used - part.rows
            for rows, tensor in zip(facts.rows, given, strict=True):
                new = tensor[0, part.start : part.end].reshape(part.rows, -1)
                part.kv_cache.store_rows(self._layer, rows.name, start, new)
        plan = _plan_of(step_cache, given[0].device, in_sequences=self.in_sequences)
        inputs = [self._with_rows_again(plan, at, tensor) for at, tensor in enumerate(given)]
        keys = [part.key for part in facts.state.parts]
        before = self._bases(plan, keys)
        has_one_call = len(plan.rounds) == 1 and len(plan.rounds[0].runs) == 1
        ends = Projections() if has_one_call else facts.projections
        projected = ends.project(inputs)
        collected = _Collected(plan.new_rows, facts.returned)
        for turn in plan.rounds:
            behind: list[list[torch.Tensor]] = []
            for run in turn.runs:
                cache = MixerCache(_at(keys, before, run))
                with ends.replaced(projected, run):
                    collected.add(call.run(self._tensors(call, inputs, run), cache), run)
                behind.append([cache.states[key] for key in keys])
            before = behind[0] if len(behind) == 1 else [torch.cat(states) for states in zip(*behind, strict=True)]
            for kept in turn.keeping:
                chosen = [state.index_select(0, kept.places) for state in before]
                kept.states.write(self._layer, self._name, kept.entries, chosen)
        return collected.finished(ends.leaving)

    def _with_rows_again(self, plan: StepPlan, at: int, tensor: torch.Tensor) -> torch.Tensor:
        """New rows, and behind them those that are run again: [R + again, …]."""
        assert self.facts is not None
        rows, shape = self.facts.rows[at], self.facts.shapes[at]
        pieces = [tensor[0]]
        for kv_cache, slots in plan.again:
            kept = kv_cache.view_rows(self._layer, rows.name, kv_cache.slots.used)
            pieces.append(kept.index_select(0, slots).reshape(-1, *shape))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _bases(self, plan: StepPlan, keys: Sequence[StateKey]) -> list[torch.Tensor]:
        read = [states.read(self._layer, self._name, entries) for states, entries in plan.bases]
        return [torch.cat([states[at] for states in read]) for at in range(len(keys))] if read else []

    def _tensors(self, call: _Call, inputs: Sequence[torch.Tensor], run: MixerRun) -> list[torch.Tensor]:
        """What one call is given: as a batch of steps [n, 1, …] or as one sequence [1, n, …]."""
        assert self.facts is not None
        tensors = list(call.tensors)
        for at, rows in zip(self.facts.given, inputs, strict=True):
            chosen = rows.index_select(0, run.rows)
            tensors[at] = chosen[None] if run.is_sequence else chosen[:, None]
        return tensors

    def _examine(self, call: _Call) -> MixerFacts:
        """Run random rows as a sequence, in two sequences and one by one; all must give the same.

        Raises:
            UnsupportedModel: they do not, so that a state does not stand for the text before it.
        """
        given = tuple(
            at for at, tensor in enumerate(call.tensors) if tensor.ndim > 1 and tensor.shape[:2] == (1, PROBE_ROWS)
        )
        tensors = list(call.tensors)
        random = torch.Generator().manual_seed(0)
        for at in given:
            if tensors[at].is_floating_point():
                values = torch.randn(tensors[at].shape, generator=random)
                tensors[at] = values.to(tensors[at].device, tensors[at].dtype)

        watch = ProjectionWatch(self._module)
        with watch.watching():
            output = _tensors_in(call.run(tensors, MixerCache()))
        returned = [at for at, tensor in enumerate(output) if tensor.shape[:2] == (1, PROBE_ROWS)]
        projections = watch.found([tensors[at] for at in given], [output[at] for at in returned])
        if not given or not returned:
            raise UnsupportedModel(f"layer {self._layer}: {self._name} is given no rows, or returns none")

        def run(start: int, end: int, cache: MixerCache, batch: int = 1) -> torch.Tensor:
            some = list(tensors)
            for at in given:
                rows = tensors[at][:, start:end]
                some[at] = rows.expand(batch, *rows.shape[1:])
            cache.states = {
                key: state[:1].expand(batch, *state.shape[1:]).clone() for key, state in cache.states.items()
            }
            output = _tensors_in(call.run(some, cache))
            if any(len(state) != batch for state in cache.states.values()):
                raise UnsupportedModel(f"layer {self._layer}: the state of {self._name} is not one per sequence")
            return torch.cat([output[at][-1].reshape(end - start, -1).float() for at in returned], dim=-1)

        whole = MixerCache()
        wanted = run(0, PROBE_ROWS, whole)
        bound = float(wanted.abs().max()) * TOLERANCE.get(tensors[given[0]].dtype, COARSE_TOLERANCE)
        steps = MixerCache()
        one_by_one = torch.cat([run(row, row + 1, steps, 1 + row) for row in range(PROBE_ROWS)])
        if not float((one_by_one - wanted).abs().max()) <= bound:
            raise UnsupportedModel(f"layer {self._layer}: the state of {self._name} does not stand for the text before")
        pieces = MixerCache()
        in_two = torch.cat([run(0, 3, pieces), run(3, PROBE_ROWS, pieces)])
        in_sequences = float((in_two - wanted).abs().max()) <= bound
        parts = tuple(StatePart(key, tuple(state.shape[1:]), state.dtype) for key, state in whole.states.items())
        if not parts or {part.key for part in parts} != set(steps.states):
            raise UnsupportedModel(f"layer {self._layer}: what {self._name} keeps changes from token to token")
        shapes = tuple(tuple(tensors[at].shape[2:]) for at in given)
        rows = tuple(
            LayerRows(self._layer, f"{self._name}.{at}", tensors[at][0, 0].numel(), tensors[at].dtype) for at in given
        )
        state = MixerState(self._layer, self._name, parts)
        return MixerFacts(state, rows, given, shapes, tuple(returned), in_sequences, projections)


def put_mixers(
    layers: Mapping[int, nn.Module], found: Mapping[nn.Module, int], attention: Iterable[nn.Module]
) -> list[RecurrentMixer]:
    """Put a `RecurrentMixer` before each module that keeps a state; of one within another, the outer one alone.

    Args:
        layers: decoder layers, by their number in the whole model.
        found: modules that use the cache's states, and the layer of each.

    Raises:
        UnsupportedModel: a module does both.
    """
    mixers = []
    for layer, root in layers.items():
        names = {module: name for name, module in root.named_modules()}
        inner = {part for module in found if module in names for part in module.modules() if part is not module}
        for module in found:
            if module not in names or module in inner:
                continue
            if any(part in attention for part in module.modules()):
                raise UnsupportedModel(f"layer {layer}: {names[module]} attends and keeps a state")
            mixer = RecurrentMixer(module, layer, names[module])
            module.forward = mixer
            mixers.append(mixer)
    return mixers


def remove_mixers(layers: Iterable[nn.Module]) -> None:
    """Give modules their own forward back."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module.__dict__.get("forward"), RecurrentMixer):
                del module.forward


def examined(mixers: Sequence[RecurrentMixer]) -> tuple[tuple[LayerRows, ...], tuple[MixerState, ...]]:
    """What mixers keep per token, and of a text: they have run in a probing forward.

    Raises:
        UnsupportedModel: one has not.
    """
    facts = [mixer.facts for mixer in mixers if mixer.facts is not None]
    if len(facts) < len(mixers):
        raise UnsupportedModel("a module that keeps a state is not always called")
    for mixer in mixers:
        mixer.in_sequences = all(each.in_sequences for each in facts)
    return tuple(rows for each in facts for rows in each.rows), tuple(each.state for each in facts)


def _plan_of(step_cache: StepCache, device: torch.device, *, in_sequences: bool) -> StepPlan:
    """The plan of a forward, made by the first mixer that runs in it."""
    if step_cache.plan is None:
        step_cache.plan = make_plan(step_cache.parts, device, in_sequences=in_sequences)
    plan: StepPlan = step_cache.plan
    return plan


class _Call:
    """One call of a module, whose tensors and cache can be exchanged.

    Attributes:
        tensors: those among the arguments, in order.
    """

    def __init__(self, own: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._own = own
        self._args = args
        self._kwargs = {name: value for name, value in kwargs.items() if name != NAME}
        _changed((self._args, self._kwargs), self._note)

    def run(self, tensors: Sequence[torch.Tensor], cache: MixerCache) -> Any:  # noqa: ANN401
        """The module's own result for other tensors, with this cache."""
        rest = iter(tensors)
        args, kwargs = _changed((self._args, self._kwargs), lambda _: next(rest), cache)
        return self._own(*args, **kwargs)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors.append(tensor)
        return tensor


class _Collected:
    """Puts the rows of several calls together in the order of the forward."""

    def __init__(self, rows: int, returned: Sequence[int]) -> None:
        self._rows = rows
        self._returned = returned
        self._first: Any = None
        self._wholes: list[torch.Tensor] = []

    def add(self, output: Any, run: MixerRun) -> None:  # noqa: ANN401 - what a module returns
        """Take the new rows of one call."""
        tensors = _tensors_in(output)
        if not self._wholes:
            self._first = output
            self._wholes = [tensors[at].new_empty(1, self._rows, *tensors[at].shape[2:]) for at in self._returned]
        for whole, at in zip(self._wholes, self._returned, strict=True):
            rows = tensors[at].flatten(0, 1)
            whole[0].index_copy_(0, run.targets, rows if run.new is None else rows.index_select(0, run.new))

    def finished(self, leaving: nn.Module | None) -> Any:  # noqa: ANN401
        """As one call's result, with all rows [1, R, …]; tensors that are none of rows are left as one call gave them.

        Args:
            leaving: the linear layer that is still to run on them, if there is one.
        """
        rows = self._wholes if leaving is None else [leaving(whole) for whole in self._wholes]
        wholes = dict(zip(self._returned, rows, strict=True))
        places = iter(range(len(_tensors_in(self._first))))
        return _changed(self._first, lambda each: wholes.get(next(places), each))


def _at(keys: Sequence[StateKey], before: Sequence[torch.Tensor], run: MixerRun) -> dict[StateKey, torch.Tensor]:
    """The states before a call, by name."""
    if run.before is None:
        return {}
    return {key: state.index_select(0, run.before) for key, state in zip(keys, before, strict=True)}


def _changed(
    value: Any,  # noqa: ANN401 - arguments or results of any module
    change: Callable[[torch.Tensor], torch.Tensor],
    cache: MixerCache | None = None,
) -> Any:  # noqa: ANN401
    """The same with its tensors changed, and its cache exchanged where one is given."""
    match value:
        case torch.Tensor():
            return change(value)
        case StepCache() if cache is not None:
            return cache
        case tuple() | list():
            return tuple(_changed(each, change, cache) for each in value)
        case dict():
            return {name: _changed(each, change, cache) for name, each in value.items()}
        case _:
            return value


def _tensors_in(value: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """The tensors in a module's result, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _changed(value, note)
    return found
