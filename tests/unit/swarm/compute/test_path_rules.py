"""Rules along paths: what a node gets in a tree is, bit for bit, what it gets where its path is all committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from random import Random
from typing import Any, cast

import pytest
import torch
from llguidance import LLTokenizer

from swarm.base.ids import TreeNodeId
from swarm.compute.grammar import GrammarState, compiled
from swarm.compute.grammars import GrammarPlace
from swarm.compute.path_rules import NodeMasks, PathRules
from swarm.demo import TARGET
from swarm.protocol.messages import Sweep
from swarm.protocol.pick_rules import Grammar, PickRules
from swarm.protocol.session import Limits, SessionState

VOCABULARY = 4_096
LIMITS = Limits(VOCABULARY, window_tokens=4_096, sweeps=1_000, nodes=256)
WORDS = Grammar("regex", "[a-d]( [a-d]+)*!")
END = 2
PENALTIES = PickRules(3, 0.7, 0.4, 1.3, ((5, 1.5), (7, -100.0)))
GRAMMAR = PickRules(3, grammar=WORDS, end_tokens=(END,))
LOOSE = PickRules(3, grammar=Grammar("regex", "a((b|c) (d|a)!?)*"), end_tokens=(END,))
BOTH = PickRules(3, 0.7, -0.4, 0.8, ((5, 1.5), (7, -2.0)), LOOSE.grammar, (END,))


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer((TARGET / "tokenizer.json").read_text())


@cache
def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().tokenize_str(text))


class Here:
    """A compiled grammar whose worker is this process."""

    run = 0

    def __init__(self, rules: PickRules) -> None:
        assert rules.grammar is not None
        self._state = GrammarState(tokenizer(), compiled(tokenizer(), rules.grammar), rules.end_tokens)

    async def masks(self, asked: Callable[[], dict[str, Any]]) -> tuple[list[int], bytes]:
        call = asked()
        self._state.follow(call["kept"], call["new"])
        chosen, masks = self._state.masks(call["size"], call["paths"])
        return chosen, b"".join(masks)

    def forget(self, session: int) -> None:
        pass


class Along:
    """Rules, with the grammar's masks where they have one."""

    def __init__(self, rules: PickRules) -> None:
        self._rules = PathRules(rules)
        self._place = None if rules.grammar is None else GrammarPlace(cast("Any", Here(rules)), rules)

    def apply(self, logits: torch.Tensor, nodes: Sequence[TreeNodeId], state: SessionState) -> None:
        masks = None
        if self._place is not None:
            with pytest.raises(StopIteration) as over:
                cast("Coroutine[Any, Any, NodeMasks]", self._place.masks(nodes, state)).send(None)
            masks = over.value.value
        self._rules.apply(logits, nodes, state, masks)


def made(rules: PickRules) -> Along:
    return Along(rules)


def sweep(state: SessionState, tokens: list[int], parents: list[TreeNodeId | None], **changes: int | None) -> Sweep:
    """The next sweep, which takes all others for answered."""
    truncate_to, commit_to = changes.get("truncate_to"), changes.get("commit_to")
    node = None if commit_to is None else TreeNodeId(commit_to)
    kept = len(state.committed) if truncate_to is None else truncate_to
    committed = kept + (0 if node is None else len(state.path_to(node)))
    first = state.next_id
    return Sweep(
        state.sequence + 1,
        committed,
        first,
        tuple(tokens),
        tuple(parents),
        first,
        acked=state.sequence,
        truncate_to=truncate_to,
        commit_to=node,
    )


def committed_state(path: list[int]) -> SessionState:
    """A session in which a path is committed but for its last token, as plain decoding has it."""
    state = SessionState(LIMITS)
    for token in path:
        last = next(iter(state.live), None)
        state.apply(sweep(state, [token], [None], commit_to=last))
    return state


def path_to(state: SessionState, node: TreeNodeId) -> list[int]:
    return [*(one.token for one in state.committed), *(state.live[above].token for above in state.path_to(node))]


def fits(path: list[int], rules: PickRules) -> list[int]:
    """Tokens that plain decoding might pick after a path."""
    logits, plain = torch.zeros(1, VOCABULARY), committed_state(path)
    made(rules).apply(logits, list(plain.live), plain)
    return [token for token in logits[0].isfinite().nonzero()[:, 0].tolist() if token != END]


