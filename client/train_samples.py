"""Text that a target makes by itself, to train drafts on: sampled from generic starts, never from anybody's prompts.

Every line begins with one random token (after the beginning-of-text token, where the tokenizer has one). The same seed
gives the same lines, whatever was interrupted: a batch is a function of the seed and its number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from swarm.errors import ConfigError, UnsupportedModel
from swarm.families import causal_lm_class
from swarm.hub import find_model
from swarm.pretrained import read_config, weight_files

LINES = 128
"""Made at a time."""
TEMPERATURES = (1.0, 0.7)
"""In turns, batch by batch."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much text: lines of so many tokens each, from a seed."""

    lines: int
    tokens: int
    seed: int


def load_for_training(model: str | Path, device: str) -> PreTrainedModel:
    """A local copy of a whole model, as Hugging Face's class has it, in float32 and frozen.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: Canopy cannot run it.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    folder, hub = find_model(model)
    config = read_config(folder, str(model))
    causal_lm_class(config)
    files = weight_files(folder, hub, str(model))
    if hub is not None:
        hub.fetch(files)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{model}: its weights cannot be read ({error})") from error
    frozen: PreTrainedModel = loaded.to(device).eval().requires_grad_(False)
    return frozen


def sampled_lines(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    amount: Amount,
    kept: Path,
    told: Callable[[int], None],
) -> torch.Tensor:
    """Lines [lines, tokens], from a file where an earlier run left them, else made now; the file grows batch by batch.

    told: how many lines there are.

    Raises:
        ConfigError: the file holds other lines than those.
    """
    header = {"seed": str(amount.seed), "tokens": str(amount.tokens)}
    lines = _read(kept, header, amount)
    while len(lines) < amount.lines:
        told(len(lines))
        batch = _batch(target, tokenizer, amount, len(lines) // LINES)
        lines = torch.cat([lines, batch])
        _write(kept, lines, header)
    told(amount.lines)
    return lines[: amount.lines]


def _read(kept: Path, header: dict[str, str], amount: Amount) -> torch.Tensor:
    if not kept.exists():
        return torch.empty(0, amount.tokens, dtype=torch.int32)
    try:
        content = load_file(kept)
        lines, seed = content["lines"], int(content["seed"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"{kept}: holds no sampled text ({error}); delete it, or name another file") from error
    if lines.shape[1] != amount.tokens or seed != int(header["seed"]):
        raise ConfigError(
            f"{kept}: holds lines of {lines.shape[1]} tokens from seed {seed}; delete it, or name another file"
        )
    return lines[: len(lines) // LINES * LINES]


def _write(kept: Path, lines: torch.Tensor, header: dict[str, str]) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_name(kept.name + ".part")
    save_file({"lines": lines.contiguous(), "seed": torch.tensor(int(header["seed"]))}, part)
    part.replace(kept)


@torch.inference_mode()
def _batch(target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, amount: Amount, number: int) -> torch.Tensor:
    """The batch of that number: [LINES, tokens]."""
    device = target.device
    generator = torch.Generator(device).manual_seed((amount.seed << 20) + number)
    vocab_tokens = min(len(tokenizer), target.config.vocab_size)
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    first = torch.randint(vocab_tokens, (LINES, 1), generator=generator, device=device)
    if tokenizer.bos_token_id is not None:
        first = torch.cat([torch.full_like(first, tokenizer.bos_token_id), first], dim=1)
    made, entering, cache = [first], first, None
    while sum(part.shape[1] for part in made) < amount.tokens:
        out = cast("Any", target)(entering, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        chances = torch.softmax(out.logits[:, -1, :vocab_tokens].float() / temperature, dim=1)
        entering = torch.multinomial(chances, 1, generator=generator)
        made.append(entering)
    return torch.cat(made, dim=1)[:, : amount.tokens].to(torch.int32).cpu()
