"""The command `swarm`: bootstrap peers, status, routes, plans, health. Owns options, output and exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm.base.cli import fit, make_console
from swarm.base.cli_types import File, Found, Host, MegabitsPerSecond, Model, NetworkKeyFile, Peer, Port, headed
from swarm.base.errors import ConfigError, UnknownModel
from swarm.base.extras import require
from swarm.base.ids import ModelIdentity, shown_swarm
from swarm.base.logs import OneLineFormatter, set_up_logging
from swarm.base.process_limits import raise_file_limit
from swarm.base.program import exit_code
from swarm.base.tasks import TaskScope
from swarm.commands.plan import ShowPlan, plan
from swarm.commands.private_swarm import Private, private
from swarm.commands.route import ShowRoute, route, short
from swarm.commands.verify import LoadInClass, VerifyText, load_plain, verify_text
from swarm.directory.coverage import Coverage, cover, fill_lines, serve_line, shown_address
from swarm.directory.dht.addresses import OPEN_SWARM, Membership
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.identity import default_identity_path
from swarm.directory.joining.command import (
    ForgetSwarm,
    ListSwarms,
    MakeInvite,
    bootstrap_membership,
    forget,
    invite,
    list_swarms,
)
from swarm.directory.joining.command_line import read_command
from swarm.directory.joining.remembered import SwarmMemory
from swarm.directory.joining.resolve import SwarmFinder, with_swarm
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import Registry, name_models, read_models
from swarm.doctor.options import Doctor
from swarm.health.options import Health
from swarm.health.top.options import Top
from swarm.reach.paths.tls_offer import TlsOffer
from swarm.reach.relay.lending import NO_RELAY, lend, lent_settings, offered_hosts
from swarm.routing.costs import sweep_ms

BOOTSTRAP_PORT = 31_337
RELAY_PORT = 31_338
MODELS_LOOKED_UP = 64
"""Models whose records `swarm status` reads, at most; those known for longest come first."""
MODELS_SHOWN = 20
"""Models that it prints, at most; those that somebody serves come first."""
_TITLES = ("peer", "name", "layers", "state", "address", "ms per sweep (1/8/64)", "KV free/total", "class", "version")
_WHOLE = frozenset(map(_TITLES.index, ("peer", "layers", "state", "address")))
"""Columns whose cells must not be wrapped."""
_SHAREABLE = frozenset(map(_TITLES.index, ("class", "version")))
"""Columns that are printed once, above the table, where a terminal is narrow and all nodes agree."""


@headed(
    swarm=("join", "network_key", "identity"),
    network=("host", "port", "announce_address", "allow_private", "lan"),
    relay=("relay_port", "relay_mbit", "tls_port"),
)
@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Run a bare DHT peer, through which nodes and clients find each other.

    Attributes:
        host: IP address to listen on; 0.0.0.0 is every one of this machine.
        port: TCP port; 0 takes any free one.
        identity: file with this peer's key, made if missing (default: bootstrap.key beside the machine's identity).
        announce_address: IP address or name under which others reach this machine, where that differs
            (default: as found).
        join: multiaddress of another peer to join, such as a second bootstrap peer, or an invite (also without --join);
            may be repeated (default: none).
        network_key: file of a private swarm's network key, made if missing (default: an invite's; without one the swarm
            is open to everybody).
        allow_private: check whether nodes at private addresses can be reached also where this machine has a public
            address.
        relay_port: TCP port of the relay that is lent to nodes which nobody can dial; 0 takes any free one
            (default: 31338, or a free one where that is taken).
        relay_mbit: Mbit/s that the relay carries at most, both ways counted; 0 lends none.
        tls_port: TCP port that offers all of this in TLS, best 443, for machines whose network lets nothing else out
            (default: none).
        lan: whether the swarm is announced in the local network, so that machines there find it.
    """

    host: Host = "0.0.0.0"
    port: Port = BOOTSTRAP_PORT
    identity: File | None = None
    announce_address: Host | None = None
    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    network_key: File | None = None
    allow_private: bool = False
    relay_port: Port | None = None
    relay_mbit: MegabitsPerSecond = 20.0
    tls_port: Port | None = None
    lan: bool = True


