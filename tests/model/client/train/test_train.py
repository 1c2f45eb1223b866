"""`client train-draft`, a few steps of it: what it makes can draft; an interrupted training ends as another does."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import client.train.command
import client.train.head
import client.train.samples
from client.drafting.loading import DraftOptions, load_drafter
from client.drafting.sources.redrafter import ReDrafterSource
from client.target import load_target
from client.train.checkpoint import save_checkpoint
from client.train.command import check, train_draft
from client.train.head import HELD_OUT_LINES, Schedule
from client.train.options import TrainDraft
from client.train.samples import SampleAmount
from swarm.demo import DRAFT, TARGET
from swarm.discovery.dht.addresses import OPEN_SWARM
from swarm.errors import ConfigError

FEW = TrainDraft(
    model=str(TARGET),
    out=Path("unset"),
    lines=40,
    tokens=16,
    steps=4,
    batch=4,
    rate=1e-2,
    seed=3,
    threads=1,
    device="cpu",
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.train.samples, "LINES", 20)
    monkeypatch.setattr(client.train.head, "SAVED_STEPS", 1)


def trained(command: TrainDraft) -> str:
    """Run it; what it printed."""
    said = io.StringIO()
    train_draft(command, Console(file=said, width=200))
    return said.getvalue()


def test_an_interrupted_training_ends_as_an_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = (replace(FEW, out=tmp_path / name) for name in ("whole", "cut"))
    said = trained(whole)
    assert "loss" in said
    assert "one chain" in said
    written, write = 0, client.train.samples._write

    def interrupted(*given: object) -> None:
        nonlocal written
        save_checkpoint(*given)  # type: ignore[arg-type]
        written += 1
        if written == 2:
            raise KeyboardInterrupt

    def stopped(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client.train.samples, "_write", stopped)
        with pytest.raises(KeyboardInterrupt):
            trained(cut)
    assert len(load_file(cut.out / "samples.safetensors")["lines"]) == 20, "one batch of two was sampled"
    with monkeypatch.context() as patch:
        patch.setattr("client.train.head.save_checkpoint", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trained(cut)
    assert (cut.out / "training.pt").exists()
    trained(cut)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (cut.out, whole.out))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not (cut.out / "training.pt").exists()
    made = load_drafter(TARGET, load_target(TARGET), DraftOptions((whole.out,), "cpu"))
    assert isinstance(made.drafter.sources[-1], ReDrafterSource), "what was trained can be named with --draft"  # type: ignore[attr-defined]


def test_a_model_goes_on_learning(tmp_path: Path) -> None:
    said = trained(replace(FEW, kind="draft", start=str(DRAFT), out=tmp_path / "draft", rate=1e-4))
    assert "loss" in said
    before, after = (load_file(folder / "model.safetensors") for folder in (DRAFT, tmp_path / "draft"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert len(load_drafter(TARGET, load_target(TARGET), DraftOptions((tmp_path / "draft",), "cpu")).savers) == 0


def test_other_samples_or_another_training_are_not_gone_on_with(tmp_path: Path) -> None:
    command = replace(FEW, kind="dgf", out=tmp_path / "head", samples=tmp_path / "lines.safetensors", steps=1)
    trained(command)
    with pytest.raises(ConfigError, match="from seed 3"):
        trained(replace(command, seed=4))
    (tmp_path / "head" / "training.pt").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="no training that could go on"):
        trained(command)


def test_the_text_may_come_from_a_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is the same text, tests/net/test_train_swarm.py says."""
    asked: list[object] = []

    class Elsewhere:
        at_once = 30

        def make(self, amount: SampleAmount, first: int, count: int) -> torch.Tensor:
            asked.append((first, count))
            return torch.full((count, amount.tokens), 7, dtype=torch.int32)

    @contextmanager
    def opened(model: str, **options: object) -> Iterator[Elsewhere]:
        asked.append((model, options))
        yield Elsewhere()

    monkeypatch.setattr(client.train.command, "open_sampler", opened)
    trained(replace(FEW, kind="dgf", out=tmp_path, steps=1, join=("/ip4/192.0.2.1/tcp/1",), insecure=True))
    assert asked == [
        (FEW.model, {"peers": ("/ip4/192.0.2.1/tcp/1",), "insecure": True, "membership": OPEN_SWARM}),
        (0, 30),
        (30, 10),
    ]
    assert (load_file(tmp_path / "samples.safetensors")["lines"] == 7).all()


WRONG = {
    "lines": 8,
    "tokens": 2,
    "steps": 0,
    "batch": 0,
    "depth": 0,
    "rate": 2.0,
    "seed": -1,
    "start": "x",
    "threads": 0,
}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check(replace(FEW, **{name: WRONG[name]}))  # type: ignore[arg-type]


def test_a_schedule_gives_every_line_once_per_epoch_and_ends_slow() -> None:
    schedule, lines = Schedule(100, 4, 1e-2, seed=1), torch.arange(40)[:, None]
    for epoch in range(2):
        steps = range(10 * epoch, 10 * epoch + 10)
        seen = [line for step in steps for line in schedule.batch(step, lines)[:, 0].tolist()]
        assert sorted(seen) == list(range(40))
    rates = [schedule.rate_at(step) for step in range(100)]
    assert max(rates) == pytest.approx(1e-2)
    assert rates[0] < 0.3 * max(rates)
    assert rates[-1] < 0.05 * max(rates)
    assert HELD_OUT_LINES < 40
