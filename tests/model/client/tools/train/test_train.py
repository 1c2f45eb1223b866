"""`client train-draft`, a few steps of it: what it makes can draft; an interrupted training ends as another does."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import client.tools.train.command
import client.tools.train.samples
import client.tools.train.steps
from client.base.options import DraftOptions
from client.base.target import load_target
from client.draft.heads.files import HeadKind, load_head, read_head_config
from client.draft.loading import load_drafter
from client.draft.sources.recurrent import ReDrafterSource
from client.tools.train.command import check, train_draft
from client.tools.train.head import HELD_OUT_LINES
from client.tools.train.labels import LabelFolder, TargetLogs
from client.tools.train.options import TrainDraft
from client.tools.train.samples import LabelledLines, SampleAmount, load_for_training
from client.tools.train.steps import Schedule, save_checkpoint
from swarm.base.errors import ConfigError, NotEnoughSpace
from swarm.demo import DRAFT, TARGET
from swarm.directory.dht.addresses import OPEN_SWARM

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
    monkeypatch.setattr(client.tools.train.samples, "LINES", 20)
    monkeypatch.setattr(client.tools.train.steps, "SAVED_STEPS", 1)


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
    written, write = 0, client.tools.train.samples._write

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
        patch.setattr(client.tools.train.samples, "_write", stopped)
        with pytest.raises(KeyboardInterrupt):
            trained(cut)
    assert len(load_file(cut.out / "samples.safetensors")["lines"]) == 20, "one batch of two was sampled"
    with monkeypatch.context() as patch:
        patch.setattr("client.tools.train.steps.save_checkpoint", interrupted)
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


class Elsewhere:
    """A swarm that says 7 of everything, and leaves a place out in each line."""

    at_once, top, width = 30, 20, 192

    def __init__(self) -> None:
        self.asked: list[object] = []

    def make(self, amount: SampleAmount, first: int, count: int) -> LabelledLines:
        self.asked.append((first, count))
        made = LabelledLines.empty(count, amount.tokens, self.top, self.width)
        made.tokens.fill_(7)
        made.known[:, 1:-1] = True
        made.known[:, 5] = False
        made.top.copy_(torch.arange(7, 27))
        made.logs.fill_(-0.05).sub_(torch.arange(20) * 3.0)
        return made


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """The swarm of a command with --join; weights are nowhere."""
    there = Elsewhere()

    @contextmanager
    def opened(model: str, **options: object) -> Iterator[Elsewhere]:
        there.asked.append((model, options))
        yield there

    monkeypatch.setattr(client.tools.train.command, "open_sampler", opened)
    monkeypatch.setattr(client.tools.train.command, "load_for_training", None)
    return there


JOINED = replace(FEW, join=("/ip4/192.0.2.1/tcp/1",), insecure=True, steps=8, own_matrices=True)


@pytest.mark.parametrize("kind", ["dgf", "redrafter"])
def test_text_and_labels_may_come_from_a_swarm(
    kind: HeadKind, tmp_path: Path, elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    """That they are those of a local copy, tests/net/client/tools/train/test_swarm_samples.py says."""
    said = trained(replace(JOINED, kind=kind, out=tmp_path))
    options = {"peers": JOINED.join, "insecure": True, "membership": OPEN_SWARM, "with_rows": True}
    assert elsewhere.asked == [(FEW.model, options), (0, 30), (30, 10)]
    assert "40 of 640 places got no label" in caplog.text
    assert "text and labels come from the swarm: 0 MB in" in said
    assert "with matrices of its own" in said
    made = load_head(tmp_path, read_head_config(tmp_path) or pytest.fail("no head"), tmp_path / "nowhere")
    assert torch.equal(made.matrix("embedding"), made.matrix("output"))
    said = trained(replace(JOINED, kind=kind, out=tmp_path, lines=36, own_matrices=False))
    assert "borrows model.embed_tokens.weight" in said
    assert len(elsewhere.asked) == 3, "where all labels are there, nobody is asked"
    trained(replace(JOINED, kind=kind, out=tmp_path, lines=44))
    assert elsewhere.asked[4:] == [(40, 4)], "and else for what is missing"


def test_a_model_learns_from_a_swarm_without_hidden_rows(tmp_path: Path, elsewhere: Elsewhere) -> None:
    elsewhere.width = 0
    frozen = load_for_training
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.tools.train.command, "load_for_training", lambda name, device: frozen(name, device))
        command = replace(JOINED, kind="draft", start=str(DRAFT), own_matrices=False, rate=1e-3, out=tmp_path)
        said = trained(command)
    options = {"peers": JOINED.join, "insecure": True, "membership": OPEN_SWARM, "with_rows": False}
    assert elsewhere.asked[0] == (FEW.model, options)
    assert "accepts 1.00 in turn" in said, "what always comes is soon known"


def test_labels_of_another_text_are_not_used(tmp_path: Path, elsewhere: Elsewhere) -> None:
    command = replace(JOINED, kind="dgf", out=tmp_path, steps=1)
    trained(command)
    with pytest.raises(ConfigError, match="of another text or model"):
        trained(replace(command, seed=4))
    (tmp_path / "labels" / "00000030.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"00000030.*is made again"):
        trained(command)
    (tmp_path / "labels" / "00000030.safetensors").unlink()
    trained(command)
    shutil.rmtree(tmp_path / "labels")
    elsewhere.width = 0
    collect(elsewhere, tmp_path / "labels")
    elsewhere.width = 192
    with pytest.raises(ConfigError, match="holds no hidden rows"):
        trained(command)


def collect(sampler: Elsewhere, folder: Path) -> None:
    LabelFolder(folder, SampleAmount(40, 16, 3), load_target(TARGET), sampler.width).collect(sampler, lambda _: None)


def test_a_swarm_without_labels_or_a_full_disk_is_said(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = elsewhere.make

    def silent(*given: Any) -> LabelledLines:  # noqa: ANN401
        made = make(*given)
        made.known[:, 3:] = False
        return made

    monkeypatch.setattr(elsewhere, "make", silent)
    with pytest.raises(ConfigError, match=r"hidden rows and distributions of 60 of 480 tokens"):
        collect(elsewhere, tmp_path / "labels")
    (tmp_path / "lines").touch()
    with pytest.raises(ConfigError, match="names a folder of text and labels"):
        collect(elsewhere, tmp_path / "lines")
    monkeypatch.setattr("client.tools.train.labels.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(NotEnoughSpace, match="fewer --lines"):
        collect(elsewhere, tmp_path / "labels")
    assert not (tmp_path / "labels").exists()


def test_the_rest_of_the_vocabulary_counts_as_one_token() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.randn(3, 9).log_softmax(1) for _ in range(2))
    whole, every = TargetLogs(theirs), TargetLogs(*theirs.sort(dim=1, descending=True))
    assert torch.allclose(every.divergence(ours), whole.divergence(ours), atol=1e-6)
    part = TargetLogs(*(values[:, :4] for values in theirs.sort(dim=1, descending=True)))
    assert (part.divergence(ours) < whole.divergence(ours)).all(), "a coarser view never sees more"
    assert part.divergence(theirs).abs().max() < 1e-6
    assert torch.equal(part.best(), whole.best())
    assert torch.equal(part.sampled(torch.zeros(3, 9)), whole.best())


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
