"""A home and an Internet of a few machines, each a network namespace of this machine, in which troubles are planted.

    home 192.0.2.2  ──  router 192.0.2.1 = Internet: name server .53, hub .80, peer and relay .10, relay .11, proxy .31

A thread enters the Internet, opens its servers, enters the home, and runs servers and program in one event loop.
Sockets keep the namespace in which they were made. Needs root.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar, cast

from swarm.doctor.probes import GREETING, HUB, interfaces

T = TypeVar("T")
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

HOME, DNS, HUB_IP, PEER_IP, RELAY_IP, PROXY_IP, NOBODY_IP = (
    "192.0.2.2",
    *(f"203.0.113.{last}" for last in (53, 80, 10, 11, 31, 99)),
)
PEER_PORT, RELAY_PORT, PROXY_PORT = 31_337, 31_338, 3_128
NAMES = {HUB: HUB_IP, "boot.example": PEER_IP}
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = count()


@dataclass(frozen=True, slots=True)
class Planted:
    """What is different.

    Attributes:
        home: lines for `ip -batch` in the home, after all is well there.
        internet: the same in the Internet.
        filter: an nftables chain's rules for what comes from the home.
        servers: by address and port, in place of what is there otherwise; None takes one away.
        dns_delay_s: how long the name server takes.
        seen: as what relays see the home; None as it is.
    """

    home: Sequence[str] = ()
    internet: Sequence[str] = ()
    filter: str = ""
    servers: dict[tuple[str, int], Answer | None] = field(default_factory=dict)
    dns_delay_s: float = 0.0
    seen: Sequence[str] = ()


def page(head: str) -> Answer:
    """Answers every request so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1_024):
            writer.write(f"{head}\r\n\r\n".encode())
        writer.close()

    return answer


hub_page = page(f"HTTP/1.1 301 Moved\r\nLocation: https://{HUB}/")
"""Sends everybody to the hub's TLS port."""


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes everything and says nothing."""
    while await reader.read(65_536):
        pass
    writer.close()


async def libp2p(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Greets as a libp2p peer does."""
    writer.write(GREETING)
    await silent(reader, writer)


def relay(seen: str) -> Answer:
    """A relay that sees the asker there; empty: as it comes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        verb = (await reader.readline()).strip()
        host, port = writer.get_extra_info("peername")[:2]
        writer.write(b"LOAD 1 64 0 10\n" if verb == b"LOAD" else f"SEEN {seen or f'{host}:{port}'}\n".encode())
        writer.close()

    return answer


class NameServer(asyncio.DatagramProtocol):
    """Knows a few names, and that there are no others."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        asyncio.get_running_loop().call_later(self.delay_s, self._answer, data, addr)

    def _answer(self, data: bytes, addr: tuple[str, int]) -> None:
        labels, place = [], 12
        while data[place]:
            labels.append(data[place + 1 : place + 1 + data[place]].decode())
            place += 1 + data[place]
        question, ip = data[12 : place + 5], NAMES.get(".".join(labels).lower())
        is_found = ip is not None and question[-4:-2] == b"\0\1"
        head = data[:2] + (b"\x81\x80" if ip is not None else b"\x81\x83") + b"\0\1" + bytes([0, is_found]) + bytes(4)
        found = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton(ip) if ip is not None and is_found else b""
        if not self.transport.is_closing():
            self.transport.sendto(head + question + found, addr)


def run_at_home(planted: Planted, folder: Path, program: Callable[[str], Awaitable[T]]) -> T:
    """Build the machines, plant, and run a program at home; its result.

    Args:
        planted: what is different.
        folder: for files.
        program: what to run; it gets the name of the Internet's namespace.
    """
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            with ExitStack() as stack:
                home, internet = stack.enter_context(_namespaces())
                _build(home, internet)
                _enter(internet)
                sockets = {place: stack.enter_context(_listening(*place)) for place in _servers(planted)}
                names = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                names.bind((DNS, 53))
                _enter(home)
                _use_name_server(folder)
                while not all(interfaces().values()):  # the system says a moment later that a link is up
                    os.sched_yield()
                _plant(home, internet, planted)
                outcome.append(asyncio.run(_serve_and_run(planted, sockets, names, lambda: program(internet))))
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            outcome.append(error)

    thread = threading.Thread(target=run, name=f"home {next(_numbers)}")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


