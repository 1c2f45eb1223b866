"""Distils a head from the target that it drafts for. Seeded and resumable: a step depends on seed and number alone.

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
from client.train.checkpoint import load_checkpoint, save_checkpoint
from client.train.compute import batches, precision
from swarm.inference.layers.pass_through import find_layers

UNROLLED_TOKENS = 5
"""Tokens that a head guesses one after the other from one hidden row."""
STEP_DECAY = 0.8
"""Weight of a guess against that of the one before."""
WARM_UP_PART = 0.05
"""Part of the steps in which the learning rate rises."""
FINAL_RATE_PART = 0.03
"""Learning rate of the last step, as a part of the highest one."""
SAVED_STEPS = 50
"""Steps between checkpoints."""
HELD_OUT_LINES = 16
"""Lines that are not trained on; scores are measured on them."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to train.

    Attributes:
        steps: in all.
        lines: per step.
        rate: the highest learning rate.
        seed: of the lines' order.
    """

    steps: int
    lines: int
    rate: float
    seed: int

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: a warm-up, then a cosine."""
        warm = max(1, round(WARM_UP_PART * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.rate * (FINAL_RATE_PART + (1 - FINAL_RATE_PART) * (1 + math.cos(math.pi * done)) / 2)

    def batch(self, step: int, lines: torch.Tensor) -> torch.Tensor:
        """The lines of a step: every epoch in an order of its own."""
        per_epoch = max(1, len(lines) // self.lines)
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed((self.seed << 16) + epoch))
        return lines[order[place * self.lines : (place + 1) * self.lines]].long()


@dataclass(frozen=True, slots=True)
class HeadScore:
    """How good a head is on lines that it was not trained on.

    Attributes:
        loss: mean KL divergence in nats.
        greedy: by the number of guesses before it, how often a guess is the target's most likely token.
        sampled: likewise, how often it is the target's sample, under noise that both know.
    """

    loss: float
    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    def __str__(self) -> str:
        greedy, sampled = (_chain_length(rates) for rates in (self.greedy, self.sampled))
        firsts = " ".join(f"{rate:.2f}" for rate in self.greedy)
        return f"loss {self.loss:.3f}, accepts {firsts} in turn; one chain {greedy:.2f} greedy, {sampled:.2f} sampled"


@dataclass(slots=True)
class TargetLabels:
    """What the target computes for lines.

    Attributes:
        tokens: [n, t].
        rows: [n, t, width], hidden rows before the final norm.
        target_logs: [n, t, vocab_size], log-probabilities.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    target_logs: torch.Tensor


@dataclass(slots=True)
class HeadTraining:
    """Training of one head.

    Attributes:
        head: the network that learns.
        target: the model that it learns from.
        lines: [lines, tokens], sampled from the target; the last `HELD_OUT_LINES` are held out.
        schedule: how long and how fast.
        checkpoint: file of an interrupted training.
    """

    head: Head
    target: PreTrainedModel
    lines: torch.Tensor
    schedule: Schedule
    checkpoint: Path
    _captured: list[torch.Tensor] = field(default_factory=list)

    def run(self, report: Callable[[int, float], None]) -> None:
        """Train, from the checkpoint of an interrupted run if there is one.

        Args:
            report: takes the steps done and the loss of the last one.
        """
        head = self.head.train()
        weights = [weight for weight in head.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=self.schedule.rate, weight_decay=0.01, betas=(0.9, 0.98))
        lines = self.lines[:-HELD_OUT_LINES]
        with self._capturing_rows():
            first = load_checkpoint(self.checkpoint, self.schedule, head, optimizer)
            steps = range(first, self.schedule.steps)
            sent = batches(lambda step: self.schedule.batch(step, lines), steps, self.target.device)
            for step, tokens in zip(steps, sent, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = self.schedule.rate_at(step)
                with precision(self.target.device):
                    loss = self._loss(self._labels_of(tokens))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                report(step + 1, float(loss.detach()))
                if (step + 1) % SAVED_STEPS == 0:
                    save_checkpoint(self.checkpoint, self.schedule, step + 1, head, optimizer)
        self.checkpoint.unlink(missing_ok=True)

    @torch.no_grad()
    def score(self) -> HeadScore:
        """Measure on the held-out lines."""
        head = self.head.eval()
        generator = torch.Generator(self.target.device).manual_seed(self.schedule.seed)
        with self._capturing_rows():
            labels = self._labels_of(self.lines[-HELD_OUT_LINES:].long())
        noise = torch.rand(labels.target_logs.shape, generator=generator, device=self.target.device)
        noise = -torch.log(-torch.log(noise.clamp(1e-20, 1 - 1e-7)))
        losses, greedy, sampled = [], [], []
        for step, logits, target_logs in _unrolled(head, labels):
            logs = F.log_softmax(logits, dim=1)
            losses.append(float(F.kl_div(logs, target_logs, log_target=True, reduction="batchmean")))
            part = _places(noise, step)
            greedy.append(agreement(logs, target_logs))
            sampled.append(agreement(logs + part, target_logs + part))
        return HeadScore(sum(losses) / len(losses), tuple(greedy), tuple(sampled))

    def _loss(self, labels: TargetLabels) -> torch.Tensor:
        total, weight = torch.zeros((), device=self.target.device), 0.0
        for step, logits, target_logs in _unrolled(self.head, labels):
            logs = F.log_softmax(logits, dim=1)
            loss = F.kl_div(logs, target_logs, log_target=True, reduction="batchmean")
            total, weight = total + STEP_DECAY**step * loss, weight + STEP_DECAY**step
        return total / weight

    @torch.no_grad()
    def _labels_of(self, tokens: torch.Tensor) -> TargetLabels:
        tokens = tokens.to(self.target.device)
        logits: torch.Tensor = cast("Any", self.target)(tokens, use_cache=False).logits
        return TargetLabels(tokens, self._captured.pop(), F.log_softmax(logits.float(), dim=2))

    def _capturing_rows(self) -> Any:  # noqa: ANN401 - torch's removable handle, a context manager
        layers = self.target.get_submodule(find_layers(self.target))
        last = cast("nn.ModuleList", layers)[-1]
        return last.register_forward_hook(lambda _layer, _inputs, output: self._captured.append(output))


def _unrolled(head: Head, labels: TargetLabels) -> Any:  # noqa: ANN401 - an iterator of step, logits, target's log-probabilities
    """The head's logits from every place, one token further with each step, and the target's there."""
    rows = _places(labels.rows.float(), -1)
    state = head.begin(rows, _places(labels.tokens, 0))
    for step in range(UNROLLED_TOKENS):
        yield step, head.score(rows, state), _places(labels.target_logs, step)
        if step + 1 < UNROLLED_TOKENS:
            state = head.step(state, _places(labels.tokens, step + 1))


def _places(values: torch.Tensor, step: int) -> torch.Tensor:
    """From [n, t, …], the places `step` tokens after each first one, flattened to [places, …]."""
    count = values.shape[1] - UNROLLED_TOKENS - 1
    return values[:, step + 1 : step + 1 + count].flatten(0, 1)


def agreement(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The part of places [n] where the best token of both is the same."""
    return float((ours.argmax(dim=1) == theirs.argmax(dim=1)).float().mean())


def _chain_length(rates: tuple[float, ...]) -> float:
    """Tokens per sweep of a chain of guesses, the target's own included."""
    total, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        total += reached
    return total
