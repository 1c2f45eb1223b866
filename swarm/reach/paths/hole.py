"""One end of a TCP hole: a port whose public address is known, and the attempt to meet another such port.

Both ends connect to each other from the port that a relay saw, at about the same time: each router takes the other
side's packets for answers. In one network two attempts hardly ever meet in flight, so both ends also listen there.

Whatever connects proves that it is the machine of the circuit: the end that waits says its token first, the end that
chooses answers with its own on the one connection that it takes. Nobody else is told a word. A machine knocks at
addresses that another one names only where that does not look into somebody's network (`allowed_targets`).
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Address, ip_address, ip_network
from typing import Final

from swarm.base.errors import RemoteProtocolError
from swarm.base.quota import IPV6_LINK
from swarm.base.tasks import TaskScope, spawn_on
from swarm.directory.dialable import IpAddress, is_dialable, is_public, listed_addresses
from swarm.directory.node_record import split_address
from swarm.directory.sealing import RecordError
from swarm.link.egress.streams import CHUNK_BYTES, Streams, tuned
from swarm.link.endpoint import LinkPath
from swarm.reach.relay.openings import MAX_ADDRESSES, TOKEN_BYTES, parse_addresses

MAX_LAN: Final = 3
"""Addresses in own networks that are told."""
MAX_GLOBAL_V6: Final = 2


@dataclass(frozen=True, slots=True)
class OwnAddresses:
    """What this machine is called.

    Attributes:
        lan: private IPv4 addresses with their networks, as 192.168.1.7/24.
        global_v6: global IPv6 addresses.
    """

    lan: tuple[IPv4Interface, ...] = ()
    global_v6: tuple[IPv6Address, ...] = ()

    def is_in_lan(self, ip: IpAddress) -> bool:
        """Whether an address is in one of this machine's own private networks."""
        return any(ip in one.network for one in self.lan)

    def first(self, host: str) -> OwnAddresses:
        """The same with this address before the others: it is the one that leads out."""
        return OwnAddresses(tuple(sorted(self.lan, key=lambda one: str(one.ip) != host)), self.global_v6)


def own_addresses() -> OwnAddresses:
    """Those of the interfaces that are up; virtual networks of this machine may be among them."""
    lan: list[IPv4Interface] = []
    global_v6: list[IPv6Address] = []
    for ip, mask in listed_addresses():
        if isinstance(ip, IPv6Address):
            if is_public(ip):
                global_v6.append(ip)
        elif mask and ip.is_private:
            lan.append(IPv4Interface(f"{ip}/{mask}"))
    return OwnAddresses(tuple(lan), tuple(global_v6))


MIN_PORT: Final = 1024
"""No router and no system gives a lower port to whoever connects; services of others listen there."""


@dataclass(frozen=True, slots=True)
class Vantage:
    """Where a machine is, as far as another one may be told to knock there.

    Attributes:
        seen: `host:port`, this machine's end as the relay sees it.
        relay_host: IP address of the relay.
        own: this machine's addresses.
    """

    seen: str
    relay_host: str
    own: OwnAddresses

    @property
    def only_public(self) -> bool:
        """Whether it calls none but public addresses.

        A relay on the Internet that claims to see a private address is not believed.
        """
        return is_public(_ip(self.seen)) or is_public(ip_address(self.relay_host))

    def shares_home(self, their_seen: str) -> bool:
        """Whether another machine comes from the same public address, or from one link of IPv6."""
        mine, theirs = _ip(self.seen), _ip(their_seen)
        if mine.version == 6:
            return theirs in ip_network((int(mine), IPV6_LINK), strict=False)
        return mine == theirs


@dataclass(frozen=True, slots=True)
class Targets:
    """Where to knock.

    Attributes:
        lan: `host:port` in this machine's own network: tried first.
        far: `host:port` elsewhere.
    """

    lan: tuple[str, ...] = ()
    far: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lan or self.far)


def allowed_targets(named: Sequence[str], place: Vantage, *, same_home: bool) -> Targets:
    """The addresses among those named at which this machine may knock.

    Args:
        named: `host:port` with IP addresses, as another machine says them.
        place: where this machine is.
        same_home: whether the relay sees both machines at one public address.
    """
    lan: list[str] = []
    far: list[str] = []
    for address in list(dict.fromkeys(named))[:MAX_ADDRESSES]:
        try:
            ip, port = _ip(address), split_address(address)[1]
        except (RecordError, ValueError):
            continue
        if port < MIN_PORT or address == place.seen or ip.is_link_local:
            continue
        if same_home and place.own.is_in_lan(ip):
            lan.append(address)
        elif is_dialable(ip, own_is_public=place.only_public):
            far.append(address)
    return Targets(tuple(lan), tuple(far))


