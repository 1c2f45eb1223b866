"""Drafts that were trained to complete each other speak with one voice; their configs say who with whom."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.acceptance import Size, demo_prompts, generate
from client.draft import NoDrafter, TreeDrafter
from client.drafts import COMPLETES, Wanted, load_drafter
from client.ranking import Ranker
from client.source import Source
from client.source_joint import JointSource
from client.source_model import ModelSource
from client.source_redrafter import ReDrafterSource
from client.target import load_target
from swarm.chance import SoftmaxPrior
from swarm.demo import DRAFT, REDRAFTER, TARGET
from swarm.errors import IncompatibleDraft
from swarm.messages import Sampling
from swarm.ragged import RaggedModel, load_whole

WINDOW = 512
SAMPLINGS = pytest.mark.parametrize("sampling", [Sampling(), Sampling(seed=5, temperature=1.0)], ids=["T=0", "T=1"])


@pytest.fixture(scope="module")
def target() -> RaggedModel:
    torch.set_num_threads(1)
    return load_whole(TARGET, torch.float32)


def draft(noise: float, seed: int = 1) -> RaggedModel:
    """The demo draft, with some of its weights off."""
    model = load_whole(DRAFT, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.model.parameters():
        weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
    return model


def ranker(model: RaggedModel) -> Ranker:
    return Ranker(model.vocab_size, SoftmaxPrior())


@SAMPLINGS
def test_one_voice_is_the_mean_of_what_all_say(sampling: Sampling, target: RaggedModel) -> None:
    """Two of the same say what one does; two that are wrong in different ways are right more often."""
    prompt, vocab_tokens = demo_prompts(1, tokens=48)[0], target.vocab_size
    same, off = draft(0.0), [draft(0.4, seed) for seed in (1, 2)]

    def accepted(source: Source) -> float:
        run = generate(target, TreeDrafter([source]), prompt, sampling, Size(32, 16))
        assert run.tokens == generate(target, NoDrafter(), prompt, sampling, Size(32, 0)).tokens
        return run.emitted / run.sweeps

    one = TreeDrafter([ModelSource(same, vocab_tokens, WINDOW, ranker=ranker(same))])
    two = TreeDrafter([JointSource([same, same], vocab_tokens, WINDOW, ranker(same))])
    for drafter in (one, two):
        drafter.grow(prompt[:-3], 4, 4, sampling)
    ours, theirs = (drafter.grow(prompt, 24, 8, sampling) for drafter in (two, one))
    assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
    assert ours.chances == pytest.approx(theirs.chances, rel=1e-4)
    alone = [accepted(ModelSource(model, vocab_tokens, WINDOW, ranker=ranker(model))) for model in off]
    assert accepted(JointSource(off, vocab_tokens, WINDOW, ranker(same))) > max(alone)


def test_beyond_their_window_all_are_silent(target: RaggedModel) -> None:
    same = draft(0.0)
    drafter = TreeDrafter([JointSource([same, same], target.vocab_size, 8, ranker(same))])
    assert len(drafter.grow(list(range(1, 9)), 4, 4, Sampling())) > 0
    assert len(drafter.grow(list(range(1, 10)), 4, 4, Sampling())) == 0
    assert len(drafter.grow(list(range(1, 9)), 4, 4, Sampling())) > 0


def boosted(folder: Path, completes: object) -> Path:
    """A copy of the demo draft that says how many others it was trained to complete."""
    shutil.copytree(DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, COMPLETES: completes}))
    return folder


def kinds(*names: Path) -> list[type[Source]]:
    drafter = load_drafter(TARGET, load_target(TARGET), Wanted(names, "cpu", lookup=False)).drafter
    assert isinstance(drafter, TreeDrafter)
    return [type(source) for source in drafter.sources]


def test_a_boosted_draft_works_with_those_named_before_it(tmp_path: Path) -> None:
    second, third = boosted(tmp_path / "second", 1), boosted(tmp_path / "third", 2)
    assert kinds(DRAFT, second) == [JointSource]
    assert kinds(REDRAFTER, DRAFT, second, third) == [ReDrafterSource, JointSource]
    assert kinds(DRAFT, DRAFT, second) == [ModelSource, JointSource]
    assert kinds(DRAFT, DRAFT, third) == [JointSource], "two that were trained by themselves may be completed too"
    learned = load_drafter(TARGET, load_target(TARGET), Wanted((DRAFT, second), "cpu", calibrations=tmp_path / "kept"))
    learned.keep()
    assert len(list((tmp_path / "kept").iterdir())) == 1, "one voice, one calibration"


@pytest.mark.parametrize("before", [(), (DRAFT,), (DRAFT, REDRAFTER)])
def test_without_those_it_is_refused(before: tuple[Path, ...], tmp_path: Path) -> None:
    third = boosted(tmp_path / "third", 2)
    with pytest.raises(IncompatibleDraft, match="third: was trained to complete 2 other drafts; name these just befo"):
        kinds(*before, third)
    with pytest.raises(IncompatibleDraft, match="canopy_completes 'x'"):
        kinds(DRAFT, boosted(tmp_path / "odd", "x"))
