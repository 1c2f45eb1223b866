"""TokenTree against its plain definition, for any order of candidates, added or weighed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from client.draft.search.tree import DraftTree, TokenTree

LEVELS = 4
probabilities = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5, 0.9, 1.0]) | st.floats(0.0, 1.0)
candidates = st.lists(st.tuples(st.integers(0, 5), probabilities), max_size=6)


def paths(tree: DraftTree) -> list[tuple[tuple[int, ...], float]]:
    """Every node as (tokens from the root down, chance), in the tree's order."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent is not None else ()), token))
    return list(zip(found, tree.acceptance_probs, strict=True))


Added = tuple[int, list[tuple[int, float]], bool]


def naive_chances(tree: TokenTree, added: list[Added]) -> list[float]:
    """Each node's chance by definition: its own one times its parent's.

    Its own is the highest ever named for it, or what was weighed the last time its parent's children were.
    """
    own: dict[tuple[int, int], float] = {}
    weighed: set[int] = set()
    for node, children, is_weighed in added:
        for token, probability in children:
            if is_weighed or (node, token) not in own:
                own[node, token] = probability
            elif node not in weighed:
                own[node, token] = max(probability, own[node, token])
        weighed |= {node} if is_weighed else set()
    naive = [1.0]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        assert parent is not None
        naive.append(naive[parent] * own[parent, token])
    return naive


@given(st.data(), st.integers(0, 12))
def test_best_nodes_are_the_best_of_all_candidates_and_closed_under_parent(data: st.DataObject, nodes: int) -> None:
    tree = TokenTree(7, nodes, LEVELS)
    added: list[Added] = []
    for _ in range(data.draw(st.integers(0, 8))):
        node = data.draw(st.integers(0, len(tree.tokens) - 1))
        if data.draw(st.booleans()):
            tree.frontier(2)
        children, is_weighed = data.draw(candidates), data.draw(st.booleans())
        if is_weighed:
            children = list(dict(children).items())
        (tree.weigh_children if is_weighed else tree.add_children)(node, children)
        added.append((node, children, is_weighed))
    naive = naive_chances(tree, added)
    assert tree.acceptance_probs == naive
    for count in (nodes, nodes // 2, len(tree.tokens)):
        best = tree.best(count)
        assert list(best.acceptance_probs) == sorted(naive[1:], reverse=True)[:count]
        assert all(parent is None or parent < place for place, parent in enumerate(best.parents))
        named = [path for path, _ in paths(best)]
        assert len(set(named)) == len(named), "two equal tokens under one parent"


@given(st.integers(0, 40), st.integers(1, 5), st.lists(candidates, min_size=1, max_size=8))
def test_searching_the_frontier_finds_the_best_of_the_whole_space(
    nodes: int, batch: int, rules: list[list[tuple[int, float]]]
) -> None:
    def children(path: tuple[int, ...]) -> list[tuple[int, float]]:
        return rules[sum((place + 1) * token for place, token in enumerate(path)) % len(rules)]

    whole = TokenTree(7, 10**6, LEVELS)
    everything: list[tuple[int, ...]] = [()]
    for node, path in enumerate(everything):
        if len(path) < LEVELS:
            whole.add_children(node, children(path))
            everything += [(*everything[node], token) for token in whole.tokens[len(everything) :]]

    tree = TokenTree(7, nodes, LEVELS)
    known: list[tuple[int, ...]] = [()]
    seen: set[int] = set()
    while chosen := tree.frontier(batch):
        assert len(chosen) <= batch
        assert not seen & set(chosen), "a node was handed out twice"
        seen |= set(chosen)
        for node in chosen:
            tree.add_children(node, children(known[node]))
            known += [(*known[node], token) for token in tree.tokens[len(known) :]]
    assert tree.best(nodes).acceptance_probs == whole.best(nodes).acceptance_probs
    assert all(len(path) <= LEVELS for path, _ in paths(tree.best(nodes)))