def _ip(address: str) -> IpAddress:
    """The IP address in `host:port`.

    Raises:
        RecordError, ValueError: it has none.
    """
    return ip_address(split_address(address)[0].strip("[]"))


SEEN_S: Final = 3.0
"""How long a relay may take to say what it sees."""
MEET_S: Final = 4.0
"""How long both ends knock."""
GREETING_S: Final = 2.0
"""How long whoever connects may take to say its token."""
MAX_GREETED: Final = 8
"""Connections at a time of which the right one is to be found; further ones are closed."""
LAN_FIRST_S: Final = 0.3
"""By how much addresses in the own network are tried earlier than others."""
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 0.4
_TOKEN_LINE: Final = 2 * TOKEN_BYTES + 1

IS_SUPPORTED: Final = hasattr(socket, "SO_REUSEPORT")
"""Whether several connections may leave from one port here."""


@dataclass(frozen=True, slots=True)
class HoleTokens:
    """How the two ends know each other: 32 hex digits each, made for one attempt.

    Attributes:
        waits: said by the end that waits, as soon as a connection stands.
        chooses: said by the end that chooses, on the connection that it takes.
    """

    waits: str
    chooses: str


class Hole:
    """An end; made by `Hole.at`, which closes all of it but a connection that `meet` returned."""

    def __init__(self, asking: Streams, place: Vantage) -> None:
        self.place = place
        self.relay = asking.remote
        self._port = int(asking.writer.get_extra_info("sockname")[1])

    @classmethod
    @asynccontextmanager
    async def at(cls, relay: str, own: Callable[[], OwnAddresses] = own_addresses) -> AsyncIterator[Hole]:
        """Take a port and ask a relay how it looks from outside.

        The connection that asked stays open: a router might forget the port without it.

        Raises:
            OSError: the relay cannot be reached, or the port cannot be shared here.
            TimeoutError: it does not answer.
            RemoteProtocolError: it answers something else.
        """
        asking: Streams | None = None
        try:
            async with asyncio.timeout(SEEN_S):
                asking = await _connect_shared(relay)
                await asking.say("SEEN")
                match await asking.hear():
                    case ["SEEN", address]:
                        (seen,) = parse_addresses(address, limit=1)
                    case _:
                        raise RemoteProtocolError("SEEN", f"the relay at {relay} does not say what it sees")
            mine = own().first(str(asking.writer.get_extra_info("sockname")[0]))
            yield cls(asking, Vantage(seen, asking.remote_host, mine))
        finally:
            if asking is not None:
                asking.abort()

    @property
    def public(self) -> tuple[str, ...]:
        """`host:port` under which this end may be found from anywhere; the first is the one that the relay sees."""
        v6 = (f"[{ip}]:{self._port}" for ip in self.place.own.global_v6[:MAX_GLOBAL_V6])
        return tuple(dict.fromkeys([self.place.seen, *v6]))

    @property
    def private(self) -> tuple[str, ...]:
        """`host:port` under which it may be found in its own network."""
        return tuple(f"{one.ip}:{self._port}" for one in self.place.own.lan[:MAX_LAN])

    async def meet(self, targets: Targets, tokens: HoleTokens, *, chooses: bool) -> tuple[Streams, LinkPath]:
        """Knock at all targets, and listen.

        Args:
            targets: where the other end may be; may be empty: then it is only listened.
            chooses: whether this is the end that takes a connection; the other one waits for its word.

        Returns:
            The connection, and whether it leads through the own network or through a hole.

        Raises:
            TimeoutError: they do not meet.
        """
        found: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
        greeting = _Greeting(tokens, chooses, found)
        doors = self._doors()
        try:
            async with asyncio.timeout(MEET_S), TaskScope() as scope:
                for door in doors:
                    scope.spawn(_listen(door, scope, greeting))
                for pause_s, addresses in ((0.0, targets.lan), (LAN_FIRST_S if targets.lan else 0.0, targets.far)):
                    for address in addresses:
                        scope.spawn(self._knock(address, pause_s, greeting))
                taken = await found
        except BaseException:
            if found.done() and not found.cancelled():
                found.result().abort()  # it came as the time was over
            raise
        finally:
            for door in doors:
                door.close()
        in_lan = {split_address(address)[0].strip("[]") for address in targets.lan}
        return taken, LinkPath.LAN if taken.remote_host in in_lan else LinkPath.PUNCHED

    async def _knock(self, address: str, pause_s: float, greeting: _Greeting) -> None:
        """Connect until it succeeds; refused means that the other router has not seen its own side knock yet."""
        host, port = split_address(address)
        host = host.strip("[]")
        if port == self._port and any(host == str(one.ip) for one in self.place.own.lan):
            return  # a connection to oneself
        await asyncio.sleep(pause_s)
        pause_s = FIRST_PAUSE_S
        while True:
            with suppress(OSError):
                sock = shared_socket(socket.AF_INET6 if ":" in host else socket.AF_INET, self._port)
                await greeting.greet(await _connected(sock, host, port))
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def _doors(self) -> list[socket.socket]:
        doors = []
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):  # a machine may have one family only
                door = shared_socket(family, self._port)
                door.listen(MAX_GREETED)
                doors.append(door)
        return doors


