"""Stored responses: whose they are, and how many, how large and how old they may be."""

from __future__ import annotations

from client.api.responses.routes import ResponseStore, StoredResponse
from client.dialogue.messages import Message


class Clock:
    """Says what it was told."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def stored(name: str, text: str = "Hi") -> StoredResponse:
    return StoredResponse({"id": name}, (Message("user", text),), ())


def names(store: ResponseStore, key: str, *candidates: str) -> list[str]:
    return [name for name in candidates if store.get(key, name) is not None]


def test_a_response_is_its_keys_alone() -> None:
    store = ResponseStore(Clock())
    store.keep("a", stored("r1"))
    assert store.get("a", "r1") == stored("r1")
    assert store.get("b", "r1") is None
    assert not store.delete("b", "r1")
    assert store.delete("a", "r1")
    assert not store.delete("a", "r1")
    assert (store.count, store.size_bytes) == (0, 0)


def test_the_key_that_holds_most_gives_way() -> None:
    store = ResponseStore(Clock(), max_responses=4)
    store.keep("small", stored("s1"))
    for number in range(9):
        store.keep("large", stored(f"l{number}"))
    assert store.count == 4
    assert names(store, "small", "s1") == ["s1"]
    assert names(store, "large", *(f"l{number}" for number in range(9))) == ["l6", "l7", "l8"]


def test_bytes_are_bounded() -> None:
    one = stored("r0", "x" * 1_000)
    store = ResponseStore(Clock(), max_bytes=3 * one.measure())
    for number in range(9):
        assert store.keep("a", stored(f"r{number}", "x" * 1_000))
    assert store.size_bytes <= 3 * one.measure()
    assert names(store, "a", *(f"r{number}" for number in range(9))) == ["r6", "r7", "r8"]


def test_the_key_with_most_bytes_gives_way_though_it_has_fewer_responses() -> None:
    large, small = stored("l", "x" * 10_000), stored("s0")
    store = ResponseStore(Clock(), max_bytes=large.measure() + 5 * small.measure())
    store.keep("large", large)
    for number in range(6):
        store.keep("small", stored(f"s{number}"))
    assert store.get("large", "l") is None
    assert names(store, "small", *(f"s{number}" for number in range(6))) == [f"s{number}" for number in range(6)]


def test_a_response_that_is_too_large_is_not_kept_and_nobody_gives_way() -> None:
    store = ResponseStore(Clock(), max_response_bytes=2_000)
    store.keep("a", stored("r1"))
    assert not store.keep("a", stored("r2", "x" * 2_000))
    assert names(store, "a", "r1", "r2") == ["r1"]


def test_old_responses_are_forgotten() -> None:
    clock = Clock()
    store = ResponseStore(clock, max_age_s=10)
    store.keep("a", stored("r1"))
    clock.now_s += 6
    store.keep("a", stored("r2"))
    clock.now_s += 5
    assert names(store, "a", "r1", "r2") == ["r2"]
    clock.now_s += 6
    assert names(store, "a", "r2") == []
    assert (store.count, store.size_bytes) == (0, 0)


def test_a_response_that_is_kept_again_counts_once() -> None:
    store = ResponseStore(Clock())
    store.keep("a", stored("r1"))
    store.keep("a", stored("r1"))
    assert (store.count, store.size_bytes) == (1, stored("r1").measure())
