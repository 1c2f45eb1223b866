"""This machine's side of being dialled: ports that can be bound, firewalls that can be read."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from swarm.doctor.ladder import Diagnoses, Diagnosis, hint, ok, trouble
from swarm.doctor.processes import Ran

_DROP_CHAIN: Final = re.compile(
    r"chain (\S+) \{\s*type filter hook input [^;]*; policy (?:drop|reject);(.*?)\n\t\}", re.DOTALL
)
_TABLE: Final = re.compile(r"^table (\S+ \S+) \{(.*?)^\}", re.DOTALL | re.MULTILINE)
UFW_SWITCH: Final = Path("/etc/ufw/ufw.conf")

RunProgram = Callable[[Sequence[str]], Awaitable[Ran | None]]


def look_at_ports(
    ports: Sequence[int], bind: Callable[[int], OSError | None], owner: Callable[[int], str | None]
) -> Diagnoses:
    """Whether a node could listen.

    Args:
        ports: those that are wanted; none for any free one.
        bind: tries to listen on a port of every address; the error if it cannot, else None.
        owner: the program that listens on a port; None if it cannot be seen.
    """

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
