"""What is known of every node of every model, from its telemetry and from the DHT. Pure; time is a parameter.

Owns the evidence about nodes; `verdict` and `overview` judge what it means for a model. A node of a model is kept until
nothing was heard of it for `KEPT_S`. Its condition is worked out on demand:

    will, `left`, or silence of `SILENT_S` while we listen, and
    no DHT record that was announced after it                        offline
    telemetry heard within `FRESH_S`                                 what its status says
    a DHT record that has not expired                                what the record says
    neither                                                          stale, then gone

Room is bounded: for models by `model_slots`; of nodes, one that the DHT does not list gives way to one that it does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.directory.node_record import MAX_REFUTED, NodeRecord
from swarm.directory.registry import RECORD_TTL_S
from swarm.health.state.contributions import ContributionBook, TotalsBook, tokens_per_s
from swarm.health.state.model_slots import ModelSlots
from swarm.health.state.node import Condition, EvidenceSource, NodeView, RefutedBy, SwarmEvent
from swarm.protocol.limits import REFUTED_S
from swarm.protocol.succession import opened_succession
from swarm.status.guard import MAX_SKEW_S
from swarm.status.messages import Body, Event, Metrics, Presence, Receipts, ServedModel, Status, Will
from swarm.trust.receipt import Receipt, opened

FRESH_S = 16.0
"""How long telemetry counts after it came: three metrics messages may be lost."""
SILENT_S = 7.5
"""A node without telemetry for so long is offline: 1.5 times the keep-alive, which is the period of metrics too."""
MAX_STEP_S = 1.0
"""Silence counts only while this program listens: between two checks at most this much."""
KEPT_S = 600.0
"""How long a node that is offline or stale is still shown."""
RENEWED_S = 5.0
"""A record announced so long after a will shows that the node lives: clocks differ by 3 s at most in the DHT."""
DISAGREE_S = 45.0
"""How long broker and DHT may say different things: a node announces itself every 20 s."""
MIN_RATE_INTERVAL_S = 0.5
"""Between two metrics messages from which a rate is computed."""
MISSES_UNTIL_GONE = 2
"""DHT look-ups in a row without a record, after which it counts as gone: one look-up may fail to reach it."""
MAX_REFUTERS = 16
"""Machines of which a node's page shows that they found it wrong: the newest."""
MAX_NODES = 4_096
MAX_EVENTS = 100


@dataclass(slots=True)
class _NodeEvidence:
    """What came in about one node, and when; times are Unix seconds of this machine's clock.

    Attributes:
        status: the newest status message.
        status_at: when it came.
        metrics: the newest metrics message.
        metrics_at: when it came.
        sweeps_per_s: between the last two metrics messages of one run.
        gone_at: when a will or a farewell came; None since a later status.
        silent_s: time without telemetry, up to now, in which the broker was connected.
        silent_since: when that became `SILENT_S`; None since later telemetry.
        record: the record that the DHT lists.
        listed_at: when it was last listed.
        misses: look-ups in a row that did not list it.
        disagrees_since: since when status and record differ.
        probed_ms: compute per sweep for the whole span, as a probe measured it.
        agrees: whether its work was that of another holder of its layers; None if never compared.
        is_named: whether it was the one of three that differs from two others.
        found_wrong: what its telemetry said of machines that it found wrong, the newest `MAX_REFUTED`.
    """

    status: Status | None = None
    status_at: float = 0.0
    metrics: Metrics | None = None
    metrics_at: float = 0.0
    sweeps_per_s: float | None = None
    gone_at: float | None = None
    silent_s: float = 0.0
    silent_since: float | None = None
    record: NodeRecord | None = None
    listed_at: float = 0.0
    misses: int = 0
    disagrees_since: float | None = None
    probed_ms: float | None = None
    agrees: bool | None = None
    is_named: bool = False
    found_wrong: dict[PeerId, Event] = field(default_factory=dict)

    @property
    def telemetry_at(self) -> float:
        return max(self.status_at, self.metrics_at)

    @property
    def seen_at(self) -> float:
        """When anything last came, from whichever source."""
        return max(self.telemetry_at, self.listed_at, self.gone_at or 0.0)

    def has_telemetry(self, now: float) -> bool:
        """Whether its telemetry is fresh enough to count."""
        is_gone = self.gone_at is not None or self.silent_since is not None
        return self.status is not None and not is_gone and now - self.telemetry_at <= FRESH_S

    def is_listed(self, now: float) -> bool:
        """Whether its record counts: after a will, a farewell or silence only a newer one does."""
        if self.record is None or self.record.expires_at <= now:
            return False
        announced_at = self.record.expires_at - RECORD_TTL_S
        return all(at is None or announced_at > at + RENEWED_S for at in (self.gone_at, self.silent_since))

    def set_back(self, now: float) -> None:
        """The clock was set back: nothing came later than now."""
        self.status_at, self.metrics_at = min(self.status_at, now), min(self.metrics_at, now)
        self.listed_at = min(self.listed_at, now)
        self.gone_at, self.silent_since, self.disagrees_since = (
            None if at is None else min(at, now) for at in (self.gone_at, self.silent_since, self.disagrees_since)
        )

    def mark_heard(self) -> None:
        """Telemetry came: the node is not silent."""
        self.silent_s, self.silent_since = 0.0, None

    def reported_model(self) -> ServedModel | None:
        """The model that it reports to serve."""
        if self.status is not None:
            return self.status.model
        if self.record is not None:
            model = self.record.model
            return ServedModel(model.name, model.fingerprint, model.num_layers)
        return None


