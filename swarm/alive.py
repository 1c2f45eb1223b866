"""Whether one of Canopy's programs answers: `python -m swarm.alive node 31338 [HOST]`, for images and manifests.

A node must sign a nonce, the health page must give its state, a bootstrap peer must speak libp2p. Exit code 0 or 1.
A private swarm's node hears members only: CANOPY_NETWORK_KEY names the file of the network key.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import secrets
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.base.ids import PeerId

DEADLINE_S = 8.0
_LIBP2P = b"\x13/multistream/1.0.0\n"
"""The first message on a libp2p connection, from either side."""


def node(host: str, port: int) -> bool:
    """Whether a node's service answers, with a valid signature over a fresh nonce and over its own certificate."""
    import grpc
    import msgpack

    from swarm.base.errors import ConfigError
    from swarm.directory.address_proof import HELLO_METHOD, NONCE_BYTES, check_hello
    from swarm.link.certificate import check_certificate, name_of
    from swarm.link.dial import CHANNEL_OPTIONS, pin
    from swarm.link.egress.streams import bracketed
    from swarm.link.network_key import NetworkKey

    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        der = shown_certificate(host, port)
        named = os.environ.get("CANOPY_NETWORK_KEY")
        credentials, pinned = pin(der, name_of(der), NetworkKey.load(Path(named)) if named else None)
        with grpc.secure_channel(f"{bracketed(host)}:{port}", credentials, [*CHANNEL_OPTIONS, *pinned]) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HELLO_METHOD)
            answer = call(nonce, timeout=DEADLINE_S)
        peer = PeerId(msgpack.unpackb(answer)["peer_id"])
        check_certificate(der, peer)
        return check_hello(peer, nonce, hashlib.sha256(der).digest(), answer)
    except (grpc.RpcError, ConfigError, msgpack.UnpackException, OSError, *_NO_ANSWER):
        return False


_NO_ANSWER = (ValueError, KeyError, TypeError, AttributeError)
"""What an odd answer makes its reader raise."""


def shown_certificate(host: str, port: int) -> bytes:
    """The certificate (DER) of whoever answers there now. It proves nothing before its owner vouched for it.

    Raises:
        OSError: nobody answers, or not with TLS.
    """
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, port), timeout=DEADLINE_S))


def health(host: str, port: int) -> bool:
    """Whether the health service gives its state."""
    connection = http.client.HTTPConnection(host, port, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/api/v1/state")
        answer = connection.getresponse()
        return answer.status == 200 and answer.read(1) == b"{"
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def bootstrap(host: str, port: int) -> bool:
    """Whether a DHT peer answers libp2p's greeting."""
    try:
        with socket.create_connection((host, port), DEADLINE_S) as connection:
            connection.sendall(_LIBP2P)
            with connection.makefile("rb") as reply:
                return reply.read(len(_LIBP2P)) == _LIBP2P
    except OSError:
        return False


CHECKS: dict[str, Callable[[str, int], bool]] = {"node": node, "health": health, "bootstrap": bootstrap}


def main(arguments: Sequence[str]) -> int:
    """The exit code for a program and its port."""
    match list(arguments):
        case [kind, port, *rest] if kind in CHECKS and port.isascii() and port.isdigit() and len(rest) < 2:
            return 0 if CHECKS[kind](rest[0] if rest else "127.0.0.1", int(port)) else 1
        case _:
            print(f"usage: python -m swarm.alive {'|'.join(CHECKS)} PORT [HOST]", file=sys.stderr)  # noqa: T201
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
