"""What dead branches told, with the demo pair: the same text in fewer sweeps, and no pass of the draft is run again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from transformers import AutoTokenizer

from benchmarks.control.replay import ReplaySetup, replay_texts
from benchmarks.simulation.acceptance import Run, Size, demo_prompts, generate
from benchmarks.simulation.chain import VirtualDrafter
from benchmarks.simulation.profiles import PROFILES
from benchmarks.simulation.recorded import generate_texts
from client.decode.goodput import Goodput
from client.draft.drafter import NoDrafter, TreeDrafter
from client.draft.search.calibration import Calibration
from client.draft.search.ranking import Ranker
from client.draft.search.source import Source
from client.draft.sources.model import ModelSource
from client.draft.sources.siblings import CrossBranchCache, Proposal, SiblingSource, context_at
from swarm.compute.ragged_batch import RaggedModel
from swarm.demo import TARGET
from swarm.protocol.messages import Sampling

VOCAB = 8_192
SIZE = Size(64, 64)
FAR = PROFILES["100 ms, 50 Mbit/s"]


def model_source(draft: RaggedModel) -> ModelSource:
    return ModelSource(draft, VOCAB, 512, ranker=Ranker(VOCAB, Calibration()))


def texts(target: RaggedModel, sources: Sequence[Source]) -> list[Run]:
    drafter = TreeDrafter(sources) if sources else NoDrafter()
    size = SIZE if sources else Size(SIZE.new_tokens, 0)
    prompts = demo_prompts(2, tokens=64)
    return [generate(target, drafter, prompt, Sampling(91 + n, 1.0), size) for n, prompt in enumerate(prompts)]


def test_sampled_text_takes_fewer_sweeps_and_stays_the_same(target: RaggedModel, draft: RaggedModel) -> None:
    siblings = CrossBranchCache()
    plain = texts(target, [])
    alone, told = texts(target, [model_source(draft)]), texts(target, [SiblingSource(siblings), model_source(draft)])
    assert [run.tokens for run in plain] == [run.tokens for run in alone] == [run.tokens for run in told]
    assert siblings.calibrator.right.sum() > 0, "what dead branches told came true"
    assert sum(run.sweeps for run in told) < sum(run.sweeps for run in alone)


def test_greedy_text_takes_fewer_sweeps_and_a_text_told_again_as_many(target: RaggedModel, draft: RaggedModel) -> None:
    """What another text told is forgotten: a benchmark that tells a text twice measures the same twice."""
    siblings = CrossBranchCache()
    alone, told, again = 0, 0, 0
    for prompt in demo_prompts(2, tokens=64):
        plain = generate(target, NoDrafter(), prompt, Sampling(), Size(SIZE.new_tokens, 0))
        runs = [
            generate(target, TreeDrafter(sources), prompt, Sampling(), SIZE)
            for sources in (
                [model_source(draft)],
                [SiblingSource(siblings), model_source(draft)],
                [SiblingSource(siblings), model_source(draft)],
            )
        ]
        assert all(run.tokens == plain.tokens for run in runs)
        siblings.calibrator = CrossBranchCache().calibrator  # whom to believe is kept, and not what this is about
        alone, told, again = alone + runs[0].sweeps, told + runs[1].sweeps, again + runs[2].sweeps
    assert told < alone
    assert again > 0.8 * told, "or it was remembered"


def test_news_change_the_tree_that_grows_and_cost_no_pass(draft: RaggedModel) -> None:
    siblings, source = CrossBranchCache(), model_source(draft)
    drafter, sampling = TreeDrafter([SiblingSource(siblings), source]), Sampling(seed=5, temperature=1.0)
    sequence = demo_prompts(1, tokens=64)[0]
    before = drafter.grow(sequence, 16, 8, sampling)
    surprise = next(token for token in range(VOCAB) if token not in before.tokens)
    for last in range(8):  # contexts that begin differently, and all say the same
        siblings.learn(
            {0: Proposal(context_at([*sequence[:-4], last, *sequence[-3:]], len(sequence)))}, {}, {0: surprise}
        )
    ran = source.session.state.next_id
    after = drafter.grow(sequence, 16, 8, sampling)
    assert surprise in after.tokens
    assert source.session.state.next_id - ran <= 16, "what was expanded is recalled, only what is new runs"
    again = drafter.grow(sequence, 16, 8, sampling)
    assert (again.tokens, again.parents) == (after.tokens, after.parents), "nothing new came since"


def test_a_full_pipe_stays_exact_and_hears_its_dead_branches(
    target: RaggedModel, draft: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In virtual time, where draft and target run themselves; `replay_texts` compares the texts."""
    prompts, samplings = demo_prompts(2, tokens=64), [Sampling(11), Sampling(12)]
    texts, tokenizer = generate_texts(target, prompts, samplings, 20), AutoTokenizer.from_pretrained(TARGET)
    began: list[bool] = []
    is_stale = SiblingSource.is_stale

    def counted(source: SiblingSource) -> bool:
        began.append(is_stale(source))
        return began[-1]

    monkeypatch.setattr(SiblingSource, "is_stale", counted)
    speeds = set()
    for _ in range(2):
        siblings = CrossBranchCache()
        drafter = TreeDrafter([SiblingSource(siblings), model_source(draft)])
        setup = ReplaySetup(partial(VirtualDrafter, drafter, FAR), target)
        speeds.add(replay_texts(texts, FAR, Goodput(128), tokenizer, setup))
        assert siblings.calibrator.right.sum() > 0, "what dead branches told came true"
    assert len(speeds) == 1, "virtual time is the same each time"
    assert sum(began) > 10, "and while a tree grew its search began anew, by what replies to dead branches told"
