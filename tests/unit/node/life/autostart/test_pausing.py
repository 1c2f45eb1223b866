"""When a node pauses and when it goes on: by causes that flicker, by several at once, by sensors that fall silent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import node.life.autostart.pausing
from node.life.autostart.pausing import (
    UNKNOWN_S,
    CpuShare,
    CpuTime,
    GpuShare,
    PauseCause,
    PauseJudge,
    Wishes,
    by_process,
    causes,
    everybodys_time,
    family,
    on_battery,
    run_quietly,
    time_of,
)
from swarm.base.quiet_hours import QuietHours


class Scene:
    """A judge of two causes whose clock and sensors the test sets."""

    def __init__(self, begin_s: float = 10.0, end_s: float = 60.0) -> None:
        self.now = 1_000.0
        self.seen: dict[str, bool | None] = {"a game": False, "on battery": False}
        causes = [
            PauseCause("a game", lambda: self.seen["a game"], begin_s, end_s),
            PauseCause("on battery", lambda: self.seen["on battery"], begin_s, end_s),
        ]
        self.judge = PauseJudge(causes, lambda: self.now)

    def look(self, after_s: float = 0.0, game: bool | None = False, battery: bool | None = False) -> str | None:
        self.now += after_s
        self.seen = {"a game": game, "on battery": battery}
        return self.judge.look()


def test_a_cause_must_last_to_begin_and_be_away_to_end() -> None:
    scene = Scene()
    assert scene.look() is None
    assert scene.look(5, game=True) is None
    assert scene.look(9, game=True) is None
    assert scene.look(2, game=True) == "a game"
    assert scene.look(5) == "a game"
    assert scene.look(59) == "a game"
    assert scene.look(2) is None


def test_a_cause_that_flickers_neither_begins_nor_ends() -> None:
    scene = Scene()
    scene.look()
    assert [scene.look(6, game=bool(step % 2)) for step in range(20)] == [None] * 20
    scene.look(5, game=True)
    assert scene.look(10, game=True) == "a game"
    assert {scene.look(40, game=bool(step % 2)) for step in range(20)} == {"a game"}


def test_what_is_on_at_the_first_look_holds_at_once() -> None:
    assert Scene().look(battery=True) == "on battery"


def test_the_second_look_is_no_first_one() -> None:
    scene = Scene()
    assert scene.look(game=None) is None
    assert scene.look(5, game=True) is None


def test_all_causes_are_told_and_the_last_one_ends_the_pause() -> None:
    scene = Scene(begin_s=0.0, end_s=0.0)
    assert scene.look(1, game=True, battery=True) == "a game and on battery"
    assert scene.look(1, battery=True) == "on battery"
    assert scene.look(1) is None


def test_a_sensor_that_falls_silent_changes_nothing_for_a_while_and_holds_nothing_for_ever() -> None:
    scene = Scene()
    scene.look(game=True)
    assert scene.look(1, game=None) == "a game"
    assert scene.look(UNKNOWN_S - 1, game=None) == "a game"
    assert scene.look(2, game=None) is None
    assert scene.look(UNKNOWN_S, game=None) is None


def test_an_unknown_moment_breaks_a_beginning() -> None:
    scene = Scene()
    scene.look()
    scene.look(1, game=True)
    scene.look(8, game=None)
    assert scene.look(8, game=True) is None


@pytest.mark.parametrize("count", [0, 1])
def test_without_causes_there_is_nothing_to_look_for(count: int) -> None:
    judge = PauseJudge([PauseCause("x", lambda: False, 0, 0)] * count, lambda: 0.0)
    assert judge.is_needed == bool(count)
    assert judge.look() is None


UUID = "GPU-a9e3eee8-60f2-bfd8-b29c-c9d760e5433e"
H100 = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0        {pid}     C     24      0      -      -      -      -    python3
"""
"""As nvidia-smi printed it on an H100, trailing blanks apart."""
IDLE = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0          -     -      -      -      -      -      -      -    -
"""
DESKTOP = """\
# gpu        pid  type    sm   mem   enc   dec   command
# Idx          #   C/G     %     %     %     %   name
    0       {desktop}     G     3     1     -     -   Xorg
    0       {game}   C+G    61    22     -     -   game
    0       {game}     C     4     0     -     -   game
