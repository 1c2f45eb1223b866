"""The way in: what kind of router is before this machine, whether it maps ports, whether a relay can stand in."""

from __future__ import annotations

import asyncio
import errno
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Final

import psutil

from swarm.base.errors import RemoteProtocolError
from swarm.directory.dht.addresses import free_port
from swarm.directory.dialable import behind_router, interface_addresses, is_public
from swarm.directory.node_record import split_address
from swarm.directory.sealing import RecordError
from swarm.doctor.directory import SwarmView
from swarm.doctor.ladder import Diagnoses, Diagnosis, hint, ok, trouble, unknown
from swarm.doctor.probes import Ran, Resolve
from swarm.link.egress.streams import MAX_LINE_BYTES, words
from swarm.reach.gateway.messages import PCP_NONCE_BYTES
from swarm.reach.gateway.ports import FAILURES, NoMapping, PcpRouter, PmpRouter, Router, UpnpRouter, default_gateways

ANY_PORT: Final = 0
MAP_S: Final = 120
"""Seconds for which a mapping is asked; it is given back at once."""
_NOT_TRIED: Final = re.compile("not tried|no router answers")
"""What UPnP says where there is nobody to refuse."""
_CARRIER: Final = ip_network("100.64.0.0/10")
_OPEN: Final = frozenset({"direct", "mapping"})
"""Kinds of findings after which this machine needs no relay."""
_BEHIND: Final = frozenset({"cone", "symmetric", "router-unknown", "double-router"})
_FORWARD: Final = "forward a TCP port on the router and give --announce-address PUBLIC-ADDRESS:PORT"


def look_at_router(own: Collection[str], relays: Sequence[RelayWord], view: SwarmView) -> Diagnosis:
    """What kind of router is before this machine: none, cone or symmetric; or not known."""
    seen = [(word.relay, found) for word in relays if (found := _split(word.seen)) is not None]
    hosts = {host for _, (host, _) in seen} or {about.seen for about in view.abouts if about.seen}
    if hosts and hosts <= set(own):
        return ok("direct", "none: peers see this machine under an address of its own")
    by_ipv4 = [(relay, found) for relay, found in seen if ":" not in found[0]]  # IPv6 has no ports to map
    if len({found for _, found in by_ipv4}) > 1:
        text = "symmetric: every peer sees another port, so no hole can be made; a relay or a mapped port will do"
        return hint("symmetric", text, _FORWARD)
    if len({relay for relay, _ in by_ipv4}) > 1:
        return ok("cone", "cone: peers see one port, so holes can be made")
    if hosts:
        text = "there is one; its kind is not known, for less than two relays said whence this machine comes"
        return ok("router-unknown", text)
    if any(is_public(ip_address(ip)) for ip in own if ":" not in ip):
        return ok("public-address", "this machine has a public address of its own; nobody confirmed it")
    return ok("router-untried", "not known: nobody said whence this machine comes")


async def look_at_mapping(routers: Sequence[Router], seen: Callable[[], Awaitable[Sequence[str]]]) -> Diagnosis:
    """Whether the router maps ports for whoever asks."""
    refused: list[str] = []
    silent: list[str] = []
    for router in routers:
        try:
            mapping = await router.map(ANY_PORT, MAP_S)
        except RemoteProtocolError as error:
            refused.append(f"{router.name} {error.reason}")
        except NoMapping as error:
            (silent if _NOT_TRIED.search(str(error)) else refused).append(f"{router.name}: {error}")
        except OSError:  # TimeoutError is one
            silent.append(f"{router.name}: no answer")
        else:
            await _give_back(router)
            return _mapped(router.name, mapping.host, await seen())
    if refused:
        text = f"the router refuses to map a port: {'; '.join(refused)}"
        mend = f"allow it in the router's settings, or {_FORWARD}; a relay works without"
        return hint("mapping-refused", text, mend)
    if silent:
        text = f"the router does not map ports ({', '.join(silent)})"
        mend = f"switch UPnP or PCP on in the router, or {_FORWARD}; a relay works without"
        return hint("no-mapping", text, mend)
    return ok("mapping-untried", "not tried: no router was found")


def _mapped(protocol: str, external: str, all_seen: Sequence[str]) -> Diagnosis:
    ip = ip_address(external)
    seen = {one for one in all_seen if ip_address(one).version == ip.version}
    if not is_public(ip) or (seen and external not in seen):
        kind = "the provider's" if ip in _CARRIER or not is_public(ip) else "a"
        text = f"{protocol} maps, and behind {kind} second router: nobody reaches the mapped port"
        return hint("double-router", text, "ask the provider for a public address, or rely on a relay")
    return ok("mapping", f"{protocol} maps ports")


