"""The local end of links to relayed machines: gRPC connects to a socket on this machine, and a way is chosen behind it.

One door per channel, so that every channel has a connection of its own. A better way gets a head start, and the relay
is taken at once after it; the attempt goes on and serves the next connection. Owns no encryption: bytes pass unread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from swarm.base.errors import ConfigError, RemoteProtocolError, SwarmError
from swarm.base.ids import PeerId
from swarm.base.logs import describe
from swarm.base.plain_text import plain_line
from swarm.base.tasks import TaskScope, spawn_on
from swarm.link.egress.ports import RELAY, Egress, TlsPort
from swarm.link.egress.streams import CHUNK_BYTES, MAX_LINE_BYTES, Streams, connect, splice
from swarm.link.endpoint import Endpoint, LinkPath
from swarm.reach.paths.hole import IS_SUPPORTED
from swarm.reach.paths.punch import PunchWay
from swarm.reach.paths.way import REMEMBERED_S, SOON_S, NoWay, OpenedWay, Way
from swarm.reach.relay.openings import MAX_HEADER_BYTES

logger = logging.getLogger(__name__)


CONNECT_S: Final = 5.0
"""How long a relay and the peer behind it may take."""

DialRelay = Callable[[str], Awaitable[Streams]]


class RelayCircuit:
    """Asks a relay for a circuit."""

    name = "relay"

    def __init__(self, dial: DialRelay = connect) -> None:
        self._dial = dial

    async def open(self, peer: PeerId, relay: str) -> OpenedWay:
        """A circuit to a peer; errors as of every way."""
        streams: Streams | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                streams = await self._dial(relay)
                streams.writer.write(f"CONNECT {peer}:1 HTTP/1.1\r\n\r\n".encode())
                await streams.writer.drain()
                status = await _answer(streams.reader)
        except BaseException:
            if streams is not None:
                streams.abort()
            raise
        if status[1:2] != ["200"]:
            streams.abort()
            raise NoWay(f"the relay at {relay} answers {plain_line(' '.join(status[1:]))[:80]!r}")
        return OpenedWay(streams, LinkPath.RELAYED)


async def _answer(reader: asyncio.StreamReader) -> list[str]:
    """The words of a status line, whose headers are read past.

    Raises:
        RemoteProtocolError: it is none.
    """
    left = MAX_HEADER_BYTES
    lines: list[bytes] = []
    while not lines or lines[-1] not in (b"\r\n", b"\n"):
        try:
            line = await reader.readline()
        except ValueError as error:
            raise RemoteProtocolError("status", "longer than a header may be") from error
        left -= len(line)
        if not line.endswith(b"\n") or left < 0 or (not lines and len(line) > MAX_LINE_BYTES):
            raise RemoteProtocolError("status", "no answer of a relay")
        lines.append(line)
    status = lines[0].decode("ascii", "replace").split()
    if not status[:1] or not status[0].startswith("HTTP/1."):
        raise RemoteProtocolError("status", "no answer of a relay")
    return status


class DirectWay:
    """Dials a node at its own address, in small packets, through the proxy where there is one."""

    name = "direct"

    def __init__(self, egress: Egress) -> None:
        self._egress = egress

    async def open(self, _peer: PeerId, address: str) -> OpenedWay:
        """A connection to a node at `host:port`; errors as of every way."""
        try:
            return OpenedWay(await self._egress.open(address), LinkPath.DIRECT)
        except (OSError, TimeoutError) as error:
            raise NoWay(f"{address} is not reached: {describe(error)}", REMEMBERED_S) from error


class PortWay:
    """Asks peers that have a TLS port to lead on."""

    name = "TLS port"

    def __init__(self, egress: Egress) -> None:
        self._egress = egress

    async def open(self, peer: PeerId, address: str) -> OpenedWay:
        """A circuit to a node, through the first port that leads there; errors as of every way."""
        why = "no peer that was joined has a TLS port"
        for port in self._egress.ports:
            try:
                return await RelayCircuit(partial(self._dial, port)).open(peer, port.address)
            except (OSError, TimeoutError, SwarmError) as error:
                why = describe(error)
        raise NoWay(f"{address} is not reached: {why}")

    async def _dial(self, port: TlsPort, _address: str) -> Streams:
        return await self._egress.open_tls(port, RELAY)


def confined_ways(best: Way, egress: Egress) -> tuple[list[Way], Way]:
    """The ways that are tried first, and the last one: through a TLS port, where one is known."""
    return ([best], PortWay(egress)) if egress.ports else ([], best)


MAX_PEERS: Final = 512
"""Peers that are remembered; the least recent one is forgotten for a new one."""


@dataclass(slots=True)
class _Learned:
    """About one peer.

    Attributes:
        again_at: per way that failed, when it may be tried again.
        worked: the way that worked last, and has not failed since.
    """

    again_at: dict[str, float] = field(default_factory=dict)
    worked: str | None = None


class WayMemory:
    """Knows nothing at first. Its ways are few, so only peers are bounded."""

    def __init__(self, clock: Callable[[], float], max_peers: int = MAX_PEERS) -> None:
        self._clock = clock
        self._max_peers = max_peers
        self._learned: OrderedDict[PeerId, _Learned] = OrderedDict()

    def __len__(self) -> int:
        return len(self._learned)

    def worth_trying(self, peer: PeerId, ways: Sequence[Way]) -> list[Way]:
        """The ways that did not fail lately, the one that worked first."""
        learned = self._learned.get(peer)
        if learned is None:
            return list(ways)
        now = self._clock()
        left = [way for way in ways if learned.again_at.get(way.name, now) <= now]
        return sorted(left, key=lambda way: way.name != learned.worked)

    def works(self, peer: PeerId) -> bool:
        """Whether some way worked the last time it was tried."""
        learned = self._learned.get(peer)
        return learned is not None and learned.worked is not None

    def worked(self, peer: PeerId, way: Way) -> None:
        """A way led to the peer."""
        learned = self._about(peer)
        learned.worked = way.name
        learned.again_at.pop(way.name, None)

    def failed(self, peer: PeerId, way: Way, again_s: float) -> None:
        """A way did not lead to the peer."""
        learned = self._about(peer)
        if learned.worked == way.name:
            learned.worked = None
        learned.again_at[way.name] = self._clock() + again_s

    def _about(self, peer: PeerId) -> _Learned:
        learned = self._learned.setdefault(peer, _Learned())
        self._learned.move_to_end(peer)
        while len(self._learned) > self._max_peers:
            self._learned.popitem(last=False)
        return learned


HEAD_START_S: Final = 0.7
"""What a better way gets before the relay is taken, where nobody knows whether it works."""
KNOWN_S: Final = 1.5
"""The same where it worked the last time. With the relay after it, it must fit into the 3 s of an attach."""
SPARE_S: Final = 4.0
"""How long a connection is kept that came too late for whoever wanted it; a server waits a little longer for words."""
MAX_DOORS: Final = 512
"""Channels at a time; one beyond them asks the relay by itself."""
MAX_CARRIED: Final = 4
"""Connections of one channel at a time; it has one, and another while that one ends."""
MAX_ATTEMPTS: Final = 8
"""Peers to which better ways are tried at a time; the relay serves the others meanwhile."""
MAX_TURNS: Final = 3
"""Attempts that one connection waits for: another connection may take what one brings."""
MAX_SOCKET_PATH: Final = 100
"""Bytes of a socket's path; systems take 103 to 107."""


