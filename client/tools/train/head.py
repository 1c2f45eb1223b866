"""Distils a head from the target that it drafts for. Seeded and resumable: a step depends on seed and number alone.

At every place of a sampled line the head gets the target's hidden row and then the line's own tokens, a few in a row;
it learns the target's distribution at each of them (KL divergence, later steps weigh less).

Source: ReDrafter (arXiv 2403.09919), section 3.4, and Dovetail (arXiv 2412.18934): knowledge distillation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812

from client.draft.heads.files import Head
from client.tools.train.labels import LabelSource, TargetLabels, TargetLogs
from client.tools.train.steps import Schedule, TrainingPlan, run_steps

UNROLLED_TOKENS = 5
"""Tokens that a head guesses one after the other from one hidden row."""
STEP_DECAY = 0.8
"""Weight of a guess against that of the one before."""
HELD_OUT_LINES = 16
"""Lines that are not trained on; scores are measured on them."""


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
class HeadTraining:
    """Training of one head.

    Attributes:
        head: the network that learns; what of it is a parameter is trained.
        source: what the target says; the last `HELD_OUT_LINES` of its lines are held out.
        schedule: how long and how fast.
        checkpoint: file of an interrupted training.
        learns_output: whether the output matrix is learned too, also from what the target says right after each row.
    """

    head: Head
    source: LabelSource
    schedule: Schedule
    checkpoint: Path
    learns_output: bool = False

    def run(self, report: Callable[[int, float], None]) -> None:
        """Train, from the checkpoint of an interrupted run if there is one.

        Args:
            report: takes the steps done and the loss of the last one.
        """
        source = self.source
        plan = TrainingPlan(self.schedule, self.checkpoint, source.entries[:-HELD_OUT_LINES], source.device)
        run_steps(self.head.train(), plan, lambda chosen: self._loss(source.labels(chosen)), report)

    @torch.no_grad()
    def score(self) -> HeadScore:
        """Measure on the held-out lines."""
        head, device = self.head.eval(), self.source.device
        generator = torch.Generator(device).manual_seed(self.schedule.seed)
        labels = self.source.labels(self.source.entries[-HELD_OUT_LINES:])
        noise = torch.rand(*labels.tokens.shape, self.source.vocab_size, generator=generator, device=device)
        noise = -torch.log(-torch.log(noise.clamp(1e-20, 1 - 1e-7)))
        losses, greedy, sampled = [], [], []
        for step, logits, target, known in _unrolled(head, labels):
            logs, part = F.log_softmax(logits, dim=1), _places(noise, step)
            losses.append(float(_mean(target.divergence(logs), known)))
            greedy.append(float(_mean(logs.argmax(dim=1) == target.best(), known)))
            sampled.append(float(_mean((logs + part).argmax(dim=1) == target.sampled(part), known)))
        return HeadScore(sum(losses) / len(losses), tuple(greedy), tuple(sampled))

    def _loss(self, labels: TargetLabels) -> torch.Tensor:
        total, weight = torch.zeros((), device=self.source.device), 0.0
        for step, logits, target, known in _unrolled(self.head, labels):
            loss = _mean(target.divergence(F.log_softmax(logits, dim=1)), known)
            total, weight = total + STEP_DECAY**step * loss, weight + STEP_DECAY**step
        loss = total / weight
        return loss + self._output_loss(labels) if self.learns_output else loss

    def _output_loss(self, labels: TargetLabels) -> torch.Tensor:
        """How far the output matrix is from the target's: both make a distribution of the target's own row."""
        assert labels.rows is not None
        logs = F.log_softmax(self.head.logits(labels.rows.float().flatten(0, 1)), dim=1)
        top = None if labels.top is None else labels.top.flatten(0, 1)
        return _mean(TargetLogs(labels.logs.flatten(0, 1), top).divergence(logs), labels.known.flatten())


def _unrolled(head: Head, labels: TargetLabels) -> Iterator[tuple[int, torch.Tensor, TargetLogs, torch.Tensor]]:
    """From every place, one token further with each step: the head's logits, the target's, and where both are known."""
    assert labels.rows is not None
    rows, begins = _places(labels.rows.float(), -1), _places(labels.known, -1)
    state = head.begin(rows, _places(labels.tokens, 0))
    for step in range(UNROLLED_TOKENS):
        top = None if labels.top is None else _places(labels.top, step)
        target, known = TargetLogs(_places(labels.logs, step), top), begins & _places(labels.known, step)
        yield step, head.score(rows, state), target, known
        if step + 1 < UNROLLED_TOKENS:
            state = head.step(state, _places(labels.tokens, step + 1))


def _places(values: torch.Tensor, step: int) -> torch.Tensor:
    """From [n, t, …], the places `step` tokens after each first one, flattened to [places, …]."""
    count = values.shape[1] - UNROLLED_TOKENS - 1
    return values[:, step + 1 : step + 1 + count].flatten(0, 1)


def _mean(values: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The mean of values [n] where they are known; 0 where none is."""
    return torch.where(known, values.float(), 0.0).sum() / known.sum().clamp(min=1)


def _chain_length(rates: tuple[float, ...]) -> float:
    """Tokens per sweep of a chain of guesses, the target's own included."""
    total, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        total += reached
    return total