def look_at_relays(relays: Sequence[RelayWord], view: SwarmView, way_in: Collection[str]) -> Diagnosis:
    """Whether a relay could carry this machine's links; where none can and nobody can dial it, it has no way in."""
    if not view.answering:
        return ok("relay-untried", "not tried: no swarm was joined")
    level = trouble if _BEHIND & set(way_in) and not _OPEN & set(way_in) else hint
    if not view.relays:
        kind, who = ("no-way-in", "nobody can dial this machine") if level is trouble else ("no-relay", "")
        text = "; ".join(filter(None, [who, "the swarm has no relay: who sits behind a router cannot serve it"]))
        return level(kind, text, f"update its bootstrap peers (`swarm bootstrap` lends one), or {_FORWARD}")
    working = [word for word in relays if word.answers]
    if not working and any(word.is_mute for word in relays):
        return unknown("relays accept connections and say nothing in time")
    if not working:
        text = f"none of {len(view.relays)} relays answers"
        mend = "let outgoing TCP to every port through the firewall, or use another network"
        return level("relay-silent", text, f"{mend}; or ask the swarm to lend a relay that runs")
    if all(word.circuits is not None and word.circuits >= word.limit > 0 for word in working):
        text = "every relay carries as many links as it takes"
        return hint("relays-full", text, "lend one: start a node with an open port, or another `swarm bootstrap`")
    return ok("relay", f"{len(working)} of {len(view.relays)} relays answer")


async def _give_back(router: Router) -> None:
    with suppress(*FAILURES):  # it ends by itself in two minutes
        await router.unmap()


def _split(seen: str) -> tuple[str, str] | None:
    try:
        host, port = split_address(seen)
    except RecordError:
        return None
    return host.strip("[]"), str(port)


def find_routers() -> Sequence[Router]:
    """Ways to ask the router of this machine's default route for a port; none where there is no router before it."""
    own = interface_addresses()
    gateways = default_gateways(own) if behind_router(own) else []
    port = free_port(4)
    found: list[Router] = []
    for gateway in map(str, gateways[:1]):
        found += PcpRouter(gateway, port, secrets.token_bytes(PCP_NONCE_BYTES)), PmpRouter(gateway, port)
        found.append(UpnpRouter(port))
    return found


ASK_S: Final = 3.0
RELAYS_ASKED: Final = 4


@dataclass(frozen=True, slots=True)
class RelayWord:
    """What one relay said.

    Attributes:
        relay: its IP address.
        circuits: carried now; None if it did not answer as a relay does.
        limit: circuits that it carries at most.
        seen: `host:port` that this machine has for it; empty if it did not say.
        is_mute: whether it accepts connections and said nothing in time.
    """

    relay: str
    circuits: int | None = None
    limit: int = 0
    seen: str = ""
    is_mute: bool = False

    @property
    def answers(self) -> bool:
        """Whether it is a relay that works."""
        return self.circuits is not None


async def ask_relays(addresses: Sequence[str], find: Resolve) -> list[RelayWord]:
    """Ask a few relays at once, all from one port of this machine, so that a router's mappings can be compared."""
    targets = await asyncio.gather(*(_target(address, find) for address in addresses[:RELAYS_ASKED]))
    own_port = free_port(4)
    return list(await asyncio.gather(*(_ask_relay(*target, own_port) for target in targets if target is not None)))


async def _ask_relay(ip: str, port: int, own_port: int) -> RelayWord:
    load = await _ask(ip, port, "LOAD", 0)
    circuits, limit = _load(load or ())
    if circuits is None:
        return RelayWord(ip, is_mute=load is None)
    seen = await _ask(ip, port, "SEEN", own_port) or []
    return RelayWord(ip, circuits, limit, seen[1] if len(seen) == 2 and seen[0] == "SEEN" else "")


