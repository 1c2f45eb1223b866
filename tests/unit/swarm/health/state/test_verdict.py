"""Verdicts, margins, the commands that help, and alerts with hysteresis."""

from __future__ import annotations

import pytest

from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.health.alerts.rules import AlertBook, Finding, Severity
from swarm.health.state.alert_rules import DELAYS
from swarm.health.state.model import Knowledge
from swarm.health.state.node import Condition, EvidenceSource, NodeView
from swarm.health.state.overview import Overview
from swarm.health.state.probe_results import HopProbe, Probe, ReplicaComparison
from swarm.health.state.verdict import Grade, LinkState, SourceStatus, Verdict, judge
from swarm.status.guard import Reason
from swarm.status.messages import ServedModel
from tests.telemetry_messages import FINGERPRINT, NOW, status

MODEL = ServedModel("demo-target", FINGERPRINT, 12)
JOIN = ["/ip4/192.0.2.1/tcp/31337/p2p/QmPeer"]


def node(start: int, end: int, number: int = 0, **other: object) -> NodeView:
    usual: dict[str, object] = {
        "peer": PeerId(f"QmNode{start:02}{end:02}{number:08}"),
        "model": MODEL,
        "span": Span(start, end),
        "condition": Condition.SERVING,
        "source": EvidenceSource.BOTH,
        "device": "cpu",
        "numeric_class": "cpu-float32",
        "version": "0.2.0",
        "name": None,
        "started_at": NOW,
        "seen_at": NOW,
        "busy": 0.0,
        "kv_tokens_free": 10,
        "kv_tokens_total": 10,
        "sweeps_per_s": None,
        "layer_tokens": None,
        "sweep_ms": (),
        "disagrees": False,
        "probed_ms": None,
        "agrees": None,
    }
    return NodeView(**{**usual, **other})  # type: ignore[arg-type]


THIRDS = [node(0, 4), node(4, 8), node(8, 12)]
TWICE = [*THIRDS, node(0, 12, 1)]


def verdict(nodes: list[NodeView], failures: int = 0) -> Verdict:
    return judge(MODEL, nodes, failures, JOIN)


def test_two_machines_everywhere_is_serving() -> None:
    found = verdict(TWICE)
    assert (found.grade, found.margin, found.replicas, found.fixes) == (Grade.SERVING, 1, (2,) * 12, ())
    assert found.reason == "every layer has at least 2 machines"


def test_where_a_layer_hangs_on_one_machine_the_margin_is_none_and_the_weakest_part_is_named() -> None:
    found = verdict([*TWICE, node(0, 4, 2)][1:])
    assert (found.grade, found.margin, found.missing) == (Grade.SERVING, 1, ())
    found = verdict([node(0, 6), node(0, 6, 1), node(6, 12)])
    assert (found.grade, found.margin) == (Grade.SERVING, 0)
    assert found.fixes == (f"node serve demo-target --layers 6-12 --join {JOIN[0]}",)


def test_what_is_weak_is_mended_in_pieces_that_machines_here_take() -> None:
    assert [line.split()[4] for line in verdict(THIRDS).fixes] == ["0-4", "4-8", "8-12"]


@pytest.mark.parametrize("condition", [Condition.OFFLINE, Condition.STALE, Condition.JOINING, Condition.DRAINING])
def test_a_gap_is_broken_and_its_line_is_exact(condition: Condition) -> None:
    found = verdict([THIRDS[0], node(4, 8, condition=condition), THIRDS[2]])
    assert (found.grade, found.margin, found.missing) == (Grade.BROKEN, 0, (Span(4, 8),))
    assert found.fixes == (f"node serve demo-target --layers 4-8 --join {JOIN[0]}",)
    assert found.reason == "nobody serves layers 4…7"


def test_nobody_at_all() -> None:
    assert verdict([]).missing == (Span(0, 12),)


def test_machines_of_different_numeric_classes_make_no_chain() -> None:
    found = verdict([node(0, 6), node(6, 12, numeric_class="cuda-bfloat16")])
    assert (found.grade, found.missing) == (Grade.BROKEN, ())
    assert "cpu-float32, cuda-bfloat16" in found.reason
    both = [node(0, 12), node(0, 12, 1, numeric_class="cuda-bfloat16")]
    assert (verdict(both).grade, verdict(both).margin) == (Grade.SERVING, 1)


def test_probes_count() -> None:
    assert [verdict(TWICE, failures).grade for failures in range(3)] == list(Grade)


