"""Training text through real nodes: the very lines that a local copy makes, also where a text ends, and resumable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from anyio.from_thread import start_blocking_portal

import client.train.samples
import client.train.swarm_samples
from client.target import load_target
from client.train.samples import LocalSampler, SampleAmount, load_for_training, sampled_lines
from client.train.swarm_samples import SwarmSampler
from swarm.demo import TARGET
from swarm.errors import ContextFull
from tests.in_process_swarm import in_process_swarm

pytestmark = pytest.mark.timeout(60)

FEW = SampleAmount(lines=6, tokens=20, seed=5)


@pytest.fixture(scope="module")
def sampler() -> Iterator[SwarmSampler]:
    with pytest.MonkeyPatch.context() as patch, start_blocking_portal("asyncio") as portal:
        patch.setattr(client.train.swarm_samples, "LINES", 4)
        with (
            portal.wrap_async_context_manager(in_process_swarm(TARGET, ["0-6", "6-12"])) as here,
            portal.wrap_async_context_manager(here.client(lookup=False)) as swarm,
        ):
            sampler = SwarmSampler(swarm, portal)
            sampler.make(FEW, 0, 4)  # starts every thread that lives as long as they do
            yield sampler


@pytest.fixture(scope="module")
def local() -> LocalSampler:
    return LocalSampler(load_for_training(TARGET, "cpu"), load_target(TARGET).tokenizer)


def test_a_swarm_makes_the_lines_of_a_local_copy(sampler: SwarmSampler, local: LocalSampler, tmp_path: Path) -> None:
    """Interrupted after the first batch, too: lines know nothing of their batches."""
    told: list[int] = []
    first = sampled_lines(sampler, replace(FEW, lines=4), tmp_path / "lines", told.append)
    made = sampled_lines(sampler, FEW, tmp_path / "lines", told.append)
    assert told == [0, 4, 4, 6]
    assert torch.equal(made[:4], first)
    assert torch.equal(made, sampled_lines(local, FEW, tmp_path / "here", told.append))
    assert len({tuple(line) for line in made.tolist()}) == FEW.lines


def test_a_line_goes_on_behind_the_end_of_a_text(
    sampler: SwarmSampler, local: LocalSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = local.make(FEW, 0, 2)
    ends = frozenset({int(expected[0, 6]), int(expected[1, 11])})
    factory = sampler.swarm._factory
    monkeypatch.setattr(sampler.swarm, "_factory", replace(factory, target=replace(factory.target, eos_ids=ends)))
    assert torch.equal(sampler.make(FEW, 0, 2), expected)


def test_lines_that_the_model_cannot_hold_are_refused_in_one_line(sampler: SwarmSampler) -> None:
    with pytest.raises(ContextFull, match="exceed the model's context"):
        sampler.make(replace(FEW, tokens=1 << 20), 0, 2)
