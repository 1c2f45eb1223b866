"""Blocks of texts that are over: what is found, what is given up first, and that all is accounted for."""

from __future__ import annotations

import random

import pytest
import torch

from swarm.base.errors import LocalProtocolError
from swarm.compute.kv_pool import KEPT_S, KvBlock, KvPool, NamedText
from swarm.protocol.limits import BLOCK_TOKENS
from swarm.protocol.messages import Border, Codec, Rows

COST = BLOCK_TOKENS
"""Of a block in KV tokens: a float per token."""


def block(token: int = 0, rows: Rows | None = None) -> KvBlock:
    return KvBlock((token,) * BLOCK_TOKENS, (torch.zeros(1, BLOCK_TOKENS, 1),), rows)


def text(name: str, scope: bytes = b"scope") -> NamedText:
    """Blocks whose names are a text's beginnings."""
    return NamedText(scope, tuple(name[: end + 1].encode() for end in range(len(name))))


def prefix(name: str) -> list[Border]:
    return [Border((place + 1) * BLOCK_TOKENS, name[: place + 1].encode()) for place in reversed(range(len(name)))]


def filed(pool: KvPool, name: str, owner: str = "me", room: int = 10**6, scope: bytes = b"scope") -> int:
    """File a text as sessions do; how many blocks were new."""
    added = 0
    for place in pool.lacks(text(name, scope)):
        if not pool.add(text(name, scope), place, [block(place)], owner, room):
            break
        added += 1
    pool.check_integrity()
    return added


def held(pool: KvPool, name: str, scope: bytes = b"scope") -> int:
    """How many blocks of a text are found."""
    blocks, names = pool.find(scope, prefix(name))
    assert names == list(text(name).names[: len(blocks)])
    assert [(one.tokens or ())[0] for one in blocks] == list(range(len(blocks)))
    return len(blocks)


def test_the_longest_beginning_is_found_and_what_is_there_is_not_kept_twice() -> None:
    pool = KvPool(4)
    assert filed(pool, "abcd") == 4
    assert filed(pool, "abxy") == 2
    assert [held(pool, name) for name in ("abcd", "abcz", "abxyz", "xa", "")] == [4, 3, 4, 0, 0]
    assert held(pool, "abcd", b"other machines in front") == 0
    assert pool.tokens == 6 * COST


def test_rows_are_part_of_what_a_block_costs() -> None:
    pool = KvPool(4)
    rows = Rows(Codec.FP32, BLOCK_TOKENS, 3, bytes(BLOCK_TOKENS * 12))
    assert pool.add(text("a"), 0, [block(rows=rows)], "me", 4 * COST)
    assert pool.tokens == 4 * COST


def test_what_was_not_used_for_the_longest_goes_first_and_no_parent_before_its_child() -> None:
    pool = KvPool(4)
    for name in ("abc", "axy", "pq"):
        filed(pool, name)
    held(pool, "abc")
    for left in ({"abc": 3, "axy": 2, "pq": 2}, {"abc": 3, "axy": 1, "pq": 2}, {"abc": 3, "axy": 1, "pq": 1}):
        pool.shrink(pool.tokens - 1)
        pool.check_integrity()
        assert {name: held_without_use(pool, name) for name in left} == left


def held_without_use(pool: KvPool, name: str) -> int:
    return next((n for n in range(len(name), 0, -1) if pool._chain(b"scope" + name[:n].encode())), 0)


def test_who_holds_most_for_its_weight_gives_blocks_up_first() -> None:
    pool = KvPool(4, {"few": 1, "many": 1, "operator": 4}.__getitem__)
    filed(pool, "ab", "few")
    filed(pool, "pqrs", "many")
    filed(pool, "uvwxyz", "operator")
    pool.shrink(pool.tokens - 2 * COST)
    assert [held(pool, name) for name in ("ab", "pqrs", "uvwxyz")] == [2, 2, 6]
    assert filed(pool, "mnop", "many", room=10 * COST) == 2, "its own go, and not what it goes on from"
    assert [held(pool, name) for name in ("ab", "uvwxyz")] == [2, 6]


