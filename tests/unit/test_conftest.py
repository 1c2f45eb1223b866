"""The order in which the tests run, and the frame below which they do."""

from __future__ import annotations

import traceback
from pathlib import Path

from tests.conftest import FOLDERS, LONGEST, in_one_chunk, place_of

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))


def in_order(*, is_worker: bool) -> list[str]:
    ordered = sorted(FILES, key=lambda path: place_of(path, is_worker=is_worker))
    return [path.relative_to(TESTS).as_posix() for path in ordered]


def test_one_after_another_cheap_tests_come_first() -> None:
    folders = [name.partition("/")[0] for name in in_order(is_worker=False)]
    assert list(dict.fromkeys(folders)) == list(FOLDERS)


def test_workers_begin_with_what_takes_longest_and_end_with_what_is_short() -> None:
    ordered = in_order(is_worker=True)
    assert tuple(ordered[: len(LONGEST)]) == LONGEST, "each of them is there"
    assert list(dict.fromkeys(name.partition("/")[0] for name in ordered)) == list(reversed(FOLDERS))
    last_of_e2e = [name for name in ordered if name.startswith("e2e/")][-1]
    assert last_of_e2e.startswith("e2e/homes/"), "delays are measured beside one other test, not beside a swarm"


def test_a_test_runs_below_a_frame_that_all_others_fit_behind() -> None:
    codes = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    assert in_one_chunk.__code__ in codes
    assert in_one_chunk.__code__.co_stacksize == 1 << 16
