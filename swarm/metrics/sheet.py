"""What Canopy tells Prometheus: named figures, and a sheet on which their values are written. Pure; serves nothing.

Names follow Prometheus' advice: base units (seconds, bytes), counters end in `_total`, a state is one series per value
with 0 or 1. Every figure of a sheet is exported, also while it has no value, so that its help can always be read.
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

from swarm.metrics.histogram import Histogram


class MetricKind(enum.StrEnum):
    """How a figure behaves."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric. name: as it is queried, without a histogram's suffixes. help: what is counted."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: MetricKind = MetricKind.GAUGE


@dataclass(slots=True)
class MetricSet:
    """The values of some figures at one moment; `collect` makes it a collector of prometheus-client."""

    figures: tuple[MetricFamily, ...]
    _families: dict[str, Metric] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for figure in self.figures:
            assert figure.name not in self._families, f"{figure.name} is there twice"
            self._families[figure.name] = _family(figure)

    def set(self, figure: MetricFamily, value: float | None, *labels: str) -> None:
        """Write a value; what is not known (None) is left out, as Prometheus advises."""
        family = self._families[figure.name]
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily), f"{figure.name} has no single value"
        assert len(labels) == len(figure.labels), f"{figure.name} has labels {figure.labels}"
        if value is not None:
            family.add_metric(labels, value)

    def be(self, figure: MetricFamily, states: Iterable[enum.Enum], now: enum.Enum, *labels: str) -> None:
        """Write a state: 1 for what it is, 0 for everything else that it could be; the state is the last label."""
        for state in states:
            self.set(figure, float(state is now), *labels, str(state.value))

    def describe(self, figure: MetricFamily, facts: Mapping[str, str]) -> None:
        """Write what stands in labels alone."""
        family = self._families[figure.name]
        assert isinstance(family, InfoMetricFamily), f"{figure.name} is a number"
        assert tuple(facts) == figure.labels, f"{figure.name} has labels {figure.labels}"
        family.add_metric([], dict(facts))

    def spread(self, figure: MetricFamily, histogram: Histogram) -> None:
        """Write a distribution."""
        family = self._families[figure.name]
        assert isinstance(family, HistogramMetricFamily), f"{figure.name} is no histogram"
        family.add_metric([], histogram.cumulative(), histogram.sum)

    def collect(self) -> Iterable[Metric]:
        """Everything, in the figures' order."""
        return self._families.values()


def _family(figure: MetricFamily) -> Metric:
    match figure.kind:
        case MetricKind.GAUGE:
            return GaugeMetricFamily(figure.name, figure.help, labels=figure.labels)
        case MetricKind.COUNTER:
            assert figure.name.endswith("_total"), f"the counter {figure.name} must end in _total"
            return CounterMetricFamily(figure.name, figure.help, labels=figure.labels)
        case MetricKind.HISTOGRAM:
            return HistogramMetricFamily(figure.name, figure.help)
        case MetricKind.INFO:
            return InfoMetricFamily(figure.name.removesuffix("_info"), figure.help)
