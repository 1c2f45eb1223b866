"""The calibration file: whole or not there, small, few, and never a reason to fail."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from client.base.options import default_calibration_folder
from client.base.target import Target
from client.draft.loading import (
    MAX_FILE_BYTES,
    MAX_FILES,
    calibration_path,
    load_calibration,
    save_calibration,
)
from client.draft.search.calibration import Calibration, Candidates

CANDIDATES = Candidates(np.log([[0.5, 0.25, 0.125]]), None, 0.7)


def learned(lessons: int = 20) -> Calibration:
    calibration = Calibration()
    for _ in range(lessons):
        calibration.learn(CANDIDATES, np.array([[False, True, False]]))
    return calibration


def probabilities(calibration: Calibration) -> list[float]:
    return [float(probability) for probability in calibration.acceptance_probs(CANDIDATES)[0]]


def good() -> dict[str, object]:
    """The contents of a sound file."""
    fits = [{"weights": [0.0] * 7, "information": (4 * np.eye(7)).tolist()} for _ in range(5)]
    return {"version": 3, "temperatures": [0.0, 0.45, 0.8, 1.25], "fits": fits}


def test_what_was_learned_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cache" / "calibration" / "pair-1.json"
    fresh = probabilities(load_calibration(path))
    save_calibration(path, learned())
    assert probabilities(load_calibration(path)) == probabilities(learned()) != fresh
    assert path.stat().st_size < MAX_FILE_BYTES / 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not caplog.records


def bad_files() -> dict[str, bytes]:
    def with_fit(**changes: object) -> bytes:
        content = good()
        fits = content["fits"]
        assert isinstance(fits, list)
        return json.dumps({**content, "fits": [*fits[:4], {**fits[4], **changes}]}).encode()

    asymmetric = 4 * np.eye(7)
    asymmetric[0, 3] = 1
    return {
        "empty": b"",
        "half": json.dumps(good()).encode()[:200],
        "binary": bytes(range(256)),
        "list": b"[1, 2]",
        "deep": b"[" * 60_000,
        "version": json.dumps({**good(), "version": 1}).encode(),
        "ranges": json.dumps({**good(), "temperatures": [0.0, 1.0]}).encode(),
        "no fits": json.dumps({"version": 3, "temperatures": [0.0, 0.45, 0.8, 1.25]}).encode(),
        "few fits": json.dumps({**good(), "fits": []}).encode(),
        "nan": with_fit(weights=[float("nan")] * 7),
        "huge number": with_fit(weights=[10**400, *[0] * 6]),
        "huge weight": with_fit(weights=[21, *[0] * 6]),
        "words": with_fit(weights=list("abcdefg")),
        "shape": with_fit(weights=[0.0] * 4),
        "singular": with_fit(information=np.zeros((7, 7)).tolist()),
        "frozen": with_fit(information=(1e9 * np.eye(7)).tolist()),
        "asymmetric": with_fit(information=asymmetric.tolist()),
        "oversize": json.dumps(good()).encode() + b" " * MAX_FILE_BYTES,
    }


def test_the_example_of_a_sound_file_is_sound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the cases below would pass for another reason than theirs."""
    path = tmp_path / "pair-1.json"
    path.write_text(json.dumps(good()))
    load_calibration(path)
    assert not caplog.records


@pytest.mark.parametrize("name", bad_files())
def test_a_file_that_makes_no_sense_is_ignored_and_replaced(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pair-1.json"
    path.write_bytes(bad_files()[name])
    assert probabilities(load_calibration(path)) == probabilities(Calibration())
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    save_calibration(path, learned())
    assert probabilities(load_calibration(path)) == probabilities(learned())
    assert len(caplog.records) == 1


def test_a_cache_that_cannot_be_used_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file where a folder should be, and the reverse, fail for root as well, unlike permissions."""
    (tmp_path / "file").write_text("")
    (tmp_path / "pair-1.json" / "full").mkdir(parents=True)
    for path in (tmp_path / "file" / "pair-1.json", tmp_path / "pair-1.json"):
        assert probabilities(load_calibration(path)) == probabilities(Calibration())
        caplog.clear()
        save_calibration(path, learned())
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "pair-1.json"], "no leftovers"


def test_several_writers_never_leave_a_broken_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pair-1.json"
    versions = [learned(lessons) for lessons in (1, 5, 20)]
    save_calibration(path, versions[0])

    def write(calibration: Calibration) -> None:
        for _ in range(30):
            save_calibration(path, calibration)

    writers = [threading.Thread(target=write, args=(version,)) for version in versions]
    for writer in writers:
        writer.start()
    seen = [probabilities(load_calibration(path)) for _ in range(60)]
    for writer in writers:
        writer.join()
    assert all(one in [probabilities(version) for version in versions] for one in seen)
    assert not caplog.records
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_oldest_files_make_room_and_foreign_ones_stay(tmp_path: Path) -> None:
    foreign = tmp_path / "letter.txt"
    foreign.write_text("dear")
    os.utime(foreign, (0, 0))
    half = tmp_path / "pair-abc.tmp"
    half.write_text("{")
    os.utime(half, (1, 1))
    for age in range(MAX_FILES):
        old = tmp_path / f"pair-{age}.json"
        old.write_text("{}")
        os.utime(old, (100 + age, 100 + age))
    save_calibration(tmp_path / "pair-new.json", learned())
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"letter.txt", "pair-new.json", *(f"pair-{age}.json" for age in range(1, MAX_FILES))}


def named(name: str) -> Target:
    """A model as far as the name of a file depends on it."""
    no_tokenizer = cast(PreTrainedTokenizerFast, None)
    return Target(name, f"config of {name}", "tokenizer", no_tokenizer, frozenset(), 100, 4, None)


def test_each_pair_has_a_file_of_its_own(tmp_path: Path) -> None:
    target, draft = named("big"), named("small")
    path = calibration_path(tmp_path, target, draft)
    assert path.parent == tmp_path
    assert path == calibration_path(tmp_path, replace(target, name=f"org/{target.name}"), draft)
    others = [
        calibration_path(tmp_path, draft, target),
        calibration_path(tmp_path, replace(target, tokenizer_digest="x"), draft),
        calibration_path(tmp_path, target, replace(draft, config_digest="x")),
        calibration_path(tmp_path, target, replace(draft, name="tuned")),
    ]
    assert len({path, *others}) == 5


def test_the_users_cache_is_where_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_calibration_folder() == tmp_path / "canopy" / "calibration"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_calibration_folder() == tmp_path / ".cache" / "canopy" / "calibration"


def test_a_file_is_kept_though_others_seem_newer(tmp_path: Path) -> None:
    """A clock that was ahead wrote them."""
    for number in range(MAX_FILES):
        other = tmp_path / f"pair-other{number}.json"
        other.write_text("{}")
        os.utime(other, (4e9, 4e9))
    path = tmp_path / "pair-1.json"
    save_calibration(path, learned())
    assert probabilities(load_calibration(path)) == probabilities(learned())
    assert len(list(tmp_path.iterdir())) == MAX_FILES
