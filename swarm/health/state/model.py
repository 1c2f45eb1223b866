"""What is known of every node of every model, from its telemetry and from the DHT. Pure; time is a parameter.

A node of a model is kept until nothing was heard of it for `KEPT_S`. Its state is decided when somebody asks:

    will, `left`, or silence of `SILENT_S` while we listen, and
    no DHT record that was announced after it                        offline
    telemetry heard within `FRESH_S`                                 what its status says
    a DHT record that has not expired                                what the record says
    neither                                                          stale, then gone

Room is bounded: of models by `health_slots`; of nodes, one that the DHT does not list gives way to one that it does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarm.discovery.node_record import NodeRecord
from swarm.discovery.registry import RECORD_TTL_S
from swarm.health.state.contributions import ServedBook
from swarm.health.state.model_slots import ModelSlots
from swarm.health.state.node import Condition, EvidenceSource, NodeView, ReportedModel, SwarmEvent
from swarm.health.state.totals import TotalsBook
from swarm.ids import PeerId
from swarm.telemetry.messages import Body, Event, Metrics, Presence, Status, Will

FRESH_S = 16.0
"""How long telemetry is believed after it was heard: three metrics may be lost."""
SILENT_S = 7.5
"""After so long without a word a node is offline: 1.5 times the keep-alive, which is the period of metrics too."""
STEP_S = 1.0
"""Silence counts only while this program listens; from one look to the next no more than this."""
KEPT_S = 600.0
"""How long a node that is offline or stale is still shown."""
RENEWED_S = 5.0
"""A record announced so long after a will shows that the node lives: clocks differ by 3 s at most in the DHT."""
DISAGREE_S = 45.0
"""How long broker and DHT may say different things: a node announces itself every 20 s."""
SHORTEST_S = 0.5
"""Between metrics of which a rate is taken."""
MISSES = 2
"""Looks at the DHT in a row that do not find a record, before it counts as gone: one look may fail to reach it."""
MAX_NODES = 4_096
MAX_EVENTS = 100


@dataclass(slots=True)
class _Heard:
    """What came in about one node, and when it came."""

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
    missed: int = 0
    disagrees_since: float | None = None
    probed_ms: float | None = None
    agrees: bool | None = None

    @property
    def told_at(self) -> float:
        """When it was last heard over MQTT."""
        return max(self.status_at, self.metrics_at)

    @property
    def seen_at(self) -> float:
        """When it was last heard of."""
        return max(self.told_at, self.listed_at, self.gone_at or 0.0)

    def is_told(self, now: float) -> bool:
        """Whether its telemetry counts."""
        is_gone = self.gone_at is not None or self.silent_since is not None
        return self.status is not None and not is_gone and now - self.told_at <= FRESH_S

    def is_listed(self, now: float) -> bool:
        """Whether its record counts: after a will, a farewell or silence only a newer one does."""
        if self.record is None or self.record.expires_at <= now:
            return False
        announced_at = self.record.expires_at - RECORD_TTL_S
        return all(at is None or announced_at > at + RENEWED_S for at in (self.gone_at, self.silent_since))

    def speaks(self) -> None:
        """It was heard."""
        self.silent_s, self.silent_since = 0.0, None

    def claim(self) -> ReportedModel | None:
        """The model that it says it serves."""
        if self.status is not None:
            told = self.status.model
            return ReportedModel(told.name, told.fingerprint, told.num_layers)
        if self.record is not None:
            listed = self.record.model
            return ReportedModel(listed.name, listed.fingerprint, listed.num_layers)
        return None


@dataclass(slots=True)
class Knowledge:
    """All that came in; `served` counts what each peer contributed, `totals` what each model did.

    turned_away: nodes for which there was no room, nor for their model in `slots`. version: rises with whatever
    changes more than numbers.
    """

    served: ServedBook = field(default_factory=ServedBook)
    totals: TotalsBook = field(default_factory=TotalsBook)
    events: list[SwarmEvent] = field(default_factory=list)
    turned_away: int = 0
    version: int = 0
    changes: int = 0
    slots: ModelSlots = field(default_factory=ModelSlots)
    _heard: dict[str, dict[PeerId, _Heard]] = field(default_factory=dict)
    _listened_at: float = math.inf

    def believe(self, peer: PeerId, fingerprint: str, body: Body, now: float) -> None:
        """Take in a body that the telemetry guard let through."""
        heard = self._of(fingerprint, peer, False, now)
        if heard is None:
            return
        self.changes += 1
        match body:
            case Status():
                self._status(heard, body, now)
            case Will():
                if heard.gone_at is None and heard.silent_since is None and heard.status is not None:
                    self.note(SwarmEvent(now, fingerprint, peer, "offline", "its connection broke"))
                heard.gone_at = now
                self.version += 1
            case Metrics():
                self._metrics(peer, heard, body, now)
            case Event():
                self.note(SwarmEvent(body.stamp.at, fingerprint, peer, body.event.value, body.text))

    def listed(self, fingerprint: str, records: Sequence[NodeRecord], now: float) -> None:
        """Take in what the DHT lists of a model now; whoever is missing `MISSES` times is listed no more."""
        found = {record.peer: record for record in records if record.model.fingerprint == fingerprint}
        self.changes += 1
        for peer, record in found.items():
            heard = self._of(fingerprint, peer, True, now)
            if heard is not None:
                if heard.record is None or (heard.record.state, heard.record.span) != (record.state, record.span):
                    self.version += 1
                heard.record, heard.listed_at, heard.missed = record, now, 0
        for peer, heard in self._heard.get(fingerprint, {}).items():
            if peer not in found and heard.record is not None:
                heard.missed += 1
                if heard.missed >= MISSES:
                    heard.record = None
                    self.version += 1
            disagrees = heard.is_told(now) and not _agree(heard)
            heard.disagrees_since = (heard.disagrees_since or now) if disagrees else None

    def listen(self, now: float, *, is_connected: bool) -> None:
        """Time passed, in which whoever has telemetry should have been heard, if the broker was."""
        passed_s = min(max(now - self._listened_at, 0.0), STEP_S)
        self._listened_at = now
        for fingerprint, peers in self._heard.items():
            for peer, heard in peers.items():
                if not is_connected:
                    heard.silent_s = 0.0
                elif heard.is_told(now):
                    heard.silent_s += passed_s
                    if heard.silent_s >= SILENT_S:
                        heard.silent_since = now
                        self.note(SwarmEvent(now, fingerprint, peer, "offline", f"nothing was heard for {SILENT_S} s"))

    def probed(self, fingerprint: str, peer: PeerId, compute_ms: float) -> None:
        """A probe measured a node's compute per sweep, for its whole span."""
        heard = self._heard.get(fingerprint, {}).get(peer)
        if heard is not None:
            heard.probed_ms = compute_ms
            self.version += 1

    def compared(self, fingerprint: str, peer: PeerId, agrees: bool) -> None:
        """A probe compared a node's answers with those of another holder of its layers."""
        heard = self._heard.get(fingerprint, {}).get(peer)
        if heard is not None:
            heard.agrees = agrees
            self.version += 1

    def note(self, happening: SwarmEvent) -> None:
        """Remember an event, the newest first."""
        self.events = sorted([happening, *self.events], key=lambda event: event.at, reverse=True)[:MAX_EVENTS]
        self.version += 1

    def forget(self, now: float) -> None:
        """Let go of nodes of which nothing was heard for long, and of models without a node."""
        for fingerprint, peers in list(self._heard.items()):
            gone = [peer for peer, heard in peers.items() if not heard.is_listed(now) and now - heard.seen_at > KEPT_S]
            for peer in gone:
                del peers[peer]
            if not peers:
                del self._heard[fingerprint]
                self.slots.leave(fingerprint)
            self.version += bool(gone)
        self.totals.keep(self._heard)

    def nodes(self, now: float) -> dict[str, tuple[ReportedModel, list[NodeView]]]:
        """Every model and its nodes, by fingerprint; nodes that describe the model differently are left out."""
        found: dict[str, tuple[ReportedModel, list[NodeView]]] = {}
        for fingerprint, peers in self._heard.items():
            listed = [heard.claim() for heard in peers.values() if heard.record is not None]
            model = _commonest(listed or [heard.claim() for heard in peers.values()])
            if model is not None:
                nodes = [_node(peer, model, heard, now) for peer, heard in peers.items() if heard.claim() == model]
                found[fingerprint] = model, sorted(nodes, key=lambda node: (node.span, node.peer))
        return found

    def _of(self, fingerprint: str, peer: PeerId, is_listed: bool, now: float) -> _Heard | None:
        known = self._heard.get(fingerprint, {}).get(peer)
        if known is None and not self._has_room(is_listed):
            self.turned_away += 1
            return None
        entered, loser = self.slots.enter(fingerprint, is_listed, now)
        if loser is not None:
            self._heard.pop(loser, None)
            self.version += 1
        if not entered:
            self.turned_away += 1
            return None
        return known or self._heard.setdefault(fingerprint, {}).setdefault(peer, _Heard())

    def _has_room(self, is_listed: bool) -> bool:
        """Whether one more node can be kept; one that is listed takes the place of one that is not."""
        if sum(map(len, self._heard.values())) < MAX_NODES:
            return True
        if not is_listed:
            return False
        strangers = [
            (heard.seen_at, fingerprint, peer)
            for fingerprint, peers in self._heard.items()
            for peer, heard in peers.items()
            if heard.record is None
        ]
        if not strangers:
            return False
        _, fingerprint, peer = min(strangers)
        del self._heard[fingerprint][peer]
        return True

    def is_listed(self, fingerprint: str, peer: PeerId) -> bool:
        """Whether the DHT listed a peer for a model when it was last asked."""
        heard = self._heard.get(fingerprint, {}).get(peer)
        return heard is not None and heard.record is not None

    def _status(self, heard: _Heard, status: Status, now: float) -> None:
        before = heard.status
        self.version += heard.silent_since is not None
        heard.speaks()
        heard.status, heard.status_at = status, now
        was_gone, heard.gone_at = heard.gone_at, now if status.state is Presence.LEFT else None
        if before is None or (before.state, before.span, was_gone) != (status.state, status.span, heard.gone_at):
            self.version += 1

    def _metrics(self, peer: PeerId, heard: _Heard, metrics: Metrics, now: float) -> None:
        before = heard.metrics
        self.version += heard.silent_since is not None
        heard.speaks()
        heard.sweeps_per_s = None
        if before is not None and metrics.sweeps >= before.sweeps:
            seconds = metrics.uptime_s - before.uptime_s
            heard.sweeps_per_s = (metrics.sweeps - before.sweeps) / seconds if seconds >= SHORTEST_S else None
        if heard.status is not None:
            self.totals.add(heard.status, before, metrics, now - heard.metrics_at)
        heard.metrics, heard.metrics_at = metrics, now
        if heard.status is not None:
            self.served.add(peer, heard.status, metrics, now)


