"""What a node tells the world of itself: its status, what it has done, what went wrong. Says nothing: that is the
publisher's business. No address, host name or path is among the words.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from node.model.device import Device
from node.telemetry.counters import NodeCounters
from node.telemetry.outbox import Outbox
from swarm.discovery.node_record import NodeState
from swarm.ids import ModelIdentity
from swarm.layers import Span
from swarm.telemetry.messages import EventKind, Metrics, Presence, ServedModel, Stamp, Status

QUIET_S: Final = 60.0
"""Trouble of one kind is told at most so often, added up."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """How the node is at a moment. worked_ms: what its engine computed so far; a new engine begins at 0."""

    span: Span
    state: NodeState
    numeric_class: str
    sweep_ms: tuple[tuple[int, float], ...]
    sessions: int = 0
    kv_tokens_free: int = 0
    kv_tokens_total: int = 0
    worked_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """Of whom is told: the model, the node's public name if it has one, its device, its counters, how to look at it."""

    model: ModelIdentity
    name: str | None
    device: Device
    tally: NodeCounters
    look: Callable[[], NodeSnapshot]


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where the running totals stood when metrics were last told."""

    at_s: float
    worked_ms: float
    sweeps: int
    queue_ms: float
    compute_ms: float


class Troubles:
    """What went wrong since it was last told, told seldom."""

    KINDS: Final = (
        ("errors", EventKind.ERROR, "errors in sessions"),
        ("restores", EventKind.RESTORED, "sessions restored here"),
        ("differences", EventKind.DIFFERENCE, "sweeps in which replicas differed"),
    )

    def __init__(self, tally: NodeCounters, timer: Callable[[], float] = time.monotonic) -> None:
        self._tally = tally
        self._timer = timer
        self._told = {name: (float("-inf"), 0) for name, _, _ in self.KINDS}

    def tell(self, outbox: Outbox) -> None:
        """Put what is new into the outbox."""
        now_s = self._timer()
        for name, event, words in self.KINDS:
            told_s, told = self._told[name]
            count = getattr(self._tally, name)
            if count > told and now_s - told_s >= QUIET_S:
                self._told[name] = (now_s, count)
                outbox.tell(event, f"{words}: {count - told}")


class NodeReport:
    """A node's words (`node.telemetry.publisher.Reporter`); means and busyness are since the last metrics.

    What went wrong goes into the outbox, whenever metrics are told.
    """

    def __init__(self, subject: NodeDescription, outbox: Outbox, timer: Callable[[], float] = time.monotonic) -> None:
        self._subject = subject
        self._outbox = outbox
        self._timer = timer
        self._troubles = Troubles(subject.tally, timer)
        self._started_at = round(time.time(), 3)
        self._started_s = timer()
        self._mark = self._count(subject.look())

    def status(self, stamp: Stamp, *, is_birth: bool, leaving: bool) -> Status:
        """What the node is now."""
        subject, scene = self._subject, self._subject.look()
        model = subject.model
        return Status(
            stamp=stamp,
            is_birth=is_birth,
            model=ServedModel(model.name, model.fingerprint, model.num_layers),
            span=scene.span,
            state=Presence.LEFT if leaving else Presence(scene.state.value),
            device=subject.device.name,
            numeric_class=scene.numeric_class,
            version=version("canopy-swarm"),
            name=subject.name,
            started_at=self._started_at,
            kv_tokens_total=scene.kv_tokens_total,
        )

    def metrics(self, stamp: Stamp) -> Metrics:
        """What it has done."""
        self._troubles.tell(self._outbox)
        subject, scene = self._subject, self._subject.look()
        tally, last = subject.tally, self._mark
        now = self._mark = self._count(scene)
        sweeps = max(now.sweeps - last.sweeps, 1)
        passed_ms = max((now.at_s - last.at_s) * 1e3, 1e-3)
        worked_ms = now.worked_ms - (last.worked_ms if now.worked_ms >= last.worked_ms else 0.0)
        return Metrics(
            stamp=stamp,
            uptime_s=round(now.at_s - self._started_s, 1),
            sweeps=tally.sweeps,
            tree_nodes=tally.tree_nodes,
            tokens=tally.tokens,
            layer_tokens=tally.layer_tokens,
            bytes_in=tally.bytes_in,
            bytes_out=tally.bytes_out,
            errors=tally.errors,
            busy=round(min(worked_ms / passed_ms, 1.0), 4),
            queue_ms=round((now.queue_ms - last.queue_ms) / sweeps, 3),
            compute_ms=round((now.compute_ms - last.compute_ms) / sweeps, 3),
            kv_tokens_free=scene.kv_tokens_free,
            kv_tokens_total=scene.kv_tokens_total,
            sessions=scene.sessions,
            sweep_ms=tuple((nodes, round(ms, 3)) for nodes, ms in scene.sweep_ms),
            device_memory_bytes=subject.device.memory_bytes(),
            device_temperature_c=subject.device.temperature_c(),
        )

    def _count(self, scene: NodeSnapshot) -> _Mark:
        tally = self._subject.tally
        return _Mark(self._timer(), scene.worked_ms, tally.sweeps, tally.queue_ms, tally.compute_ms)