def grow(state: SessionState, rng: Random, rules: PickRules) -> Sweep:
    """A sweep that commits some live node, or cuts the text, and hangs some nodes below what is left.

    Most of them hold a token that the rules leave there.
    """
    live = [node for node in state.live if fits(path_to(state, node), rules)] or list(state.live)
    cut = len(state.committed) > 6 and rng.random() < 0.2
    commit_to = None if cut or not live else rng.choice(live)
    truncate_to = rng.randrange(4, len(state.committed)) if cut else None
    left = list(state.below(commit_to)) if commit_to is not None and not cut else []
    parents: list[TreeNodeId | None] = []
    tokens: list[int] = []
    length = len(state.committed) if truncate_to is None else truncate_to
    kept = [one.token for one in state.committed[:length]]
    paths: dict[TreeNodeId | None, list[int]] = {node: path_to(state, node) for node in left}
    paths[None] = kept if commit_to is None else path_to(state, commit_to)
    taken = {(state.live[node].parent, state.live[node].token) for node in left}
    for place in range(rng.randrange(1, 12)):
        above = [None, *left, *(TreeNodeId(state.next_id + earlier) for earlier in range(place))]
        parent = rng.choice(above)
        token = rng.choice((rng.random() < 0.9 and fits(paths[parent], rules)) or [5, 7, END])
        hung = commit_to if parent is None else parent
        if (hung, token) in taken:
            token = next(one for one in range(9, VOCABULARY) if (hung, one) not in taken)
        taken.add((hung, token))
        paths[TreeNodeId(state.next_id + place)] = [*paths[parent], token]
        parents.append(parent)
        tokens.append(token)
    return sweep(state, tokens, parents, commit_to=commit_to, truncate_to=truncate_to)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rules", [PENALTIES, LOOSE, BOTH], ids=["penalties", "grammar", "both"])
def test_a_node_of_a_tree_gets_what_plain_decoding_gets(rules: PickRules, seed: int) -> None:
    rng = Random(seed)
    state, along = SessionState(LIMITS), made(rules)
    state.apply(sweep(state, [11, 5, 5, tokens_of("a")[0]], [None, TreeNodeId(0), TreeNodeId(1), TreeNodeId(2)]))
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    open_places = 0
    for _ in range(12):
        state.apply(grow(state, rng, rules))
        nodes = [node for node in state.live if rng.random() < 0.8]
        if len(state.committed) > 5 and rng.random() < 0.3:  # a replay asks about committed nodes too
            nodes = [state.committed[-2].id, state.committed[-1].id, *nodes]
        found = logits.repeat(len(nodes), 1)
        along.apply(found, nodes, state)
        for node, row in zip(nodes, found, strict=True):
            place = next((at for at, one in enumerate(state.committed) if one.id == node), None)
            path = path_to(state, node) if place is None else [one.token for one in state.committed[: place + 1]]
            plain = committed_state(path)
            expected = logits.clone()
            made(rules).apply(expected, list(plain.live), plain)
            assert torch.equal(row, expected[0])
            open_places += int(row.isfinite().sum() > 1)
    assert open_places > 10, "many paths match the grammar"


def test_penalties_are_their_documented_law() -> None:
    state = committed_state([5, 6, 6, 9, 9, 9, 10])
    logits = torch.linspace(-2, 2, VOCABULARY)[torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))]
    found = logits.clone()[None]
    made(PENALTIES).apply(found, list(state.live), state)
    generated = Counter([9, 9, 9, 10])
    for token in range(VOCABULARY):
        value = logits[token].item()
        if token in (5, 6, 9, 10):
            value = value * 1.3 if value < 0 else value / 1.3
        value -= 0.7 * generated[token] + 0.4 * (generated[token] > 0)
        value += {5: 1.5, 7: -100.0}.get(token, 0.0)
        assert found[0, token].item() == pytest.approx(value, abs=1e-5)


def allowed(text: str, rules: PickRules = GRAMMAR) -> set[int]:
    state = committed_state([11, 12, 13, *tokens_of(text)])
    found = torch.zeros(1, VOCABULARY)
    made(rules).apply(found, list(state.live), state)
    return set(found[0].isfinite().nonzero()[:, 0].tolist())


def test_a_text_ends_where_its_grammar_accepts_and_nowhere_else() -> None:
    assert END not in allowed("a b")
    assert allowed("a b!") == {END}, "nothing more fits"
    assert allowed("b x") == {END}, "what does not match goes nowhere"
    more = PickRules(3, grammar=Grammar("regex", "[a-d]+"), end_tokens=(END, 7))
    assert {END, 7, *tokens_of("a")} <= allowed("a", more), "it may go on, or end by any token that ends a text"
    assert 3 not in allowed("a", more)


def test_a_tokenizers_own_end_is_no_other_models() -> None:
    """Which ids end a text is the client's to say: a tokenizer knows one, its generation config may have others."""
    assert allowed("a b!", PickRules(3, grammar=WORDS, end_tokens=(7,))) == {7}
