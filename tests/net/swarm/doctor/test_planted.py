"""Troubles planted in networks of their own and in files: of each the doctor names the first cause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest

from swarm.base.ids import PeerId
from swarm.base.process_limits import main_memory
from swarm.directory.dht.about import OURS, About, disagreement
from swarm.directory.dht.addresses import Membership, PeerSource
from swarm.directory.dht.registry import PeerSurvey
from swarm.directory.identity import Identity
from swarm.doctor.command import named_peers
from swarm.doctor.directory import ClockService, SwarmView
from swarm.doctor.hub import HubAnswer
from swarm.doctor.ladder import Diagnosis, Level, climb, first_cause
from swarm.doctor.machine import Cards, TorchBuild, installed_version
from swarm.doctor.options import Doctor
from swarm.doctor.rungs import RUNGS, DoctorProbes, Examination
from tests.net.small_internet import (
    HUB_IP,
    NOBODY_IP,
    PEER_IP,
    PEER_PORT,
    PROXY_IP,
    PROXY_PORT,
    RELAY_IP,
    RELAY_PORT,
    Planted,
    as_nobody,
    hub_page,
    libp2p,
    mount_small,
    page,
    run_at_home,
)
from tests.one_diagnosis import ready

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.needs_root,
    pytest.mark.needs_program("ip", "iproute2"),
    pytest.mark.needs_program("nft", "nftables"),
]

ID = Identity.ephemeral().peer_id
PEER = f"/ip4/{PEER_IP}/tcp/{PEER_PORT}/p2p/{ID}"
NAMED = f"/dns4/boot.example/tcp/{PEER_PORT}/p2p/{ID}"
RELAYS: Final = (f"{PEER_IP}:{RELAY_PORT}", f"{RELAY_IP}:{RELAY_PORT}")
BEHIND: Final = ("198.51.100.7:4001", "198.51.100.7:4001")
"""A home whose router keeps ports."""
NEWER, OLDER = About("9.0.0", (99,), (1,)), About("0.0.1", (0,), (1,))


def survey(ahead_s: float = 0.01, about: About = OURS) -> PeerSurvey:
    return PeerSurvey(PeerId(ID), ahead_s, about)


WELL: Final = SwarmView(surveys=(survey(),), relays=RELAYS, numeric_classes=frozenset({"cpu-float32"}))
WHOLE: Final = TorchBuild("2.6.0+cpu")


@dataclass(frozen=True)
class Trouble:
    """A trouble, and what the doctor must say.

    Attributes:
        rung: where the first cause is found.
        kind: of the first cause.
        says: words of its text and its mend.
        network: what is planted in the network.
        view: what the directory says.
        join: peers that are meant.
        options: besides.
        environment: the process's variables.
        probes: what is planted in files and programs.
        prepare: called at home, before the doctor looks, with a folder and the probes; gives the probes.
    """

    rung: str
    kind: str
    says: str
    network: Planted = field(default_factory=Planted)
    view: SwarmView = WELL
    join: tuple[str, ...] = (PEER,)
    options: Doctor = field(default_factory=Doctor)
    environment: Mapping[str, str] = field(default_factory=dict)
    probes: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Path, DoctorProbes], DoctorProbes] = lambda _, probes: probes


def drops(but: str) -> Planted:
    """A network that swallows all but this, and the answers of its own name server."""
    return Planted(filter=f"iifname wire udp dport 53 accept; {but}iifname wire drop")


def at_port_80(head: str) -> Planted:
    return replace(drops("tcp dport 80 accept; "), servers={(HUB_IP, 80): page(head)})


def beside_proxy(head: str) -> Planted:
    return replace(drops(f"ip daddr {PROXY_IP} accept; "), servers={(PROXY_IP, PROXY_PORT): page(head)})


async def connecting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A proxy before peers."""
    await reader.readline()
    writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
    await libp2p(reader, writer)


def gone(*places: tuple[str, int]) -> Planted:
    return Planted(servers=dict.fromkeys(places))


def full_disk(folder: Path, probes: DoctorProbes) -> DoctorProbes:
    mount_small(folder)
    return replace(probes, cache=folder)


def limited(folder: Path, probes: DoctorProbes) -> DoctorProbes:
    """Files of a control group that leaves 300 MB."""
    group = folder / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{1 << 30}\n")
    (group / "memory.current").write_text(f"{(1 << 30) - 300_000_000}\n")
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text("0::/pod/inner\n")
    return replace(probes, memory=lambda: main_memory(folder / "sys/fs/cgroup", folder / "proc/self/cgroup"))