async def _serve_and_run(
    planted: Planted,
    sockets: dict[tuple[str, int], socket.socket],
    names: socket.socket,
    program: Callable[[], Awaitable[T]],
) -> T:
    loop, servers = asyncio.get_running_loop(), _servers(planted)
    async with AsyncExitStack() as stack:
        for place, sock in sockets.items():
            await stack.enter_async_context(await asyncio.start_server(servers[place], sock=sock))
        transport, _ = await loop.create_datagram_endpoint(lambda: NameServer(planted.dns_delay_s), sock=names)
        stack.callback(transport.close)
        return await program()


def _servers(planted: Planted) -> dict[tuple[str, int], Answer]:
    first, second = (*planted.seen, "", "")[:2]
    usual: dict[tuple[str, int], Answer | None] = {
        (HUB_IP, 80): hub_page,
        (HUB_IP, 443): silent,
        (PEER_IP, PEER_PORT): libp2p,
        (PEER_IP, RELAY_PORT): relay(first),
        (RELAY_IP, RELAY_PORT): relay(second),
    }
    return {place: answer for place, answer in (usual | planted.servers).items() if answer is not None}


@contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    names = [f"doctor-{os.getpid()}-{next(_numbers)}" for _ in range(2)]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _build(home: str, internet: str) -> None:
    addresses = (DNS, HUB_IP, PEER_IP, RELAY_IP, PROXY_IP)
    _ip(
        internet,
        "link set lo up",
        f"link add wire type veth peer name eth0 netns {home}",
        "addr add 192.0.2.1/24 dev wire",
        *(f"addr add {ip}/32 dev lo" for ip in addresses),
        "link set wire gso_max_segs 1 up",
    )
    _ip(home, "link set lo up", f"addr add {HOME}/24 dev eth0", "link set eth0 gso_max_segs 1 up")
    _ip(home, "route add default via 192.0.2.1")


def _plant(home: str, internet: str, planted: Planted) -> None:
    if planted.filter:
        rules = f"table ip x {{\nchain y {{\ntype filter hook prerouting priority 0\n{planted.filter}\n}}\n}}\n"
        subprocess.run(["ip", "netns", "exec", internet, "nft", "-f", "-"], check=True, input=rules, text=True)
    _ip(internet, *planted.internet)
    _ip(home, *planted.home)


def _ip(namespace: str, *lines: str) -> None:
    if lines:
        command = ["ip", "-n", namespace, "-batch", "-"]
        subprocess.run(command, check=True, input="\n".join(lines), text=True, capture_output=True)


def _enter(namespace: str) -> None:
    with Path("/var/run/netns", namespace).open("rb") as file:
        _checked(_libc.setns(file.fileno(), 0))


def _use_name_server(folder: Path) -> None:
    """For this thread and its children alone. The system gives up sooner than by itself: no test waits for it."""
    file = folder / "resolv.conf"
    file.write_text(f"nameserver {DNS}\noptions timeout:1 attempts:2\n")
    _checked(_libc.unshare(_CLONE_NEWNS))
    _checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _checked(_libc.mount(os.fsencode(file), b"/etc/resolv.conf", None, _MS_BIND, None))


def mount_small(folder: Path) -> None:
    """A file system of 1 MB, for this thread and its children alone; only at home."""
    _checked(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=1m"))


def as_nobody() -> None:
    """From here on this thread opens files as a user who owns none; only at home."""
    _libc.setfsuid(65_534)


def _listening(host: str, port: int) -> socket.socket:
    sock = socket.create_server((host, port))
    sock.setblocking(False)
    return sock


def _checked(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
