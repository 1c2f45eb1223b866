"""What the health service believes of nodes, from telemetry and the DHT, as time goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import RECORD_TTL_S
from swarm.health.state.model import DISAGREE_S, FRESH_S, KEPT_S, RENEWED_S, SILENT_S, Knowledge
from swarm.health.state.model_slots import MAX_MODELS
from swarm.health.state.node import Condition, EvidenceSource, NodeView, RefutedBy
from swarm.health.state.overview import Overview
from swarm.protocol.limits import REFUTED_S
from swarm.status.messages import (
    Body,
    EventKind,
    Presence,
    RefutedPart,
    ServedModel,
    part_of,
    seal_body,
    topic_of,
)
from tests.telemetry_messages import FINGERPRINT, NOW, event, identity, metrics, status, will

MODEL = ModelIdentity("demo-target", FINGERPRINT, "b2" * 32, "c3" * 32, "d4" * 32, 12)
A, B = PeerId("QmSomebodyAAAAAAAA"), PeerId("QmSomebodyBBBBBBBB")


def record(peer: PeerId, announced_at: float = NOW, **other: object) -> NodeRecord:
    usual = NodeRecord(
        peer=peer,
        model=MODEL,
        span=Span(0, 4),
        address="192.0.2.7:5000",
        state=NodeState.SERVING,
        numeric_class="cpu-float32",
        version="0.2.0",
        name=None,
        sweep_ms=((1, 1.25),),
        kv_tokens_free=1_000,
        kv_tokens_total=2_000,
        sequence=1,
        expires_at=announced_at + RECORD_TTL_S,
    )
    return replace(usual, **other)  # type: ignore[arg-type]


def node(knowledge: Knowledge, now: float, peer: PeerId = A) -> NodeView:
    _, nodes = knowledge.nodes(now)[FINGERPRINT]
    return next(one for one in nodes if one.peer == peer)


def told(knowledge: Knowledge, at: float = NOW, peer: PeerId = A, **other: Any) -> None:  # noqa: ANN401
    knowledge.apply_telemetry(peer, FINGERPRINT, status(at=at, **other), at)


def test_telemetry_alone_is_believed_while_it_comes_then_stale_then_gone() -> None:
    knowledge = Knowledge()
    told(knowledge)
    assert (node(knowledge, NOW).condition, node(knowledge, NOW).source) == (Condition.SERVING, EvidenceSource.MQTT)
    knowledge.apply_telemetry(A, FINGERPRINT, metrics(), NOW + 10)
    assert node(knowledge, NOW + 10 + FRESH_S).condition is Condition.SERVING
    late = NOW + 10 + FRESH_S + 1
    assert node(knowledge, late).condition is Condition.STALE
    knowledge.forget(NOW + 10 + KEPT_S)
    assert FINGERPRINT in knowledge.nodes(late)
    knowledge.forget(NOW + 11 + KEPT_S)
    assert knowledge.nodes(late) == {}


def silent_for(knowledge: Knowledge, start: float, seconds: float, *, is_connected: bool = True) -> None:
    """So long nobody says anything, and the service looks twice a second."""
    for half in range(int(seconds * 2) + 1):
        knowledge.check_silence(start + half / 2, is_connected=is_connected)


def test_who_told_figures_and_falls_silent_is_offline_until_it_speaks_again() -> None:
    """A broker may take long to see that a connection is dead; the DHT still lists the node meanwhile."""
    knowledge = Knowledge()
    knowledge.apply_records(FINGERPRINT, [record(A)], NOW)
    told(knowledge)
    knowledge.apply_telemetry(A, FINGERPRINT, metrics(), NOW + 5)
    silent_for(knowledge, NOW + 5, SILENT_S - 0.5)
    assert node(knowledge, NOW + 5 + SILENT_S - 0.5).condition is Condition.SERVING
    silent_for(knowledge, NOW + 5 + SILENT_S - 0.5, 0.5)
    late = NOW + 5 + SILENT_S
    assert (node(knowledge, late).condition, node(knowledge, late).is_silent) == (Condition.OFFLINE, True)
    assert [event.kind for event in knowledge.events] == ["offline"]
    knowledge.apply_telemetry(A, FINGERPRINT, will(), late)
    assert [event.kind for event in knowledge.events] == ["offline"], "its will says nothing new"
    told(knowledge, at=late + 1)
    assert node(knowledge, late + 1).condition is Condition.SERVING


def test_who_falls_silent_to_the_broker_alone_comes_back_by_its_next_record() -> None:
    knowledge = Knowledge()
    knowledge.apply_records(FINGERPRINT, [record(A)], NOW)
    told(knowledge)
    knowledge.apply_telemetry(A, FINGERPRINT, metrics(), NOW)
    silent_for(knowledge, NOW, SILENT_S)
    assert node(knowledge, NOW + SILENT_S).condition is Condition.OFFLINE
    later = NOW + SILENT_S + RENEWED_S + 1
    knowledge.apply_records(FINGERPRINT, [record(A, announced_at=later)], later)
    assert (node(knowledge, later).condition, node(knowledge, later).source) == (Condition.SERVING, EvidenceSource.DHT)


def test_silence_counts_only_while_somebody_listens() -> None:
    """A broker that is gone, or a service that stood still itself, says nothing of nodes."""
    knowledge = Knowledge()
    told(knowledge)
    knowledge.apply_telemetry(A, FINGERPRINT, metrics(), NOW)
    silent_for(knowledge, NOW, SILENT_S - 1)
    silent_for(knowledge, NOW + SILENT_S - 1, 3, is_connected=False)
    silent_for(knowledge, NOW + SILENT_S + 2, 1)
    knowledge.check_silence(NOW + FRESH_S, is_connected=True)
    assert node(knowledge, NOW + FRESH_S).condition is Condition.SERVING
    assert not knowledge.events


def test_a_dht_record_alone_is_believed_until_it_expires() -> None:
    knowledge = Knowledge()
    knowledge.apply_records(FINGERPRINT, [record(A)], NOW)
    seen = node(knowledge, NOW)
    assert (seen.condition, seen.source, seen.device, seen.kv_tokens_free) == (
        Condition.SERVING,
        EvidenceSource.DHT,
        None,
        1_000,
    )
    assert node(knowledge, NOW + RECORD_TTL_S).condition is Condition.STALE


def test_one_look_that_misses_a_record_means_nothing_two_do() -> None:
    knowledge = Knowledge()
    knowledge.apply_records(FINGERPRINT, [record(A)], NOW)
    knowledge.apply_records(FINGERPRINT, [], NOW + 5)
    assert node(knowledge, NOW + 5).condition is Condition.SERVING
    knowledge.apply_records(FINGERPRINT, [], NOW + 10)
    assert FINGERPRINT not in knowledge.nodes(NOW + 10)


def test_both_sources_are_merged_and_telemetry_knows_more() -> None:
    knowledge = Knowledge()
    knowledge.apply_records(FINGERPRINT, [record(A)], NOW)
    told(knowledge, name="attic")
    knowledge.apply_telemetry(A, FINGERPRINT, metrics(kv_tokens_free=7), NOW)
    seen = node(knowledge, NOW)
    assert (seen.source, seen.name, seen.kv_tokens_free, seen.busy) == (EvidenceSource.BOTH, "attic", 7, 0.25)


def test_a_will_counts_at_once_although_the_dht_still_lists_the_node() -> None:
    knowledge = Knowledge()
    knowledge.apply_records(FINGERPRINT, [record(A)], NOW)
    told(knowledge)
    before = knowledge.version
    knowledge.apply_telemetry(A, FINGERPRINT, will(), NOW + 2)
    assert node(knowledge, NOW + 2).condition is Condition.OFFLINE
    assert knowledge.version > before
    knowledge.apply_records(FINGERPRINT, [record(A)], NOW + 5)
    assert node(knowledge, NOW + 5).condition is Condition.OFFLINE
    assert knowledge.events[0].kind == "offline"


def test_a_node_that_lost_only_its_broker_is_back_with_its_next_record() -> None:
    knowledge = Knowledge()
    told(knowledge)
    knowledge.apply_telemetry(A, FINGERPRINT, will(), NOW + 2)
    knowledge.apply_records(FINGERPRINT, [record(A, announced_at=NOW + 20)], NOW + 21)
    seen = node(knowledge, NOW + 21)
    assert (seen.condition, seen.source) == (Condition.SERVING, EvidenceSource.DHT)


def test_a_new_birth_ends_being_offline() -> None:
    knowledge = Knowledge()
    told(knowledge)
    knowledge.apply_telemetry(A, FINGERPRINT, will(), NOW + 2)
    told(knowledge, NOW + 3)
    assert node(knowledge, NOW + 3).condition is Condition.SERVING


@pytest.mark.parametrize(
    ("state", "condition"),
    [
        (Presence.JOINING, Condition.JOINING),
        (Presence.DRAINING, Condition.DRAINING),
        (Presence.LEFT, Condition.OFFLINE),
    ],
)
def test_what_a_status_says(state: Presence, condition: Condition) -> None:
    knowledge = Knowledge()
    knowledge.apply_records(FINGERPRINT, [record(A)], NOW - 1)
    told(knowledge, state=state)
    assert node(knowledge, NOW).condition is condition


def test_broker_and_dht_may_differ_for_a_while_only() -> None:
    knowledge = Knowledge()
    for seconds in range(0, int(DISAGREE_S) + 10, 5):
        told(knowledge, NOW + seconds)
        knowledge.apply_records(FINGERPRINT, [], NOW + seconds)
        assert node(knowledge, NOW + seconds).disagrees is (seconds > DISAGREE_S)
    knowledge.apply_records(FINGERPRINT, [record(A, announced_at=NOW + 60)], NOW + 60)
    assert not node(knowledge, NOW + 60).disagrees


def test_a_draining_node_need_not_be_listed() -> None:
    knowledge = Knowledge()
    for seconds in (0, 5, 60, 65):
        told(knowledge, NOW + seconds, state=Presence.DRAINING)
        knowledge.apply_records(FINGERPRINT, [], NOW + seconds)
    assert not node(knowledge, NOW + 65).disagrees


def test_who_describes_the_model_differently_is_left_out() -> None:
    knowledge = Knowledge()
    told(knowledge)
    told(knowledge, peer=B)
    liar = PeerId("QmLiar")
    told(knowledge, peer=liar, model=ServedModel("<b>mine</b>", FINGERPRINT, 4))
    model, nodes = knowledge.nodes(NOW)[FINGERPRINT]
    assert model.name == "demo-target"
    assert {one.peer for one in nodes} == {A, B}


def test_sweeps_per_second_come_from_two_metrics_of_one_run() -> None:
    knowledge = Knowledge()
    told(knowledge)
    knowledge.apply_telemetry(A, FINGERPRINT, metrics(sweeps=10, uptime_s=100.0), NOW)
    assert node(knowledge, NOW).sweeps_per_s is None
    knowledge.apply_telemetry(A, FINGERPRINT, metrics(sweeps=25, uptime_s=105.0), NOW + 5)
    assert node(knowledge, NOW + 5).sweeps_per_s == 3.0
    knowledge.apply_telemetry(A, FINGERPRINT, metrics(sweeps=1, uptime_s=0.0), NOW + 10)
    assert node(knowledge, NOW + 10).sweeps_per_s is None
    knowledge.apply_telemetry(A, FINGERPRINT, metrics(sweeps=2**53, uptime_s=5e-324), NOW + 11)
    assert node(knowledge, NOW + 11).sweeps_per_s is None, "not infinite"


def test_models_and_events_are_bounded() -> None:
    knowledge = Knowledge()
    for number in range(MAX_MODELS + 3):
        knowledge.apply_telemetry(A, f"{number:032x}", status(), NOW)
        knowledge.apply_telemetry(A, f"{number:032x}", event(at=NOW + number), NOW)
    assert len(knowledge.nodes(NOW)) == MAX_MODELS
    assert knowledge.turned_away > 0
    for number in range(300):
        knowledge.apply_telemetry(A, f"{1:032x}", event(at=NOW + number), NOW)
    assert len(knowledge.events) == 100
    assert knowledge.events[0].at == NOW + 299


EXTREME = st.sampled_from([0.0, 5e-324, 1e-9, 0.5, 1.0, 1e7])
SIZES = st.lists(st.sampled_from([1, 2, 8, 64, 4_096]), max_size=5, unique=True).map(sorted)
COUNT = st.sampled_from([0, 1, 2**31, 2**53])
MANY_METRICS = st.builds(
    partial(metrics, kv_tokens_total=2**53),
    sweeps=COUNT,
    layer_tokens=COUNT,
    uptime_s=EXTREME,
    compute_ms=EXTREME,
    kv_tokens_free=COUNT,
    sweep_ms=st.builds(lambda sizes, ms: tuple((size, ms) for size in sizes), SIZES, EXTREME),
    busy=st.sampled_from([0.0, 5e-324, 1.0]),
)
MANY_STATUSES = st.builds(
    status,
    name=st.sampled_from([None, "", "<img src=x onerror=alert(1)>", "𝔫" * 64]),
    started_at=st.sampled_from([0.0, 1e11]),
    state=st.sampled_from(Presence),
    model=st.sampled_from([ServedModel("m", FINGERPRINT, layers) for layers in (4, 512)]),
)


@given(st.lists(st.one_of(MANY_METRICS, MANY_STATUSES, st.builds(will), st.builds(event)), max_size=8))
def test_whatever_is_believed_can_be_shown(bodies: list[Body]) -> None:
    overview = Overview(["/ip4/192.0.2.1/tcp/1/p2p/Qm"], "canopy", NOW)
    for second, body in enumerate(bodies):
        topic = topic_of("canopy", FINGERPRINT, identity(0).peer_id, part_of(body))
        seal_body(body, topic, identity(0))
        overview.knowledge.apply_telemetry(A, FINGERPRINT, body, NOW + second)
        json.dumps(overview.state(overview.assess(NOW + second), NOW + second), allow_nan=False)


def test_who_found_a_node_wrong_is_shown_by_records_and_what_by_events() -> None:
    """A record's word counts while it is listed, for a day; an event gives the evidence's digest, and alone nothing."""
    knowledge = Knowledge()
    part = RefutedPart(A, Span(0, 4), "cpu-float32", "rows", (3,), 0.5, 1e-5, "e5" * 32)
    told(knowledge, peer=B)
    said = replace(event(at=NOW), event=EventKind.REFUTED, text="it differs", refuted=part)
    knowledge.apply_telemetry(B, FINGERPRINT, said, NOW)
    knowledge.apply_records(FINGERPRINT, [record(A), record(B)], NOW)
    assert node(knowledge, NOW).refuted == (), "the record does not say it"
    for at, shown in ((NOW - 5.0, True), (NOW - REFUTED_S, False), (NOW + 600.0, False)):
        knowledge.apply_records(FINGERPRINT, [record(A), record(B, refuted=((A, at),))], NOW)
        wanted = (RefutedBy(B, at, "it differs", "e5" * 32),) if shown else ()
        assert node(knowledge, NOW).refuted == wanted
    knowledge.apply_records(FINGERPRINT, [record(A, refuted=((A, NOW),)), record(B, refuted=((A, NOW),))], NOW)
    assert [one.peer for one in node(knowledge, NOW).refuted] == [B], "not by itself"
    overview = Overview([], "canopy", NOW, knowledge=knowledge)
    assessed = overview.assess(NOW)
    (alert,) = [one.finding for one in overview.alerts.open() if one.finding.kind == "refuted"]
    assert "1 machine says" in alert.text
    (shown_node,) = [one for one in overview.state(assessed, NOW)["models"][0]["nodes"] if one["peer"] == A]
    assert shown_node["refuted"][0]["evidence"] == "e5" * 32
    assert shown_node["named"] is False
    for _ in range(2):
        knowledge.apply_records(FINGERPRINT, [record(A)], NOW)
    assert node(knowledge, NOW).refuted == (), "it is listed no more"


def test_events_of_one_node_are_remembered_of_few() -> None:
    knowledge = Knowledge()
    told(knowledge)
    for number in range(20):
        part = RefutedPart(PeerId(f"Qm{number}"), Span(0, 4), "cpu-float32", "rows", (3,), 0.5, 1e-5, "e5" * 32)
        said = replace(event(at=NOW), event=EventKind.REFUTED, refuted=part)
        knowledge.apply_telemetry(A, FINGERPRINT, said, NOW)
    assert list(knowledge._evidence[FINGERPRINT][A].found_wrong) == [f"Qm{number}" for number in range(12, 20)]
