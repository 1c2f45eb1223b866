"""Peer latency, as a node publishes it: delays to its likely successors in a chain, its uplink, how busy it is.

Measured a little at a time, before announcements. Owns no record and no session.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import MAX_DELAYS, NodeRecord, NodeState
from swarm.routing.latency import MAX_MEASURED, measure_delays, measure_rate

DELAY_KEPT_S = 300.0
RATE_KEPT_S = 3_600.0


class ModelShape(Protocol):
    """What is used of the model here."""

    hidden_size: int
    dtype: torch.dtype
    span: Span


@dataclass(frozen=True, slots=True)
class Probes:
    """How delays and the rate are measured."""

    delays: Callable[[Sequence[NodeRecord]], Awaitable[dict[PeerId, float]]] = measure_delays
    rate: Callable[[NodeRecord], Awaitable[float | None]] = measure_rate
    clock: Callable[[], float] = time.monotonic


class PeerDelays:
    """The delays and the uplink of one node."""

    def __init__(
        self, peer: PeerId, model: ModelShape, worked_ms: Callable[[], float], probes: Probes | None = None
    ) -> None:
        self._peer = peer
        self._model = model
        self._worked_ms = worked_ms
        self._probes = probes or Probes()
        self._measured: dict[PeerId, tuple[float, float | None]] = {}
        self._uplink_mbit_per_s: float | None = None
        self._rate_at: float | None = None
        self._last = self._now()

    def describe(self, record: NodeRecord) -> NodeRecord:
        """The record with delays, uplink and row size; `busy` is the fraction of time since the last call."""
        return replace(
            record,
            delays_ms=self.delays_ms,
            busy=self._busy(),
            uplink_mbit_per_s=self._uplink_mbit_per_s,
            row_bytes=self._model.hidden_size * self._model.dtype.itemsize,
        )

    @property
    def delays_ms(self) -> tuple[tuple[PeerId, float], ...]:
        """(peer, one-way delay) of the nearest that answered, at most `MAX_DELAYS`."""
        known = [(delay_ms, peer) for peer, (_, delay_ms) in self._measured.items() if delay_ms is not None]
        return tuple((peer, round(delay_ms, 3)) for delay_ms, peer in sorted(known)[:MAX_DELAYS])

    async def measure(self, records: Sequence[NodeRecord]) -> None:
        """Measure the successors among `records` that are due, at most `MAX_MEASURED`; never-measured ones first."""
        now = self._probes.clock()
        successors = {record.peer: record for record in records if self._may_follow(record)}
        self._measured = {peer: known for peer, known in self._measured.items() if peer in successors}
        due = [peer for peer in successors if now - self._measured.get(peer, (-DELAY_KEPT_S, None))[0] >= DELAY_KEPT_S]
        asked = sorted(due, key=lambda peer: self._measured.get(peer, (float("-inf"), None))[0])[:MAX_MEASURED]
        if asked:
            answers = await self._probes.delays([successors[peer] for peer in asked])
            self._measured |= {peer: (now, answers.get(peer)) for peer in asked}
        await self._measure_rate(successors, now)

    async def _measure_rate(self, successors: dict[PeerId, NodeRecord], now: float) -> None:
        """The uplink, towards the nearest, seldom: it costs half a megabyte."""
        if not self.delays_ms or (self._rate_at is not None and now - self._rate_at < RATE_KEPT_S):
            return
        self._rate_at = now
        rate = await self._probes.rate(successors[self.delays_ms[0][0]])
        self._uplink_mbit_per_s = rate or self._uplink_mbit_per_s

    def _may_follow(self, record: NodeRecord) -> bool:
        """Whether a chain may go on there after this span's last layer."""
        serves = record.state is NodeState.SERVING and record.peer != self._peer
        return serves and record.span.start <= self._model.span.end < record.span.end

    def _busy(self) -> float:
        last, self._last = self._last, self._now()
        passed_s, worked_ms = (now - before for now, before in zip(self._last, last, strict=True))
        return min(max(worked_ms / (passed_s * 1e3), 0.0), 1.0) if passed_s > 0 else 0.0

    def _now(self) -> tuple[float, float]:
        return self._probes.clock(), self._worked_ms()
