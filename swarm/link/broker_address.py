"""An MQTT broker's URL: `mqtt://` or `mqtts://` (TLS), with user and password if it has them. Connects nowhere."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from swarm.base.errors import ConfigError
from swarm.link.egress.streams import bracketed

PORTS = {"mqtt": 1_883, "mqtts": 8_883}


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A broker, and as whom to connect.

    Attributes:
        host: name or IP address, IPv6 without brackets.
        port: TCP port.
        tls: None for plain TCP.
        user: None for an anonymous connection.
        password: never shown.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """The URL without user and password."""
        return f"{'mqtt' if self.tls is None else 'mqtts'}://{bracketed(self.host)}:{self.port}"


def parse_broker(url: str, ca: Path | None = None) -> BrokerAddress:
    """Parse a broker's URL.

    Args:
        url: `mqtt://[user:password@]host[:port]`, or the same with `mqtts://`.
        ca: file of certificates to trust instead of the system's.

    Raises:
        ConfigError: it is no such URL, or the file cannot be read. The message never holds the password.
    """
    try:
        parts = urlsplit(url)
        usual_port = PORTS[parts.scheme]
        port = parts.port or usual_port
    except (ValueError, KeyError) as error:
        raise _no_broker(url) from error
    if not parts.hostname or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise _no_broker(url)
    if ca is not None and parts.scheme != "mqtts":
        raise ConfigError("--mqtt-ca: certificates are for mqtts:// brokers only")
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    return BrokerAddress(parts.hostname, port, _tls(ca) if parts.scheme == "mqtts" else None, user, password)


def _tls(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--mqtt-ca {ca}: no certificates can be read there ({error})") from error


def _no_broker(url: str) -> ConfigError:
    """The error for a malformed URL; it shows the scheme alone, because the rest may hold a password."""
    shown = f"{url.partition('://')[0][:20]}://…"
    return ConfigError(
        f"--mqtt {shown!r} is no broker; write mqtt://host:port, or mqtts://user:password@host:port for TLS"
    )
