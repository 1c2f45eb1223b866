"""What stands before every route: the host, the origin, the key and the size of the body. Pure ASGI; owns no route."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import zlib
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.api.context import REQUEST_ID, ApiSettings, RequestCounts, api_key, request_id, speaks_anthropic
from client.api.errors import ApiError, ErrorForm, error_body, form_of, invalid
from client.api.proofs import SCOPE as PROOF
from client.api.proofs import header as proof_header
from client.api.request_fields import SCOPE as LEFT_OUT
from client.api.request_fields import header as left_out_header
from swarm.status.http import HEADERS

_KEYED: Final = ("/v1/", "/api/", "/metrics")
"""Paths that need a key, where there are keys; the page, its files and `/health` do not."""
OF_DESKTOP: Final = r"(app|tauri|vscode-file|vscode-webview)://[^/]*"
"""Origins of programs on the desktop; no page of the web has one."""
_HOST: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::[0-9]*)?")
_PACKED: Final = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""Ways to pack a body, as zlib calls them."""
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
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        scope[REQUEST_ID] = name = f"req_{secrets.token_hex(12)}"
        scope[LEFT_OUT], scope[PROOF] = [], []
        named = [(header, name.encode()) for header in _ID_HEADERS]

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = (*named, *left_out_header(scope), *proof_header(scope))
                message = {**message, "headers": [*message["headers"], *_RAW_HEADERS, *told]}
                self._requests.add(form_of(scope["path"]), message["status"])
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        request = Request(scope)
        is_head = scope["method"] == "HEAD"  # answered like a GET, whose routes know of none
        if is_head:
            scope = {**scope, "method": "GET"}
        try:
            self._check(request)
            body = unpacked(request.headers.get("content-encoding", ""))
        except ApiError as error:
            await refusal(request, error)(scope, receive, secured)
            return
        await self._app(scope, _bounded(receive, self._settings, body), secured)

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
        if self._keys and request.scope["path"].startswith(_KEYED) and request.method != "OPTIONS":
            self._check_key(api_key(request))

    def _is_welcome(self, origin: str, host: str) -> bool:
        allowed = self._settings.origins
        is_same = urlsplit(origin).netloc == host
        return is_same or "*" in allowed or origin in allowed or re.fullmatch(OF_DESKTOP, origin) is not None

    def _check_key(self, shown: str) -> None:
        given = shown.encode()
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all of them: no time tells which
        if not any(matches):
            message = "Incorrect API key provided." if shown else "You didn't provide an API key."
            raise ApiError(401, message, code="invalid_api_key")


def host_name(host: str) -> str:
    """The name or address in a `Host` header, without the port and the brackets; empty where it is none."""
    found = _HOST.fullmatch(host)
    return "" if found is None else (found[1] or found[2]).lower()


def refusal(request: Request, error: ApiError) -> JSONResponse:
    """The answer to a request, in the form of the dialect of its path.

    Paths are those of the scope, here and above: that of `request.url` is put together with the `Host` header, which
    may hold anything.
    """
    form: ErrorForm = "anthropic" if speaks_anthropic(request) else form_of(request.scope["path"])
    body = error_body(form, error, request_id(request))
    return JSONResponse(body, error.status, error.headers)


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request is larger than {max_bytes:,} bytes.", code="request_too_large")


Unpack = Callable[[bytes, int, bool], bytes]
"""What some more bytes of a body unpack to, no more than so many; whether they are the last ones."""


def unpacked(encoding: str) -> Unpack:
    """How to unpack a body.

    Raises:
        ApiError: nobody here can.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return lambda data, most, is_last: data
    if name not in _PACKED:
        raise ApiError(415, f"A body packed with '{name[:40]}' is not read here; gzip and deflate are.")
    packed = zlib.decompressobj(_PACKED[name])

    def unpack(data: bytes, most: int, is_last: bool) -> bytes:
        try:
            found = packed.decompress(data, most)
        except zlib.error as error:
            raise invalid(f"The body is no {name}: {error}.") from None
        if is_last and not packed.eof and not packed.unconsumed_tail:
            raise invalid(f"The body is no whole {name}.")
        return found

    return unpack


def _bounded(receive: Receive, settings: ApiSettings, unpack: Unpack) -> Receive:
    """The same, unpacked, with an error where a body grows over the bound, or does not come in time."""
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
        if message["type"] != "http.request":
            return message
        is_whole = not message.get("more_body", False)
        body = unpack(message.get("body", b""), settings.max_body_bytes + 1 - taken, is_whole)
        taken += len(body)
        if taken > settings.max_body_bytes:
            raise too_large(settings.max_body_bytes)
        return {**message, "body": body}

    return receive_some
