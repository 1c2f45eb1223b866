"""Every alert, declared once: what is found, when it is shown, its row in the reference, its rule for Prometheus.

`python -m tools.alerts` writes docs/reference/alerts.md and deploy/prometheus/rules/canopy.yml. Pure: state in,
findings out; how long a finding lasts before it is an alert is kept by `swarm.health.alerts.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.base.layers import name_layers
from swarm.health.alerts.rules import AlertDelays, Finding, Severity
from swarm.health.state.node import Condition, NodeView
from swarm.health.state.verdict import Assessment, LinkState, SourceStatus

MAX_NAMED: Final = 3
"""Nodes, versions or gaps that one text names."""
GONE: Final = (Condition.STALE, Condition.OFFLINE)


@dataclass(frozen=True, slots=True)
class SwarmSources:
    """What findings are judged by besides a model: the two sources, and whether telemetry was refused for its clock."""

    broker: SourceStatus
    dht: SourceStatus
    is_skewed: bool


@dataclass(frozen=True, slots=True)
class PrometheusRule:
    """The alert in a Prometheus that scrapes health service and nodes; texts may hold its template variables."""

    alert: str
    expr: str
    summary: str
    description: str
    lasts: str = ""
    """Such as 5m; empty: at once."""
    severity: Severity | None = None
    """None: the alert's own."""