class _Greeting:
    """Finds the machine of the circuit among those who connect."""

    def __init__(self, tokens: HoleTokens, chooses: bool, found: asyncio.Future[Streams]) -> None:
        self._tokens = tokens
        self._chooses = chooses
        self._found = found
        self._greeted = 0
        self._taken: Streams | None = None

    def spawn(self, scope: TaskScope, streams: Streams) -> None:
        """Look at a connection that came in."""
        if self._greeted >= MAX_GREETED or self._found.done():
            streams.abort()
        else:
            spawn_on(scope, streams.writer, self._came_in(streams))

    async def _came_in(self, streams: Streams) -> None:
        with suppress(OSError):
            await self.greet(streams)

    async def greet(self, streams: Streams) -> None:
        """Take the connection if it is the right one, else close it.

        Raises:
            OSError: it broke.
        """
        self._greeted += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(GREETING_S):
                    if await self._is_right(streams):
                        await self._take(streams)
        finally:
            self._greeted -= 1
            if streams is not self._taken:
                streams.abort()

    async def _take(self, streams: Streams) -> None:
        """Take the first right one: both ends must have the same, so only one is ever told so."""
        if self._taken is not None or self._found.done():
            return
        self._taken = streams
        try:
            if self._chooses:
                await streams.say(self._tokens.chooses)
        except BaseException:
            self._taken = None
            raise
        if self._found.done():  # given up meanwhile
            self._taken = None
        else:
            self._found.set_result(streams)

    async def _is_right(self, streams: Streams) -> bool:
        expected = self._tokens.waits if self._chooses else self._tokens.chooses
        if not self._chooses:
            await streams.say(self._tokens.waits)
        try:
            said = await streams.reader.readexactly(_TOKEN_LINE)
        except asyncio.IncompleteReadError:
            return False
        return hmac.compare_digest(said, expected.encode() + b"\n")


def shared_socket(family: socket.AddressFamily, port: int) -> socket.socket:
    """A TCP socket at a port that others of this program may use too.

    Raises:
        OSError: it cannot be had, or sharing is unknown here.
    """
    if not IS_SUPPORTED:
        raise OSError("ports cannot be shared on this system")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect_shared(relay: str) -> Streams:
    """To the relay from a shared port: over IPv4 if it has that, since there routers change ports.

    Raises:
        OSError: it cannot be reached.
    """
    host, port = split_address(relay)
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    failure = OSError(f"no address of {relay}")
    for family, _, _, _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
        try:
            return await _connected(shared_socket(socket.AddressFamily(family), 0), str(address[0]), port)
        except OSError as error:
            failure = error
    raise failure


async def _connected(sock: socket.socket, host: str, port: int) -> Streams:
    """Connect a socket; it is closed where that fails.

    Raises:
        OSError: nothing answers.
    """
    try:
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        return tuned(*await asyncio.open_connection(sock=sock, limit=CHUNK_BYTES))
    except BaseException:
        sock.close()
        raise


async def _listen(door: socket.socket, scope: TaskScope, greeting: _Greeting) -> None:
    """Greet whoever connects to a door."""
    server = await asyncio.start_server(lambda *ends: greeting.spawn(scope, tuned(*ends)), sock=door, limit=CHUNK_BYTES)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        server.close()
