"""The look-up: its automaton against brute force, what it proposes, and that it learns whom to believe."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

import client.draft.sources.lookup
from client.draft.drafter import LookupDrafter, TreeDrafter
from client.draft.search.source import Search, Source
from client.draft.search.tree import DraftTree, TokenTree
from client.draft.sources.lookup import (
    COUNTED,
    MAX_CHILDREN,
    MIN_PATH_PROBABILITY,
    Lookup,
    LookupSource,
    SuffixAutomaton,
)
from swarm.protocol.messages import Sampling

GREEDY = Sampling()


def longest_repeat(text: list[int]) -> int:
    """The length of the longest ending that also stands earlier."""
    return max(
        (n for n in range(len(text)) if any(text[i : i + n] == text[len(text) - n :] for i in range(len(text) - n))),
        default=0,
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_automaton_knows_the_longest_ending_and_how_often_each_string_stands(seed: int) -> None:
    rng = random.Random(seed)
    automaton, text = SuffixAutomaton(), list[int]()
    for _ in range(60):
        text.append(rng.randrange(rng.choice([2, 3, 6])))
        automaton.append(text[-1])
        assert automaton.length[automaton.ending] == longest_repeat(text)
    for start in range(0, 50, 3):
        piece = text[start : start + rng.randint(1, 6)]
        state = SuffixAutomaton.ROOT
        for token in piece:
            state = automaton.next[state][token]
        stands = sum(text[at : at + len(piece)] == piece for at in range(len(text)))
        assert automaton.count[state] == stands


def test_stepping_on_keeps_the_longest_ending_that_still_stands_somewhere() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, 4, 9, 2, 3, 5, 1, 2])
    state = automaton.ending
    assert automaton.length[state] == 2
    state, length = automaton.step(state, 2, 3)
    assert length == 3, "1 2 3"
    state, length = automaton.step(state, length, 5)
    assert length == 3, "2 3 5, for 1 2 3 5 stands nowhere"
    assert automaton.step(state, length, 77) == (SuffixAutomaton.ROOT, 0)


def test_a_text_of_one_token_costs_no_more_than_another() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([7] * 3_000)
    assert len(automaton.length) <= 2 * 3_000
    assert automaton.length[automaton.ending] == 2_999
    assert max(automaton.count) <= 3_000
    assert COUNTED < 3_000


def grown(lookup: Lookup, text: list[int], nodes: int = 8, levels: int = 16) -> DraftTree:
    return LookupDrafter(lookup).grow(text, nodes, levels, GREEDY)


def test_what_followed_before_is_proposed_as_a_chain() -> None:
    tree = grown(Lookup(), [5, 6, 7, 8, 9, 1, 2, 3, 5, 6], nodes=3)
    assert tree.tokens == (7, 8, 9)
    assert tree.parents == (None, 0, 1)
    assert list(tree.acceptance_probs) == sorted(tree.acceptance_probs, reverse=True)
    assert min(tree.acceptance_probs) >= MIN_PATH_PROBABILITY


def test_where_a_text_went_on_differently_both_are_proposed_and_the_frequent_one_first() -> None:
    tree = grown(Lookup(), [1, 2, 3, 8, 1, 2, 4, 7, 1, 2, 3, 6, 1, 2], nodes=2, levels=1)
    assert tree.tokens == (3, 4)
    assert tree.parents == (None, None)
    assert tree.acceptance_probs[0] > tree.acceptance_probs[1]


def test_a_shorter_ending_proposes_after_the_longest() -> None:
    tree = grown(Lookup(), [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 9, 1, 2], nodes=2, levels=1)
    assert tree.tokens == (4, 3), "after 3 9 1 2 stood 4, after 1 2 also 3"


def test_a_new_text_and_a_new_token_propose_nothing() -> None:
    lookup = Lookup()
    assert len(grown(lookup, [1, 2, 3])) == 0
    assert len(grown(lookup, [1, 2, 3, 1, 2])) > 0
    assert len(grown(lookup, [1, 2, 3, 1, 2, 50])) == 0
    assert len(grown(lookup, [4, 5, 6])) == 0, "another text"
    assert grown(lookup, [4, 5, 6, 4]).tokens[0] == 5


def test_depth_and_size_are_bounded() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 20
    assert len(grown(Lookup(), text, nodes=5)) == 5
    assert len(grown(Lookup(), text, nodes=50, levels=3)) == 3
    assert len(grown(Lookup(), text, nodes=0)) == 0
    assert len(grown(Lookup(), text, levels=0)) == 0


def test_a_long_text_is_cut_and_still_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.draft.sources.lookup, "MAX_TOKENS", 64)
    lookup, text = Lookup(), list[int]()
    for round_ in range(40):
        text += [1, 2, 3, 4, 100 + round_]
        grown(lookup, text)
        assert len(lookup._text) <= 64
    assert grown(lookup, [*text, 1, 2]).tokens[:2] == (3, 4)


def test_the_picks_teach_whom_to_believe() -> None:
    """Proposals of one kind that are always wrong lose their chance, and with it their place; right ones gain."""
    for is_right, text in ((False, [1, 2, 3, 9, 1, 2]), (True, [1, 2, 3, 9, 1, 2])):
        lookup = Lookup()
        drafter = LookupDrafter(lookup)
        before = drafter.grow(text, 1, 1, GREEDY).acceptance_probs[0]
        for _ in range(40):
            tree = drafter.grow(text, 1, 1, GREEDY)
            drafter.learn(tree, {None: 3 if is_right else 4})
        after = drafter.grow(text, 1, 1, GREEDY).acceptance_probs
        assert (after[0] > 0.9) if is_right else (not after or after[0] < before / 4)


def test_labels_of_the_past_fade() -> None:
    lookup = Lookup()
    drafter, text = LookupDrafter(lookup), [1, 2, 3, 9, 1, 2]
    for pick, times in ((3, 1_000), (4, 300)):
        for _ in range(times):
            drafter.learn(drafter.grow(text, 1, 1, GREEDY), {None: pick})
    assert lookup.calibrator.tried.max() <= 101
    probabilities = drafter.grow(text, 1, 1, GREEDY).acceptance_probs
    assert not probabilities or probabilities[0] < 0.1


def test_what_the_text_did_not_go_through_is_no_label() -> None:
    lookup = Lookup()
    drafter, text = LookupDrafter(lookup), [1, 2, 3, 9, 1, 2]
    tree = drafter.grow(text, 1, 1, GREEDY)
    drafter.learn(tree, {}, {None: 4})
    assert drafter.grow(text, 1, 1, GREEDY) == tree
    drafter.learn(tree, {None: 4})
    assert drafter.grow(text, 1, 1, GREEDY).acceptance_probs < tree.acceptance_probs


def test_another_text_carries_some_of_the_labels() -> None:
    """A text that goes on keeps all; what was tried less often than is carried counts as before."""
    lookup = Lookup()
    drafter, text = LookupDrafter(lookup), [1, 2, 3, 9, 1, 2]
    for _ in range(3):
        drafter.learn(drafter.grow(text, 1, 1, Sampling(0, 1.0)), {None: 4})
    for _ in range(60):
        drafter.learn(drafter.grow(text, 1, 1, GREEDY), {None: 3})
    drafter.grow([*text, 3], 1, 1, GREEDY)
    assert (lookup.calibrator.tried.max(), lookup.calibrator.right.max()) == (60, 60)
    drafter.grow([5, 6, 7, 5], 1, 1, GREEDY)
    assert lookup.calibrator.tried.max() == pytest.approx(client.draft.sources.lookup.CARRIED)
    assert lookup.calibrator.right.max() == pytest.approx(client.draft.sources.lookup.CARRIED)
    assert sorted(lookup.calibrator.tried[lookup.calibrator.tried > 0]) == [
        3,
        pytest.approx(client.draft.sources.lookup.CARRIED),
    ]


def test_a_cold_text_repeats_itself_more_surely() -> None:
    text = [*range(1, 18), 40, *range(1, 18)]
    drafter = LookupDrafter(Lookup())
    probabilities = [
        drafter.grow(text, 1, 1, Sampling(0, temperature)).acceptance_probs[0] for temperature in (0.0, 0.3, 1.0)
    ]
    assert probabilities == sorted(probabilities, reverse=True)
    assert probabilities[0] > 0.9 > probabilities[1] > 0.7 > probabilities[2] > 0.4


def test_chances_below_one_node_sum_to_at_most_one() -> None:
    rng = random.Random(3)
    text = [rng.randrange(3) for _ in range(300)]
    tree = TokenTree(text[-1], 64, 4)
    Lookup().fill(tree, text, GREEDY)
    sums: dict[int | None, float] = {}
    for node in range(1, len(tree.tokens)):
        parent = tree.parents[node]
        sums[parent] = sums.get(parent, 0.0) + tree._conditional_probs[node]
    assert max(sums.values()) <= 1 + 1e-9


class Believer(Source):
    """Thinks that whatever others said first comes almost surely, as a model that learned to trust them."""

    weighs = True

    def __init__(self, own: int | None = None) -> None:
        """own: the token that it proposes itself below the root."""
        self._own = own
        self.passes = 0

    def begin(self, search: Search) -> bool:
        return self.expand(search, [TokenTree.ROOT])

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        self.passes += 1
        for node in nodes:
            said = search.tree.child_probs(node)
            if node == TokenTree.ROOT and self._own is not None:
                search.tree.weigh_children(node, [(self._own, 0.9), *((token, 0.01) for token in said)])
            elif said:
                best = max(said, key=said.__getitem__)
                search.tree.weigh_children(node, [(token, 0.999 if token == best else 1e-6) for token in said])
        return True


def test_a_text_that_turns_in_circles_is_followed_as_far_as_others_believe_it() -> None:
    circle = list(range(11, 31))
    text, levels = circle * 4, 200
    alone = LookupDrafter(Lookup()).grow(text, 400, levels, GREEDY)
    assert alone.depth < levels, "by its own chances it stops before"
    believer = Believer()
    tree = TreeDrafter([LookupSource(Lookup()), believer]).grow(text, 400, levels, GREEDY)
    assert tree.depth == levels
    chain = [token for token, parent in zip(tree.tokens, tree.parents, strict=True)][:levels]
    assert chain == [circle[at % len(circle)] for at in range(levels)]
    assert believer.passes <= 3 + levels // 16, "what it proposes ahead is weighed many nodes at a time"


def test_what_followed_a_token_that_others_proposed_is_proposed_below_it() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    tree = TreeDrafter([LookupSource(Lookup()), Believer(own=6)]).grow(text, 4, 8, GREEDY)
    below = dict(zip(tree.tokens, tree.parents, strict=True))
    assert tree.tokens[0] == 6, "3 stood there, but 6 is believed"
    assert tree.tokens[below[7] or 0] == 6, "as 7 followed 6 before"


def test_what_is_proposed_at_a_time_is_bounded_by_the_tree() -> None:
    text = list(range(11, 31)) * 4
    tree = TokenTree(text[-1], 10, 500)
    filling = Lookup().fill(tree, text, GREEDY)
    most = 2 * tree.max_nodes + MAX_CHILDREN
    assert tree.max_nodes < len(tree.tokens) <= 1 + most
    last, before = len(tree.tokens) - 1, len(tree.tokens)
    filling.add_below(last)
    assert before < len(tree.tokens) <= before + most
