"""A relay: knows machines by their names, and passes bytes between them and whoever wants to reach them.

It reads nothing of what it carries, and leads only to machines that stand here by a proof of their name
(`swarm.reach.relay.openings`). It dials nobody but listed nodes, for those whose networks let nothing out but a TLS
port (`swarm.reach.relay.tls_port`). What each address may cost is bounded (`swarm.reach.relay.visits`), and all
circuits share one rate.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.base.logs import CountedLog, describe
from swarm.base.plain_text import plain_line
from swarm.base.quota import parse_ip, stand_in
from swarm.base.tasks import TaskScope
from swarm.directory.node_record import split_address
from swarm.link.egress.streams import MAX_LINE_BYTES, keep_segments_small, words
from swarm.link.endpoint import parse_relayed
from swarm.reach.relay.connection import RelayConnection
from swarm.reach.relay.openings import (
    DEAD_S,
    MAX_HEADER_BYTES,
    MAX_PROOF_BYTES,
    MEETING_BYTES,
    MEETING_S,
    NONCE_BYTES,
    OPENING_S,
    PING_S,
    SEEN_S,
    TAKE_S,
    TOKEN_BYTES,
    Opening,
    Verb,
    check_presence,
    parse_opening,
)
from swarm.reach.relay.tls_port import TlsEntry
from swarm.reach.relay.visits import (
    BEYOND,
    CIRCUITS,
    NAMES,
    OPENINGS,
    OWN_SUMMONS,
    PROOFS,
    SEEN,
    SUMMONS,
    RelayLimits,
    Visit,
    Visits,
)

logger = logging.getLogger(__name__)


BURST_S: Final = 0.25
"""How long a relay that was idle carries as fast as it can."""
CHUNK_BYTES: Final = 65_536
MIN_CHUNK_BYTES: Final = 4_096
CHUNK_S: Final = 0.01
RATE_S: Final = 5.0
"""Over how long the carried rate is told."""

CallLater = Callable[[float, Callable[[], None]], object]


@dataclass(slots=True)
class Flow:
    """One circuit's account.

    Attributes:
        crowd: among how many of its owner's circuits one share is divided.
        finish: virtual time, in bytes, at which what it carried is paid for.
    """

    crowd: Callable[[], float]
    finish: float = 0.0


@dataclass(frozen=True, slots=True)
class _Payment:
    """A flow that waits for its turn: when it began in virtual time, for how many bytes, and what wakes it."""

    start: float
    count: int
    turn: asyncio.Future[None]


class FairShare:
    """The rate that a machine lends, shared fairly: fair queueing in virtual time over a token bucket.

    Each circuit pays for what it has carried before it carries more. Who carried least is served first, so a circuit
    with little to say waits for nobody's backlog.
    Source: Golestani, "A self-clocked fair queueing scheme", 1994; as in Goyal, Vin and Cheng, "Start-time fair
    queueing", 1996, time is the start of what is served.
    """

    def __init__(
        self, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic, call_later: CallLater | None = None
    ) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._call_later = call_later
        self._left = bytes_per_s * BURST_S
        self._at = clock()
        self._virtual = 0.0
        self._turns = itertools.count()
        self._waiting: list[tuple[float, int, _Payment]] = []  # by when it would be paid for, in virtual time
        self._is_armed = False
        self._recent = 0.0
        self._recent_at = self._at

    async def pay(self, flow: Flow, count: int) -> None:
        """Pay for `count` bytes that a flow has carried; returns when it may carry more, and never at once."""
        self._note(count)
        start = max(self._virtual, flow.finish)
        flow.finish = start + count * max(flow.crowd(), 1.0)
        self._refill()
        if self._left > 0 and not self._waiting:
            self._left -= count
            self._virtual = start
            await asyncio.sleep(0)  # or a loop of reads and writes that are always ready would stop all others
            return
        payment = _Payment(start, count, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, (flow.finish, next(self._turns), payment))
        self._arm()
        await payment.turn

    def change(self, bytes_per_s: float) -> None:
        """Lend another rate from now on."""
        self._refill()
        self._rate = bytes_per_s

    @property
    def chunk_bytes(self) -> int:
        """How much a flow should carry before it pays: what takes 10 ms, so that others wait for little."""
        return max(MIN_CHUNK_BYTES, min(CHUNK_BYTES, int(self._rate * CHUNK_S)))

    @property
    def bytes_per_s(self) -> float:
        return self._faded() / RATE_S

    def _note(self, count: int) -> None:
        self._recent = self._faded() + count
        self._recent_at = self._clock()

    def _faded(self) -> float:
        return self._recent * max(1 - (self._clock() - self._recent_at) / RATE_S, 0.0)

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._rate, self._rate * BURST_S)
        self._at = now

    def _arm(self) -> None:
        if self._is_armed:
            return
        self._is_armed = True
        later = self._call_later or asyncio.get_running_loop().call_later
        later(max(1e-4 - self._left / self._rate, 0.0), self._serve)

    def _serve(self) -> None:
        """Let one carry on whose turn it is: it may be the next one's turn too, once it has carried more."""
        self._is_armed = False
        self._refill()
        while self._waiting and self._left > 0:
            _, _, payment = heapq.heappop(self._waiting)
            if not payment.turn.done():
                self._virtual = max(self._virtual, payment.start)
                self._left -= payment.count
                payment.turn.set_result(None)
                break
        if self._waiting:
            self._arm()


