"""The soak's pure parts: whom it kills, how memory grows, who is left over, and what counts as wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from subprocess import PIPE, Popen

import psutil
import pytest

from benchmarks.emulation.process_monitor import ProcessMonitor, anonymous_mb, slope_per_min
from benchmarks.recovery.kill_plan import KillPlan
from benchmarks.recovery.soak import Options, SoakResult, sheet
from benchmarks.recovery.soak_client import SoakText
from benchmarks.recovery.soak_swarm import Kill

SPANS = {"a 0-6": "0-6", "b 0-6": "0-6", "a 6-12": "6-12", "b 6-12": "6-12"}
ALL = frozenset(SPANS)
TOLD = SoakText(
    case=0,
    is_reference=False,
    is_same=True,
    tokens=8,
    started_at=10.0,
    ended_at=20.0,
    first_s=0.1,
    pause_s=0.2,
    repairs=0,
)


def found(*texts: SoakText, slope: float = 0.0) -> SoakResult:
    return SoakResult(texts, [], [], 100.0, {"client 0": slope}, {}, 1, [])


def test_the_same_seed_kills_the_same_and_all_are_killed() -> None:
    one, other = KillPlan(SPANS, 3), KillPlan(SPANS, 3)
    killed = [one.next(ALL) for _ in range(40)]
    assert killed == [other.next(ALL) for _ in range(40)]
    assert set(killed) == ALL
    assert killed != [KillPlan(SPANS, 4).next(ALL) for _ in range(40)]


def test_a_spans_last_holder_is_never_killed() -> None:
    victims = KillPlan(SPANS, 0)
    assert {victims.next(ALL - {"a 0-6"}) for _ in range(40)} == {"a 6-12", "b 6-12"}


def test_the_holder_of_each_span_that_lived_longest_is_spared() -> None:
    victims = KillPlan(SPANS, 0)
    killed = [victims.next(ALL) for _ in range(9)]
    last = {name: max((at for at, one in enumerate(killed) if one == name), default=-1) for name in SPANS}
    oldest = {min((name for name in SPANS if SPANS[name] == span), key=last.__getitem__) for span in SPANS.values()}
    assert set(victims.spare()) == oldest
    assert {victims.next(ALL) for _ in range(40)} == ALL - oldest


def test_a_whole_span_can_be_drawn() -> None:
    assert set(KillPlan(SPANS, 0).span()) in ({"a 0-6", "b 0-6"}, {"a 6-12", "b 6-12"})


def test_slopes_are_per_minute() -> None:
    assert slope_per_min([(at_s, 100 + 0.05 * at_s) for at_s in range(0, 120, 2)]) == pytest.approx(3.0)
    assert slope_per_min([(0.0, 1.0), (1.0, 5.0), (2.0, 5.0), (3.0, 1.0)]) == pytest.approx(0.0)
    assert slope_per_min([(7.0, 1.0)]) == 0.0


def test_anonymous_memory_is_what_was_touched() -> None:
    """Of a process that does nothing else meanwhile."""
    script = "print(flush=True); input(); held = bytearray(b'x') * 40_000_000; print(flush=True); input()"
    with Popen([sys.executable, "-c", script], stdin=PIPE, stdout=PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        process = [psutil.Process(child.pid)]
        before = anonymous_mb(process)
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        assert anonymous_mb(process) - before == pytest.approx(40, abs=4)
        child.stdin.write("\n")


def test_a_process_that_outlives_its_program_is_named() -> None:
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with Popen(sleeper, stdin=PIPE) as outlives, Popen(sleeper, stdin=PIPE) as ends:
        watch = ProcessMonitor()
        watch.look({"one": outlives.pid, "other": ends.pid}, 0.0)
        assert set(watch.memory) == {"one", "other"}
        ends.kill()
        assert psutil.wait_procs([psutil.Process(outlives.pid)], timeout=0)[1]
        assert ends.wait()
        assert watch.left_over(["other"]) == []
        assert [one.split()[:2] for one in watch.left_over(["one", "other"])] == [["one:", str(outlives.pid)]]
        outlives.kill()


def test_what_is_wrong() -> None:
    fine, other_tokens = TOLD, replace(TOLD, is_same=False)
    waited = replace(TOLD, started_at=99.0, ended_at=130.0)
    refused = replace(TOLD, started_at=101.0, ended_at=102.0, is_same=False, error="RouteError: nobody")
    assert found(fine, waited, refused, slope=1.0).faults() == []
    assert found(fine, waited, refused).waited() == [waited]
    assert len(found(other_tokens, fine).faults()) == 1
    assert len(found(replace(waited, is_same=False, error="interrupted")).faults()) == 1
    assert len(found(replace(other_tokens, started_at=101.0, ended_at=120.0)).faults()) == 1
    assert len(found(fine, slope=1.01).faults()) == 1


def test_the_table_says_what_was_counted() -> None:
    repaired = replace(TOLD, repairs=2, pause_s=0.75)
    waited = replace(TOLD, started_at=99.0, ended_at=130.0, pause_s=21.0)
    deaths, apart = [Kill("a 0-6", 1.0, 9.0), Kill("b 0-6", 16.0, 12.0)], [Kill("a 6-12", 100.0, 14.0)]
    slopes = {"bootstrap": -0.5, "client 0": 0.25, "a 0-6, life 2": 0.75}
    texts = (TOLD, repaired, replace(TOLD, is_same=False), waited)
    made = sheet(
        SoakResult(texts, deaths, apart, 100.0, slopes, {}, 9, ["left over of b 0-6, life 1: 7 p2pd"]), Options()
    )
    assert [row[1] for row in made.rows] == [
        *("2", "10.5 (12.0) s", "3 (24)", "1", "1 (2)", "0.75 (0.75, 0.75) s"),
        *("9; 1", "0.75", "0.25", "-0.50", "14.0 s", "1; 0; 21.0 s"),
    ]
