"""What is asked of sockets: names, connections, a page, large packets. Each is bounded, and says nothing of causes.

A connection that the system made in time counts as made, however late this program is told of it.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import fcntl
import re
import secrets
import socket
import ssl
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

import psutil

from swarm.doctor.ladder import Once
from swarm.link.egress.streams import bracketed

HUB: Final = "huggingface.co"
"""A public host, which machines ask for models anyway: whether its name is found, and connections leave."""
RESOLVE_S: Final = 8.5
"""A second try of the system's, which begins after 5 s, may still succeed."""
CONNECT_S: Final = 3.0
DRAIN_S: Final = 2.5
"""Lost packets are sent again after 0.2, 0.6 and 1.4 s."""
FAR: Final = {socket.AF_INET: "8.8.8.8", socket.AF_INET6: "2600::"}
"""Some address of the Internet for each family: the kernel is asked for the way to it, and nothing is sent."""
GREETING: Final = b"\x13/multistream/1.0.0\n"
"""With which both ends of a libp2p connection begin."""
_UNKNOWN: Final = b"/canopy/doctor/" + b"-" * 800 + b"\n"
LARGE: Final = GREETING + 6 * (bytes([len(_UNKNOWN) & 0x7F | 0x80, len(_UNKNOWN) >> 7]) + _UNKNOWN)
"""A libp2p peer answers each of these protocols with no; together they take more than three packets."""
_DOWN: Final = 0x41
"""Without both of its bits an interface is down: IFF_UP, and IFF_RUNNING, which says that a cable is in."""
_SIOCGIFFLAGS: Final = 0x8913
_DNS_PORT: Final = 53
_HEAD_BYTES: Final = 4_096


class TcpAnswer(enum.IntEnum):
    """What became of a TCP connection; more is better."""

    NO_WAY = 0
    """The system, or somebody on the way, says that there is none."""
    SILENT = 1
    REFUSED = 2
    """The other machine is there, and nobody listens."""
    OPEN = 3
    """Somebody listens: of a peer that was greeted, somebody else."""
    MUTE = 4
    """It was greeted, and said nothing in time."""
    PEER = 5
    """It greets as a libp2p peer does."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A name that was looked up.

    Attributes:
        ips: its addresses; none where it was not found.
        took_s: seconds.
        is_unknown: whether a name server says that there is no such name.
    """

    ips: tuple[str, ...] = ()
    took_s: float = 0.0
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """The head of an HTTP answer."""

    status: int
    location: str = ""


class Names:
    """Names of machines, each looked up once."""

    def __init__(self) -> None:
        self._asked: dict[str, Once[LookedUp]] = {}

    async def __call__(self, host: str) -> LookedUp:
        """The addresses of a name; an address is its own."""
        host = host.strip("[]")
        if is_address(host):
            return LookedUp((host,))
        if host not in self._asked:
            self._asked[host] = Once(lambda: look_up(host))
        return await self._asked[host]()


Resolve = Callable[[str], Awaitable[LookedUp]]


def is_address(host: str) -> bool:
    try:
        ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


async def look_up(host: str) -> LookedUp:
    began = time.monotonic()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await on_thread(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except socket.gaierror as error:
        is_unknown = error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}
        return LookedUp((), time.monotonic() - began, is_unknown)
    except UnicodeError:
        return LookedUp(is_unknown=True)
    except OSError:  # TimeoutError is one
        return LookedUp((), time.monotonic() - began)
    return LookedUp(tuple(dict.fromkeys(str(entry[4][0]) for entry in found)), time.monotonic() - began)


def name_servers(file: Path = Path("/etc/resolv.conf")) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    named = [words[1] for line in lines if len(words := line.split()) > 1 and words[0] == "nameserver"]
    return [server for server in named if is_address(server)]


