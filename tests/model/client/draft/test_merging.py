"""Several sources in one tree: a model weighs what was said before it, and learns what that is worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from benchmarks.simulation.acceptance import demo_prompts
from client.decode.goodput import Goodput
from client.draft.drafter import Drafter, LookupDrafter, ModelDrafter, NoDrafter, TreeDrafter
from client.draft.search.calibration import Calibration, Candidates, SoftmaxPrior
from client.draft.search.ranking import MAX_CHILDREN, Ranker
from client.draft.search.source import Passes, Search, Source
from client.draft.search.tree import DraftTree, TokenTree
from client.draft.sources.lookup import Lookup
from client.draft.sources.model import ModelSource
from swarm.compute.ragged_batch import RaggedModel
from swarm.demo import TARGET
from swarm.protocol.messages import Sampling
from tests.model.in_process_chain import decoding

GREEDY = Sampling()
WARM = Sampling(seed=5, temperature=1.0)
VOCAB = 4096


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Prophet(Source):
    """Says one token after the text, with one chance."""

    def __init__(self, token: int, probability: float) -> None:
        self.token, self.probability = token, probability

    def begin(self, search: Search) -> bool:
        search.tree.add_children(TokenTree.ROOT, [(self.token, self.probability)])
        return False

    def widen(self, search: Search) -> None:
        """Insists."""
        self.begin(search)


def model(draft: RaggedModel, probabilities: Calibration | SoftmaxPrior | None = None) -> ModelSource:
    return ModelSource(draft, VOCAB, 512, ranker=Ranker(VOCAB, probabilities or Calibration()))


def firsts(tree: DraftTree) -> dict[int, float]:
    """Children of the root with their chances."""
    all_of_them = zip(tree.tokens, tree.parents, tree.acceptance_probs, strict=True)
    return {token: probability for token, parent, probability in all_of_them if parent is None}


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_agreement_is_worth_more_and_contradiction_less_than_either_alone(
    draft: RaggedModel, sampling: Sampling
) -> None:
    [prompt] = demo_prompts(1)
    alone = firsts(TreeDrafter([model(draft)]).grow(prompt, 64, 1, sampling))
    best, second = sorted(alone, key=alone.__getitem__, reverse=True)[:2]
    stranger = next(token for token in range(3, VOCAB) if token not in alone)
    for token in (best, second, stranger):
        both = firsts(TreeDrafter([model(draft), Prophet(token, 0.9)]).grow(prompt, 64, 1, sampling))
        assert sum(both.values()) <= 1 + 1e-9, "not both can be right"
        assert both[token] > alone.get(token, 0.0)
        assert all(both[other] < alone[other] for other in alone if other != token)
    assert both.keys() == {*alone, stranger}
    doubted = firsts(TreeDrafter([Prophet(stranger, 0.3), model(draft)]).grow(prompt, 64, 1, sampling))
    assert 0 < doubted[stranger] < 0.3, "the model's word is the last one, also where it lowers a chance"


def test_who_insists_is_not_believed_the_more(draft: RaggedModel) -> None:
    [prompt] = demo_prompts(1)
    drafter = TreeDrafter([Prophet(7, 0.9), model(draft)])
    once = firsts(drafter.grow(prompt, 32, 1, GREEDY))
    assert firsts(drafter.grow(prompt, 64, 1, GREEDY))[7] == once[7] < 0.9


@pytest.mark.parametrize("is_right", [True, False])
def test_who_is_often_right_is_believed(draft: RaggedModel, is_right: bool) -> None:
    """Every lesson has another prophecy, so that none is learned by heart."""
    prompts, calibration = demo_prompts(8), Calibration()
    for number, prompt in enumerate(prompts[:-1]):
        drafter = TreeDrafter([Prophet(100 + number, 0.5), model(draft, calibration)])
        for _ in range(4):
            drafter.learn(drafter.grow(prompt, 16, 1, GREEDY), {None: 100 + number if is_right else 99})
    before, after = (
        firsts(TreeDrafter([Prophet(500, 0.5), model(draft, probabilities)]).grow(prompts[-1], 64, 1, GREEDY))[500]
        for probabilities in (Calibration(), calibration)
    )
    assert after > 2 * before if is_right else after < before / 2


def test_what_the_text_did_not_go_through_teaches_no_chance(draft: RaggedModel) -> None:
    [prompt], calibration = demo_prompts(1), Calibration()
    drafter = TreeDrafter([model(draft, calibration)])
    tree, before = drafter.grow(prompt, 16, 4, GREEDY), calibration.fits
    drafter.learn(tree, {}, {None: 5, 0: 6})
    assert calibration.fits is before
    drafter.learn(tree, {None: 5}, {0: 6})
    assert calibration.fits is not before


def test_the_second_model_hears_the_first(draft: RaggedModel) -> None:
    """And learns what its word is worth, not the highest of both."""
    [prompt] = demo_prompts(1)
    heard: list[NDArray[np.float64] | None] = []

    class Listening(Calibration):
        def learn(self, candidates: Candidates, hits: NDArray[np.bool_]) -> None:
            heard.append(candidates.other_probs)

    drafter = TreeDrafter([model(draft), model(draft, Listening())])
    tree = drafter.grow(prompt, 16, 4, GREEDY)
    drafter.learn(tree, {None: tree.tokens[0]})
    [said] = heard
    assert said is not None
    assert said.shape == (1, MAX_CHILDREN)
    assert (said > 0).all(), "the same model proposed the same tokens"


def test_sources_that_weigh_are_asked_last(draft: RaggedModel) -> None:
    asked: list[str] = []

    class Early(Prophet):
        def begin(self, search: Search) -> bool:
            asked.append("early")
            return super().begin(search)

    class Late(ModelSource):
        def beginning(self, search: Search) -> Passes[bool]:
            asked.append("late")
            return super().beginning(search)

    TreeDrafter([Late(draft, VOCAB, 512), Early(7, 0.5)]).grow(demo_prompts(1)[0], 4, 4, GREEDY)
    assert asked == ["early", "late"]


def test_a_model_without_candidates_leaves_what_was_said(draft: RaggedModel) -> None:
    """A draft gone NaN, a text beyond its window, or one with an id that it does not share."""

    class Gone(Calibration):
        def acceptance_probs(self, candidates: Candidates) -> NDArray[np.float64]:
            return super().acceptance_probs(candidates) * np.nan

    [prompt] = demo_prompts(1)
    narrow = ModelSource(draft, max(prompt), 512)
    for silent in (model(draft, Gone()), ModelSource(draft, VOCAB, len(prompt) - 1), narrow):
        assert firsts(TreeDrafter([Prophet(7, 0.5), silent]).grow(prompt, 4, 4, GREEDY)) == {7: 0.5}
    assert narrow.session.rows == 0
    tree = TreeDrafter([Prophet(4_000, 0.9), ModelSource(draft, 4_000, 512)]).grow([5, 6, 7], 16, 4, GREEDY)
    assert 4_000 in tree.tokens, "what others said of an id that the model does not share stands, and ends there"
    assert not any(parent is not None and tree.tokens[parent] == 4_000 for parent in tree.parents)


@pytest.fixture(scope="module")
def refrain() -> list[int]:
    """A text that has begun to repeat itself."""
    line = "and the tide is on the turn, and the lamp is in the window, and the kettle's on the boil. "
    ids: list[int] = AutoTokenizer.from_pretrained(TARGET)(line * 3)["input_ids"]
    return ids[:-12]


def test_look_up_and_model_grow_one_tree(draft: RaggedModel, refrain: list[int]) -> None:
    """One child per token per parent, and the model's KV is as without the look-up."""
    alone = ModelDrafter(draft, VOCAB, 512).grow(refrain, 16, 16, GREEDY)
    merging = ModelDrafter(draft, VOCAB, 512, lookup=Lookup())
    tree = merging.grow(refrain, 16, 16, GREEDY)
    places = list(zip(tree.tokens, tree.parents, strict=True))
    assert len(set(places)) == len(places) == 16
    assert all(parent is None or parent < node for node, parent in enumerate(tree.parents))
    assert sum(tree.acceptance_probs) > sum(alone.acceptance_probs), "it knows the refrain"
    assert len(tree.lessons) == 2, "both learn"
    again = merging.grow(refrain, 16, 16, GREEDY)
    assert (again.tokens, again.parents) == (tree.tokens, tree.parents)
    assert again.acceptance_probs == pytest.approx(tree.acceptance_probs, abs=1e-6)


