"""Multi-step speculative sampling: its law by chi-square tests at a level of 1e-6 each, and what it refuses.

Seeds are fixed, so a test gives the same answer on every run; under fresh ones the 7 laws that must hold would together
raise a false alarm less than once in 100,000 runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from client.decode.walk import Walk
from client.draft.drafter import TreeDrafter
from client.draft.search.ranking import DRAWS, PRIOR, SampledChildren
from client.draft.search.source import Search, Source
from client.draft.search.tree import DraftTree
from node.model.span import SpanModel
from node.session.hop_session import HopKnowledge, check_sweep
from node.session.sweep_run import HopRole
from swarm.base.errors import ConfigError, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.gumbel import MULTISTEP_DOMAIN, PICK_DOMAIN, gumbel, uniforms
from swarm.compute.multistep_sampling import by_offset, draft_probs_of, draw_children, multistep_pick, multistep_picks
from swarm.compute.sampling import target_probs
from swarm.protocol import wire
from swarm.protocol.messages import Codec, Reply, Sampling, Sweep, SweepFrame
from swarm.protocol.pick_rules import MAX_CANDIDATES, DraftDistribution
from swarm.protocol.session import Limits
from swarm.protocol.v1 import node_pb2 as pb
from tests.unit.swarm.compute.test_sampling_law import LEVEL, chi_square_odds

TARGET = [0.30, 0.25, 0.15, 0.12, 0.10, 0.08]
DRAFTS = {
    "near": [0.35, 0.15, 0.20, 0.05, 0.15, 0.10],
    "wrong": [0.02, 0.02, 0.02, 0.02, 0.02, 0.90],
    "bold": [0.80, 0.04, 0.04, 0.04, 0.04, 0.04],
    "narrow": [0.60, 0.40, 0.0, 0.0, 0.0, 0.0],
    "the target's own": TARGET,
}
TRIALS = 4_000


def emitted(
    draft: list[float], make: Callable[[DraftDistribution], DraftDistribution] = lambda made: made
) -> list[int]:
    """One pick after another, after guesses that `make` may tamper with."""
    rng, draft_probs = np.random.default_rng(5), torch.tensor(draft, dtype=torch.float64)
    probs = torch.tensor(TARGET, dtype=torch.float64)
    found = []
    for _ in range(TRIALS):
        made = make(draw_children(0, draft_probs, 3, rng))
        found.append(multistep_pick(probs.numpy().copy(), made, iter(rng.random(4).tolist())))
    return found


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_law_is_the_targets_for_any_draft(draft: str) -> None:
    assert chi_square_odds(Counter(emitted(DRAFTS[draft])), TARGET) > LEVEL


def test_without_a_guess_the_law_is_the_targets() -> None:
    probs = torch.tensor([TARGET] * TRIALS, dtype=torch.float64)
    found = multistep_picks(probs, range(TRIALS), [None] * TRIALS, 3, 9)
    assert chi_square_odds(Counter(found), TARGET) > LEVEL


def test_negative_control_without_repeats_it_is_biased() -> None:
    without = emitted(DRAFTS["bold"], lambda made: replace(made, draws=tuple(dict.fromkeys(made.draws))))
    assert chi_square_odds(Counter(without), TARGET) < LEVEL


def test_negative_control_over_the_best_tokens_it_is_biased() -> None:
    best = emitted(DRAFTS["near"], lambda made: replace(made, draws=(0, 1, 2)))
    assert chi_square_odds(Counter(best), TARGET) < LEVEL


def test_draws_are_often_picked() -> None:
    """Of the three draws of a near draft one is picked as often as the rule promises, far above one try."""
    rng, hits = np.random.default_rng(1), 0
    draft_probs = torch.tensor(DRAFTS["near"], dtype=torch.float64)
    for position in range(500):
        made = draw_children(0, draft_probs, 3, rng)
        (token,) = multistep_picks(torch.tensor([TARGET], dtype=torch.float64), [position], [made], 2, 1)
        hits += token in {made.tokens[draw] for draw in made.draws}
    assert hits / 500 > 0.86
    assert sum(map(min, TARGET, DRAFTS["near"])) < 0.85


VOCAB_SIZE, DEPTH = 3, 3
RNG = np.random.default_rng(8)
PATHS = [path for depth in range(DEPTH + 1) for path in product(range(VOCAB_SIZE), repeat=depth)]
TARGET_LOGITS = {path: RNG.normal(0, 0.4, VOCAB_SIZE).tolist() for path in PATHS}
DRAFT_LOGITS = {path: RNG.normal(0, 0.4, VOCAB_SIZE).tolist() for path in PATHS}


class TableSource(Source):
    """Draws from the table of a draft; its place in the text is a node's path from the prompt."""

    def __init__(self, *, tampers: bool = False) -> None:
        """tampers: says that it drew its best token each time."""
        self.draws, self.tampers = SampledChildren(), tampers

    def begin(self, search: Search) -> bool:
        self.draws.begin()
        return self.expand(search, [search.tree.ROOT])

    def expand(self, search: Search, nodes: object) -> bool:
        for node in nodes:  # type: ignore[attr-defined]
            path, at = list[int](), node
            while at != search.tree.ROOT:
                path.insert(0, search.tree.tokens[at])
                at = search.tree.parents[at]
            whole = (*search.sequence[1:], *path)
            if len(whole) <= DEPTH:
                self.draws.add(search, [node], torch.tensor([DRAFT_LOGITS[whole]]))
                if self.tampers:
                    search.tree.guesses[node] = replace(search.tree.guesses[node], draws=(0,) * DRAWS)
        return True

    def lesson(self, places: object) -> object:  # type: ignore[override]
        return self.draws.lesson(places)  # type: ignore[arg-type]


