"""Labels that came through a swarm, on disk: a folder of files, one per batch of lines, read line by line.

An interrupted collection goes on behind its last whole file. A training holds the lines of one step in memory.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from client.target import Target
from client.train.labels import TargetLabels
from client.train.samples import SampleAmount
from client.train.swarm_samples import LabelledLines
from swarm.errors import ConfigError, NotEnoughSpace
from swarm.runtime.files import replace_file

MIN_KNOWN = 0.5
"""Part of a batch's places that must have labels; else the swarm does not give them, and nothing would be learned."""
TENSORS = ("tokens", "known", "top", "logs", "rows")

logger = logging.getLogger(__name__)


class LabelSampler(Protocol):
    """Makes labelled lines."""

    @property
    def at_once(self) -> int:
        """Lines per batch."""
        ...

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
        device: where they are wanted.
    """

    files: list[tuple[Path, int]]
    vocab_size: int
    device: torch.device

    @property
    def entries(self) -> torch.Tensor:
        """Each line's number."""
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
        folder: of the files.
        amount: how much text.
        target: whose labels they are.
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
            sampler: makes the lines.
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
