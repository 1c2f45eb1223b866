"""Text that a target makes by itself, to train drafts on: sampled from generic starts, never from anybody's prompts.

Every line begins with one random token (after the beginning-of-text token, where the tokenizer has one), and each pick
is the one that any client of the target gets for the line's own seed (docs/design/session-protocol.md). So the same
seed gives the same lines, whatever was interrupted, here or through a swarm (`client.train.swarm_samples`); ends of
text are passed over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from swarm.errors import ConfigError
from swarm.inference.gumbel import gumbel_row
from swarm.models.whole_model import load_causal_lm
from swarm.protocol.messages import Sampling

LINES = 128
"""Made at a time by a local copy."""
TEMPERATURES = (1.0, 0.7)
"""In turns, line by line."""


@dataclass(frozen=True, slots=True)
class SampleAmount:
    """How much text: lines of so many tokens each, from a seed."""

    lines: int
    tokens: int
    seed: int


class Sampler(Protocol):
    """Makes lines. at_once: as many of them as are kept together; a line is a function of the seed and its number."""

    @property
    def at_once(self) -> int:
        """Lines per batch."""
        ...

    def make(self, amount: SampleAmount, first: int, count: int) -> torch.Tensor:
        """The lines `[first, first + count)`: int32 [count, tokens]."""
        ...


def load_for_training(model: str | Path, device: str) -> PreTrainedModel:
    """A local copy of a whole model, in float32 and frozen; errors as in `load_causal_lm`."""
    whole = cast("Any", load_causal_lm(model, torch.float32, device))
    frozen: PreTrainedModel = whole.eval().requires_grad_(False)
    return frozen


def sampled_lines(sampler: Sampler, amount: SampleAmount, kept: Path, told: Callable[[int], None]) -> torch.Tensor:
    """Lines [lines, tokens], from a file where an earlier run left them, else made now; the file grows batch by batch.

    told: how many lines there are.

    Raises:
        ConfigError: the file holds other lines than those.
        SwarmError: what stopped the sampler.
    """
    lines = _read(kept, amount)
    while (done := len(lines)) < amount.lines:
        told(done)
        lines = torch.cat([lines, sampler.make(amount, done, min(sampler.at_once, amount.lines - done))])
        _write(kept, lines, amount)
    told(amount.lines)
    return lines[: amount.lines]


def sampling_of(amount: SampleAmount, line: int) -> Sampling:
    """How the picks of a line are made."""
    return Sampling((amount.seed << 32) + line, TEMPERATURES[line % len(TEMPERATURES)])


def start_of(amount: SampleAmount, line: int, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """What a line begins with."""
    first = random.Random(f"{amount.seed} {line}").randrange(len(tokenizer))
    return [first] if tokenizer.bos_token_id is None else [cast("int", tokenizer.bos_token_id), first]


@dataclass(frozen=True, slots=True)
class LocalSampler:
    """Samples from a local copy of the target, many lines in one forward."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    @property
    def at_once(self) -> int:
        """Lines per forward."""
        return LINES

    @torch.inference_mode()
    def make(self, amount: SampleAmount, first: int, count: int) -> torch.Tensor:
        """The lines `[first, first + count)`: int32 [count, tokens]."""
        device, numbers = self.target.device, range(first, first + count)
        samplings = [sampling_of(amount, line) for line in numbers]
        vocab_tokens = min(len(self.tokenizer), self.target.config.vocab_size)
        temperatures = torch.tensor([one.temperature for one in samplings], dtype=torch.float64, device=device)
        entering = torch.tensor([start_of(amount, line, self.tokenizer) for line in numbers], device=device)
        made, cache = entering, None
        while made.shape[1] < amount.tokens:
            out = cast("Any", self.target)(entering, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            noise = np.stack([gumbel_row(one.seed, made.shape[1], vocab_tokens) for one in samplings])
            scaled = out.logits[:, -1, :vocab_tokens].double() / temperatures[:, None]
            entering = (scaled + torch.from_numpy(noise).to(device)).argmax(dim=1, keepdim=True)
            made = torch.cat([made, entering], dim=1)
        return made.to(torch.int32).cpu()


def _read(kept: Path, amount: SampleAmount) -> torch.Tensor:
    if not kept.exists():
        return torch.empty(0, amount.tokens, dtype=torch.int32)
    try:
        content = load_file(kept)
        lines, seed = content["lines"], int(content["lines_seed"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"{kept}: holds no sampled text ({error}); delete it, or name another file") from error
    if lines.shape[1] != amount.tokens or seed != amount.seed:
        raise ConfigError(
            f"{kept}: holds lines of {lines.shape[1]} tokens from seed {seed}; delete it, or name another file"
        )
    return lines


def _write(kept: Path, lines: torch.Tensor, amount: SampleAmount) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_name(kept.name + ".part")
    save_file({"lines": lines.contiguous(), "lines_seed": torch.tensor(amount.seed)}, part)
    part.replace(kept)
