"""What a target says about lines: hidden rows and distributions, which every training learns from. Trains nothing.

A target that lies here gives its whole distribution (`ModelLabels`). Through a swarm come its likeliest tokens and
their probabilities (`client.tools.train.labels`): then the rest of the vocabulary counts as one more token.

Labels that came through a swarm, on disk: a folder of files, one per batch of lines, read line by line.

An interrupted collection goes on behind its last whole file. A training holds the lines of one step in memory.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from client.base.target import Target
from client.tools.train.samples import LabelledLines, SampleAmount
from swarm.base.errors import ConfigError, NotEnoughSpace
from swarm.base.files import replace_file
from swarm.compute.layers.pass_through import find_layers

MIN_REST = 1e-6
"""Probability of all tokens that are not named, at least: a logarithm is taken of it."""


@dataclass(frozen=True, slots=True)
class TargetLogs:
    """The target's distribution at n places.

    Attributes:
        logs: [n, k], log-probabilities.
        tokens: int64 [n, k], the likeliest tokens, best first; None where `logs` is of the whole vocabulary.
    """

    logs: torch.Tensor
    tokens: torch.Tensor | None = None

    def best(self) -> torch.Tensor:
        """The likeliest token at each place [n]."""
        return self.logs.argmax(dim=1) if self.tokens is None else self.tokens[:, 0]

    def sampled(self, noise: torch.Tensor) -> torch.Tensor:
        """The token that wins under noise [n, vocab_size] at each place [n], among those that are named."""
        if self.tokens is None:
            return (self.logs + noise).argmax(dim=1)
        won = (self.logs + noise.gather(1, self.tokens)).argmax(dim=1, keepdim=True)
        return self.tokens.gather(1, won)[:, 0]

    def divergence(self, ours: torch.Tensor) -> torch.Tensor:
        """KL(target ‖ ours) in nats at each place [n]; `ours` [n, vocab_size] are log-probabilities."""
        if self.tokens is None:
            return F.kl_div(ours, self.logs, log_target=True, reduction="none").sum(dim=1)
        probs = self.logs.exp()
        named = (probs * (self.logs - ours.gather(1, self.tokens))).sum(dim=1)
        if self.tokens.shape[1] == ours.shape[1]:
            return named
        rest = (1 - probs.sum(dim=1)).clamp_min(MIN_REST)
        our_rest = ours.scatter(1, self.tokens, -torch.inf).logsumexp(dim=1)
        return named + rest * (rest.log() - our_rest)


@dataclass(frozen=True, slots=True)
class TargetLabels:
    """What the target computes for lines.

    Attributes:
        tokens: int64 [n, t].
        known: bool [n, t], places of which there is a hidden row and a distribution.
        logs: [n, t, k], log-probabilities of what follows each place.
        top: int64 [n, t, k], the tokens that they are of; None where they are of the whole vocabulary.
        rows: [n, t, width], hidden rows before the final norm; None where nobody asked for them.
    """

    tokens: torch.Tensor
    known: torch.Tensor
    logs: torch.Tensor
    top: torch.Tensor | None = None
    rows: torch.Tensor | None = None


class LabelSource(Protocol):
    """Gives the labels of lines."""

    @property
    def entries(self) -> torch.Tensor:
        """[lines, …], a row for each line; `labels` takes rows of it."""
        ...

    @property
    def device(self) -> torch.device:
        """Where labels lie, and drafts are trained."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the target's output matrix."""
        ...

    def labels(self, entries: torch.Tensor) -> TargetLabels:
        """The labels of some lines, on the device."""
        ...


