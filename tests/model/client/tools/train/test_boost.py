"""Boost-tuning on models that are small matrices: drafts too small to know the target, which complete each other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from client.tools.train.command import check
from client.tools.train.draft_model import FOUND_WEIGHT, BoostTraining, DraftTraining, is_agreed, log_probs
from client.tools.train.labels import ModelLabels
from client.tools.train.options import TrainDraft
from client.tools.train.steps import Schedule
from swarm.base.errors import ConfigError, IncompatibleDraft

VOCAB_SIZE = 8
AFTER = torch.tensor([3, 5, 1, 7, 2, 0, 6, 4])
"""What the target picks after each token."""


class Product(nn.Module):
    """Logits by the last token: a matrix of low rank."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)
        self.config = SimpleNamespace(vocab_size=right.shape[1])
        self.device = torch.device("cpu")

    def forward(self, tokens: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.left[tokens] @ self.right)


def target() -> PreTrainedModel:
    logits = torch.zeros(VOCAB_SIZE, VOCAB_SIZE).scatter(1, AFTER[:, None], 6.0)
    return cast("PreTrainedModel", Product(logits, torch.eye(VOCAB_SIZE)).requires_grad_(False))


def blank(tokens: int = VOCAB_SIZE) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for shape in ((tokens, 1), (1, tokens)))
    return cast("PreTrainedModel", Product(left, right))


def every() -> torch.Tensor:
    """Each token once."""
    return torch.arange(VOCAB_SIZE)[None]


def found(*drafts: PreTrainedModel) -> int:
    """After how many tokens one of them has the target's pick on top."""
    with torch.no_grad():
        return int(
            is_agreed([log_probs(draft, every()) for draft in drafts], log_probs(target(), every()).argmax(1)).sum()
        )


def lines() -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (64, 24), generator=torch.Generator().manual_seed(0)).to(torch.int32)


def source() -> ModelLabels:
    return ModelLabels(target(), lines(), with_rows=False)


def trained(folder: Path, seed: int, *earlier: PreTrainedModel) -> PreTrainedModel:
    draft = blank()
    what = draft, source(), Schedule(120, 8, 0.1, seed), folder / "training.pt"
    training = BoostTraining(*what, earlier=earlier) if earlier else DraftTraining(*what)
    training.run(lambda _step, _loss: None)
    return draft


def test_each_boosted_draft_adds_what_a_copy_would_not(tmp_path: Path) -> None:
    first, alike = trained(tmp_path, 1), trained(tmp_path, 2)
    second = trained(tmp_path, 2, first)
    third = trained(tmp_path, 3, first, second)
    alone, copies, pair, all_three = (
        found(first),
        found(first, alike),
        found(first, second),
        found(first, second, third),
    )
    assert alone < VOCAB_SIZE, "too small to know it all"
    assert alone <= copies < pair < all_three


def test_what_was_missed_counts_in_full_and_the_score_is_of_all_together(tmp_path: Path) -> None:
    first = trained(tmp_path, 1)
    schedule = Schedule(1, 8, 0.1, 0)
    training = BoostTraining(blank(), source(), schedule, tmp_path / "training.pt", earlier=[first])
    with torch.no_grad():
        found_there = training._compared(every())
    drafts, theirs = found_there.drafts, found_there.target.logs
    assert all(map(torch.equal, drafts, [log_probs(draft, every()) for draft in (blank(), first)]))
    assert torch.equal(theirs, log_probs(target(), every()))
    weights = training._weights(found_there).tolist()
    is_right = (drafts[1].argmax(dim=1) == theirs.argmax(dim=1)).tolist()
    assert weights == pytest.approx([FOUND_WEIGHT if right else 1.0 for right in is_right])
    assert 0 < sum(is_right) < VOCAB_SIZE
    divergence = F.kl_div(drafts[0], theirs, log_target=True, reduction="none").sum(dim=1).tolist()
    weighed = sum(weight * one for weight, one in zip(weights, divergence, strict=True)) / sum(weights)
    assert float(training._loss(found_there).detach()) == pytest.approx(weighed)
    alone = DraftTraining(blank(), source(), schedule, tmp_path / "training.pt")
    assert training.score().greedy[0] > alone.score().greedy[0]


def test_what_cannot_be_is_refused_in_one_line() -> None:
    other = blank(9)
    what = blank(), source(), Schedule(1, 8, 0.1, 0), Path("nowhere")
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
