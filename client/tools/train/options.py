"""What `client train-draft` can be told; its command line is built from this and defaults stand here only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

from swarm.base.cli_types import (
    Count,
    DeviceName,
    File,
    Folder,
    Found,
    Insecure,
    Model,
    NetworkKeyFile,
    Number,
    Peer,
    headed,
)
from swarm.directory.dht.addresses import OPEN_SWARM, Membership


@headed(
    draft=("out", "kind", "start", "earlier", "depth", "own_matrices"),
    text=("join", "network_key", "insecure", "lines", "tokens", "samples"),
    training=("steps", "batch", "rate", "seed", "device", "threads"),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDraft:
    """Train a draft for a target, on text that the target itself makes; an interrupted training goes on.

    Attributes:
        model: hub id or folder of the target; without --join its weights are needed here.
        join: multiaddress of a peer of a swarm that has the target, or an invite (also without --join); may be
            repeated. The swarm makes the text and says what the target thinks of each token, so the weights are not
            needed (default: made here).
        out: folder for the draft, to be named with --draft afterwards.
        kind: redrafter and dgf are small heads on the target's hidden rows; draft goes on training the model --start,
            and boost does too, but on what the drafts --earlier miss.
        start: hub id or folder of a small model with the target's tokenizer, for --kind draft and boost (default:
            none).
        earlier: hub id or folder of a draft that the new one is to complete, for --kind boost; may be repeated
            (default: none).
        depth: how many residual blocks a head has.
        own_matrices: let a head learn an embedding and output matrix of its own; else it borrows the target's where
            they lie here or on the hub, which are then needed to draft with it too.
        lines: how many lines of text to sample; the last 16 are for measuring.
        tokens: how many tokens a line has.
        samples: file of that text, made if it is not there; with --join a folder of text and labels. Several trainings
            may share it (default: samples.safetensors in --out, or labels there).
        steps: how many steps to train, each on --batch lines.
        batch: lines in a step.
        rate: the highest learning rate.
        seed: seed of the text and of everything else.
        device: where to train, as torch calls it, or auto: a card if there is one, else the CPU (default: auto).
        threads: CPU threads (default: all cores).
        membership: of the swarm; not an option.
    """

    model: tyro.conf.Positional[Model]
    out: Folder
    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    kind: Literal["redrafter", "dgf", "draft", "boost"] = "redrafter"
    start: Model | None = None
    earlier: tyro.conf.UseAppendAction[tuple[Model, ...]] = ()
    depth: Count = 2
    own_matrices: bool = False
    lines: Count = 2_048
    tokens: Count = 128
    samples: File | None = None
    steps: Count = 400
    batch: Count = 8
    rate: Number = 3e-3
    seed: Count = 1
    device: DeviceName | None = None
    threads: Count | None = None
    insecure: Insecure = False
    network_key: NetworkKeyFile = None
    membership: Found[Membership] = OPEN_SWARM
