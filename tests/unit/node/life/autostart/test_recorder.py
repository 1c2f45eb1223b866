"""What a running node writes down, when, and what stays when the disk, the file or the node itself fails."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

import node.life.autostart.recorder
from node.life.autostart.recorder import ALIVE_S, LOOK_S, STOPPED, WRITE_S, NodeFacts, NodeRecorder, RecorderClocks
from node.life.autostart.state_file import Given, LocalStatus, Stage, StateFile
from swarm.base.errors import RegistryError
from swarm.base.tasks import TaskScope

SERVING = NodeFacts(Stage.SERVING, "QmPeer", "demo", "0-4", 12, "203.0.113.7:1", "direct")


class Desk:
    """A recorder whose node and clocks the test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(folder))
        self.identity = folder / "identity.key"
        self.facts = NodeFacts(Stage.STARTING)
        self.now, self.day = 1_000.0, date(2026, 11, 27)
        self.file = StateFile.of(self.identity)
        self.recorder = self.another()

    def another(self) -> NodeRecorder:
        clocks = RecorderClocks(lambda: 1e9 + self.now, lambda: self.now, lambda: self.day)
        return NodeRecorder(self.identity, lambda: self.facts, 20.0, clocks)

    def read(self) -> LocalStatus:
        status = self.file.read()
        assert status is not None
        return status

    def look(self, after_s: float, facts: NodeFacts) -> bool:
        """Whether the look is followed by a write."""
        self.now, self.facts = self.now + after_s, facts
        self.recorder.look()
        if not self.recorder._is_due():
            return False
        self.recorder._write(self.recorder._status)
        return True


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


def gave(tokens: int, sent_bytes: int = 0) -> NodeFacts:
    return replace(SERVING, given=Given(tokens=tokens, sweeps=tokens, sent_bytes=sent_bytes))


def test_a_run_is_told_from_start_to_end(desk: Desk) -> None:
    with desk.recorder.recording():
        assert desk.read().stage is Stage.STARTING
        assert desk.read().pid == os.getpid()
        assert desk.file.is_in_use
        assert desk.look(60, SERVING)
        assert (desk.read().stage, desk.read().serving_since, desk.read().reach) == (
            Stage.SERVING,
            1e9 + 1_060,
            "direct",
        )
        desk.look(100, gave(7, sent_bytes=12_500_000))
        assert desk.read().uplink_mbit_per_s == 1.0
        desk.look(10, replace(gave(7), stage=Stage.PAUSED, paused_for="the machine runs on battery"))
        assert desk.read().paused_for == "the machine runs on battery"
        desk.look(30, gave(7, sent_bytes=12_500_000))
    ended = desk.read()
    assert (ended.stage, ended.why, ended.sessions) == (Stage.ENDED, STOPPED, 0)
    assert not desk.file.is_in_use
    assert (ended.run.serving_s, ended.run.paused_s, ended.run.pauses) == (110, 30, 1)
    assert ended.run.tokens == ended.ever.tokens == 7


def test_what_was_given_is_kept_across_runs_and_days(desk: Desk) -> None:
    for day in (26, 27):
        desk.day, desk.facts = date(2026, 11, day), NodeFacts(Stage.STARTING)
        desk.recorder = desk.another()
        with desk.recorder.recording():
            desk.look(5, gave(10))
    status = desk.read()
    assert (status.run.tokens, status.ever.tokens) == (10, 20)
    assert {day: given.tokens for day, given in status.days.items()} == {"2026-11-26": 10, "2026-11-27": 10}


def test_it_is_written_when_something_happens_and_seldom_otherwise(desk: Desk) -> None:
    with desk.recorder.recording():
        assert desk.look(LOOK_S, SERVING), "another stage"
        assert not desk.look(LOOK_S, SERVING)
        assert not desk.look(LOOK_S, gave(1)), "amounts wait a little"
        assert desk.look(WRITE_S, gave(2))
        assert not desk.look(ALIVE_S - 1, gave(2)), "nothing is new"
        assert desk.look(2, gave(2)), "it lives"
        logging.getLogger("node").warning("a %s\nfails", "\x1b[31mpeer")
        logging.getLogger("node").info("nothing")
        assert desk.look(LOOK_S, gave(2)), "a trouble"
    assert desk.read().trouble == "a \ufffd[31mpeer\\nfails"
    assert desk.recorder.trouble not in logging.getLogger().handlers


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RegistryError("no peer answers"), "no peer answers"),
        (ValueError("odd"), "it failed: ValueError: odd"),
        (asyncio.CancelledError(), STOPPED),
    ],
)
def test_the_end_says_why(error: BaseException, why: str, desk: Desk) -> None:
    with pytest.raises(type(error)), desk.recorder.recording():
        raise error
    assert desk.read().why == why


def test_a_second_node_with_the_same_identity_writes_nothing(desk: Desk) -> None:
    with desk.recorder.recording():
        desk.look(10, gave(5))
        with pytest.raises(RegistryError), desk.another().recording():
            raise RegistryError("identity in use")
        assert desk.read().stage is Stage.SERVING
        assert desk.file.is_in_use


def test_a_damaged_file_is_set_aside_in_one_line(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.file.path.parent.mkdir(parents=True)
    desk.file.path.write_text("{")
    with desk.recorder.recording():
        desk.look(10, gave(5))
    (message,) = caplog.messages
    assert "was damaged" in message
    assert desk.read().ever.tokens == 5
    assert desk.file.path.with_name(desk.file.path.name + ".damaged").read_text() == "{"


def test_a_disk_that_takes_nothing_is_told_once_and_ends_nothing(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.file.path.parent.parent.mkdir(parents=True)
    desk.file.path.parent.write_text("a file where the folder should be")
    with desk.recorder.recording():
        desk.look(10, gave(5))
        desk.look(100, gave(6))
    assert len(caplog.messages) == 1


def test_a_file_that_cannot_be_read_is_not_written_over(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    with desk.recorder.recording():
        desk.look(10, gave(5))

    def refuse(file: StateFile) -> None:
        raise PermissionError(13, "Permission denied", str(file.path))

    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "read", refuse)
        with desk.another().recording():
            pass
    assert desk.read().ever.tokens == 5


async def test_keeping_goes_on_whatever_the_node_says(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.life.autostart.recorder, "LOOK_S", 0.0)
    written, looks = asyncio.Event(), 0

    def facts() -> NodeFacts:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError("odd")
        if desk.recorder._written is not None and desk.recorder._written.stage is Stage.SERVING:
            written.set()
        return SERVING

    desk.recorder._look = facts
    desk.now += 100
    with desk.recorder.recording():
        async with TaskScope() as scope, asyncio.timeout(10):
            scope.spawn(desk.recorder.keep())
            await written.wait()
