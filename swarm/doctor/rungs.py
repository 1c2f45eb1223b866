"""The rungs of the doctor's ladder in causal order, as one table, and what they look at on this machine.

The table of docs/reference/doctor.md says the same, which a test compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from swarm.discovery.identity import default_identity_path
from swarm.doctor.broker import login, look_at_broker
from swarm.doctor.device import (
    Cards,
    TorchBuild,
    ask_cards,
    look_at_device,
    look_at_dtypes,
    look_at_kernels,
    read_torch,
)
from swarm.doctor.directory import (
    ClockService,
    clock_service,
    look_at_clock,
    look_at_directory,
    look_at_peers,
    look_at_release,
)
from swarm.doctor.hub import HubAnswer, ask_hub, hub_cache, is_here, look_at_hub, offline_by
from swarm.doctor.ladder import Finding, Findings, Once, Rung
from swarm.doctor.machine import (
    file_system_of,
    hard_file_limit,
    look_at_disk,
    look_at_file_limit,
    look_at_folders,
    look_at_identity,
    look_at_memory,
)
from swarm.doctor.model_facts import ModelFacts
from swarm.doctor.network import (
    HTTPS,
    NamedPeer,
    Pages,
    look_at_addresses,
    look_at_ipv6,
    look_at_link,
    look_at_names,
    look_at_outgoing,
    look_at_packets,
    look_at_proxy,
    look_at_route,
    look_for_portal,
    look_outside,
    speaks_socks,
)
from swarm.doctor.options import Doctor
from swarm.doctor.ports import Firewall, listening_program, look_at_ports, read_file, try_bind
from swarm.doctor.probes import (
    HUB,
    Answer,
    Names,
    ask_name_server,
    has_way,
    interface_to,
    interfaces,
    name_servers,
    own_addresses,
    takes_large,
)
from swarm.doctor.processes import on_thread, run_program
from swarm.doctor.relays import RelayWord, ask_relays
from swarm.doctor.router import find_routers, look_at_mapping, look_at_relays, look_at_router
from swarm.doctor.software import (
    find_daemon,
    installed_version,
    look_at_daemon,
    look_at_packages,
    package_requirements,
    python_version,
    run_daemon,
)
from swarm.doctor.swarm_view import SwarmView, look_at_swarm
from swarm.gateway.ports import Router
from swarm.kernels.toolchain import toolchain
from swarm.runtime.cache_folder import cache_folder
from swarm.runtime.main_memory import MainMemory, main_memory
from swarm.telemetry.broker_address import parse_broker

AskDirectory = Callable[[Sequence[str]], Awaitable[SwarmView]]


async def ask_name_servers() -> list[float | None]:
    """Seconds until each name server answers; None where it is silent."""
    return list(await asyncio.gather(*map(ask_name_server, name_servers()[:3])))


@dataclass(frozen=True, slots=True)
class Probes:
    """What asks files, programs and machines, where tests plant other answers.

    Attributes:
        identity: file of this machine's key.
        folders: Canopy's own.
        ask_directory: joins the directory through peers that answer, and reads it; None for the real one.
        ask_hub: asks for the model.
        ask_cards: looks for graphics cards.
        installed: the version of an installed package; None if it is not there.
        torch: what torch's files say.
        memory: main memory.
        cache: the hub's.
        routers: ways to ask the router for a port.
        clock_service: what keeps the clock right.
    """

    identity: Path = field(default_factory=default_identity_path)
    folders: Sequence[Path] = field(default_factory=lambda: (default_identity_path().parent, cache_folder()))
    ask_directory: AskDirectory | None = None
    ask_hub: Callable[[str | None], Awaitable[HubAnswer]] = ask_hub
    ask_cards: Callable[[], Awaitable[Cards]] = ask_cards
    installed: Callable[[str], str | None] = installed_version
    torch: Callable[[], TorchBuild] = read_torch
    memory: Callable[[], MainMemory] = main_memory
    cache: Path = field(default_factory=hub_cache)
    routers: Callable[[], Sequence[Router]] = find_routers
    clock_service: Callable[[], Awaitable[ClockService]] = clock_service


class Sight:
    """What the rungs look at, and how: `RUNGS` names a method for each."""

    def __init__(
        self,
        options: Doctor,
        environment: Mapping[str, str],
        peers: Sequence[NamedPeer] = (),
        refusal: str = "",
        probes: Probes | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            options: of the command.
            environment: the process's variables.
            peers: those of the swarm that is meant.
            refusal: why it is not clear which swarm is meant; empty if it is.
            probes: how files, programs and machines are asked.
        """
        self.options = options
        self.environment = environment
        self.peers = peers
        self.refusal = refusal
        self.probes = probes or Probes()
        self.find = Names()
        self.outside = Once(lambda: look_outside(peers, self.find, Pages(self.find, environment)))
        self.view = Once(self._ask_directory)
        self.relay_words = Once(self._ask_relays)
        self.hub_answer = Once(lambda: self.probes.ask_hub(options.model))
        self.cards = Once(self.probes.ask_cards)
        self.build = Once(self._read_torch)
        self.router_finding = Once(self._look_at_router)
        self.mapping_finding = Once(self._look_at_mapping)

    async def _own_files(self) -> Findings:
        return look_at_folders(self.probes.folders)

    async def _link(self) -> Findings:
        return look_at_link(interfaces(), self.peers)

    async def _addresses(self) -> Findings:
        return look_at_addresses(own_addresses(), self.peers)

    async def _route(self) -> Findings:
        return look_at_route(has_way, self.peers)

    async def _dns(self) -> Findings:
        needed = {peer.origin: peer.host for peer in self.peers if peer.host}
        if broker := _broker_host(self.options):
            needed["--mqtt"] = broker
        optional = {"the hub": HUB}
        if self.options.model is not None and not is_here(self.options.model) and not offline_by(self.environment):
            needed, optional = needed | optional, {}
        return await look_at_names(needed, optional, self.find, ask_name_servers)

    async def _portal(self) -> Findings:
        return look_for_portal(await self.outside())

    async def _proxy(self) -> Findings:
        return look_at_proxy(self.environment, await self.outside(), has_socks=speaks_socks())

    async def _outgoing(self) -> Findings:
        return look_at_outgoing(self.peers, await self.outside())

    async def _packets(self) -> Findings:
        outside = await self.outside()
        greeting = [one for one, answer in zip(self.peers, outside.peers, strict=True) if answer is Answer.PEER]
        targets = [(ip, peer.port) for peer in greeting[:1] for ip in (await self.find(peer.host)).ips]
        return await look_at_packets(targets, takes_large, interface_to)

    async def _peer(self) -> Findings:
        return look_at_peers(self.peers, await self.outside(), self.refusal)

    async def _clock(self) -> Findings:
        service = await self.probes.clock_service()
        return look_at_clock(await self.view(), service)

    async def _directory(self) -> Findings:
        return look_at_directory(await self.view())

    async def _release(self) -> Findings:
        return look_at_release(await self.view())

    async def _router(self) -> Findings:
        return await self.router_finding()

    async def _mapping(self) -> Findings:
        return await self.mapping_finding()

    async def _relay(self) -> Findings:
        kinds = [one.kind for one in (await self.router_finding(), await self.mapping_finding())]
        return look_at_relays(await self.relay_words(), await self.view(), kinds)

    async def _ports(self) -> Findings:
        return look_at_ports(self.options.port, try_bind, listening_program)

    async def _firewall(self) -> Findings:
        return await Firewall(self.options.port, run_program, read_file).look()

    async def _packages(self) -> Findings:
        requirements, pythons = package_requirements()
        return look_at_packages(requirements, self.probes.installed, python_version(), pythons)

    async def _daemon(self) -> Findings:
        return await look_at_daemon(find_daemon(), run_daemon)

    async def _device(self) -> Findings:
        return await look_at_device(await self.build(), self.cards, self.environment)

    async def _kernels(self) -> Findings:
        return await look_at_kernels(self.cards, toolchain())

    async def _dtypes(self) -> Findings:
        return await look_at_dtypes(await self.build(), self.cards, (await self.view()).numeric_classes)

    async def _memory(self) -> Findings:
        return await look_at_memory(self.probes.memory(), self._model)

    async def _disk(self) -> Findings:
        return await look_at_disk(self.probes.cache, file_system_of(self.probes.cache), self._model)

    async def _files(self) -> Findings:
        return look_at_file_limit(hard_file_limit())

    async def _key(self) -> Findings:
        return look_at_identity(self.probes.identity, (await self.view()).own_record)

    async def _ipv6(self) -> Findings:
        hosts = [*((peer.host, peer.port) for peer in self.peers if peer.port), (HUB, HTTPS)]
        return await look_at_ipv6(own_addresses(), has_way, hosts, self.find)

    async def _broker(self) -> Findings:
        return await look_at_broker(self.options.mqtt, self.options.mqtt_ca, self.find, login)

    async def _hub(self) -> Findings:
        answer = (await self.outside()).hub
        is_reached = answer is not None and answer >= Answer.REFUSED
        return await look_at_hub(self.options.model, self.hub_answer, self.environment, is_reached=is_reached)

    async def _ask_directory(self) -> SwarmView:
        answers = (await self.outside()).peers
        good = [
            one.address for one, answer in zip(self.peers, answers, strict=True) if answer and answer >= Answer.MUTE
        ]
        ask = self.probes.ask_directory or partial(
            look_at_swarm, identity=self.probes.identity, network=self.options.membership.network
        )
        return await ask(good)

    async def _ask_relays(self) -> list[RelayWord]:
        return await ask_relays((await self.view()).relays, self.find)

    async def _look_at_router(self) -> Finding:
        return look_at_router(own_addresses(), await self.relay_words(), await self.view())

    async def _look_at_mapping(self) -> Finding:
        async def seen() -> list[str]:
            return [word.seen.rpartition(":")[0].strip("[]") for word in await self.relay_words() if word.seen]

        return await look_at_mapping(self.probes.routers(), seen)

    async def _read_torch(self) -> TorchBuild:
        return await on_thread(self.probes.torch)

    async def _model(self) -> ModelFacts | None:
        return (await self.hub_answer()).facts


