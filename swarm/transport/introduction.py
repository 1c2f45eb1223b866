"""Who opens a call: a signature in its metadata, bound to the machine that is called (PROTOCOL R15). Pure.

Hops sign with their identity, clients with their session's key; nobody else introduces himself. What is signed names
the callee and its certificate, so an introduction cannot be shown to another machine. It names the method and what
the call begins with, so it cannot be used for anything else. A nonce and the time keep it from being used twice.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgpack

from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId
from swarm.protocol.limits import MAX_KEY_BYTES, MAX_SIGNATURE_BYTES, NONCE_BYTES, TIME_BYTES
from swarm.transport.endpoint import Endpoint

KEY, SIGNATURE, NONCE = "canopy-key-bin", "canopy-sig-bin", "canopy-nonce-bin"
_DOMAIN = b"canopy-dial\n"
_LONGEST = {KEY: MAX_KEY_BYTES, SIGNATURE: MAX_SIGNATURE_BYTES, NONCE: NONCE_BYTES + TIME_BYTES}

Metadata = tuple[tuple[str, bytes], ...]


class Signer(Protocol):
    """A key of whoever calls."""

    @property
    def public_key(self) -> bytes:
        """At most 1,024 bytes."""

    def sign(self, data: bytes) -> bytes:
        """A signature of at most 512 bytes."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What came with a call.

    Attributes:
        public_key: of whoever calls.
        signature: over `signed`.
        nonce: 16 random bytes.
        time_ms: of the caller's clock: milliseconds since 1970.
    """

    public_key: bytes
    signature: bytes
    nonce: bytes
    time_ms: int

    def signed(self, peer: PeerId, digest: bytes, method: str, subject: bytes) -> bytes:
        """What the caller signs.

        Args:
            peer: whom it calls.
            digest: SHA-256 of that machine's certificate; empty in an insecure swarm.
            method: the full name of the gRPC method.
            subject: what the call begins with.
        """
        begins = hashlib.sha256(subject).digest()
        packed: bytes = msgpack.packb([peer, digest, method, self.nonce, self.time_ms, begins])
        return _DOMAIN + packed


def introduce(
    signer: Signer, endpoint: Endpoint, method: str, subject: bytes, clock: Callable[[], float] = time.time
) -> Metadata:
    """The metadata of one call.

    Args:
        signer: who calls.
        endpoint: whom.
        method: the full name of the gRPC method.
        subject: what the call begins with: an Attach's signature, else the bytes of the first message.
        clock: seconds since 1970.
    """
    made = Introduction(signer.public_key, b"", secrets.token_bytes(NONCE_BYTES), round(clock() * 1e3))
    signature = signer.sign(made.signed(endpoint.peer, endpoint.digest, method, subject))
    return ((KEY, made.public_key), (SIGNATURE, signature), (NONCE, made.nonce + made.time_ms.to_bytes(TIME_BYTES)))


def introduction_in(metadata: Iterable[tuple[str, str | bytes]]) -> Introduction:
    """The introduction of a call; its signature is not checked yet.

    Args:
        metadata: of the call; other keys are ignored.

    Raises:
        RemoteProtocolError: it has none, or one that no signer makes.
    """
    found: dict[str, bytes] = {}
    for key, value in metadata:
        if key not in _LONGEST:
            continue
        if key in found or not isinstance(value, bytes) or len(value) > _LONGEST[key]:
            raise RemoteProtocolError(key, f"is there twice, or is longer than {_LONGEST[key]} bytes")
        found[key] = value
    if found.keys() != _LONGEST.keys() or len(found[NONCE]) != _LONGEST[NONCE]:
        raise RemoteProtocolError("introduction", "the caller does not say who it is; an older version, perhaps")
    nonce, time_ms = found[NONCE][:NONCE_BYTES], int.from_bytes(found[NONCE][NONCE_BYTES:])
    return Introduction(found[KEY], found[SIGNATURE], nonce, time_ms)