@dataclass(slots=True)
class Knowledge:
    """All that came in, by model and node.

    Attributes:
        turned_away: messages and records for which there was no room: none for the node, or none for its model.
        version: rises with every change of more than numbers.
        changes: rises with everything that comes in.
        slots: the models that have room.
    """

    contributions: ContributionBook = field(default_factory=ContributionBook)
    totals: TotalsBook = field(default_factory=TotalsBook)
    events: list[SwarmEvent] = field(default_factory=list)
    turned_away: int = 0
    version: int = 0
    changes: int = 0
    slots: ModelSlots = field(default_factory=ModelSlots)
    _evidence: dict[str, dict[PeerId, _NodeEvidence]] = field(default_factory=dict)
    _listened_at: float = math.inf

    def apply_telemetry(self, peer: PeerId, fingerprint: str, body: Body, now: float) -> None:
        """Take in a message that the telemetry guard accepted."""
        evidence = self._entry(fingerprint, peer, False, now)
        if evidence is None:
            return
        self.changes += 1
        match body:
            case Status():
                self._status(evidence, body, now)
                self.contributions.name(peer, body.name, now)
            case Will():
                if evidence.gone_at is None and evidence.silent_since is None and evidence.status is not None:
                    self.add_event(SwarmEvent(now, fingerprint, peer, "offline", "its connection broke"))
                evidence.gone_at = now
                self.version += 1
            case Metrics():
                self._metrics(evidence, body, now)
            case Receipts():
                self._receipts(peer, fingerprint, body, now)
            case Event():
                if body.refuted is not None:
                    evidence.found_wrong.pop(body.refuted.peer, None)
                    evidence.found_wrong[body.refuted.peer] = body
                    for oldest in list(evidence.found_wrong)[:-MAX_REFUTED]:
                        del evidence.found_wrong[oldest]
                self.add_event(SwarmEvent(body.stamp.at, fingerprint, peer, body.event.value, body.text))

    def apply_records(self, fingerprint: str, records: Sequence[NodeRecord], now: float) -> None:
        """Take in what the DHT lists of a model; a record missing `MISSES_UNTIL_GONE` times in a row is dropped."""
        found = {record.peer: record for record in records if record.model.fingerprint == fingerprint}
        self.changes += 1
        for peer, record in found.items():
            evidence = self._entry(fingerprint, peer, True, now)
            if evidence is not None:
                before = evidence.record
                if before is None or (before.state, before.span, before.refuted) != (
                    record.state,
                    record.span,
                    record.refuted,
                ):
                    self.version += 1
                evidence.record, evidence.listed_at, evidence.misses = record, now, 0
        for peer, evidence in self._evidence.get(fingerprint, {}).items():
            if peer not in found and evidence.record is not None:
                evidence.misses += 1
                if evidence.misses >= MISSES_UNTIL_GONE:
                    evidence.record = None
                    self.version += 1
            disagrees = evidence.has_telemetry(now) and not _agree(evidence)
            evidence.disagrees_since = (evidence.disagrees_since or now) if disagrees else None

    def check_silence(self, now: float, *, is_connected: bool) -> None:
        """Count the time for which each node was silent while the broker was connected, and find those gone silent."""
        passed_s = min(max(now - self._listened_at, 0.0), MAX_STEP_S)
        self._listened_at = now
        for fingerprint, peers in self._evidence.items():
            for peer, evidence in peers.items():
                if not is_connected:
                    evidence.silent_s = 0.0
                elif evidence.has_telemetry(now):
                    evidence.silent_s += passed_s
                    if evidence.silent_s >= SILENT_S:
                        evidence.silent_since = now
                        self.add_event(
                            SwarmEvent(now, fingerprint, peer, "offline", f"nothing was heard for {SILENT_S} s")
                        )

    def record_probe(self, fingerprint: str, peer: PeerId, compute_ms: float) -> None:
        """Take in a node's compute per sweep, for its whole span, as a probe measured it."""
        evidence = self._evidence.get(fingerprint, {}).get(peer)
        if evidence is not None:
            evidence.probed_ms = compute_ms
            self.version += 1

    def record_comparison(self, fingerprint: str, peer: PeerId, agrees: bool, *, is_named: bool = False) -> None:
        """Take in whether a node's work was that of another holder of its layers, and whether two others say not."""
        evidence = self._evidence.get(fingerprint, {}).get(peer)
        if evidence is not None:
            evidence.agrees, evidence.is_named = agrees, is_named
            self.version += 1

    def add_event(self, event: SwarmEvent) -> None:
        """Remember an event, the newest first."""
        self.events = sorted([event, *self.events], key=lambda event: event.at, reverse=True)[:MAX_EVENTS]
        self.version += 1

    def set_back(self, now: float) -> None:
        """The clock was set back: what it called later is now, and events of later times are forgotten."""
        for peers in self._evidence.values():
            for evidence in peers.values():
                evidence.set_back(now)
        self.slots.set_back(now)
        self.events = [event for event in self.events if event.at <= now + MAX_SKEW_S]
        self.version += 1

    def forget(self, now: float) -> None:
        """Drop nodes of which nothing came for `KEPT_S`, and models without a node."""
        for fingerprint, peers in list(self._evidence.items()):
            gone = [
                peer
                for peer, evidence in peers.items()
                if not evidence.is_listed(now) and now - evidence.seen_at > KEPT_S
            ]
            for peer in gone:
                del peers[peer]
            if not peers:
                del self._evidence[fingerprint]
                self.slots.leave(fingerprint)
            self.version += bool(gone)
        self.totals.keep(self._evidence)

    def nodes(self, now: float) -> dict[str, tuple[ServedModel, list[NodeView]]]:
        """Every model and its nodes, by fingerprint; nodes that describe the model otherwise are left out."""
        found: dict[str, tuple[ServedModel, list[NodeView]]] = {}
        for fingerprint, peers in self._evidence.items():
            listed = [evidence.reported_model() for evidence in peers.values() if evidence.record is not None]
            model = _most_common(listed or [evidence.reported_model() for evidence in peers.values()])
            if model is not None:
                said = _said(peers, now)
                nodes = [
                    _node(peer, model, evidence, now, said.get(peer, ()))
                    for peer, evidence in peers.items()
                    if evidence.reported_model() == model
                ]
                found[fingerprint] = model, sorted(nodes, key=lambda node: (node.span, node.peer))
        return found

    def _entry(self, fingerprint: str, peer: PeerId, is_listed: bool, now: float) -> _NodeEvidence | None:
        known = self._evidence.get(fingerprint, {}).get(peer)
        if known is None and not self._has_room(is_listed):
            self.turned_away += 1
            return None
        entered, loser = self.slots.enter(fingerprint, is_listed, now)
        if loser is not None:
            self._evidence.pop(loser, None)
            self.version += 1
        if not entered:
            self.turned_away += 1
            return None
        return known or self._evidence.setdefault(fingerprint, {}).setdefault(peer, _NodeEvidence())

    def _has_room(self, is_listed: bool) -> bool:
        """Whether one more node can be kept; one that is listed takes the place of one that is not."""
        if sum(map(len, self._evidence.values())) < MAX_NODES:
            return True
        if not is_listed:
            return False
        unlisted = [
            (evidence.seen_at, fingerprint, peer)
            for fingerprint, peers in self._evidence.items()
            for peer, evidence in peers.items()
            if evidence.record is None
        ]
        if not unlisted:
            return False
        _, fingerprint, peer = min(unlisted)
        del self._evidence[fingerprint][peer]
        return True

    def is_listed(self, fingerprint: str, peer: PeerId) -> bool:
        """Whether the DHT listed a peer for a model when it was last asked."""
        evidence = self._evidence.get(fingerprint, {}).get(peer)
        return evidence is not None and evidence.record is not None

    def _status(self, evidence: _NodeEvidence, status: Status, now: float) -> None:
        before = evidence.status
        self.version += evidence.silent_since is not None
        evidence.mark_heard()
        evidence.status, evidence.status_at = status, now
        was_gone, evidence.gone_at = evidence.gone_at, now if status.state is Presence.LEFT else None
        if before is None or (before.state, before.span, was_gone) != (status.state, status.span, evidence.gone_at):
            self.version += 1

    def _receipts(self, peer: PeerId, fingerprint: str, body: Receipts, now: float) -> None:
        """Take in what a node shows; what is not signed as it should be says nothing, and harms nobody else."""
        for sealed in body.successions:
            with suppress(RemoteProtocolError):
                old, new = opened_succession(sealed)
                if new == peer:
                    self.contributions.succeed(old, new)
        for sealed in body.receipts:
            with suppress(RemoteProtocolError):
                receipt = opened(sealed)
                if receipt.fingerprint == fingerprint:
                    self.contributions.show(peer, receipt, self._ability, now)

    def _ability(self, peer: PeerId, receipt: Receipt) -> float:
        """Layer-tokens per second that a machine of a receipt can do: none while its answers differ from others'."""
        evidence, hop = self._evidence.get(receipt.fingerprint, {}).get(peer), receipt.hop_of(peer)
        if evidence is None or evidence.status is None or hop is None or evidence.agrees is False:
            return 0.0
        status = evidence.status
        if status.model.num_layers != receipt.num_layers or not status.span.contains(hop.span):
            return 0.0
        return tokens_per_s(evidence.probed_ms) * len(status.span)

    def _metrics(self, evidence: _NodeEvidence, metrics: Metrics, now: float) -> None:
        before = evidence.metrics
        self.version += evidence.silent_since is not None
        evidence.mark_heard()
        evidence.sweeps_per_s = None
        if before is not None and metrics.sweeps >= before.sweeps:
            seconds = metrics.uptime_s - before.uptime_s
            evidence.sweeps_per_s = (
                (metrics.sweeps - before.sweeps) / seconds if seconds >= MIN_RATE_INTERVAL_S else None
            )
        if evidence.status is not None:
            self.totals.add(evidence.status, before, metrics, now - evidence.metrics_at)
        evidence.metrics, evidence.metrics_at = metrics, now


