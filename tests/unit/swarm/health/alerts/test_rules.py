"""Alerts: hysteresis, flapping, getting worse, restarts, and what findings there are and when they end."""

from __future__ import annotations

import json

import pytest

from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import RECORD_TTL_S
from swarm.health.alerts.rules import (
    FLAP_S,
    HELD_S,
    MAX_CHANGES,
    AlertBook,
    AlertTransition,
    Change,
    Finding,
    Severity,
    alerts_shown,
    dump_book,
    load_book,
)
from swarm.health.state.alert_rules import ALERTS, DELAYS
from swarm.health.state.model import FRESH_S, KEPT_S
from swarm.health.state.overview import Overview
from swarm.health.state.probe_results import Probe, ReplicaComparison
from swarm.health.state.verdict import LinkState
from swarm.status.guard import Reason
from swarm.status.messages import Presence, ServedModel
from tests.telemetry_messages import FINGERPRINT, NOW, metrics, status, will
from tools.alerts import PAGE, RULES, with_rules, with_table

A, B = PeerId("QmSomebodyAAAAAAAA"), PeerId("QmSomebodyBBBBBBBB")
WHOLE = Span(0, 12)
MODEL = ServedModel("demo-target", FINGERPRINT, 12)
IDENTITY = ModelIdentity("demo-target", FINGERPRINT, "b2" * 32, "c3" * 32, "d4" * 32, 12)


def gap(text: str = "demo: nobody serves layers 4…7", severity: Severity = Severity.CRITICAL) -> Finding:
    return Finding("gap", severity, FINGERPRINT, text, model="demo", fix="node serve demo --layers 4-8")


def steps(changes: list[Change]) -> list[AlertTransition]:
    return [change.step for change in changes]


def test_what_becomes_worse_is_told_once_and_stays_one_alert() -> None:
    book = AlertBook(DELAYS)
    mild, bad = (Finding("probe", one, FINGERPRINT, one.value) for one in (Severity.WARNING, Severity.CRITICAL))
    told = [
        step for second, finding in enumerate((mild, bad, bad, mild, bad)) for step in book.update([finding], second)
    ]
    assert steps(told) == [AlertTransition.BEGAN, AlertTransition.WORSE]
    assert len({change.alert.occurrence for change in told}) == 1
    assert len({change.id for change in told}) == 2
    (ended,) = [change for now in (10.0, 1_000.0) for change in book.update([], now)]
    assert (ended.step, ended.worst) == (AlertTransition.ENDED, Severity.CRITICAL)


def test_what_flaps_slowly_soon_is_one_alert() -> None:
    book = AlertBook(DELAYS)
    now, told = 0.0, []
    for second in range(3_600):
        now = float(second)
        told += book.update([gap()] if second % 40 < 15 else [], now)  # 25 s without it: more than it takes to end
    assert 2 <= len(told) <= 8, steps(told)
    for second in range(3_600, 3_600 + int(16 * DELAYS["gap"].clear_s) + 2):
        told += book.update([], float(second))
    assert told[-1].step is AlertTransition.ENDED
    later = now + 2 * FLAP_S
    begun = [book.update([gap()], later + second) for second in (0, 3)][1]
    ended = [book.update([], later + second) for second in (4, 24)][1]
    assert (steps(begun), steps(ended)) == ([AlertTransition.BEGAN], [AlertTransition.ENDED]), "long ago is forgiven"


def test_what_cannot_be_judged_is_held_then_forgotten() -> None:
    book = AlertBook(DELAYS)
    for second in (0.0, 3.0):
        book.update([gap()], second)
    assert book.update([], 10.0, lambda _: True) == []
    assert book.update([], 9.0 + HELD_S, lambda _: True) == []
    assert book.open()[0].quiet_since is None
    assert steps(book.update([], 10.0 + HELD_S, lambda _: True)) == [AlertTransition.FORGOTTEN]


def test_a_restart_tells_nobody_again() -> None:
    book = AlertBook(DELAYS)
    for second in (NOW, NOW + 3.0):
        book.update([gap()], second)
    again = AlertBook(DELAYS)
    kept = json.loads(json.dumps(dump_book(book)))
    kept["open"] += [None, {"kind": "gap"}, {**kept["open"][0], "kind": "nonsense"}]
    load_book(again, kept)
    assert again.open() == book.open()
    assert list(again.changes) == list(book.changes)
    assert again.update([], NOW + 60, lambda _: True) == [], "not known yet"
    assert again.update([gap("still")], NOW + 70) == []
    assert again.open()[0].occurrence == book.open()[0].occurrence
    assert [steps(again.update([], NOW + second)) for second in (80, 100)] == [[], [AlertTransition.ENDED]]
    load_book(again, "nonsense")
    load_book(again, {"v": 1, "open": 7, "changes": {}})


