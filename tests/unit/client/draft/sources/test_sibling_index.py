"""Siblings: what dead branches told is proposed where the text stands now, weighed by what they share, and bounded."""

from __future__ import annotations

import random

import pytest

import client.draft.sources.siblings
from client.draft.drafter import TreeDrafter
from client.draft.search.source import Search
from client.draft.search.tree import DraftTree, TokenTree
from client.draft.sources.siblings import (
    MAX_CHILDREN,
    MAX_CONTEXT_TOKENS,
    MAX_PICKS_PER_ENDING,
    MIN_SURE_PATH_PROBABILITY,
    PRIOR,
    SURE_PROBABILITY,
    Context,
    CrossBranchCache,
    Proposal,
    SiblingSource,
    context_at,
)
from swarm.protocol.messages import Sampling

GREEDY, COUPLED = Sampling(), Sampling(seed=7, temperature=1.0)


def taught(*contexts: tuple[list[int], int], text: tuple[int, ...] = (1, 2, 3)) -> CrossBranchCache:
    """Siblings of a text, behind which each of these contexts stood whole and was followed by a pick."""
    siblings = CrossBranchCache()
    siblings.follow(text, COUPLED)
    for context, pick in contexts:
        siblings.learn({0: Proposal(context_at(context, len(context)))}, {}, {0: pick})
    return siblings


def proposed(siblings: CrossBranchCache, context: list[int], position: int | None = None) -> dict[int, float]:
    at = len(context) if position is None else position
    return dict(siblings.propose(context_at(context, at), 1.0)[1])


def test_a_pick_behind_a_dead_branch_is_proposed_at_the_same_position_and_nowhere_else() -> None:
    siblings = taught(([1, 2, 3, 50], 60))
    assert list(proposed(siblings, [1, 2, 3, 51])) == [60]
    assert proposed(siblings, [1, 2, 3, 51], position=5) == {}
    assert proposed(siblings, [1, 2, 3], position=3) == {}


def test_contexts_that_share_more_come_first_and_are_believed_more() -> None:
    siblings = taught(([1, 2, 3, 50, 8, 9], 60), ([1, 2, 3, 51, 7, 9], 61), ([1, 2, 3, 52, 7, 6], 62))
    found = proposed(siblings, [1, 2, 3, 53, 8, 9])
    assert list(found) == [60, 61, 62], "in common: 8 9, then 9, then nothing"
    assert found[60] > found[61] > found[62]
    assert sum(found.values()) <= 1
    assert found[60] == pytest.approx(PRIOR[2])


def test_contexts_that_disagree_share_what_they_are_believed() -> None:
    agreed = proposed(taught(([1, 2, 3, 50, 9], 60), ([1, 2, 3, 51, 9], 60)), [1, 2, 3, 52, 9])
    split = proposed(taught(([1, 2, 3, 50, 9], 60), ([1, 2, 3, 51, 9], 61)), [1, 2, 3, 52, 9])
    assert agreed[60] > split[60] > 0
    assert set(split) == {60, 61}


def test_the_longest_common_ending_is_bounded_and_may_reach_into_the_text() -> None:
    assert context_at([9] * 20, 20).ending == (9,) * MAX_CONTEXT_TOKENS
    assert context_at([4], 1) == Context(1, (4,))
    siblings = taught(([1], 5), text=(1,))
    assert list(proposed(siblings, [1])) == [5]


def test_what_the_text_has_passed_is_forgotten_and_everything_of_another_one() -> None:
    contexts = [([1, 2, 3, 50], 60), ([1, 2, 3, 50, 60], 70)]
    siblings = taught(*contexts)
    assert siblings.picks == 2
    siblings.follow((1, 2, 3, 51, 60), COUPLED)
    assert (siblings.picks, list(siblings._at)) == (1, [5])
    assert list(proposed(siblings, [1, 2, 3, 51, 60])) == [70]
    siblings.follow((1, 2, 4, 51, 60), COUPLED)
    assert siblings.picks == 0
    other_noise = taught(*contexts)
    other_noise.follow((1, 2, 3), Sampling(seed=8, temperature=1.0))
    assert other_noise.picks == 0


def test_a_late_reply_to_what_the_text_has_passed_is_not_kept() -> None:
    siblings = taught(([1, 2], 9))
    assert (siblings.picks, siblings._at) == (0, {})


