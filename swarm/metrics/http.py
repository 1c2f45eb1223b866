"""A read-only HTTP server: security headers on every answer, GET and HEAD alone. Owns no routes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_CONNECTIONS: Final = 1_000
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
    """uvicorn as one task among others: signals are the command's own."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leave the signals alone."""
        return nullcontext()


def make_server(app: ASGIApp) -> Server:
    """A server for a socket that listens already: `await server.serve(sockets=[…])`; `should_exit` ends it."""
    return Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=2,
        )
    )
