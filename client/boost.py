"""Boost-tuning: each next draft learns what the earlier ones miss, so that together they guess more than copies would.

A place of a sampled line counts as missed when the target's token is not the top choice of any earlier draft. The next
draft is trained on missed places; here that is done in expectation over the target's whole distribution:

    loss = − Σ weight[x] · target_probs[x] · log draft_probs[x]      weight: 1; KNOWN where an earlier one has x on top

Source: SpecInfer (arXiv 2305.09781), section 3: collective boost-tuning of several small models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from client.train_draft import DraftTraining
from client.train_head import HELD_OUT_LINES
from swarm.errors import ConfigError, IncompatibleDraft

KNOWN = 0.2
"""What a token that an earlier draft has on top weighs beside one that none has: whatever a draft without any of these
proposes is wrong where the earlier ones are right."""


@dataclass(slots=True)
class BoostTraining(DraftTraining):
    """Trains the draft that comes after some others. earlier: those, with the same vocabulary."""

    earlier: Sequence[PreTrainedModel] = ()
    known: float = KNOWN
    _tops: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        if not self.earlier:
            raise ConfigError("boost: name the drafts that come before; the first one is trained as any other")
        tokens = self.target.config.vocab_size
        for number, draft in enumerate(self.earlier):
            if draft.config.vocab_size != tokens:
                theirs = draft.config.vocab_size
                raise IncompatibleDraft(
                    f"earlier draft {number} has {theirs} tokens, the target {tokens}; leave it out"
                )

    def _logs(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._tops = top_choices(self.earlier, tokens.to(self.target.device))
        return DraftTraining._logs(self, tokens)  # super() does not know a class with slots

    def _loss(self, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        known = theirs.exp().gather(1, self._tops)
        missed = theirs.exp().scatter(1, self._tops, self.known * known)
        return -(missed * ours).sum() / missed.sum().clamp(min=1e-6)


@dataclass(frozen=True, slots=True)
class TogetherScore:
    """How often the target's token is among the top choices of several drafts, on lines that were held out.

    greedy: its best token. sampled: its draw under noise that all know.
    """

    greedy: float
    sampled: float

    def __str__(self) -> str:
        return f"together they have it on top {self.greedy:.3f} greedy, {self.sampled:.3f} sampled"


@torch.no_grad()
def score_together(
    drafts: Sequence[PreTrainedModel], target: PreTrainedModel, lines: torch.Tensor, seed: int
) -> TogetherScore:
    """Of the held-out lines, the part of their places where one of the drafts is right."""
    tokens = lines[-HELD_OUT_LINES:].long().to(target.device)
    theirs = _logits(target, tokens)
    generator = torch.Generator(target.device).manual_seed(seed)
    noise = torch.rand(theirs.shape, generator=generator, device=target.device).clamp(1e-20, 1 - 1e-7)
    noise = -torch.log(-torch.log(noise))
    rates = []
    for shared in (torch.zeros_like(noise), noise):
        tops = torch.stack([(_logits(draft, tokens) + shared).argmax(dim=1) for draft in drafts], dim=1)
        rates.append(float((tops == (theirs + shared).argmax(dim=1, keepdim=True)).any(dim=1).float().mean()))
    return TogetherScore(*rates)


@torch.no_grad()
def top_choices(drafts: Sequence[PreTrainedModel], tokens: torch.Tensor) -> torch.Tensor:
    """What each draft would guess after every place of lines [n, t]: int64 [n · t, drafts]."""
    return torch.stack([_logits(draft, tokens).argmax(dim=1) for draft in drafts], dim=1)


def _logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = cast("Any", model)(tokens, use_cache=False).logits
    return logits.float().flatten(0, 1)
