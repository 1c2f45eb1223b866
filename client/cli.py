"""The `client` command: use a swarm from the terminal. Owns terminal output and exit codes, nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, assert_never, cast

from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress

from client.terminal.commands import ApiCommand, Bench, ChatCommand, Generate, SwarmCommand
from client.terminal.setups import ProgramName, ask_server, setup
from client.tools.demo import command as demo
from client.tools.demo.command import Demo
from client.tools.train.options import TrainDraft
from swarm.base.cli import make_console
from swarm.base.errors import ConfigError, GenerationInterrupted
from swarm.base.extras import require
from swarm.base.logs import OneLineFormatter, set_up_logging
from swarm.base.plain_text import plain_for, plain_line
from swarm.base.program import exit_code
from swarm.directory.joining.command_line import read_command
from swarm.directory.joining.lan_choice import with_lan
from swarm.directory.joining.remembered import SwarmMemory
from swarm.directory.joining.resolve import AS_ASKED, SwarmFinder, with_swarm
from swarm.link.egress.streams import bracketed

if TYPE_CHECKING:
    from client.base.options import ConnectOptions, GenerateOptions, Options, ProofChoice
    from client.base.stats import Result

ClientCommand = Generate | ChatCommand | ApiCommand | Bench | TrainDraft | Demo


COMMANDS: Final[Mapping[str, type]] = {
    "generate": Generate,
    "chat": ChatCommand,
    "api": ApiCommand,
    "bench": Bench,
    "train-draft": TrainDraft,
    "demo": Demo,
}


def main() -> None:
    """Entry point."""
    sys.exit(exit_code("client", _main))


def _main() -> int:
    command = read_command("client", "Use a swarm.", COMMANDS)
    level, text = os.environ.get("CANOPY_LOG"), LineTrackingStream(sys.stdout)
    sys.stdout = cast("TextIO", text)
    form = f"{'%(asctime)s %(name)s' if level else 'client'}: %(message)s"
    set_up_logging(level or "WARNING", NoteFormatter(text, form))
    return run(command)


def run(command: ClientCommand) -> int:
    """Carry out a command; returns the exit code. An error is printed as one line."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its errors are raised as exceptions too
    return exit_code("client", lambda: _run(command))


def _run(command: ClientCommand) -> int:
    if isinstance(command, ApiCommand) and command.program != "none":
        return api_setup(command, command.program)
    return _carry_out(_with_swarm(command))


def _carry_out(command: ClientCommand) -> int:
    """Do what the command says; returns the exit code."""
    match command:
        case Generate():
            generate(command)
        case ChatCommand():
            return chat(command)
        case ApiCommand():
            api(command)
        case Bench():
            return asyncio.run(bench(command))
        case TrainDraft():
            train(command)
        case Demo():
            return demo.run(command)
        case _:
            assert_never(command)
    return 0


def _with_swarm(command: ClientCommand) -> ClientCommand:
    """The command with the swarm that it means; the demo has its own, and who trains may do without."""
    if isinstance(command, Demo) or (isinstance(command, TrainDraft) and not command.join):
        return command
    found, note = with_swarm(command, SwarmFinder(SwarmMemory.of_user(), os.environ))
    if note and sys.stderr.isatty():
        print(f"client: {note}", file=sys.stderr)  # noqa: T201 - the command line's own output
    if not isinstance(found, SwarmCommand):
        return found
    return with_lan(found, found.lan, make_console(stderr=True, soft_wrap=True).print, wants_model=True)


def generate(command: Generate) -> None:
    """Stream one text."""
    model, options = _connection(command)
    command = replace(command, options=replace(_with_schema(command), proof=_proof_choice(command)))
    command.options.check()
    prompt = (
        command.prompt if command.resume is not None else _prompt(command)
    )  # read outside the event loop, where Ctrl-C ends it
    asyncio.run(_generate(command, prompt, model, options))


async def _generate(command: Generate, prompt: str, model: str, options: ConnectOptions) -> None:
    from client.library.aio import (
        AsyncSwarm,  # torch and transformers take seconds to import: bad options are reported first
    )
    from client.terminal import report, resumption

    _settle_imports()
    interrupted = resumption.load(command.resume) if command.resume is not None else None
    result = None
    async with AsyncSwarm.connect(model, **options) as swarm:
        _tell_sampling(swarm.defaults)
        stream = (
            swarm.resume(interrupted) if interrupted is not None else swarm.stream(prompt, **asdict(command.options))
        )
        try:
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    print(plain_for(sys.stdout, piece.text), end="", flush=True)  # noqa: T201
                    result = piece.result
        except GenerationInterrupted as error:
            path = resumption.save(error, resumption.default_folder())
            if path is not None:
                error.add_note(f"go on with the same command and: --resume {shlex.quote(str(path))}")
            print(file=sys.stderr)  # noqa: T201 - its line begins below the text
            raise
    print()  # noqa: T201
    console = make_console(stderr=True)
    if command.proof is not None and result is not None and result.proof is not None:
        _save_proof(command.proof, result)
    if command.explain and result is not None:
        console.print(report.explanation(result.stats))
    if command.stats and result is not None:
        console.print(report.summary(result.stats), soft_wrap=True)
        for note in swarm.draft_notes:
            console.print(plain_line(note), soft_wrap=True, markup=False, highlight=False)
        console.print(report.waterfall(result.stats))


