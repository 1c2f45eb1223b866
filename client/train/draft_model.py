"""Goes on training a small model as a draft: it learns the target's distribution at every place of sampled lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from client.train.checkpoint import keep, resume
from client.train.head import HELD_OUT_LINES, SAVED_STEPS, HeadScore, Schedule
from swarm.errors import IncompatibleDraft


@dataclass(slots=True)
class DraftTraining:
    """One draft, its target, and sampled lines [lines, tokens], the last of which are held out."""

    draft: PreTrainedModel
    target: PreTrainedModel
    lines: torch.Tensor
    schedule: Schedule
    kept: Path

    def run(self, told: Callable[[int, float], None]) -> None:
        """Train, from where an earlier run of the same schedule was interrupted; told as in `HeadTraining`.

        Raises:
            IncompatibleDraft: draft and target have different vocabularies.
        """
        ours, theirs = self.draft.config.vocab_size, self.target.config.vocab_size
        if ours != theirs:
            raise IncompatibleDraft(f"the draft has {ours} tokens and the target {theirs}; start from another draft")
        draft = self.draft.requires_grad_(True).train()
        optimizer = torch.optim.AdamW(draft.parameters(), lr=self.schedule.rate, weight_decay=0.01, betas=(0.9, 0.98))
        for step in range(resume(self.kept, self.schedule, draft, optimizer), self.schedule.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.schedule.rate_at(step)
            loss = self._loss(*self._logs(self.schedule.batch(step, self.lines[:-HELD_OUT_LINES])))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            told(step + 1, float(loss.detach()))
            if (step + 1) % SAVED_STEPS == 0:
                keep(self.kept, self.schedule, step + 1, draft, optimizer)
        self.kept.unlink(missing_ok=True)

    @torch.no_grad()
    def score(self) -> HeadScore:
        """On the lines that were held out; every guess is the first after the target's own text.

        Of several drafts together one must be right.
        """
        cast("nn.Module", self.draft).eval()
        drafts, theirs = self._logs(self.lines[-HELD_OUT_LINES:].long())
        generator = torch.Generator(theirs.device).manual_seed(self.schedule.seed)
        noise = torch.rand(theirs.shape, generator=generator, device=theirs.device).clamp(1e-20, 1 - 1e-7)
        noise = -torch.log(-torch.log(noise))
        greedy, sampled = is_found(drafts, theirs), is_found([logs + noise for logs in drafts], theirs + noise)
        rates = [float(found.float().mean()) for found in (greedy, sampled)]
        return HeadScore(float(self._loss(drafts, theirs)), (rates[0],), (rates[1],))

    def _loss(self, drafts: Sequence[torch.Tensor], theirs: torch.Tensor) -> torch.Tensor:
        weights = self._weights(drafts, theirs)
        divergence = F.kl_div(drafts[0], theirs, log_target=True, reduction="none").sum(dim=1)
        return (weights * divergence).sum() / weights.sum()

    def _weights(self, _drafts: Sequence[torch.Tensor], theirs: torch.Tensor) -> torch.Tensor:
        """How much each place counts [n]."""
        return torch.ones_like(theirs[:, 0])

    def _logs(self, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Log-probabilities [n, vocab_size] of the drafts, the one in training first, and of the target."""
        tokens = tokens.to(self.target.device)
        with torch.no_grad():
            theirs = log_probs(self.target, tokens)
        return [log_probs(self.draft, tokens)], theirs


def is_found(drafts: Sequence[torch.Tensor], theirs: torch.Tensor) -> torch.Tensor:
    """At which places [n] any of the drafts has the same best token as the target; each [n, vocab_size]."""
    best = theirs.argmax(dim=1)
    return torch.stack([logs.argmax(dim=1) == best for logs in drafts]).any(dim=0)


def log_probs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """What a model says after every place of lines [n, t]: [n · t, vocab_size]."""
    logits: torch.Tensor = cast("Any", model)(tokens, use_cache=False).logits
    return F.log_softmax(logits.float(), dim=2).flatten(0, 1)
