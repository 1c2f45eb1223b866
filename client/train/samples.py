"""Text that a target makes by itself, to train drafts on: sampled from generic starts, never from anybody's prompts.

Every line begins with one random token (after the beginning-of-text token, where the tokenizer has one), and each pick
is the one that any client of the target gets for the line's own seed (docs/design/session-protocol.md). So the same
seed gives the same lines, here or through a swarm (`client.train.swarm_samples`), also after an interruption. Lines go
on after an end of text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from swarm.errors import ConfigError
from swarm.inference.gumbel import gumbel_row
from swarm.inference.picks.device_picks import PickRequest, picks_on, to_device
from swarm.inference.sampling import pick_together
from swarm.models.whole_model import load_causal_lm
from swarm.protocol.messages import Sampling
from swarm.runtime.files import replace_file

LINES = 128
"""Lines that a local copy makes at a time."""
TEMPERATURES = (1.0, 0.7)
"""Temperatures, in turn line by line."""


@dataclass(frozen=True, slots=True)
class SampleAmount:
    """How much text to sample.

    Attributes:
        lines: in all.
        tokens: of each line.
        seed: of all lines.
    """

    lines: int
    tokens: int
    seed: int


class Sampler(Protocol):
    """Makes lines; a line depends on the seed and its number alone."""

    @property
    def at_once(self) -> int:
        """Lines per batch."""
        ...

    def make(self, amount: SampleAmount, first: int, count: int) -> torch.Tensor:
        """The lines `[first, first + count)`: int32 [count, tokens]."""
        ...


def load_for_training(model: str | Path, device: str) -> PreTrainedModel:
    """Load a whole model in float32, frozen; errors as in `load_causal_lm`."""
    whole = cast("Any", load_causal_lm(model, torch.float32, device))
    frozen: PreTrainedModel = whole.eval().requires_grad_(False)
    return frozen


def sampled_lines(sampler: Sampler, amount: SampleAmount, file: Path, report: Callable[[int], None]) -> torch.Tensor:
    """Lines [lines, tokens], as far as possible from the file of an earlier run; the file grows batch by batch.

    Args:
        sampler: makes the lines that are missing.
        amount: how much text.
        file: of the lines.
        report: takes the number of lines so far.

    Raises:
        ConfigError: the file holds lines of another seed or length.
        SwarmError: what stopped the sampler.
    """
    lines = _read(file, amount)
    while (done := len(lines)) < amount.lines:
        report(done)
        lines = torch.cat([lines, sampler.make(amount, done, min(sampler.at_once, amount.lines - done))])
        _write(file, lines, amount)
    report(amount.lines)
    return lines[: amount.lines]


def sampling_of(amount: SampleAmount, line: int) -> Sampling:
    """The sampling of one line."""
    return Sampling((amount.seed << 32) + line, TEMPERATURES[line % len(TEMPERATURES)])


def start_of(amount: SampleAmount, line: int, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that a line begins with."""
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
        entering = torch.tensor([start_of(amount, line, self.tokenizer) for line in numbers], device=device)
        made, cache = entering, None
        while made.shape[1] < amount.tokens:
            out = cast("Any", self.target)(entering, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            entering = _picks(out.logits[:, -1, :vocab_tokens], samplings, made.shape[1])
            made = torch.cat([made, entering], dim=1)
        return made.to(torch.int32).cpu()


def _picks(logits: torch.Tensor, samplings: Sequence[Sampling], position: int) -> torch.Tensor:
    """The picks at one position of lines with samplings of their own: int64 [lines, 1]."""
    if picks_on(logits.device):
        requests = [PickRequest(row, [position], sampling) for row, sampling in enumerate(samplings)]
        return to_device([_one(found) for found in pick_together(logits, requests)], logits.device)[:, None]
    temperatures = torch.tensor([one.temperature for one in samplings], dtype=torch.float64)
    noise = np.stack([gumbel_row(one.seed, position, logits.shape[1]) for one in samplings])
    scores = logits.cpu().double() / temperatures[:, None] + torch.from_numpy(noise)
    return scores.argmax(dim=1, keepdim=True).to(logits.device)


def _one(picks: list[int] | ConfigError) -> int:
    if isinstance(picks, ConfigError):
        raise picks
    return picks[0]


def _read(file: Path, amount: SampleAmount) -> torch.Tensor:
    if not file.exists():
        return torch.empty(0, amount.tokens, dtype=torch.int32)
    try:
        content = load_file(file)
        lines, seed = content["lines"], int(content["lines_seed"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"{file}: holds no sampled text ({error}); delete it, or name another file") from error
    if lines.shape[1] != amount.tokens or seed != amount.seed:
        raise ConfigError(
            f"{file}: holds lines of {lines.shape[1]} tokens from seed {seed}; delete it, or name another file"
        )
    return lines


def _write(file: Path, lines: torch.Tensor, amount: SampleAmount) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"lines": lines.contiguous(), "lines_seed": torch.tensor(amount.seed)}
    replace_file(file, partial(save_file, content), mode=0o644)
