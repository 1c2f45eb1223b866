"""Strangers at the relay that the swarm's bootstrap peer lends, beside a machine that needs it and its dialler.

The two are honest and come from addresses of their own; whoever dials must come through within `COME_S`, all the time.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from benchmarks.redteam.attack import Fight, Kind, attack
from swarm.base.errors import RegistryError
from swarm.base.ids import PeerId
from swarm.base.tasks import TaskScope
from swarm.directory.identity import Identity
from swarm.directory.registry import RelayOffer
from swarm.reach.relay.openings import prove_presence

AT_HOME, DIALLER = "127.0.0.77", "127.0.0.78"
"""Where the honest two come from."""
FOUND_S = 20.0
COME_S = 3.0
"""How long somebody may take to come through to a machine and back: longer is as good as not at all."""
PAUSE_S = 0.3
LOST = (OSError, TimeoutError, asyncio.IncompleteReadError)

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(relay: RelayOffer, source: str, opening: str = "") -> AsyncIterator[Ends]:
    """A connection to the relay.

    Raises:
        OSError: it is not taken.
    """
    host, _, port = relay.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    try:
        writer.write(opening.encode())
        yield reader, writer
    finally:
        writer.transport.abort()


def stranger(fight: Fight, both: Bystanders, opening: str = "") -> AbstractAsyncContextManager[Ends]:
    """A connection of the attacker's to the relay."""
    return connected(both.relay, fight.kit.strangers[0], opening)


