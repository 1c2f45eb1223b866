"""The way for a dialler that can be dialled itself: it asks the machine to call, whatever router that is behind."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.base.plain_text import plain_line
from swarm.base.tasks import TaskScope, spawn_on
from swarm.link.egress.streams import CHUNK_BYTES, Streams, connect, tuned
from swarm.link.endpoint import LinkPath
from swarm.reach.paths.way import REMEMBERED_S, SOON_S, NoWay, OpenedWay
from swarm.reach.relay.openings import OPENING_S, TOKEN_BYTES, check_token

ASKED_S: Final = 3.0
"""How long it may take to ask the relay."""
CALLED_S: Final = 5.0
"""How long a machine may take to call."""
MAX_IN_VAIN: Final = 4
"""Machines that did not call while nobody ever did: a firewall is before the port, and nobody is asked any more."""
MAX_EXPECTED: Final = 64
"""Calls that are waited for at a time."""
MAX_OPENINGS: Final = 64
"""Connections at a time that have not said yet whose they are."""


class ExpectedCalls:
    """The calls that somebody waits for, by their tokens. A server that hears `TAKE TOKEN` brings them here."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Streams]] = {}

    def expect(self) -> tuple[str, asyncio.Future[Streams]]:
        """A new token and the connection that will come with it.

        Raises:
            NoWay: too many are waited for.
        """
        if len(self._waiting) >= MAX_EXPECTED:
            raise NoWay("too many calls are waited for", again_s=0.0)
        token = secrets.token_hex(TOKEN_BYTES)
        self._waiting[token] = asyncio.get_running_loop().create_future()
        return token, self._waiting[token]

    def forget(self, token: str) -> None:
        """Wait no longer; a connection that came meanwhile and that nobody took is closed."""
        waiting = self._waiting.pop(token, None)
        if waiting is not None and not waiting.cancel() and not waiting.cancelled():
            waiting.result().abort()

    def take(self, token: str, streams: Streams) -> bool:
        """Bring a connection to whoever waits for it, once; whether somebody does."""
        waiting = self._waiting.get(token)
        if waiting is None or waiting.done():
            return False
        waiting.set_result(streams)
        return True

    def claim(self, token: str) -> Streams:
        """The connection that came; it is the caller's now."""
        return self._waiting.pop(token).result()


class CallBackWay:
    """Lets machines call this one."""

    name = "call-back"

    def __init__(self, calls: ExpectedCalls, address: Callable[[], str | None]) -> None:
        """Ask nobody yet.

        Args:
            calls: brought by whoever listens at the address.
            address: gives `host:port` under which others reach this machine now; None while nobody can. The host is an
                IP address.
        """
        self._calls = calls
        self._address = address
        self._in_vain = 0  # before the first one came
        self._has_come = False

    async def open(self, peer: PeerId, relay: str) -> OpenedWay:
        """A connection that the machine opens; errors as of every way."""
        address = self._address()
        if address is None or self._in_vain >= MAX_IN_VAIN:
            raise NoWay("nobody can call this machine", REMEMBERED_S if address else SOON_S)
        token, arriving = self._calls.expect()
        asking: Streams | None = None
        try:
            async with asyncio.timeout(ASKED_S):
                asking = await connect(relay)
                await asking.say("CALL", peer, address, token)
            try:
                async with asyncio.timeout(CALLED_S):
                    streams = await self._called(asking, token, arriving)
            except TimeoutError as error:
                self._in_vain += not self._has_come
                raise NoWay(f"it did not call {address} in time", REMEMBERED_S) from error
            self._has_come = True
            return OpenedWay(streams, LinkPath.CALLED_BACK)
        finally:
            self._calls.forget(token)
            if asking is not None:
                asking.close()

    async def _called(self, asking: Streams, token: str, arriving: asyncio.Future[Streams]) -> Streams:
        """The call; the relay may say meanwhile that there will be none."""
        async with TaskScope() as scope:
            scope.spawn(_hear_no(asking))
            await asyncio.wait([arriving])
            return self._calls.claim(token)


async def _hear_no(asking: Streams) -> None:
    """Raises: NoWay: the relay says no."""
    with suppress(OSError):
        match await asking.hear():
            case ["NO", *reason]:
                raise NoWay(f"the relay refuses: {plain_line(' '.join(reason))[:80]}")
            case _:
                return


class CallBackListener:
    """A port for `TAKE TOKEN` alone, of a machine that lends no relay."""

    def __init__(self, calls: ExpectedCalls, scope: TaskScope) -> None:
        self._calls = calls
        self._scope = scope
        self._openings = 0

    @classmethod
    @asynccontextmanager
    async def listen(cls, calls: ExpectedCalls, host: str, port: int = 0) -> AsyncIterator[int]:
        """Listen while the block runs; gives the TCP port.

        Raises:
            OSError: the port cannot be had.
        """
        async with TaskScope() as scope:
            self = cls(calls, scope)
            server = await asyncio.start_server(self._connected, host, port, limit=CHUNK_BYTES)
            try:
                yield int(server.sockets[0].getsockname()[1])
            finally:
                server.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams = tuned(reader, writer)
        if self._openings >= MAX_OPENINGS:
            streams.abort()
        else:
            spawn_on(self._scope, writer, self._opened(streams))

    async def _opened(self, streams: Streams) -> None:
        self._openings += 1
        is_taken = False
        try:
            async with asyncio.timeout(OPENING_S):
                match await streams.hear():
                    case ["TAKE", token]:
                        is_taken = self._calls.take(check_token(token), streams)
                    case _:
                        pass
        except (OSError, TimeoutError, RemoteProtocolError):
            pass
        finally:
            self._openings -= 1
            if not is_taken:
                streams.abort()
