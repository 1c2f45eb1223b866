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

KEY, SIGNATURE, NONCE = "canopy-key-bin", "canopy-sig-bin", "canopy-nonce-bin"
_DOMAIN = b"canopy-dial\n"
_LONGEST = {KEY: MAX_KEY_BYTES, SIGNATURE: MAX_SIGNATURE_BYTES, NONCE: NONCE_BYTES + TIME_BYTES}

Metadata = tuple[tuple[str, bytes], ...]
Introduce = Callable[[str, bytes], Metadata]
"""Makes the metadata of one call, from its method and from what it begins with."""


class Signer(Protocol):
    """A key of whoever calls."""

    @property
    def public_key(self) -> bytes:
        """At most 1,024 bytes."""

    def sign(self, data: bytes) -> bytes:
        """A signature of at most 512 bytes."""


@dataclass(frozen=True, slots=True)
class Callee:
    """The machine that is called.

    Attributes:
        peer: its peer id.
        digest: SHA-256 of its certificate's DER, of b"" in a swarm without certificates.
    """

    peer: PeerId
    digest: bytes

    @classmethod
    def of(cls, peer: PeerId, certificate: bytes) -> Callee:
        """A machine with this certificate (DER)."""
        return cls(peer, hashlib.sha256(certificate).digest())


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

    def signed(self, callee: Callee, method: str, subject: bytes) -> bytes:
        """What the caller signs.

        Args:
            callee: whom it calls.
            method: the full name of the gRPC method.
            subject: what the call begins with.
        """
        digest = hashlib.sha256(subject).digest()
        packed: bytes = msgpack.packb([callee.peer, callee.digest, method, self.nonce, self.time_ms, digest])
        return _DOMAIN + packed


def introducer(signer: Signer, callee: Callee, clock: Callable[[], float] = time.time) -> Introduce:
    """How a signer introduces its calls to one machine."""

    def introduce(method: str, subject: bytes) -> Metadata:
        nonce, time_ms = secrets.token_bytes(NONCE_BYTES), round(clock() * 1e3)
        made = Introduction(signer.public_key, b"", nonce, time_ms)
        signature = signer.sign(made.signed(callee, method, subject))
        return ((KEY, made.public_key), (SIGNATURE, signature), (NONCE, nonce + time_ms.to_bytes(TIME_BYTES)))

    return introduce


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