"""
NOBODY = 2**22 + 1
"""A process number that Linux never gives."""


class Smi:
    """nvidia-smi, as the test wants it."""

    def __init__(self, total: str | None, table: str | None) -> None:
        self.total, self.table = total, table
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> str | None:
        assert command[0] == "nvidia-smi"
        assert command[-2:] == ["-i", UUID]
        self.asked.append(command[1])
        return self.table if command[1] == "pmon" else self.total


def look(smi: Smi, own: Sequence[int] = (), worked: Sequence[float] = (5.0, 5.0)) -> bool | None:
    """One look by a node whose engine has worked so long before and now."""
    times = iter(worked)
    return GpuShare(UUID, lambda: own, lambda: next(times), smi).look()


def test_the_table_is_read_by_its_head() -> None:
    assert by_process(H100.format(pid=570)) == {570: 24.0}
    assert by_process(DESKTOP.format(desktop=7, game=8)) == {7: 3.0, 8: 65.0}
    assert by_process(IDLE) == by_process("") == by_process("Not supported\n# x") == {}


def test_a_game_is_another_program_and_a_desktop_is_none() -> None:
    here, parent = os.getpid(), os.getppid()
    game = Smi("63", DESKTOP.format(desktop=here, game=parent))
    assert look(game) is True
    assert look(game, own=[parent]) is False, "another node of this machine"
    assert look(Smi("24", H100.format(pid=here)), own=[here], worked=(1.0, 9.0)) is False, "this node's own work"


def test_a_gpu_that_does_little_is_not_asked_further() -> None:
    smi = Smi("3\n", None)
    assert look(smi) is False
    assert smi.asked == ["--query-gpu=utilization.gpu"]


def test_own_work_under_an_unknown_number_is_not_taken_for_another_programs() -> None:
    """In a container the driver numbers processes as the host does."""
    table = H100.format(pid=NOBODY)
    assert look(Smi("24", table), own=[os.getpid()], worked=(1.0, 9.0)) is None
    assert look(Smi("24", table), own=[os.getpid()]) is True, "this node has not worked since the last look"


@pytest.mark.parametrize("table", [None, "", IDLE])
def test_without_a_table_a_gpu_counts_as_foreign_only_while_this_node_does_nothing(table: str | None) -> None:
    assert look(Smi("80", table)) is True
    assert look(Smi("80", table), worked=(1.0, 9.0)) is None


def test_a_gpu_of_which_nothing_is_known() -> None:
    assert look(Smi(None, None)) is None
    assert look(Smi("[N/A]", None)) is None


def cpu(times: Sequence[tuple[float, float]], own: Sequence[float], cores: int = 4) -> list[bool | None]:
    """The looks of a machine with (clock, seconds of all programs) and seconds of this node."""
    seconds, mine = iter(times), iter(own)
    share = CpuShare(lambda: CpuTime(*next(seconds)), lambda: next(mine), cores)
    return [share.look() for _ in times[1:]]


def test_cores_that_others_use_count_and_own_ones_do_not() -> None:
    others = [(0.0, 0.0), (5.0, 15.0), (10.0, 30.0), (15.0, 31.0)]
    assert cpu(others, own=[0.0, 1.0]) == [None, True, False]
    assert cpu(others, own=[0.0, 14.0]) == [None, False, False], "this node's own work"
    assert cpu(others, own=[20.0, 3.0]) == [None, True, False], "a helper of ours ended"


def test_own_times_are_asked_only_where_the_machine_is_busy_and_not_too_often() -> None:
    assert cpu([(0.0, 0.0), (5.0, 9.0), (10.0, 18.0)], own=[]) == [False, False]
    assert cpu([(0.0, 0.0), (0.5, 9.0)], own=[]) == [None]


def test_processor_times_of_this_very_process() -> None:
    clock = iter([1.0, 2.0])
    before = everybodys_time(lambda: next(clock))
    own = time_of([os.getpid(), NOBODY])
    after = everybodys_time(lambda: next(clock))
    assert 0 < own <= after.spent
    assert before.spent <= after.spent
    assert (before.at, after.at) == (1.0, 2.0)


def test_a_family_is_a_process_and_what_it_started() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert family([os.getpid(), NOBODY]) >= {os.getpid(), child.pid}
        child.communicate(b"\n")


@pytest.mark.parametrize(
    ("battery", "seen"),
    [
        (None, False),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=False), True),
        (SimpleNamespace(power_plugged=None), None),
    ],
)
def test_batteries(battery: object, seen: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert on_battery() is seen
    monkeypatch.delattr(psutil, "sensors_battery")
    assert on_battery() is False


def test_only_what_the_owner_wants_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert causes(Wishes(), lambda: True, "busy") == []
    night = QuietHours.parse("22:00-07:00")
    quiet, battery, busy = causes(Wishes(True, True, night), lambda: True, "a game runs")
    assert (quiet.reason, battery.reason, busy.reason) == (
        *("quiet hours 22:00-07:00", "the machine runs on battery", "a game runs"),
    )
    assert busy.look() is True

    class Late(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Late:  # noqa: ANN401
            return cls(2026, 11, 27, 23, 0, tzinfo=tz)

    monkeypatch.setattr(node.life.autostart.pausing, "datetime", Late)
    assert quiet.look() is True


def test_a_program_that_is_missing_fails_or_hangs_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_quietly(["echo", "7"]) == "7\n"
    assert run_quietly([str(tmp_path / "none")]) is None
    assert run_quietly(["false"]) is None
    monkeypatch.setattr(node.life.autostart.pausing, "ASK_S", 0.01)
    assert run_quietly(["sleep", "5"]) is None
