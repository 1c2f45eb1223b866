"""All that the health service knows, judged: verdicts, alerts and the state that the page shows. Pure.

`state.model` keeps what came in; this module says what it means. Time is a parameter. Owns no network and no storage.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.health.alerts.rules import Alert, AlertBook, Change
from swarm.health.state.alert_rules import DELAYS, SwarmSources, all_findings, is_unobservable
from swarm.health.state.contributions import shares
from swarm.health.state.model import Knowledge
from swarm.health.state.model_slots import SlotStanding
from swarm.health.state.node import NodeView, SwarmEvent
from swarm.health.state.probe_results import Probe, ProbeLog, ReplicaComparison
from swarm.health.state.verdict import Assessment, Grade, LinkState, SourceStatus, judge
from swarm.status.guard import Reason
from swarm.status.messages import ServedModel

logger = logging.getLogger(__name__)

MAX_NODES_SHOWN = 2_000
MAX_CONTRIBUTORS = 50
BACK_S = 1.0
"""A clock that goes back by less is being adjusted."""
SKEW_SHOWN_S = 300.0
"""For how long a message with a wrong clock is a reason for an alert."""


@dataclass(slots=True)
class Overview:
    """The swarm as the health service sees it.

    Attributes:
        join: addresses of the swarm, for the commands that it shows.
        started_at: when this service started, in Unix seconds.
        refused: messages that the guard rejected, by reason.
        version: rises with every change of more than numbers, beside those of `knowledge`.
        newest_changes: alerts that began or ended by the last `assess`.
    """

    join: Sequence[str]
    name: str
    started_at: float
    refused: Mapping[Reason, int] = field(default_factory=dict)
    knowledge: Knowledge = field(default_factory=Knowledge)
    alerts: AlertBook = field(default_factory=lambda: AlertBook(DELAYS))
    probes: dict[str, ProbeLog] = field(default_factory=dict)
    broker: SourceStatus = field(default_factory=SourceStatus)
    dht: SourceStatus = field(default_factory=SourceStatus)
    version: int = 0
    newest_changes: list[Change] = field(default_factory=list)
    _grades: dict[str, tuple[Grade, float]] = field(default_factory=dict)
    _skewed: int = 0
    _skewed_at: float | None = None
    _assessed_at: float = -1e11
    _unjudged: set[str] = field(default_factory=set)

    def set_broker_state(self, state: LinkState, now: float) -> None:
        """The connection to the broker changed."""
        self.version += self.broker.change_to(state, now)

    def set_dht_state(self, state: LinkState, now: float) -> None:
        """The DHT answers, or does not any more."""
        self.version += self.dht.change_to(state, now)

    def record_probe(self, model: ServedModel, probe: Probe, now: float) -> None:
        log = self.probes.setdefault(model.fingerprint, ProbeLog())
        log.add(probe, now)
        if probe.ok:
            self.knowledge.slots.prove(model.fingerprint, now)
        if probe.audit is not None:
            self.record_comparison(model, probe.audit)
        self.version += 1
        spans = {node.peer: node.span for node in self.knowledge.nodes(now).get(model.fingerprint, (model, []))[1]}
        for hop in probe.hops:
            layers = hop.span[1] - hop.span[0]
            if hop.peer in spans and layers > 0:
                self.knowledge.record_probe(model.fingerprint, hop.peer, hop.compute_ms * len(spans[hop.peer]) / layers)

    def record_comparison(self, model: ServedModel, comparison: ReplicaComparison) -> None:
        """Take in a comparison; where two differ and no third one decides, either may be wrong, so both are marked."""
        if comparison.agrees is not None:
            named = comparison.named
            for peer in (comparison.peer, *comparison.others):
                agrees = comparison.agrees if named is None else peer != named
                self.knowledge.record_comparison(model.fingerprint, peer, agrees, is_named=peer == named)

    @property
    def changes(self) -> int:
        """Rises whenever anything came in."""
        return self.knowledge.changes + self.urgent

    @property
    def urgent(self) -> int:
        """Rises whenever more than numbers changed."""
        return self.version + self.knowledge.version

    def assess(self, now: float) -> list[Assessment]:
        """Judge every model, note changes of verdicts, and bring the alerts up to date."""
        if now < self._assessed_at - BACK_S:
            self._set_back(now)
        self._assessed_at = now
        self.knowledge.forget(now)
        self.knowledge.check_silence(now, is_connected=self.broker.state is LinkState.CONNECTED)
        models = self.knowledge.nodes(now)
        assessments = [
            one for model, nodes in models.values() if (one := self._assess_alone(model, nodes, now)) is not None
        ]
        self._unjudged &= models.keys()
        known = {one.model.fingerprint for one in assessments}
        for kept in (self._grades, self.probes):
            for fingerprint in [one for one in kept if one not in known]:
                del kept[fingerprint]
        self._update_alerts(assessments, now)
        return sorted(assessments, key=lambda one: (-one.verdict.grade.rank, one.model.name, one.model.fingerprint))

    def _set_back(self, now: float) -> None:
        """The clock was ahead: what it called later is now, or nothing would end until then."""
        self.knowledge.set_back(now)
        self.alerts.set_back(now)
        self._grades = {name: (grade, min(since, now)) for name, (grade, since) in self._grades.items()}
        for source in (self.broker, self.dht):
            source.since = min(source.since, now)
        self._skewed_at = None if self._skewed_at is None else min(self._skewed_at, now)

    def _assess_alone(self, model: ServedModel, nodes: list[NodeView], now: float) -> Assessment | None:
        """Judge one model; one that cannot be judged hides no other."""
        try:
            found = self._assess(model, nodes, now)
            self._unjudged.discard(model.fingerprint)
        except Exception as error:
            if model.fingerprint not in self._unjudged:
                logger.warning("%s cannot be judged", model.fingerprint, exc_info=error)
            self._unjudged.add(model.fingerprint)
            return None
        return found

    def _assess(self, model: ServedModel, nodes: list[NodeView], now: float) -> Assessment:
        log = self.probes.get(model.fingerprint, ProbeLog())
        verdict = judge(model, nodes, log.failures, self.join)
        grade, since = self._grades.get(model.fingerprint, (None, now))
        if verdict.grade is not grade:
            since = now
            self._grades[model.fingerprint] = verdict.grade, now
            if grade is not None:
                text = f"{model.name} is {verdict.grade}: {verdict.reason}"
                self.knowledge.add_event(SwarmEvent(now, model.fingerprint, None, verdict.grade.value, text))
        return Assessment(model, nodes, verdict, since, log)

    def _update_alerts(self, assessments: Sequence[Assessment], now: float) -> None:
        skewed = self.refused.get(Reason.SKEWED, 0)
        if skewed > self._skewed:
            self._skewed, self._skewed_at = skewed, now
        is_skewed = self._skewed_at is not None and now - self._skewed_at < SKEW_SHOWN_S
        slots = self.knowledge.slots
        trusted = [one for one in assessments if slots.standing(one.model.fingerprint) > SlotStanding.REPORTED]
        findings = all_findings(trusted, SwarmSources(self.broker, self.dht, is_skewed))
        changes = self.alerts.update(findings, now, lambda finding: is_unobservable(finding, trusted))
        self.version += len(changes)
        self.newest_changes = changes

    def state(self, assessments: Sequence[Assessment], now: float) -> dict[str, Any]:
        """The state as JSON values; `assessments` is the result of `assess`."""
        knowledge = self.knowledge
        return {
            "v": 1,
            "at": round(now, 3),
            "started_at": self.started_at,
            "swarm": self.name,
            "sources": {"broker": self.broker.shown(), "dht": self.dht.shown()},
            "refused": {reason.value: count for reason, count in self.refused.items()},
            "models": [_model(one) for one in assessments],
            "alerts": [_alert(alert) for alert in self.alerts.open()],
            "events": [_event(event) for event in knowledge.events],
            "contributors": shares(knowledge.contributions.best(MAX_CONTRIBUTORS)),
        }


def _model(one: Assessment) -> dict[str, Any]:
    verdict = one.verdict
    return {
        "name": one.model.name,
        "fingerprint": one.model.fingerprint,
        "num_layers": one.model.num_layers,
        "verdict": verdict.grade.value,
        "reason": verdict.reason,
        "since": round(one.since, 3),
        "missing": [[span.start, span.end] for span in verdict.missing],
        "fixes": list(verdict.fixes),
        "margin": verdict.margin,
        "replicas": list(verdict.replicas),
        "nodes": [_node(node) for node in one.nodes[:MAX_NODES_SHOWN]],
        "probe": None if one.log.last is None else _probe(one.log.last, one.log.last_at),
    }


def _node(node: NodeView) -> dict[str, Any]:
    return {
        "peer": node.peer,
        "short": node.peer[-8:],
        "name": node.name,
        "span": [node.span.start, node.span.end],
        "state": node.condition.value,
        "device": node.device,
        "numeric_class": node.numeric_class,
        "version": node.version,
        "started_at": node.started_at,
        "seen_at": round(node.seen_at, 1),
        "source": node.source.value,
        "busy": round(node.busy, 3),
        "kv_free": node.kv_tokens_free,
        "kv_total": node.kv_tokens_total,
        "sessions": node.sessions,
        "preferred_sessions": node.preferred_sessions,
        "contributor_sessions": node.contributor_sessions,
        "sweeps_per_s": None if node.sweeps_per_s is None else round(node.sweeps_per_s, 2),
        "layer_tokens": node.layer_tokens,
        "claimed_ms": [[nodes, round(ms, 2)] for nodes, ms in node.sweep_ms],
        "probed_ms": None if node.probed_ms is None else round(node.probed_ms, 2),
        "agrees": node.agrees,
        "named": node.is_named,
        "refuted": [
            {
                "peer": one.peer,
                "short": one.peer[-8:],
                "at": round(one.at, 3),
                "text": one.text,
                "evidence": one.evidence,
            }
            for one in node.refuted
        ],
        "reach": None if node.reach is None else node.reach.value,
        "path": node.path,
    }


def _probe(probe: Probe, at: float) -> dict[str, Any]:
    return {
        "at": round(at, 3),
        "ok": probe.ok,
        "error": probe.error,
        "ttft_ms": probe.ttft_ms,
        "tokens_per_s": probe.tokens_per_s,
        "acceptance_length": probe.acceptance_length,
        "sweep_ms": probe.sweep_ms,
        "hops": [
            {
                "peer": hop.peer,
                "short": hop.peer[-8:],
                "span": list(hop.span),
                "link_ms": hop.link_ms,
                "queue_ms": hop.queue_ms,
                "compute_ms": hop.compute_ms,
            }
            for hop in probe.hops
        ],
        "return_ms": probe.return_ms,
    }


def _alert(alert: Alert) -> dict[str, Any]:
    finding = alert.finding
    return {
        "id": finding.id,
        "severity": finding.severity.value,
        "kind": finding.kind,
        "model": finding.fingerprint,
        "text": finding.text,
        "since": round(alert.since, 3),
    }


def _event(event: SwarmEvent) -> dict[str, Any]:
    return {
        "at": round(event.at, 3),
        "model": event.fingerprint,
        "peer": event.peer,
        "short": None if event.peer is None else event.peer[-8:],
        "kind": event.kind,
        "text": event.text,
    }