def decode(drafter: TreeDrafter, sampling: Sampling) -> tuple[tuple[int, ...], int]:
    """The first DEPTH tokens through the client's own walk, trees of at most 4 nodes; and the sweeps that they took."""
    walk = Walk(Limits(VOCAB_SIZE, 20, sweeps=1, nodes=20), sampling)
    walk.restart([0], sampling)
    text: list[int] = []
    sweeps = 0
    while len(text) < DEPTH:
        tree = drafter.grow([0, *text], 4, DEPTH - len(text), sampling)
        sweep = walk.extend(tree)
        guesses = by_offset(sweep.guesses)
        paths: dict[int | None, tuple[int, ...]] = {}
        for offset, (token, parent) in enumerate(zip(sweep.tokens, sweep.parents, strict=True)):
            place = None if parent is None else parent - sweep.first_id
            paths[offset] = tuple(text) if place is None else (*paths[place], token)
        logits = torch.tensor([TARGET_LOGITS[paths[offset]] for offset in range(len(sweep.tokens))])
        found = multistep_picks(
            target_probs(logits, sampling),
            [len(paths[offset]) for offset in range(len(sweep.tokens))],
            [guesses.get(offset) for offset in range(len(sweep.tokens))],
            sampling.seed,
            sweep.sequence,
        )
        nodes = [sweep.first_id + offset for offset in range(len(found))]
        text += walk.accept(Reply(sweep.sequence, 0, tuple(zip(nodes, found, strict=True))))  # type: ignore[arg-type]
        drafter.learn(tree, {None: found[0], **dict(enumerate(found[1:]))})
        sweeps += 1
    return tuple(text[:DEPTH]), sweeps


