"""The steps of a training, one after the other, from where an interrupted run left off. Knows no loss and no model.

Where a training computes: batches on their way to a card, and in which precision. Owns no step.

On a CPU everything is float32, as the seed alone decides. On a card that computes in bfloat16, matrix products do; the
weights, their gradients, softmax and loss stay float32.

A training's checkpoint on disk: weights, optimizer and step. Files appear whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import nn

from swarm.base.errors import ConfigError
from swarm.base.files import replace_file


def precision(device: torch.device) -> AbstractContextManager[object]:
    """Within it forwards and losses run in the device's precision; backward passes run outside."""
    if device.type != "cuda" or not torch.cuda.is_bf16_supported(including_emulation=False):
        return nullcontext()
    return mixed_precision(device)


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16)


def batches(lines_of: Callable[[int], torch.Tensor], steps: range, device: torch.device) -> Iterator[torch.Tensor]:
    """The lines of some steps, on the device: int64 [lines, tokens]. To a card the next ones travel meanwhile.

    Args:
        lines_of: the lines of a step.
    """
    ahead: torch.Tensor | None = None
    for step in steps:
        batch = _sent(lines_of(step), device) if ahead is None else ahead
        ahead = _sent(lines_of(step + 1), device) if step + 1 in steps else None
        yield batch


def _sent(batch: torch.Tensor, device: torch.device) -> torch.Tensor:
    return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch.to(device)


def save_checkpoint(
    file: Path, schedule: object, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write down the state of a training after `step` steps; `schedule` names the training."""
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {"schedule": str(schedule), "step": step, "model": model.state_dict()}
    replace_file(file, partial(torch.save, {**state, "optimizer": optimizer.state_dict()}), mode=0o644)


def load_checkpoint(file: Path, schedule: object, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load weights and optimizer into place. Returns the steps that were done, 0 where there is no checkpoint.

    Raises:
        ConfigError: the file belongs to another training, or is no checkpoint.
    """
    if not file.exists():
        return 0
    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
        if state["schedule"] != str(schedule):
            raise ConfigError(f"{file}: of another training ({state['schedule']}); delete it to begin afresh")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except (OSError, EOFError, KeyError, RuntimeError, TypeError, UnpicklingError) as error:
        raise ConfigError(f"{file}: no training that could go on ({error}); delete it to begin afresh") from error


SAVED_STEPS = 50
"""Steps between checkpoints."""
WARM_UP_PART = 0.05
"""Part of the steps in which the learning rate rises."""
FINAL_RATE_PART = 0.03
"""Learning rate of the last step, as a part of the highest one."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to train."""

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
class TrainingPlan:
    """What a training goes through.

    Attributes:
        schedule: how long and how fast.
        checkpoint: file of an interrupted training; gone when all steps are done.
        entries: [n, ...] to train on.
    """

    schedule: Schedule
    checkpoint: Path
    entries: torch.Tensor
    device: torch.device


def run_steps(
    model: nn.Module,
    plan: TrainingPlan,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    report: Callable[[int, float], None],
) -> None:
    """Train what of a model wants gradients, from the checkpoint of an interrupted run if there is one.

    Args:
        plan: for how long, and on what.
        loss_of: the loss of a step's entries.
        report: takes the steps done and the loss of the last one.

    Raises:
        ConfigError: the checkpoint belongs to another training, or is none.
    """
    schedule, checkpoint = plan.schedule, plan.checkpoint
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=schedule.rate, weight_decay=0.01, betas=(0.9, 0.98))
    steps = range(load_checkpoint(checkpoint, schedule, model, optimizer), schedule.steps)
    sent = batches(lambda step: schedule.batch(step, plan.entries), steps, plan.device)
    for step, chosen in zip(steps, sent, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        with precision(plan.device):
            loss = loss_of(chosen)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        report(step + 1, float(loss.detach()))
        if (step + 1) % SAVED_STEPS == 0:
            save_checkpoint(checkpoint, schedule, step + 1, model, optimizer)
    checkpoint.unlink(missing_ok=True)
