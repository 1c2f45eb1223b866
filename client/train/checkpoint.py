"""An interrupted training on disk: weights, optimizer and step, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import nn

from swarm.errors import ConfigError


def keep(file: Path, schedule: object, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write down where a training is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    content = {"schedule": str(schedule), "step": step, "model": model.state_dict()}
    torch.save({**content, "optimizer": optimizer.state_dict()}, part)
    part.replace(file)


def resume(file: Path, schedule: object, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The steps that were done, with weights and optimizer as they were then; 0 where nothing was kept.

    Raises:
        ConfigError: the file is of another training, or no such file.
    """
    if not file.exists():
        return 0
    try:
        content = torch.load(file, weights_only=True, map_location="cpu")
        if content["schedule"] != str(schedule):
            raise ConfigError(f"{file}: of another training ({content['schedule']}); delete it to begin afresh")
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        return int(content["step"])
    except (OSError, EOFError, KeyError, RuntimeError, TypeError, UnpicklingError) as error:
        raise ConfigError(f"{file}: no training that could go on ({error}); delete it to begin afresh") from error