def test_broker_and_dht_that_disagree_count() -> None:
    assert verdict([*TWICE[1:], node(0, 4, 3, disagrees=True), THIRDS[0]]).grade is Grade.DEGRADED


def finding(text: str = "broken", kind: str = "gap") -> Finding:
    return Finding(kind, Severity.CRITICAL, FINGERPRINT, text)


def test_an_alert_begins_after_a_while_and_flapping_stays_one_alert() -> None:
    book = AlertBook(DELAYS)
    assert book.update([finding()], 0.0) == []
    assert book.update([], 1.0) == []
    assert book.update([finding()], 2.0) == []
    assert [change.began for change in book.update([finding("more")], 5.0)] == [True]
    assert book.update([], 10.0) == []
    assert book.update([finding("again")], 29.0) == []
    assert [(alert.finding.text, alert.since) for alert in book.open()] == [("again", 2.0)]
    assert book.update([], 40.0) == []
    assert [change.began for change in book.update([], 60.0)] == [False]
    assert book.open() == []


def test_the_worst_alert_comes_first() -> None:
    book = AlertBook(DELAYS)
    found = [Finding("probe", severity, None, "", severity.value) for severity in Severity]
    book.update(found, 0.0)
    assert [alert.finding.severity for alert in book.open()] == list(reversed(Severity))


def test_what_changes_is_an_event_and_lasts_as_an_alert() -> None:
    overview = Overview(JOIN, "canopy", NOW)
    apply_telemetry(overview.knowledge, "QmA", Span(0, 12), NOW)
    overview.knowledge.slots.enter(FINGERPRINT, True, NOW)
    assert overview.assess(NOW)[0].verdict.grade is Grade.SERVING
    overview.record_probe(MODEL, Probe(ok=False, error="nobody answers"), NOW + 1)
    assert overview.assess(NOW + 1)[0].verdict.grade is Grade.DEGRADED
    overview.record_probe(MODEL, Probe(ok=False, error="nobody answers"), NOW + 2)
    assert overview.assess(NOW + 2)[0].verdict.grade is Grade.BROKEN
    state = overview.state(overview.assess(NOW + 3), NOW + 3)
    assert state["models"][0]["since"] == NOW + 2
    assert state["events"][0]["text"] == "demo-target is broken: the last 2 probes failed"
    assert [(alert["kind"], alert["severity"]) for alert in state["alerts"]] == [("probe", "critical")]
    overview.record_probe(MODEL, Probe(ok=None, error="no DHT"), NOW + 4)
    assert overview.assess(NOW + 4)[0].verdict.grade is Grade.BROKEN, "not knowing is no success"
    overview.record_probe(MODEL, Probe(ok=True), NOW + 5)
    assert overview.assess(NOW + 5)[0].verdict.grade is Grade.SERVING


def test_a_probe_is_kept_beside_the_claims_for_the_whole_span() -> None:
    overview = Overview(JOIN, "canopy", NOW)
    peer = PeerId("QmA")
    apply_telemetry(overview.knowledge, peer, Span(0, 12), NOW)
    hop = HopProbe(peer, (0, 6), 1.0, 0.5, 4.0)
    overview.record_probe(MODEL, Probe(ok=True, hops=(hop,), return_ms=1.0), NOW)
    overview.record_comparison(MODEL, ReplicaComparison(peer, (), None, 0))
    assert overview.assess(NOW)[0].nodes[0].agrees is None
    overview.record_comparison(MODEL, ReplicaComparison(peer, (), True, 64))
    shown = overview.state(overview.assess(NOW), NOW)["models"][0]
    assert (shown["nodes"][0]["probed_ms"], shown["nodes"][0]["agrees"]) == (8.0, True)
    assert shown["probe"]["hops"][0]["span"] == [0, 6]


def test_sources_and_clocks_have_alerts_too() -> None:
    refused = {Reason.SKEWED: 0}
    overview = Overview(JOIN, "canopy", NOW, refused)
    overview.set_broker_state(LinkState.DOWN, NOW)
    overview.set_dht_state(LinkState.DOWN, NOW)
    refused[Reason.SKEWED] = 1
    overview.assess(NOW)
    overview.assess(NOW + 20)
    kinds = {alert["kind"] for alert in overview.state([], NOW)["alerts"]}
    assert kinds == {"broker", "dht", "clock"}
    assert not SourceStatus(LinkState.DOWN).change_to(LinkState.DOWN, NOW)


def apply_telemetry(knowledge: Knowledge, peer: str, span: Span, now: float) -> None:
    knowledge.apply_telemetry(PeerId(peer), FINGERPRINT, status(at=now, span=span), now)