class PathChoice:
    """Chooses a way for each connection."""

    def __init__(self, better: Sequence[Way], last: Way, scope: TaskScope, memory: WayMemory) -> None:
        """Know nothing yet.

        Args:
            better: ways that are tried first, the best first.
            last: the way that is always there, such as the relay.
        """
        self._better = list(better)
        self._last = last
        self._scope = scope
        self.memory = memory
        self._attempts: dict[PeerId, asyncio.Event] = {}  # set when the attempt succeeded or failed
        self._spares: dict[PeerId, OpenedWay] = {}

    def add(self, way: Way) -> None:
        """Try another way from now on, before those that are known."""
        self._better.insert(0, way)

    def is_hopeless(self, peer: PeerId) -> bool:
        """Whether only the relay is left."""
        return not self.memory.worth_trying(peer, self._better)

    async def open(self, peer: PeerId, relay: str) -> OpenedWay:
        """The best connection that can be had soon; errors as of every way."""
        head_start_s = KNOWN_S if self.memory.works(peer) else HEAD_START_S
        opened = None
        try:
            async with asyncio.timeout(head_start_s):
                opened = await self._better_one(peer, relay)
        except TimeoutError:
            pass
        return opened or await self._last.open(peer, relay)

    async def _better_one(self, peer: PeerId, relay: str) -> OpenedWay | None:
        """A connection by a better way, as soon as there is one; None where there will be none."""
        for _ in range(MAX_TURNS):
            spare = self._spares.pop(peer, None)
            if spare is not None:
                return spare
            attempt = self._attempts.get(peer) or self._start(peer, relay)
            if attempt is None:
                return None
            await attempt.wait()
        return self._spares.pop(peer, None)

    def _start(self, peer: PeerId, relay: str) -> asyncio.Event | None:
        ways = self.memory.worth_trying(peer, self._better)
        if not ways or len(self._attempts) >= MAX_ATTEMPTS:
            return None
        attempt = self._attempts[peer] = asyncio.Event()
        self._scope.spawn(self._run(attempt, ways, peer, relay))
        return attempt

    async def _run(self, attempt: asyncio.Event, ways: Sequence[Way], peer: PeerId, relay: str) -> None:
        """Try; what comes of it lies there for a while, for whoever wants it."""
        opened = None
        try:
            try:
                opened = await self._first_open(ways, peer, relay)
                if opened is not None:
                    self._put(peer, opened)
            finally:
                del self._attempts[peer]
                attempt.set()
            if opened is not None:
                await asyncio.sleep(SPARE_S)
        finally:
            if opened is not None and self._spares.get(peer) is opened:
                del self._spares[peer]
                opened.streams.abort()

    def _put(self, peer: PeerId, opened: OpenedWay) -> None:
        older = self._spares.get(peer)
        if older is not None:
            older.streams.abort()
        self._spares[peer] = opened

    async def _first_open(self, ways: Sequence[Way], peer: PeerId, relay: str) -> OpenedWay | None:
        """Try ways one after another."""
        for way in ways:
            try:
                opened = await way.open(peer, relay)
            except NoWay as error:
                self.memory.failed(peer, way, error.again_s)
                logger.debug("%s to %s: %s", way.name, peer, error)
            except (OSError, TimeoutError, SwarmError) as error:
                self.memory.failed(peer, way, SOON_S)
                logger.debug("%s to %s: %s", way.name, peer, describe(error))
            except Exception as error:  # a fault of ours must not end the program: the relay is there
                self.memory.failed(peer, way, SOON_S)
                logger.warning("%s to %s failed", way.name, peer, exc_info=error)
            else:
                self.memory.worked(peer, way)
                return opened
        return None