class Circuit:
    """Two connections that are one from now on.

    Attributes:
        moved_at: when bytes last moved, by the clock.
        until: when it ends whatever moves, by the clock; None: never.
    """

    def __init__(
        self,
        ends: tuple[RelayConnection, RelayConnection],
        share: FairShare,
        flow: Flow,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_meeting: bool = False,
    ) -> None:
        """Pass nothing yet.

        Args:
            ends: both connections; who runs the circuit closes them.
            is_meeting: whether it is for a short talk; else it lives while something moves, and carries anything.
        """
        self._ends = ends
        self._share = share
        self._flow = flow
        self._left = MEETING_BYTES if is_meeting else None
        self._clock = clock
        self.moved_at = clock()
        self.until = self.moved_at + MEETING_S if is_meeting else None

    async def run(self) -> None:
        """Pass bytes until both ends have said all. An end that is reset, or too much for the circuit, resets both."""
        one, other = self._ends
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pass_on(one, other))
                pumps.create_task(self._pass_on(other, one))
        except* OSError:
            one.reset()
            other.reset()

    async def _pass_on(self, source: RelayConnection, sink: RelayConnection) -> None:
        buffer = memoryview(bytearray(self._share.chunk_bytes))
        while count := await source.read_into(buffer):
            await sink.send(buffer[:count])
            self.moved_at = self._clock()
            if self._left is not None:
                self._left -= count
                if self._left < 0:
                    raise ConnectionAbortedError("carried more than it may")
            await self._share.pay(self._flow, count)
        sink.end_writing()


CONNECT_S: Final = 5.0
"""How long a connection may take."""


async def dial(address: str, source: str = "") -> RelayConnection:
    """A connection to `host:port`.

    Args:
        address: its host is an IP address.
        source: IPv4 address of this machine that it comes from, where the system allows it.

    Raises:
        OSError: nothing answers there.
        RecordError: it is no address.
    """
    host, port = split_address(address)
    host = host.strip("[]")
    if source and ":" not in host:
        try:
            return await _dial(host, port, source)
        except ConnectionRefusedError:
            raise
        except OSError:  # such as on macOS, which has one loopback address
            pass
    return await _dial(host, port, "")


async def dial_node(address: str) -> RelayConnection:
    """A connection to a node at `host:port`, or at `PEER.via.HOST:PORT` behind another relay; errors as of `dial`.

    Raises:
        RemoteProtocolError: that relay does not lead there.
    """
    relayed = parse_relayed(address)
    if relayed is None:
        return await dial(address)
    far = await dial(relayed.relay)
    try:
        await far.send(f"CONNECT {relayed.peer}:1 HTTP/1.1\r\n\r\n".encode())
        status = words(await far.read_line(MAX_LINE_BYTES))
        if status[1:2] != ["200"]:
            raise RemoteProtocolError("status", "that node's relay does not lead to it")
        await skip_headers(far)
    except BaseException:
        far.close()
        raise
    return far


