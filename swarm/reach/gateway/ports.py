"""A port of the home router that leads to this machine: asked for, renewed, watched and given back.

Three protocols, tried one shortly after the other: PCP, NAT-PMP, and UPnP by `miniupnpc` where that is installed. The
router's word proves nothing: whether peers come through is found by dial-back. Which router this machine's packets
leave by is read from the system's routes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any, Final, Protocol

from swarm.base.errors import RemoteProtocolError
from swarm.base.tasks import TaskScope
from swarm.directory.dialable import IpAddress, is_public
from swarm.link.egress.streams import bracketed
from swarm.reach.gateway import messages
from swarm.reach.gateway.messages import EpochAnswer, MapAnswer, MapRequest

LIFETIME_S: Final = 3_600
"""What is asked for; a router may give less."""
SHORTEST_S: Final = 20.0
"""A mapping that the router gives for less time is renewed after half of this all the same."""
MAPPING_S: Final = 3.0
"""Time for all protocols together."""
STAGGER_S: Final = 0.4
"""The next protocol is tried when the one before failed, or gave no answer for so long."""
WAITS_S: Final = (0.25, 0.5, 1.0)
"""For the answer to a datagram, which is then sent again."""
CHECK_S: Final = 5.0
"""How often the router is asked whether it still has the mapping."""


class NoMapping(Exception):
    """No router maps a port; the message says what was tried."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A port of the router.

    Attributes:
        host: its external IP address.
        port: its external TCP port.
        lifetime_s: for how long it holds.
    """

    host: str
    port: int
    lifetime_s: float
    protocol: str

    @property
    def address(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


class Router(Protocol):
    """One protocol of one router, for one port of this machine."""

    @property
    def name(self) -> str:
        """The protocol's."""
        ...

    async def map(self, external_port: int, lifetime_s: int) -> Mapping:
        """Ask for the mapping, or renew it.

        Raises:
            OSError: nobody answers.
            TimeoutError: the same.
            RemoteProtocolError: the router refuses, or says what is none.
            NoMapping: it has nothing to give.
        """
        ...

    async def holds(self) -> bool:
        """Whether the router still has it; raises as `map`."""
        ...

    async def unmap(self) -> None:
        """Give it back; raises as `map`."""
        ...


FAILURES = (OSError, TimeoutError, RemoteProtocolError, NoMapping)


async def ask(gateway: str, port: int, request: Callable[[IPv4Address], bytes]) -> tuple[bytes, IPv4Address]:
    """Send a datagram to a router until it answers.

    Args:
        request: the datagram, given this machine's address towards the router.

    Returns:
        The first answer, and this machine's address.

    Raises:
        OSError: nobody listens there.
        TimeoutError: nobody answers.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect((gateway, port))  # only this address is heard
        client = IPv4Address(sock.getsockname()[0])
        for wait_s in WAITS_S:
            await loop.sock_sendall(sock, request(client))
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    return await loop.sock_recv(sock, messages.MAX_DATAGRAM + 1), client
    raise TimeoutError


class _Epoch:
    """Whether a router began anew since its last answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, float] | None = None  # (its epoch, when)

    def note(self, epoch_s: float) -> bool:
        """Take the epoch of an answer; whether the router has forgotten its mappings."""
        now, before = self._clock(), self._last
        self._last = epoch_s, now
        return before is not None and messages.has_forgotten(before[0], now - before[1], epoch_s)


