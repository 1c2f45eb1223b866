"""Options of the `client` commands. The command line is built from these classes; defaults stand here only."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal, cast

import tyro

from client.base.options import ConnectionOptions, ConnectOptions, DraftOptions, Options
from client.terminal.setups import ProgramName
from swarm.base.cli_types import (
    Count,
    File,
    Found,
    Host,
    LanMode,
    Model,
    NetworkKeyFile,
    Peer,
    Port,
    Seconds,
    Text,
    Url,
    headed,
)

GenerationOptions = Annotated[Options, tyro.conf.arg(name="")]

_SWARM = ("join", "lan", "network_key", "revision", "fingerprint", "generation_config", "wait")
_LINKS = (
    *("codec", "reproducible", "hedge", "trusted", "own", "check_picks", "head", "audit", "receipts", "owner"),
    "insecure",
)
_DRAFTING = (*(one.name for one in fields(DraftOptions) if one.name != "calibration"), "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmCommand(ConnectionOptions):
    """Which model, in which swarm.

    Attributes:
        model: hub id, folder or GGUF file of the target, of which only config and tokenizer are read, or an invite
            (default: the invite's, CANOPY_MODEL, else the one used last).
        join: multiaddress of a peer of the swarm, or an invite (also without --join); may be repeated (default:
            CANOPY_JOIN, else the swarm joined last).
        lan: without either: whether a swarm that machines of the local network announce is joined; ask asks once, at
            a terminal.
    """

    model: tyro.conf.Positional[Model | None] = None
    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    lan: LanMode = "ask"
    network_key: NetworkKeyFile = None

    def connect_options(self) -> ConnectOptions:
        given = {one.name: getattr(self, one.name) for one in fields(ConnectionOptions)}
        drafts = tuple(draft for draft in self.draft if draft != "none")
        return cast("ConnectOptions", {**given, "peers": self.join, "draft": drafts})


@headed(
    text=("prompt", "json_schema", "resume"),
    swarm=_SWARM,
    links=_LINKS,
    drafting=_DRAFTING,
    generation=("options",),
    output=("stats", "explain", "proof", "proof_rows"),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(SwarmCommand):
    """Generate text through a swarm; it streams to standard output.

    Attributes:
        prompt: text to continue; - reads standard input.
        json_schema: file of a JSON schema that the whole text must match (default: none).
        stats: print where the time went, to standard error.
        explain: print for every sweep how many tree nodes it had and why, and what it took, to standard error.
        proof: file for the text's evidence: which machines signed that they received and picked what (default: none).
        proof_rows: with --proof: add the rows that each machine sent, so that whoever has some of the layers can check
            those alone; 16 KB per token and machine for a large model.
        resume: go on with an interrupted generation, from the file that its error named, with the prompt and options
            of that file (default: begin a new one).
        options: how to generate.
    """

    prompt: Text = "-"
    json_schema: File | None = None
    stats: bool = False
    explain: bool = False
    proof: File | None = None
    proof_rows: bool = False
    resume: File | None = None
    options: GenerationOptions = field(default_factory=Options)


@headed(text=("system",), swarm=_SWARM, links=_LINKS, drafting=_DRAFTING, generation=("options",))
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCommand(SwarmCommand):
    """Talk with a model of a swarm; the conversation stays in the nodes' memory, so only new tokens are sent.

    Attributes:
        system: the system message, before the first turn (default: none).
        options: how to generate.
    """

    system: Text | None = None
    options: GenerationOptions = field(default_factory=Options)


@headed(
    text=("prompts", "limit", "prompt_tokens"),
    swarm=_SWARM,
    links=_LINKS,
    drafting=_DRAFTING,
    generation=("options",),
    output=("compare", "json", "plot"),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(SwarmCommand):
    """Measure a swarm with your own prompts: speed, acceptance length, time to the first token.

    Attributes:
        prompts: file of JSON lines with "text", or with "turns" as in Spec-Bench (default: the demo's passages).
        limit: use only this many prompts, from the first.
        prompt_tokens: use only this many tokens of each text, from the first (default: all).
        compare: plain also runs every prompt without speculation, and compares text and speed.
        json: file for every measurement (default: none).
        plot: also measure fixed tree sizes; draw speed and acceptance by tree size, and where a sweep's time went, in
            the terminal and into this PNG file, which needs `pip install canopy-swarm[plot]` (default: none).
        options: how to generate.
    """

    prompts: File | None = None
    limit: Count = 10
    prompt_tokens: Count | None = None
    compare: Literal["none", "plain"] = "none"
    json: File | None = None
    plot: File | None = None
    options: GenerationOptions = field(default_factory=Options)


@headed(
    server=("program", "host", "port", "api_key", "open_to_all", "allow_host", "origin", "alias", "any_model"),
    bounds=("running", "waiting", "waiting_per_key", "keep", "keep_idle", "share_prompts", "open_models", "model_idle"),
    swarm=("more", *_SWARM),
    links=_LINKS,
    drafting=_DRAFTING,
)
@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCommand(SwarmCommand):
    """Serve a swarm's models over HTTP, as OpenAI, Anthropic and Ollama do: for programs that speak to these.

    Each model is opened when a request first names it.

    Attributes:
        more: further models (default: where no model is named, every one that the swarm lists).
        model_why: who named the model.
        program: print what to write where so that this program asks the server that runs at --host and --port, and
            serve nothing.
        host: IP address to listen on; another one than this machine's own needs a key.
        port: TCP port to listen on; 0 takes any free one.
        api_key: key that callers have to show; may be repeated. CANOPY_API_KEY takes more, for keys that not every user
            of this machine may read (default: none).
        open_to_all: let others than this machine call without a key.
        allow_host: a further name under which this machine may be called; may be repeated.
        origin: web pages of this origin, such as https://chat.example.org, may call; may be repeated.
        alias: a further name of the first model, such as gpt-4o-mini, for programs that ask for that; may be repeated.
        any_model: take every other name in a request for the first model.
        open_models: models that are open at a time; the one that was used least recently makes room.
        model_idle: seconds after which a model is given up that nobody asked for; the first one stays.
        running: answers at a time; further requests wait.
        waiting: requests that may wait.
        waiting_per_key: requests of one key that may wait.
        keep: idle sessions to keep, for prompts that begin like earlier ones.
        keep_idle: seconds to keep an idle session.
        share_prompts: let a key's request go on in a session that another key's request left: faster where all keys
            use one opening, but each can find out by guessing what others wrote.
    """

    more: tyro.conf.Positional[tuple[Model, ...]] = ()
    model_why: Found[str] = ""
    program: Annotated[Literal["none"] | ProgramName, tyro.conf.arg(name="for")] = "none"
    host: Host = "127.0.0.1"
    port: Port = 8_000
    api_key: tyro.conf.UseAppendAction[tuple[Text, ...]] = field(default=(), repr=False)
    open_to_all: bool = False
    allow_host: tyro.conf.UseAppendAction[tuple[Host, ...]] = ()
    origin: tyro.conf.UseAppendAction[tuple[Url, ...]] = ()
    alias: tyro.conf.UseAppendAction[tuple[Text, ...]] = ()
    any_model: bool = False
    running: Count = 16
    waiting: Count = 256
    waiting_per_key: Count = 64
    keep: Count = 8
    keep_idle: Seconds = 60.0
    share_prompts: bool = False
    open_models: Count = 4
    model_idle: Seconds = 600.0
