"""The order in which the tests run, and the frame below which they do."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.conftest import FOLDERS, LONGEST, crossings, in_one_chunk, place_of, tenth_of

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


class Case:
    """A case of a product, as pytest would collect it."""

    def __init__(self, *labels: str, marker: pytest.Mark | None = None) -> None:
        self.nodeid = f"test_it[{'-'.join(labels)}]"
        self.callspec = SimpleNamespace(_idlist=labels)
        self.marker = marker

    def get_closest_marker(self, _: str) -> pytest.Mark | None:
        return self.marker


def core(cases: list[Case]) -> list[str]:
    left_out: set[object] = {*crossings(cast("list[pytest.Item]", cases))}
    return [case.nodeid[8:-1] for case in cases if case not in left_out]


def test_each_value_of_a_product_is_on_its_diagonal() -> None:
    assert core([Case(number, letter) for number in "12" for letter in "abcd"]) == ["1-a", "1-c", "2-b", "2-d"]
    assert core([Case(letter) for letter in "abc"]) == ["a", "b", "c"]


def test_a_mark_leaves_all_cases_out_but_for_a_part() -> None:
    assert core([Case(letter, marker=pytest.mark.crossing.mark) for letter in "abc"]) == []
    part = pytest.mark.crossing(part=(1, 3)).mark
    assert core([Case(letter, marker=part) for letter in "abcdef"]) == ["b", "e"]


def test_ten_days_run_all_crossings() -> None:
    days = [tenth_of(cast("pytest.Item", Case(str(number)))) for number in range(200)]
    assert set(days) == set(range(10))
