"""The `client` command: generate text through a swarm. Owns terminal output and exit codes, nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Annotated

import tyro
from rich.console import Console

from client import report
from client.options import Options
from swarm.errors import ConfigError, GenerationInterrupted, SwarmError


@dataclass(frozen=True, slots=True)
class Generate:
    """Generate text through a swarm; it streams to standard output.

    Attributes:
        model: hub id or folder of the target (default: CANOPY_MODEL); only its config and tokenizer are read.
        prompt: text to continue; - or nothing reads standard input.
        join: multiaddress of a peer of the swarm; may be repeated.
        draft: hub id or folder of a draft model with the same tokenizer, or none.
        revision: branch, tag or commit of a hub model.
        threads: CPU threads for the draft model (default: all cores).
        stats: print where the time went, to standard error.
        options: how to generate.
    """

    model: tyro.conf.Positional[str | None] = None
    prompt: str = "-"
    join: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    draft: str = "none"
    revision: str | None = None
    threads: int | None = None
    stats: bool = False
    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)


def main() -> None:
    """Entry point."""
    command = tyro.extras.subcommand_cli_from_dict({"generate": Generate}, prog="client", description="Use a swarm.")
    logging.basicConfig(level=os.environ.get("CANOPY_LOG", "WARNING"), format="%(asctime)s %(name)s: %(message)s")
    sys.exit(run(command))


def run(command: Generate) -> int:
    """Carry out a command; the exit code. Errors are one line."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it has to say comes as exceptions too
    try:
        asyncio.run(generate(command))
    except GenerationInterrupted as error:
        print(f"\nclient: {error}", file=sys.stderr)  # noqa: T201 - the command line's own output
        return 1
    except SwarmError as error:
        print(f"client: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def generate(command: Generate) -> None:
    """Stream one text."""
    model = command.model or os.environ.get("CANOPY_MODEL")
    if model is None:
        raise ConfigError("which model? name a hub id or folder, or set CANOPY_MODEL")
    from client.aio import AsyncSwarm  # torch and transformers take seconds to import: bad options are told before
    from swarm.quiet import quiet_libraries

    quiet_libraries()
    prompt = sys.stdin.read() if command.prompt == "-" else command.prompt
    draft = None if command.draft == "none" else command.draft
    connecting = AsyncSwarm.connect(
        model, peers=command.join, draft=draft, revision=command.revision, threads=command.threads
    )
    result = None
    async with connecting as swarm:
        async for piece in swarm.stream(prompt, **asdict(command.options)):
            print(piece.text, end="", flush=True)  # noqa: T201
            result = piece.result
    print()  # noqa: T201
    if command.stats and result is not None:
        console = Console(stderr=True, highlight=False)
        console.print(report.summary(result.stats), soft_wrap=True)
        console.print(report.waterfall(result.stats))


if __name__ == "__main__":
    main()