def joint_odds(source: TableSource) -> tuple[float, float]:
    """How well the joint law of three tokens over 800 seeds fits, and the sweeps that a text took."""
    probs = []
    for path in product(range(VOCAB_SIZE), repeat=DEPTH):
        steps = [torch.tensor(TARGET_LOGITS[path[:depth]]).softmax(0)[path[depth]].item() for depth in range(DEPTH)]
        probs.append(math.prod(steps))
    counts: Counter[int] = Counter()
    drafter, sweeps = TreeDrafter([source]), 0
    for seed in range(800):
        text, used = decode(drafter, Sampling(seed=seed, temperature=1.0, multistep=True))
        counts[text[0] * 9 + text[1] * 3 + text[2]] += 1
        sweeps += used
    return chi_square_odds(counts, probs), sweeps / 800


def test_walks_through_trees_that_were_drawn_emit_the_targets_law() -> None:
    """Through drawing, cutting to 4 nodes, the walk and what is learned."""
    odds, sweeps = joint_odds(TableSource())
    assert odds > LEVEL
    assert sweeps < 1.9, "trees were walked"


def test_negative_control_a_draft_that_lies_about_its_draws_bends_the_law() -> None:
    assert joint_odds(TableSource(tampers=True))[0] < LEVEL


def test_a_guess_stands_at_the_node_whose_children_were_drawn() -> None:
    drafter = TreeDrafter([TableSource()])
    for seed in range(20):
        sampling = Sampling(seed=seed, temperature=1.0, multistep=True)
        tree = drafter.grow([0], 6, DEPTH, sampling)
        for cut in (tree, tree.first(3)):
            children: dict[int, set[int]] = {}
            for token, parent in zip(cut.tokens, cut.parents, strict=True):
                children.setdefault(0 if parent is None else parent + 1, set()).add(token)
            drawn = {made.offset: {made.tokens[draw] for draw in made.draws} for made in cut.guesses}
            assert list(drawn) == sorted(drawn)
            assert max(drawn) <= len(cut.tokens)
            assert all(some <= drawn[offset] for offset, some in children.items())
            assert all(made.weights == pytest.approx(weights_at(cut, made)) for made in cut.guesses)


def weights_at(tree: DraftTree, made: DraftDistribution) -> list[float]:
    """The draft's probabilities after a guess's node, by the order of its tokens."""
    path, at = list[int](), made.offset - 1 if made.offset else None
    while at is not None:
        path.insert(0, tree.tokens[at])
        at = tree.parents[at]
    probs = torch.tensor(DRAFT_LOGITS[tuple(path)]).double().softmax(0)
    return [float(probs[token]) for token in made.tokens]


def test_a_guess_is_what_was_drawn_from_after_it_travelled() -> None:
    probs = torch.rand(500, generator=torch.Generator().manual_seed(1)).double().softmax(0)
    made = draw_children(3, probs, 5, np.random.default_rng(2))
    assert len(made.tokens) == MAX_CANDIDATES
    assert set(made.tokens) == set(probs.topk(MAX_CANDIDATES).indices.tolist())
    assert [float(np.float32(weight)) for weight in made.weights] == list(made.weights), "they travel as float32"
    assert draft_probs_of(made).sum() == pytest.approx(1)
    assert made.problem(500) is None


def test_a_model_that_gives_no_numbers_is_told_of() -> None:
    with pytest.raises(ConfigError, match="not finite"):
        target_probs(torch.tensor([[0.0, math.nan]]), Sampling(temperature=1.0))


def test_few_tokens_left_by_filters_are_all_there_is_to_draw() -> None:
    probs = target_probs(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), Sampling(temperature=1.0, top_k=2))[0]
    made = draw_children(0, probs, 8, np.random.default_rng(1))
    assert set(made.tokens) == {1, 2}
    assert all(0 <= draw < 2 for draw in made.draws)


