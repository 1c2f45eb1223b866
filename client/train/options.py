"""What `client train-draft` can be told; its command line is built from this and defaults stand here only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDraft:
    """Train a draft for a target, on text that the target itself makes; an interrupted training goes on.

    Attributes:
        model: hub id or folder of the target, whose weights are needed here.
        join: multiaddress of a peer of a swarm that makes the text, the same as this machine would; may be repeated
            (default: made here).
        out: folder for the draft, to be named with --draft afterwards.
        kind: redrafter and dgf are small heads on the target's hidden rows; draft goes on training the model --start,
            and boost does too, but on what the drafts --earlier miss.
        start: hub id or folder of a small model with the target's tokenizer, for --kind draft and boost.
        earlier: hub id or folder of a draft that the new one is to complete, for --kind boost; may be repeated.
        depth: residual blocks of a head.
        lines: how many lines of text to sample; the last 16 are for measuring.
        tokens: of each line.
        samples: file of that text, made if it is not there (default: in --out); several trainings may share it.
        steps: of training, each on --batch lines.
        batch: lines in a step.
        rate: the highest learning rate.
        seed: of the text and of everything else.
        device: where to train, as torch calls it (default: the first CUDA card, or the CPU).
        threads: CPU threads (default: all cores).
    """

    model: tyro.conf.Positional[str]
    out: Path
    join: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    kind: Literal["redrafter", "dgf", "draft", "boost"] = "redrafter"
    start: str | None = None
    earlier: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    depth: int = 2
    lines: int = 2_048
    tokens: int = 128
    samples: Path | None = None
    steps: int = 400
    batch: int = 8
    rate: float = 3e-3
    seed: int = 1
    device: str | None = None
    threads: int | None = None