async def _ask(ip: str, port: int, verb: str, own_port: int) -> list[str] | None:
    """The words of the line that a relay answers; none where it is not there, None where it says nothing in time."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    loop, line, is_there = asyncio.get_running_loop(), b"", False
    with socket.socket(family) as sock, suppress(OSError, RemoteProtocolError):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", own_port))
        try:
            async with asyncio.timeout(ASK_S):
                await loop.sock_connect(sock, (ip, port))
                is_there = True
                await loop.sock_sendall(sock, f"{verb}\n".encode())
                while not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
                    data = await loop.sock_recv(sock, MAX_LINE_BYTES)
                    if not data:
                        break
                    line += data
        except TimeoutError:
            return None if is_there else []
        return words(line)
    return []


def _load(answer: Sequence[str]) -> tuple[int | None, int]:
    try:
        verb, circuits, limit, *_ = answer
        return (int(circuits), int(limit)) if verb == "LOAD" else (None, 0)
    except ValueError:
        return None, 0


async def _target(address: str, find: Resolve) -> tuple[str, int] | None:
    try:
        host, port = split_address(address)
    except RecordError:
        return None
    found = (await find(host)).ips
    return (str(ip_address(found[0])), int(port)) if found else None


_DROP_CHAIN: Final = re.compile(
    r"chain (\S+) \{\s*type filter hook input [^;]*; policy (?:drop|reject);(.*?)\n\t\}", re.DOTALL
)
_TABLE: Final = re.compile(r"^table (\S+ \S+) \{(.*?)^\}", re.DOTALL | re.MULTILINE)
UFW_SWITCH: Final = Path("/etc/ufw/ufw.conf")

RunProgram = Callable[[Sequence[str]], Awaitable[Ran | None]]


def look_at_ports(
    ports: Sequence[int], bind: Callable[[int], OSError | None], owner: Callable[[int], str | None]
) -> Diagnoses:

    def one(port: int) -> Diagnosis:
        error = bind(port)
        if error is None:
            return ok("port-free", f"{port} is free" if port else "a free port can be had")
        if error.errno == errno.EADDRINUSE:
            whose = owner(port)
            see = f"sudo ss -ltnp 'sport = :{port}' names it" if whose is None else "stop it"
            text = f"port {port} is taken by {whose or 'a program of another user'}"
            return trouble("port-taken", text, f"{see}; or give another port")
        if error.errno in {errno.EACCES, errno.EPERM}:
            return trouble("port-closed", f"you may not listen on port {port}", "take a port from 1024 on")
        return trouble("no-port", f"no program can listen on port {port}: {error.strerror or error}", "ip address")

    return [one(port) for port in ports or (0,)]


@dataclass(frozen=True, slots=True)
class Firewall:
    """Whether this machine's own firewall keeps others out, as far as its rules can be read.

    Attributes:
        ports: those that are wanted.
        run: runs a program; None if it is not here.
        read: a file's text; None if it cannot be read.
    """

    ports: Sequence[int]
    run: RunProgram
    read: Callable[[Path], str | None]

    async def look(self) -> Diagnosis:
        """The first firewall that is on."""
        for look in (self._ufw, self._firewalld, self._nftables):
            found = await look()
            if found is not None:
                return found
        return ok("no-firewall", "none seen")

    async def _ufw(self) -> Diagnosis | None:
        if re.search(r"^ENABLED=yes", self.read(UFW_SWITCH) or "", re.MULTILINE) is None:
            return None
        ran = await self.run(("ufw", "status"))
        rules = ran.output if ran is not None and ran.status == 0 else None
        closed = [
            port for port in self.ports if rules is None or not re.search(rf"^{port}(/tcp)?\s+ALLOW", rules, re.M)
        ]
        return self._said("ufw", rules is not None, closed, "sudo ufw allow {port}/tcp")

    async def _firewalld(self) -> Diagnosis | None:
        state = await self.run(("firewall-cmd", "--state"))
        if state is None or state.output.strip() != "running":
            return None
        asked = [(port, await self.run(("firewall-cmd", f"--query-port={port}/tcp"))) for port in self.ports]
        closed = [port for port, ran in asked if ran is None or ran.output.strip() != "yes"]
        add = "sudo firewall-cmd --permanent --add-port={port}/tcp && sudo firewall-cmd --reload"
        return self._said("firewalld", True, closed, add)

    async def _nftables(self) -> Diagnosis | None:
        ran = await self.run(("nft", "list", "ruleset"))
        if ran is None or ran.status != 0:
            return None
        for table, body in _TABLE.findall(ran.output):
            for chain, rules in _DROP_CHAIN.findall(body):
                closed = [port for port in self.ports if not re.search(rf"dport\b[^\n]*\b{port}\b[^\n]*accept", rules)]
                add = f"sudo nft insert rule {table} {chain} tcp dport {{port}} accept"
                return self._said("nftables", True, closed, add)
        return None

    def _said(self, name: str, is_readable: bool, closed: Sequence[int], mend: str) -> Diagnosis:
        opens = "; ".join(mend.format(port=port) for port in closed or ("PORT",))
        if not is_readable:
            return hint("firewall-unread", f"{name} is on, and only root can read its rules", opens)
        if closed:
            shown = ", ".join(map(str, closed))
            return hint(
                "firewall-closed", f"{name} lets nobody in on {shown}: others reach a node by a relay only", opens
            )
        if not self.ports:
            return hint(
                "firewall", f"{name} is on: a node's port needs a rule, or others reach it by a relay only", opens
            )
        return ok("firewall-open", f"{name} lets others in")


def try_bind(port: int) -> OSError | None:
    """Listen on a port of every IPv4 address for a moment."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def listening_program(port: int) -> str | None:
    """The program that listens on a TCP port, as `node serve` or by its own name; None if it cannot be seen."""
    try:
        held = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        pid = next((one.pid for one in held if one.laddr and one.laddr.port == port and one.pid is not None), None)
        return None if pid is None else _called(psutil.Process(pid))
    except (psutil.Error, OSError):
        return None  # gone meanwhile, or another user's


def read_file(path: Path) -> str | None:
    """A file's text; None if it is not there or not for this user."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _called(process: psutil.Process) -> str:
    words = process.cmdline()
    for program, command in (("node", "serve"), ("swarm", "bootstrap"), ("swarm", "health")):
        if command in words and any(Path(word).name in {program, f"swarm-{program}"} for word in words[:3]):
            return f"`{program} {command}` (process {process.pid})"
    return f"{process.name()} (process {process.pid})"
