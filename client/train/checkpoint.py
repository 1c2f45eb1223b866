"""A training's checkpoint on disk: weights, optimizer and step. Files appear whole or not at all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import nn

from swarm.errors import ConfigError
from swarm.runtime.files import replace_file


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
