"""`/metrics` of the health service: values are copied in the event loop and written out in a thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final

from prometheus_client.metrics_core import Metric

from swarm.base.version import VERSION
from swarm.health.alerts.rules import Severity
from swarm.health.metrics.models import FIGURES as MODEL_FIGURES
from swarm.health.metrics.models import ModelView, write_models
from swarm.health.state.alert_rules import DELAYS
from swarm.health.state.contributions import Totals
from swarm.health.state.verdict import LinkState, SourceStatus
from swarm.health.tasks.recorder import HealthLoop
from swarm.status.guard import Reason, TelemetryGuard
from swarm.status.http import MetricsPage
from swarm.status.messages import MessageKind
from swarm.status.metric_set import MetricFamily, MetricKind, MetricSet

ABOUT = MetricFamily("canopy_health_info", "The health service.", ("version", "swarm"), MetricKind.INFO)
ALERTS = MetricFamily("canopy_health_alerts", "Open alerts, by kind and severity.", ("kind", "severity"))
SOURCE = MetricFamily(
    "canopy_health_source_state", "1 for how the broker or the DHT is, 0 for the other states.", ("source", "state")
)
SOURCE_AT = MetricFamily(
    "canopy_health_source_changed_timestamp_seconds", "When the source became what it is; 0 if ever so.", ("source",)
)
BELIEVED = MetricFamily(
    "canopy_health_telemetry_accepted_total", "Telemetry messages believed, by topic.", ("part",), MetricKind.COUNTER
)
REFUSED = MetricFamily(
    "canopy_health_telemetry_refused_total", "Telemetry messages refused, by reason.", ("reason",), MetricKind.COUNTER
)
TURNED_AWAY = MetricFamily(
    "canopy_health_turned_away_total", "Words of nodes or models for which there was no room.", kind=MetricKind.COUNTER
)
READERS = MetricFamily("canopy_health_stream_readers", "Who reads /api/v1/stream now.")
PROBE_EVERY = MetricFamily("canopy_health_probe_interval_seconds", "Time between probes of a model; 0 probes never.")

FIGURES: Final = (
    *(ABOUT, ALERTS, SOURCE, SOURCE_AT, BELIEVED, REFUSED, TURNED_AWAY, READERS, PROBE_EVERY),
    *MODEL_FIGURES,
)


@dataclass(frozen=True, slots=True)
class HealthView:
    """All values of one scrape, copied: nothing in it changes any more.

    Attributes:
        turned_away: messages and records for which there was no room.
    """

    swarm: str
    models: Sequence[ModelView]
    alerts: Mapping[tuple[str, Severity], int]
    sources: Mapping[str, SourceStatus]
    believed: Mapping[MessageKind, int]
    refused: Mapping[Reason, int]
    turned_away: int
    readers: int
    probe_every_s: float

    def collect(self) -> Iterable[Metric]:
        sheet = MetricSet(FIGURES)
        sheet.set_info(ABOUT, {"version": VERSION, "swarm": self.swarm})
        for kind in DELAYS:
            for severity in Severity:
                sheet.set(ALERTS, self.alerts.get((kind, severity), 0), kind, severity.value)
        for name, link in self.sources.items():
            sheet.set_state(SOURCE, LinkState, link.state, name)
            sheet.set(SOURCE_AT, link.since, name)
        for part, count in self.believed.items():
            sheet.set(BELIEVED, count, part.value)
        for reason, count in self.refused.items():
            sheet.set(REFUSED, count, reason.value)
        sheet.set(TURNED_AWAY, self.turned_away)
        sheet.set(READERS, self.readers)
        sheet.set(PROBE_EVERY, self.probe_every_s)
        write_models(sheet, self.models)
        return sheet.collect()


def take_view(health_loop: HealthLoop, guard: TelemetryGuard, probe_every_s: float) -> HealthView:
    overview = health_loop.overview
    totals = overview.knowledge.totals.models
    return HealthView(
        swarm=overview.name,
        models=[
            ModelView(one, copy(one.log), copy(totals.get(one.model.fingerprint, Totals())))
            for one in health_loop.assessments
        ],
        alerts=Counter((alert.finding.kind, alert.finding.severity) for alert in overview.alerts.open()),
        sources={"broker": copy(overview.broker), "dht": copy(overview.dht)},
        believed=dict(guard.accepted),
        refused=dict(guard.rejected),
        turned_away=overview.knowledge.turned_away,
        readers=health_loop.publisher.readers,
        probe_every_s=probe_every_s,
    )


def health_metrics(health_loop: HealthLoop, guard: TelemetryGuard, probe_every_s: float) -> MetricsPage:
    """The page; it is written out in a thread, since a thousand nodes would hold up the event loop."""
    return MetricsPage(lambda: take_view(health_loop, guard, probe_every_s), in_thread=True)