@dataclass(slots=True)
class ModelLabels:
    """Labels of a target whose weights lie here.

    Attributes:
        target: frozen.
        lines: int32 [lines, tokens], sampled from it.
        with_rows: whether hidden rows are wanted too.
    """

    target: PreTrainedModel
    lines: torch.Tensor
    with_rows: bool
    _captured: list[torch.Tensor] = field(default_factory=list)

    @property
    def entries(self) -> torch.Tensor:
        return self.lines

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.target.device

    @property
    def vocab_size(self) -> int:
        size: int = self.target.config.vocab_size
        return size

    @torch.no_grad()
    def labels(self, entries: torch.Tensor) -> TargetLabels:
        """One forward of the target."""
        tokens = entries.to(self.device, torch.long)
        hook = self._capture_rows() if self.with_rows else None
        try:
            logits: torch.Tensor = cast("Any", self.target)(tokens, use_cache=False).logits
        finally:
            if hook is not None:
                hook.remove()
        known = torch.ones_like(tokens, dtype=torch.bool)
        rows = self._captured.pop() if self.with_rows else None
        return TargetLabels(tokens, known, F.log_softmax(logits.float(), dim=2), None, rows)

    def _capture_rows(self) -> Any:  # noqa: ANN401 - torch's removable handle
        layers = self.target.get_submodule(find_layers(self.target))
        last = cast("nn.ModuleList", layers)[-1]
        return last.register_forward_hook(lambda _layer, _inputs, output: self._captured.append(output))


MIN_KNOWN = 0.5
"""Part of a batch's places that must have labels; else the swarm does not give them, and nothing would be learned."""
TENSORS = ("tokens", "known", "top", "logs", "rows")

logger = logging.getLogger(__name__)


class LabelSampler(Protocol):
    """Makes labelled lines."""

    @property
    def at_once(self) -> int: ...

    @property
    def top(self) -> int:
        """Tokens of a distribution that are told."""
        ...

    def make(self, amount: SampleAmount, first: int, count: int) -> LabelledLines:
        """The lines `[first, first + count)`."""
        ...


@dataclass(frozen=True, slots=True)
class SwarmLabels:
    """Labels of a folder.

    Attributes:
        files: (file, place in it) of each line.
        vocab_size: rows of the target's output matrix.
    """

    files: list[tuple[Path, int]]
    vocab_size: int
    device: torch.device

    @property
    def entries(self) -> torch.Tensor:
        return torch.arange(len(self.files))

    def labels(self, entries: torch.Tensor) -> TargetLabels:
        """Read some lines.

        Raises:
            ConfigError: a file cannot be read any more.
        """
        lines = [self._line(*self.files[number]) for number in entries.tolist()]
        tokens, known, top, logs, rows = (torch.stack(parts).to(self.device) for parts in zip(*lines, strict=True))
        return TargetLabels(tokens.long(), known, logs, top.long(), rows if rows.shape[2] else None)

    def _line(self, file: Path, index: int) -> list[torch.Tensor]:
        try:
            with safe_open(file, framework="pt") as opened:
                return [opened.get_slice(name)[index] for name in TENSORS]
        except (OSError, SafetensorError) as error:
            raise _unusable(file, error) from error


