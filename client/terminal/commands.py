"""What the `client` command can be told; its command line is built from these and defaults stand here only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from client.options import CodecChoice, Options

Generation = Annotated[Options, tyro.conf.arg(name="")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Which model, in which swarm.

    Attributes:
        model: hub id or folder of the target (default: CANOPY_MODEL); only its config and tokenizer are read.
        join: multiaddress of a peer of the swarm; may be repeated.
        draft: hub id or folder of a draft model with the same tokenizer, or of a head trained for this target; may be
            repeated, and then they work together on one tree (default: none).
        draft_device: where drafts run, as torch calls it: cpu, cuda, cuda:1 (default: the first CUDA card, or the CPU).
        revision: branch, tag or commit of a hub model.
        threads: CPU threads for the draft model (default: as many as pay, which is measured).
        wait: seconds to wait for a machine when nobody serves some layers any more.
        codec: how hidden rows travel between nodes; int8 is less to send and changes results.
        lookup: propose what followed before in the text itself, with a draft or without.
        siblings: propose what the target picked behind branches that died, with a draft or without.
        recycle: propose what the target picked before after the same token, with a draft or without.
        adapt: let draft models learn, as a text grows, where the target picks otherwise than they.
        hedge: send every sweep to a second holder of the slowest layers too; whoever is first is heard.
    """

    model: tyro.conf.Positional[str | None] = None
    join: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    draft: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    draft_device: str | None = None
    revision: str | None = None
    threads: int | None = None
    codec: CodecChoice = "lossless"
    wait: float = 60.0
    lookup: bool = True
    siblings: bool = True
    recycle: bool = False
    adapt: bool = True
    hedge: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(ConnectionOptions):
    """Generate text through a swarm; it streams to standard output.

    Attributes:
        prompt: text to continue; - or nothing reads standard input.
        stats: print where the time went, to standard error.
        explain: print for every sweep how many tree nodes it had and why, and what it took, to standard error.
        resume: go on with an interrupted generation, from the file that its error named; its prompt and options hold.
        options: how to generate.
    """

    prompt: str = "-"
    stats: bool = False
    explain: bool = False
    resume: Path | None = None
    options: Generation = field(default_factory=Options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCommand(ConnectionOptions):
    """Talk with a model of a swarm; what was said stays in the nodes' memory, so only new tokens travel.

    Attributes:
        system: what the model is told before the first turn.
        options: how to generate.
    """

    system: str | None = None
    options: Generation = field(default_factory=Options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(ConnectionOptions):
    """Measure a swarm with your own prompts: speed, acceptance length, time to the first token.

    Attributes:
        prompts: file of JSON lines with "text", or with "turns" as in Spec-Bench (default: the demo's passages).
        limit: only the first so many prompts.
        prompt_tokens: only the first so many tokens of each text.
        compare: plain also runs every prompt without speculation, in turns, and compares text and speed.
        json: write every measurement here.
        plot: also measure fixed tree sizes, and draw speed and acceptance against them and a sweep's waterfall: in the
            terminal, and into this PNG file (needs `pip install canopy-swarm[plot]`).
        options: how to generate.
    """

    prompts: Path | None = None
    limit: int = 10
    prompt_tokens: int | None = None
    compare: Literal["none", "plain"] = "none"
    json: Path | None = None
    plot: Path | None = None
    options: Generation = field(default_factory=Options)
