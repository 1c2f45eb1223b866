"""Text that a target makes by itself, to train drafts on: sampled from generic starts, never from anybody's prompts.

Every line begins with one random token (after the beginning-of-text token, where the tokenizer has one), and each pick
is the one that any client of the target gets for the line's own seed (docs/design/session-protocol.md). So the same
seed gives the same lines, here or through a swarm (`client.tools.train.samples`), also after an interruption. Lines go
on after an end of text.

Lines and labels through a swarm: the lines of a local copy, and what the tail says of each token on the way.

Every line is a seeded generation without drafts. Each of its sweeps brings the tail's pick, its likeliest tokens and,
where a head is to be trained, the hidden row: so labels cost no sweep of their own, and they are of this very text.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Unpack, cast

import numpy as np
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from client.base.options import ConnectOptions, Options
from client.base.stats import TokenLogProbs
from client.library.aio import AsyncSwarm
from swarm.base.errors import ConfigError, GenerationInterrupted
from swarm.base.files import replace_file
from swarm.base.tasks import TaskScope
from swarm.compute.gumbel import gumbel_row
from swarm.compute.picks.device_picks import PickRequest, picks_on, to_device
from swarm.compute.sampling import pick_together
from swarm.files.whole_model import load_causal_lm
from swarm.protocol.messages import Sampling
from swarm.protocol.pick_rules import MAX_TOP_LOG_PROBS

LINES = 128
"""Lines that a local copy makes at a time."""
TEMPERATURES = (1.0, 0.7)
"""Temperatures, in turn line by line."""


@dataclass(frozen=True, slots=True)
class SampleAmount:
    """How much text to sample."""

    lines: int
    tokens: int
    seed: int


class Sampler(Protocol):
    """Makes lines; a line depends on the seed and its number alone."""

    @property
    def at_once(self) -> int: ...

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


SWARM_LINES = 8
"""Lines that are generated side by side, each in a session of its own, without drafts."""
MAX_INTERRUPTIONS = 3
"""Chains that may break under one line."""


@dataclass(frozen=True, slots=True)
class LabelledLines:
    """Lines, and what the tail said of them.

    Attributes:
        tokens: int32 [n, t].
        known: bool [n, t], places after which the tail's distribution came, and the row of which came if rows do.
        top: int32 [n, t, k], the likeliest tokens after each place, best first; 0 where they are not known.
        logs: float32 [n, t, k], their log-probabilities.
        rows: bfloat16 [n, t, width], hidden rows before the final norm; width 0 where nobody asked for them.
    """

    tokens: torch.Tensor
    known: torch.Tensor
    top: torch.Tensor
    logs: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def empty(cls, lines: int, tokens: int, top: int, width: int) -> LabelledLines:
        """Lines of which nothing is known."""
        return cls(
            torch.zeros(lines, tokens, dtype=torch.int32),
            torch.zeros(lines, tokens, dtype=torch.bool),
            torch.zeros(lines, tokens, top, dtype=torch.int32),
            torch.zeros(lines, tokens, top),
            torch.zeros(lines, tokens, width, dtype=torch.bfloat16),
        )

    def line(self, index: int) -> LabelledLines:
        """One of the lines, as a view."""
        tensors = self.tokens, self.known, self.top, self.logs, self.rows
        return LabelledLines(*(tensor[index : index + 1] for tensor in tensors))


@dataclass(frozen=True, slots=True)
class SwarmSampler:
    """Samples through an open connection, `SWARM_LINES` at a time.

    Attributes:
        with_rows: whether hidden rows are wanted too.
    """

    swarm: AsyncSwarm
    portal: BlockingPortal
    with_rows: bool

    @property
    def at_once(self) -> int:
        """Sessions side by side."""
        return SWARM_LINES

    @property
    def width(self) -> int:
        """Values of a hidden row; 0 where none are wanted."""
        return self.swarm.target.hidden_size if self.with_rows else 0

    @property
    def top(self) -> int:
        """Tokens of a distribution that are told."""
        return min(MAX_TOP_LOG_PROBS, self.swarm.target.vocab_size)

    def make(self, amount: SampleAmount, first: int, count: int) -> LabelledLines:
        """The lines `[first, first + count)`.

        Raises:
            SwarmError: a line cannot be made, or was interrupted too often.
        """
        return self.portal.call(self._make, amount, range(first, first + count))

    async def _make(self, amount: SampleAmount, numbers: Sequence[int]) -> LabelledLines:
        made = LabelledLines.empty(len(numbers), amount.tokens, self.top, self.width)
        async with TaskScope() as scope:
            work = [self._line(amount, number, made.line(index)) for index, number in enumerate(numbers)]
            await asyncio.wait([scope.spawn(one) for one in work])
        return made

    async def _line(self, amount: SampleAmount, number: int, made: LabelledLines) -> None:
        """Generate until a line is long enough; it goes on after an end of text, as in a local copy.

        It also goes on where a chain broke for good, in another session.
        """
        line, notes = start_of(amount, number, self.swarm.target.tokenizer), _LineNotes(made)
        sampling, interruptions = sampling_of(amount, number), 0
        while (missing := amount.tokens - len(line)) > 0:
            options = Options(
                missing, temperature=sampling.temperature, seed=sampling.seed, nodes=0, log_probs=MAX_TOP_LOG_PROBS
            )
            state = self.swarm.factory.make(line, options)
            if self.with_rows:
                state.observe = notes.observe
            try:
                async with self.swarm.opener.open(len(line) + state.max_new_tokens, state.nodes) as session:
                    async for _ in session.run(state):
                        pass
            except GenerationInterrupted:
                interruptions += 1
                if interruptions > MAX_INTERRUPTIONS:
                    raise
            notes.note_distributions(len(line) - 1, state.log_probs, len(state.text.tokens))
            line += state.text.tokens
        notes.finish(line, with_rows=self.with_rows)


class _LineNotes:
    """Writes down what comes of one line. What a repair lost on the way stays unknown."""

    def __init__(self, made: LabelledLines) -> None:
        """Begin with nothing; `made` is written to, [1, t, …]."""
        self._made = made
        self._has_row, self._has_logs = (torch.zeros_like(made.known[0]) for _ in range(2))

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Take the hidden rows [n, width] of the last n tokens of a sequence."""
        own = self._made.rows[0]
        if rows.shape[1] != own.shape[1]:
            return
        places = slice(len(sequence) - len(rows), len(sequence))
        own[places], self._has_row[places] = rows.to(own.dtype), True

    def note_distributions(self, first: int, found: Sequence[TokenLogProbs], tokens: int) -> None:
        """Take the distributions after places `first`, `first + 1` …; where one is lost, all of them are left out."""
        if len(found) != tokens:
            return
        for place, one in enumerate(found, first):
            if len(one.top) == self._made.top.shape[2]:
                self._made.top[0, place] = torch.tensor([token for token, _ in one.top], dtype=torch.int32)
                self._made.logs[0, place] = torch.tensor([value for _, value in one.top])
                self._has_logs[place] = True

    def finish(self, line: Sequence[int], *, with_rows: bool) -> None:
        """The line is whole."""
        self._made.tokens[0] = torch.tensor(line, dtype=torch.int32)
        self._made.known[0] = self._has_logs & self._has_row if with_rows else self._has_logs


@contextmanager
def open_sampler(model: str, *, with_rows: bool, **options: Unpack[ConnectOptions]) -> Iterator[SwarmSampler]:
    """Join a swarm as a client of one model, to sample from it; arguments and errors as in `AsyncSwarm.connect`."""
    plain: ConnectOptions = {**options, "lookup": False, "calibration": None, "generation_config": False}
    with start_blocking_portal("asyncio") as portal:
        connecting = AsyncSwarm.connect(model, **plain)
        with portal.wrap_async_context_manager(connecting) as swarm:
            yield SwarmSampler(swarm, portal, with_rows)