class _LocalDoor:
    """A socket on this machine that leads to one peer."""

    def __init__(self, endpoint: Endpoint, path: Path, choice: PathChoice) -> None:
        """Listen; gRPC may connect from now on.

        Raises:
            OSError: the socket cannot be had.
        """
        self._peer, self._relay = endpoint.peer, endpoint.relay or endpoint.address
        self._file = path
        self._choice = choice
        self._carried = 0
        self._released = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.path: LinkPath | None = None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.setblocking(False)
            self.socket.bind(str(path))
            self.socket.listen(MAX_CARRIED)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"unix:{self._file}"

    @property
    def can_improve(self) -> bool:
        """Whether it went through the relay, and a better way has been found since."""
        return self.path is LinkPath.RELAYED and self._choice.memory.works(self._peer)

    def release(self) -> None:
        """Close soon; from any thread."""
        with suppress(RuntimeError):  # the loop has ended, and the door with it
            self._loop.call_soon_threadsafe(self._released.set)

    def close(self) -> None:
        self.socket.close()
        self._file.unlink(missing_ok=True)

    async def serve(self) -> None:
        """Carry what comes until the door is released: with its channel, all that it carried has ended."""
        try:
            async with TaskScope() as scope:
                server = await asyncio.start_unix_server(
                    lambda *ends: self._accept(scope, Streams(*ends)), sock=self.socket, limit=CHUNK_BYTES
                )
                try:
                    await self._released.wait()
                finally:
                    server.close()
        finally:
            self.close()

    def _accept(self, scope: TaskScope, local: Streams) -> None:
        if self._carried >= MAX_CARRIED:
            local.abort()
        else:
            spawn_on(scope, local.writer, self._carry(local))

    async def _carry(self, local: Streams) -> None:
        self._carried += 1
        try:
            opened = await self._choice.open(self._peer, self._relay)
            self.path = opened.path
            logger.debug("%s: %s", self._peer, opened.path.value)
            await splice(local, opened.streams)
        except (OSError, TimeoutError, SwarmError) as error:
            logger.debug("no way to %s: %s", self._peer, describe(error))
        finally:
            self._carried -= 1
            if not local.writer.is_closing():
                local.abort()


