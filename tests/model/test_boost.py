"""Boost-tuning on models that are tables: a draft that cannot tell two contexts apart, and one that completes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from client.boost import KNOWN, BoostTraining, score_together, top_choices
from client.commands import TrainDraft
from client.train import check
from client.train_draft import DraftTraining
from client.train_head import Schedule
from swarm.errors import ConfigError, IncompatibleDraft

VOCAB_SIZE = 8
AFTER = torch.tensor([3, 5, 1, 7, 2, 0, 6, 4])
"""What the target picks after each token."""


class Table(nn.Module):
    """Logits by the last token, of which only the pair that it belongs to is seen when `pairs`."""

    def __init__(self, logits: torch.Tensor, *, pairs: bool) -> None:
        super().__init__()
        self.table, self.pairs = nn.Parameter(logits), pairs
        self.config = SimpleNamespace(vocab_size=logits.shape[1])
        self.device = torch.device("cpu")

    def forward(self, tokens: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[tokens // 2 if self.pairs else tokens])


def target() -> PreTrainedModel:
    logits = torch.zeros(VOCAB_SIZE, VOCAB_SIZE).scatter(1, AFTER[:, None], 6.0)
    return cast("PreTrainedModel", Table(logits, pairs=False).requires_grad_(False))


def blank() -> PreTrainedModel:
    return cast("PreTrainedModel", Table(torch.zeros(VOCAB_SIZE // 2, VOCAB_SIZE), pairs=True))


def lines(seed: int = 0) -> torch.Tensor:
    """The first token of each pair stands a little more often."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(VOCAB_SIZE // 2, (64, 24), generator=generator)
    second = (torch.rand(64, 24, generator=generator) < 0.4).long()
    return (2 * pairs + second).to(torch.int32)


def trained(folder: Path, seed: int, *earlier: PreTrainedModel, known: float = KNOWN) -> PreTrainedModel:
    draft = blank()
    what = draft, target(), lines(), Schedule(60, 8, 0.3, seed), folder / "training.pt"
    training = BoostTraining(*what, earlier=earlier, known=known) if earlier else DraftTraining(*what)
    training.run(lambda _step, _loss: None)
    return draft


def test_a_boosted_pair_has_the_targets_token_on_top_more_often_than_two_trained_alike(tmp_path: Path) -> None:
    first, alike = trained(tmp_path, 1), trained(tmp_path, 2)
    boosted = trained(tmp_path, 2, first)
    every = torch.arange(VOCAB_SIZE)[None]
    assert top_choices([first], every)[:, 0].tolist() == AFTER[[0, 0, 2, 2, 4, 4, 6, 6]].tolist()
    assert top_choices([boosted], every)[:, 0].tolist() == AFTER[[1, 1, 3, 3, 5, 5, 7, 7]].tolist()
    copies = score_together([first, alike], target(), lines(), 1)
    pair = score_together([first, boosted], target(), lines(), 1)
    assert 0.5 < copies.greedy < 0.7
    assert pair.greedy == 1.0
    assert pair.sampled > copies.sampled


def test_a_third_draft_learns_what_both_before_it_miss(tmp_path: Path) -> None:
    """Where nothing is missed but what nobody could know, it learns nothing that they have on top."""
    first = trained(tmp_path, 1)
    second = trained(tmp_path, 2, first)
    third = trained(tmp_path, 3, first, second, known=0.0)
    every = torch.arange(VOCAB_SIZE)[None]
    for ours, theirs in zip(top_choices([third], every), top_choices([first, second], every), strict=True):
        assert int(ours) not in theirs.tolist()


def test_the_loss_counts_missed_tokens_alone() -> None:
    training = BoostTraining(
        blank(), target(), lines(), Schedule(1, 8, 0.1, 0), Path("nowhere"), earlier=[target()], known=0.0
    )
    ours, theirs = training._logs(torch.arange(VOCAB_SIZE)[None])
    ours = ours.detach().requires_grad_(True)
    training._loss(ours, theirs).backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    assert (ours.grad.gather(1, AFTER[:, None]) == 0).all(), "the earlier draft has the target's own top choice"
    assert (ours.grad < 0).sum() == VOCAB_SIZE * (VOCAB_SIZE - 1)


def test_the_target_itself_always_has_its_token_on_top() -> None:
    score = score_together([target()], target(), lines(), 1)
    assert score.greedy == score.sampled == 1.0


def test_what_cannot_be_is_refused_in_one_line() -> None:
    other = cast("PreTrainedModel", Table(torch.zeros(4, 9), pairs=True))
    what = blank(), target(), lines(), Schedule(1, 8, 0.1, 0), Path("nowhere")
    with pytest.raises(ConfigError, match="name the drafts that come before"):
        BoostTraining(*what)
    with pytest.raises(IncompatibleDraft, match="earlier draft 0 has 9 tokens, the target 8"):
        BoostTraining(*what, earlier=[other])
    with pytest.raises(ConfigError, match="--earlier"):
        check(TrainDraft(model="m", out=Path("o"), kind="boost", start="s"))
    with pytest.raises(ConfigError, match="--earlier"):
        check(TrainDraft(model="m", out=Path("o"), kind="draft", start="s", earlier=("e",)))
    with pytest.raises(ConfigError, match="--start"):
        check(TrainDraft(model="m", out=Path("o"), kind="boost", earlier=("e",)))
    check(TrainDraft(model="m", out=Path("o"), kind="boost", start="s", earlier=("e",)))