async def skip_headers(connection: RelayConnection) -> None:
    """Read what stands behind CONNECT, or behind its answer; none of it matters.

    Raises:
        RemoteProtocolError: it is too long.
    """
    left = MAX_HEADER_BYTES
    while (line := await connection.read_line(left)).strip():
        left -= len(line)
        if left <= 0:
            raise RemoteProtocolError("opening", f"headers have at most {MAX_HEADER_BYTES} bytes")


async def _dial(host: str, port: int, source: str) -> RelayConnection:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setblocking(False)
        keep_segments_small(sock)
        if source:
            sock.bind((source, 0))
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return RelayConnection(sock, (host, port))


MAX_UNSAID: Final = 64
"""Lines that wait for a machine that does not read."""
MAX_HEARD: Final = 8
"""Lines that a machine may say between two pings; it has to say one."""
_PONG: Final = b"PONG"


class Machine:
    """One machine that is here."""

    def __init__(self, peer: PeerId, visit: Visit, clock: Callable[[], float] = time.monotonic) -> None:
        self.peer = peer
        self.visit = visit
        self._clock = clock
        self._unsaid: asyncio.Queue[str] = asyncio.Queue(MAX_UNSAID)
        self._heard_at = clock()
        self._heard = 0

    def say(self, line: str) -> bool:
        """Let a line be said soon; False where too many wait already."""
        try:
            self._unsaid.put_nowait(line)
        except asyncio.QueueFull:
            return False
        return True

    async def run(self) -> None:
        """Stay until it goes, is silent for 15 s, or says what a machine does not say.

        Raises:
            RemoteProtocolError: it said that.
        """
        odd: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write())
                tasks.create_task(self._read())
                await self._ping()
        except* OSError:
            pass
        except* RemoteProtocolError as group:
            odd = group.exceptions[0]
        if odd is not None:
            raise odd

    async def _write(self) -> None:
        while True:
            line = await self._unsaid.get()
            async with asyncio.timeout(DEAD_S):
                await self.visit.connection.say(line)

    async def _read(self) -> None:
        while True:
            line = await self.visit.connection.read_line(len(_PONG) + 2)
            self._heard += 1
            if line.strip() != _PONG or self._heard > MAX_HEARD:
                raise RemoteProtocolError("pong", "a machine says PONG, and once per PING")
            self._heard_at = self._clock()

    async def _ping(self) -> None:
        while self._clock() - self._heard_at < DEAD_S:
            self._heard = 0
            self.say("PING")
            await asyncio.sleep(PING_S)
        raise TimeoutError("silent")


LOOK_S = 1.0
"""How often circuits are looked at that carry nothing."""
MBIT_BYTES = 125_000
OWN_MBIT = 10_000.0
"""What this machine's own services may carry through its TLS port: they bound themselves."""
FIND_S = 10.0
"""How long a listed node may take to be found and called."""
_FULL_S = 0.2
_BACKLOG = 128


SignWho = Callable[[bytes], Awaitable[bytes]]
"""Makes the line that answers WHO, given the nonce."""
FindNode = Callable[[PeerId], Awaitable[str]]
"""Where a listed node is reached, its host an IP address; empty where it is not listed, or does not answer there."""


@dataclass(frozen=True, slots=True)
class RelayLoad:
    """What a relay carries.

    Attributes:
        circuits: now.
        limit: how many it carries at most.
        mbit_per_s: carried lately.
        lent_mbit_per_s: carried at most.
        machines: that stand here.
    """

    circuits: int
    limit: int
    mbit_per_s: float
    lent_mbit_per_s: float
    machines: int


