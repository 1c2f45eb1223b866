"""A read-only HTTP server: GET and HEAD alone, security headers on every answer; and `/metrics` on it. Owns no routes.

Connections are bounded in all and per address; idle ones make room, slow heads are not awaited. Scrapes within a second
of each other get the same answer, encoded once: a flood of scrapes costs no more than one. Values are read in the event
loop, where they are written; encoding them may be left to a thread.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

import uvicorn
from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from swarm.base.process_limits import file_limit
from swarm.base.quota import NEAR_WEIGHT, HoldingLimit, Quota, QuotaLimits, address_key, is_private
from swarm.base.tasks import TaskScope

logger = logging.getLogger(__name__)


MAX_CONNECTIONS: Final = 800
OTHER_FILES: Final = 200
"""Files that the rest of the program may have open."""
PER_ADDRESS: Final = 64
HEAD_S: Final = 10.0
_KIND: Final = "connections"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What an HTTP server bears.

    Attributes:
        total: connections at a time.
        per_address: those of one address (`address_key`).
        head_s: how long a request's head may take, and a connection may be idle.
        stalled_s: how long a reader may take nothing of what waits for it; None bears it for ever.
    """

    total: int = MAX_CONNECTIONS
    per_address: int = PER_ADDRESS
    head_s: float = HEAD_S
    stalled_s: float | None = None


class Connections:
    """Those that are open. A new one beyond the limit takes the place of an idle one, of who has the most."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.clock = clock
        self.total = max(min(limits.total, file_limit() - OTHER_FILES), 1)
        holding = {_KIND: HoldingLimit(limits.per_address, self.total)}
        self._quota = Quota(QuotaLimits(holdings=holding, max_keys=self.total), clock, _weight)
        self._open: dict[HttpConnection, str] = {}

    def admit(self, connection: HttpConnection, address: str) -> bool:
        """Whether it may stay."""
        key = address_key(address)
        if self._quota.total(_KIND) >= self.total and self._has_room(key):
            self._end_an_idle_one()
        if not self._quota.take(_KIND, key):
            return False
        self._open[connection] = key
        return True

    def leave(self, connection: HttpConnection) -> None:
        """It has ended; or it never was admitted."""
        key = self._open.pop(connection, None)
        if key is not None:
            self._quota.give(_KIND, key)

    def _has_room(self, key: str) -> bool:
        return self._quota.held(_KIND, key) < self.limits.per_address * _weight(key)

    def _end_an_idle_one(self) -> None:
        held = self._quota.holders(_KIND)
        idle = [one for one in self._open if one.idle_since is not None]
        victim = max(idle, key=lambda one: (held[self._open[one]], -(one.idle_since or 0.0)), default=None)
        if victim is not None:
            self.leave(victim)
            victim.transport.abort()


class HttpConnection(H11Protocol):
    """uvicorn's connection, with a time within which each request's head must have come.

    Attributes:
        idle_since: since when no request is being answered; None while one is.
    """

    def __init__(self, connections: Connections, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._bounds = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self.idle_since: float | None = connections.clock()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio: a connection beyond the limits is closed at once."""
        super().connection_made(transport)
        if self._bounds.admit(self, (transport.get_extra_info("peername") or ("",))[0]):
            self._watch()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when it has ended."""
        super().connection_lost(exc)
        self._bounds.leave(self)
        self._unwatch()
        self._end_stall()

    def pause_writing(self) -> None:
        """Called by asyncio: the reader is behind."""
        super().pause_writing()
        if self._bounds.limits.stalled_s is not None and self._stall is None:
            self._stall = self.loop.call_later(self._bounds.limits.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Called by asyncio: it has taken some."""
        super().resume_writing()
        self._end_stall()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio: a part of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Called by uvicorn: the answer is written, and the next head may come."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.idle_since = None
            self._unwatch()
        elif self._deadline is None:
            self.idle_since = self._bounds.clock()
            self._deadline = self.loop.call_later(self._bounds.limits.head_s, self.transport.abort)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _weight(key: str) -> int:
    """A machine of the same network may be a proxy, through which many come."""
    return NEAR_WEIGHT if is_private(key) else 1


PATH: Final = "/metrics"
CACHE_S: Final = 1.0
_OPENMETRICS: Final = "application/openmetrics-text"
_ACCEPTS: Final = {True: f"{_OPENMETRICS}; version=1.0.0", False: "text/plain; version=0.0.4"}


class Collector(Protocol):
    def collect(self) -> Iterable[Metric]:
        """All families with their samples."""


