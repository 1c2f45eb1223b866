"""Distils a head from the target that it guesses for. Seeded and resumable: a step is a function of seed and number.

At every place of a sampled line the head gets the target's hidden row and then the line's own tokens, a few in a row;
it learns the target's whole distribution at each of them (KL divergence, later steps weigh less).

Source: ReDrafter (arXiv 2403.09919), section 3.4, and Dovetail (arXiv 2412.18934): knowledge distillation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from client.drafting.heads.modules import Head
from client.train.checkpoint import keep, resume
from swarm.inference.ragged_batch import find_layers

UNROLL = 5
"""Tokens that a head guesses one after the other from one hidden row."""
LATER = 0.8
"""Weight of a guess against that of the one before."""
WARM_UP = 0.05
LAST_RATE = 0.03
"""Of the learning rate at the end."""
SAVED_STEPS = 50
HELD_OUT_LINES = 16


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast: steps of so many lines each."""

    steps: int
    lines: int
    rate: float
    seed: int

    def rate_at(self, step: int) -> float:
        """Warm-up, then a cosine."""
        warm = max(1, round(WARM_UP * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.rate * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)

    def batch(self, step: int, lines: torch.Tensor) -> torch.Tensor:
        """The lines of a step: every epoch in an order of its own."""
        per_epoch = max(1, len(lines) // self.lines)
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed((self.seed << 16) + epoch))
        return lines[order[place * self.lines : (place + 1) * self.lines]].long()


@dataclass(frozen=True, slots=True)
class HeadScore:
    """How good a head is on lines that it was not trained on.

    loss: mean KL divergence in nats. greedy, sampled: by how many guesses in a row, the chance that the next one is the
    target's own: its best, and its draw under noise that both know.
    """

    loss: float
    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    def __str__(self) -> str:
        greedy, sampled = (_length(rates) for rates in (self.greedy, self.sampled))
        firsts = " ".join(f"{rate:.2f}" for rate in self.greedy)
        return f"loss {self.loss:.3f}, accepts {firsts} in turn; one chain {greedy:.2f} greedy, {sampled:.2f} sampled"


@dataclass(slots=True)
class TargetLabels:
    """What the target says about lines: hidden rows [n, t, width] before the final norm, log-chances [n, t, vocab]."""

    tokens: torch.Tensor
    rows: torch.Tensor
    target_logs: torch.Tensor


@dataclass(slots=True)
class HeadTraining:
    """One head, its target, and sampled lines [lines, tokens], the last of which are held out."""

    head: Head
    target: PreTrainedModel
    lines: torch.Tensor
    schedule: Schedule
    kept: Path
    _left: list[torch.Tensor] = field(default_factory=list)

    def run(self, told: Callable[[int, float], None]) -> None:
        """Train, from where an earlier run of the same schedule was interrupted.

        told: the steps done and the loss of the last one.
        """
        head = self.head.train()
        weights = [weight for weight in head.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=self.schedule.rate, weight_decay=0.01, betas=(0.9, 0.98))
        lines = self.lines[:-HELD_OUT_LINES]
        with self._listening():
            for step in range(resume(self.kept, self.schedule, head, optimizer), self.schedule.steps):
                for group in optimizer.param_groups:
                    group["lr"] = self.schedule.rate_at(step)
                loss = self._loss(self._lesson(self.schedule.batch(step, lines)))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                told(step + 1, float(loss.detach()))
                if (step + 1) % SAVED_STEPS == 0:
                    keep(self.kept, self.schedule, step + 1, head, optimizer)
        self.kept.unlink(missing_ok=True)

    @torch.no_grad()
    def score(self) -> HeadScore:
        """On the lines that were held out."""
        head = self.head.eval()
        generator = torch.Generator(self.target.device).manual_seed(self.schedule.seed)
        with self._listening():
            lesson = self._lesson(self.lines[-HELD_OUT_LINES:].long())
        noise = torch.rand(lesson.target_logs.shape, generator=generator, device=self.target.device)
        noise = -torch.log(-torch.log(noise.clamp(1e-20, 1 - 1e-7)))
        losses, greedy, sampled = [], [], []
        for step, logits, target_logs in _unrolled(head, lesson):
            logs = F.log_softmax(logits, dim=1)
            losses.append(float(F.kl_div(logs, target_logs, log_target=True, reduction="batchmean")))
            part = _places(noise, step)
            greedy.append(agreement(logs, target_logs))
            sampled.append(agreement(logs + part, target_logs + part))
        return HeadScore(sum(losses) / len(losses), tuple(greedy), tuple(sampled))

    def _loss(self, lesson: TargetLabels) -> torch.Tensor:
        total, weight = torch.zeros((), device=self.target.device), 0.0
        for step, logits, target_logs in _unrolled(self.head, lesson):
            logs = F.log_softmax(logits, dim=1)
            loss = F.kl_div(logs, target_logs, log_target=True, reduction="batchmean")
            total, weight = total + LATER**step * loss, weight + LATER**step
        return total / weight

    @torch.no_grad()
    def _lesson(self, tokens: torch.Tensor) -> TargetLabels:
        tokens = tokens.to(self.target.device)
        logits: torch.Tensor = cast("Any", self.target)(tokens, use_cache=False).logits
        return TargetLabels(tokens, self._left.pop(), F.log_softmax(logits.float(), dim=2))

    def _listening(self) -> Any:  # noqa: ANN401 - torch's removable handle, a context manager
        layers = self.target.get_submodule(find_layers(self.target))
        last = cast("nn.ModuleList", layers)[-1]
        return last.register_forward_hook(lambda _layer, _inputs, output: self._left.append(output))


def _unrolled(head: Head, lesson: TargetLabels) -> Any:  # noqa: ANN401 - an iterator of step, logits, target's log-probabilities
    """The head's guesses from every place, one token further with each step, and what the target says there."""
    rows = _places(lesson.rows.float(), -1)
    state = head.begin(rows, _places(lesson.tokens, 0))
    for step in range(UNROLL):
        yield step, head.score(rows, state), _places(lesson.target_logs, step)
        if step + 1 < UNROLL:
            state = head.step(state, _places(lesson.tokens, step + 1))


def _places(values: torch.Tensor, step: int) -> torch.Tensor:
    """Of [n, t, …] the places that lie `step` tokens behind each head's first one, in one dimension."""
    count = values.shape[1] - UNROLL - 1
    return values[:, step + 1 : step + 1 + count].flatten(0, 1)


def agreement(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """In how many lines the best token is the same."""
    return float((ours.argmax(dim=1) == theirs.argmax(dim=1)).float().mean())


def _length(rates: tuple[float, ...]) -> float:
    """Tokens per sweep of a chain of guesses, the target's own included."""
    total, chance = 1.0, 1.0
    for rate in rates:
        chance *= rate
        total += chance
    return total
