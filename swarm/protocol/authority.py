"""Who commands a session: its client alone, by a key that it made for this session (PROTOCOL R14). Pure.

A session's name is a hash of its public key, so nobody can open one under a name that he saw elsewhere, and no hop
needs to remember whose a name is. The client signs each route once: one canonical form of it, the same for every hop
and for both replicas of a hedged one. Hops pass it on as it is and find their own place in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Self

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId, SessionId
from swarm.base.layers import Span
from swarm.protocol.limits import SESSION_BYTES, SESSION_KEY_BYTES
from swarm.protocol.messages import Attach, OwnerProof, Reroute, RouteHop
from swarm.protocol.peer_keys import peer_id_of, verify

_NAME = b"canopy-session\n"
_ROUTE = b"canopy-route\n"
_OWNER = b"canopy-owner\n"


class SessionKey:
    """The private half of a session's key; it never leaves the client and is never stored.

    Attributes:
        public_key: 32 bytes, ed25519.
        session: the name of the session that it commands.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()
        self.session = session_of(self.public_key)

    @classmethod
    def fresh(cls) -> Self:
        """A key for a new session."""
        return cls(Ed25519PrivateKey.generate())

    def sign(self, data: bytes) -> bytes:
        """Sign (64 bytes). Callers put a distinct prefix before their data."""
        return self._key.sign(data)

    def command(self, attach: Attach) -> Attach:
        """The attach with the session's name, key and signature."""
        named = replace(attach, session=self.session, open=replace(attach.open, session_key=self.public_key))
        return replace(named, signature=self.sign(_signed(self.session, named)))


def session_of(public_key: bytes) -> SessionId:
    """The name of the session that a key commands."""
    return SessionId(hashlib.sha256(_NAME + public_key).digest()[:SESSION_BYTES])


def is_signed(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether a session's key signed this; never raises, whatever the bytes."""
    if len(public_key) != SESSION_KEY_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (ValueError, InvalidSignature):
        return False
    return True


def check_command(session: SessionId, message: Attach | Reroute) -> None:
    """That the session's client asked for exactly this route.

    Args:
        session: which session it is.
        message: what came; where its receiver stands in the route is not signed.

    Raises:
        RemoteProtocolError: the session is another key's, or its key did not sign this.
    """
    key = message.open.session_key
    if session_of(key) != session:
        raise RemoteProtocolError("session_key", "is not the key that the session is named after")
    if not is_signed(key, _signed(session, message), message.signature):
        raise RemoteProtocolError("signature", "the session's client did not sign this route")


def prove_owner(session: SessionId, public_key: bytes, sign: Callable[[bytes], bytes]) -> OwnerProof:
    """Have an identity say that a session is its own (R18).

    Args:
        public_key: of the identity, as libp2p encodes it.
        sign: with the identity.
    """
    return OwnerProof(public_key, sign(_OWNER + session))


def proven_owner(message: Attach) -> PeerId | None:
    """The identity whose session it is; None where it does not say, or where that identity did not sign it."""
    proof = message.owner
    if proof is None:
        return None
    peer = peer_id_of(proof.public_key)
    return peer if verify(peer, proof.public_key, _OWNER + message.session, proof.signature) else None


def place_in(message: Attach | Reroute, peer: PeerId, span: Span | None = None) -> int | None:
    """Where a machine stands in a route, itself or as a hop's replica; None: nowhere.

    Args:
        message: has the route.
        peer: the machine.
        span: the layers that it must have there; None: any.
    """
    hedge = message.hedge
    for index, hop in enumerate(message.route):
        peers = (hop.peer, hedge.replica) if hedge is not None and hedge.index == index else (hop.peer,)
        if peer in peers and span in {None, hop.span}:
            return index
    return None


def replica_of(message: Attach | Reroute) -> RouteHop | None:
    """The second machine of the hedged hop, with its layers."""
    hedge = message.hedge
    return None if hedge is None else RouteHop(hedge.replica, message.route[hedge.index].span)


def _signed(session: SessionId, message: Attach | Reroute) -> bytes:
    """What the client signs: msgpack delimits each part, so two different routes never have the same bytes."""
    opened, hedge = message.open, message.hedge
    reserved: list[object] = [opened.fingerprint, opened.window_tokens, opened.sweeps, opened.nodes]
    reserved += [opened.codec.value, opened.session_key]
    if opened.aux_layers:
        reserved.append(opened.aux_layers)
    if opened.ends_only:
        reserved.append("ends")
    parts = [
        session,
        message.generation,
        [[hop.peer, hop.span.start, hop.span.end] for hop in message.route],
        None if hedge is None else [hedge.index, hedge.replica],
        reserved,
        hashlib.sha256(b"".join(hashlib.sha256(record).digest() for record in message.records)).digest(),
    ]
    packed: bytes = msgpack.packb(parts)
    return _ROUTE + packed
