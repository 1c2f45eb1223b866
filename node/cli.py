"""The `node` command (also `swarm-node`, where Node.js owns the name): serve layers of a model to the swarm."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from node.life import nodejs
from node.life.autostart.recorder import NodeRecorder
from node.life.autostart.service import InstallService, UninstallService, install, this_machine, uninstall
from node.life.autostart.show import ShowNodeStatus, show
from node.life.autostart.state_file import running_pids
from node.life.kept_files import ShowFiles, files
from node.model.config import ServeConfig
from swarm.base.cli import make_console
from swarm.base.cli_types import File
from swarm.base.errors import ConfigError, RegistryError
from swarm.base.layers import Span
from swarm.base.logs import OneLineFormatter, set_up_logging
from swarm.base.process_limits import raise_file_limit
from swarm.base.program import exit_code
from swarm.base.tasks import TaskScope
from swarm.directory.dht.addresses import OPEN_SWARM
from swarm.directory.identity import Identity, default_identity_path
from swarm.directory.joining.command_line import read_command
from swarm.directory.joining.invite import is_invite
from swarm.directory.joining.lan_choice import NOT_ASKED, can_ask, with_lan
from swarm.directory.joining.remembered import SwarmMemory
from swarm.directory.joining.resolve import SwarmFinder, with_swarm
from swarm.doctor.options import Doctor

if TYPE_CHECKING:
    from swarm.compute.ragged_batch import RaggedModel

_NONE_BEFORE_TLS_1_3 = "ECDHE-RSA-AES128-GCM-SHA256"
"""gRPC takes no lowest version, and its list is of TLS 1.2's suites only: none that goes with a node's certificate."""


@dataclass(frozen=True, slots=True)
class RotateIdentity:
    """Make a new key for this machine; what it contributed goes on under the new peer id.

    Attributes:
        identity: identity file (default: this machine's). No node may run under it.
    """

    identity: File | None = None


LocalCommand = ShowNodeStatus | ShowFiles | InstallService | UninstallService | RotateIdentity
COMMANDS: Final[Mapping[str, type]] = {
    "serve": ServeConfig,
    "status": ShowNodeStatus,
    "files": ShowFiles,
    "rotate": RotateIdentity,
    "install": InstallService,
    "uninstall": UninstallService,
    "doctor": Doctor,
}


def main() -> None:
    """Run the command line; errors are one line and a non-zero exit."""
    sys.exit(exit_code("node", _main))


def swarm_main() -> None:
    """Run the command `swarm`, whose `verify` computes as nodes do."""

    def load(name: str, numeric_class: str, layers: Span | None) -> RaggedModel:
        from node.model.in_class import load_in_class  # brings torch, which nothing else there needs

        return load_in_class(name, numeric_class, layers)

    from swarm.cli import main as run_swarm  # brings gRPC, whose suites `serve` chooses first

    run_swarm(load)


def _main() -> int:
    meant_nodejs = nodejs.explain(sys.argv[1:], nodejs.find_nodejs(Path(sys.argv[0])))
    if meant_nodejs is not None:
        print(meant_nodejs, file=sys.stderr)  # noqa: T201 - the command line's own output
        return 2
    command = read_command("node", "Host some layers of a large language model for a swarm.", COMMANDS)
    match command:
        case ServeConfig():
            return serve(command)
        case Doctor():
            return doctor(command)
        case _:
            return look_after(command)


def look_after(command: LocalCommand) -> int:
    """Do what needs no swarm; returns the exit status."""
    return exit_code("node", lambda: _look_after(command, make_console(soft_wrap=True).print))


def _look_after(command: LocalCommand, say: Callable[[str], None]) -> int:
    match command:
        case ShowNodeStatus():
            return show(command, time.time(), say)
        case ShowFiles():
            files(command, lambda: bool(running_pids()), make_console())
        case InstallService():
            config, environment = _as_service(command.serve, keeps=not command.dry_run)
            machine = this_machine(sys.platform, os.environ | environment)
            install(replace(command, serve=config), machine, say)
        case RotateIdentity():
            rotate(command, say)
        case UninstallService():
            uninstall(command, this_machine(sys.platform, os.environ), say)
    return 0


def rotate(order: RotateIdentity, say: Callable[[str], None]) -> None:
    """Make a new key.

    Raises:
        SwarmError: there is none to replace, or it is in use.
    """
    path = (order.identity or default_identity_path()).expanduser()
    old = Identity.load(path)
    if old is None:
        raise ConfigError(f"there is no identity {path} yet; `node serve` makes one")
    new = old.rotate()
    say(f"{old.peer_id} is {new.peer_id} from now on; `node serve` tells the swarm's health pages")
    say(f"the old key stays in {path.with_suffix(f'.{old.peer_id}')}: keep it secret, or delete it")


def serve(config: ServeConfig) -> int:
    """Serve until a signal or a failure; returns the exit status."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its messages come as exceptions too
    os.environ["GRPC_SSL_CIPHER_SUITES"] = _NONE_BEFORE_TLS_1_3
    set_up_logging(os.environ.get("CANOPY_LOG", "WARNING"), OneLineFormatter("%(asctime)s %(name)s: %(message)s"))
    raise_file_limit()
    return exit_code("node", lambda: _serve(config))


def _serve(config: ServeConfig) -> int:
    config, note = with_swarm(config, SwarmFinder(SwarmMemory.of_user(), os.environ, _own_peers(config)))
    config.check()
    if note:
        make_console(soft_wrap=True).print(note)
    if not config.insecure:
        config = with_lan(config, config.lan, make_console(soft_wrap=True).print)
    asyncio.run(_run(config))
    return 0


def _own_peers(config: ServeConfig) -> list[str]:
    """This node's own peer id, if it has one yet: a swarm of which it is the only peer cannot be joined."""
    own = Identity.load(config.identity or default_identity_path())
    return [] if own is None else [own.peer_id]


def _as_service(config: ServeConfig, *, keeps: bool) -> tuple[ServeConfig, dict[str, str]]:
    """The options that a service is started with, and what its environment has besides this one.

    An invite to an open swarm is kept as it is: it names the swarm, whose peers that this machine met by then are tried
    beside those of the invite. One to a private swarm becomes plain options, and its key a file. What nobody typed is
    left to each start, which takes the swarm that was joined last by then.

    Args:
        config: as typed.
        keeps: whether the key's file is written, and not only named.
    """
    words = [*config.join, *([config.model] if config.model is not None and is_invite(config.model) else [])]
    if not words:
        return replace(config, mqtt=config.mqtt or os.environ.get("CANOPY_MQTT")), {}
    memory = SwarmMemory.of_user()
    found, _ = with_swarm(config, SwarmFinder(memory, os.environ))
    key = found.membership.network
    if key is None:
        if len(words) == 1 and is_invite(words[0]) and found.membership.is_certain:
            return replace(found, join=()), {"CANOPY_JOIN": words[0]}
        return found, {}
    if memory.path is None:
        raise ConfigError("nothing is remembered here (CANOPY_SWARMS=none): give the key's file with --network-key")
    if keeps:
        memory.keep_key(key)
    return replace(found, network_key=memory.key_path(key.name), membership=OPEN_SWARM), {}


def doctor(options: Doctor) -> int:
    """Look for what is in the way; returns the exit status."""
    from swarm.doctor.command import run_doctor  # brings every probe, which `serve` does not need

    set_up_logging("WARNING", OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
    return run_doctor(options, make_console(soft_wrap=True))


async def _run(config: ServeConfig) -> None:
    from node.life.serve import Node  # torch and transformers take seconds to import: bad options are reported before
    from swarm.base.library_logging import quiet_libraries
    from swarm.base.process_limits import freeze_imports

    quiet_libraries()
    freeze_imports()
    console = make_console(soft_wrap=True)
    _cancel_on_signals()
    try:
        async with _speaking(console) as say:
            node = Node(config, say)
            recorder = NodeRecorder(config.identity or default_identity_path(), node.facts, config.max_mbit)
            with recorder.recording():
                async with TaskScope() as scope:
                    scope.spawn(recorder.keep())
                    async with node:
                        console.print(f"serving at {node.address} as {node.peer_id}")
                        console.print(f"the next machine joins with:\n  {node.join_line()}")
                        if not config.join and config.lan == "ask" and not config.insecure and not can_ask():
                            console.print(NOT_ASKED)
                        await node.wait_failed()
                raise RegistryError("this node's part of the DHT ended, so nobody can find it any more; start it again")
    except asyncio.CancelledError:
        sys.stdout.flush()
        os._exit(0)  # all is closed; but a thread that loads or downloads would be waited for


@asynccontextmanager
async def _speaking(console: Console) -> AsyncIterator[Callable[[str], None]]:
    """How the node speaks while it starts and runs: with bars on a terminal, in plain lines elsewhere."""
    from node.life.summary import TerminalSay

    if not console.is_terminal:
        yield console.print
        return
    with TerminalSay(console) as say:
        yield say


def _cancel_on_signals() -> None:
    """The first signal leaves politely, the second at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "called within asyncio.run"

    def leave() -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, os._exit, 1)
        task.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, leave)


if __name__ == "__main__":
    main()
