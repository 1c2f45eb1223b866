"""The token tree, by example."""

from __future__ import annotations

import pytest

from client.draft.search.tree import DraftTree, Picks, TokenTree


def test_best_nodes_come_best_first_with_parents_as_indices() -> None:
    tree = TokenTree(9, max_nodes=3, levels=4)
    tree.add_children(TokenTree.ROOT, [(10, 0.5), (11, 0.4)])
    tree.add_children(1, [(12, 0.9), (13, 0.1)])
    assert tree.best(3) == DraftTree((10, 12, 11), (None, 0, None), (0.5, 0.45, 0.4))


def test_sources_merge_and_a_raised_chance_lifts_the_subtree() -> None:
    tree = TokenTree(9, max_nodes=2, levels=4)
    tree.add_children(TokenTree.ROOT, [(10, 0.5), (11, 0.1)])
    tree.add_children(2, [(12, 1.0)])
    assert tree.best(2).tokens == (10, 11)
    tree.add_children(TokenTree.ROOT, [(11, 0.8), (10, 0.2)])
    assert tree.best(2) == DraftTree((11, 12), (None, 0), (0.8, 0.8))


def test_a_source_that_weighs_has_the_last_word_upwards_and_downwards() -> None:
    tree = TokenTree(9, max_nodes=2, levels=4)
    tree.add_children(TokenTree.ROOT, [(10, 0.6), (11, 0.3)])
    tree.add_children(1, [(12, 0.9)])
    assert tree.child_probs(TokenTree.ROOT) == {10: 0.6, 11: 0.3}
    assert tree.child_probs(3) == {}
    assert tree.best(2).tokens == (10, 12)
    tree.weigh_children(TokenTree.ROOT, [(10, 0.1), (11, 0.4), (13, 0.2)])
    assert tree.best(3).acceptance_probs == (0.4, 0.2, 0.1)
    assert tree.best(2).tokens == (11, 13)
    assert tree.acceptance_probs[3] == pytest.approx(0.09), "what stands below falls too"
    tree.add_children(TokenTree.ROOT, [(10, 0.9), (14, 0.15)])
    assert tree.child_probs(TokenTree.ROOT) == {10: 0.1, 11: 0.4, 13: 0.2, 14: 0.15}, "what was weighed is not raised"


def test_what_is_remembered_counts_until_somebody_says_something() -> None:
    tree = TokenTree(9, max_nodes=4, levels=4)
    ten, eleven = (tree.remember(TokenTree.ROOT, token, probability) for token, probability in ((10, 0.5), (11, 0.3)))
    twelve = tree.remember(ten, 12, 0.8)
    assert tree.remember(ten, 12, 0.1) == twelve
    assert tree.acceptance_probs[twelve] == pytest.approx(0.4)
    assert tree.child_probs(TokenTree.ROOT) == {}, "by nobody yet"
    tree.add_children(TokenTree.ROOT, [(10, 0.2)])
    assert tree.child_probs(TokenTree.ROOT) == {10: 0.2}, "a lower chance too replaces one that is remembered"
    assert tree.acceptance_probs[twelve] == pytest.approx(0.16)
    tree.weigh_children(TokenTree.ROOT, [(10, 0.6), (13, 0.1)])
    assert tree.child_probs(TokenTree.ROOT) == {10: 0.6, 13: 0.1, 11: 0.0}, "nobody says 11 any more"
    tree.weigh_children(ten, [])
    assert tree.best(2) == DraftTree((10, 13), (None, None), (0.6, 0.1))
    assert tree.conditional_prob(eleven) == tree.conditional_prob(twelve) == 0


def test_the_frontier_leaves_out_what_was_taken_before() -> None:
    tree = TokenTree(9, max_nodes=4, levels=4)
    tree.frontier(1)
    ten, eleven = (tree.remember(TokenTree.ROOT, token, probability) for token, probability in ((10, 0.5), (11, 0.3)))
    tree.take([ten])
    assert tree.frontier(16) == [eleven]


def test_nodes_come_back_into_reach_where_better_ones_fall() -> None:
    tree = TokenTree(9, max_nodes=2, levels=4)
    assert tree.frontier(1) == [TokenTree.ROOT]
    tree.add_children(TokenTree.ROOT, [(10, 0.5), (11, 0.3), (12, 0.2)])
    tree.add_children(1, [(13, 0.9)])
    assert tree.frontier(16) == [1, 4], "11 is out of reach of the two best"
    tree.weigh_children(TokenTree.ROOT, [(10, 0.1)])
    assert tree.frontier(16) == [2, 3]
    assert tree.best(2).tokens == (11, 12)


def test_frontier_hands_out_only_nodes_whose_children_may_still_belong() -> None:
    tree = TokenTree(9, max_nodes=2, levels=4)
    assert tree.frontier(16) == [TokenTree.ROOT]
    tree.add_children(TokenTree.ROOT, [(10, 0.5), (11, 0.3), (12, 0.2)])
    assert tree.frontier(1) == [1]
    tree.add_children(1, [(13, 0.9)])
    # The second best node is now 13 at 0.45, so nothing below 11 or 12 can belong.
    assert tree.frontier(16) == [4]
    assert tree.frontier(16) == []


def test_frontier_stops_at_the_last_level() -> None:
    tree = TokenTree(9, max_nodes=8, levels=1)
    tree.add_children(tree.frontier(1)[0], [(10, 0.5)])
    assert tree.frontier(16) == []


def test_a_tree_of_no_nodes_asks_for_nothing() -> None:
    tree = TokenTree(9, max_nodes=0, levels=4)
    assert tree.frontier(16) == []
    assert tree.best(0) == DraftTree()


def test_a_chance_above_one_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="probability"):
        TokenTree(9, max_nodes=1, levels=1).add_children(TokenTree.ROOT, [(10, 1.1)])


class Heard:
    """A lesson that keeps what it hears."""

    heard: tuple[Picks, Picks]

    def learn(self, picks: Picks, others: Picks) -> None:
        self.heard = picks, others


def test_a_tree_hangs_below_certain_tokens_and_learns_what_is_its_own() -> None:
    lesson = Heard()
    own = DraftTree((10, 11, 12), (None, 0, None), (0.5, 0.4, 0.2), lessons=(lesson,))
    tree = own.below((7, 8))
    assert tree == DraftTree((7, 8, 10, 11, 12), (None, 0, 1, 2, 1), (1.0, 1.0, 0.5, 0.4, 0.2))
    assert tree.depth == 4
    tree.lessons[0].learn({None: 7, 0: 8, 1: 10, 2: 9}, {3: 5, 4: 6})
    assert lesson.heard == ({None: 10, 0: 9}, {1: 5, 2: 6})
    assert own.below(()) is own
    assert DraftTree().below((7,)) == DraftTree((7,), (None,), (1.0,))
