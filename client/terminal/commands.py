"""What the `client` command can be told; its command line is built from these and defaults stand here only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from client.options import CodecChoice, Options
from swarm.runtime.cli_types import Count, Device, File, Model, Peer, Revision, Seconds, Text, headed

Generation = Annotated[Options, tyro.conf.arg(name="")]

_SWARM = ("join", "revision", "wait", "codec", "hedge")
_DRAFTING = ("draft", "draft_device", "threads", "lookup", "siblings", "recycle", "adapt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Which model, in which swarm.

    Attributes:
        model: hub id or folder of the target; only its config and tokenizer are read (default: CANOPY_MODEL).
        join: multiaddress of a peer of the swarm; may be repeated.
        draft: hub id or folder of a draft model with the same tokenizer, or of a head trained for this target; may be
            repeated, and then they work together on one tree (default: none).
        draft_device: where drafts run, as torch calls it: cpu, cuda, cuda:1 (default: the first CUDA card, or the CPU).
        revision: branch, tag or commit of a hub model (default: its main branch).
        threads: CPU threads for the draft model (default: as many as pay, which is measured).
        wait: seconds to wait for a machine when nobody serves some layers any more.
        codec: how hidden rows travel between nodes; int8 is less to send and changes results.
        lookup: propose what followed before in the text itself, with a draft or without.
        siblings: propose what the target picked behind branches that died, with a draft or without.
        recycle: propose what the target picked before after the same token, with a draft or without.
        adapt: let draft models learn, as a text grows, where the target picks otherwise than they.
        hedge: send every sweep to a second holder of the slowest layers too; whoever is first is heard.
    """

    model: tyro.conf.Positional[Model | None] = None
    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    draft: tyro.conf.UseAppendAction[tuple[Model, ...]] = ()
    draft_device: Device | None = None
    revision: Revision | None = None
    threads: Count | None = None
    codec: CodecChoice = "lossless"
    wait: Seconds = 60.0
    lookup: bool = True
    siblings: bool = True
    recycle: bool = False
    adapt: bool = True
    hedge: bool = False


@headed(
    text=("prompt", "resume"), swarm=_SWARM, drafting=_DRAFTING, generation=("options",), output=("stats", "explain")
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(ConnectionOptions):
    """Generate text through a swarm; it streams to standard output.

    Attributes:
        prompt: text to continue; - reads standard input.
        stats: print where the time went, to standard error.
        explain: print for every sweep how many tree nodes it had and why, and what it took, to standard error.
        resume: go on with an interrupted generation, from the file that its error named; its prompt and options hold
            (default: begin a new one).
        options: how to generate.
    """

    prompt: Text = "-"
    stats: bool = False
    explain: bool = False
    resume: File | None = None
    options: Generation = field(default_factory=Options)


@headed(text=("system",), swarm=_SWARM, drafting=_DRAFTING, generation=("options",))
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCommand(ConnectionOptions):
    """Talk with a model of a swarm; what was said stays in the nodes' memory, so only new tokens travel.

    Attributes:
        system: what the model is told before the first turn (default: nothing).
        options: how to generate.
    """

    system: Text | None = None
    options: Generation = field(default_factory=Options)


@headed(
    text=("prompts", "limit", "prompt_tokens"),
    swarm=_SWARM,
    drafting=_DRAFTING,
    generation=("options",),
    output=("compare", "json", "plot"),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(ConnectionOptions):
    """Measure a swarm with your own prompts: speed, acceptance length, time to the first token.

    Attributes:
        prompts: file of JSON lines with "text", or with "turns" as in Spec-Bench (default: the demo's passages).
        limit: only the first so many prompts.
        prompt_tokens: only the first so many tokens of each text (default: all).
        compare: plain also runs every prompt without speculation, in turns, and compares text and speed.
        json: file for every measurement (default: none).
        plot: also measure fixed tree sizes, and draw speed and acceptance against them and a sweep's waterfall: in the
            terminal, and into this PNG file, which needs `pip install canopy-swarm[plot]` (default: none).
        options: how to generate.
    """

    prompts: File | None = None
    limit: Count = 10
    prompt_tokens: Count | None = None
    compare: Literal["none", "plain"] = "none"
    json: File | None = None
    plot: File | None = None
    options: Generation = field(default_factory=Options)
