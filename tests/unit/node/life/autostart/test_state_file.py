"""The file that `node status` reads: whole or not at all, whoever is killed, and never more than a few of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from node.life.autostart.state_file import (
    DAYS_KEPT,
    MAX_FILES,
    MAX_STATE_BYTES,
    Given,
    LocalStatus,
    Stage,
    StateFile,
    forget_oldest,
    read_days,
    running_pids,
    state_files,
    status_folder,
)

STATUS = LocalStatus(
    identity="/home/anna/.config/canopy/identity.key",
    pid=4_711,
    version="0.2.0",
    stage=Stage.SERVING,
    started_at=1_000.0,
    seen_at=2_000.5,
    peer="QmPeer",
    model="demo-target",
    layers="0-4",
    num_layers=12,
    address="203.0.113.7:31338",
    reach="mapped",
    sessions=3,
    serving_since=1_500.0,
    uplink_mbit_per_s=1.25,
    max_mbit=20.0,
    trouble="a trouble",
    trouble_at=1_999.0,
    run=Given(tokens=5),
    ever=Given(tokens=50),
    days={"2026-11-27": Given(tokens=9)},
)


def file_in(folder: Path, name: str = "identity.key") -> StateFile:
    return StateFile.of(folder / name, folder)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    assert file.read() is None
    file.write(STATUS)
    assert file.read() == STATUS
    assert file.path.stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name], "nothing else is left"


def test_an_identity_has_one_file_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = (Path("key"), tmp_path / "key", Path("~/key"))
    assert len({StateFile.of(name, tmp_path) for name in names}) == 1
    assert StateFile.of(tmp_path / "other", tmp_path) != StateFile.of(tmp_path / "key", tmp_path)


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert status_folder() == tmp_path / "canopy" / "nodes"
    assert StateFile.of(Path("key")).path.parent == status_folder()
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/anna")
    assert status_folder() == Path("/home/anna/.local/state/canopy/nodes")


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"pid": 1}',
        json.dumps({**STATUS.as_json(), "pid": "7"}).encode(),
        json.dumps({**STATUS.as_json(), "stage": "dancing"}).encode(),
        json.dumps({**STATUS.as_json(), "sessions": 1.5}).encode(),
        json.dumps({**STATUS.as_json(), "ever": {"tokens": -1}}).encode(),
        json.dumps(STATUS.as_json()).encode() + b" " * MAX_STATE_BYTES,
        b"[" * 20_000,
    ],
)
def test_damage_is_seen_and_set_aside(damage: bytes, tmp_path: Path) -> None:
    file = file_in(tmp_path)
    file.path.write_bytes(damage)
    with pytest.raises(ValueError):  # noqa: PT011 - any: the file is set aside
        file.read()
    aside = file.set_aside()
    assert file.read() is None
    assert aside.read_bytes() == damage


def test_a_later_releases_fields_are_read_past_and_long_texts_cut(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    file.path.write_text(json.dumps({**STATUS.as_json(), "mood": "good", "trouble": "x" * 9_000}))
    read = file.read()
    assert read is not None
    assert len(read.trouble) < 1_000
    assert replace(read, trouble=STATUS.trouble) == STATUS


def test_a_file_is_in_use_as_long_as_its_lock_is_held(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    assert not file.is_in_use
    held = file.lock()
    assert held is not None
    assert file.is_in_use
    assert file.lock() is None
    held.close()
    assert not file.is_in_use


def test_a_killed_nodes_lock_is_gone(tmp_path: Path) -> None:
    hold = (
        "import pathlib, sys; from node.life.autostart.state_file import StateFile;"
        "lock = StateFile(pathlib.Path(sys.argv[1])).lock(); print(lock is not None, flush=True); input()"
    )
    file = file_in(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(file.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        assert file.is_in_use
        file.write(replace(STATUS, pid=holder.pid))
        assert running_pids(tmp_path) == {holder.pid}
        holder.kill()
    assert not file.is_in_use
    assert running_pids(tmp_path) == set()


def test_the_oldest_files_go_and_never_a_running_nodes(tmp_path: Path) -> None:
    files = [file_in(tmp_path, f"{number}.key") for number in range(MAX_FILES + 5)]
    for number, file in enumerate(files):
        file.write(STATUS)
        os.utime(file.path, (number, number))
    running, own = files[0], files[1]
    lock = running.lock()
    assert lock is not None
    with lock:
        forget_oldest(own)
        kept = state_files(tmp_path)
    assert {running, own} <= set(kept)
    assert set(files[6:]) <= set(kept)
    assert len(kept) == MAX_FILES + 1


TODAY = date(2026, 11, 27)


def test_a_run_adds_to_what_was_given_before() -> None:
    status = replace(STATUS, run=Given(), ever=Given(tokens=100, sent_bytes=5_000, pauses=1))
    status = replace(status, days={TODAY.isoformat(): Given(tokens=40)})
    status = status.with_run(Given(tokens=7, sent_bytes=10), TODAY)
    status = status.with_run(Given(tokens=9, sent_bytes=30, serving_s=2.5), TODAY)
    assert status.run == Given(tokens=9, sent_bytes=30, serving_s=2.5)
    assert status.ever == Given(tokens=109, sent_bytes=5_030, serving_s=2.5, pauses=1)
    assert status.days == {TODAY.isoformat(): Given(tokens=49, sent_bytes=30, serving_s=2.5)}


def test_at_midnight_another_day_begins_and_a_few_are_kept_also_where_the_clock_goes_back() -> None:
    status = replace(STATUS, run=Given(), ever=Given(), days={})
    for number in range(30):
        status = status.with_run(Given(tokens=2 * number + 2), TODAY + timedelta(days=number))
    last = [(TODAY + timedelta(days=number)).isoformat() for number in range(30 - DAYS_KEPT, 30)]
    assert status.days == dict.fromkeys(last, Given(tokens=2))
    assert status.with_run(Given(tokens=61), TODAY).ever.tokens == 61


def test_amounts_are_read_as_written_and_later_releases_are_read_past() -> None:
    given = Given(1, 2, 3, 4, 5, 6.5, 7.25, 8)
    assert Given.of_json(given.as_json()) == given
    assert Given.of_json({**given.as_json(), "watts": 3}) == given
    assert Given.of_json({"tokens": 1}) == Given(tokens=1)
    assert read_days({"2026-11-27": given.as_json()}) == {"2026-11-27": given}


@pytest.mark.parametrize("raw", [None, [], {"tokens": -1}, {"tokens": "1"}, {"tokens": True}, {"tokens": 1e300}])
def test_what_cannot_be_is_damage(raw: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any: the file is set aside
        Given.of_json(raw)
    with pytest.raises(ValueError):  # noqa: PT011
        read_days({"2026-11-27": raw})


@pytest.mark.parametrize("raw", [None, {"yesterday": {}}, {str(number): {} for number in range(1_000)}])
def test_days_that_are_none(raw: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read_days(raw)