async def ask_name_server(server: str) -> float | None:
    """Seconds until a name server answers anything; None if it is silent, or knows nobody to ask."""
    question = b"".join(bytes([len(part)]) + part for part in HUB.encode().split(b".")) + b"\0\0\1\0\1"
    number = secrets.token_bytes(2)
    began, loop = time.monotonic(), asyncio.get_running_loop()
    with closing(_socket_for(server, socket.SOCK_DGRAM)) as sock, suppress(OSError):
        sock.connect((server, _DNS_PORT))
        async with asyncio.timeout(RESOLVE_S):
            for _ in range(3):  # the second and the third packet replace lost ones; the answer to any of them counts
                await loop.sock_sendall(sock, number + b"\1\0\0\1\0\0\0\0\0\0" + question)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RESOLVE_S / 3):
                        answer = await loop.sock_recv(sock, 512)
                        fails = len(answer) < 4 or answer[3] & 0xF == 2  # SERVFAIL
                        return None if answer[:2] != number or fails else time.monotonic() - began
    return None


@dataclass(frozen=True, slots=True)
class ConnectProxy:
    """An HTTP proxy.

    Attributes:
        login: `USER:PASSWORD`; empty where there is none.
    """

    host: str
    port: int
    login: str = field(default="", repr=False)

    @classmethod
    def of(cls, url: str, usual_port: int = 80) -> ConnectProxy | None:
        """Read a variable's value; None where it names no HTTP proxy."""
        try:
            place = urlsplit(url if "://" in url else f"http://{url}")
            if place.scheme != "http" or not place.hostname:
                return None
            login = f"{unquote(place.username)}:{unquote(place.password or '')}" if place.username else ""
            return cls(place.hostname, place.port or usual_port, login)
        except ValueError:
            return None

    def wish(self, host: str, port: int) -> str:
        """The first line and the headers of a wish for a connection."""
        place = f"{bracketed(host)}:{port}"
        login = base64.b64encode(self.login.encode()).decode()
        return f"CONNECT {place} HTTP/1.1\r\nHost: {place}" + (
            f"\r\nProxy-Authorization: Basic {login}" if login else ""
        )


async def knock(ip: str, port: int) -> TcpAnswer:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(ip, port)
    except OSError as error:
        return _failed(error)
    writer.transport.abort()
    return TcpAnswer.OPEN


async def greet(host: str, port: int, *, is_tls: bool = False, proxy: ConnectProxy | None = None) -> TcpAnswer:
    """Greet as libp2p does, and wait for the answer."""
    try:
        async with asyncio.timeout(CONNECT_S):
            place = (host, port) if proxy is None else (proxy.host, proxy.port)
            reader, writer = await asyncio.open_connection(*place)
    except OSError as error:
        return _failed(error)
    try:
        async with asyncio.timeout(CONNECT_S):
            if proxy is not None:
                writer.write(f"{proxy.wish(host, port)}\r\n\r\n".encode())
                status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
                if status != b"200":
                    return TcpAnswer.NO_WAY
            if is_tls:
                await writer.start_tls(_tls())
            writer.write(GREETING)
            return TcpAnswer.PEER if await reader.readexactly(len(GREETING)) == GREETING else TcpAnswer.OPEN
    except TimeoutError:
        return TcpAnswer.MUTE
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError):
        return TcpAnswer.OPEN
    finally:
        writer.transport.abort()


def _failed(error: OSError) -> TcpAnswer:
    if isinstance(error, ConnectionError):
        return TcpAnswer.REFUSED
    return TcpAnswer.SILENT if isinstance(error, TimeoutError) else TcpAnswer.NO_WAY