GOOD = DraftDistribution(0, (4, 9), (0.5, 0.25), (0, 1, 0))


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (replace(GOOD, tokens=(), weights=(), draws=()), "1 to 32"),
        (replace(GOOD, tokens=(4, 4)), "no token twice"),
        (replace(GOOD, weights=(0.5,)), "as many"),
        (replace(GOOD, tokens=tuple(range(33)), weights=(1.0,) * 33), "1 to 32"),
        (replace(GOOD, tokens=(4, 10)), "below 10"),
        (replace(GOOD, weights=(0.5, 0.0)), "above 0"),
        (replace(GOOD, weights=(0.5, math.nan)), "finite"),
        (replace(GOOD, weights=(0.5, math.inf)), "finite"),
        (replace(GOOD, draws=(2,)), "places"),
        (replace(GOOD, draws=(0,) * 17), "at most 16"),
    ],
)
def test_a_guess_that_cannot_be_is_refused(bad: DraftDistribution, problem: str) -> None:
    assert problem in (bad.problem(10) or "")
    assert GOOD.problem(10) is None


def test_numbers_of_one_seed_are_others_in_every_sweep_and_others_than_picks() -> None:
    ours = uniforms(1, 2, (MULTISTEP_DOMAIN, 3), 17)
    assert len(ours) == 17
    assert ((ours > 0) & (ours < 1)).all()
    for other in (
        uniforms(1, 2, (MULTISTEP_DOMAIN, 4), 17),
        uniforms(1, 3, (MULTISTEP_DOMAIN, 3), 17),
        uniforms(2, 2, (MULTISTEP_DOMAIN, 3), 17),
    ):
        assert not set(ours) & set(other)
    noise = -np.log(-np.log1p(-uniforms(1, 2, (PICK_DOMAIN, 0), 8)))
    assert noise == pytest.approx(gumbel(1, 2, np.arange(8))), "the law of the module, in another domain"


def test_drawing_learns_which_draw_is_picked() -> None:
    draws = SampledChildren()
    for _ in range(500):
        draws.learn((5, 6), 6)
    assert draws._right[1] / draws._tried[1] > 0.9
    assert draws._right[0] / draws._tried[0] < 0.1
    assert draws._right[3] / draws._tried[3] == pytest.approx(PRIOR[3])
    assert len(PRIOR) == DRAWS


SWEEP = Sweep(
    1, 0, TreeNodeId(0), (5, 6), (None, TreeNodeId(0)), TreeNodeId(0), guesses=(GOOD, replace(GOOD, offset=1))
)


def refused(change: Callable[[pb.Sweep], object]) -> str:
    """What the wire says to a sweep that was changed on its way."""
    frame = pb.Frame.FromString(wire.encode_frame(SweepFrame(SWEEP)))
    change(frame.sweep.sweep)
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_frame(frame.SerializeToString())
    assert caught.value.field == "guesses"
    return str(caught.value)


def test_the_wire_refuses_guesses_that_cannot_be() -> None:
    assert wire.decode_frame(wire.encode_frame(SweepFrame(SWEEP))) == SweepFrame(SWEEP)
    assert "not rising" in refused(lambda sweep: setattr(sweep.guesses[1], "offset", 0))
    assert "not below 2" in refused(lambda sweep: setattr(sweep.guesses[1], "offset", 2))
    assert "too many" in refused(lambda sweep: sweep.guesses.append(sweep.guesses[1]))
    assert "above 0" in refused(lambda sweep: sweep.guesses[0].weights.__setitem__(0, -1.0))
    assert "1 to 32" in refused(lambda sweep: sweep.guesses[0].ClearField("tokens"))


def test_a_hop_refuses_tokens_that_its_model_does_not_have() -> None:
    model, role = (
        cast("SpanModel", SimpleNamespace(vocab_size=9, hidden_size=4)),
        HopRole(Span(0, 1), Codec.FP32, 9, None),
    )
    with pytest.raises(RemoteProtocolError, match="token ids must be below 9"):
        check_sweep(SweepFrame(SWEEP), model, role, HopKnowledge())
    check_sweep(SweepFrame(SWEEP), cast("SpanModel", SimpleNamespace(vocab_size=10)), role, HopKnowledge())