def test_a_block_that_finds_no_room_is_not_kept() -> None:
    pool = KvPool(4)
    assert filed(pool, "abc", room=2 * COST) == 2
    assert pool.tokens == 2 * COST
    assert not pool.add(text("z"), 0, [block()], "me", COST - 1)
    assert held(pool, "ab") == 2, "what would not fit drives nothing out"


def test_what_nobody_used_for_half_an_hour_is_given_up() -> None:
    now = [0.0]
    pool = KvPool(4, clock=lambda: now[0])
    filed(pool, "abc")
    now[0] = KEPT_S / 2
    assert held(pool, "ab") == 2
    now[0] = KEPT_S
    pool.forget_old()
    pool.check_integrity()
    assert held_without_use(pool, "abc") == 2
    now[0] = 2 * KEPT_S
    pool.forget_old()
    assert len(pool) == 0


def test_of_blocks_that_come_together_those_are_kept_that_fit() -> None:
    pool = KvPool(4)
    filed(pool, "xy", "other")
    filed(pool, "a")
    assert pool.add(text("abcdef"), 1, [block(place) for place in range(1, 6)], "me", 4 * COST) == 3
    pool.check_integrity()
    assert (held(pool, "abcdef"), held(pool, "xy")) == (4, 0)
    assert pool.add(text("abcdef"), 1, [block(place) for place in range(1, 4)], "me", 9 * COST) == 3, (
        "are there already"
    )
    assert pool.add(text("pqr"), 1, [block(1)], "me", 9 * COST) == 0, "nothing is held before it"
    assert len(pool) == 4


def test_a_name_stands_for_one_block_alone() -> None:
    pool = KvPool(4)
    filed(pool, "abc")
    again = NamedText(b"scope", (b"abc",))
    assert list(pool.lacks(again)) == []
    assert not pool.add(again, 0, [block(9)], "thief", 10**6)
    twice = NamedText(b"scope", (b"t", b"t", b"t"))
    assert pool.add(twice, 0, [block()], "me", 10**6)
    assert not pool.add(twice, 1, [block(1)], "me", 10**6)
    pool.check_integrity()
    assert held(pool, "abc") == 3


def test_blocks_behind_another_owners_are_found_again_with_those() -> None:
    pool = KvPool(4, {"many": 1, "few": 10}.__getitem__)
    filed(pool, "abpqrs", "many")
    filed(pool, "abxy", "few")
    pool.shrink(2 * COST)
    pool.check_integrity()
    assert held(pool, "abxy") == 0, "what they stand behind is gone"
    assert filed(pool, "ab", "few") == 2
    assert held(pool, "abxy") == 4


def test_names_that_stand_for_anything_lead_nowhere_twice() -> None:
    """Whoever knows names may send them in any order, also those of blocks whose parents were given up."""
    rng, pool = random.Random(3), KvPool(4)
    for _ in range(500):
        names = NamedText(b"scope", tuple(rng.choice("abcdef").encode() for _ in range(rng.randint(1, 5))))
        for place in pool.lacks(names):
            pool.add(names, place, [block(place)], rng.choice("xyz"), rng.randint(1, 6) * COST)
        tokens = rng.randint(1, 6) * BLOCK_TOKENS
        blocks, found = pool.find(b"scope", [Border(tokens, rng.choice("abcdef").encode())])
        assert len(found) == len(set(found)) == len(blocks) in {0, tokens // BLOCK_TOKENS}
        pool.check_integrity()


def test_whatever_happens_every_block_is_accounted_for() -> None:
    rng, pool = random.Random(7), KvPool(4)
    for _ in range(400):
        name = "".join(rng.choice("abc") for _ in range(rng.randint(1, 6)))
        match rng.randrange(3):
            case 0:
                filed(pool, name, rng.choice("xyz"), room=rng.randint(0, 30) * COST)
            case 1:
                held(pool, name)
            case _:
                pool.shrink(rng.randint(0, 30) * COST)
        pool.check_integrity()
        assert pool.tokens == COST * len(pool)
    pool.clear()
    assert (len(pool), pool.tokens) == (0, 0)
    pool.tokens = 1
    with pytest.raises(LocalProtocolError):
        pool.check_integrity()
