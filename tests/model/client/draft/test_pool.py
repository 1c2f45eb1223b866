"""Several generations of one client at a time: each drafts with what is remembered of its own text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from benchmarks.simulation.acceptance import demo_prompts
from client.base.options import DraftOptions, Options
from client.base.target import Target, load_target
from client.decode.goodput import Goodput
from client.decode.policy import FixedPolicy
from client.draft.drafter import MAX_DRAFTERS, Drafters, NoDrafter, TreeDrafter
from client.draft.loading import load_drafter
from client.draft.sources.model import ModelSource
from client.library.jobs import GenerationFactory
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TARGET)


@pytest.fixture
def drafters(target: Target) -> Drafters:
    made = load_drafter(TARGET, target, DraftOptions((DRAFT,), "cpu"))
    return Drafters(made.drafter, made.make_another)


def test_texts_that_are_told_at_once_are_read_once(drafters: Drafters) -> None:
    """With one drafter for both every tree began with reading the other text."""
    texts = [list(prompt) for prompt in demo_prompts(2, tokens=64)]
    with drafters.lend() as one, drafters.lend() as other:
        has_read = []
        for _ in range(3):
            for drafter, text in zip((one, other), texts, strict=True):
                tree = drafter.grow(text, 8, 4, Sampling())
                has_read.append(tree.has_read)
                text.append(tree.tokens[0])
    assert has_read == [True, True, False, False, False, False]


def test_drafters_share_models_and_whom_to_believe(drafters: Drafters) -> None:
    with drafters.lend() as one, drafters.lend() as other:
        first, second = (_model(drafter) for drafter in (one, other))
        assert first is not second
        assert first._model is second._model
        assert first.acceptance_model is second.acceptance_model
        assert first.session.kv_cache is not second.session.kv_cache


def test_one_text_after_another_has_the_drafter_that_knows_most(drafters: Drafters) -> None:
    with drafters.lend() as first, drafters.lend() as second:
        pass
    with drafters.lend() as again:
        assert again is first
        with drafters.lend() as other:
            assert other is second
    assert drafters.all == [first, second]


def test_where_none_is_left_a_text_is_told_without_trees(drafters: Drafters, target: Target) -> None:
    with ThreadPoolExecutor(1) as drafting, ExitStack() as running:
        jobs = [
            GenerationFactory(target, drafters, drafting, None).make("Once", Options()) for _ in range(MAX_DRAFTERS + 1)
        ]
        for job in jobs:
            running.enter_context(job.with_drafter())
        assert len({id(job.drafter) for job in jobs}) == MAX_DRAFTERS + 1
        assert all(isinstance(job.policy, Goodput) for job in jobs[:-1])
        assert isinstance(jobs[-1].drafter, NoDrafter)
        assert jobs[-1].policy == FixedPolicy(0)
    with drafters.lend() as free:
        assert free is drafters.first


def _model(drafter: object) -> ModelSource:
    assert isinstance(drafter, TreeDrafter)
    return next(source for source in drafter.sources if isinstance(source, ModelSource))
