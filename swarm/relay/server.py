"""A relay: knows machines by their names, and passes bytes between them and whoever wants to reach them.

It reads nothing of what it carries, and leads only to machines that stand here by a proof of their name
(`swarm.relay.openings`). It dials nobody but listed nodes, for those whose networks let nothing out but a TLS port
(`swarm.relay.tls_port`). What each address may cost is bounded (`swarm.relay.limits`), and all circuits share one rate.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from swarm.egress.lines import MAX_LINE_BYTES
from swarm.egress.segments import keep_segments_small
from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId
from swarm.relay.connection import RelayConnection
from swarm.relay.dialling import dial, dial_node, skip_headers
from swarm.relay.fair_share import FairShare, Flow
from swarm.relay.limits import BEYOND, CIRCUITS, NAMES, OPENINGS, OWN_SUMMONS, PROOFS, SEEN, SUMMONS, RelayLimits
from swarm.relay.machines import Machine
from swarm.relay.openings import (
    MAX_PROOF_BYTES,
    MEETING_BYTES,
    MEETING_S,
    NONCE_BYTES,
    OPENING_S,
    SEEN_S,
    TAKE_S,
    TOKEN_BYTES,
    Opening,
    Verb,
    parse_opening,
)
from swarm.relay.presence import check_presence
from swarm.relay.splice import Circuit, CircuitBounds
from swarm.relay.tls_port import TlsEntry
from swarm.relay.visits import Visit, Visits
from swarm.runtime.counted_log import CountedLog, describe
from swarm.runtime.plain_text import plain_line
from swarm.runtime.quota import parse_ip, stand_in
from swarm.runtime.tasks import TaskScope

LOOK_S = 1.0
"""How often circuits are looked at that carry nothing."""
MBIT_BYTES = 125_000
OWN_MBIT = 10_000.0
"""What this machine's own services may carry through its TLS port: they bound themselves."""
FIND_S = 10.0
"""How long a listed node may take to be found and called."""
_FULL_S = 0.2
_BACKLOG = 128

logger = logging.getLogger(__name__)

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
            sign: signs for that peer.
            lent_mbit_per_s: what all circuits together may carry, both ways counted.
            limits: what each address may cost.
            clock: a monotonic one, in seconds.
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
        """What it carries now."""
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
        """Carry so much at most from now on."""
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
            bounds = CircuitBounds(MEETING_S, MEETING_BYTES) if is_meeting else None
            await self._run(visit, other.connection, self._share, bounds)
        finally:
            self._visits.leave(other)

    async def _run(
        self, visit: Visit, other: RelayConnection, share: FairShare, bounds: CircuitBounds | None = None
    ) -> None:
        """Pass bytes between a visit and another connection until that ends."""
        flow = Flow(partial(self._visits.crowd, visit.key))
        circuit = Circuit((visit.connection, other), share, flow, self._clock, bounds)
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
