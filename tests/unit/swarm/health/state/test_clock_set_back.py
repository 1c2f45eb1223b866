"""A clock that was weeks ahead, or weeks behind, and is right again: nothing waits for a time that is far away."""

from __future__ import annotations

import pytest

from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.health.alerts.rules import AlertTransition
from swarm.health.state.model import KEPT_S, SILENT_S
from swarm.health.state.model_slots import MAX_MODELS, TRIAL_S, ModelSlots
from swarm.health.state.node import SwarmEvent
from swarm.health.state.overview import Overview
from swarm.health.state.verdict import LinkState
from swarm.status.guard import Reason
from swarm.status.messages import Presence
from tests.telemetry_messages import FINGERPRINT, NOW, status

A = PeerId("QmSomebodyAAAAAAAA")
JUMP_S = 40 * 86_400.0


def overview() -> Overview:
    found = Overview((), "test", NOW)
    found.knowledge.slots.enter(FINGERPRINT, True, NOW)
    found.set_broker_state(LinkState.CONNECTED, NOW)
    return found


def watch(found: Overview, start: float, seconds: float, *, heard: bool, state: Presence = Presence.SERVING) -> None:
    """Judge every half second; the node with all layers speaks every 5 s, or does not."""
    for half in range(int(2 * seconds)):
        now = start + half / 2
        if heard and half % 10 == 0:
            body = status(at=now, seq=half + 1, span=Span(0, 12), state=state)
            found.knowledge.apply_telemetry(A, FINGERPRINT, body, now)
            found.knowledge.slots.enter(FINGERPRINT, True, now)
        found.assess(now)


@pytest.mark.parametrize("jump_s", [JUMP_S, -JUMP_S])
def test_alerts_begin_and_end_and_silence_is_found_as_ever(jump_s: float) -> None:
    found, wrong = overview(), NOW + jump_s
    watch(found, NOW, 10, heard=True)
    watch(found, wrong, 10, heard=True)
    watch(found, wrong + 10, 50, heard=False)
    assert "gap" in [alert.finding.kind for alert in found.alerts.open()]
    watch(found, wrong + 60, 15, heard=True)  # the alert is about to end when the clock is right again
    watch(found, NOW + 75, 60, heard=True)
    assert "gap" not in [alert.finding.kind for alert in found.alerts.open()]
    gaps = [change.step for change in found.alerts.changes if change.alert.finding.kind == "gap"]
    assert gaps[-1] is AlertTransition.ENDED
    (one,) = found.assess(NOW + 135)
    assert one.since <= NOW + 135
    watch(found, NOW + 135, SILENT_S + 60, heard=False)
    assert "gap" in [alert.finding.kind for alert in found.alerts.open()]
    watch(found, NOW + 210, KEPT_S + 60, heard=False)
    assert found.assess(NOW + 210 + KEPT_S + 60) == []


def test_what_happens_now_is_not_hidden_behind_events_of_later_times() -> None:
    found = overview()
    for number in range(200):
        found.knowledge.add_event(SwarmEvent(NOW + JUMP_S, FINGERPRINT, A, "moved", str(number)))
    found.assess(NOW + JUMP_S)
    found.assess(NOW)
    found.knowledge.add_event(SwarmEvent(NOW, FINGERPRINT, A, "moved", "now"))
    assert found.knowledge.events[0].text == "now"


def test_wrong_clocks_are_no_alert_for_weeks() -> None:
    found = overview()
    refused = {Reason.SKEWED: 1}
    found.refused = refused
    found.assess(NOW + JUMP_S)
    found.assess(NOW)
    found.assess(NOW + 301)
    found.assess(NOW + 302 + 300)
    assert "clock" not in [alert.finding.kind for alert in found.alerts.open()]


def test_slots_are_taken_in_turns_as_ever() -> None:
    slots = ModelSlots()
    for number in range(MAX_MODELS):
        slots.enter(f"{number:032x}", True, NOW + JUMP_S)
    slots.set_back(NOW)
    assert slots.enter("f" * 32, True, NOW + TRIAL_S - 1) == (False, None)
    assert slots.enter("f" * 32, True, NOW + TRIAL_S)[0]