@dataclass(frozen=True, slots=True)
class _Scrape:
    """An encoded answer; `text` and the same gzipped."""

    made_s: float
    media_type: str
    text: bytes
    gzipped: bytes


class MetricsPage:
    """Answers scrapes from metrics that it reads anew at most once per `CACHE_S`."""

    def __init__(
        self, read: Callable[[], Collector], *, in_thread: bool, timer: Callable[[], float] = time.monotonic
    ) -> None:
        """A page over the metrics that `read` gives.

        Args:
            read: called in the event loop; its collector may be used in a thread.
            in_thread: whether to encode in a thread, for pages that take long.
        """
        self._read, self._in_thread, self._timer = read, in_thread, timer
        self._process = (ProcessCollector(registry=None), PlatformCollector(registry=None))
        self._answers: dict[bool, _Scrape] = {}  # by whether it is OpenMetrics
        self._lock = asyncio.Lock()

    def route(self) -> Route:
        """The page's route, for GET and HEAD."""
        return Route(PATH, self.answer, methods=["GET"], include_in_schema=False)

    async def answer(self, request: Request) -> Response:
        """All metrics, in the form that the request accepts."""
        is_openmetrics = _OPENMETRICS in request.headers.get("accept", "")
        async with self._lock:
            answer = self._answers.get(is_openmetrics)
            if answer is None or not 0 <= self._timer() - answer.made_s < CACHE_S:
                answer = self._answers[is_openmetrics] = await self._encode_now(is_openmetrics)
        headers = {"cache-control": "no-store", "vary": "accept, accept-encoding", "content-type": answer.media_type}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(answer.gzipped, headers={**headers, "content-encoding": "gzip"})
        return Response(answer.text, headers=headers)

    async def _encode_now(self, is_openmetrics: bool) -> _Scrape:
        made_s, metrics = self._timer(), self._read()
        if self._in_thread:
            return await asyncio.to_thread(self._encode, made_s, metrics, is_openmetrics)
        return self._encode(made_s, metrics, is_openmetrics)

    def _encode(self, made_s: float, metrics: Collector, is_openmetrics: bool) -> _Scrape:
        encode, media_type = choose_encoder(_ACCEPTS[is_openmetrics])
        text = encode(_CollectorChain((metrics, *self._process)))
        return _Scrape(made_s, media_type, text, gzip.compress(text, compresslevel=1))


class _CollectorChain:
    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        for collector in self._collectors:
            yield from collector.collect()


PAUSE_S: Final = 1.0
"""Between tries where no connection can be accepted."""
LIMITS: Final = ConnectionLimits()
_OWN_TROUBLE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_RAW_HEADERS: Final = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
_METHODS: Final = ["GET", "HEAD"]


class Guarded:
    """Adds the security headers to every answer, and refuses every method but GET and HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_RAW_HEADERS]}
            await send(message)

        if scope["method"] not in _METHODS:
            refused = Response("read-only: GET and HEAD are all there is\n", 405, {"allow": "GET, HEAD"}, "text/plain")
            await refused(scope, receive, secured)
            return
        await self._app(scope, receive, secured)


class Server(uvicorn.Server):
    """uvicorn as one task among others: signals are the command's own, and connections are bounded."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self._sockets: Sequence[socket.socket] = ()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leave the signals alone."""
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn; `main_loop` accepts, since asyncio's own accepting spins where no file can be opened."""
        self._sockets, self.servers, self.started = sockets or (), [], True

    async def main_loop(self) -> None:
        """Called by uvicorn: serve until `should_exit`."""
        connections = Connections(self._limits)
        async with TaskScope() as scope:
            for one in self._sockets:
                scope.spawn(self._accept(one, connections), "accept")
            await super().main_loop()

    async def _accept(self, listening: socket.socket, connections: Connections) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        is_reported = False
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno not in _OWN_TROUBLE:
                    await asyncio.sleep(0)  # whoever called has gone
                    continue
                if not is_reported:
                    logger.warning("no connection can be accepted (%s); trying again", error)
                    is_reported = True
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                await loop.connect_accepted_socket(
                    lambda: HttpConnection(connections, self.config, self.server_state), accepted
                )
            except OSError:
                accepted.close()


def make_server(app: ASGIApp, limits: ConnectionLimits = LIMITS) -> Server:
    """A server for a socket that listens already: `await server.serve(sockets=[…])`; `should_exit` ends it."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=int(limits.head_s),
        timeout_graceful_shutdown=2,
    )
    return Server(config, limits)