def closed(folder: Path, probes: DoctorProbes) -> DoctorProbes:
    (folder / "canopy").mkdir(mode=0o700)
    (folder / "canopy/swarms.json").write_text("{}")
    as_nobody()
    return replace(probes, folders=(folder / "canopy",))


def damaged_key(folder: Path, probes: DoctorProbes) -> DoctorProbes:
    (folder / "identity.key").write_bytes(b"damaged")
    (folder / "identity.key").chmod(0o600)
    return replace(probes, identity=folder / "identity.key")


PROXY: Final = {"https_proxy": f"http://{PROXY_IP}:{PROXY_PORT}"}
TROUBLES: Final = {
    "the cable is out": Trouble("link", "link-down", "eth0", Planted(home=["link set eth0 down"])),
    "no address": Trouble("addresses", "no-address", "gave it none", Planted(home=["addr flush dev eth0"])),
    "no way out": Trouble("route", "no-route", "no default route", Planted(home=["route del default"])),
    "a dead name server": Trouble(
        "dns", "no-dns", "no name server answers", Planted(filter="udp dport 53 drop"), join=(NAMED,)
    ),
    "a slow name server": Trouble("dns", "dns-slow", "takes 6.", Planted(dns_delay_s=6.0), join=(NAMED,)),
    "a name that is wrong": Trouble("dns", "name-unknown", "--join", join=(NAMED.replace("boot", "boat"),)),
    "a captive portal that redirects": Trouble(
        "portal", "portal", "log in", at_port_80("HTTP/1.1 302 Found\r\nLocation: http://login.hotel.example/")
    ),
    "a captive portal that answers": Trouble("portal", "portal", "log in", at_port_80("HTTP/1.1 200 OK")),
    "only a proxy leads out": Trouble(
        "proxy", "proxy-only", "https_proxy", beside_proxy("HTTP/1.1 200 Connected"), environment=PROXY
    ),
    "a proxy that wants a login": Trouble(
        "proxy", "proxy-login", "USER:PASSWORD", beside_proxy("HTTP/1.1 407 Login"), environment=PROXY
    ),
    "only port 443 goes out": Trouble(
        "outgoing", "ports-closed", f"to port 443 and not to {PEER_PORT}", drops("tcp dport 443 accept; ")
    ),
    "only web ports go out, and others are refused": Trouble(
        *("outgoing", "ports-closed", "TLS port"),
        Planted(filter="iifname wire tcp dport 31337 reject with icmp type admin-prohibited"),
    ),
    "nothing goes out": Trouble("outgoing", "no-answer", "nobody answers on it", drops("")),
    "a path of 1280 bytes without a word": Trouble(
        "mtu", "black-hole", "sudo ip link set dev eth0 mtu 1280", Planted(filter="meta length > 1280 drop")
    ),
    "a bootstrap peer that is off": Trouble(
        "peers",
        "peer-silent",
        "the peer from CANOPY_JOIN does not answer",
        join=(),
        environment={"CANOPY_JOIN": PEER.replace(PEER_IP, NOBODY_IP)},
    ),
    "a bootstrap peer that has ended": Trouble("peers", "peer-gone", "no program", gone((PEER_IP, PEER_PORT))),
    "something that is no peer": Trouble(
        "peers", "peer-other", "no peer of a swarm", Planted(servers={(PEER_IP, PEER_PORT): hub_page})
    ),
    "a clock that is off by hours": Trouble(
        "clock", "clock-wrong", "7200.0 s behind", view=replace(WELL, surveys=(survey(7_200.0),))
    ),
    "a private swarm": Trouble("directory", "private-swarm", "--network-key", view=SwarmView("a private swarm: …")),
    "another swarm": Trouble("directory", "not-joined", "another swarm", view=SwarmView("it is another swarm's peer")),
    "a release that is too old": Trouble(
        "release", "update-this-machine", "pip install -U", view=SwarmView(str(disagreement(NEWER)))
    ),
    "a swarm that is too old": Trouble(
        "release", "update-the-others", "ask whoever", view=replace(WELL, surveys=(survey(about=OLDER),))
    ),
    "dead relays": Trouble(
        *("relay", "relay-silent", "none of 2 relays answers"),
        gone((PEER_IP, RELAY_PORT), (RELAY_IP, RELAY_PORT)),
        view=replace(WELL, surveys=(survey(about=replace(OURS, seen="198.51.100.7")),)),
    ),
    "no way in": Trouble(
        *("relay", "no-way-in", "nobody can dial this machine"),
        view=replace(WELL, relays=(), surveys=(survey(about=replace(OURS, seen="198.51.100.7")),)),
    ),
    "a full disk": Trouble("disk", "disk-full", "hf cache prune", prepare=full_disk),
    "too small a container": Trouble("memory", "little-memory", "0.3 GiB of 1.0 GiB is free", prepare=limited),
    "files of another owner": Trouble("own-files", "files-of-another", "Permission denied", prepare=closed),
    "a damaged key": Trouble("identity", "identity-damaged", "mv ", prepare=damaged_key),
    "no torch": Trouble("packages", "package-missing", "torch is not installed", probes={"installed": {"torch": None}}),
    "a damaged torch": Trouble(
        *("device", "torch-damaged", "torch==2.6.0+cu126 --index-url https://download.pytorch.org/whl/cu126"),
        probes={"torch": lambda: TorchBuild("2.6.0+cu126", {"cuda": "12.6"}, "libtorch_cpu.so")},
    ),
}


