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
    def width(self) -> int:
        """Values of a hidden row; 0 where none are wanted."""
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


def collect_labels(
    sampler: LabelSampler, amount: SampleAmount, target: Target, folder: Path, report: Callable[[int], None]
) -> list[tuple[Path, int]]:
    """Labelled lines, as far as possible from an earlier run; the folder grows file by file.

    Args:
        sampler: makes the lines that are missing.
        amount: how much text.
        target: whose labels they are.
        folder: of the files.
        report: takes the number of lines so far.

    Returns:
        (file, place in it) of each line.

    Raises:
        ConfigError: the folder holds other labels, or the swarm gives none.
        NotEnoughSpace: the disk is too small.
        SwarmError: what stopped the sampler.
    """
    if folder.is_file():
        raise ConfigError(f"{folder}: a file; with --join, --samples names a folder of text and labels")
    marks = {"seed": str(amount.seed), "tokens": str(amount.tokens), "config": target.config_digest}
    found: list[tuple[Path, int]] = []
    unknown = 0
    while (done := len(found)) < amount.lines:
        report(done)
        file = folder / f"{done:08}.safetensors"
        if not file.exists():
            _check_space(sampler, amount, folder, amount.lines - done)
            made = sampler.make(amount, done, min(sampler.at_once, amount.lines - done))
            _check_known(made)
            folder.mkdir(parents=True, exist_ok=True)
            content = {name: getattr(made, name).contiguous() for name in TENSORS}
            replace_file(file, partial(save_file, content, metadata={**marks, "width": str(sampler.width)}), mode=0o644)
        count, lost = _read_head(file, marks, sampler.width)
        found += [(file, index) for index in range(count)]
        unknown += lost
    report(amount.lines)
    if unknown:
        logger.warning("%d of %d places got no label on the way and are left out", unknown, len(found) * amount.tokens)
    return found[: amount.lines]


def label_bytes(sampler: LabelSampler, amount: SampleAmount, lines: int) -> int:
    """What the files of so many lines take."""
    return lines * amount.tokens * (4 + 1 + 8 * sampler.top + 2 * sampler.width)


def _check_space(sampler: LabelSampler, amount: SampleAmount, folder: Path, lines: int) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    needed, free = label_bytes(sampler, amount, lines), shutil.disk_usage(there).free
    if needed > free:
        raise NotEnoughSpace(
            f"{folder}: the labels of {lines:,} lines take {needed:,} bytes and {free:,} are free; give fewer --lines, "
            "or another --samples"
        )


def _check_known(made: LabelledLines) -> None:
    if float(made.known.float().mean()) < MIN_KNOWN:
        raise ConfigError(
            f"the swarm sent {'hidden rows and ' if made.rows.shape[2] else ''}distributions of "
            f"{int(made.known.sum())} of {made.known.numel()} tokens; run this again when its machines stay"
        )


def _read_head(file: Path, marks: dict[str, str], width: int) -> tuple[int, int]:
    """How many lines a file holds, and how many of their places have no label but could have one.

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
