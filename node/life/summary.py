"""The six lines in which a node says what it does and why, before it loads anything. Pure; says them to nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from node.life.joining import COMPARED_NODES, need_of
from node.life.planning import ServingPlan
from node.model.loading import KV_RESERVE_TOKENS, KV_SHARE, MAX_DEFAULT_KV_TOKENS
from swarm.base.ids import ModelIdentity
from swarm.base.layers import Span, missing_layers, name_layers
from swarm.directory.node_record import NodeRecord, NodeState

# How a node that starts speaks on a terminal: lines, a bar while files come, a sign of life while layers load.

MAX_NAME = 40
"""Characters of a file's name that stand before the bar."""


class TerminalSay:
    """Takes lines, and draws what takes long; `with TerminalSay(console) as say:` ends what is drawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __call__(self, line: str) -> None:
        """Print a line, above what is drawn."""
        self._console.print(line)

    def fetching(self, file: str, here: int, total: int) -> None:
        """Draw how much of a download is here, in bytes; called from any thread, one at a time."""
        self._draw(f"fetching {file[-MAX_NAME:]}", here, total)

    def reading(self, file: str, read: int, total: int) -> None:
        """Draw how much was read of the weights, in bytes; called from any thread, one at a time."""
        self._draw(f"reading {file[-MAX_NAME:]} once", read, total)

    def _draw(self, what: str, here: int, total: int) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                auto_refresh=False,
            )
            self._task = self._bar.add_task(what, total=max(total, 1))
            self._bar.start()
        self._bar.update(self._task, completed=here, total=max(total, 1), description=what, refresh=True)
        if here >= total:
            self.close()

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that something goes on, for as long as it does."""
        self.close()
        with self._console.status(what):
            yield

    def close(self) -> None:
        """End what is drawn."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def __enter__(self) -> Self:
        """Nothing is drawn yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ServingSummary:
    """What a node is about to do.

    Attributes:
        model: what it serves.
        asked: the model as its user called it; None where the swarm named it.
        join: through whom it joined; empty where it begins a swarm.
        plan: what was decided.
        span: its layers.
        reached: how others come to it, as a clause.
        why: who named the model, where somebody did.
    """

    model: ModelIdentity
    asked: str | None
    join: Sequence[str]
    plan: ServingPlan
    span: Span
    reached: str
    why: str = "as you asked"

    def lines(self) -> list[str]:
        """Model, swarm, layers, how it computes, how it is reached, what it gives; then a note, if there is one."""
        what = [self._model(), self._swarm(), self._layers()]
        how = [self._computes(), f"reached: {self.reached}", self._gives()]
        note = self.plan.kind.note
        return [*what, *how, f"note: {note}"] if note else [*what, *how]

    def _model(self) -> str:
        model = self.model
        about = f"{model.num_layers} layers, fingerprint {model.fingerprint[:12]}"
        why = "the one that this swarm serves" if self.asked is None else self.why
        return f"model: {self.asked or model.name} ({about}), {why}"

    def _swarm(self) -> str:
        records = [one for one in self.plan.records if one.state is not NodeState.DRAINING]
        if not records:
            return f"swarm: nobody serves it yet{'; this machine begins a swarm' if not self.join else ''}"
        gaps = missing_layers([one.span for one in records], self.model.num_layers)
        lacks = f"nobody holds {name_layers([Span(*gap) for gap in gaps])}" if gaps else "every layer is held"
        return f"swarm: {_counted(records)} already, and {lacks}"

    def _layers(self) -> str:
        held, kind = self.span.describe(self.model.num_layers), self.plan.kind.numeric_class
        if not self.plan.order.is_auto:
            return f"layers: {held}, as you asked"
        why = need_of(self.plan.records, kind, self.span, self.model.num_layers)
        count = self.plan.count
        return f"layers: the swarm needs {held} most, for {why}; {count.count}: {count.why}"

    def _computes(self) -> str:
        device, dtype, weights = self.plan.compute
        held = self.plan.form
        how = f" with {weights} weights" if held.bits else f" with weights in {held.stored}" if held.stored else ""
        form = f"{str(dtype).removeprefix('torch.')}{how}"
        tokens = self.plan.order.kv_tokens
        room = f"for {tokens:,} tokens, as you asked" if tokens is not None else _ROOM
        return f"computes: on {device} in {form}, {self.plan.kind.why}; KV {room}"

    def _gives(self) -> str:
        speed = self.plan.speed
        if speed is None:
            return "gives: what is measured once the layers are loaded"
        took = dict(speed.sweep_ms(len(self.span)))
        rate = 1e3 / max(took[1], 1e-6)
        return (
            f"gives: about {took[COMPARED_NODES]:.1f} ms per sweep of {COMPARED_NODES}, at most {rate:,.0f} tokens/s "
            f"in plain decoding ({speed.how} in {speed.seconds:.1f} s)"
        )


_ROOM = (
    f"for {KV_RESERVE_TOKENS:,} tokens or more: {KV_SHARE:.0%} of the memory that is free then, "
    f"{MAX_DEFAULT_KV_TOKENS:,} at most"
)


def _counted(records: Sequence[NodeRecord]) -> str:
    return "1 node serves it" if len(records) == 1 else f"{len(records)} nodes serve it"