def test_what_is_shown_is_bounded_and_newest_first() -> None:
    book = AlertBook(DELAYS)
    for number in range(MAX_CHANGES):
        for second in (0, 3):
            book.update([Finding("gap", Severity.CRITICAL, f"{number:032x}", "gap")], 1e4 * number + second)
        book.update([], 1e4 * number + 1_000)
        book.update([], 1e4 * number + 2_000)
    shown = alerts_shown(book, 7.0)
    assert (shown["open"], len(shown["ended"]), len(book.changes)) == ([], MAX_CHANGES // 2, MAX_CHANGES)
    assert shown["ended"][0]["ended_at"] > shown["ended"][1]["ended_at"]
    assert not shown["ended"][0]["forgotten"]


# What is found, from telemetry and records as they come


def record(peer: PeerId, at: float, span: Span = WHOLE, version: str = "0.2.0") -> NodeRecord:
    return NodeRecord(
        peer=peer,
        model=IDENTITY,
        span=span,
        address="192.0.2.7:5000",
        state=NodeState.SERVING,
        numeric_class="cpu-float32",
        version=version,
        name=None,
        sweep_ms=(),
        kv_tokens_free=1,
        kv_tokens_total=2,
        sequence=1,
        expires_at=at + RECORD_TTL_S,
    )


class Swarm:
    """A health service's knowledge, half a second after half a second."""

    def __init__(self) -> None:
        self.refused = {Reason.SKEWED: 0}
        self.overview = Overview(["/ip4/192.0.2.1/tcp/1/p2p/Qm"], "canopy", NOW, self.refused)
        self.overview.set_broker_state(LinkState.CONNECTED, NOW)
        self.overview.set_dht_state(LinkState.OK, NOW)
        self.now = NOW
        self.records: dict[PeerId, NodeRecord] = {}
        self.telling: dict[PeerId, Span] = {}

    def be(self, seconds: float) -> list[str]:
        """Let time pass; what began and ended meanwhile."""
        said, end = [], self.now + seconds
        while self.now < end:
            self.now += 0.5
            self._hear()
            self.overview.assess(self.now)
            said += [
                f"{change.alert.finding.id.replace(FINGERPRINT, 'M')} {change.step}"
                for change in self.overview.newest_changes
            ]
        return said

    def _hear(self) -> None:
        if self.now % 5 == 0:
            for peer, one in self.telling.items():
                self.overview.knowledge.apply_telemetry(peer, FINGERPRINT, status(at=self.now, span=one), self.now)
                self.overview.knowledge.apply_telemetry(peer, FINGERPRINT, metrics(at=self.now), self.now)
            found = [record(one.peer, self.now, one.span, one.version) for one in self.records.values()]
            self.overview.knowledge.apply_records(FINGERPRINT, found, self.now)

    def add(self, peer: PeerId, span: Span = WHOLE, version: str = "0.2.0") -> None:
        self.records[peer] = record(peer, self.now, span, version)
        self.telling[peer] = span

    def die(self, peer: PeerId) -> None:
        """Its connection breaks, its record is renewed no more."""
        del self.records[peer], self.telling[peer]
        self.overview.knowledge.apply_telemetry(peer, FINGERPRINT, will(), self.now)


@pytest.fixture
def swarm() -> Swarm:
    """Two machines that hold everything."""
    made = Swarm()
    made.add(A)
    made.add(B)
    assert made.be(60) == []
    return made


def test_the_last_holder_and_the_gap(swarm: Swarm) -> None:
    swarm.die(B)
    assert swarm.be(120) == ["last-holder/M began"]
    swarm.die(A)
    assert swarm.be(70) == ["gap/M began", "last-holder/M ended"]
    (alert,) = swarm.overview.alerts.open()
    assert (alert.finding.model, alert.finding.severity) == ("demo-target", Severity.CRITICAL)
    assert str(alert.finding.fix).startswith("node serve demo-target --layers 0-12 --join /ip4/")
    swarm.add(A)
    assert swarm.be(90) == ["gap/M ended", "last-holder/M began"]


def test_a_model_that_is_gone_is_forgotten_not_mended(swarm: Swarm) -> None:
    swarm.die(A)
    swarm.die(B)
    assert swarm.be(60) == ["gap/M began"]
    assert swarm.be(KEPT_S) == []
    assert swarm.be(HELD_S) == ["gap/M forgotten"]


def test_a_model_in_two_halves_of_different_classes_is_a_gap() -> None:
    other = Swarm()
    for peer, span, kind in ((A, Span(0, 6), "cpu-float32"), (B, Span(6, 12), "cuda-bfloat16")):
        other.overview.knowledge.apply_telemetry(peer, FINGERPRINT, status(at=NOW, span=span, numeric_class=kind), NOW)
        other.overview.knowledge.slots.enter(FINGERPRINT, True, NOW)
    other.overview.assess(NOW)
    other.overview.assess(NOW + 4)
    (alert,) = other.overview.alerts.open()
    assert alert.finding.kind == "gap"
    assert "cpu-float32, cuda-bfloat16" in alert.finding.text


def test_probes_that_fail_differ_or_cannot_be_made(swarm: Swarm) -> None:
    overview = swarm.overview

    def probed(ok: bool | None) -> list[str]:
        overview.record_probe(MODEL, Probe(ok=ok, error="why"), swarm.now)
        return swarm.be(15)

    assert [probed(True), probed(False), probed(False)] == [[], ["probe/M began"], ["probe/M worse"]]
    assert [probed(True), swarm.be(100), probed(False), probed(True)] == [[], [], [], []], "flapping stays one alert"
    assert swarm.be(400) == ["probe/M ended"]
    assert probed(None) == ["probe/M/unknown began"]
    assert [probed(True), swarm.be(400)] == [[], ["probe/M/unknown ended"]]
    overview.record_comparison(MODEL, ReplicaComparison(A, (B,), False, 64))
    assert swarm.be(5) == ["probe/M/difference began"]
    overview.record_comparison(MODEL, ReplicaComparison(A, (B,), True, 64))
    assert swarm.be(400) == ["probe/M/difference ended"]


def test_versions_that_differ(swarm: Swarm) -> None:
    swarm.records[B] = record(B, swarm.now, version="0.3.0")
    del swarm.telling[B]  # its status would say 0.2.0
    assert swarm.be(200) == ["stale/M/telemetry began", "version/M began"]
    swarm.records[B] = record(B, swarm.now)
    assert swarm.be(200) == ["version/M ended"]


def test_clocks_that_differ(swarm: Swarm) -> None:
    swarm.refused[Reason.SKEWED] += 1
    assert swarm.be(100) == ["clock began"]
    swarm.refused[Reason.SKEWED] += 1
    assert swarm.be(500) == []
    assert swarm.be(300) == ["clock ended"]


def test_telemetry_that_becomes_stale(swarm: Swarm) -> None:
    span = swarm.telling.pop(B)
    assert swarm.be(FRESH_S + 20) == ["stale/M/telemetry began"], "the DHT still lists it"
    swarm.telling[B] = span
    assert swarm.be(60) == ["stale/M/telemetry ended"]
    del swarm.telling[B], swarm.records[B]
    assert set(swarm.be(FRESH_S + 60)) == {"stale/M began", "last-holder/M began"}
    assert swarm.be(KEPT_S + 120) == ["stale/M ended"]


def test_a_broker_that_is_down_is_one_alert_and_not_one_for_every_node(swarm: Swarm) -> None:
    swarm.telling.clear()
    swarm.overview.set_broker_state(LinkState.DOWN, swarm.now)
    assert swarm.be(100) == ["broker began"]
    swarm.overview.set_broker_state(LinkState.CONNECTED, swarm.now)
    swarm.telling |= {A: Span(0, 12), B: Span(0, 12)}
    assert swarm.be(30) == ["broker ended"]


def test_who_leaves_politely_is_no_alarm_and_strangers_raise_none(swarm: Swarm) -> None:
    del swarm.records[B], swarm.telling[B]
    swarm.overview.knowledge.apply_telemetry(B, FINGERPRINT, status(at=swarm.now, state=Presence.LEFT), swarm.now)
    made_up = ServedModel("made-up", "ff" * 16, 12)
    swarm.overview.knowledge.apply_telemetry(B, "ff" * 16, status(at=swarm.now, model=made_up), swarm.now)
    assert swarm.be(120) == ["last-holder/M began"]


def test_an_alert_is_declared_once() -> None:
    assert with_table(PAGE.read_text()) == PAGE.read_text(), "run python -m tools.alerts"
    assert with_rules(RULES.read_text()) == RULES.read_text(), "run python -m tools.alerts"
    for rule in ALERTS:
        assert (rule.find is not None) + (rule.find_in_swarm is not None) == bool(rule.kind) == bool(rule.holds)
        assert rule.kind or rule.prometheus
        assert not rule.kind or rule.delays == DELAYS[rule.kind], "an alert that was kept is known by its kind"