def _broker_host(options: Doctor) -> str:
    try:
        return "" if options.mqtt is None else parse_broker(options.mqtt).host
    except Exception:  # noqa: BLE001 - the broker's own rung says what is wrong with it
        return ""


_OUT: Final = ("portal", "proxy", "outgoing")

RUNGS: Final[tuple[Rung[Sight], ...]] = (
    Rung(
        "own-files",
        "whether Canopy's own folders can be read and written",
        ("own-files", "files-of-another"),
        Sight._own_files,
    ),
    Rung(
        "link",
        "network interfaces that are up, with their cables in",
        ("link", "link-not-needed", "no-link", "link-down"),
        Sight._link,
    ),
    Rung(
        "addresses",
        "an address of this machine",
        ("addresses", "addresses-not-needed", "no-address"),
        Sight._addresses,
        after=("link",),
    ),
    Rung(
        "route",
        "the system's way to the Internet, or to the peers",
        ("route", "route-near", "no-route"),
        Sight._route,
        after=("addresses",),
    ),
    Rung(
        "dns",
        "the names in options and the hub's, and the name servers themselves",
        ("names", "no-names", "no-dns", "dns-slow", "name-unknown"),
        Sight._dns,
        after=("route",),
    ),
    Rung(
        "portal",
        "who answers at port 80 in the hub's name",
        ("no-portal", "portal-untried", "page-replaced", "portal"),
        Sight._portal,
        after=("dns",),
    ),
    Rung(
        "proxy",
        "`http_proxy`, `https_proxy`, `all_proxy`, and whether anything goes out without",
        ("no-proxy", "proxy", "proxy-socks", "proxy-malformed", "proxy-only", "proxy-login"),
        Sight._proxy,
        after=("dns",),
    ),
    Rung(
        "outgoing",
        "TCP to the peers' ports, against port 443 of the same machines and the hub's",
        ("outgoing", "outgoing-web", "ports-closed", "no-answer"),
        Sight._outgoing,
        after=("portal", "proxy"),
    ),
    Rung(
        "peers",
        "whether each peer that is meant greets as one",
        (
            *("peers", "no-swarm", "swarm-unclear", "peer-silent", "peer-gone", "peer-other", "peer-unnamed"),
            "peer-malformed",
        ),
        Sight._peer,
        after=("outgoing",),
    ),
    Rung(
        "mtu",
        "packets of full size to a peer",
        ("packets", "packets-untried", "black-hole"),
        Sight._packets,
        after=("peers",),
    ),
    Rung(
        "clock",
        "the difference to the swarm's clocks, and the time service",
        ("clock", "clock-untried", "clock-wrong", "clock-off", "clock-untended", "clock-unset"),
        Sight._clock,
        after=("mtu", "own-files", "p2pd"),
    ),
    Rung(
        "directory",
        "whether the directory lets this machine in",
        ("directory", "directory-untried", "directory-reached", "private-swarm", "not-joined"),
        Sight._directory,
        after=("clock",),
    ),
    Rung(
        "router",
        "under which ports two relays see this machine",
        ("direct", "cone", "symmetric", "public-address", "router-unknown", "router-untried"),
        Sight._router,
        after=("directory",),
    ),
    Rung(
        "mapping",
        "PCP, NAT-PMP and UPnP",
        ("mapping", "mapping-untried", "mapping-refused", "no-mapping", "double-router"),
        Sight._mapping,
        after=("directory",),
    ),
    Rung(
        "relay",
        "the relays that the swarm's peers lend, where nobody can dial this machine",
        ("relay", "relay-untried", "no-relay", "relay-silent", "relays-full", "no-way-in"),
        Sight._relay,
        after=("router", "mapping"),
    ),
    Rung(
        "ports",
        "whether `--port` can be had, and who has it",
        ("port-free", "port-taken", "port-closed", "no-port"),
        Sight._ports,
    ),
    Rung(
        "firewall",
        "ufw, firewalld and nftables, where they can be read",
        ("no-firewall", "firewall-open", "firewall", "firewall-closed", "firewall-unread"),
        Sight._firewall,
    ),
    Rung(
        "release",
        "formats of records and messages, here and there",
        ("release", "release-untried", "update-this-machine", "update-the-others", "old-peers"),
        Sight._release,
        after=("directory",),
    ),
    Rung(
        "packages",
        "Python and the packages that this release needs",
        ("packages", "python", "package-missing", "package-version"),
        Sight._packages,
        is_beside=True,
    ),
    Rung(
        "p2pd",
        "hivemind's p2p daemon on this processor",
        ("daemon", "no-daemon", "daemon-closed", "daemon-foreign", "daemon-broken"),
        Sight._daemon,
        is_beside=True,
    ),
    Rung(
        "device",
        "cards, their driver, and for which of them torch was built; torch is not started",
        (
            *("cuda", "cpu", "hip", "xpu", "torch-damaged", "torch-for-cpu", "no-driver", "driver-old"),
            *("driver-fails", "card-hidden", "card-closed", "card-not-in-build"),
        ),
        Sight._device,
        is_beside=True,
    ),
    Rung(
        "kernels",
        "what a card needs for the fast path: compute capability 8.0, Triton, a C compiler, Python's headers",
        ("kernels", "plain", "card-old", "no-triton", "no-compiler", "no-headers"),
        Sight._kernels,
        is_beside=True,
    ),
    Rung(
        "dtypes",
        "types in which the device computes, against those of the swarm's nodes",
        ("dtypes", "no-bfloat16", "other-dtype"),
        Sight._dtypes,
        after=("directory",),
        is_beside=True,
    ),
    Rung(
        "memory",
        "free memory, one layer of the model, swap; a container's limit counts",
        ("memory", "little-memory", "layer-larger", "swapping"),
        Sight._memory,
        is_beside=True,
    ),
    Rung(
        "disk",
        "the folder of the hub's cache",
        ("room", "disk-full", "not-writable", "model-larger"),
        Sight._disk,
        is_beside=True,
    ),
    Rung(
        "files",
        "how many files a program may open",
        ("files", "some-files", "few-files"),
        Sight._files,
        is_beside=True,
    ),
    Rung(
        "identity",
        "the key file, and who serves under it",
        (
            *("identity", "no-identity", "identity-in-use", "identity-damaged", "identity-open"),
            *("identity-unreadable", "identity-copied"),
        ),
        Sight._key,
        after=("own-files",),
        is_beside=True,
    ),
    Rung(
        "ipv6",
        "an address, a way out, and whether anybody answers",
        ("ipv6", "no-ipv6", "ipv6-untried", "ipv6-no-route", "ipv6-black-hole"),
        Sight._ipv6,
        after=("dns",),
        is_beside=True,
    ),
    Rung(
        "broker",
        "name, port, TLS, user and password of `--mqtt`",
        (
            *("broker", "no-broker", "broker-malformed", "broker-unnamed", "broker-silent", "broker-untrusted"),
            *("broker-plain", "broker-refuses", "broker-odd"),
        ),
        Sight._broker,
        after=_OUT,
        is_beside=True,
    ),
    Rung(
        "hub",
        "the model, or whether the hub answers",
        ("hub", "folder", "hub-offline", "model-offline", "hub-silent", "hub-token", "no-model", "hub-refuses"),
        Sight._hub,
        after=("dns", "portal"),
        is_beside=True,
    ),
)
"""In causal order, and beside it the machine's own and what is not the swarm's."""
