"""The command `doctor`: the checks with this machine's own probes, and the exit status."""

from __future__ import annotations

import asyncio
import getpass
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from swarm.discovery.dht.addresses import Membership
from swarm.discovery.identity import default_identity_path
from swarm.doctor.broker import BrokerCheck, login
from swarm.doctor.device import DeviceCheck, DtypeCheck, KernelCheck, ask_torch, find_card
from swarm.doctor.diagnosis import DoctorCheck, Level, Shared, examine
from swarm.doctor.directory import ClockCheck, DhtCheck, ReleaseCheck, clock_service
from swarm.doctor.hub import HubCheck, ask_hub, hub_cache
from swarm.doctor.machine import (
    DiskCheck,
    FileLimitCheck,
    IdentityCheck,
    MemoryCheck,
    file_system_of,
    hard_file_limit,
    measure_memory,
)
from swarm.doctor.model_facts import ModelFacts
from swarm.doctor.network import (
    DnsCheck,
    Ipv6Check,
    ProxyCheck,
    connect,
    has_ipv6_route,
    own_addresses,
    resolve,
    speaks_socks,
)
from swarm.doctor.options import Doctor
from swarm.doctor.ports import FirewallCheck, PortCheck, listening_program, read_file, try_bind
from swarm.doctor.processes import run_program
from swarm.doctor.redaction import PrivateWords, private_words
from swarm.doctor.relays import RelayWord, ask_relays
from swarm.doctor.report import as_json, redacted, show
from swarm.doctor.router import MappingCheck, RelayCheck, RouterCheck, find_routers
from swarm.doctor.software import (
    DaemonCheck,
    VersionsCheck,
    find_daemon,
    installed_version,
    package_requirements,
    python_version,
    run_daemon,
)
from swarm.doctor.swarm_view import SwarmView, look_at_swarm, own_peer
from swarm.errors import SwarmError
from swarm.joining.invite import is_invite
from swarm.joining.remembered import SwarmMemory
from swarm.joining.resolve import SwarmFinder, with_swarm
from swarm.telemetry.broker_address import parse_broker

HUB: Final = ("huggingface.co", 443)
THE_HUB: Final = "the hub"


@dataclass(frozen=True, slots=True)
class Checkup:
    """All that is looked at, and the answers that several checks share.

    Attributes:
        checks: in the order in which they are shown.
        shared: to be run beside them.
    """

    checks: Sequence[DoctorCheck]
    shared: Sequence[Shared[Any]]


async def doctor(options: Doctor, console: Console, environment: Mapping[str, str] = os.environ) -> int:
    """Look at everything and print it.

    Args:
        options: of the command line.
        console: where to.
        environment: the process's variables.

    Returns:
        The exit status: 1 where something is in the way, else 0.
    """
    began = time.monotonic()
    options, refusal = meant(options, environment)
    checkup = make_checkup(options, environment, refusal)
    total = len(checkup.checks)
    is_silent = options.json or not console.is_terminal
    with nullcontext() if is_silent else console.status("looking") as status:

        def on_progress(done: int) -> None:
            if status is not None:
                status.update(f"looking: {done} of {total}")

        found = await examine(checkup.checks, checkup.shared, on_progress=on_progress)
    shown = redacted(found, private_of(options, environment))
    if options.json:
        console.print(as_json(shown, time.monotonic() - began), soft_wrap=True)
    else:
        show(shown, console, verbose=options.verbose)
    return int(any(one.level is Level.TROUBLE for one in found))


def meant(options: Doctor, environment: Mapping[str, str], memory: SwarmMemory | None = None) -> tuple[Doctor, str]:
    """The options with the swarm that is meant by them, by variables or by memory; nothing is remembered here.

    Returns:
        The options, and why the swarm is not clear; then they name none.
    """
    finder = SwarmFinder(memory or SwarmMemory.of_user(), environment, _own_peers(), is_look=True)
    try:
        found, _ = with_swarm(options, finder)
    except SwarmError as error:
        model = None if options.model is not None and is_invite(options.model) else options.model
        return replace(options, join=(), model=model), str(error)
    return replace(found, membership=Membership(found.membership.network)), ""


