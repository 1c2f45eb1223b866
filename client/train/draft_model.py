"""Trains a small model further as a draft: it learns the target's distribution at every place of sampled lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from client.train.checkpoint import load_checkpoint, save_checkpoint
from client.train.compute import batches, precision
from client.train.head import HELD_OUT_LINES, SAVED_STEPS, HeadScore, Schedule
from swarm.errors import IncompatibleDraft


@dataclass(slots=True)
class DraftTraining:
    """Training of one draft.

    Attributes:
        draft: the model that learns.
        target: the model that it learns from.
        lines: [lines, tokens], sampled from the target; the last `HELD_OUT_LINES` are held out.
        schedule: how long and how fast.
        checkpoint: file of an interrupted training.
    """

    draft: PreTrainedModel
    target: PreTrainedModel
    lines: torch.Tensor
    schedule: Schedule
    checkpoint: Path

    def run(self, report: Callable[[int, float], None]) -> None:
        """Train, from the checkpoint of an interrupted run if there is one.

        Args:
            report: takes the steps done and the loss of the last one.

        Raises:
            IncompatibleDraft: draft and target have different vocabularies.
        """
        ours, theirs = self.draft.config.vocab_size, self.target.config.vocab_size
        if ours != theirs:
            raise IncompatibleDraft(f"the draft has {ours} tokens and the target {theirs}; start from another draft")
        draft = self.draft.requires_grad_(True).train()
        optimizer = torch.optim.AdamW(draft.parameters(), lr=self.schedule.rate, weight_decay=0.01, betas=(0.9, 0.98))
        first = load_checkpoint(self.checkpoint, self.schedule, draft, optimizer)
        lines, device = self.lines[:-HELD_OUT_LINES], self.target.device
        steps = range(first, self.schedule.steps)
        sent = batches(lambda step: self.schedule.batch(step, lines), steps, device)
        for step, tokens in zip(steps, sent, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = self.schedule.rate_at(step)
            with precision(device):
                loss = self._loss(*self._log_probs(tokens))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            report(step + 1, float(loss.detach()))
            if (step + 1) % SAVED_STEPS == 0:
                save_checkpoint(self.checkpoint, self.schedule, step + 1, draft, optimizer)
        self.checkpoint.unlink(missing_ok=True)

    @torch.no_grad()
    def score(self) -> HeadScore:
        """Measure on the held-out lines; every guess is the first after the target's own text.

        Of several drafts together, one must be right.
        """
        cast("nn.Module", self.draft).eval()
        drafts, target_logs = self._log_probs(self.lines[-HELD_OUT_LINES:].long())
        generator = torch.Generator(target_logs.device).manual_seed(self.schedule.seed)
        noise = torch.rand(target_logs.shape, generator=generator, device=target_logs.device).clamp(1e-20, 1 - 1e-7)
        noise = -torch.log(-torch.log(noise))
        greedy = is_agreed(drafts, target_logs)
        sampled = is_agreed([logs + noise for logs in drafts], target_logs + noise)
        rates = [float(found.float().mean()) for found in (greedy, sampled)]
        return HeadScore(float(self._loss(drafts, target_logs)), (rates[0],), (rates[1],))

    def _loss(self, drafts: Sequence[torch.Tensor], target_logs: torch.Tensor) -> torch.Tensor:
        weights = self._weights(drafts, target_logs)
        divergence = F.kl_div(drafts[0], target_logs, log_target=True, reduction="none").sum(dim=1)
        return (weights * divergence).sum() / weights.sum()

    def _weights(self, _drafts: Sequence[torch.Tensor], target_logs: torch.Tensor) -> torch.Tensor:
        """Weight of each place in the loss [n]."""
        return torch.ones_like(target_logs[:, 0])

    def _log_probs(self, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Log-probabilities [n, vocab_size] of the drafts, the one in training first, and of the target."""
        tokens = tokens.to(self.target.device)
        with torch.no_grad():
            target_logs = log_probs(self.target, tokens)
        return [log_probs(self.draft, tokens)], target_logs


def is_agreed(drafts: Sequence[torch.Tensor], target_logs: torch.Tensor) -> torch.Tensor:
    """At which places [n] any of the drafts has the same best token as the target; each [n, vocab_size]."""
    best = target_logs.argmax(dim=1)
    return torch.stack([logs.argmax(dim=1) == best for logs in drafts]).any(dim=0)


def log_probs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """A model's log-probabilities after every place of lines [n, t]: [n · t, vocab_size]."""
    logits: torch.Tensor = cast("Any", model)(tokens, use_cache=False).logits
    return F.log_softmax(logits.float(), dim=2).flatten(0, 1)
