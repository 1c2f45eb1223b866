"""The sequential test of routes: another model is noticed soon, an honest route not, and nobody is accused."""

from __future__ import annotations

import math
import random

import pytest

from client.chain.doubts import MAX_ROUTES, TOLERANCE, Doubts


def picked(doubts: Doubts, peers: tuple[str, ...], less: float, picks: int, rng: random.Random) -> int | None:
    """Picks of a route whose log-odds are so much less than the calibration says; after how many it is doubted."""
    for number in range(picks):
        said = rng.betavariate(2.0, 1.2)
        odds = math.log(said / (1 - said)) - less
        doubts.note(peers, said, is_picked=rng.random() < 1 / (1 + math.exp(-odds)))
        if doubts.of(peers[0]) == 1.0:
            return number + 1
    return None


def test_an_honest_route_is_not_doubted() -> None:
    """False alarms: at most 1 in 10,000 runs of a dozen picks; so in 60,000 picks less than half a time expected."""
    assert picked(Doubts(), ("a", "b"), 0.0, 60_000, random.Random(1)) is None
    assert picked(Doubts(), ("a", "b"), TOLERANCE / 2, 60_000, random.Random(2)) is None


def test_another_model_is_doubted_within_50_picks_as_a_rule() -> None:
    found = [picked(Doubts(), ("a",), 3.0, 1_000, random.Random(seed)) or 1_000 for seed in range(50)]
    assert sorted(found)[45] <= 50


def test_a_doubt_is_of_all_machines_of_the_route_and_of_no_others_and_passes() -> None:
    doubts, rng = Doubts(), random.Random(4)
    picked(doubts, ("a", "b"), 0.0, 50, rng)
    assert picked(doubts, ("a", "c"), 5.0, 500, rng) is not None
    assert [doubts.of(peer) for peer in ("a", "c", "d")] == [1.0, 1.0, 0.0]
    assert doubts.of("b") < 1.0
    for _ in range(200):
        doubts.note(("a", "c"), 0.9, is_picked=True)
    assert doubts.of("c") == 0.0


@pytest.mark.parametrize("said", [0.0, 1.0])
def test_one_wrong_certainty_decides_nothing(said: float) -> None:
    doubts = Doubts()
    doubts.note(("a",), said, is_picked=not said)
    assert 0.0 <= doubts.of("a") < 0.5


def test_only_so_many_routes_are_kept() -> None:
    doubts = Doubts()
    for number in range(MAX_ROUTES + 1):
        for _ in range(40):
            doubts.note((f"peer {number}",), 0.9, is_picked=False)
    assert doubts.of("peer 0") == 0.0
    assert doubts.of("peer 1") == doubts.of(f"peer {MAX_ROUTES}") == 1.0
