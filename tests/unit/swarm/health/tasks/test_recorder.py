"""The health loop goes on whatever it is told, and begins again whatever an earlier run left."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import swarm.health.state.overview
import swarm.health.tasks.recorder
from swarm.base.ids import PeerId
from swarm.base.tasks import TaskScope
from swarm.health.alerts.rules import AlertBook, load_book
from swarm.health.state.alert_rules import DELAYS
from swarm.health.state.contributions import ContributionBook
from swarm.health.state.node import SwarmEvent
from swarm.health.state.overview import Overview
from swarm.health.state.verdict import Assessment, Verdict, judge
from swarm.health.tasks.history import DOUBT_S, JUMP_S, LONGEST_S, ClockDoubt, History
from swarm.health.tasks.publisher import StatePublisher
from swarm.health.tasks.recorder import HealthLoop
from swarm.status.messages import ServedModel
from tests.telemetry_messages import status

T = 1_800_000_000.0
DAY_S = 86_400.0


async def test_a_number_that_cannot_be_shown_hides_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overview, publisher = Overview((), "test", T), StatePublisher()
    for name, at in (("sound", T), ("odd", float("inf"))):
        overview.knowledge.add_event(SwarmEvent(at, "ab" * 16, None, "moved", name))
    async with History.open(tmp_path / "health.sqlite3") as history:
        health_loop = HealthLoop(overview, publisher, history, iter(T + 5.0 * turn for turn in range(9)).__next__)
        for _ in range(9):
            health_loop.step()
    assert publisher.version == 9
    assert [event["text"] for event in publisher.state["events"]] == ["sound"]
    (record,) = caplog.records
    assert "a part of the state cannot be shown" in record.getMessage()


async def test_whatever_goes_wrong_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(swarm.health.tasks.recorder, "TICK_S", 0.0)
    overview, publisher, turns = Overview((), "test", T), StatePublisher(), [0]
    is_well = asyncio.Event()
    assess = Overview.assess

    def failing(self: Overview, now: float) -> list[Assessment]:
        turns[0] += 1
        if turns[0] < 40:
            raise KeyError("odd")
        is_well.set()
        return assess(self, now)

    monkeypatch.setattr(Overview, "assess", failing)
    async with History.open(tmp_path / "health.sqlite3") as history, TaskScope() as scope:
        scope.spawn(HealthLoop(overview, publisher, history).run())
        await asyncio.wait_for(is_well.wait(), 10)
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in records] == ["this state of the swarm cannot be shown; trying again"]


def test_a_model_that_cannot_be_judged_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = Overview((), "test", T)
    for number in range(2):
        fingerprint = f"{number:064x}"
        body = status(at=T, model=ServedModel(f"model-{number}", fingerprint, 12))
        found.knowledge.apply_telemetry(PeerId("Qm"), fingerprint, body, T)

    def odd(model: ServedModel, *other: Any) -> Verdict:  # noqa: ANN401
        if model.name == "model-0":
            raise ZeroDivisionError
        return judge(model, *other)

    monkeypatch.setattr(swarm.health.state.overview, "judge", odd)
    for _ in range(3):
        assert [one.model.name for one in found.assess(T)] == ["model-1"]
    assert len(caplog.records) == 1


async def test_it_begins_where_the_last_run_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(self: History, name: str) -> object:
        raise sqlite3.DatabaseError("database disk image is malformed")

    async with History.open(tmp_path / "health.sqlite3") as history:
        monkeypatch.setattr(History, "_load", unreadable)
        await HealthLoop(Overview((), "test", T), StatePublisher(), history, lambda: T).load()
    assert "cannot be read (database disk image is malformed); going on without" in caplog.text


@pytest.mark.parametrize("since", [float("nan"), float("inf"), -1.0, 1e300, 10**400, "soon", None])
def test_an_alert_of_no_time_is_left_out(since: object) -> None:
    book, row = (
        AlertBook(DELAYS),
        {"kind": "gap", "severity": "critical", "model": None, "text": "x", "about": "", "fix": None},
    )
    sound = {**row, "model_name": None, "since": T, "quiet_since": None, "worst": "critical"}
    load_book(book, {"v": 1, "open": [{**sound, "since": since, "about": "odd"}, sound]})
    assert [alert.since for alert in book.open()] == [T]


def test_contributions_of_no_size_are_left_out() -> None:
    book = ContributionBook()
    book.load([["Qm1", None, 10**400, 1.0, 5, None], ["Qm2", None, -5, 1.0, 5, None], ["Qm3", None, 5, 1.0, 5, None]])
    assert list(book.peers) == ["Qm3"]
    book.load(
        [["Qm4", None, -1, None], ["session", "no hex", 1, []], ["session", "00", 1, [["Qm1"], 7]], ["heir", "Qm1"]]
    )
    assert list(book.peers) == ["Qm3"]


@pytest.mark.parametrize("jump_s", [40 * DAY_S, -40 * DAY_S, 2 * JUMP_S])
def test_a_clock_is_doubted_for_a_day_after_a_jump(jump_s: float) -> None:
    doubt = ClockDoubt(None, None)
    assert doubt.is_believed(T, 0.0)
    assert doubt.is_believed(T + 60, 60.0)
    assert not doubt.is_believed(T + 120 + jump_s, 120.0)
    assert not doubt.is_believed(T + 180 + jump_s, 180.0)
    assert not doubt.is_believed(T + 240, 240.0)  # it came back, which is a jump too
    assert not doubt.is_believed(T + 240 + DOUBT_S - 1, 240 + DOUBT_S - 1)
    assert doubt.is_believed(T + 240 + DOUBT_S, 240 + DOUBT_S)


def test_the_doubt_survives_a_restart_and_a_day_of_it_is_enough() -> None:
    first = ClockDoubt(T, None)
    assert not first.is_believed(T + 40 * DAY_S, 0.0)
    again = ClockDoubt(T + 40 * DAY_S, first.since)
    assert not again.is_believed(T + 40 * DAY_S + 60, 5.0)
    assert not again.is_believed(T + 40 * DAY_S + DOUBT_S - 1, DOUBT_S - 60)
    assert again.is_believed(T + 40 * DAY_S + DOUBT_S + 1, DOUBT_S + 1)
    assert again.since is None


def test_a_clock_that_never_stops_jumping_is_believed_now_and_then() -> None:
    doubt = ClockDoubt(None, None)
    believed = [doubt.is_believed(T + (day % 2) * 40 * DAY_S, day * DAY_S / 2) for day in range(60)]
    assert 2 <= sum(believed[1:]) <= 60 * DAY_S / 2 / LONGEST_S + 1