def _proof_choice(command: Generate) -> ProofChoice:
    """What the text is to prove.

    Raises:
        ConfigError: it cannot prove that, or not into this file.
    """
    if command.proof is None:
        if command.proof_rows:
            raise ConfigError("--proof-rows: rows go into the file that --proof names")
        return "none"
    if command.hedge:
        raise ConfigError(
            "--proof: a hedged text proves nothing, as its rows come from two machines; leave out --hedge"
        )
    if command.resume is not None:
        raise ConfigError("--proof: the first part of a resumed text is another session's; generate it anew")
    if not command.proof.parent.is_dir():
        raise ConfigError(f"--proof {command.proof}: its folder is not there")
    return "rows" if command.proof_rows else "signed"


def _save_proof(path: Path, result: Result) -> None:
    """Write the evidence, and say what it lacks."""
    proof = result.proof
    assert proof is not None, "it was asked for"
    for line in proof.problems:
        print(f"client: {plain_line(line)}", file=sys.stderr)  # noqa: T201
    if not proof.data:
        return
    try:
        path.write_bytes(proof.data)
    except OSError as error:
        raise ConfigError(f"--proof {path}: cannot be written ({error})") from error
    lacking = f"; {', '.join(peer[-8:] for peer in proof.unsigned)} signed nothing" if proof.unsigned else ""
    signed = f"{proof.signed_tokens} of {len(result.tokens)} tokens are signed{lacking}"
    print(f"client: {path}: {signed}", file=sys.stderr)  # noqa: T201


def _tell_sampling(defaults: GenerateOptions) -> None:
    """Say at a terminal how the checkpoint samples where no option does."""
    from client.base.options import described

    if defaults and sys.stderr.isatty():
        print(f"client: the model's own sampling: {described(defaults)}", file=sys.stderr)  # noqa: T201


def chat(command: ChatCommand) -> int:
    """Chat until the lines end; returns 1 if an answer failed."""
    model, options = _connection(command)
    command.options.check()
    from client.library.sync import Swarm
    from client.terminal.chat import ChatTerminal, typed_lines

    _settle_imports()
    console = make_console()
    is_terminal = sys.stdin.isatty() and console.is_terminal
    with (
        Swarm.connect(model, **options) as swarm,
        swarm.chat(command.system, **asdict(command.options)) as conversation,
    ):
        _tell_sampling(swarm.defaults)
        if is_terminal:
            console.print("/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves", style="dim")
        if not conversation.has_template:
            note = (
                "note: this model has no chat template; it goes on with a plain transcript and may not answer as asked"
            )
            console.print(note, style="dim", soft_wrap=True)
        terminal = ChatTerminal(conversation, console, command.options.seed, swarm.draft_notes)
        terminal.run(typed_lines(is_terminal))
    return 1 if terminal.failed else 0


def api_setup(command: ApiCommand, program: ProgramName) -> int:
    """Print a program's configuration for the server that runs; needs no swarm."""
    host = "127.0.0.1" if command.host in {"0.0.0.0", "::"} else command.host
    model = ask_server(f"http://{bracketed(host)}:{command.port}", next(iter(_api_keys(command)), None))
    print(setup(program, model), end="")  # noqa: T201 - the command line's own output
    return 0


def _api_keys(command: ApiCommand) -> tuple[str, ...]:
    return tuple(key for key in (*command.api_key, *os.environ.get("CANOPY_API_KEY", "").split()) if key)


def api(command: ApiCommand) -> None:
    """Serve until Ctrl-C."""
    require("api", "client api")
    from client.api.command import ServerOptions, model_sources, serve_api
    from client.api.queue import QueueLimits
    from client.api.sessions import SessionLimits
    from client.api.swarm_backend import BackendLimits, ModelLimits
    from client.api.swarm_directory import SwarmDirectory

    options = ServerOptions(
        host=command.host,
        port=command.port,
        keys=_api_keys(command),
        open_to_all=command.open_to_all,
        hosts=command.allow_host,
        origins=command.origin,
        aliases=command.alias,
        any_model=command.any_model,
        limits=BackendLimits(
            QueueLimits(command.running, command.waiting, command.waiting_per_key),
            SessionLimits(command.keep, command.keep_idle, command.share_prompts),
            ModelLimits(command.open_models, command.model_idle),
        ),
    )
    options.check()
    _settle_imports()
    connect = command.connect_options()
    models = (*([] if command.model is None else [command.model]), *command.more)
    sources = model_sources(models, connect, SwarmDirectory(connect), all_listed=command.model_why != AS_ASKED)
    console = make_console(soft_wrap=True)
    asyncio.run(serve_api(sources, options, lambda line: console.print(line, markup=False, highlight=False)))