async def look(trouble: Trouble, folder: Path) -> list[Diagnosis]:
    installed = trouble.probes.get("installed", {})
    given = {"torch": lambda: WHOLE, **trouble.probes}
    given["installed"] = lambda name: installed.get(name, installed_version(name))
    probes = DoctorProbes(
        **{
            "identity": folder / "none.key",
            "folders": (folder,),
            "ask_directory": ready(trouble.view),
            "ask_hub": ready(HubAnswer()),
            "ask_cards": ready(Cards()),
            "cache": folder,
            "routers": list,
            "clock_service": ready(ClockService(is_active=True, is_synchronized=True)),
            **given,
        }
    )
    probes = trouble.prepare(folder, probes)
    options = replace(trouble.options, join=trouble.join)
    around = trouble.environment.get("CANOPY_JOIN", "").split()
    sources = dict.fromkeys(around, PeerSource(1, "from CANOPY_JOIN"))
    meant = replace(options, join=(*trouble.join, *around), membership=Membership(sources=sources))
    peers = named_peers(meant)
    return await climb(RUNGS, Examination(meant, trouble.environment, peers, "", probes))


HEALTHY: Final = {
    "healthy": Trouble("", "", "", join=(NAMED, PEER)),
    "healthy by a proxy": Trouble(
        *("", "", "", replace(beside_proxy(""), servers={(PROXY_IP, PROXY_PORT): connecting})),
        environment={"CANOPY_PROXY": f"http://{PROXY_IP}:{PROXY_PORT}"},
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Diagnosis]]:
    """What the doctor finds in each, some at a time: nearly all of it is waiting."""

    def look_there(name: str) -> list[Diagnosis]:
        folder = tmp_path_factory.mktemp("home")
        trouble = (TROUBLES | HEALTHY)[name]
        return run_at_home(trouble.network, folder, lambda _: look(trouble, folder))

    names = [*TROUBLES, *HEALTHY]
    with ThreadPoolExecutor(6) as pool:
        return dict(zip(names, pool.map(look_there, names), strict=True))


@pytest.mark.parametrize("name", TROUBLES)
def test_the_first_cause_is_named(name: str, outcomes: dict[str, list[Diagnosis]]) -> None:
    trouble, found = TROUBLES[name], outcomes[name]
    cause = first_cause(found)
    assert cause is not None, found
    assert (cause.rung, cause.kind) == (trouble.rung, trouble.kind), found
    assert trouble.says in f"{cause.text} → {cause.mend}"
    assert cause.mend
    assert [one.kind for one in found if one.level is Level.TROUBLE] == [trouble.kind], "what follows is not asked"


def test_on_a_healthy_machine_nothing_is_in_the_way(outcomes: dict[str, list[Diagnosis]]) -> None:
    found = outcomes["healthy"]
    assert {one.level for one in found} == {Level.OK}, found
    assert {one.kind for one in found} >= {"names", "no-portal", "outgoing", "packets", "clock", "direct", "relay"}


def test_where_a_proxy_is_set_nothing_is_in_the_way(outcomes: dict[str, list[Diagnosis]]) -> None:
    found = outcomes["healthy by a proxy"]
    assert first_cause(found) is None, found
    assert {one.kind for one in found} >= {"own-proxy", "peers", "outgoing", "directory"}
