"""The proof that a machine answers at an address: its signature over a nonce. Pure; used by dial-back and by nodes."""

from __future__ import annotations

from typing import Any

import msgpack

from swarm.discovery.identity import Identity, verify
from swarm.ids import PeerId

HELLO_METHOD = "/swarm.wire.v1.Node/Hello"
NONCE_BYTES = 16
MAX_HELLO_BYTES = 4_096
_DOMAIN = b"canopy-hello"


def hello_response(identity: Identity, nonce: bytes) -> bytes:
    """The answer to a Hello: msgpack of peer id, public key and a signature over the caller's nonce.

    Raises:
        ValueError: the nonce is not 16 bytes long.
    """
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    answer = {
        "peer_id": identity.peer_id,
        "public_key": identity.public_key,
        "signature": identity.sign(_DOMAIN + nonce),
    }
    packed: bytes = msgpack.packb(answer)
    return packed


def check_hello(peer_id: PeerId, nonce: bytes, response: bytes) -> bool:
    """Whether a response was signed by this peer over this nonce; never raises, whatever the bytes."""
    if len(response) > MAX_HELLO_BYTES:
        return False
    try:
        answer: Any = msgpack.unpackb(response)
    except (ValueError, msgpack.UnpackException):
        return False
    match answer:
        case {"peer_id": str(claimed), "public_key": bytes(key), "signature": bytes(signature)}:
            return claimed == peer_id and verify(peer_id, key, _DOMAIN + nonce, signature)
        case _:
            return False
