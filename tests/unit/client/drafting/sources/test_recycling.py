"""Token recycling: what the table keeps, what it proposes, that it learns whom to believe and stays bounded."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

import client.drafting.sources.recycling
from client.drafting.drafter import TreeDrafter
from client.drafting.search.tree import TokenTree
from client.drafting.sources.recycling import MAX_CHILDREN, RecycleSource, Recycling
from swarm.protocol.messages import Sampling

GREEDY = Sampling()


def proposals(table: Recycling, text: list[int], nodes: int = 8, levels: int = 4) -> TokenTree:
    tree = TokenTree(text[-1], nodes, levels)
    table.fill(tree, text, GREEDY)
    return tree


def drafter() -> tuple[TreeDrafter, Recycling]:
    table = Recycling()
    return TreeDrafter([RecycleSource(table)]), table


def test_the_latest_that_followed_a_token_comes_first() -> None:
    tree = proposals(Recycling(), [1, 2, 9, 1, 3, 9, 1, 2, 1])
    first = [tree.tokens[node] for node, parent in enumerate(tree.parents) if parent == TokenTree.ROOT]
    assert first == [2, 3]
    probabilities = [tree.acceptance_probs[tree.child(TokenTree.ROOT, token)] for token in first]
    assert probabilities == sorted(probabilities, reverse=True)


def test_a_tree_follows_the_table_level_by_level() -> None:
    drafting, _ = drafter()
    tree = drafting.grow([1, 2, 3, 4, 1], 3, 8, GREEDY)
    assert (tree.tokens, tree.parents) == ((2, 3, 4), (None, 0, 1))


def test_a_text_without_a_known_ending_gets_no_tree() -> None:
    drafting, _ = drafter()
    assert len(drafting.grow([1, 2, 3, 4, 5], 8, 8, GREEDY)) == 0


def test_picks_after_nodes_that_the_text_never_went_through_are_kept() -> None:
    drafting, _ = drafter()
    tree = drafting.grow([7, 1, 7, 2, 7], 4, 1, GREEDY)
    assert tree.tokens == (2, 1), "7 was followed by 2 and 1"
    drafting.learn(tree, {None: 1, 1: 60}, {0: 50})  # the text goes on with 1; after 2 the target would have said 50
    later = drafting.grow([7, 1, 7, 2, 7, 1, 60, 2], 1, 1, GREEDY)
    assert later.tokens == (50,)


def test_it_learns_how_far_each_rank_is_to_be_believed() -> None:
    """A text whose tokens go on with the one before last: the first rank is always wrong, the second always right."""
    drafting, _ = drafter()
    text = [5, 1, 5, 2, 5]
    for _ in range(200):
        tree = drafting.grow(text, 8, 1, GREEDY)
        following = 1 if text[-2] == 2 else 2
        drafting.learn(tree, {None: following})
        text += [following, 5]
    tree = drafting.grow(text, 8, 1, GREEDY)
    right = 1 if text[-2] == 2 else 2
    probabilities = dict(zip(tree.tokens, tree.acceptance_probs, strict=True))
    assert probabilities[right] > 0.9
    assert all(probability < 0.1 for token, probability in probabilities.items() if token != right)


def test_what_the_text_did_not_go_through_is_no_label() -> None:
    table = Recycling()
    for _ in range(20):
        seen = table.fill(TokenTree(1, 4, 1), [1, 2, 1], GREEDY)
        table.learn(seen, {}, {TokenTree.ROOT: 2})
    assert table._rank_probs(0.0) == pytest.approx(client.drafting.sources.recycling.PRIOR)


def test_temperatures_are_learned_apart() -> None:
    table = Recycling()
    for _ in range(100):
        seen = table.fill(TokenTree(1, 4, 1), [1, 2, 1], GREEDY)
        table.learn(seen, {TokenTree.ROOT: 2}, {})
    assert table._rank_probs(0.0)[0] > 0.9
    assert table._rank_probs(1.0) == pytest.approx(client.drafting.sources.recycling.PRIOR)


def test_the_table_stays_bounded_whatever_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.drafting.sources.recycling, "MAX_TOKENS", 50)
    rng, table = random.Random(1), Recycling()
    text = [rng.randrange(200) for _ in range(2_000)]
    proposals(table, text)
    assert len(table._after) == 50
    assert max(len(row) for row in table._after.values()) <= MAX_CHILDREN
    latest = dict(pairwise(text))
    assert all(row[0] == latest[token] for token, row in table._after.items())


def test_a_longer_text_is_read_from_where_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    table, read = Recycling(), list[int]()
    put = Recycling._put

    def noting(ours: Recycling, token: int, following: int) -> None:
        read.append(token)
        put(ours, token, following)

    monkeypatch.setattr(Recycling, "_put", noting)
    proposals(table, [1, 2, 3])
    proposals(table, [1, 2, 3, 4])
    assert read == [1, 2, 3]
    proposals(table, [9, 8])
    assert read == [1, 2, 3, 9]