_AT_ONCE: Final = AlertDelays(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class AlertRule:
    """One alert; what has no `find` is for Prometheus alone, what has no `prometheus` for the health service alone."""

    severity: Severity
    kind: str = ""
    about: str = ""
    """Tells alerts of one kind apart."""
    holds: str = ""
    """While what holds, as the reference says it."""
    delays: AlertDelays = _AT_ONCE
    """The same for all of one kind."""
    find: Callable[[Assessment, SwarmSources], str | None] | None = None
    """What is told of a model now, behind its name; None: nothing."""
    find_in_swarm: Callable[[SwarmSources], str | None] | None = None
    """The same for what is about no model."""
    worse_if: tuple[str, Callable[[Assessment], bool]] | None = None
    """When it is critical, in words and as a condition."""
    is_mended: bool = False
    """Whether the command that fills the model's gaps helps."""
    prometheus: PrometheusRule | None = None


def _gap(one: Assessment, _: SwarmSources) -> str | None:
    if one.verdict.missing:
        return f"nobody serves {name_layers(one.verdict.missing[:MAX_NAMED])}"
    if one.verdict.margin:
        return None
    held: dict[str, set[int]] = {}
    for node in _serving(one):
        held.setdefault(node.numeric_class, set()).update(range(node.span.start, node.span.end))
    if any(len(layers) >= one.model.num_layers for layers in held.values()):
        return None
    return f"no chain of one numeric class covers it ({', '.join(sorted(held)[:MAX_NAMED])})"


def _last_holder(one: Assessment, sources: SwarmSources) -> str | None:
    is_last = one.verdict.margin == 0 and _gap(one, sources) is None
    return "some layers hang on a single machine" if is_last else None


def _failing(one: Assessment, _: SwarmSources) -> str | None:
    if not one.log.failures:
        return None
    why = "" if one.log.last is None or one.log.last.error is None else f": {one.log.last.error}"
    many = "the last probe" if one.log.failures == 1 else f"{one.log.failures} probes in a row"
    return f"{many} failed{why}"


def _differing(one: Assessment, _: SwarmSources) -> str | None:
    differing = [node for node in one.nodes if node.agrees is False and not node.is_named]
    return f"{_some(differing)} and another holder of the same layers answer differently" if differing else None


def _named(one: Assessment, _: SwarmSources) -> str | None:
    named = [node for node in one.nodes if node.is_named]
    return f"{_some(named)} computes something else than two other holders of its layers" if named else None


def _refuted(one: Assessment, _: SwarmSources) -> str | None:
    refuted = [node for node in one.nodes if node.refuted]
    if not refuted:
        return None
    many = len({said.peer for node in refuted for said in node.refuted})
    return f"{_some(refuted)}: {many} {'machine says' if many == 1 else 'machines say'} that it computes something else"


def _versions(one: Assessment, _: SwarmSources) -> str | None:
    versions = sorted({node.version for node in _serving(one)})
    return f"nodes run different versions ({', '.join(versions[:MAX_NAMED])})" if len(versions) > 1 else None


def _stale(one: Assessment, _: SwarmSources) -> str | None:
    stale = [node for node in one.nodes if node.condition in GONE and (node.is_silent or _is_stale(node))]
    return f"nothing is heard of {_some(stale)} any more" if stale else None


def _silent(one: Assessment, sources: SwarmSources) -> str | None:
    silent = [node for node in one.nodes if node.is_silent and node.condition not in GONE]
    is_heard = sources.broker.state is LinkState.CONNECTED
    return f"telemetry of {_some(silent)} has stopped, the DHT still lists it" if silent and is_heard else None


def _disagreeing(one: Assessment, _: SwarmSources) -> str | None:
    disagreeing = [node for node in _serving(one) if node.disagrees]
    return f"broker and DHT say different things of {_some(disagreeing)}" if disagreeing else None


def _serving(one: Assessment) -> list[NodeView]:
    return [node for node in one.nodes if node.condition is Condition.SERVING]


def _is_stale(node: NodeView) -> bool:
    return node.condition is Condition.STALE


def _some(nodes: Sequence[NodeView]) -> str:
    names = ", ".join(node.peer[-8:] for node in nodes[:MAX_NAMED])
    return names if len(nodes) <= MAX_NAMED else f"{names} and {len(nodes) - MAX_NAMED} more"


_PROBED: Final = AlertDelays(0.0, 330.0)
"""Longer than between two probes: the next one must pass too."""

ALERTS: Final[tuple[AlertRule, ...]] = (
    AlertRule(
        Severity.CRITICAL,
        "gap",
        holds="layers without a serving machine, or no numeric class that has all of them",
        delays=AlertDelays(3.0, 20.0),
        find=_gap,
        is_mended=True,
        prometheus=PrometheusRule(
            "CanopyModelBroken",
            'canopy_model_verdict{verdict="broken"} == 1',
            "{{ $labels.model }} is broken",
            "Layers are missing or probes fail. The health page names the command that mends it.",
            "1m",
        ),
    ),
    AlertRule(
        Severity.WARNING,
        prometheus=PrometheusRule(
            "CanopyModelDegraded",
            'canopy_model_verdict{verdict="degraded"} == 1',
            "{{ $labels.model }} is degraded",
            "The last probe failed, or broker and DHT disagree about its machines.",
            "5m",
        ),
    ),
    AlertRule(
        Severity.WARNING,
        "last-holder",
        holds="some layers depend on a single machine",
        delays=AlertDelays(30.0, 60.0),
        find=_last_holder,
        is_mended=True,
        prometheus=PrometheusRule(
            "CanopyLastHolder",
            "canopy_model_margin_machines == 0 and canopy_model_layers_missing == 0",
            "{{ $labels.model }} is one machine away from breaking",
            "Some layers hang on a single machine.",
            "10m",
        ),
    ),
    AlertRule(
        Severity.WARNING,
        "probe",
        holds="the last probe failed",
        delays=_PROBED,
        find=_failing,
        worse_if=("from the second on", lambda one: one.log.failures >= 2),
        prometheus=PrometheusRule(
            "CanopyProbeFailing",
            "canopy_model_probe_failures >= 2",
            "{{ $value }} probes of {{ $labels.model }} in a row failed",
            "Its machines say that they serve, and no text comes out.",
            severity=Severity.CRITICAL,
        ),
    ),
    AlertRule(
        Severity.CRITICAL,
        "probe",
        "difference",
        holds="a node and another holder of its layers answered differently",
        delays=_PROBED,
        find=_differing,
        prometheus=PrometheusRule(
            "CanopyAnswersDiffer",
            "canopy_model_node_agrees == 0",
            "{{ $labels.peer }} and another holder of its layers answer differently",
            "One of them computes wrongly or lies; nobody knows which.",
        ),
    ),
    AlertRule(
        Severity.CRITICAL,
        "probe",
        "audit",
        holds="an audit found that a node computes something else than two other holders of its layers",
        delays=_PROBED,
        find=_named,
        prometheus=PrometheusRule(
            "CanopyNodeNamed",
            "canopy_model_node_named == 1",
            "{{ $labels.peer }} computes something else than two other holders of its layers",
            "Its weights, its memory or its program are not those of the others. The health service keeps evidence.",
        ),
    ),
    AlertRule(
        Severity.WARNING,
        "refuted",
        holds="other nodes say that they computed a node's signed work again, and found it wrong",
        delays=AlertDelays(0.0, 60.0),
        find=_refuted,
        prometheus=PrometheusRule(
            "CanopyNodeRefuted",
            "canopy_model_node_refuters > 0",
            "{{ $value }} nodes say that {{ $labels.peer }} computes something else",
            "Anybody may say so. The file that the event names by its digest shows it: swarm verify.",
        ),
    ),
    AlertRule(
        Severity.INFO,
        "probe",
        "unknown",
        holds="no probe could be made, so nobody knows",
        delays=_PROBED,
        find=lambda one, _: None if one.log.trouble is None else f"no probe could be made: {one.log.trouble}",
    ),
    AlertRule(
        Severity.WARNING,
        prometheus=PrometheusRule(
            "CanopyProbeStale",
            "time() - canopy_model_probe_timestamp_seconds > on (job, instance) group_left () "
            "(3 * (canopy_health_probe_interval_seconds > 0) + 120) and canopy_model_layers_missing == 0",
            "{{ $labels.model }} was last probed {{ $value | humanizeDuration }} ago",
            "Three turns were missed: is --probe-budget spent, or is the prober stuck?",
            "5m",
        ),
    ),
    AlertRule(
        Severity.INFO,
        "version",
        holds="serving nodes of a model run different versions",
        delays=AlertDelays(120.0, 120.0),
        find=_versions,
    ),
    AlertRule(
        Severity.WARNING,
        "clock",
        holds="telemetry was refused because clocks differ by more than 60 s, within 5 minutes",
        delays=AlertDelays(0.0, 300.0),
        find_in_swarm=lambda sources: (
            "a node's clock and this machine's differ by more than a minute: its telemetry is not believed"
            if sources.is_skewed
            else None
        ),
    ),
    AlertRule(
        Severity.WARNING,
        "stale",
        holds="nothing is heard of a node any more, and it did not say goodbye",
        delays=AlertDelays(15.0, 30.0),
        find=_stale,
    ),
    AlertRule(
        Severity.INFO,
        "stale",
        "telemetry",
        holds="a node's telemetry stopped, though the broker answers and the DHT lists the node",
        delays=AlertDelays(15.0, 30.0),
        find=_silent,
    ),
    AlertRule(
        Severity.WARNING,
        "broker",
        holds="the MQTT broker does not answer",
        delays=AlertDelays(5.0, 10.0),
        find_in_swarm=lambda sources: (
            "the MQTT broker does not answer: live telemetry is missing, the DHT alone is shown"
            if sources.broker.state is LinkState.DOWN
            else None
        ),
        prometheus=PrometheusRule(
            "CanopySourceDown",
            'canopy_health_source_state{state="down"} == 1',
            "the {{ $labels.source }} does not answer the health service",
            "What is shown comes from the other source alone.",
            "2m",
        ),
    ),
    AlertRule(
        Severity.WARNING,
        "dht",
        holds="the DHT does not answer",
        delays=AlertDelays(15.0, 10.0),
        find_in_swarm=lambda sources: (
            "the DHT does not answer: telemetry alone is shown, and nothing can be probed"
            if sources.dht.state is LinkState.DOWN
            else None
        ),
    ),
    AlertRule(
        Severity.WARNING,
        "dht",
        holds="broker and DHT say different things of a model's node",
        delays=AlertDelays(15.0, 10.0),
        find=_disagreeing,
    ),
    AlertRule(
        Severity.WARNING,
        prometheus=PrometheusRule(
            "CanopyNodeDown",
            'up{job="canopy-node"} == 0',
            "{{ $labels.instance }} does not answer scrapes",
            "The node is down, or its --metrics-port cannot be reached from here.",
            "2m",
        ),
    ),
    AlertRule(
        Severity.WARNING,
        prometheus=PrometheusRule(
            "CanopyNodeKvFull",
            "canopy:node_kv_used:ratio > 0.95",
            "{{ $labels.instance }} has {{ $value | humanizePercentage }} of its KV reserved",
            "New sessions are told Busy. More machines for these layers, or a larger --kv-tokens, help.",
            "10m",
        ),
    ),
    AlertRule(
        Severity.WARNING,
        prometheus=PrometheusRule(
            "CanopyNodeQueueLong",
            "canopy:node_queue_seconds:p95_5m > 1",
            "sweeps wait {{ $value | humanizeDuration }} (p95) at {{ $labels.instance }}",
            "It has more work than it can do. More machines for these layers help.",
            "5m",
        ),
    ),
    AlertRule(
        Severity.WARNING,
        prometheus=PrometheusRule(
            "CanopyNodeErrors",
            'increase(canopy_node_errors_total{kind="internal"}[10m]) > 0',
            "forwards fail at {{ $labels.instance }}",
            "Its log says why.",
        ),
    ),
    AlertRule(
        Severity.CRITICAL,
        prometheus=PrometheusRule(
            "CanopyHealthDown",
            'up{job="canopy-health"} == 0',
            "the health service at {{ $labels.instance }} does not answer",
            "Nobody watches the swarm. The swarm itself does not need it.",
            "2m",
        ),
    ),
    AlertRule(
        Severity.WARNING,
        prometheus=PrometheusRule(
            "CanopyTelemetryForged",
            'increase(canopy_health_telemetry_refused_total{reason="forged"}[10m]) > 5',
            "somebody forges telemetry: {{ $value | humanize }} messages in 10 minutes",
            "They are refused. The broker's log says who connects.",
        ),
    ),
)
DELAYS: Final[Mapping[str, AlertDelays]] = {rule.kind: rule.delays for rule in ALERTS if rule.kind}
"""By kind."""


def all_findings(assessments: Sequence[Assessment], sources: SwarmSources) -> Iterator[Finding]:
    """Everything that deserves attention now."""
    for rule in ALERTS:
        if rule.find_in_swarm is not None and (text := rule.find_in_swarm(sources)) is not None:
            yield Finding(rule.kind, rule.severity, None, text, rule.about)
        for one in assessments:
            if rule.find is not None and (text := rule.find(one, sources)) is not None:
                model, is_worse = one.model, rule.worse_if is not None and rule.worse_if[1](one)
                severity = Severity.CRITICAL if is_worse else rule.severity
                fix = next(iter(one.verdict.fixes), None) if rule.is_mended else None
                said = f"{model.name}: {text}"
                yield Finding(rule.kind, severity, model.fingerprint, said, rule.about, model.name, fix)


def is_unobservable(finding: Finding, assessments: Sequence[Assessment]) -> bool:
    """Whether an earlier finding can be neither confirmed nor denied: its model is unknown, or not yet probed."""
    if finding.fingerprint is None:
        return False
    one = next((one for one in assessments if one.model.fingerprint == finding.fingerprint), None)
    if one is None:
        return True
    if finding.kind != "probe" or finding.about == "unknown":
        return False
    if finding.about in ("difference", "audit"):
        return all(node.agrees is None for node in one.nodes)
    return one.log.last is None