async def bench(command: Bench) -> int:
    """Measure prompt by prompt; returns 1 if a text differs where it must not."""
    if command.plot is not None:
        require("plot", "--plot")
    model, options = _connection(command)
    from client.library.aio import AsyncSwarm
    from client.tools.bench import plot as plotting
    from client.tools.bench import runner as measuring

    command.options.check()
    prompts = measuring.read_prompts(command.prompts, command.limit)
    ways = measuring.ways(command.options, command.compare, plotted=command.plot is not None)
    if command.plot is not None:
        plotting.check(command.plot)
    if command.json is not None:
        _check_writable(command.json)
    _settle_imports()
    console = make_console()
    measured = measuring.Measured(
        model=model, draft=", ".join(map(str, command.draft)) or "none", options=command.options
    )
    async with AsyncSwarm.connect(model, **options) as swarm:
        prompts = measuring.cut(swarm, prompts, command.prompt_tokens)
        await measuring.warm_up(swarm)
        measured.route = [f"{hop.peer} {hop.span}" for hop in (await swarm.route()).hops]
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
            task = progress.add_task("prompts", total=len(prompts) * len(ways))
            async for prompt, way, runs in measuring.measure(swarm, prompts, ways):
                measured.runs += runs
                measured.skipped += [] if runs else [prompt.name]
                progress.update(task, advance=1, description=escape(f"{prompt.name[-30:]}, {way}"))
    if not measured.runs:
        raise ConfigError("no prompt fits the model's context; cut them with --prompt-tokens")
    for shown in measuring.report(measured):
        console.print(shown, soft_wrap=isinstance(shown, str))
    if command.plot is not None:
        points, parts = measuring.points(measured.runs), measuring.usual_parts(measured.runs)
        console.print(plotting.curves(points), plotting.waterfall(parts))
        plotting.draw(command.plot, f"{model} · {command.draft}", points, parts)
        console.print(f"drawn: {command.plot}", soft_wrap=True)
    if command.json is not None:
        _write(command.json, measured.to_json())
    if measured.is_wrong:
        print("client: a text differs from plain decoding's, which must not be; please report it", file=sys.stderr)  # noqa: T201
    return 1 if measured.is_wrong else 0


def _settle_imports() -> None:
    """Quiet the libraries that were imported, and keep their objects out of garbage collection."""
    from swarm.base.library_logging import quiet_libraries
    from swarm.base.process_limits import freeze_imports

    quiet_libraries()
    freeze_imports()


def train(command: TrainDraft) -> None:
    """Train a draft."""
    from client.tools.train.command import train_draft
    from swarm.base.library_logging import quiet_libraries

    quiet_libraries()
    train_draft(command, make_console(stderr=True))


def _with_schema(command: Generate) -> Options:
    """The options, under the grammar of a schema's file if one is named.

    Raises:
        ConfigError: the file cannot be read.
    """
    if command.json_schema is None:
        return command.options
    from client.base.options import Grammar

    try:
        text = command.json_schema.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--json-schema {command.json_schema}: cannot be read ({error})") from error
    return replace(command.options, grammar=Grammar("json_schema", text))


def _prompt(command: Generate) -> str:
    from client.base.options import check_text

    if command.prompt == "-" and sys.stdin.isatty():
        print("reading the prompt from standard input; Ctrl-D ends it", file=sys.stderr)  # noqa: T201
    try:
        return check_text(sys.stdin.read() if command.prompt == "-" else command.prompt, "prompt")
    except UnicodeDecodeError:
        raise ConfigError("prompt: is not valid text (UTF-8)") from None


def _check_writable(path: Path) -> None:
    """Check, before a long measurement, that its results can be written.

    Raises:
        ConfigError: they cannot.
    """
    place = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(place, os.W_OK):
        why = "is a folder" if path.is_dir() else "no permission" if place.exists() else "no such folder"
        raise ConfigError(f"{path}: cannot be written ({why})")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def _connection(command: SwarmCommand) -> tuple[str, ConnectOptions]:
    """The model, and the keyword arguments of `AsyncSwarm.connect`.

    Raises:
        ConfigError: no model is named.
    """
    model = command.model
    if model is None:
        raise ConfigError("which model? name a hub id, folder or GGUF file, use an invite, or set CANOPY_MODEL")
    return model, command.connect_options()


class LineTrackingStream:
    """An output stream that knows whether its last line is open.

    Attributes:
        is_open: whether the last text that was written did not end its line.
    """

    def __init__(self, stream: TextIO) -> None:
        self.is_open = False
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, as a stream does; returns the characters written."""
        if text:
            self.is_open = not text.endswith("\n")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a stream
        """Any other attribute of the stream."""
        return getattr(self._stream, name)


class NoteFormatter(OneLineFormatter):
    """Formats log records; begins a new line where the text's last line is open."""

    def __init__(self, text: LineTrackingStream, fmt: str) -> None:
        super().__init__(fmt)
        self._text = text

    def format(self, record: logging.LogRecord) -> str:
        """The log line, after a line break where one is missing."""
        start, self._text.is_open = "\n" * self._text.is_open, False
        return start + super().format(record)


if __name__ == "__main__":
    main()