@dataclass(frozen=True, slots=True)
class ShowStatus:
    """Print who serves what, and which layers nobody serves.

    Attributes:
        model: name or fingerprint of one model (default: all of them).
        join: multiaddress of a peer of the swarm, or an invite (also without --join); may be repeated (default: the
            swarm joined last).
        membership: of the swarm; not an option.
    """

    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    model: tyro.conf.Positional[Model | None] = None
    network_key: NetworkKeyFile = None
    membership: Found[Membership] = OPEN_SWARM


ABOUT = "Start, watch and plan a swarm: the machines that run a large language model together, layer by layer."

COMMANDS: Final[Mapping[str, type]] = {
    "bootstrap": Bootstrap,
    "status": ShowStatus,
    "route": ShowRoute,
    "plan": ShowPlan,
    "health": Health,
    "private": Private,
    "top": Top,
    "doctor": Doctor,
    "verify": VerifyText,
    "invite": MakeInvite,
    "list": ListSwarms,
    "forget": ForgetSwarm,
}
AnyCommand = (
    Bootstrap
    | ShowStatus
    | ShowRoute
    | ShowPlan
    | Health
    | Private
    | Top
    | Doctor
    | VerifyText
    | MakeInvite
    | ListSwarms
    | ForgetSwarm
)
_Looking = TypeVar("_Looking", ShowStatus, ShowRoute, ShowPlan, Health, Top)


def main(load: LoadInClass = load_plain) -> None:
    """Entry point.

    Args:
        load: loads what `verify` recomputes by; `node.cli` gives a node's own loader.
    """
    sys.exit(exit_code("swarm", partial(_main, load)))


