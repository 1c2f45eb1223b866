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

import psutil

from swarm.base.files import cache_folder, state_folder
from swarm.base.process_limits import MainMemory, main_memory
from swarm.compute.kernels.toolchain import toolchain
from swarm.directory.identity import default_identity_path
from swarm.doctor import directory, hub, machine, network, way_in
from swarm.doctor.directory import SwarmView
from swarm.doctor.hub import ModelFacts
from swarm.doctor.ladder import Diagnoses, Diagnosis, Once, Rung
from swarm.doctor.options import Doctor
from swarm.doctor.probes import (
    HUB,
    Names,
    TcpAnswer,
    ask_name_server,
    has_way,
    interface_to,
    interfaces,
    name_servers,
    on_thread,
    own_addresses,
    run_program,
    takes_large,
)
from swarm.link.broker_address import parse_broker
from swarm.reach.gateway.ports import Router

RungLook = Callable[["Examination"], Awaitable[Diagnoses]]
AskDirectory = Callable[[Sequence[str]], Awaitable[SwarmView]]


async def ask_name_servers() -> list[float | None]:
    """Seconds until each name server answers; None where it is silent."""
    return list(await asyncio.gather(*map(ask_name_server, name_servers()[:3])))


def own_folders() -> tuple[Path, ...]:
    """Where Canopy keeps its files."""
    return default_identity_path().parent, state_folder(), cache_folder()


@dataclass(frozen=True, slots=True)
class DoctorProbes:
    """What asks files, programs and machines, where tests plant other answers."""

    identity: Path = field(default_factory=default_identity_path)
    folders: Sequence[Path] = field(default_factory=own_folders)
    ask_directory: AskDirectory | None = None
    """Joins the directory through peers that answer, and reads it; None: the real one."""
    ask_hub: Callable[[str | None], Awaitable[hub.HubAnswer]] = hub.ask_hub
    ask_cards: Callable[[], Awaitable[machine.Cards]] = machine.ask_cards
    installed: Callable[[str], str | None] = machine.installed_version
    torch: Callable[[], machine.TorchBuild] = machine.read_torch
    memory: Callable[[], MainMemory] = main_memory
    cache: Path = field(default_factory=hub.hub_cache)
    routers: Callable[[], Sequence[Router]] = way_in.find_routers
    clock_service: Callable[[], Awaitable[directory.ClockService]] = directory.clock_service


_rungs: list[Rung[Examination]] = []


def _rung(finds: str, *, after: str = "", is_beside: bool = False) -> Callable[[RungLook], RungLook]:
    """Make a rung of a method, whose name and docstring are the rung's: what it finds, and what it stands on."""

    def note(look: RungLook) -> RungLook:
        name, asks = look.__name__.replace("_", "-"), (look.__doc__ or "").rstrip(".")
        _rungs.append(Rung(name, asks, tuple(finds.split()), look, tuple(after.split()), is_beside))
        return look

    return note


