"""Which parts of the swarm's present state deserve an alert. Pure: state in, findings out.

`alerts.rules` decides how long a finding must hold to become an alert.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swarm.health.alerts.rules import AlertKind, Finding, Severity
from swarm.health.state.node import Condition, NodeView
from swarm.health.state.probe_results import ProbeLog
from swarm.health.state.verdict import Verdict
from swarm.layers import name_layers
from swarm.telemetry.messages import ServedModel

MAX_NAMED = 3
"""Nodes, versions or gaps that one text names."""

GONE = (Condition.STALE, Condition.OFFLINE)


class LinkState(enum.StrEnum):
    """How the connection to one of the two sources is."""

    OFF = "off"
    CONNECTED = "connected"
    OK = "ok"
    DOWN = "down"


@dataclass(slots=True)
class SourceStatus:
    """The connection to the broker, or to the DHT, and since when its state holds (Unix seconds)."""

    state: LinkState = LinkState.OFF
    since: float = 0.0

    def change_to(self, state: LinkState, now: float) -> bool:
        """Set the state; whether it is another one."""
        if state is self.state:
            return False
        self.state, self.since = state, now
        return True

    def shown(self) -> dict[str, object]:
        """As JSON values."""
        return {"state": self.state.value, "since": round(self.since, 3)}


@dataclass(frozen=True, slots=True)
class Assessment:
    """One model, its nodes, and the verdict.

    Attributes:
        model: which.
        nodes: all that are known.
        verdict: how the model fares.
        since: when the verdict became what it is, in Unix seconds.
        log: its probes.
    """

    model: ServedModel
    nodes: Sequence[NodeView]
    verdict: Verdict
    since: float
    log: ProbeLog


def all_findings(
    assessments: Sequence[Assessment], broker: SourceStatus, dht: SourceStatus, is_skewed: bool
) -> list[Finding]:
    """Everything that deserves attention now."""
    findings = []
    for one in assessments:
        about = (*(_without_chain(one) or _coverage(one)), *_probing(one), *_nodes(one))
        fix = next(iter(one.verdict.fixes), None)
        for finding in about:
            is_mended = finding.kind in (AlertKind.GAP, AlertKind.LAST_HOLDER)
            findings.append(replace(finding, model=one.model.name, fix=fix if is_mended else None))
        if broker.state is LinkState.CONNECTED:
            findings += _silent(one)
    if broker.state is LinkState.DOWN:
        text = "the MQTT broker does not answer: live telemetry is missing, the DHT alone is shown"
        findings.append(Finding(AlertKind.BROKER, Severity.WARNING, None, text))
    if dht.state is LinkState.DOWN:
        text = "the DHT does not answer: telemetry alone is shown, and nothing can be probed"
        findings.append(Finding(AlertKind.DHT, Severity.WARNING, None, text))
    if is_skewed:
        text = "a node's clock and this machine's differ by more than a minute: its telemetry is not believed"
        findings.append(Finding(AlertKind.CLOCK, Severity.WARNING, None, text))
    return findings


def is_unobservable(finding: Finding, assessments: Sequence[Assessment]) -> bool:
    """Whether an earlier finding can be neither confirmed nor denied: its model is unknown, or not yet probed."""
    if finding.fingerprint is None:
        return False
    one = next((one for one in assessments if one.model.fingerprint == finding.fingerprint), None)
    if one is None:
        return True
    if finding.kind is not AlertKind.PROBE or finding.about == "unknown":
        return False
    if finding.about == "difference":
        return all(node.agrees is None for node in one.nodes)
    return one.log.last is None


def _without_chain(one: Assessment) -> list[Finding]:
    """Every layer has a machine, and yet no numeric class covers all layers."""
    held: dict[str, set[int]] = {}
    if one.verdict.missing or one.verdict.margin:
        return []
    for node in one.nodes:
        if node.condition is Condition.SERVING:
            held.setdefault(node.numeric_class, set()).update(range(node.span.start, node.span.end))
    if any(len(layers) >= one.model.num_layers for layers in held.values()):
        return []
    text = f"{one.model.name}: no chain of one numeric class covers it ({', '.join(sorted(held)[:MAX_NAMED])})"
    return [Finding(AlertKind.GAP, Severity.CRITICAL, one.model.fingerprint, text)]


def _silent(one: Assessment) -> Iterator[Finding]:
    silent = [node for node in one.nodes if node.is_silent and node.condition not in GONE]
    if silent:
        text = f"{one.model.name}: telemetry of {_some(silent)} has stopped, the DHT still lists it"
        fingerprint = one.model.fingerprint
        yield Finding(AlertKind.STALE, Severity.INFO, fingerprint, text, about="telemetry", model=one.model.name)


def _coverage(one: Assessment) -> Iterator[Finding]:
    name, fingerprint, verdict = one.model.name, one.model.fingerprint, one.verdict
    if verdict.missing:
        layers = name_layers(verdict.missing[:MAX_NAMED])
        yield Finding(AlertKind.GAP, Severity.CRITICAL, fingerprint, f"{name}: nobody serves {layers}")
    elif verdict.margin == 0:
        yield Finding(
            AlertKind.LAST_HOLDER, Severity.WARNING, fingerprint, f"{name}: some layers hang on a single machine"
        )


def _probing(one: Assessment) -> Iterator[Finding]:
    name, fingerprint, log = one.model.name, one.model.fingerprint, one.log
    if log.failures:
        severity = Severity.CRITICAL if log.failures >= 2 else Severity.WARNING
        why = "" if log.last is None or log.last.error is None else f": {log.last.error}"
        many = "the last probe" if log.failures == 1 else f"{log.failures} probes in a row"
        yield Finding(AlertKind.PROBE, severity, fingerprint, f"{name}: {many} failed{why}")
    if log.trouble is not None:
        text = f"{name}: no probe could be made: {log.trouble}"
        yield Finding(AlertKind.PROBE, Severity.INFO, fingerprint, text, about="unknown")
    differing = [node for node in one.nodes if node.agrees is False]
    if differing:
        text = f"{name}: {_some(differing)} and another holder of the same layers answer differently"
        yield Finding(AlertKind.PROBE, Severity.CRITICAL, fingerprint, text, about="difference")


def _nodes(one: Assessment) -> Iterator[Finding]:
    name, fingerprint = one.model.name, one.model.fingerprint
    serving = [node for node in one.nodes if node.condition is Condition.SERVING]
    versions = sorted({node.version for node in serving})
    if len(versions) > 1:
        text = f"{name}: nodes run different versions ({', '.join(versions[:MAX_NAMED])})"
        yield Finding(AlertKind.VERSION, Severity.INFO, fingerprint, text)
    silent = (node for node in one.nodes if node.is_silent or node.condition is Condition.STALE)
    stale = [node for node in silent if node.condition in GONE]
    if stale:
        text = f"{name}: nothing is heard of {_some(stale)} any more"
        yield Finding(AlertKind.STALE, Severity.WARNING, fingerprint, text)
    disagreeing = [node for node in serving if node.disagrees]
    if disagreeing:
        text = f"{name}: broker and DHT say different things of {_some(disagreeing)}"
        yield Finding(AlertKind.DHT, Severity.WARNING, fingerprint, text)


def _some(nodes: Sequence[NodeView]) -> str:
    names = ", ".join(node.peer[-8:] for node in nodes[:MAX_NAMED])
    return names if len(nodes) <= MAX_NAMED else f"{names} and {len(nodes) - MAX_NAMED} more"
