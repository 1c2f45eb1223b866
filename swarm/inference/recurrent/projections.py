"""Linear layers at a mixer's two ends, run once for all rows of a forward rather than once per level of a tree.

A level of a tree has few rows, and a linear layer costs the reading of its weights, so most of what a level costs would
be paid again and again. Which layers stand at the ends is seen when the mixer is examined: one that reads the very rows
that the mixer is given, and one that makes the very tensor that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from swarm.inference.recurrent.plan import MixerRun

LINEAR = {"Linear", "PackedLinear", "Conv1D"}
"""Classes that treat each row alone, whatever stands beside it."""


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
            returned: those that it returned.
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
