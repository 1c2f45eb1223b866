"""The proofs that a machine answers at an address: its signature over a nonce and the certificate of the connection.

A machine in between cannot pass that one on: the caller's connection would end at another certificate. A relay has no
certificate; it proves whose it is, and whoever passes that on has carried bytes as a relay does.
Pure; used by dial-back and by nodes.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Any

import msgpack

from swarm.base.ids import PeerId
from swarm.directory.identity import Identity
from swarm.protocol.peer_keys import verify

HELLO_METHOD = "/swarm.wire.v1.Node/Hello"
NONCE_BYTES = 16
MAX_HELLO_BYTES = 4_096
MAX_WHO_BYTES = 2_048
_DOMAIN = b"canopy-hello-2\n"
_WHO_DOMAIN = b"canopy-relay-who-1\n"


def hello_response(identity: Identity, nonce: bytes, digest: bytes) -> bytes:
    """The answer to a Hello: msgpack of peer id, public key and a signature.

    Args:
        nonce: the caller's, 16 bytes.
        digest: SHA-256 of the certificate with which this machine answers; empty in an insecure swarm.

    Raises:
        ValueError: the nonce is not 16 bytes long.
    """
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    answer = {
        "peer_id": identity.peer_id,
        "public_key": identity.public_key,
        "signature": identity.sign(_DOMAIN + nonce + digest),
    }
    packed: bytes = msgpack.packb(answer)
    return packed


def check_hello(peer_id: PeerId, nonce: bytes, digest: bytes, response: bytes) -> bool:
    """Whether a response was signed by this peer, over this nonce and this certificate; never raises.

    Args:
        digest: SHA-256 of the certificate at which the connection ends; empty for one in plain text.
    """
    if len(response) > MAX_HELLO_BYTES:
        return False
    try:
        answer: Any = msgpack.unpackb(response)
    except (ValueError, msgpack.UnpackException):
        return False
    match answer:
        case {"peer_id": str(claimed), "public_key": bytes(key), "signature": bytes(signature)}:
            return claimed == peer_id and verify(peer_id, key, _DOMAIN + nonce + digest, signature)
        case _:
            return False


def who_question(nonce: bytes) -> bytes:
    """The line that asks a relay whose it is."""
    return f"WHO {nonce.hex()}\n".encode()


def who_answer(identity: Identity, nonce: bytes) -> bytes:
    """The line with which a relay answers: its owner's public key and signature, in base 64."""
    key, signature = b64encode(identity.public_key), b64encode(identity.sign(_WHO_DOMAIN + nonce))
    return b"WHO %b %b\n" % (key, signature)


def check_who(peer_id: PeerId, nonce: bytes, line: bytes) -> bool:
    """Whether a line was signed by this peer, over this nonce; never raises."""
    match line.split():
        case [b"WHO", key, signature] if len(line) <= MAX_WHO_BYTES:
            try:
                public_key, signed = b64decode(key, validate=True), b64decode(signature, validate=True)
            except (binascii.Error, ValueError):
                return False
            return verify(peer_id, public_key, _WHO_DOMAIN + nonce, signed)
        case _:
            return False