class _Refusal(Exception):
    """Somebody cannot be led to a machine; said to whoever asked."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self._status, self._reason = status, reason

    def answer(self, verb: Verb) -> bytes:
        """As an HTTP proxy says it, or as a line."""
        if verb is Verb.CONNECT:
            return f"HTTP/1.1 {self._status} {self._reason}\r\nContent-Length: 0\r\n\r\n".encode()
        return f"NO {self._reason}\n".encode()


class RelayServer:
    """One relay; `async with relay.listening(host, port) as port`."""

    def __init__(
        self,
        peer: PeerId,
        sign: SignWho,
        lent_mbit_per_s: float,
        limits: RelayLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Carry nothing yet.

        Args:
            peer: whose relay it is: proofs of names are for this one.
            lent_mbit_per_s: what all circuits together may carry, both ways counted.
        """
        self._peer = peer
        self._sign = sign
        self._lent = lent_mbit_per_s
        self._limits = limits or RelayLimits()
        self._clock = clock
        self._visits = Visits(self._limits, clock)
        self._share = FairShare(lent_mbit_per_s * MBIT_BYTES, clock=clock)
        self._machines: dict[PeerId, Machine] = {}
        self._waiting: dict[str, asyncio.Future[Visit]] = {}
        self._circuits: dict[Circuit, Visit] = {}
        self._log = CountedLog(logger, clock)
        self._members = b""
        self._own_share = FairShare(OWN_MBIT * MBIT_BYTES, clock=clock)
        self._find: FindNode | None = None

    @property
    def load(self) -> RelayLoad:
        carried = self._share.bytes_per_s / MBIT_BYTES
        most = self._limits.circuits.total
        return RelayLoad(self._visits.circuits, most, carried, self._lent, len(self._machines))

    def keep_to(self, members: bytes) -> None:
        """Carry only those machines that sign this secret of a private swarm along; all where it is empty."""
        self._members = members

    def lead_beyond(self, find: FindNode) -> None:
        """Lead those who come by the TLS port to listed nodes that stand elsewhere too."""
        self._find = find

    def lend(self, mbit_per_s: float) -> None:
        self._lent = mbit_per_s
        self._share.change(mbit_per_s * MBIT_BYTES)

    @asynccontextmanager
    async def listening(self, host: str, port: int, entry: TlsEntry | None = None) -> AsyncIterator[int]:
        """Answer until the block is left; yields the TCP port.

        Args:
            host: IP address to listen on; `0.0.0.0` is every address, of IPv6 too where this machine has it.
            port: 0 takes a free one.
            entry: of a TLS port; None: whoever connects says at once what it wants.

        Raises:
            OSError: the port cannot be had.
        """
        with listen_on(host, port) as listener:
            async with TaskScope() as scope:
                scope.spawn(self._accept(listener, scope, entry))
                scope.spawn(self._end_idle_circuits())
                yield listener.getsockname()[1]

    async def _accept(self, listener: socket.socket, scope: TaskScope, entry: TlsEntry | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:  # out of files, or gone before it was accepted
                self._log.say("accept", f"cannot accept a connection: {describe(error)}")
                await asyncio.sleep(_FULL_S)
                continue
            visit = Visit(RelayConnection(sock, peer[:2]), is_confined=entry is not None)
            if self._visits.admit(visit):
                visit.task = scope.spawn(self._answer(visit, entry))
                visit.task.add_done_callback(partial(self._is_over, visit))
            else:
                self._log.say(visit.key, f"too many connections from {visit.key}: refused")
                visit.connection.reset()
                self._visits.leave(visit)
            await asyncio.sleep(0)  # however many come, those that are here go on

    async def _end_idle_circuits(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._clock()
            for circuit, visit in self._circuits.items():
                is_over = circuit.until is not None and now >= circuit.until
                if is_over or now - circuit.moved_at >= self._limits.idle_s:
                    visit.end()

    async def _answer(self, visit: Visit, entry: TlsEntry | None) -> None:
        try:
            async with asyncio.timeout(OPENING_S):
                service = "" if entry is None else await entry.enter(visit)
                opening = None if service else await self._opening(visit.connection)
            self._visits.give(visit, OPENINGS)
            if opening is None:
                await self._lead_in(visit, service)
            else:
                await self._serve(visit, opening)
        except RemoteProtocolError as error:
            self._log.say(f"odd {visit.key}", f"{visit.key} says what no relay is told: {plain_line(str(error))}")
        except OSError:  # it went, or took too long
            pass
        except Exception as error:  # noqa: BLE001 - what one brings about must not end the relay for all
            self._log.say("failed", f"a connection failed: {plain_line(describe(error))}")

    async def _opening(self, connection: RelayConnection) -> Opening:
        opening = parse_opening(await connection.read_line(MAX_LINE_BYTES))
        if opening.verb is Verb.CONNECT:
            await skip_headers(connection)
        elif opening.verb is Verb.HERE:
            await self._check_name(connection, _named(opening))
        return opening

    async def _lead_in(self, visit: Visit, service: str) -> None:
        """Lead somebody to a service of this machine, which sees an address that stands for him."""
        near = await dial(service, stand_in(TlsEntry.__name__, visit.connection.host))
        try:
            await self._run(visit, near, self._own_share)
        finally:
            near.close()

    def _is_over(self, visit: Visit, _: asyncio.Task[None]) -> None:
        """Let a visit go whose task has ended, also where that was before it began."""
        if not visit.is_taken:
            self._visits.leave(visit)

    async def _check_name(self, connection: RelayConnection, peer: PeerId) -> None:
        """Let a machine prove its name.

        Raises:
            RemoteProtocolError: it does not.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        await connection.say(f"PROVE {self._peer} {nonce.hex()}")
        match (await connection.read_line(MAX_PROOF_BYTES)).decode("ascii", "replace").split():
            case ["PROOF", key, signature] if check_presence(peer, self._peer, nonce + self._members, key, signature):
                return
        await connection.say("NO this is no proof of that name")
        raise RemoteProtocolError("proof", "its proof of a name is none")

    async def _serve(self, visit: Visit, opening: Opening) -> None:
        connection = visit.connection
        match opening.verb:
            case Verb.HERE:
                await self._keep_here(visit, _named(opening))
            case Verb.CONNECT | Verb.PUNCH | Verb.CALL:
                await self._reach(visit, opening)
            case Verb.TAKE:
                self._take(visit, opening.token)
            case Verb.SEEN if self._visits.hold(visit, SEEN):
                await connection.say(f"SEEN {connection.address}")
                async with asyncio.timeout(SEEN_S):
                    await connection.read_into(memoryview(bytearray(1)))
            case Verb.LOAD:
                load = self.load
                rates = f"{load.mbit_per_s:.1f} {load.lent_mbit_per_s:g}"
                await connection.say(f"LOAD {load.circuits} {load.limit} {rates}")
            case Verb.WHO if self._visits.spend(PROOFS, visit.key):
                await connection.send(await self._sign(opening.nonce))

    async def _keep_here(self, visit: Visit, peer: PeerId) -> None:
        """Let a machine stand here until it goes; one that stood here under the same name goes now."""
        before = self._machines.pop(peer, None)
        if before is not None:
            self._visits.give(before.visit, NAMES)
            before.visit.end()
        if not self._visits.hold(visit, NAMES):
            await visit.connection.say("NO too many machines are here")
            return
        here = self._machines[peer] = Machine(peer, visit, self._clock)
        try:
            await visit.connection.say(f"OK {visit.connection.address}")
            await here.run()
        finally:
            if self._machines.get(peer) is here:
                del self._machines[peer]

    async def _reach(self, visit: Visit, opening: Opening) -> None:
        """Lead somebody to a machine that stands here."""
        try:
            machine = self._machines.get(_named(opening))
            if machine is None and visit.is_confined and opening.verb is Verb.CONNECT and self._find is not None:
                return await self._go_beyond(visit, _named(opening), self._find)
            if machine is None:
                raise _Refusal(404, "nobody of that name is here")
            if opening.addresses and str(parse_ip(opening.addresses[0])) != visit.connection.host:
                raise _Refusal(403, "a machine is led to nobody but who asks")
            if not self._visits.spend(OWN_SUMMONS, f"{visit.key} to {machine.peer}"):
                raise _Refusal(429, "you want that machine too often")
            if not self._visits.spend(SUMMONS, machine.peer):
                raise _Refusal(429, "too many want that machine")
            if opening.verb is Verb.CALL:
                await self._pass_call_on(visit, opening, machine)
            else:
                await self._connect(visit, opening, machine)
        except _Refusal as refusal:
            await visit.connection.send(refusal.answer(opening.verb))

    async def _pass_call_on(self, visit: Visit, opening: Opening, machine: Machine) -> None:
        if not machine.say(f"CALL {opening.token} {opening.addresses[0]}"):
            raise _Refusal(429, "that machine does not read")
        await visit.connection.say("OK")

    async def _connect(self, visit: Visit, opening: Opening, machine: Machine) -> None:
        """Let a machine take a circuit, and pass its bytes on until it ends."""
        if not self._visits.hold(visit, CIRCUITS, machine.peer):
            raise _Refusal(429, "too many circuits")
        is_meeting = opening.verb is Verb.PUNCH
        if is_meeting:
            other = await self._summon(machine, "PUNCH", ",".join(opening.addresses))
        else:
            other = await self._summon(machine, "OPEN", visit.connection.address)
        other.task = visit.task
        try:
            met = f"OK {other.connection.address}\n".encode()
            await visit.connection.send(met if is_meeting else b"HTTP/1.1 200 OK\r\n\r\n")
            await self._run(visit, other.connection, self._share, is_meeting=is_meeting)
        finally:
            self._visits.leave(other)

    async def _run(self, visit: Visit, other: RelayConnection, share: FairShare, *, is_meeting: bool = False) -> None:
        """Pass bytes between a visit and another connection until that ends."""
        flow = Flow(partial(self._visits.crowd, visit.key))
        circuit = Circuit((visit.connection, other), share, flow, self._clock, is_meeting=is_meeting)
        self._circuits[circuit] = visit
        try:
            await circuit.run()
        finally:
            del self._circuits[circuit]

    async def _go_beyond(self, visit: Visit, peer: PeerId, find: FindNode) -> None:
        """Lead somebody to a listed node that does not stand here: it answered at its address under its own name."""
        if not self._visits.spend(BEYOND, visit.key):
            raise _Refusal(429, "you want other nodes too often")
        if not self._visits.hold(visit, CIRCUITS, peer):
            raise _Refusal(429, "too many circuits")
        try:
            async with asyncio.timeout(FIND_S):
                address = await find(peer)
                far = await dial_node(address) if address else None
        except (OSError, RemoteProtocolError):
            far = None
        if far is None:
            raise _Refusal(404, "no listed node of that name answers")
        try:
            await visit.connection.send(b"HTTP/1.1 200 OK\r\n\r\n")
            await self._run(visit, far, self._share)
        finally:
            far.close()

    async def _summon(self, machine: Machine, verb: str, hint: str) -> Visit:
        """Tell a machine of a circuit, and wait until it takes it.

        Raises:
            _Refusal: it does not.
        """
        token = secrets.token_hex(TOKEN_BYTES)
        taken: asyncio.Future[Visit] = asyncio.get_running_loop().create_future()
        self._waiting[token] = taken
        try:
            if not machine.say(f"{verb} {token} {hint}"):
                raise _Refusal(429, "that machine does not read")
            await asyncio.wait([taken], timeout=TAKE_S)
        except asyncio.CancelledError:
            if taken.done():
                self._visits.leave(taken.result())
            raise
        finally:
            self._waiting.pop(token, None)
        if not taken.done():
            raise _Refusal(504, "that machine does not answer")
        return taken.result()

    def _take(self, visit: Visit, token: str) -> None:
        """Give a machine's connection to whoever waits for it; a token is good once."""
        waiting = self._waiting.pop(token, None)
        if waiting is not None:
            visit.is_taken = True
            waiting.set_result(visit)


def _named(opening: Opening) -> PeerId:
    assert opening.peer is not None, "openings about a machine name it"
    return opening.peer


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that listens, and does not block.

    Args:
        host: IP address; `0.0.0.0` is every address, of IPv6 too where this machine has it.
        port: 0 takes a free one.

    Raises:
        OSError: it cannot be had.
    """
    if host == "0.0.0.0" and socket.has_dualstack_ipv6():
        host = "::"
    is_v6 = ":" in host
    sock = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
    try:
        if hasattr(socket, "SO_REUSEPORT"):  # elsewhere than on Windows, where reuse means theft
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_v6 and host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        keep_segments_small(sock)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