class PcpRouter:
    name = "PCP"

    def __init__(
        self,
        gateway: str,
        internal_port: int,
        nonce: bytes,
        port: int = messages.PORT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask nothing yet.

        Args:
            nonce: 12 bytes that nobody else knows: who knows them may delete the mapping.
            clock: a monotonic one, in seconds.
        """
        self._gateway, self._port, self._internal = gateway, port, internal_port
        self._nonce = nonce
        self._epoch = _Epoch(clock)

    async def map(self, external_port: int, lifetime_s: int) -> Mapping:
        answer = await self._ask(external_port, lifetime_s)
        self._epoch.note(answer.epoch_s)
        return _given(answer, answer.address, self.name)

    async def holds(self) -> bool:
        """Ask for the epoch."""
        data, _ = await ask(self._gateway, self._port, messages.pcp_announce)
        try:
            return not self._epoch.note(messages.read_pcp_announce(data).epoch_s)
        except RemoteProtocolError as refused:
            if refused.field == "result":
                return True  # it maps, and tells its epoch when the mapping is renewed
            raise

    async def unmap(self) -> None:
        await self._ask(0, 0)

    async def _ask(self, external_port: int, lifetime_s: int) -> MapAnswer:
        def request(client: IPv4Address) -> bytes:
            return messages.pcp_map(MapRequest(self._internal, external_port, lifetime_s, client, self._nonce))

        data, _ = await ask(self._gateway, self._port, request)
        return _own(messages.read_pcp_map(data, self._nonce), self._internal)


class PmpRouter:
    name = "NAT-PMP"

    def __init__(
        self,
        gateway: str,
        internal_port: int,
        port: int = messages.PORT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway, self._port, self._internal = gateway, port, internal_port
        self._epoch = _Epoch(clock)
        self._address: IPv4Address | None = None

    async def map(self, external_port: int, lifetime_s: int) -> Mapping:
        answer = await self._ask(external_port, lifetime_s)
        told = await self._ask_address()
        self._epoch.note(told.epoch_s)
        self._address = told.address
        return _given(answer, told.address, self.name)

    async def holds(self) -> bool:
        """Ask for the external address and the epoch."""
        told = await self._ask_address()
        return not self._epoch.note(told.epoch_s) and told.address == self._address

    async def unmap(self) -> None:
        await self._ask(0, 0)

    async def _ask(self, external_port: int, lifetime_s: int) -> MapAnswer:
        def request(client: IPv4Address) -> bytes:
            return messages.pmp_map(MapRequest(self._internal, external_port, lifetime_s, client, b""))

        data, _ = await ask(self._gateway, self._port, request)
        return _own(messages.read_pmp_map(data), self._internal)

    async def _ask_address(self) -> EpochAnswer:
        data, _ = await ask(self._gateway, self._port, lambda _: messages.pmp_address())
        return messages.read_pmp_address(data)


def _own(answer: MapAnswer, internal_port: int) -> MapAnswer:
    if answer.internal_port != internal_port:
        raise RemoteProtocolError("answer", "is about another port")
    return answer


def _given(answer: MapAnswer, address: IPv4Address | IPv6Address | None, protocol: str) -> Mapping:
    """What an answer gives.

    Raises:
        NoMapping: nothing that anybody could dial.
    """
    if address is None or address.is_unspecified or not answer.port or not answer.lifetime_s:
        raise NoMapping("the router gives no address")
    return Mapping(str(address), answer.port, answer.lifetime_s, protocol)


class PortMapper:
    """Keeps one port of this machine mapped.

    Attributes:
        mapping: what the router gave; None while it maps nothing.
        is_silent: whether the router did not answer when it was asked last.
    """

    def __init__(
        self,
        port: int,
        routers: Callable[[], Sequence[Router]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mapping: Mapping | None = None
        self.is_silent = False
        self._port = port
        self._find = routers
        self._clock = clock
        self._router: Router | None = None
        self._mapped_at = 0.0

    async def open(self) -> Mapping:
        """Have the port mapped, by whichever protocol gets it first.

        Raises:
            NoMapping: none does within `MAPPING_S`.
        """
        routers = self._find()
        tried: list[str] = []
        found: asyncio.Future[tuple[Router, Mapping] | None] = asyncio.get_running_loop().create_future()
        async with TaskScope() as scope:
            scope.spawn(self._try_all(routers, tried, found))
            with suppress(TimeoutError):
                async with asyncio.timeout(MAPPING_S):
                    await asyncio.shield(found)
        given = found.result() if found.done() else None
        if given is None:
            silent = ", ".join(router.name for router in routers) or "no protocol"
            raise NoMapping("; ".join(tried) or f"no router answers ({silent})")
        (self._router, self.mapping), self.is_silent = given, False
        self._mapped_at = self._clock()
        return self.mapping

    async def _try_all(
        self, routers: Sequence[Router], tried: list[str], found: asyncio.Future[tuple[Router, Mapping] | None]
    ) -> None:
        """Try all, one shortly after the other; `found` gets the first mapping, or None where all failed."""
        failed = [asyncio.Event() for _ in routers]

        async def attempt(number: int, router: Router) -> None:
            for before in failed[:number]:
                with suppress(TimeoutError):
                    async with asyncio.timeout(STAGGER_S):
                        await before.wait()
            if found.done():
                return
            try:
                mapping = await router.map(self._port, LIFETIME_S)
            except FAILURES as error:
                tried.append(f"{router.name}: {_plainly(error)}")
                failed[number].set()
                return
            if not found.done():
                found.set_result((router, mapping))

        async with asyncio.TaskGroup() as group:
            for number, router in enumerate(routers):
                group.create_task(attempt(number, router))
        if not found.done():
            found.set_result(None)

    async def keep(self) -> None:
        """Renew the mapping at half of its lifetime, and look every `CHECK_S` whether the router has it; for ever."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.look()

    async def look(self) -> None:
        """Look once."""
        if self._router is None or self.mapping is None:
            return
        before, self.is_silent = self.mapping, False
        age_s = self._clock() - self._mapped_at
        is_due = age_s >= max(before.lifetime_s, SHORTEST_S) / 2
        try:
            if is_due or not await self._router.holds():
                self.mapping = await self._router.map(before.port, LIFETIME_S)
                self._mapped_at = self._clock()
        except FAILURES as error:
            if age_s < before.lifetime_s and not isinstance(error, RemoteProtocolError | NoMapping):
                self.is_silent = True
                return  # it may be starting: what it mapped may hold yet, and a dial-back tells
            self.mapping = None

    async def close(self) -> None:
        """Give the mapping back, if there is one; harmless the second time."""
        router, self._router = self._router, None
        was_mapped, self.mapping = self.mapping is not None, None
        if router is not None and was_mapped:
            with suppress(*FAILURES):
                async with asyncio.timeout(1.0):
                    await router.unmap()


def _plainly(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError):
        return "nobody listens"
    return str(error)


DISCOVER_MS: Final = 500
PORTS_TRIED: Final = 5
"""External ports that are tried where one is taken."""
DESCRIPTION: Final = "canopy"


class UpnpRouter:
    """The gateway that answers in this machine's network."""

    name = "UPnP"

    def __init__(self, internal_port: int) -> None:
        self._internal = internal_port
        self._gateway: Any = None
        self._external = 0
        self._is_wanted = True

    async def map(self, external_port: int, lifetime_s: int) -> Mapping:
        """Ask for the mapping, or renew it.

        Raises:
            NoMapping: the library is not installed, no router answers, or it refuses.
        """
        self._is_wanted = True
        try:
            return await asyncio.to_thread(self._map, external_port, lifetime_s)
        except asyncio.CancelledError:
            self._is_wanted = False  # the thread goes on until it looks
            raise

    async def holds(self) -> bool:
        """Ask whether it has the mapping, and the same address outside."""
        return await asyncio.to_thread(self._holds)

    async def unmap(self) -> None:
        if self._gateway is not None and self._external:
            await asyncio.to_thread(self._call, "deleteportmapping", self._external, "TCP")

    def _map(self, external_port: int, lifetime_s: int) -> Mapping:
        if self._gateway is None:
            self._gateway = _discover()
        for port in range(external_port, min(external_port + PORTS_TRIED, 65_536)):
            for lease_s in (lifetime_s, 0):  # some routers know permanent ones only
                if not self._is_wanted:
                    raise NoMapping("another protocol was faster")
                try:
                    added = self._call(
                        "addportmapping", port, "TCP", self._gateway.lanaddr, self._internal, DESCRIPTION, "", lease_s
                    )
                except NoMapping:
                    continue
                if added:
                    self._external = port
                    self._host = str(self._call("externalipaddress"))
                    return Mapping(self._host, port, lease_s or lifetime_s, self.name)
        raise NoMapping("the router refuses")

    def _holds(self) -> bool:
        found = self._call("getspecificportmapping", self._external, "TCP")
        is_own = bool(found) and tuple(found[:2]) == (self._gateway.lanaddr, self._internal)
        return is_own and str(self._call("externalipaddress")) == self._host

    def _call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - the library is untyped
        try:
            return getattr(self._gateway, method)(*arguments)
        except Exception as error:  # the library raises bare ones
            raise NoMapping(f"the router refuses: {str(error)[:100]}") from error


def _discover() -> Any:  # noqa: ANN401 - the library is untyped
    try:
        import miniupnpc
    except ImportError:
        raise NoMapping("not tried: pip install 'canopy-swarm[upnp]' adds it") from None
    gateway = miniupnpc.UPnP()
    gateway.discoverdelay = DISCOVER_MS
    try:
        gateway.discover()
        gateway.selectigd()
    except Exception as error:
        raise NoMapping("no router answers") from error
    return gateway


ROUTES: Final = Path("/proc/net/route")
MAX_GATEWAYS: Final = 2
_UP_GATEWAY: Final = 0x3
_GATEWAY_FIRST: Final = 1
"""Where routes cannot be read: most home routers have the first address of their network."""


def default_gateways(found: Iterable[IpAddress], routes: Path = ROUTES) -> list[IPv4Address]:
    """The routers of the default routes, those with the lowest metric first; a guess where they cannot be read."""
    try:
        table = routes.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        private = [ip for ip in found if isinstance(ip, IPv4Address) and not is_public(ip)]
        return [IPv4Address(int(ip) & ~0xFF | _GATEWAY_FIRST) for ip in private][:MAX_GATEWAYS]
    return parse_routes(table)


def parse_routes(table: str) -> list[IPv4Address]:
    """The gateways of the default routes in the kernel's table; lines that are odd are passed over."""
    routes: list[tuple[int, IPv4Address]] = []
    for line in table.splitlines()[1:]:
        columns = line.split()
        try:
            destination, gateway, flags, metric = columns[1], columns[2], int(columns[3], 16), int(columns[6])
            is_default = int(destination, 16) == 0 and int(columns[7], 16) == 0
            address = IPv4Address(int(gateway, 16).to_bytes(4, sys.byteorder)) if is_default else None
        except (ValueError, IndexError, OverflowError):
            continue
        if address is not None and flags & _UP_GATEWAY == _UP_GATEWAY:
            routes.append((metric, address))
    routes.sort(key=lambda route: route[0])
    return list(dict.fromkeys(address for _, address in routes))[:MAX_GATEWAYS]
