"""Counters per model, made of the running totals that its nodes report. Pure and bounded; time is a parameter.

A node's totals start anew with every run, and nodes come and go: the growth of each total is added up, so that the sum
never falls. What a node did before its first message is not counted, and no node is credited with more than a machine
can do.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from swarm.health.state.contributions import MAX_TOKENS_PER_S, SLACK_S
from swarm.telemetry.messages import Metrics, Status

MAX_SWEEPS_PER_S: Final = 10_000.0


@dataclass(slots=True)
class Totals:
    """The counters of one model.

    Attributes:
        sweeps: through the whole model: those of each node, times the part of the layers that it holds.
        layer_tokens: committed tokens times layers.
    """

    sweeps: float = 0.0
    layer_tokens: int = 0


@dataclass(slots=True)
class TotalsBook:
    """The counters of all models that have a node, by fingerprint."""

    models: dict[str, Totals] = field(default_factory=dict)

    def add(self, status: Status, previous: Metrics | None, metrics: Metrics, seconds: float) -> None:
        """Count what a node did since the metrics `previous`, which came so many seconds ago."""
        totals = self.models.setdefault(status.model.fingerprint, Totals())
        if previous is None or not status.model.num_layers:
            return
        is_same_run = metrics.uptime_s >= previous.uptime_s
        sweeps = metrics.sweeps - (previous.sweeps if is_same_run else 0)
        layer_tokens = metrics.layer_tokens - (previous.layer_tokens if is_same_run else 0)
        heard_s = max(seconds, 0.0) + SLACK_S
        layers = len(status.span)
        part = layers / status.model.num_layers
        totals.sweeps += min(max(sweeps, 0), MAX_SWEEPS_PER_S * heard_s) * part
        totals.layer_tokens += min(max(layer_tokens, 0), int(MAX_TOKENS_PER_S * heard_s * layers))

    def keep(self, known: Container[str]) -> None:
        """Drop the models that are not known any more."""
        for fingerprint in [one for one in self.models if one not in known]:
            del self.models[fingerprint]