def test_it_learns_how_far_it_is_to_be_believed() -> None:
    siblings = taught(([1, 2, 3, 50], 60))
    before = proposed(siblings, [1, 2, 3, 51])[60]
    for _ in range(50):
        told, _ = siblings.propose(context_at([1, 2, 3, 51], 4), 1.0)
        siblings.learn({0: told}, {0: 99}, {})
        siblings.follow((0,), COUPLED)
        siblings.follow((1, 2, 3), COUPLED)
        siblings.learn({0: Proposal(context_at([1, 2, 3, 50], 4))}, {}, {0: 60})
    assert proposed(siblings, [1, 2, 3, 51])[60] < before / 5


def test_however_many_picks_come_a_bounded_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.draft.sources.siblings, "MAX_PICKS", 100)
    rng = random.Random(3)
    siblings = taught()
    for _ in range(50):
        seen: dict[int | None, Proposal] = {
            node: Proposal(context_at([1, 2, 3, rng.randrange(9), rng.randrange(9)], 5)) for node in range(8)
        }
        siblings.learn(seen, {}, {node: rng.randrange(50) for node in range(8)})
        assert siblings.picks <= 100
    assert siblings.picks == 100
    assert len(proposed(siblings, [1, 2, 3, 4, 5])) <= MAX_CHILDREN


def told_greedily(*contexts: tuple[list[int], int]) -> CrossBranchCache:
    """Siblings of a greedy text, behind which these contexts were followed by picks."""
    siblings = CrossBranchCache()
    siblings.follow((1, 2, 3), GREEDY)
    for context, pick in contexts:
        siblings.learn({0: Proposal(context_at(context, len(context)))}, {}, {0: pick})
    return siblings


def greedily(siblings: CrossBranchCache, context: list[int], position: int = 900) -> dict[int, float]:
    return dict(siblings.propose(context_at(context, position), 0.0)[1])


def test_a_greedy_pick_is_proposed_after_its_context_wherever_and_whenever_that_stands() -> None:
    siblings = told_greedily(([1, 2, 3, 50], 60))
    assert list(greedily(siblings, [9, 9, 3, 50])) == [60]
    siblings.follow((1, 2, 3, 51, 52, 53), GREEDY)
    assert siblings.picks == 0, "nothing is ahead any more"
    assert list(greedily(siblings, [2, 3, 50])) == [60]
    siblings.learn({0: Proposal(context_at([2, 3, 51], 4))}, {}, {0: 61})
    assert list(greedily(siblings, [2, 3, 51])) == [61], "late replies tell as much"
    siblings.follow((1, 2, 3, 51, 52, 53, 54), Sampling(seed=8))
    assert list(greedily(siblings, [2, 3, 50])) == [60], "the next turn of a chat draws another seed"
    siblings.follow((1, 2, 3), GREEDY)
    assert greedily(siblings, [2, 3, 50]) == {}, "another text, also where it is the same once more"
    assert len(siblings._greedy) == 0


def test_a_greedy_context_that_shares_nothing_says_nothing() -> None:
    assert greedily(told_greedily(([1, 2, 3, 50], 60)), [1, 2, 3, 51]) == {}
    assert proposed(taught(([1, 2, 3, 50], 60)), [1, 2, 3, 51]) != {}, "at the same position it has the same noise"


def test_the_same_context_again_is_no_news_and_has_one_vote() -> None:
    once = told_greedily(([1, 2, 3, 50], 60))
    again = told_greedily(*[([1, 2, 3, 50], 60)] * 5)
    assert (again.picks, greedily(again, [2, 3, 50])) == (once.picks, greedily(once, [2, 3, 50]))
    agreed = told_greedily(([1, 2, 3, 50], 60), ([1, 9, 9, 3, 50], 60))
    assert agreed.picks == 2


def test_of_greedy_contexts_those_that_came_longest_ago_fall_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.draft.sources.siblings, "MAX_ENDINGS", 12)
    siblings = told_greedily(*[([1, 2, 3, 100 + number], 200 + number) for number in range(20)])
    assert len(siblings._greedy) == 12
    assert greedily(siblings, [2, 3, 100]) == {}
    assert list(greedily(siblings, [2, 3, 119])) == [219]


def test_the_latest_contexts_with_one_ending_vote() -> None:
    siblings = told_greedily(*[([number, 50], 60) for number in range(40)])
    for number in range(MAX_PICKS_PER_ENDING):
        siblings.learn({0: Proposal(context_at([100 + number, 50], 2))}, {}, {0: 61})
    assert list(greedily(siblings, [999, 50])) == [61]


