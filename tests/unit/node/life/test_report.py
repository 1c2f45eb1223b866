"""What a node finds to say: counters turned into means, trouble told seldom, and what waits while nobody listens."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.life.publisher import MAX_EVENTS, Due, Outbox, PendingEvent
from node.life.report import ErrorEvents, NodeDescription, NodeReport, NodeSnapshot, RefutedPeers
from node.model.config import ServeConfig
from node.model.device import Device
from node.session.counters import NodeCounters
from node.session.receipts import ReceiptBook
from swarm.base.errors import ConfigError
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeState
from swarm.protocol.authority import SessionKey
from swarm.protocol.limits import REFUTED_S
from swarm.protocol.messages import Counters
from swarm.status.messages import (
    MAX_EVENT_CHARACTERS,
    MAX_OFF,
    EventKind,
    MessageKind,
    Presence,
    Receipts,
    Stamp,
    seal_body,
)
from swarm.trust.bounds import Differs
from swarm.trust.receipt import seal
from swarm.trust.verify import Refutation
from tests.receipts import receipt
from tests.telemetry_messages import FINGERPRINT, NOW, identity, topic

GOOD = ServeConfig(layers="0-4", host="127.0.0.1")
STAMP = Stamp("0" * 32, 7, NOW)


class Timer:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Stage:
    """A node without a node."""

    def __init__(self) -> None:
        self.timer, self.counters, self.outbox = Timer(), NodeCounters(), Outbox()
        self.snapshot = NodeSnapshot(Span(0, 4), NodeState.SERVING, "cpu-float32", ((1, 8.123456),), 2, 100, 4_096, 0.0)
        model = ModelIdentity("demo-target", FINGERPRINT, "c" * 64, "w" * 64, "t" * 64, 12)
        description = NodeDescription(
            *(model, None, Device(torch.device("cpu")), self.counters, lambda: self.snapshot, ReceiptBook(PeerId("Qm")))
        )
        self.portrait = NodeReport(description, self.outbox, self.timer)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_metrics_are_totals_and_means_since_the_last(stage: Stage) -> None:
    counters = stage.counters
    counters.sweeps, counters.tree_nodes, counters.tokens, counters.layer_tokens = 10, 640, 30, 120
    counters.queue_ms, counters.compute_ms = 5.0, 800.0
    counters.bytes_in, counters.bytes_out, counters.errors = 1_000, 2_000, 1
    stage.timer.now_s += 4
    stage.snapshot = replace(stage.snapshot, worked_ms=1_000.0)
    first = stage.portrait.metrics(STAMP)
    assert (first.sweeps, first.tree_nodes, first.tokens, first.layer_tokens) == (10, 640, 30, 120)
    assert (first.queue_ms, first.compute_ms, first.busy, first.uptime_s) == (0.5, 80.0, 0.25, 4.0)
    assert (first.bytes_in, first.bytes_out, first.errors, first.sessions) == (1_000, 2_000, 1, 2)
    assert (first.kv_tokens_free, first.kv_tokens_total, first.sweep_ms) == (100, 4_096, ((1, 8.123),))
    assert (first.device_memory_bytes, first.device_temperature_c) == (None, None)
    counters.sweeps, counters.queue_ms, counters.compute_ms = 12, 25.0, 820.0
    stage.timer.now_s += 2
    second = stage.portrait.metrics(STAMP)
    assert (second.sweeps, second.queue_ms, second.compute_ms, second.busy) == (12, 10.0, 10.0, 0.0)
    third = stage.portrait.metrics(STAMP)
    assert (third.queue_ms, third.compute_ms, third.busy) == (0.0, 0.0, 0.0), "nothing since, and no time passed"
    assert seal_body(third, topic(third), identity(0))


def test_a_node_that_moved_has_a_new_engine_and_is_not_less_than_idle(stage: Stage) -> None:
    stage.snapshot = replace(stage.snapshot, worked_ms=9_000.0)
    stage.timer.now_s += 5
    assert stage.portrait.metrics(STAMP).busy == 1.0, "a long slice is booked when it ends"
    stage.snapshot = replace(stage.snapshot, worked_ms=500.0)
    stage.timer.now_s += 5
    assert stage.portrait.metrics(STAMP).busy == 0.1


@pytest.mark.parametrize("state", NodeState)
def test_status_says_what_the_node_is(stage: Stage, state: NodeState) -> None:
    stage.snapshot = replace(stage.snapshot, state=state)
    status = stage.portrait.status(STAMP, is_birth=True, leaving=False)
    assert (status.state.value, status.is_birth, status.stamp) == (state.value, True, STAMP)
    assert (status.device, status.name, status.span, status.kv_tokens_total) == ("cpu", None, Span(0, 4), 4_096)
    assert stage.portrait.status(STAMP, is_birth=False, leaving=True).state is Presence.LEFT
    assert seal_body(status, topic(status), identity(0))


async def everything(outbox: Outbox) -> list[Due]:
    """All that waits, until it would wait for more."""
    found: list[Due] = []
    while True:
        try:
            async with asyncio.timeout(0):
                due = await outbox.next()
        except TimeoutError:
            return found
        found.append(due)
        outbox.sent(due)
        if outbox.leaving and due is MessageKind.STATUS:
            return found


async def test_trouble_is_told_seldom_and_added_up(stage: Stage) -> None:
    troubles = ErrorEvents(stage.counters, stage.timer)
    troubles.add_to(stage.outbox)
    assert await everything(stage.outbox) == []
    stage.counters.errors, stage.counters.restores = 3, 1
    troubles.add_to(stage.outbox)
    stage.counters.errors = 5
    troubles.add_to(stage.outbox)
    assert await everything(stage.outbox) == [
        PendingEvent(EventKind.ERROR, "errors in sessions: 3"),
        PendingEvent(EventKind.RESTORED, "sessions restored here: 1"),
    ]
    stage.timer.now_s += 60
    troubles.add_to(stage.outbox)
    assert await everything(stage.outbox) == [PendingEvent(EventKind.ERROR, "errors in sessions: 2")]


async def test_what_waits_is_bounded_and_the_oldest_gives_way() -> None:
    outbox = Outbox()
    for number in range(1_000):
        outbox.request(MessageKind.METRICS)
        outbox.request(MessageKind.STATUS)
        outbox.add_event(EventKind.ERROR, str(number))
    waiting = await everything(outbox)
    assert waiting[0] is MessageKind.STATUS
    assert waiting[1:-1] == [PendingEvent(EventKind.ERROR, str(number)) for number in range(1_000 - MAX_EVENTS, 1_000)]
    assert waiting[-1] is MessageKind.METRICS
    assert outbox.dropped == 1_000 - MAX_EVENTS


async def test_an_event_waits_until_it_was_said() -> None:
    outbox = Outbox()
    outbox.add_event(EventKind.JOINED, "one")
    first = await outbox.next()
    assert await outbox.next() is first, "its connection broke"
    for number in range(MAX_EVENTS):
        outbox.add_event(EventKind.ERROR, str(number))
    outbox.sent(first)  # it gave way meanwhile: nothing else is taken for it
    assert len(await everything(outbox)) == MAX_EVENTS


async def test_the_last_word_is_the_status() -> None:
    outbox = Outbox()
    outbox.request(MessageKind.STATUS)
    outbox.request(MessageKind.METRICS)
    outbox.add_event(EventKind.LEFT, "left the swarm")
    outbox.leave()
    left = [PendingEvent(EventKind.LEFT, "left the swarm"), MessageKind.RECEIPTS, MessageKind.STATUS]
    assert await everything(outbox) == left


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mqtt": "localhost"}, "--mqtt"),
        ({"mqtt": "http://localhost"}, "--mqtt"),
        ({"mqtt": "mqtt://"}, "--mqtt"),
        ({"mqtt": "mqtt://localhost:0x1"}, "--mqtt"),
        ({"mqtt": "mqtt://localhost:99999"}, "--mqtt"),
        ({"mqtt": "mqtt://localhost/topic"}, "--mqtt"),
        ({"mqtt": "mqtt://localhost", "mqtt_prefix": "a/#"}, "--mqtt-prefix"),
        ({"mqtt_ca": Path("ca.pem")}, "--mqtt-ca"),
        ({"mqtt": "mqtt://localhost", "mqtt_ca": Path("ca.pem")}, "--mqtt-ca"),
        ({"mqtt": "mqtts://me:secret@localhost", "mqtt_ca": Path("/nowhere/ca.pem")}, "--mqtt-ca"),
        ({"mqtt": "mqtts://me:secret@localhost:what"}, "--mqtt"),
        ({"mqtt": "mqtts://me:secret"}, "--mqtt"),
    ],
)
def test_a_broker_that_cannot_be_is_refused_at_once(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(GOOD, **given).check()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_broker_is_an_url() -> None:
    assert GOOD.broker() is None
    broker = replace(GOOD, mqtt="mqtt://me:s%40cret@broker.example").broker()
    assert broker is not None
    assert (broker.host, broker.port, broker.user, broker.password, broker.tls) == (
        *("broker.example", 1_883, "me", "s@cret"),
        None,
    )
    assert "cret" not in f"{broker} {broker!r}"
    secure = replace(GOOD, mqtt="mqtts://[::1]:999").broker()
    assert secure is not None
    assert (secure.host, secure.port, secure.tls is None) == ("::1", 999, False)


def test_counters_of_the_wire_are_what_they_were() -> None:
    counters = NodeCounters(sweeps=3, errors=1, tokens=9, bytes_in=4).to_message(5, 6)
    assert counters == Counters(sweeps=3, errors=1, forwards=5, rows_in_forwards=6)


def test_a_gpu_is_told_by_its_product_and_what_it_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = Device(torch.device("cuda:1")), 0

    def temperature(device: torch.device) -> int:
        nonlocal asked
        asked += 1
        raise ModuleNotFoundError("pynvml is not installed")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Example")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 10))
    monkeypatch.setattr(torch.cuda, "temperature", temperature)
    assert (device.name, device.memory_bytes()) == ("NVIDIA Example", 7)
    assert [device.temperature_c(), device.temperature_c(), asked] == [None, None, 1]
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    assert Device(torch.device("cuda")).temperature_c() == 61.0


def test_who_was_found_wrong_is_told_at_once_and_by_records_for_a_day() -> None:
    """Of listed machines alone, so that made-up names drive nobody out of a record."""
    now, outbox = 1_000_000.0, Outbox()
    book = RefutedPeers(lambda: now)
    far = Differs("rows", (3, 4), 2, math.inf, 1e-5)
    for number in range(12):
        book.note(Refutation(peer_id(number), Span(4, 8), "cpu-float32", far, "e5" * 32, now + number), outbox)
    told = [one.refuted for one in outbox._events]
    assert all(one is not None and one.off == MAX_OFF for one in told), "infinite is told as a number"
    assert all(len(one.text) <= MAX_EVENT_CHARACTERS for one in outbox._events)
    assert book.announced("f") == ()
    book.listed["f"] = frozenset(map(peer_id, range(10)))
    assert [peer for peer, _ in book.announced("f")] == [peer_id(number) for number in range(2, 10)]
    now += REFUTED_S + 5.0
    assert [peer for peer, _ in book.announced("f")] == [peer_id(number) for number in range(6, 10)]


def peer_id(number: int) -> PeerId:
    return PeerId("Qm" + "abcdefghijkm"[number] * 44)


def test_the_first_receipts_of_a_connection_say_which_keys_were_its(stage: Stage) -> None:
    book, key = stage.portrait._description.receipts, SessionKey.fresh()
    made = seal(receipt(key, 5, began_at=int(time.time()), issued_at=int(time.time())), key)
    assert stage.portrait.receipts(STAMP, is_first=True) is None
    book.load([made])
    stage.portrait._description = replace(stage.portrait._description, successions=(b"old",))
    assert stage.portrait.receipts(STAMP, is_first=True) == Receipts(STAMP, (), (b"old",))
    later = stage.portrait.receipts(STAMP, is_first=False)
    assert later == Receipts(STAMP, (made,))
    assert later is not None
    stage.portrait.published(later)
    assert stage.portrait.receipts(STAMP, is_first=False) is None