class LocalDialler:
    """Opens doors; made by `open_ways`."""

    def __init__(self, choice: PathChoice, scope: TaskScope, direct: PathChoice | None = None) -> None:
        """Open none yet.

        Args:
            direct: of ways to machines that have an address of their own; None: gRPC dials them itself.
        """
        self.choice = choice
        self._direct = direct
        self._scope = scope
        self._folder: Path | None = None
        self._is_broken = False
        self._doors: set[_LocalDoor] = set()

    def open_door(self, endpoint: Endpoint) -> _LocalDoor | None:
        """A door to a machine; None where gRPC does as well without, or too many doors are open."""
        choice = self._direct if endpoint.relay is None else self.choice
        if choice is None or self._is_broken or len(self._doors) >= MAX_DOORS:
            return None
        if self._direct is None and choice.is_hopeless(endpoint.peer):
            return None
        try:
            door = _LocalDoor(endpoint, self._private_folder() / f"{secrets.token_hex(4)}", choice)
        except OSError as error:
            self._is_broken = True
            logger.debug("no local sockets here: %s", describe(error))
            return None
        self._doors.add(door)
        self._scope.spawn(self._serve(door))
        return door

    async def _serve(self, door: _LocalDoor) -> None:
        try:
            await door.serve()
        except OSError as error:
            logger.debug("a local socket failed: %s", describe(error))
        finally:
            self._doors.discard(door)

    def _private_folder(self) -> Path:
        """For this user alone; made when it is first needed."""
        if self._folder is None:
            folder = tempfile.mkdtemp(prefix="canopy-ways-")
            if len(folder) > MAX_SOCKET_PATH - 10:
                shutil.rmtree(folder)
                folder = tempfile.mkdtemp(prefix="canopy-ways-", dir="/tmp")
            self._folder = Path(folder)
        return self._folder

    def clean_up(self) -> None:
        """Remove the folder, after the doors' tasks have ended; a task that never began leaves its door to this."""
        for door in self._doors:
            door.close()
        self._doors.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def are_supported() -> bool:
    """Whether this system has what better ways need: local sockets, and ports that several connections share."""
    return IS_SUPPORTED and hasattr(socket, "AF_UNIX") and sys.platform != "win32"


@asynccontextmanager
async def open_ways(
    better: Sequence[Way] | None = None, clock: Callable[[], float] = time.monotonic, egress: Egress | None = None
) -> AsyncIterator[LocalDialler | None]:
    """Better ways for the dialers of one program, while the block runs; None where the system has not what they need.

    Args:
        better: the ways, the best first; holes by default.
        clock: seconds that never go back.
        egress: of a machine whose network lets little out; then it chooses all ways.

    Raises:
        ConfigError: links can leave this machine in no way that this system supports.
    """
    if not are_supported():
        if egress is not None and not egress.is_narrow:
            raise ConfigError("links through a TLS port or a proxy need local sockets, which this system has not")
        yield None
        return
    dialler = None
    try:
        async with TaskScope() as scope:
            memory = WayMemory(clock)
            if egress is None:
                choice = PathChoice([PunchWay()] if better is None else better, RelayCircuit(), scope, memory)
                dialler = LocalDialler(choice, scope)
            else:
                relayed, direct = (
                    PathChoice(*confined_ways(way, egress), scope, memory)
                    for way in (RelayCircuit(egress.open_relay), DirectWay(egress))
                )
                dialler = LocalDialler(relayed, scope, direct)
            yield dialler
    finally:
        if dialler is not None:
            dialler.clean_up()