def make_checkup(options: Doctor, environment: Mapping[str, str], refusal: str = "") -> Checkup:
    """The checks, each with this machine's own probes."""
    identity = default_identity_path()
    view = Shared(partial(look_at_swarm, options.join, identity, options.membership.network))
    torch, hub = Shared(ask_torch), Shared(partial(ask_hub, options.model))
    relays = Shared(partial(_ask_relays, view))
    requirements, pythons = package_requirements()

    async def model() -> ModelFacts | None:
        return (await hub.get()).facts

    async def seen() -> Sequence[str]:
        return [word.seen.rpartition(":")[0].strip("[]") for word in await relays.get() if word.seen]

    checks: tuple[DoctorCheck, ...] = (
        VersionsCheck(requirements, installed_version, python_version(), pythons),
        DaemonCheck(find_daemon(), run_daemon),
        DeviceCheck(torch.get, find_card, environment),
        KernelCheck(torch.get),
        DtypeCheck(torch.get, view.get),
        MemoryCheck(measure_memory, model),
        DiskCheck(hub_cache(), file_system_of, model),
        FileLimitCheck(hard_file_limit),
        IdentityCheck(identity, view.get),
        PortCheck(options.port, try_bind, listening_program),
        FirewallCheck(options.port, run_program, read_file),
        DnsCheck(_named_hosts(options), resolve, frozenset() if options.model else frozenset({THE_HUB})),
        ProxyCheck(environment, speaks_socks()),
        Ipv6Check(own_addresses, has_ipv6_route, [*_join_hosts(options), HUB], resolve, connect),
        RouterCheck(own_addresses, relays.get, view.get),
        MappingCheck(find_routers, seen),
        RelayCheck(relays.get, view.get),
        DhtCheck(view.get, refusal),
        ClockCheck(view.get, clock_service),
        ReleaseCheck(view.get),
        BrokerCheck(options.mqtt, options.mqtt_ca, resolve, connect, login),
        HubCheck(options.model, hub.get, environment),
    )
    return Checkup(checks, (view, torch, hub, relays))


async def _ask_relays(view: Shared[SwarmView | None]) -> Sequence[RelayWord]:
    seen = await view.get()
    return [] if seen is None else await ask_relays(seen.relays)


def _join_hosts(options: Doctor) -> list[tuple[str, int]]:
    found = []
    for address in options.join:
        parts = address.split("/")
        if len(parts) > 4 and parts[4].isdigit() and int(parts[4]) < 65_536:
            found.append((parts[2], int(parts[4])))
    return found


def _named_hosts(options: Doctor) -> dict[str, str]:
    hosts = {f"--join {number}": host for number, (host, _) in enumerate(_join_hosts(options), 1)}
    if broker := _broker_host(options):
        hosts["the broker"] = broker
    if options.model is None or not Path(options.model).expanduser().exists():
        hosts[THE_HUB] = HUB[0]
    return hosts


def _own_peers() -> list[str]:
    own = own_peer(default_identity_path())
    return [] if own is None else [own]


def _broker_host(options: Doctor) -> str:
    try:
        return "" if options.mqtt is None else parse_broker(options.mqtt).host
    except Exception:  # noqa: BLE001 - the broker's own check says what is wrong with it
        return ""


def private_of(options: Doctor, environment: Mapping[str, str]) -> PrivateWords:
    """What must not be shown of this machine and these options."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such user, as in a container
        user = ""
    hosts = [host for host, _ in _join_hosts(options)]
    urls = (options.mqtt or "", environment.get("HF_ENDPOINT", ""))
    return private_words(environment, str(Path.home()), {user, platform.node()}, [*hosts, *urls])


def run_doctor(options: Doctor, console: Console) -> int:
    """`doctor`, for a command line; threads that still wait for an answer do not hold up the end."""
    status = asyncio.run(doctor(options, console))
    sys.stdout.flush()
    return status
