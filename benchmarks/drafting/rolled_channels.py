"""The same Llama with its channels in another order, so that groups of weights hold other neighbours.

A folder that was made from a file of 4-bit groups holds numbers of that file's grid: rounding finds the grid again and
proves nothing. Rolled by half a group, every new group consists of two halves with grids of their own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from swarm.base.errors import UnsupportedModel

INPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Matrices whose columns are the hidden row's channels."""
OUTPUTS = ("o_proj", "down_proj")
"""Matrices whose rows are."""


def rolled(folder: Path, shift: int, into: Path) -> Path:
    """A folder with the model whose channels are rolled by `shift`: hidden rows, the MLP's, and values within heads.

    Raises:
        UnsupportedModel: it is no Llama.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if model.config.model_type != "llama":
        raise UnsupportedModel(f"{model.config.model_type}: channels can be rolled in a Llama alone")
    width: int = model.config.head_dim
    for name, weight in model.named_parameters():
        part = name.split(".")[-2]
        new = weight.data
        if part in INPUTS:
            new = new.roll(shift, 1)
        elif part in OUTPUTS or new.ndim == 1:
            new = new.roll(shift, 0)
        if part in ("gate_proj", "up_proj"):
            new = new.roll(shift, 0)
        elif part == "down_proj":
            new = new.roll(shift, 1)
        elif part == "v_proj":
            new = new.view(-1, width, new.shape[1]).roll(shift, 1).flatten(0, 1)
        elif part == "o_proj":
            new = new.view(len(new), -1, width).roll(shift, 2).flatten(1)
        weight.data = new.contiguous()
    made = into / f"{folder.name}, channels rolled by {shift}"
    model.save_pretrained(made)
    for own in folder.glob("tokenizer*"):
        shutil.copy(own, made)
    return made