class Bystanders:
    """A machine that is reached through the relay, and who reaches it.

    Attributes:
        slowest_s: how long that took at most.
    """

    def __init__(self, fight: Fight, relay: RelayOffer, source: str = AT_HOME) -> None:
        self.relay = relay
        self.identity = Identity.ephemeral()
        self.came = 0
        self.slowest_s = 0.0
        self._source = source
        self._fight = fight
        self._stands = asyncio.Event()

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    async def stand(self) -> None:
        """Stand at the relay, and answer whoever comes; again where that ends."""
        while True:
            with suppress(*LOST):
                async with connected(self.relay, self._source, f"HERE {self.peer}\n") as ends, TaskScope() as scope:
                    await prove(ends, self.identity)
                    self._stands.set()
                    await self._listen(ends, scope)
            if self._source == AT_HOME:
                self._fight.breach("an honest machine lost its place at the relay")
            await asyncio.sleep(PAUSE_S)

    async def _listen(self, ends: Ends, scope: TaskScope) -> None:
        reader, writer = ends
        while words := (await reader.readline()).decode().split():
            if words == ["PING"]:
                writer.write(b"PONG\n")
            elif words[0] == "OPEN":
                scope.spawn(self._take(words[1]))
            else:
                self._fight.note(f"the machine was told: {words[0]}")

    async def _take(self, token: str) -> None:
        with suppress(*LOST):
            async with connected(self.relay, self._source, f"TAKE {token}\n") as (reader, writer):
                while data := await reader.read(65_536):
                    writer.write(data)
                    await writer.drain()

    async def come(self) -> None:
        """Come again and again, and see whether the machine answers in time."""
        await self._stands.wait()
        while True:
            began = time.monotonic()
            word = secrets.token_bytes(1_024)
            try:
                async with asyncio.timeout(COME_S), connected(self.relay, DIALLER, connect(self.peer)) as ends:
                    head = await ends[0].readuntil(b"\r\n\r\n")
                    ends[1].write(word)
                    if not head.startswith(b"HTTP/1.1 200 ") or await ends[0].readexactly(len(word)) != word:
                        self._fight.breach(f"an honest dialler was answered {head[:16]!r}")
                self.came += 1
            except LOST as trouble:
                self._fight.breach(f"an honest dialler did not come through: {type(trouble).__name__}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            await asyncio.sleep(PAUSE_S)

    async def wait_ready(self) -> None:
        """Return once the machine stands."""
        await self._stands.wait()


def connect(peer: str) -> str:
    return f"CONNECT {peer}:1 HTTP/1.1\r\n\r\n"


async def prove(ends: Ends, identity: Identity) -> None:
    """Answer PROVE.

    Raises:
        OSError: the relay does not take the machine.
    """
    reader, writer = ends
    match (await reader.readline()).decode().split():
        case ["PROVE", relay, nonce]:
            key, signature = prove_presence(identity, PeerId(relay), bytes.fromhex(nonce))
            writer.write(f"PROOF {key} {signature}\n".encode())
    if not (await reader.readline()).startswith(b"OK "):
        raise ConnectionRefusedError("the relay has no place")


@asynccontextmanager
async def beside(fight: Fight) -> AsyncIterator[Bystanders]:
    """Find the relay, and let the honest two use it from now on; the attack begins within the block."""
    directory = await fight.kit.directory()
    relay = None
    async with asyncio.timeout(FOUND_S):
        while relay is None:
            with suppress(RegistryError):
                relay = next(iter(await directory.relays()), None)
            await asyncio.sleep(PAUSE_S)
    both = Bystanders(fight, relay)
    async with TaskScope() as scope:
        scope.spawn(both.stand())
        await both.wait_ready()
        await fight.go()
        scope.spawn(both.come())
        try:
            yield both
        finally:
            fight.note(f"a dialler came through {both.came} times, the slowest time in {both.slowest_s:.2f} s")


async def answer_to(relay: RelayOffer, opening: str, source: str) -> bytes:
    """All that the relay answers; empty where it ends the connection."""
    with suppress(*LOST):
        async with asyncio.timeout(COME_S), connected(relay, source, opening) as (reader, _):
            return await reader.read(4_096)
    return b""


async def flood(fight: Fight, both: Bystanders, openings: AsyncIterator[str], good: bytes, found: str) -> None:
    """Say opening after opening, each on a connection of its own; `found` is a breach where one is answered `good`."""
    source = fight.kit.strangers[0]

    async def one(opening: str) -> None:
        answer = await answer_to(both.relay, opening, source)
        fight.tally.refused += not answer
        if good and answer.startswith(good):
            fight.breach(found)

    async for opening in openings:
        fight.tally.acts += 1
        fight.tally.connections += 1
        fight.kit.scope.spawn(one(opening))


@attack("relay-squatting", Kind.RELAYS)
async def squatting(fight: Fight) -> None:
    """Claims an honest machine's name at the relay, 20 times a second, with proofs of its own name."""
    own = Identity.ephemeral()

    async def claim(both: Bystanders) -> None:
        with suppress(*LOST):
            async with asyncio.timeout(COME_S), stranger(fight, both, f"HERE {both.peer}\n") as ends:
                await prove(ends, own)
                fight.breach("a stranger got the name of another machine")

    async with beside(fight) as both:
        async for _ in fight.pace(20.0):
            fight.tally.acts += 1
            fight.tally.connections += 1
            fight.kit.scope.spawn(claim(both))


@attack("relay-opening-flood", Kind.RELAYS)
async def opening_flood(fight: Fight) -> None:
    """200 connections a second to the relay, each with another opening that is none."""
    kinds = ("GET / HTTP/1.1\r\n\r\n", "\x00" * 400, "HERE Qm\n", "A" * 5_000, "\n", "CONNECT\r\n", "\x1b[2J\n")

    async def openings() -> AsyncIterator[str]:
        async for number in fight.pace(200.0):
            yield kinds[number % len(kinds)]

    async with beside(fight) as both:
        await flood(fight, both, openings(), b"HTTP/1.1 200", "an opening that is none was answered with 200")


@attack("relay-slow-openings", Kind.RELAYS, lasts_s=12.0)
async def slow_openings(fight: Fight) -> None:
    """400 connections to the relay that say their opening at one byte a second, and come again."""

    async def creep(both: Bystanders) -> None:
        while True:
            with suppress(*LOST):
                async with stranger(fight, both) as (reader, writer):
                    for byte in connect(both.peer):
                        writer.write(byte.encode())
                        with suppress(TimeoutError):
                            async with asyncio.timeout(1.0):
                                await reader.readexactly(1)
            fight.tally.connections += 1
            await asyncio.sleep(1.0)

    async with beside(fight) as both:
        async for _ in fight.pace(200.0, 400):
            fight.tally.acts += 1
            fight.kit.scope.spawn(creep(both))
        await fight.stay()


@attack("relay-hoarding", Kind.RELAYS)
async def hoarding(fight: Fight) -> None:
    """Opens every circuit that the relay has, to a machine of its own and to the honest one, and keeps them."""
    async with beside(fight) as both:
        own = Bystanders(fight, both.relay, fight.kit.strangers[0])
        fight.kit.scope.spawn(own.stand())
        await own.wait_ready()

        async def keep(peer: PeerId) -> None:
            while True:
                with suppress(*LOST):
                    async with stranger(fight, both, connect(peer)) as (reader, writer):
                        while await reader.read(1_024):
                            writer.write(b"x")
                await asyncio.sleep(1.0)

        async for number in fight.pace(100.0, 300):
            fight.tally.acts += 1
            fight.tally.connections += 1
            fight.kit.scope.spawn(keep(both.peer if number % 2 else own.peer))
        await fight.stay()


@attack("relay-names", Kind.RELAYS)
async def many_names(fight: Fight) -> None:
    """600 machines of one stranger stand at the relay."""
    async with beside(fight) as both:
        async for _ in fight.pace(50.0, 600):
            fight.tally.acts += 1
            fight.tally.identities += 1
            fight.kit.scope.spawn(_stand_for_ever(both.relay, fight.kit.strangers[0]))
        await fight.stay()


async def _stand_for_ever(relay: RelayOffer, source: str) -> None:
    identity = await asyncio.to_thread(Identity.ephemeral)
    with suppress(*LOST):
        async with connected(relay, source, f"HERE {identity.peer_id}\n") as (reader, writer):
            await prove((reader, writer), identity)
            while await reader.readline():
                writer.write(b"PONG\n")


@attack("relay-unknown-names", Kind.RELAYS)
async def unknown_names(fight: Fight) -> None:
    """Asks the relay for machines that are not there, 100 times a second, and for addresses beside it."""

    async def openings() -> AsyncIterator[str]:
        nodes = fight.ground.nodes
        wanted = [nodes[0].address, "127.0.0.1:22", "localhost:80", *(one.peer for one in nodes)]
        async for number in fight.pace(100.0):
            yield f"CONNECT {wanted[number % len(wanted)]}{':1' if number % 2 else ''} HTTP/1.1\r\n\r\n"

    async with beside(fight) as both:
        await flood(fight, both, openings(), b"HTTP/1.1 200", "the relay led to somebody who does not stand there")


@attack("relay-token-guessing", Kind.RELAYS)
async def token_guessing(fight: Fight) -> None:
    """Guesses the tokens of circuits that honest diallers wait for, 200 times a second."""

    async def openings() -> AsyncIterator[str]:
        async for _ in fight.pace(200.0):
            yield f"TAKE {secrets.token_hex(16)}\n"

    async with beside(fight) as both:
        await flood(fight, both, openings(), b"", "")


@attack("relay-calls-others", Kind.RELAYS)
async def calls_others(fight: Fight) -> None:
    """Asks the relay to have the honest machine call somebody else, 50 times a second."""

    async def openings() -> AsyncIterator[str]:
        victims = (f"{DIALLER}:22", "192.0.2.1:80", "[2001:db8::1]:80", "169.254.169.254:80")
        async for number in fight.pace(50.0):
            yield f"CALL {both.peer} {victims[number % len(victims)]} {secrets.token_hex(16)}\n"

    async with beside(fight) as both:
        await flood(fight, both, openings(), b"OK", "a machine was told to call a third party")


@attack("relay-bandwidth", Kind.RELAYS)
async def bandwidth(fight: Fight) -> None:
    """Sends as much as goes through 20 circuits to a machine of its own."""
    async with beside(fight) as both:
        own = Bystanders(fight, both.relay, fight.kit.strangers[0])
        fight.kit.scope.spawn(own.stand())
        await own.wait_ready()

        async def send() -> None:
            with suppress(*LOST):
                async with stranger(fight, both, connect(own.peer)) as (reader, writer):
                    await reader.readuntil(b"\r\n\r\n")
                    while True:
                        writer.write(bytes(65_536))
                        await writer.drain()
                        fight.tally.sent_bytes += 65_536
                        await reader.read(1 << 20)

        async for _ in fight.pace(20.0, 20):
            fight.tally.acts += 1
            fight.kit.scope.spawn(send())
        await fight.stay()