def _said(peers: Mapping[PeerId, _NodeEvidence], now: float) -> dict[PeerId, list[RefutedBy]]:
    """By machine, what others that are listed say of its work, newest first."""
    found: dict[PeerId, list[RefutedBy]] = {}
    for peer, evidence in peers.items():
        for accused, at in evidence.record.refuted if evidence.record is not None and evidence.is_listed(now) else ():
            event = evidence.found_wrong.get(accused)
            part = None if event is None else event.refuted
            told = () if event is None or part is None else (event.text, part.evidence)
            if accused != peer and now - REFUTED_S < at < now + MAX_SKEW_S:
                found.setdefault(accused, []).append(RefutedBy(peer, at, *told))
    return {peer: sorted(said, key=lambda one: -one.at)[:MAX_REFUTERS] for peer, said in found.items()}


def _agree(evidence: _NodeEvidence) -> bool:
    """Whether record and status match; a node that does not serve need not be listed."""
    status, record = evidence.status, evidence.record
    assert status is not None, "telemetry without a status"
    if record is None:
        return status.state is not Presence.SERVING
    return record.span == status.span and record.state.value == status.state.value


def _most_common(claims: Iterable[ServedModel | None]) -> ServedModel | None:
    """What most nodes report; only a machine that has the model could check the fingerprint against the rest."""
    counts = Counter(reported_model for reported_model in claims if reported_model is not None)
    return max(counts, key=lambda model: (counts[model], model.name), default=None)


