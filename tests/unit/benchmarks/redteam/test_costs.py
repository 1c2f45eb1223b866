"""The search for the dearest inputs: it climbs, and says where a bound is broken."""

from __future__ import annotations

import random

from benchmarks.redteam.costs import MAX_BYTES, REGEX, Reader, Search, Spent, mutate_text


def searched(seconds: float) -> Search:
    """A search of a reader whose cost is the number of `&`, a millisecond each."""

    def spend(text: str) -> Spent:
        return Spent(text.count("&") / 1e3, 10 * len(text), is_ended=text.count("&") > 9)

    search = Search(Reader("signs", ["a"], mutate_text(REGEX), spend, seconds, 100 * MAX_BYTES))
    for text in search.reader.seeds:
        search._try(text)
    rng = random.Random(1)
    for _ in range(3_000):
        search.step(rng)
    return search


def test_mutants_of_the_dearest_are_dearer() -> None:
    search = searched(1e6)
    text, spent = search.by_time.best
    assert text.count("&") / len(text) > 0.5, "per byte"
    assert search.longest.best[1].seconds > 100 * spent.seconds / (len(text) + 8), "in all"
    assert search.ended > 0
    assert len(search.longest.best[0]) <= MAX_BYTES
    assert search.is_held


def test_a_broken_bound_is_said() -> None:
    search = searched(0.1)
    assert not search.is_held
    assert search.row()[-1] == "**broken**"
