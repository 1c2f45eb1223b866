"""An HTTP proxy that its user set for Canopy: the words of CONNECT, and what its refusals mean. Pure but `ask_proxy`.

The proxy of the environment (`https_proxy`) is for browsers and is left alone: it would learn who talks to whom. One
that is set as `CANOPY_PROXY` is used for everything that leaves this machine. It passes bytes that are encrypted.
"""

from __future__ import annotations

import asyncio
import base64
import re
import socket
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from swarm.base.errors import ConfigError
from swarm.base.plain_text import plain_line
from swarm.link.egress.streams import bracketed

VARIABLE: Final = "CANOPY_PROXY"
"""The environment's variable that holds its URL."""
MAX_ANSWER_BYTES: Final = 8_192
"""Of what a proxy answers before the bytes of the other end."""
_USUAL_PORT: Final = 3_128
_REASONS: Final = {
    403: "it does not allow that address or port",
    405: "it passes no CONNECT",
    407: f"it wants a user and a password: {VARIABLE}=http://USER:PASSWORD@HOST:PORT",
    502: "it cannot reach that address",
    503: "it is overloaded, or cannot reach that address",
    504: "that address does not answer it",
}


class ProxyRefused(OSError):
    """A proxy does not lead to an address; the message is one line, and holds no password."""


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """An HTTP proxy.

    Attributes:
        host: name or IP address, without brackets.
        credentials: `USER:PASSWORD`; empty where it wants none.
    """

    host: str
    port: int
    credentials: str = field(default="", repr=False)

    @property
    def address(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    def __str__(self) -> str:
        return f"the proxy {self.address}"

    @classmethod
    def parse(cls, url: str) -> HttpProxy:
        """Read `http://[USER:PASSWORD@]HOST[:PORT]`.

        Raises:
            ConfigError: it is none; the message does not repeat it.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or _USUAL_PORT
        except ValueError:
            host, port, parts = None, 0, urlsplit("")
        if parts.scheme != "http" or not host or parts.path not in ("", "/") or parts.query or not host.isascii():
            raise ConfigError(
                f"{VARIABLE} is no proxy's URL: write http://HOST:PORT, or http://USER:PASSWORD@HOST:PORT"
            )
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        return cls(host, port, f"{user}:{password}" if user else "")

    def request(self, address: str) -> bytes:
        """What asks it for a connection to `host:port`."""
        lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
        if self.credentials:
            lines.append(f"Proxy-Authorization: Basic {base64.b64encode(self.credentials.encode()).decode()}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def ask_proxy(proxy: HttpProxy, address: str, sock: socket.socket) -> None:
    """Have a proxy connect; afterwards the socket is the other end's.

    Raises:
        ProxyRefused: it does not.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, proxy.request(address))
    head = bytearray()
    while not head.endswith(b"\r\n\r\n") and len(head) < MAX_ANSWER_BYTES:
        byte = await loop.sock_recv(sock, 1)  # what follows is the other end's, which may speak first
        if not byte:
            break
        head += byte
    status = head.partition(b"\r\n")[0].decode("ascii", "replace").split(" ", 2)
    is_whole = head.endswith(b"\r\n\r\n") and len(status) > 1
    if not is_whole or not status[0].startswith("HTTP/1.") or _CODE.fullmatch(status[1]) is None:
        raise ProxyRefused(f"{proxy} does not answer as an HTTP proxy does")
    code = int(status[1])
    if not 200 <= code < 300:
        said = plain_line(status[2])[:80] if len(status) > 2 else ""
        reason = _REASONS.get(code, said or "it gives no reason")
        raise ProxyRefused(f"{proxy} refuses {address} ({code}): {reason}")


_CODE: Final = re.compile(r"[0-9]{3}", re.ASCII)