def _condition(evidence: _NodeEvidence, now: float) -> Condition:
    if evidence.has_telemetry(now) and evidence.status is not None:
        return Condition(evidence.status.state.value)
    if evidence.is_listed(now) and evidence.record is not None:
        return Condition(evidence.record.state.value)
    return Condition.STALE if evidence.gone_at is None and evidence.silent_since is None else Condition.OFFLINE


def _source(evidence: _NodeEvidence, now: float) -> EvidenceSource:
    if evidence.is_listed(now):
        return EvidenceSource.BOTH if evidence.has_telemetry(now) else EvidenceSource.DHT
    return EvidenceSource.MQTT if evidence.status is not None else EvidenceSource.DHT


def _node(peer: PeerId, model: ServedModel, evidence: _NodeEvidence, now: float, said: Sequence[RefutedBy]) -> NodeView:
    status, record, metrics = evidence.status, evidence.record, evidence.metrics
    fresh = status if status is not None and (evidence.has_telemetry(now) or record is None) else None
    newest = fresh or record or status
    assert newest is not None, "a node that reports no model is not shown"
    disagrees = evidence.disagrees_since is not None and now - evidence.disagrees_since > DISAGREE_S
    load = _load(evidence, now)
    return NodeView(
        peer=peer,
        model=model,
        span=newest.span,
        condition=_condition(evidence, now),
        source=_source(evidence, now),
        device=None if status is None else status.device,
        numeric_class=newest.numeric_class,
        version=newest.version,
        name=newest.name,
        started_at=None if status is None else status.started_at,
        seen_at=evidence.seen_at,
        busy=0.0 if load is None else load.busy,
        kv_tokens_free=0 if load is None else load.kv_tokens_free,
        kv_tokens_total=(load or newest).kv_tokens_total,
        sweeps_per_s=evidence.sweeps_per_s if evidence.has_telemetry(now) else None,
        layer_tokens=None if metrics is None else metrics.layer_tokens,
        sweep_ms=() if load is None else load.sweep_ms,
        disagrees=disagrees and evidence.has_telemetry(now),
        probed_ms=evidence.probed_ms,
        agrees=evidence.agrees,
        is_named=evidence.is_named,
        refuted=tuple(said),
        is_silent=status is not None and evidence.gone_at is None and not evidence.has_telemetry(now),
        reach=None if record is None else record.reach,
        path=None if status is None else status.path,
        sessions=load.sessions if isinstance(load, Metrics) else None,
        preferred_sessions=load.preferred_sessions if isinstance(load, Metrics) else None,
        contributor_sessions=load.contributor_sessions if isinstance(load, Metrics) else None,
    )


def _load(evidence: _NodeEvidence, now: float) -> Metrics | NodeRecord | None:
    """What tells how fast and how full it is: metrics while they come, else the record."""
    metrics, record = evidence.metrics, evidence.record
    return metrics if metrics is not None and (evidence.has_telemetry(now) or record is None) else record