def _tls() -> ssl.SSLContext:
    """For a peer's TLS port, which vouches for nobody: what travels inside is encrypted once more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["canopy-directory"])
    return context


async def exchange(ip: str, port: int, said: bytes, until: bytes) -> bytes:
    """What is answered, up to a mark or 4 kB; nothing where nobody answers."""
    answer = b""
    with suppress(OSError):
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(ip, port)
            try:
                writer.write(said)
                while until not in answer and len(answer) < _HEAD_BYTES and (more := await reader.read(_HEAD_BYTES)):
                    answer += more
            finally:
                writer.transport.abort()
    return answer


async def ask_page(ip: str, port: int, said: str) -> Page | None:
    """The head of what an HTTP server or proxy answers; None where that is none."""
    answer = await exchange(ip, port, f"{said}\r\nConnection: close\r\n\r\n".encode(), b"\r\n\r\n")
    head = answer.decode("latin-1")
    status = re.match(r"HTTP/\d\.\d (\d{3})", head)
    location = re.search(r"^location:\s*(\S+)", head, re.IGNORECASE | re.MULTILINE)
    return None if status is None else Page(int(status[1]), location[1] if location else "")


async def takes_large(ip: str, port: int, segment_bytes: int | None = None) -> bool | None:
    """Whether packets of full size arrive: whether the other machine's system says that it has all that was sent.

    A packet takes `segment_bytes` at most, if given. None: no connection came about.
    """
    loop = asyncio.get_running_loop()
    with closing(_socket_for(ip, socket.SOCK_STREAM)) as sock:
        if segment_bytes is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(sock, (ip, port))
        except OSError:
            return None
        try:
            await loop.sock_sendall(sock, LARGE)
            until = time.monotonic() + DRAIN_S
            while _unconfirmed(sock):
                if time.monotonic() > until:
                    return False
                await asyncio.sleep(0.02)
        except OSError:
            pass  # it was read, and is not wanted
    return True


def interfaces() -> dict[str, bool]:
    """This machine's network interfaces but for its loopback, and whether each is up and has its cable in."""
    found = {}
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # gone meanwhile
                told = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode(), 0))
                flags = struct.unpack_from("H", told, 16)[0]
                found[name] = flags & _DOWN == _DOWN
    return {name: is_up for name, is_up in found.items() if name != "lo"}


def own_addresses() -> Sequence[str]:
    return [one for held in _held_addresses().values() for one in held]


def interface_to(ip: str) -> str:
    """The interface by which an address is reached."""
    with closing(_socket_for(ip, socket.SOCK_DGRAM)) as sock, suppress(OSError):
        sock.connect((ip, 9))
        own = sock.getsockname()[0]
        return next((name for name, held in _held_addresses().items() if own in held), "DEVICE")
    return "DEVICE"


def has_way(ip: str) -> bool:
    """Whether the kernel knows a way to an address; nothing is sent."""
    with closing(_socket_for(ip, socket.SOCK_DGRAM)) as sock:
        try:
            sock.connect((ip, 9))
        except OSError:
            return False
    return True


def _held_addresses() -> dict[str, list[str]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.partition("%")[0] for one in held if one.family in families]
        for name, held in psutil.net_if_addrs().items()
    }


def _socket_for(ip: str, kind: socket.SocketKind) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, kind)
    sock.setblocking(False)
    return sock


def _unconfirmed(sock: socket.socket) -> int:
    """Bytes that were sent, and that the other end has not confirmed yet."""
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])


T = TypeVar("T")

PROGRAM_S: Final = 5.0
MAX_OUTPUT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """A program that ended.

    Attributes:
        status: its exit status; negative where a signal ended it.
        output: standard output, then standard error.
    """

    status: int
    output: str


async def on_thread(call: Callable[[], T]) -> T:
    """The result of a call that may block, such as looking up a name, on a thread that the end never waits for.

    Cancelling gives the result up; the call goes on by itself.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        def once() -> None:
            if not outcome.done():
                act()

        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(once)

    def run() -> None:
        try:
            value = call()
        except Exception as error:  # noqa: BLE001 - raised again where the result is awaited
            failure = error  # `error` is gone when the handler ends
            settle(lambda: outcome.set_exception(failure))
        else:
            settle(lambda: outcome.set_result(value))

    threading.Thread(target=run, daemon=True, name="doctor").start()
    return await outcome


async def run_program(
    command: Sequence[str], limit_s: float = PROGRAM_S, environment: Mapping[str, str] | None = None
) -> Ran | None:
    """How a program without input ended; None if there is none such, or it took longer than `limit_s`."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if environment is None else dict(environment),
        )
    except FileNotFoundError:
        return None
    try:
        async with asyncio.timeout(limit_s):
            output, errors = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text = (output[:MAX_OUTPUT] + b"\n" + errors[:MAX_OUTPUT]).decode(errors="replace").strip()
    return Ran(process.returncode or 0, text)
