"""What `node status` prints: of nodes that serve, pause or start, of several, of none, of one that was killed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from node.life.autostart.show import UNSAID, ShowNodeStatus, duration, show
from node.life.autostart.state_file import Given, LocalStatus, Stage, StateFile

NOW = datetime(2026, 11, 27, 12, 0).timestamp()
SERVING = LocalStatus(
    identity="/home/anna/.config/canopy/identity.key",
    pid=4_711,
    version="0.2.0",
    stage=Stage.SERVING,
    started_at=NOW - 4_000,
    seen_at=NOW - 5,
    peer="QmPeer",
    model="demo-target",
    layers="0-4",
    num_layers=12,
    address="203.0.113.7:31338",
    reach="mapped",
    sessions=1,
    serving_since=NOW - 3_720,
    uplink_mbit_per_s=3.14,
    max_mbit=20.0,
    run=Given(tokens=1_234, sweeps=200, sent_bytes=2.5e6, serving_s=3_720),
    ever=Given(tokens=1_234_567, sweeps=90_000, sent_bytes=3.2e9, serving_s=900_000, paused_s=7_500, pauses=12),
    days={"2026-11-27": Given(tokens=2_000, sweeps=300, sent_bytes=4e6, serving_s=5_000)},
)


def shown(folder: Path, statuses: dict[str, LocalStatus], *, is_running: bool = True) -> tuple[int, list[str]]:
    """The exit status and the lines, where the nodes of these files run or do not."""
    files = {name: StateFile.of(folder / name, folder) for name in statuses}
    locks = [file.lock() for file in files.values() if is_running]
    for name, status in statuses.items():
        files[name].write(status)
    lines: list[str] = []
    code = show(ShowNodeStatus(), NOW, lines.append, folder)
    for lock in locks:
        assert lock is not None
        lock.close()
    return code, lines


def test_a_node_that_serves(tmp_path: Path) -> None:
    code, lines = shown(tmp_path, {"a": SERVING})
    assert code == 0
    assert lines[:3] == [
        "serves layers 0…3 of 12 of demo-target since 2026-11-27 10:58, 1 h 2 min ago",
        "  reached: mapped, at 203.0.113.7:31338",
        "  now: 1 session, sends 3.1 of 20 Mbit/s",
    ]
    assert len({len(line) for line in lines[3:]}) == 1, "columns stand below each other"
    assert [re.split(r" {2,}", line.strip()) for line in lines[3:]] == [
        ["given", "today", "this run", "ever"],
        ["tokens", "2,000", "1,234", "1,234,567"],
        ["signed for", "0", "0", "0"],
        ["sweeps", "300", "200", "90,000"],
        ["sent", "4.0 MB", "2.5 MB", "3.2 GB"],
        ["time serving", "1 h 23 min", "1 h 2 min", "10 d 10 h"],
        ["time paused", "0 s", "0 s", "2 h 5 min (12×)"],
    ]


def test_a_pause_says_why_and_that_it_ends(tmp_path: Path) -> None:
    paused = replace(SERVING, stage=Stage.PAUSED, paused_for="the machine runs on battery", paused_since=NOW - 300)
    code, (first, *_) = shown(tmp_path, {"a": paused})
    assert code == 0
    assert first.startswith("paused for 5 min: the machine runs on battery; it goes on by itself (layers 0…3 of 12")


def test_nodes_that_start_wait_or_leave(tmp_path: Path) -> None:
    early = LocalStatus("key", 1, "0.2.0", Stage.STARTING, NOW - 9, NOW)
    assert shown(tmp_path, {"a": early})[1][0] == "starts for 9 s (a node)"
    waiting = replace(early, stage=Stage.PAUSED, paused_for="quiet hours 22:00-07:00")
    assert shown(tmp_path, {"a": waiting})[1][0].startswith("paused for 9 s: quiet hours 22:00-07:00")
    assert shown(tmp_path, {"a": replace(SERVING, stage=Stage.LEAVING)})[1][0].startswith("leaves: ")


def test_several_nodes_are_told_apart(tmp_path: Path) -> None:
    other = replace(SERVING, identity="/srv/second.key", peer="QmOther", layers="4-8")
    code, lines = shown(tmp_path, {"a": SERVING, "b": other})
    assert code == 0
    assert {line for line in lines if ".key)" in line} == {
        f"QmPeer ({SERVING.identity})",
        "QmOther (/srv/second.key)",
    }


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (replace(SERVING, stage=Stage.ENDED, why="it was told to stop"), "because it was told to stop"),
        (SERVING, UNSAID),
    ],
)
def test_where_none_runs_the_last_one_is_told(status: LocalStatus, why: str, tmp_path: Path) -> None:
    older = replace(SERVING, seen_at=NOW - 1e6, why="another reason", stage=Stage.ENDED)
    code, (line,) = shown(tmp_path, {"old": older, "last": status}, is_running=False)
    assert code == 1
    assert line == (
        f"no node runs here; the last one (layers 0…3 of 12 of demo-target) ended at 2026-11-27 11:59, {why}; "
        "it gave 1,234,567 tokens in all"
    )


def test_where_none_has_run_the_first_step_is_told(tmp_path: Path) -> None:
    code, (line,) = shown(tmp_path / "nothing", {})
    assert code == 1
    assert "`node serve`" in line


def test_a_damaged_file_is_one_line_and_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text("{")
    _, lines = shown(tmp_path, {"a": SERVING})
    assert lines[0] == f"{tmp_path / '0.json'} is damaged; the next start sets it aside"
    assert lines[1].startswith("serves ")


def test_nothing_that_is_shown_commands_a_terminal(tmp_path: Path) -> None:
    evil = replace(SERVING, model="x\x1b[2J", trouble="\x1b]0;title\x07 said\na peer", trouble_at=NOW)
    _, lines = shown(tmp_path, {"a": evil})
    assert not [line for line in lines if "\x1b" in line or "\x07" in line or "\n" in line]
    assert lines[-1].startswith("  last trouble at 2026-11-27 12:00: ")


def test_json_has_every_node_and_whether_it_runs(tmp_path: Path) -> None:
    StateFile.of(tmp_path / "a", tmp_path).write(SERVING)
    lines: list[str] = []
    assert show(ShowNodeStatus(json=True), NOW, lines.append, tmp_path) == 1
    ((node,),) = map(json.loads, lines)
    assert node["is_running"] is False
    assert LocalStatus.of_json(node) == SERVING


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "0 s"), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3_600, "1 h"), (3_725, "1 h 2 min"), (93_600, "1 d 2 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
