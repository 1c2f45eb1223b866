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

from client.boost import BoostTraining
from client.commands import TrainDraft
from client.train import check
from client.train_draft import DraftTraining, log_probs
from client.train_head import Schedule
from swarm.errors import ConfigError, IncompatibleDraft

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
    left, right = (torch.randn(shape, generator=generator) for shape in ((tokens, 2), (2, tokens)))
    return cast("PreTrainedModel", Product(left, right))


def every() -> torch.Tensor:
    """Each token once."""
    return torch.arange(VOCAB_SIZE)[None]


def missed(*drafts: PreTrainedModel) -> float:
    """How far drafts that speak with one voice are from the target: nats per token."""
    with torch.no_grad():
        joint = F.log_softmax(torch.stack([log_probs(draft, every()) for draft in drafts]).mean(dim=0), dim=1)
        return float(F.kl_div(joint, log_probs(target(), every()), log_target=True, reduction="batchmean"))


def lines() -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (64, 24), generator=torch.Generator().manual_seed(0)).to(torch.int32)


def trained(folder: Path, seed: int, *earlier: PreTrainedModel) -> PreTrainedModel:
    draft = blank()
    what = draft, target(), lines(), Schedule(120, 8, 0.1, seed), folder / "training.pt"
    training = BoostTraining(*what, earlier=earlier) if earlier else DraftTraining(*what)
    training.run(lambda _step, _loss: None)
    return draft


def test_each_boosted_draft_adds_what_a_copy_would_not(tmp_path: Path) -> None:
    first, alike = trained(tmp_path, 1), trained(tmp_path, 2)
    second = trained(tmp_path, 2, first)
    third = trained(tmp_path, 3, first, second)
    alone, copies, pair, all_three = (
        missed(first),
        missed(first, alike),
        missed(first, second),
        missed(first, second, third),
    )
    assert copies > 0.9 * alone, "copies know the same"
    assert pair < 0.6 * copies
    assert all_three < 0.6 * pair


def test_the_score_is_of_all_together(tmp_path: Path) -> None:
    first = trained(tmp_path, 1)
    training = BoostTraining(
        blank(), target(), lines(), Schedule(1, 8, 0.1, 0), tmp_path / "training.pt", earlier=[first]
    )
    joint, theirs = training._logs(every())
    both = torch.stack([log_probs(blank(), every()), log_probs(first, every())])
    assert torch.allclose(joint, F.log_softmax(both.mean(dim=0), dim=1))
    assert torch.equal(theirs, log_probs(target(), every()))
    assert training.score().loss == pytest.approx(missed(blank(), first), rel=0.2)


def test_what_cannot_be_is_refused_in_one_line() -> None:
    other = blank(9)
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
