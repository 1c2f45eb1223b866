"""What stands before every route: the host, the origin, the key and the size of the body. Pure ASGI; owns no route."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.api.context import REQUEST_ID, ApiSettings, RequestCounts, api_key, request_id, speaks_anthropic
from client.api.errors import ApiError, ErrorForm, error_body, form_of
from client.api.left_out import SCOPE as LEFT_OUT
from client.api.left_out import header as left_out_header
from swarm.metrics.http import HEADERS

_KEYED: Final = ("/v1/", "/api/", "/metrics")
"""Paths that need a key, where there are keys; the page, its files and `/health` do not."""
_ID_HEADERS: Final = (b"x-request-id", b"request-id")
"""Where OpenAI's clients and Anthropic's look for the name of a request."""
_RAW_HEADERS: Final = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class ApiGuard:
    """Refuses what must not reach a route, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, requests: RequestCounts) -> None:
        self._app = app
        self._settings = settings
        self._requests = requests
        self._keys = [key.encode() for key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        scope[REQUEST_ID] = name = f"req_{secrets.token_hex(12)}"
        scope[LEFT_OUT] = []
        named = [(header, name.encode()) for header in _ID_HEADERS]

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_RAW_HEADERS, *named, *left_out_header(scope)]}
                self._requests.add(form_of(scope["path"]), message["status"])
            await send(message)

        request = Request(scope)
        try:
            self._check(request)
        except ApiError as error:
            await refusal(request, error)(scope, receive, secured)
            return
        await self._app(scope, _bounded(receive, self._settings), secured)

    def _check(self, request: Request) -> None:
        """Refuse the request by its head.

        Raises:
            ApiError: why.
        """
        settings = self._settings
        host = request.headers.get("host", "")
        if settings.hosts and host_name(host) not in settings.hosts:
            raise ApiError(
                403, f"This server does not answer to the host name {host[:100]!r}.", code="host_not_allowed"
            )
        origin = request.headers.get("origin")
        if origin and not self._is_welcome(origin, host):
            message = f"Pages of {origin[:100]} may not call this server; it allows them with --origin."
            raise ApiError(403, message, code="origin_not_allowed")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > settings.max_body_bytes:
            raise too_large(settings.max_body_bytes)
        if self._keys and request.url.path.startswith(_KEYED) and request.method != "OPTIONS":
            self._check_key(api_key(request))

    def _is_welcome(self, origin: str, host: str) -> bool:
        allowed = self._settings.origins
        return "*" in allowed or origin in allowed or urlsplit(origin).netloc == host

    def _check_key(self, shown: str) -> None:
        given = shown.encode()
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all of them: no time tells which
        if not any(matches):
            message = "Incorrect API key provided." if shown else "You didn't provide an API key."
            raise ApiError(401, message, code="invalid_api_key")


def host_name(host: str) -> str:
    """The name or address in a `Host` header, without the port and the brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def refusal(request: Request, error: ApiError) -> JSONResponse:
    """The answer to a request, in the form of the dialect of its path."""
    form: ErrorForm = "anthropic" if speaks_anthropic(request) else form_of(request.url.path)
    body = error_body(form, error, request_id(request))
    return JSONResponse(body, error.status, error.headers)


def too_large(max_bytes: int) -> ApiError:
    """A body over the bound."""
    return ApiError(413, f"The request is larger than {max_bytes:,} bytes.", code="request_too_large")


def _bounded(receive: Receive, settings: ApiSettings) -> Receive:
    """The same, with an error where a body grows over the bound, or does not come in time."""
    taken = 0
    is_whole = False
    until: float | None = None

    async def receive_some() -> Message:
        nonlocal taken, is_whole, until
        if is_whole:
            return await receive()
        until = until or asyncio.get_running_loop().time() + settings.body_s
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, "The request's body did not come in time.", code="request_timeout") from None
        is_whole = not message.get("more_body", False)
        taken += len(message.get("body", b""))
        if taken > settings.max_body_bytes:
            raise too_large(settings.max_body_bytes)
        return message

    return receive_some
