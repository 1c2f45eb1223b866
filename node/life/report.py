"""What a node publishes of itself: its status, what it has done, what went wrong. Sends nothing: the publisher does.

No address, host name or path is part of it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from node.life.publisher import Outbox
from node.model.device import Device
from node.session.admission import OwnerClass
from node.session.counters import NodeCounters
from node.session.receipts import ReceiptBook
from node.session.table import ClassHoldings
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.base.version import VERSION
from swarm.directory.node_record import MAX_REFUTED, NodeState
from swarm.protocol.limits import REFUTED_S
from swarm.status.messages import (
    MAX_OFF,
    MAX_RECEIPTS,
    RECEIPTS_BYTES,
    EventKind,
    Metrics,
    Presence,
    Receipts,
    RefutedPart,
    ServedModel,
    Stamp,
    Status,
)
from swarm.trust.verify import Refutation

QUIET_S: Final = 60.0
"""Errors of one kind are reported at most so often, added up."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """How the node is at a moment."""

    span: Span
    state: NodeState
    numeric_class: str
    sweep_ms: tuple[tuple[int, float], ...]
    sessions: int = 0
    kv_tokens_free: int = 0
    kv_tokens_total: int = 0
    worked_ms: float = 0.0
    """How long its engine computed so far; a new engine begins at 0."""
    held: Mapping[OwnerClass, ClassHoldings] = field(default_factory=dict)
    """What owners of each class hold."""
    waiting: int = 0
    """Sessions that wait for room."""
    path: str = ""
    """How its layers run; empty until they are loaded, and on a CPU, where they run one way."""
    kv_tokens_kept: int = 0
    """What blocks of texts that are over take of what is free."""


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """What is published of a node, and where it is read."""

    model: ModelIdentity
    name: str | None
    """Its public name, if it has one."""
    device: Device
    counters: NodeCounters
    look: Callable[[], NodeSnapshot]
    """Reads how the node is now."""
    receipts: ReceiptBook
    successions: tuple[bytes, ...] = ()
    """Of keys that it had before."""


@dataclass(frozen=True, slots=True)
class _PublishedTotals:
    """The running totals when metrics were last published."""

    at_s: float
    worked_ms: float
    sweeps: int
    queue_ms: float
    compute_ms: float


class ErrorEvents:
    """Events about what went wrong: at most one per kind and `QUIET_S`."""

    KINDS: Final = (
        ("errors", EventKind.ERROR, "errors in sessions"),
        ("restores", EventKind.RESTORED, "sessions restored here"),
        ("differences", EventKind.DIFFERENCE, "sweeps in which replicas differed"),
    )

    def __init__(self, counters: NodeCounters, timer: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._timer = timer
        self._reported = {name: (float("-inf"), 0) for name, _, _ in self.KINDS}

    def add_to(self, outbox: Outbox) -> None:
        """Put what is new into the outbox."""
        now_s = self._timer()
        for name, event, words in self.KINDS:
            reported_s, reported = self._reported[name]
            count = getattr(self._counters, name)
            if count > reported and now_s - reported_s >= QUIET_S:
                self._reported[name] = (now_s, count)
                outbox.add_event(event, f"{words}: {count - reported}")


MAX_REMEMBERED: Final = 64


class RefutedPeers:
    """Machines that this one computed again and found wrong: what it tells of them, and where.

    Attributes:
        listed: machines of each model in the directory, as they were read last: of others a record says nothing, or
            whoever makes up names could drive the listed ones out of it.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.listed: dict[str, frozenset[str]] = {}
        self._at: OrderedDict[PeerId, float] = OrderedDict()
        self._clock = clock

    def note(self, found: Refutation, outbox: Outbox) -> None:
        """Tell of one, by an event now and by each record for a day."""
        verdict = found.verdict
        off, bound = (min(value, MAX_OFF) for value in (verdict.largest, verdict.bound))
        where = ", ".join(map(str, verdict.places[:3]))
        text = f"{found.peer[-8:]} computes layers {found.span} otherwise: {verdict.what} at {where}, {off:.1e} off"
        part = (found.peer, found.span, found.numeric_class, verdict.what, verdict.places, off, bound, found.evidence)
        outbox.add_event(EventKind.REFUTED, text, RefutedPart(*part))
        self._at[found.peer] = found.at
        self._at.move_to_end(found.peer)
        while len(self._at) > MAX_REMEMBERED:
            self._at.popitem(last=False)

    def announced(self, fingerprint: str) -> tuple[tuple[PeerId, float], ...]:
        """The newest ones that are listed of a model, as a record has them."""
        since, listed = self._clock() - REFUTED_S, self.listed.get(fingerprint, frozenset())
        found = [(peer, at) for peer, at in self._at.items() if at > since and peer in listed]
        return tuple(found[-MAX_REFUTED:])


