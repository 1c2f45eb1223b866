"""The health loop: judges twice a second, publishes what is new, and writes the history. Owns no network."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.health.alerts.rules import Change, dump_book, load_book
from swarm.health.state.node import Condition, NodeView
from swarm.health.state.overview import Overview
from swarm.health.state.verdict import Assessment
from swarm.health.tasks.history import SAMPLE_S, WINDOWS, History, Sample
from swarm.health.tasks.publisher import StatePublisher, is_json

logger = logging.getLogger(__name__)

TICK_S = 0.5
IDLE_S = 5.0
"""Longest time between states: some things change by time alone, and readers see that the service is alive."""
NUMBERS_INTERVAL_S = 1.0
"""Shortest time between states of which only numbers differ."""
BYTES_PER_S = 256_000
"""Most bytes of such states to each reader: a large state is published less often."""
SAVE_S = 60.0
"""Time between writes of what must survive a restart."""


@dataclass(slots=True)
class HealthLoop:
    """Turns what is known into what is shown and stored."""

    overview: Overview
    publisher: StatePublisher
    history: History
    clock: Callable[[], float] = time.time
    on_changes: Callable[[Sequence[Change]], None] = lambda _: None
    assessments: Sequence[Assessment] = ()
    _published_at: float = field(default=-1e9)
    _urgent: int = -1
    _changes: int = -1
    _sampled_at: float = field(default=-1e9)
    _saved_at: float = field(default=-1e9)
    _probes: dict[str, float] = field(default_factory=dict)
    _is_failing: bool = False
    _troubles: dict[str, str] = field(default_factory=dict)

    async def load(self) -> None:
        """Load what the last run stored; without it where the file cannot be read."""
        try:
            await self._load()
        except sqlite3.Error as error:
            logger.warning("what the last run stored cannot be read (%s); going on without", error)

    async def _load(self) -> None:
        saved = await self.history.load("served")
        if isinstance(saved, list):
            self.overview.knowledge.contributions.load(saved)
        load_book(self.overview.alerts, await self.history.load("alerts"))
        self.overview.knowledge.slots.load(await self.history.load("slots"))
        self._saved_at = self.clock()

    async def run(self) -> None:
        """Judge, publish and write, for ever: what goes wrong is logged once, and tried again."""
        while True:
            for name, work in (("shown", self._judge), ("stored", self._write)):
                try:
                    await work()
                    self._troubles.pop(name, None)
                except Exception as error:
                    if self._troubles.get(name) != repr(error):
                        logger.warning("this state of the swarm cannot be %s; trying again", name, exc_info=error)
                    self._troubles[name] = repr(error)
            await asyncio.sleep(TICK_S)

    async def _judge(self) -> None:
        self.step()

    def step(self) -> None:
        """Judge, and publish if there is reason to."""
        now, overview = self.clock(), self.overview
        self.assessments = overview.assess(now)
        if overview.newest_changes:
            self._saved_at = -1e9  # written at once, so that a restart does not report them again
            self.on_changes(overview.newest_changes)
        age_s = now - self._published_at
        numbers_s = max(NUMBERS_INTERVAL_S, len(self.publisher.json) / BYTES_PER_S)
        is_due = (
            overview.urgent != self._urgent
            or (overview.changes != self._changes and age_s >= numbers_s)
            or not 0 <= age_s < IDLE_S
        )
        if is_due:
            self._urgent, self._changes, self._published_at = overview.urgent, overview.changes, now
            self._publish(overview.state(self.assessments, now))

    def _publish(self, state: dict[str, Any]) -> None:
        """Publish a state; what cannot be shown of it hides nothing else."""
        try:
            self.publisher.publish(state)
            self._troubles.pop("published", None)
        except ValueError as error:
            if self._troubles.get("published") != repr(error):
                logger.warning("a part of the state cannot be shown (%s); the rest is", error)
            self._troubles["published"] = repr(error)
            rest = {name: list(filter(is_json, part)) for name, part in state.items() if isinstance(part, list)}
            self.publisher.publish(state | rest)

    async def points(self, fingerprint: str, window: str) -> dict[str, Any]:
        """A model's history as JSON values.

        Raises:
            KeyError: nothing is recorded of it, and it is not known now.
        """
        try:
            return await self.history.points(fingerprint, window, self.clock())
        except KeyError:
            if all(one.model.fingerprint != fingerprint for one in self.assessments):
                raise
            step_s = WINDOWS[window].step_s  # known, but not sampled yet
            return {"v": 1, "model": fingerprint, "window": window, "step_s": step_s, "points": []}

    async def close(self) -> None:
        """Write what must survive a restart."""
        try:
            await self._save()
        except sqlite3.Error as error:
            logger.warning("the history cannot be written (%s)", error)

    async def _save(self) -> None:
        await self.history.save("served", self.overview.knowledge.contributions.dump())
        await self.history.save("alerts", dump_book(self.overview.alerts))
        await self.history.save("slots", self.overview.knowledge.slots.dump())

    async def _write(self) -> None:
        now = self.clock()
        try:
            since_s = now - self._sampled_at
            if not 0 <= since_s < SAMPLE_S:
                self._sampled_at = now
                seconds = since_s if SAMPLE_S <= since_s <= 2 * SAMPLE_S else SAMPLE_S  # a longer gap was not watched
                await self.history.add([self._sample(one, seconds) for one in self.assessments], now)
            if not 0 <= now - self._saved_at < SAVE_S:
                self._saved_at = now
                await self._save()
            self._is_failing = False
        except sqlite3.Error as error:
            if not self._is_failing:
                logger.warning("the history cannot be written (%s); going on without", error)
            self._is_failing = True

    def _sample(self, one: Assessment, seconds: float) -> Sample:
        fingerprint, log = one.model.fingerprint, one.log
        is_new = log.last is not None and log.last_at != self._probes.get(fingerprint)
        self._probes[fingerprint] = log.last_at
        probe = log.last if is_new else None
        return Sample(
            fingerprint=fingerprint,
            grade=one.verdict.grade,
            min_replicas=min(one.verdict.replicas, default=0),
            machines=sum(node.condition is Condition.SERVING for node in one.nodes),
            sweeps_per_s=_sweeps_per_s(one.nodes, one.model.num_layers),
            tokens_per_s=None if probe is None else probe.tokens_per_s,
            ttft_ms=None if probe is None else probe.ttft_ms,
            seconds=seconds,
        )


def _sweeps_per_s(nodes: Sequence[NodeView], num_layers: int) -> float | None:
    """Sweeps through the whole model: those of each node, times the part of the layers that it holds."""
    reported = [node for node in nodes if node.sweeps_per_s is not None]
    if not reported or not num_layers:
        return None
    return sum((node.sweeps_per_s or 0.0) * len(node.span) for node in reported) / num_layers