def _agree(heard: _Heard) -> bool:
    """Whether record and status say the same; one that does not serve need not be listed."""
    status, record = heard.status, heard.record
    assert status is not None, "told without a status"
    if record is None:
        return status.state is not Presence.SERVING
    return record.span == status.span and record.state.value == status.state.value


def _commonest(claims: Iterable[ReportedModel | None]) -> ReportedModel | None:
    """What most nodes say; the fingerprint is a hash of the rest, which only somebody with the model can check."""
    counts = Counter(claim for claim in claims if claim is not None)
    return max(counts, key=lambda model: (counts[model], model.name), default=None)


def _condition(heard: _Heard, now: float) -> Condition:
    if heard.is_told(now) and heard.status is not None:
        return Condition(heard.status.state.value)
    if heard.is_listed(now) and heard.record is not None:
        return Condition(heard.record.state.value)
    return Condition.STALE if heard.gone_at is None and heard.silent_since is None else Condition.OFFLINE


def _source(heard: _Heard, now: float) -> EvidenceSource:
    if heard.is_listed(now):
        return EvidenceSource.BOTH if heard.is_told(now) else EvidenceSource.DHT
    return EvidenceSource.MQTT if heard.status is not None else EvidenceSource.DHT


def _node(peer: PeerId, model: ReportedModel, heard: _Heard, now: float) -> NodeView:
    status, record, metrics = heard.status, heard.record, heard.metrics
    told = status if status is not None and (heard.is_told(now) or record is None) else None
    newest = told or record or status
    assert newest is not None, "a node without a claim is not shown"
    disagrees = heard.disagrees_since is not None and now - heard.disagrees_since > DISAGREE_S
    shared = _numbers(heard, now)
    return NodeView(
        peer=peer,
        model=model,
        span=newest.span,
        condition=_condition(heard, now),
        source=_source(heard, now),
        device=None if status is None else status.device,
        numeric_class=newest.numeric_class,
        version=newest.version,
        name=newest.name,
        started_at=None if status is None else status.started_at,
        seen_at=heard.seen_at,
        busy=shared.busy,
        kv_free=shared.kv_free,
        kv_total=shared.kv_total,
        sweeps_per_s=heard.sweeps_per_s if heard.is_told(now) else None,
        layer_tokens=None if metrics is None else metrics.layer_tokens,
        claimed_ms=shared.sweep_ms,
        disagrees=disagrees and heard.is_told(now),
        probed_ms=heard.probed_ms,
        agrees=heard.agrees,
        is_silent=status is not None and heard.gone_at is None and not heard.is_told(now),
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    busy: float
    kv_free: int
    kv_total: int
    sweep_ms: tuple[tuple[int, float], ...]


def _numbers(heard: _Heard, now: float) -> _Numbers:
    """From metrics while they come, else from the record."""
    metrics, record = heard.metrics, heard.record
    if metrics is not None and (heard.is_told(now) or record is None):
        return _Numbers(metrics.busy, metrics.kv_tokens_free, metrics.kv_tokens_total, metrics.sweep_ms)
    if record is not None:
        return _Numbers(record.busy, record.kv_tokens_free, record.kv_tokens_total, record.sweep_ms)
    total = 0 if heard.status is None else heard.status.kv_tokens_total
    return _Numbers(0.0, 0, total, ())
