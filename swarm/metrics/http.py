"""A read-only HTTP server: security headers on every answer, GET and HEAD alone. Owns no routes."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.metrics.connections import ConnectionLimits, Connections, HttpConnection
from swarm.runtime.tasks import TaskScope

logger = logging.getLogger(__name__)

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
        """Serve one request."""
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
