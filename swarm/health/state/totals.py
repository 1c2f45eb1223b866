"""Counters per model, made of the running totals that its nodes report. Pure and bounded; time is a parameter.

A node's totals start anew with every run, and nodes come and go: what each total grew by is added up, so that the sum
never falls. What was done before this service first heard of a node is not counted, and nobody is believed more than a
machine can do.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from swarm.health.state.contributions import MOST_TOKENS_PER_S, SLACK_S
from swarm.telemetry.messages import Metrics, Status

MOST_SWEEPS_PER_S: Final = 10_000.0


@dataclass(slots=True)
class Totals:
    """Of one model. sweeps: through the whole model, a node's counted by the part of the layers that it holds."""

    sweeps: float = 0.0
    layer_tokens: int = 0


@dataclass(slots=True)
class TotalsBook:
    """All models that have a node, by fingerprint."""

    models: dict[str, Totals] = field(default_factory=dict)

    def add(self, status: Status, before: Metrics | None, metrics: Metrics, seconds: float) -> None:
        """Count what a node did since `before`, which was heard so many seconds ago."""
        totals = self.models.setdefault(status.model.fingerprint, Totals())
        if before is None or not status.model.num_layers:
            return
        is_same_run = metrics.uptime_s >= before.uptime_s
        sweeps = metrics.sweeps - (before.sweeps if is_same_run else 0)
        layer_tokens = metrics.layer_tokens - (before.layer_tokens if is_same_run else 0)
        heard_s = max(seconds, 0.0) + SLACK_S
        layers = len(status.span)
        part = layers / status.model.num_layers
        totals.sweeps += min(max(sweeps, 0), MOST_SWEEPS_PER_S * heard_s) * part
        totals.layer_tokens += min(max(layer_tokens, 0), int(MOST_TOKENS_PER_S * heard_s * layers))

    def keep(self, known: Container[str]) -> None:
        """Let go of the models that are known no more."""
        for fingerprint in [one for one in self.models if one not in known]:
            del self.models[fingerprint]