@pytest.mark.asyncio
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("source", ["model", "look-up", "both"])
async def test_the_text_is_the_plain_one_whatever_goodput_chooses(
    target: RaggedModel, draft: RaggedModel, refrain: list[int], sampling: Sampling, source: str
) -> None:
    lookup = Lookup()
    drafter: Drafter = LookupDrafter(lookup)
    if source != "look-up":
        drafter = ModelDrafter(draft, VOCAB, 512, lookup=lookup if source == "both" else None)
    async with decoding(target, NoDrafter(), refrain, sampling) as (plain, pieces):
        text = "".join([piece async for piece in pieces])
    async with decoding(target, drafter, refrain, sampling, Goodput(5)) as (job, pieces):
        assert text == "".join([piece async for piece in pieces])
    assert all(sweep.reason for sweep in job.sweeps)
    assert (lookup.calibrator.tried.sum() > 0) == (source != "model")
    if sampling.temperature > 0:  # it leaves the refrain: what a look-up knows is rarely right then
        return
    assert sum(sweep.emitted > 0 for sweep in job.sweeps) < len(plain.sweeps), "trees were sent, and were right"
    deeper = [sweep for sweep in job.sweeps if "in flight" in sweep.reason]
    assert sum(sweep.emitted for sweep in deeper) > 0, "and tokens came from below nodes that were not verified yet"
