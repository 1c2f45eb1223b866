"""The history file: folding, windows, bounds, what survives; and the budget and reading of probes."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from swarm.base.errors import ConfigError, RemoteProtocolError
from swarm.health.state.probe_results import ProbeBudget, ProbeLog, read_comparison, read_probe
from swarm.health.state.verdict import Grade
from swarm.health.tasks.history import MAX_MODELS, History, Sample

T = 1_800_000_000.0
FINGERPRINT = "ab" * 16
VERSION_1 = """
CREATE TABLE points (
    model TEXT NOT NULL, step_s INTEGER NOT NULL, at INTEGER NOT NULL,
    samples INTEGER NOT NULL, worst INTEGER NOT NULL, min_replicas INTEGER NOT NULL, machines REAL NOT NULL,
    sweeps_per_s REAL NOT NULL, sweeps_samples INTEGER NOT NULL,
    tokens_per_s REAL NOT NULL, ttft_ms REAL NOT NULL, probes INTEGER NOT NULL,
    PRIMARY KEY (model, step_s, at)
) WITHOUT ROWID;
CREATE TABLE kept (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
"""How files were before a bucket said how long each verdict held."""


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def sample(grade: Grade = Grade.SERVING, machines: int = 3, **other: float) -> Sample:
    return Sample(FINGERPRINT, grade, machines - 1, machines, **other)


async def test_a_sample_is_folded_into_every_resolution(tmp_path: Path) -> None:
    async with History.open(tmp_path / "health.sqlite3") as history:
        await history.add([sample(sweeps_per_s=2.0, tokens_per_s=10.0, ttft_ms=200.0)], T)
        await history.add([sample(Grade.BROKEN, 1, sweeps_per_s=4.0)], T + 5)
        await history.add([sample(machines=5)], T + 10)
        hour, day, month = [
            (await history.points(FINGERPRINT, window, T + 10))["points"] for window in ("1h", "24h", "30d")
        ]
    assert [(point["at"], point["verdict"], point["tokens_per_s"]) for point in hour] == [
        (T, "serving", 10.0),
        (T + 5, "broken", None),
        (T + 10, "serving", None),
    ]
    assert (
        day
        == month
        == [
            {
                "at": T,
                "verdict": "broken",
                "seconds": {"serving": 10.0, "broken": 5.0},
                "min_replicas": 0,
                "machines": 3.0,
                "tokens_per_s": 10.0,
                "ttft_ms": 200.0,
                "sweeps_per_s": 3.0,
                "probes": 1,
            }
        ]
    )
    assert [point["probes"] for point in hour] == [1, 0, 0]


async def test_a_slot_tells_how_long_each_verdict_held_beside_the_worst(tmp_path: Path) -> None:
    async with History.open(tmp_path / "health.sqlite3") as history:
        for at in range(0, 120, 5):
            await history.add([sample(Grade.SERVING if at < 60 else Grade.BROKEN)], T + at)
        await history.add([sample(Grade.DEGRADED, seconds=7.25)], T + 1_200)
        month = (await history.points(FINGERPRINT, "30d", T + 1_200))["points"]
    assert [(point["verdict"], point["seconds"]) for point in month] == [
        ("broken", {"serving": 60.0, "broken": 60.0}),
        ("degraded", {"degraded": 7.2}),
    ]


async def test_a_file_of_the_version_before_is_read_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "health.sqlite3"
    with sqlite3.connect(path) as database:
        database.executescript(VERSION_1)
        rows = [
            (FINGERPRINT, 900, T, 12, 0),
            (FINGERPRINT, 900, T + 900, 180, 2),
            (FINGERPRINT, 900, T + 1_800, 200, 1),
        ]
        database.executemany("INSERT INTO points VALUES (?, ?, ?, ?, ?, 2, 36.0, 6.0, 2, 20.0, 400.0, 2)", rows)
        database.execute("INSERT INTO kept VALUES ('served', '[1]')")
    database.close()
    for again in range(2):
        async with History.open(path) as history:
            await history.add([sample()], T + 900 + again)
            assert await history.load("served") == [1]
            month = (await history.points(FINGERPRINT, "30d", T + 1_800))["points"]
    assert [(point["verdict"], point["seconds"]) for point in month] == [
        ("serving", {"serving": 60.0}),
        ("broken", {"serving": 10.0, "broken": 900.0}),
        ("degraded", {"degraded": 900.0}),
    ]
    assert (month[0]["tokens_per_s"], month[0]["probes"]) == (10.0, 2)


DAY_S = 86_400.0


async def test_it_survives_a_restart_and_forgets_what_is_too_old(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "health.sqlite3"
    async with History.open(path) as history:
        await history.add([sample()], T)
        await history.save("served", [1, "two"])
    later = T + 2 * DAY_S
    steady = iter([0.0, DAY_S])
    async with History.open(path, lambda: next(steady)) as history:
        assert await history.load("served") == [1, "two"]
        assert await history.load("nothing") is None
        await history.add([], later - DAY_S)  # longer than an hour after the last one: deletes nothing for a day
        await history.add([sample()], later)
        lengths = [len((await history.points(FINGERPRINT, window, later))["points"]) for window in ("1h", "24h", "30d")]
        assert lengths == [1, 1, 2]
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM points").fetchone() == (4,)
    database.close()


async def test_a_clock_that_jumps_and_comes_back_deletes_nothing(tmp_path: Path) -> None:
    path, steady = tmp_path / "health.sqlite3", [0.0]
    for jump_s in (40 * DAY_S, -40 * DAY_S):
        async with History.open(path, lambda: steady[0]) as history:  # as after a start while the clock is wrong
            for at in (0.0, jump_s, jump_s + 600, 600.0, 1_200.0):
                await history.add([sample()], T + at)
                steady[0] += 600.0
            points = [(await history.points(FINGERPRINT, window, T + 1_200))["points"] for window in ("1h", "30d")]
            assert [[point["at"] - T for point in some] for some in points] == [[0.0, 600.0, 1_200.0], [0.0, 900.0]]


async def test_what_a_wrong_clock_wrote_goes_when_the_clock_is_believed_again(tmp_path: Path) -> None:
    steady = [0.0]
    async with History.open(tmp_path / "health.sqlite3", lambda: steady[0]) as history:
        for minute in range(-2, 2 * 24 * 60, 30):
            await history.add([sample()], T + 60 * minute + (40 * DAY_S if minute < 0 else 0))
            steady[0] += 30 * 60
        with sqlite3.connect(tmp_path / "health.sqlite3") as database:
            ends = database.execute("SELECT min(at), max(at) FROM points").fetchone()
        database.close()
    assert ends == (T + 900, T + 60 * (2 * 24 * 60 - 2))


async def test_a_damaged_file_is_put_aside_and_a_new_one_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "health.sqlite3"
    async with History.open(path) as history:
        await history.add([Sample(f"{number:032x}", Grade.SERVING, 1, 1) for number in range(100)], T)
    whole = path.read_bytes()
    for damage in (slice(100, 4_096), slice(4_096, len(whole))):
        path.write_bytes(whole[: damage.start] + b"\xa5" * (damage.stop - damage.start) + whole[damage.stop :])
        async with History.open(path) as history:
            await history.add([sample()], T)
            assert len((await history.points(FINGERPRINT, "1h", T))["points"]) == 1
        (aside,) = (path for path in files_of(tmp_path) if ".damaged-" in path.name)
        assert len(aside.read_bytes()) == len(whole)
        assert aside.name in caplog.text
        aside.unlink()


@pytest.mark.parametrize("kept", ["[1", "[" * 100_000, "1e400", "NaN"])
async def test_a_damaged_value_is_forgotten(kept: str, tmp_path: Path) -> None:
    path = tmp_path / "health.sqlite3"
    async with History.open(path):
        pass
    with sqlite3.connect(path) as database:
        database.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", [("served", kept), ("clock", kept)])
    database.close()
    async with History.open(path) as history:
        assert await history.load("served") is None
        await history.add([sample()], T)


async def test_models_are_bounded_the_newest_stay(tmp_path: Path) -> None:
    async with History.open(tmp_path / "health.sqlite3") as history:
        for number in range(MAX_MODELS + 2):
            await history.add([Sample(f"{number:032x}", Grade.SERVING, 1, 1)], T + 1_000 * number)
        await history.add([], T + 1_000 * MAX_MODELS + 5_000)
        end = T + 1_000 * (MAX_MODELS + 2)
        with pytest.raises(KeyError):
            await history.points(f"{0:032x}", "30d", end)
        assert (await history.points(f"{MAX_MODELS + 1:032x}", "30d", end))["points"]


async def test_a_file_that_is_no_history_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "notes.txt"
    bad.write_text("this is no database, and long enough to show it " * 50)
    with pytest.raises(ConfigError, match=r"--data .*notes.txt: no history can be kept there"):
        await History.open(bad).__aenter__()
    with sqlite3.connect(tmp_path / "newer") as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(ConfigError, match="another version"):
        await History.open(tmp_path / "newer").__aenter__()


def test_the_budget_counts_the_last_hour() -> None:
    budget = ProbeBudget(100)
    budget.spend(60, T)
    budget.spend(30, T + 1_800)
    assert budget.left(T + 1_800) == 10
    assert budget.left(T + 3_600) == 70


def test_unknown_is_neither_success_nor_failure() -> None:
    log = ProbeLog()
    failed, unknown, fine = (json.dumps({"ok": ok, "error": "why"}) for ok in (False, None, True))
    for line, failures in ((failed, 1), (unknown, 1), (failed, 2), (fine, 0)):
        log.add(read_probe(line), T)
        assert log.failures == failures
    assert log.trouble is None


def test_a_probe_is_read_whole() -> None:
    hop = {"peer": "QmA", "span": [0, 4], "link_ms": 1, "queue_ms": 0.5, "compute_ms": 8}
    probe = read_probe(json.dumps({"ok": True, "tokens": 32, "ttft_ms": 210, "hops": [hop], "return_ms": 2.5}))
    assert (probe.ttft_ms, probe.hops[0].span, probe.return_ms, probe.tokens_per_s) == (210.0, (0, 4), 2.5, None)
    assert read_comparison('{"peer": "QmA", "others": ["QmB"], "agrees": false}').others == ("QmB",)


@pytest.mark.parametrize(
    "line", ["", "nonsense", "[]", "{}", '{"ok": true, "hops": [1]}', '{"ok": true, "ttft_ms": NaN}']
)
def test_a_line_that_makes_no_sense_is_refused(line: str) -> None:
    with pytest.raises(RemoteProtocolError):
        read_probe(line)
    with pytest.raises(RemoteProtocolError):
        read_comparison(line)