def _main(load: LoadInClass) -> int:
    command = read_command("swarm", ABOUT, COMMANDS)
    set_up_logging("WARNING", OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
    raise_file_limit()
    return _carry_out(command, make_console(soft_wrap=True), load)


def run(command: AnyCommand) -> int:
    """Run a command; returns the exit code."""
    return exit_code("swarm", lambda: _carry_out(command, make_console(soft_wrap=True)))


def _carry_out(command: AnyCommand, console: Console, load: LoadInClass = load_plain) -> int:  # noqa: C901 - a table of commands
    memory = SwarmMemory.of_user()
    match command:
        case Bootstrap():
            asyncio.run(bootstrap(command, console, memory))
        case ShowStatus():
            asyncio.run(status(_meant(command, memory), console))
        case ShowRoute():
            asyncio.run(route(_meant(command, memory), console))
        case ShowPlan():
            asyncio.run(plan(_meant(command, memory), console))
        case Health():
            require("health", "swarm health")
            found = command if command.url is not None else _meant(command, memory)
            asyncio.run(_health(replace(found, mqtt=command.mqtt) if command.embedded_broker else found, console))
        case Private():
            private(command, console)
        case Top():
            asyncio.run(_top(_meant(command, memory) if command.join else command, console))
        case MakeInvite():
            invite(command, memory, os.environ, console)
        case ListSwarms():
            list_swarms(memory, console)
        case ForgetSwarm():
            forget(command, memory, console)
        case Doctor():
            return _doctor(command, console)
        case VerifyText():
            return _verify(command, console, load)
    return 0


def _meant(command: _Looking, memory: SwarmMemory) -> _Looking:
    """The command with the swarm that it looks at."""
    finder = SwarmFinder(memory, os.environ, is_look=True)
    found, note = with_swarm(command, finder, wants_model=False)
    if note and sys.stderr.isatty():
        make_console(stderr=True, soft_wrap=True).print(Text(f"swarm: {note}"))
    return found


async def bootstrap(command: Bootstrap, console: Console, memory: SwarmMemory) -> None:
    """Stay in the DHT until SIGINT or SIGTERM."""
    from swarm.directory.joining.lan import announced, keep_announced  # brings mDNS, which nothing else here needs

    join, membership = bootstrap_membership(command.join, command.network_key, memory)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    config = DhtConfig(
        join=join,
        host=command.host,
        port=command.port,
        announce_host=command.announce_address,
        identity_path=command.identity or default_identity_path().with_name("bootstrap.key"),
        allow_private=command.allow_private,
        membership=membership,
    )
    async with AsyncExitStack() as stack:
        opened = DhtRegistry.open(config)
        port, mbit = command.relay_port, command.relay_mbit
        lent = lent_settings(opened.peer_id, mbit, host=command.host, port=port, usual_port=RELAY_PORT)
        if lent is not None and membership.network is not None:
            lent = replace(lent, members=membership.network.presence.hex())
        if command.tls_port is not None and lent is None:
            raise ConfigError(NO_RELAY)
        registry = await stack.enter_async_context(opened)
        await registry.prove_addresses()
        addresses = registry.join_addresses()
        _print_joined(registry, addresses, console, is_private=membership.network is not None)
        if lent is not None:
            lending = lend(registry, lent, partial(_beside, registry))
            if command.tls_port is not None:
                offer = TlsOffer(command.tls_port, command.host, membership.network, command.allow_private)
                lending = offer.lend(registry, lent, partial(_beside, registry))
            relay = await stack.enter_async_context(lending)
            console.print(Text(f"lends a relay on port {relay.port}: up to {mbit:g} Mbit/s"))
            for address in registry.join_addresses()[len(addresses) :]:
                console.print(Text(f"for networks that let nothing else out: {address}"))
        async with TaskScope() as scope:
            is_told = command.lan and membership.network is None  # strangers could not join a private one
            said = announced(addresses, join, swarm=registry.swarm_id) if is_told else None
            if said is not None:
                scope.spawn(keep_announced(said))
            await _until(stop, registry)
        console.print(Text("leaving"))


def _print_joined(registry: DhtRegistry, addresses: list[str], console: Console, *, is_private: bool) -> None:
    console.print(Text(f"DHT peer {registry.peer_id}; a node joins with:"))
    console.print(Text(serve_line("MODEL", "0-20", addresses)))
    for address in addresses[1:]:
        tried = "also at" if registry.is_proven(address) else "listens, though no other machine has tried it, at"
        console.print(Text(f"{tried} {address}"))
    if registry.swarm_id is not None:
        console.print(Text(f"it is of {shown_swarm(registry.swarm_id)}"))
    if is_private:
        console.print(Text("the swarm is private: members need its network key, which `swarm invite` passes on"))


async def _beside(registry: Registry, port: int) -> list[str]:
    """Under which addresses others reach another port of this machine: as they reach its DHT peer."""
    return [f"{host}:{port}" for host in offered_hosts(registry.join_addresses())]


async def _health(command: Health, console: Console) -> None:
    from swarm.health.service import health  # brings a web server and a broker's client, which nothing else here needs

    webhooks = (*command.webhook, *os.environ.get("CANOPY_WEBHOOK", "").split())
    secret = os.environ.get("CANOPY_WEBHOOK_SECRET") or None
    await health(
        replace(command, webhook=webhooks, webhook_secret=secret),
        console,
    )


async def _top(command: Top, console: Console) -> None:
    from swarm.health.top.command import top  # brings an HTTP client, which nothing else here needs

    await top(command, console)


def _doctor(command: Doctor, console: Console) -> int:
    from swarm.doctor.command import run_doctor  # brings every probe, which nothing else here needs

    return run_doctor(command, console)


def _verify(command: VerifyText, console: Console, load: LoadInClass) -> int:
    from swarm.trust.claims import read_claims  # brings torch, which nothing else here needs

    return verify_text(command, console, read_claims, load)


async def _until(stop: asyncio.Event, registry: DhtRegistry) -> None:
    async def ended() -> None:
        await registry.wait_closed()
        if not stop.is_set():
            stop.set()
            await registry.models()  # raises: says why it has ended

    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(ended())
        await stop.wait()
        watch.cancel()


async def status(command: ShowStatus, console: Console) -> None:
    """Print one table per model and the commands that fill its gaps."""
    if not command.join:
        raise ConfigError("which swarm? use an invite, or give a peer's address with --join")
    config = DhtConfig(join=command.join, client_mode=True, membership=command.membership)
    async with DhtRegistry.open(config) as registry:
        await show_status(registry, command, console)


async def show_status(registry: Registry, command: ShowStatus, console: Console) -> None:
    """The same through an open registry."""
    models = _chosen(await registry.models(), command.model)
    looked_up = models[:MODELS_LOOKED_UP]
    listing = await read_models(registry, looked_up)
    found = [cover(one, listing.records[one.fingerprint]) for one in looked_up if one.fingerprint in listing.records]
    found.sort(key=_is_idle)  # stable: of equals the longest known stay first
    if not models:
        console.print(Text("nobody serves anything here yet; a node joins with:"))
        console.print(Text(serve_line("MODEL", "0-20", command.join)))
    for coverage in found[:MODELS_SHOWN]:
        report(coverage, command.join, console)
    failed = [one for one in looked_up if one.fingerprint in listing.failed]
    if failed:
        console.print(Text(f"could not be read: {name_models(failed)}: {listing.failed[failed[0].fingerprint]}"))
    hidden = [one.model for one in found[MODELS_SHOWN:]] + models[MODELS_LOOKED_UP:]
    if hidden:
        console.print(Text(f"also listed, and not shown: {name_models(hidden)}; `swarm status MODEL` shows one"))


def _is_idle(coverage: Coverage) -> bool:
    """Whether no node serves the model now."""
    return not any(record.state is NodeState.SERVING for record in coverage.records)


def _chosen(models: Sequence[ModelIdentity], selected: str | None) -> list[ModelIdentity]:
    chosen = [model for model in models if selected is None or model.is_called(selected)]
    if models and not chosen:
        raise UnknownModel(f"nobody serves {selected!r}; this swarm has: {name_models(models)}")
    return chosen


def report(coverage: Coverage, join: Sequence[str], console: Console) -> None:
    """Print one model: its nodes, then what is missing. Names come from strangers, so nothing is read as markup."""
    model = coverage.model
    console.print(Text(f"{model.name} · fingerprint {model.fingerprint[:12]} · {model.num_layers} layers"))
    rows = list(map(_cells, coverage.records))
    table = _table(rows, range(len(_TITLES)))
    if not fit(table, console):
        shared = {column for column in _SHAREABLE if len({row[column] for row in rows}) == 1}
        for column in sorted(shared):
            console.print(Text(f"{_TITLES[column]} of all: {rows[0][column]}"))
        table = _table(rows, [column for column in range(len(_TITLES)) if column not in shared])
        fit(table, console)
    console.print(table, soft_wrap=False)
    if coverage.complete:
        console.print(Text("every layer is served"))
    for gap, line in zip(coverage.missing, fill_lines(coverage, join), strict=True):
        console.print(Text(f"nobody serves {gap.describe(model.num_layers)}; this fills the gap:\n{line}"))


def _table(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> Table:
    table = Table()
    for column in columns:
        table.add_column(_TITLES[column], overflow="fold", no_wrap=column in _WHOLE)
    for row in rows:
        table.add_row(*(Text(row[column]) for column in columns))
    return table


def _cells(record: NodeRecord) -> list[str]:
    shown = (1, 8, 64)
    speeds = {nodes: sweep_ms(record, nodes) for nodes in shown} if record.bucketed else dict(record.sweep_ms)
    return [
        short(record.peer),
        record.name or "",
        record.span.describe(record.model.num_layers).partition(" ")[2],
        record.state.value,
        shown_address(record),
        " / ".join(f"{speeds[nodes]:.1f}" if nodes in speeds else "–" for nodes in shown),
        f"{record.kv_tokens_free:,} / {record.kv_tokens_total:,}",
        record.numeric_class,
        record.version,
    ]


if __name__ == "__main__":
    main()
