"""Names of blocks: what a changed token, another secret and a cut change, and which beginnings are asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from swarm.protocol.limits import BLOCK_TOKENS, MAX_BORDERS, NAME_BYTES
from swarm.protocol.messages import Border
from swarm.protocol.prefix import BlockNames, borders

TOKENS = list(range(10 * BLOCK_TOKENS))


def named(tokens: list[int], secret: bytes = b"s" * 32) -> list[bytes]:
    names = BlockNames(secret)
    names.extend(tokens)
    return names.names


def test_names_of_a_text_do_not_depend_on_how_it_came() -> None:
    whole = named([*TOKENS, 1, 2, 3])
    assert len(whole) == 10
    assert {len(name) for name in whole} == {NAME_BYTES}
    grown = BlockNames(b"s" * 32)
    assert [grown.extend(TOKENS[start : start + BLOCK_TOKENS]) for start in range(0, 640, 64)] == [(n,) for n in whole]
    grown.truncate(5 * BLOCK_TOKENS + 63)
    assert grown.names == whole[:5]
    assert grown.extend(TOKENS[5 * BLOCK_TOKENS :]) == tuple(whole[5:])


@pytest.mark.parametrize("place", [0, 63, 64, 200, 639])
def test_a_changed_token_leaves_the_blocks_before_it(place: int) -> None:
    changed = [*TOKENS]
    changed[place] += 1_000
    same = [one == other for one, other in zip(named(TOKENS), named(changed), strict=True)]
    assert same == [block < place // BLOCK_TOKENS for block in range(10)]


def test_another_secret_shares_no_name() -> None:
    assert not set(named(TOKENS)) & set(named(TOKENS, b"t" * 32))
    assert len(set(named([7] * 640))) == 10, "a block's name depends on what is before it"


@pytest.mark.parametrize("blocks", [0, 1, 32, 64, 500, 2_048])
def test_beginnings_are_the_longest_first_and_reach_the_first_ones(blocks: int) -> None:
    names = [place.to_bytes(NAME_BYTES, "big") for place in range(blocks)]
    asked = borders(names)
    places = [border.tokens // BLOCK_TOKENS - 1 for border in asked]
    assert [border.name for border in asked] == [names[place] for place in places]
    assert places == sorted(set(places), reverse=True)
    assert len(asked) <= MAX_BORDERS
    assert places[:32] == list(range(blocks - 1, max(blocks - 33, -1), -1))
    for place, below in pairwise([*places, -1]):
        assert place - below <= max(1, blocks - place), "no gap is longer than what lies behind it"


def test_a_border_stands_for_all_tokens_up_to_it() -> None:
    assert borders(named(TOKENS))[0] == Border(640, named(TOKENS)[-1])


def test_the_border_that_is_believed_to_be_held_is_one_of_them() -> None:
    names = [place.to_bytes(NAME_BYTES, "big") for place in range(2_000)]
    assert 1_111 * BLOCK_TOKENS not in {border.tokens for border in borders(names)}
    asked = borders(names, 1_111)
    assert Border(1_111 * BLOCK_TOKENS, names[1_110]) in asked
    assert len(asked) <= MAX_BORDERS
