"""Verdicts: what honest users felt, and what must not have happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.redteam.honest import HonestText
from benchmarks.redteam.verdict import Felt, Pair, Verdict, Window, share, speed

RIGHT = HonestText(began=0.0, ended=1.0, connect_s=0.0, tokens=10, right=True, repairs=0)
LOST = replace(RIGHT, ended=5.0, tokens=0, right=False, error="HopClosed: gone")


def felt(attacked: Sequence[HonestText] = (RIGHT,), after: Sequence[HonestText] = (RIGHT,)) -> Felt:
    calm = (RIGHT, RIGHT)
    return Felt([Pair((calm, calm), (attacked, calm))], (after, calm))


def test_nothing_felt_is_held() -> None:
    found = felt()
    assert (found.ratio, found.slow_ratio, found.after_ratio) == (1.0, 1.0, 1.0)
    assert found.verdict("") is Verdict.HELD


def test_the_user_who_felt_it_most_counts() -> None:
    found = felt([replace(RIGHT, ended=2.0)])
    assert found.ratio == 0.5
    assert found.verdict("") is Verdict.SLOWED


def test_a_stall_weighs_what_it_lasts() -> None:
    assert felt([RIGHT] * 9 + [replace(RIGHT, ended=41.0)]).ratio == pytest.approx(0.2)


def test_a_lost_text_is_broken() -> None:
    found = felt([RIGHT, LOST])
    assert found.broken == ["1 × HopClosed: gone"]
    assert found.verdict("") is Verdict.BROKEN


def test_a_wrong_text_may_be_named_and_nothing_else() -> None:
    found = felt([replace(RIGHT, right=False)])
    assert found.verdict("") is Verdict.BROKEN
    assert found.verdict("it cannot be seen") is Verdict.NAMED
    found.breaches = ["a stranger reads along"]
    assert found.verdict("it cannot be seen") is Verdict.BROKEN


def test_newcomers_may_be_slowed_where_that_is_named_and_nobody_else() -> None:
    slow, calm = (replace(RIGHT, ended=2.0),), (RIGHT, RIGHT)
    newcomer = Felt([Pair((calm, calm), (calm, slow))], (calm, calm))
    assert newcomer.verdict("") is Verdict.SLOWED
    assert newcomer.verdict("", "met once") is Verdict.NAMED
    assert felt(slow).verdict("", "met once") is Verdict.SLOWED, "the one who stays felt it"
    assert felt(after=slow).verdict("", "met once") is Verdict.SLOWED, "it lasts"
    wrong = Felt([Pair((calm, calm), (calm, (replace(slow[0], right=False),)))], (calm, calm))
    assert wrong.verdict("", "met once") is Verdict.BROKEN


def test_slow_afterwards_is_not_held() -> None:
    assert felt(after=[replace(RIGHT, ended=2.0)]).verdict("") is Verdict.SLOWED


@pytest.mark.parametrize(
    "change",
    [
        {"ended": ["node 0-6"]},
        {"growth_mb": {"node 0-6": 200.0}},
        {"files": {"node 0-6": (1_000, 1_024)}},
        {"log_kb_per_s": {"node 0-6": 50.0}},
        {"page": (4, 3)},
        {"breaches": ["a stranger reads along"]},
    ],
)
def test_what_must_not_happen(change: dict[str, object]) -> None:
    found = felt()
    for name, value in change.items():
        setattr(found, name, value)
    assert found.verdict("") is Verdict.BROKEN


def test_an_attack_that_did_not_happen_was_not_held() -> None:
    found = felt()
    found.troubles = ["it did not start"]
    assert found.verdict("") is Verdict.FAILED


def test_shares_and_speeds() -> None:
    assert share([3.0, 1.0, 2.0], 0.5) == 2.0
    assert share([], 0.5) == 0.0
    assert speed([RIGHT, LOST]) == pytest.approx(10 / 6)
    assert speed([]) == 0.0


def test_windows() -> None:
    window = Window(0.5, 3.0)
    assert window.touches(RIGHT)
    assert not window.holds(RIGHT)
    assert window.holds(replace(RIGHT, began=1.0, ended=2.0))
