"""A relay of a few lines, and a machine that stands at it: as much of both as ways to a machine need."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from node.life.reach.punch import PunchAnswerer
from swarm.base.ids import PeerId
from swarm.base.tasks import TaskScope, spawn_on
from swarm.directory.identity import Identity
from swarm.link.egress.streams import Streams, bracketed, connect, splice
from swarm.link.endpoint import Endpoint, RelayedAddress
from swarm.reach.paths.hole import OwnAddresses
from swarm.reach.relay.openings import Opening, Verb, parse_opening
from tests.net.hello_server import answering


class StubRelay:
    """Trusts everybody.

    Attributes:
        address: `host:port`.
        machine: of whom it knows; None: it knows nobody.
        openings: what it was asked for, in order.
        sees: what it says instead of an end's real address, by its host.
    """

    def __init__(self, scope: TaskScope) -> None:
        self.address = ""
        self.machine: RelayedMachine | None = None
        self.openings: list[Verb] = []
        self.sees: dict[str, str] = {}
        self._scope = scope
        self._waiting: dict[str, asyncio.Future[Streams]] = {}

    async def answer(self, streams: Streams) -> None:
        opening = None
        try:
            opening = parse_opening((await streams.reader.readline()).strip())
            self.openings.append(opening.verb)
            if opening.verb is Verb.TAKE:
                self._waiting.pop(opening.token).set_result(streams)
            else:
                await self._answer(opening, streams)
        except OSError:
            pass
        finally:
            if opening is None or opening.verb is not Verb.TAKE:
                streams.close()

    async def _answer(self, opening: Opening, streams: Streams) -> None:
        machine = self.machine if self.machine is not None and self.machine.peer == opening.peer else None
        match opening.verb:
            case Verb.SEEN:
                await streams.say("SEEN", self.seen(streams))
                await streams.reader.read()
            case Verb.CONNECT:
                while (await streams.reader.readline()).strip():
                    pass
                if machine is None:
                    streams.writer.write(b"HTTP/1.1 404 Not Found\r\n\r\n")
                    return
                taken = await self._taken(partial(machine.open, self))
                streams.writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                await splice(streams, taken)
            case Verb.PUNCH if machine is not None:
                taken = await self._taken(partial(machine.punch, self, opening.addresses))
                await streams.say("OK", self.seen(taken))
                await splice(streams, taken)
            case Verb.CALL if machine is not None:
                self._scope.spawn(machine.call(opening.addresses[0], opening.token))
                await streams.say("OK")
            case _:
                await streams.say("NO", "such", "peer")

    def seen(self, streams: Streams) -> str:
        return self.sees.get(streams.remote_host, streams.remote)

    async def _taken(self, ask: Callable[[str], Coroutine[object, object, None]]) -> Streams:
        token = secrets.token_hex(16)
        self._waiting[token] = asyncio.get_running_loop().create_future()
        self._scope.spawn(ask(token))
        return await self._waiting[token]


class RelayedMachine:
    """Does what a relay asks for.

    Attributes:
        peer: its name.
        endpoint: how it is dialled through the relay.
        punches: its end of holes; None: it makes none.
        calls: whether it calls back.
        carried: how many connections came by each way.
    """

    def __init__(self, scope: TaskScope, direct: Endpoint, own: OwnAddresses) -> None:
        self.peer: PeerId = direct.peer
        self.endpoint = direct
        self.punches: PunchAnswerer | None = PunchAnswerer(self._adopt, lambda: own)
        self.calls = True
        self.carried = {"relay": 0, "punch": 0, "call": 0}
        self._scope = scope
        self._server = direct.address

    async def open(self, relay: StubRelay, token: str) -> None:
        await self._take(relay.address, token, "relay")

    async def call(self, address: str, token: str) -> None:
        if self.calls:
            await self._take(address, token, "call")

    async def punch(self, relay: StubRelay, addresses: tuple[str, ...], token: str) -> None:
        if self.punches is None:
            taken = await connect(relay.address)
            await taken.say("TAKE", token)
            taken.close()
            return
        await self.punches.answer(relay.address, token, addresses)

    async def _take(self, address: str, token: str, way: str) -> None:
        try:
            far = await connect(address)
            try:
                await far.say("TAKE", token)
                self.carried[way] += 1
                await self._splice(far)
            finally:
                far.close()
        except OSError:
            return

    def _adopt(self, _relay: str, streams: Streams, _dialler: str) -> None:
        self.carried["punch"] += 1
        spawn_on(self._scope, streams.writer, self._splice(streams))

    async def _splice(self, streams: Streams) -> None:
        try:
            await splice(streams, await connect(self._server))
        finally:
            streams.close()


@asynccontextmanager
async def relaying(host: str = "127.0.0.1") -> AsyncIterator[StubRelay]:
    """A relay on loopback."""
    async with TaskScope() as scope:
        relay = StubRelay(scope)
        server = await asyncio.start_server(
            lambda *ends: spawn_on(scope, ends[1], relay.answer(Streams(*ends))), host, 0
        )
        relay.address = f"{bracketed(host)}:{server.sockets[0].getsockname()[1]}"
        try:
            yield relay
        finally:
            server.close()


@asynccontextmanager
async def standing(
    relay: StubRelay, own: OwnAddresses | None = None, identity: Identity | None = None
) -> AsyncIterator[RelayedMachine]:
    """A machine that says hello over TLS, and stands at a relay."""
    async with answering(identity or Identity.ephemeral()) as direct, TaskScope() as scope:
        machine = RelayedMachine(scope, direct, own or OwnAddresses())
        machine.endpoint = replace(direct, address=str(RelayedAddress(direct.peer, relay.address)))
        relay.machine = machine
        yield machine
