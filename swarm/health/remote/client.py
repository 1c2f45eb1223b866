"""Asks a running health service over HTTP, with a bound on time and size. Returns bytes; reads nothing into them."""

from __future__ import annotations

from typing import Final

import httpx2

from swarm.base.errors import ConfigError, RegistryError
from swarm.health.tasks.publisher import HEARTBEAT_S

STATE: Final = "api/v1/state"
MAX_ANSWER_BYTES: Final = 64 * 2**20
CONNECT_S: Final = 5.0
TIMEOUT: Final = httpx2.Timeout(CONNECT_S, read=2 * HEARTBEAT_S)


def service_url(text: str) -> httpx2.URL:
    """Check and complete the address of a health service.

    Raises:
        ConfigError: it is none.
    """
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"--url {text!r}: {error}; write http://host:port, as `swarm health` prints it") from error
    if url.scheme not in {"http", "https"} or not url.host or not 0 < (url.port or 80) < 65_536:
        raise ConfigError(f"--url {text!r}: write http://host:port, as `swarm health` prints it")
    return url.copy_with(path=f"{url.path.rstrip('/')}/", query=None, fragment=None)


async def ask_bytes(client: httpx2.AsyncClient, url: httpx2.URL, path: str) -> bytes:
    """The body that a service answers with, up to `MAX_ANSWER_BYTES`.

    Raises:
        RegistryError: nobody answers there, or with something else.
    """
    found = bytearray()
    try:
        async with client.stream("GET", url.join(path), timeout=TIMEOUT) as answer:
            if answer.status_code != httpx2.codes.OK:
                raise RegistryError(f"{url} is no health service: it answers {answer.status_code} for {path}")
            async for piece in answer.aiter_bytes():
                found += piece
                if len(found) > MAX_ANSWER_BYTES:
                    raise RegistryError(f"{url} is no health service: its answer for {path} does not end")
    except httpx2.RequestError as error:
        raise RegistryError(f"no health service answers at {url}: {reason(error)}") from error
    return bytes(found)


def reason(error: Exception) -> str:
    """Why a connection failed, in words."""
    match error:
        case httpx2.ConnectTimeout() | httpx2.ReadTimeout():
            return "no answer in time"
        case httpx2.SSEError():
            return "it sends no events"
        case httpx2.ConnectError():
            return "the connection is refused, or there is no such host"
        case httpx2.ReadError() | httpx2.RemoteProtocolError():
            return "the connection broke"
        case _:
            return str(error) or type(error).__name__