class Examination:
    """What is looked at, rung by rung in causal order; then what several rungs share."""

    def __init__(
        self,
        options: Doctor,
        environment: Mapping[str, str],
        peers: Sequence[network.NamedPeer] = (),
        refusal: str = "",
        probes: DoctorProbes | None = None,
    ) -> None:
        self.options = options
        self.environment = environment
        self.meant = peers
        self.refusal = refusal
        self.probes = probes or DoctorProbes()
        self.find = Names()
        self.outside = Once(lambda: network.look_outside(peers, self.find, network.Pages(self.find, environment)))
        self.view = Once(self._ask_directory)
        self.relay_words = Once(self._ask_relays)
        self.hub_answer = Once(lambda: self.probes.ask_hub(options.model))
        self.cards = Once(self.probes.ask_cards)
        self.build = Once(self._read_torch)
        self.router_finding = Once(self._look_at_router)
        self.mapping_finding = Once(self._look_at_mapping)

    @_rung("own-files files-of-another")
    async def own_files(self) -> Diagnoses:
        """Whether Canopy's own folders can be read and written."""
        return machine.look_at_folders(self.probes.folders)

    @_rung("link link-not-needed no-link link-down")
    async def link(self) -> Diagnoses:
        """Network interfaces that are up, with their cables in."""
        return network.look_at_link(interfaces(), self.meant)

    @_rung("addresses addresses-not-needed no-address", after="link")
    async def addresses(self) -> Diagnoses:
        """An address of this machine."""
        return network.look_at_addresses(own_addresses(), self.meant)

    @_rung("route route-near no-route", after="addresses")
    async def route(self) -> Diagnoses:
        """The system's way to the Internet, or to the peers."""
        return network.look_at_route(has_way, self.meant)

    @_rung("names no-names no-dns dns-slow name-unknown", after="route")
    async def dns(self) -> Diagnoses:
        """The names in options and the hub's, and the name servers themselves."""
        own = network.own_proxy(self.environment)
        needed = {peer.origin: peer.host for peer in self.meant if peer.host and own is None}
        if own is not None:
            needed[network.OWN_PROXY] = own.host  # which looks up all others
        if broker := _broker_host(self.options):
            needed["--mqtt"] = broker
        optional = {"the hub": HUB}
        if (
            self.options.model is not None
            and not hub.is_here(self.options.model)
            and not hub.offline_by(self.environment)
        ):
            needed, optional = needed | optional, {}
        return await network.look_at_names(needed, optional, self.find, ask_name_servers)

    @_rung("no-portal portal-untried page-replaced portal", after="dns")
    async def portal(self) -> Diagnoses:
        """Who answers at port 80 in the hub's name."""
        return network.look_for_portal(await self.outside())

    @_rung(
        "no-proxy proxy proxy-socks proxy-malformed proxy-only proxy-login own-proxy own-proxy-malformed "
        "own-proxy-closed",
        after="dns",
    )
    async def proxy(self) -> Diagnoses:
        """`CANOPY_PROXY`; else `http_proxy`, `https_proxy`, `all_proxy`, and whether anything goes out without."""
        return network.look_at_proxy(self.environment, await self.outside(), has_socks=network.speaks_socks())

    @_rung("outgoing outgoing-web ports-closed no-answer", after="portal proxy")
    async def outgoing(self) -> Diagnoses:
        """TCP to the peers' ports, against port 443 of the same machines and the hub's."""
        return network.look_at_outgoing(self.meant, await self.outside())

    @_rung(
        "peers no-swarm swarm-unclear peer-silent peer-gone peer-other peer-unnamed peer-malformed", after="outgoing"
    )
    async def peers(self) -> Diagnoses:
        """Whether each peer that is meant greets as one."""
        return directory.look_at_peers(self.meant, await self.outside(), self.refusal)

    @_rung("packets packets-untried black-hole", after="peers")
    async def mtu(self) -> Diagnoses:
        """Packets of full size to a peer."""
        outside = await self.outside()
        greeting = [one for one, answer in zip(self.meant, outside.peers, strict=True) if answer is TcpAnswer.PEER]
        targets = [(ip, peer.port) for peer in greeting[:1] for ip in (await self.find(peer.host)).ips]
        return await network.look_at_packets(targets, takes_large, interface_to)

    @_rung("clock clock-untried clock-wrong clock-off clock-untended clock-unset", after="mtu own-files p2pd")
    async def clock(self) -> Diagnoses:
        """The difference to the swarm's clocks, and the time service."""
        service = await self.probes.clock_service()
        return directory.look_at_clock(await self.view(), service)

    @_rung("directory directory-untried directory-reached private-swarm not-joined", after="clock")
    async def directory(self) -> Diagnoses:
        """Whether the directory lets this machine in."""
        return directory.look_at_directory(await self.view())

    @_rung("direct cone symmetric public-address router-unknown router-untried", after="directory")
    async def router(self) -> Diagnoses:
        """Under which ports two relays see this machine."""
        return await self.router_finding()

    @_rung("mapping mapping-untried mapping-refused no-mapping double-router", after="directory")
    async def mapping(self) -> Diagnoses:
        """PCP, NAT-PMP and UPnP."""
        return await self.mapping_finding()

    @_rung("relay relay-untried no-relay relay-silent relays-full no-way-in", after="router mapping")
    async def relay(self) -> Diagnoses:
        """The relays that the swarm's peers lend, where nobody can dial this machine."""
        kinds = [one.kind for one in (await self.router_finding(), await self.mapping_finding())]
        return way_in.look_at_relays(await self.relay_words(), await self.view(), kinds)

    @_rung("port-free port-taken port-closed no-port")
    async def ports(self) -> Diagnoses:
        """Whether `--port` can be had, and who has it."""
        return way_in.look_at_ports(self.options.port, way_in.try_bind, way_in.listening_program)

    @_rung("no-firewall firewall-open firewall firewall-closed firewall-unread")
    async def firewall(self) -> Diagnoses:
        """Ufw, firewalld and nftables, where they can be read."""
        return await way_in.Firewall(self.options.port, run_program, way_in.read_file).look()

    @_rung("release release-untried update-this-machine update-the-others old-peers", after="directory")
    async def release(self) -> Diagnoses:
        """Formats of records and messages, here and there."""
        return directory.look_at_release(await self.view())

    @_rung("packages python package-missing package-version", is_beside=True)
    async def packages(self) -> Diagnoses:
        """Python and the packages that this release needs."""
        requirements, pythons = machine.package_requirements()
        return machine.look_at_packages(requirements, self.probes.installed, machine.python_version(), pythons)

    @_rung("daemon no-daemon daemon-closed daemon-foreign daemon-broken", is_beside=True)
    async def p2pd(self) -> Diagnoses:
        """Hivemind's p2p daemon on this processor."""
        return await machine.look_at_daemon(machine.find_daemon(), machine.run_daemon)

    @_rung(
        "cuda cpu hip xpu torch-damaged torch-for-cpu no-driver driver-old driver-fails card-hidden "
        "card-closed card-not-in-build",
        is_beside=True,
    )
    async def device(self) -> Diagnoses:
        """Cards, their driver, and for which of them torch was built; torch is not started."""
        return await machine.look_at_device(await self.build(), self.cards, self.environment)

    @_rung("kernels plain card-old no-triton no-compiler no-headers", is_beside=True)
    async def kernels(self) -> Diagnoses:
        """What a card needs for the fast path: compute capability 8.0, Triton, a C compiler, Python's headers."""
        return await machine.look_at_kernels(self.cards, toolchain())

    @_rung("dtypes no-bfloat16 other-dtype", after="directory", is_beside=True)
    async def dtypes(self) -> Diagnoses:
        """Types in which the device computes, against those of the swarm's nodes."""
        return await machine.look_at_dtypes(await self.build(), self.cards, (await self.view()).numeric_classes)

    @_rung("memory little-memory layer-larger swapping", is_beside=True)
    async def memory(self) -> Diagnoses:
        """Free memory, one layer of the model, swap; a container's limit counts."""
        swap = psutil.swap_memory()
        return await machine.look_at_memory(self.probes.memory(), (swap.used, swap.total), self._model)

    @_rung("room disk-full not-writable model-larger", is_beside=True)
    async def disk(self) -> Diagnoses:
        """The folder of the hub's cache."""
        return await machine.look_at_disk(self.probes.cache, machine.file_system_of(self.probes.cache), self._model)

    @_rung("files some-files few-files", is_beside=True)
    async def files(self) -> Diagnoses:
        """How many files a program may open."""
        return machine.look_at_file_limit(machine.hard_file_limit())

    @_rung(
        "identity no-identity identity-in-use identity-damaged identity-open identity-unreadable identity-copied",
        after="own-files",
        is_beside=True,
    )
    async def identity(self) -> Diagnoses:
        """The key file, and who serves under it."""
        return machine.look_at_identity(self.probes.identity, (await self.view()).own_record)

    @_rung("ipv6 no-ipv6 ipv6-untried ipv6-no-route ipv6-black-hole", after="dns", is_beside=True)
    async def ipv6(self) -> Diagnoses:
        """An address, a way out, and whether anybody answers."""
        hosts = [*((peer.host, peer.port) for peer in self.meant if peer.port), (HUB, network.HTTPS)]
        return await network.look_at_ipv6(own_addresses(), has_way, hosts, self.find)

    @_rung(
        "broker no-broker broker-malformed broker-unnamed broker-silent broker-untrusted broker-plain "
        "broker-refuses broker-odd",
        after="portal proxy outgoing",
        is_beside=True,
    )
    async def broker(self) -> Diagnoses:
        """Name, port, TLS, user and password of `--mqtt`."""
        return await hub.look_at_broker(self.options.mqtt, self.options.mqtt_ca, self.find, hub.login)

    @_rung(
        "hub folder hub-offline model-offline hub-silent hub-token no-model hub-refuses",
        after="dns portal",
        is_beside=True,
    )
    async def hub(self) -> Diagnoses:
        """The model, or whether the hub answers."""
        answer = (await self.outside()).hub
        is_reached = answer is not None and answer >= TcpAnswer.REFUSED
        return await hub.look_at_hub(self.options.model, self.hub_answer, self.environment, is_reached=is_reached)

    async def _ask_directory(self) -> SwarmView:
        answers = (await self.outside()).peers
        good = [
            one.address for one, answer in zip(self.meant, answers, strict=True) if answer and answer >= TcpAnswer.MUTE
        ]
        ask = self.probes.ask_directory or partial(
            directory.look_at_swarm, identity=self.probes.identity, membership=self.options.membership
        )
        return await ask(good)

    async def _ask_relays(self) -> list[way_in.RelayWord]:
        return await way_in.ask_relays((await self.view()).relays, self.find)

    async def _look_at_router(self) -> Diagnosis:
        return way_in.look_at_router(own_addresses(), await self.relay_words(), await self.view())

    async def _look_at_mapping(self) -> Diagnosis:
        async def seen() -> list[str]:
            return [word.seen.rpartition(":")[0].strip("[]") for word in await self.relay_words() if word.seen]

        return await way_in.look_at_mapping(self.probes.routers(), seen)

    async def _read_torch(self) -> machine.TorchBuild:
        return await on_thread(self.probes.torch)

    async def _model(self) -> ModelFacts | None:
        return (await self.hub_answer()).facts


def _broker_host(options: Doctor) -> str:
    try:
        return "" if options.mqtt is None else parse_broker(options.mqtt).host
    except Exception:  # noqa: BLE001 - the broker's own rung says what is wrong with it
        return ""


RUNGS: Final[tuple[Rung[Examination], ...]] = tuple(_rungs)
"""In causal order, and beside it the machine's own and what is not the swarm's."""
