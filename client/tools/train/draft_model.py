"""Trains a small model further as a draft: it learns the target's distribution at every place of sampled lines.

Boost-tuning: each next draft learns what the earlier ones miss, so that together they guess more than copies would.

    loss = Σ weight · KL(target_probs ‖ own_probs) / Σ weight
    weight of a place: 1 where no earlier draft has the target's likeliest token on top, FOUND_WEIGHT elsewhere

Drafts that work together need not know of each other: the ranker of a later one sees what the earlier ones propose
(`client.draft.search.ranking`) and learns how far to believe it. SpecInfer leaves out the places that were found
altogether; a small weight there keeps the draft's probabilities sound, which trees with several candidates per draft
need.

Source: SpecInfer (arXiv 2305.09781), section 3: collective boost-tuning of several small models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from client.tools.train.head import HELD_OUT_LINES, HeadScore
from client.tools.train.labels import LabelSource, TargetLogs
from client.tools.train.steps import Schedule, TrainingPlan, run_steps
from swarm.base.errors import ConfigError, IncompatibleDraft


@dataclass(frozen=True, slots=True)
class Compared:
    """Drafts and target at n places of which the target's distribution is known.

    Attributes:
        drafts: log-probabilities [n, vocab_size] of each draft, the one in training first.
    """

    drafts: Sequence[torch.Tensor]
    target: TargetLogs


@dataclass(slots=True)
class DraftTraining:
    """Training of one draft.

    Attributes:
        source: what the target says; the last `HELD_OUT_LINES` of its lines are held out.
        schedule: how long and how fast.
        checkpoint: file of an interrupted training.
    """

    draft: PreTrainedModel
    source: LabelSource
    schedule: Schedule
    checkpoint: Path

    def run(self, report: Callable[[int, float], None]) -> None:
        """Train, from the checkpoint of an interrupted run if there is one.

        Args:
            report: takes the steps done and the loss of the last one.

        Raises:
            IncompatibleDraft: draft and target have different vocabularies.
        """
        ours, theirs = self.draft.config.vocab_size, self.source.vocab_size
        if ours != theirs:
            raise IncompatibleDraft(f"the draft has {ours} tokens and the target {theirs}; start from another draft")
        draft: nn.Module = self.draft.requires_grad_(True).train()
        source = self.source
        plan = TrainingPlan(self.schedule, self.checkpoint, source.entries[:-HELD_OUT_LINES], source.device)
        run_steps(draft, plan, lambda chosen: self._loss(self._compared(chosen)), report)

    @torch.no_grad()
    def score(self) -> HeadScore:
        """Measure on the held-out lines; every guess is the first after the target's own text.

        Of several drafts together, one must be right.
        """
        cast("nn.Module", self.draft).eval()
        found = self._compared(self.source.entries[-HELD_OUT_LINES:])
        shape, device = found.drafts[0].shape, found.drafts[0].device
        generator = torch.Generator(device).manual_seed(self.schedule.seed)
        noise = torch.rand(shape, generator=generator, device=device).clamp(1e-20, 1 - 1e-7)
        noise = -torch.log(-torch.log(noise))
        greedy = is_agreed(found.drafts, found.target.best())
        sampled = is_agreed([logs + noise for logs in found.drafts], found.target.sampled(noise))
        rates = [float(agreed.float().mean()) for agreed in (greedy, sampled)]
        return HeadScore(float(self._loss(found)), (rates[0],), (rates[1],))

    def _loss(self, found: Compared) -> torch.Tensor:
        weights = self._weights(found)
        return (weights * found.target.divergence(found.drafts[0])).sum() / weights.sum().clamp(min=1e-6)

    def _weights(self, found: Compared) -> torch.Tensor:
        """Weight of each place in the loss [n]."""
        return torch.ones_like(found.drafts[0][:, 0])

    def _compared(self, entries: torch.Tensor) -> Compared:
        """Draft and target at the places of some lines."""
        labels = self.source.labels(entries)
        known = labels.known.flatten()
        kept = slice(None) if bool(known.all()) else known  # a mask would copy what may be the whole vocabulary's
        top = None if labels.top is None else labels.top.flatten(0, 1)[kept]
        target = TargetLogs(labels.logs.flatten(0, 1)[kept], top)
        return Compared([logs[kept] for logs in self._draft_logs(labels.tokens)], target)

    def _draft_logs(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Log-probabilities [n · t, vocab_size] of the drafts after every place of lines [n, t]."""
        return [log_probs(self.draft, tokens)]


def is_agreed(drafts: Sequence[torch.Tensor], best: torch.Tensor) -> torch.Tensor:
    """At which places [n] any of the drafts [n, vocab_size] has the target's best token [n] on top."""
    return torch.stack([logs.argmax(dim=1) == best for logs in drafts]).any(dim=0)


def log_probs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """A model's log-probabilities after every place of lines [n, t]: [n · t, vocab_size]."""
    logits: torch.Tensor = cast("Any", model)(tokens, use_cache=False).logits
    return F.log_softmax(logits.float(), dim=2).flatten(0, 1)


FOUND_WEIGHT = 0.2
"""Weight of a place where an earlier draft is right already."""


@dataclass(slots=True)
class BoostTraining(DraftTraining):
    """Trains the draft that comes after some others; its score is that of all of them together.

    Attributes:
        earlier: the others, with the same vocabulary.
    """

    earlier: Sequence[PreTrainedModel] = ()

    def __post_init__(self) -> None:
        if not self.earlier:
            raise ConfigError("boost: name the drafts that come before; the first one is trained as any other")
        tokens = self.source.vocab_size
        for number, draft in enumerate(self.earlier):
            if draft.config.vocab_size != tokens:
                size = draft.config.vocab_size
                raise IncompatibleDraft(f"earlier draft {number} has {size} tokens, the target {tokens}; leave it out")

    def _draft_logs(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        # super() does not work in a dataclass with slots.
        own = DraftTraining._draft_logs(self, tokens)
        with torch.no_grad():
            return [*own, *(log_probs(draft, tokens) for draft in self.earlier)]

    def _weights(self, found: Compared) -> torch.Tensor:
        return torch.where(is_agreed(found.drafts[1:], found.target.best()), FOUND_WEIGHT, 1.0)
