"""What relays say when they are asked: what they carry, and whence this machine comes. A relay's word may be a lie."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from swarm.discovery.dht.addresses import free_port
from swarm.discovery.node_record import split_address
from swarm.discovery.sealing import RecordError
from swarm.doctor.probes import Resolve
from swarm.egress.lines import MAX_LINE_BYTES, words
from swarm.errors import RemoteProtocolError

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
    """Ask a few relays at once, all from one port of this machine, so that a router's mappings can be compared.

    Args:
        addresses: `host:port` each.
        find: looks a name up.
    """
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
