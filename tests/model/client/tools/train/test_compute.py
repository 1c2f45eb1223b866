"""Where a training computes: batches in their order, mixed precision that stays sane, lines picked as on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import client.tools.train.samples
import client.tools.train.steps
from client.base.target import load_target
from client.draft.heads.files import HeadConfig, make_head
from client.tools.train.head import HeadTraining
from client.tools.train.labels import ModelLabels
from client.tools.train.samples import LocalSampler, SampleAmount, load_for_training
from client.tools.train.steps import Schedule, batches, mixed_precision, precision
from swarm.demo import TARGET

CPU = torch.device("cpu")


def test_batches_are_the_schedules_from_any_step_on() -> None:
    schedule, lines = Schedule(12, 4, 1e-2, seed=1), torch.arange(40, dtype=torch.int32)[:, None]
    for first in (0, 5, 11, 12):
        found = list(batches(lambda step: schedule.batch(step, lines), range(first, 12), CPU))
        wanted = [schedule.batch(step, lines) for step in range(first, 12)]
        assert len(found) == len(wanted)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_a_cpu_trains_in_float32() -> None:
    assert isinstance(precision(CPU), nullcontext)


def test_mixed_precision_learns_what_float32_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's bfloat16 stands for a card's: the same steps end at nearly the same loss, with weights in float32."""
    target, model = load_target(TARGET), load_for_training(TARGET, "cpu")
    lines = torch.randint(3, 4000, (28, 16), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    source = ModelLabels(model, lines, with_rows=True)
    weight = next(model.get_input_embeddings().parameters()).detach()
    losses: dict[bool, list[float]] = {False: [], True: []}
    for mixed, said in losses.items():
        monkeypatch.setattr(client.tools.train.steps, "precision", mixed_precision if mixed else precision)
        torch.manual_seed(3)
        config = HeadConfig("dgf", target.hidden_size, target.vocab_size, 1, target.tokenizer_digest, {})
        head = make_head(config)
        for name in ("embedding", "output"):
            setattr(head, name, weight.clone())
        training = HeadTraining(head, source, Schedule(6, 4, 3e-3, 1), tmp_path / f"{mixed}.pt")
        training.run(lambda _, loss, said=said: said.append(loss))  # type: ignore[misc]
        assert all(weight.dtype == torch.float32 for weight in head.parameters())
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
    assert losses[True][-1] < losses[True][0]


def test_lines_are_the_same_where_picks_are_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = LocalSampler(load_for_training(TARGET, "cpu"), load_target(TARGET).tokenizer)
    amount = SampleAmount(4, 6, 3)
    wanted = sampler.make(amount, 0, 4)
    monkeypatch.setattr(client.tools.train.samples, "picks_on", lambda _: True)
    monkeypatch.setattr("swarm.compute.sampling.picks_on", lambda _: True)
    monkeypatch.setattr(client.tools.train.samples, "gumbel_row", None)
    assert torch.equal(sampler.make(amount, 0, 4), wanted)
    assert not torch.equal(sampler.make(replace(amount, seed=4), 0, 4), wanted)