def drafter() -> TreeDrafter:
    return TreeDrafter([SiblingSource(CrossBranchCache())])


def verified(drafting: TreeDrafter, text: list[int], picks: dict[int | None, int], tree: DraftTree) -> list[int]:
    """What a sweep of a tree brings: picks of its nodes, of which only the root's is on the way of the text."""
    drafting.learn(tree, {None: picks[None]}, {node: pick for node, pick in picks.items() if node is not None})
    return [*text, picks[None]]


def test_a_drafter_goes_on_with_what_its_dead_branches_told() -> None:
    drafting, text = drafter(), [1, 2, 3]
    tree = drafting.grow(text, 8, 8, COUPLED)
    assert len(tree) == 0, "nothing is known yet"
    seen: dict[int | None, Proposal] = {
        0: Proposal(context_at([*text, 50], 4)),
        1: Proposal(context_at([*text, 50, 60], 5)),
    }
    source = drafting.sources[0]
    assert isinstance(source, SiblingSource)
    source._cache.learn(seen, {}, {0: 60, 1: 70})
    after = drafting.grow([*text, 51], 8, 8, COUPLED)
    assert (after.tokens, after.parents) == ((60, 70), (None, 0)), "behind 51 as behind 50"
    text = verified(drafting, [*text, 51], {None: 60, 0: 71, 1: 80}, after)
    assert drafting.grow(text, 8, 8, COUPLED).tokens[0] == 71, "the target's own word after the same context"


def test_what_is_sure_goes_on_at_once() -> None:
    source = SiblingSource(CrossBranchCache())
    text, chain = [1, 2, 3], list(range(50, 90))
    source._cache.follow(tuple(text), GREEDY)
    for end in range(1, len(chain)):
        spot = context_at([*text, *chain[:end]], len(text) + end)
        source._cache.learn({0: Proposal(spot)}, {}, {0: chain[end]})
    search = Search((*text, chain[0]), 40, GREEDY, TokenTree(chain[0], 64, 40))
    source.begin(search)
    probabilities = dict(zip(search.tree.tokens, search.tree.acceptance_probs, strict=True))
    assert list(probabilities) == chain[: len(probabilities)], "nobody expanded anything"
    *on, last = list(probabilities.values())
    assert 3 < len(on) < len(chain) - 2
    assert min(on) >= MIN_SURE_PATH_PROBABILITY > last, "as far as the path is likely, and one more"
    unsure = SiblingSource(CrossBranchCache())
    unsure._cache.follow(tuple(text), GREEDY)
    for number, pick in ((1, 61), (2, 62)):
        unsure._cache.learn(
            {0: Proposal(context_at([number, 50], 2)), 1: Proposal(context_at([pick], 4))}, {}, {0: pick, 1: 70}
        )
    search = Search((*text, 50), 32, GREEDY, TokenTree(50, 64, 32))
    unsure.begin(search)
    assert sorted(search.tree.tokens) == [50, 61, 62], "of two that contradict each other none goes on"
    assert max(search.tree.acceptance_probs[1:]) < SURE_PROBABILITY


def test_going_on_is_bounded_by_the_tree_and_leaves_no_node_unasked() -> None:
    source, text = SiblingSource(CrossBranchCache()), (1, 2, 3)
    source._cache.follow(text, GREEDY)
    chain = [3, *range(50, 90)]
    for end in range(1, len(chain)):
        source._cache.learn({0: Proposal(context_at([1, 2, *chain[:end]], end + 2))}, {}, {0: chain[end]})
    tree = TokenTree(3, 4, 40)
    search = Search(text, 40, GREEDY, tree)
    source.begin(search)
    assert len(tree.tokens) <= 1 + 4 + 1
    tree.add_children(TokenTree.ROOT, [(token, 0.01) for token in range(60, 80)])
    fresh = [tree.child(TokenTree.ROOT, token) for token in range(60, 80)]
    source.expand(search, fresh)
    assert all(tree.child_probs(node) for node in fresh), "each stands in the chain that was told"


def test_a_search_begins_anew_when_many_picks_came() -> None:
    source = SiblingSource(CrossBranchCache())
    drafting, text = TreeDrafter([source]), [1, 2, 3]
    drafting.grow(text, 8, 8, COUPLED)
    assert not source.is_stale()
    source._cache.learn({0: Proposal(context_at(text, 3))}, {}, {0: 9})
    assert source.is_stale()
    assert drafting.grow(text, 8, 8, COUPLED).tokens == (9,)
    assert not source.is_stale()
