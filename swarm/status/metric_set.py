"""Metric families for Prometheus, and a set of them with their values at one moment. Pure; serves nothing.

Names follow Prometheus' advice: base units (seconds, bytes), counters end in `_total`, a state is one series per value
with 0 or 1. Every family of a set is exported, also while it has no value, so that its help can always be read.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from swarm.base.histogram import Histogram


class MetricKind(enum.StrEnum):
    """How a metric behaves; the values are Prometheus' own types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric, without values.

    Attributes:
        name: as it is queried, without a histogram's suffixes.
        help: what is counted.
        labels: names of the labels, in the order in which values are given.
        kind: its type.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: MetricKind = MetricKind.GAUGE


@dataclass(slots=True)
class MetricSet:
    """The values of some metric families at one moment; `collect` makes it a collector of prometheus-client."""

    definitions: tuple[MetricFamily, ...]
    _families: dict[str, Metric] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for definition in self.definitions:
            assert definition.name not in self._families, f"{definition.name} is there twice"
            self._families[definition.name] = _family(definition)

    def set(self, definition: MetricFamily, value: float | None, *labels: str) -> None:
        """Add a sample of a gauge or counter; None, what is not known, is left out, as Prometheus advises."""
        family = self._families[definition.name]
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily), f"{definition.name} has no single value"
        assert len(labels) == len(definition.labels), f"{definition.name} has labels {definition.labels}"
        if value is not None:
            family.add_metric(labels, value)

    def set_state(self, definition: MetricFamily, states: Iterable[enum.Enum], now: enum.Enum, *labels: str) -> None:
        """Add a state: 1 for the one that holds now, 0 for all others; the state is the last label."""
        for state in states:
            self.set(definition, float(state is now), *labels, str(state.value))

    def set_info(self, definition: MetricFamily, facts: Mapping[str, str]) -> None:
        """Add an info sample: labels alone, with the value 1."""
        family = self._families[definition.name]
        assert isinstance(family, InfoMetricFamily), f"{definition.name} is a number"
        assert tuple(facts) == definition.labels, f"{definition.name} has labels {definition.labels}"
        family.add_metric([], dict(facts))

    def set_histogram(self, definition: MetricFamily, histogram: Histogram, *labels: str) -> None:
        family = self._families[definition.name]
        assert isinstance(family, HistogramMetricFamily), f"{definition.name} is no histogram"
        assert len(labels) == len(definition.labels), f"{definition.name} has labels {definition.labels}"
        family.add_metric(labels, histogram.cumulative(), histogram.sum)

    def collect(self) -> Iterable[Metric]:
        """Every family with its samples, in the order of the definitions."""
        return self._families.values()


def _family(definition: MetricFamily) -> Metric:
    match definition.kind:
        case MetricKind.GAUGE:
            return GaugeMetricFamily(definition.name, definition.help, labels=definition.labels)
        case MetricKind.COUNTER:
            assert definition.name.endswith("_total"), f"the counter {definition.name} must end in _total"
            return CounterMetricFamily(definition.name, definition.help, labels=definition.labels)
        case MetricKind.HISTOGRAM:
            return HistogramMetricFamily(definition.name, definition.help, labels=definition.labels)
        case MetricKind.INFO:
            return InfoMetricFamily(definition.name.removesuffix("_info"), definition.help)