class NodeReport:
    """A node's messages (`node.life.publisher.Reporter`); means and busyness are since the last metrics.

    What went wrong goes into the outbox, whenever metrics are made.
    """

    def __init__(
        self, description: NodeDescription, outbox: Outbox, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._description = description
        self._outbox = outbox
        self._timer = timer
        self._error_events = ErrorEvents(description.counters, timer)
        self._started_at = round(time.time(), 3)
        self._started_s = timer()
        self._last = self._count(description.look())

    def status(self, stamp: Stamp, *, is_birth: bool, leaving: bool) -> Status:
        """What the node is now."""
        description, snapshot = self._description, self._description.look()
        model = description.model
        return Status(
            stamp=stamp,
            is_birth=is_birth,
            model=ServedModel(model.name, model.fingerprint, model.num_layers),
            span=snapshot.span,
            state=Presence.LEFT if leaving else Presence(snapshot.state.value),
            device=description.device.name,
            numeric_class=snapshot.numeric_class,
            version=VERSION,
            name=description.name,
            started_at=self._started_at,
            kv_tokens_total=snapshot.kv_tokens_total,
            path=snapshot.path or None,
        )

    def metrics(self, stamp: Stamp) -> Metrics:
        """What it has done."""
        self._error_events.add_to(self._outbox)
        description, snapshot = self._description, self._description.look()
        counters, last = description.counters, self._last
        now = self._last = self._count(snapshot)
        sweeps = max(now.sweeps - last.sweeps, 1)
        passed_ms = max((now.at_s - last.at_s) * 1e3, 1e-3)
        worked_ms = now.worked_ms - (last.worked_ms if now.worked_ms >= last.worked_ms else 0.0)
        preferred, contributors = map(snapshot.held.get, (OwnerClass.PREFERRED, OwnerClass.CONTRIBUTOR))
        return Metrics(
            stamp=stamp,
            uptime_s=round(now.at_s - self._started_s, 1),
            sweeps=counters.sweeps,
            tree_nodes=counters.tree_nodes,
            tokens=counters.tokens,
            layer_tokens=counters.layer_tokens,
            bytes_in=counters.bytes_in,
            bytes_out=counters.bytes_out,
            errors=counters.errors,
            busy=round(min(worked_ms / passed_ms, 1.0), 4),
            queue_ms=round((now.queue_ms - last.queue_ms) / sweeps, 3),
            compute_ms=round((now.compute_ms - last.compute_ms) / sweeps, 3),
            kv_tokens_free=snapshot.kv_tokens_free,
            kv_tokens_total=snapshot.kv_tokens_total,
            sessions=snapshot.sessions,
            preferred_sessions=preferred.sessions if preferred is not None else 0,
            contributor_sessions=contributors.sessions if contributors is not None else 0,
            sweep_ms=tuple((nodes, round(ms, 3)) for nodes, ms in snapshot.sweep_ms),
            device_memory_bytes=description.device.memory_bytes(),
            device_temperature_c=description.device.temperature_c(),
        )

    def receipts(self, stamp: Stamp, *, is_first: bool) -> Receipts | None:
        """What clients signed for, as much as one message holds; of a connection's first one, which keys were its."""
        successions = self._description.successions if is_first else ()
        batch = () if successions else self._description.receipts.batch(RECEIPTS_BYTES, MAX_RECEIPTS)
        return Receipts(stamp, batch, successions) if batch or successions else None

    def published(self, receipts: Receipts) -> None:
        """The broker has these."""
        self._description.receipts.published(receipts.receipts)

    def _count(self, snapshot: NodeSnapshot) -> _PublishedTotals:
        counters = self._description.counters
        return _PublishedTotals(
            self._timer(), snapshot.worked_ms, counters.sweeps, counters.queue_ms, counters.compute_ms
        )