@dataclass(slots=True)
class LabelFiles:
    """What a folder holds.

    Attributes:
        lines: (file, place in it) of each line.
        unknown: places of all of them that got no label on the way.
    """

    lines: list[tuple[Path, int]]
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class LabelFolder:
    """Where labels are, and of what they have to be.

    Attributes:
        width: values of a hidden row; 0 where none are needed.
    """

    folder: Path
    amount: SampleAmount
    target: Target
    width: int

    def read(self) -> LabelFiles:
        """What is there, from the first line on without a gap.

        Raises:
            ConfigError: the folder holds other labels, or is none.
        """
        if self.folder.is_file():
            raise ConfigError(f"{self.folder}: a file; with --join, --samples names a folder of text and labels")
        found = LabelFiles([])
        while len(found.lines) < self.amount.lines and (file := self._file(len(found.lines))).exists():
            self._add(found, file)
        return found

    def collect(self, sampler: LabelSampler, report: Callable[[int], None]) -> LabelFiles:
        """Have a swarm make what is missing; the folder grows file by file.

        Args:
            report: takes the number of lines so far.

        Raises:
            ConfigError: the folder holds other labels, or the swarm gives none.
            NotEnoughSpace: the disk is too small.
            SwarmError: what stopped the sampler.
        """
        found, amount = self.read(), self.amount
        while (done := len(found.lines)) < amount.lines:
            report(done)
            self._check_space(sampler, amount.lines - done)
            made = sampler.make(amount, done, min(sampler.at_once, amount.lines - done))
            _check_known(made)
            self.folder.mkdir(parents=True, exist_ok=True)
            content = {name: getattr(made, name).contiguous() for name in TENSORS}
            replace_file(self._file(done), partial(save_file, content, metadata=self._marks), mode=0o644)
            self._add(found, self._file(done))
        report(amount.lines)
        return found

    def source(self, found: LabelFiles, device: torch.device) -> SwarmLabels:
        """What a training reads; says once how many places have no label."""
        if found.unknown:
            places = len(found.lines) * self.amount.tokens
            logger.warning("%d of %d places got no label on the way and are left out", found.unknown, places)
        return SwarmLabels(found.lines[: self.amount.lines], self.target.vocab_size, device)

    @property
    def _marks(self) -> dict[str, str]:
        """What tells these labels from others."""
        amount = self.amount
        return {"seed": str(amount.seed), "tokens": str(amount.tokens), "config": self.target.config_digest}

    def _file(self, first: int) -> Path:
        """The file that begins with a line."""
        return self.folder / f"{first:08}.safetensors"

    def _add(self, found: LabelFiles, file: Path) -> None:
        count, lost = _read_head(file, self._marks, self.width)
        found.lines += [(file, index) for index in range(count)]
        found.unknown += lost

    def _check_space(self, sampler: LabelSampler, lines: int) -> None:
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        needed, free = label_bytes(sampler.top, self.width, self.amount, lines), shutil.disk_usage(there).free
        if needed > free:
            raise NotEnoughSpace(
                f"{self.folder}: the labels of {lines:,} lines take {needed:,} bytes and {free:,} are free; give fewer "
                "--lines, or another --samples"
            )


def label_bytes(top: int, width: int, amount: SampleAmount, lines: int) -> int:
    """What the files of so many lines take, with so many tokens of each distribution and rows of so many values."""
    return lines * amount.tokens * (4 + 1 + 8 * top + 2 * width)


def _check_known(made: LabelledLines) -> None:
    if float(made.known.float().mean()) < MIN_KNOWN:
        raise ConfigError(
            f"the swarm sent {'hidden rows and ' if made.rows.shape[2] else ''}distributions of "
            f"{int(made.known.sum())} of {made.known.numel()} tokens; run this again when its machines stay"
        )


def _read_head(file: Path, marks: dict[str, str], width: int) -> tuple[int, int]:
    """How many lines a file holds (at least one), and how many of their places have no label but could have one.

    Raises:
        ConfigError: it holds other labels, or none.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            told = opened.metadata() or {}
            known: torch.Tensor = opened.get_tensor("known")
            shapes = {name: opened.get_slice(name).get_shape() for name in TENSORS}
    except (OSError, SafetensorError) as error:
        raise _unusable(file, error) from error
    if {name: told.get(name) for name in marks} != marks or any(
        shape[:2] != [*known.shape] for shape in shapes.values()
    ):
        raise ConfigError(f"{file.parent}: holds labels of another text or model; delete it, or name other --samples")
    if shapes["rows"][2] != width and width:
        raise ConfigError(f"{file.parent}: holds no hidden rows; delete it, or name other --samples")
    inner = known[:, 1:-1]  # the first token may be the tokenizer's own, and after the last one nothing was asked
    return len(known), int((~inner).sum())


def _unusable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file}: holds no labels ({error}); delete it, and it is made again")
