"""Who opens a call to this node: a hop by its identity, or a client by its session's key (PROTOCOL R15). No I/O."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId, SessionId
from swarm.protocol.authority import is_signed, session_of
from swarm.protocol.limits import SESSION_KEY_BYTES
from swarm.protocol.peer_keys import peer_id_of, verify
from swarm.transport.introduction import introduction_in

CLOCKS_DIFFER_S = 60.0
"""How far a caller's clock may be from this one."""
REMEMBERED_S = 2 * CLOCKS_DIFFER_S
"""From the earliest moment at which an introduction is believed to the last one."""
MAX_REMEMBERED = 65_536
"""Introductions of that time: 10 MB. Beyond it the oldest is forgotten."""

Caller = PeerId | SessionId
"""A machine, or the client of one session."""


class CallerCheck:
    """Believes each introduction once."""

    def __init__(self, peer: PeerId, digest: bytes, clock: Callable[[], float] = time.time) -> None:
        """Have heard nobody.

        Args:
            peer: this node.
            digest: SHA-256 of its certificate; empty in an insecure swarm.
            clock: seconds since 1970.
        """
        self._peer, self._digest = peer, digest
        self._clock = clock
        self._seen: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None, method: str, subject: bytes) -> Caller:
        """Who makes this call: a peer id (text), or the session whose client it is (bytes).

        Args:
            metadata: of the call.
            method: the full name of the gRPC method.
            subject: what the call begins with.

        Raises:
            RemoteProtocolError: nobody whom this call can be believed.
        """
        made = introduction_in(metadata or ())
        now_s = self._clock()
        late_s = now_s - made.time_ms / 1e3
        if abs(late_s) > CLOCKS_DIFFER_S:
            away = f"{abs(late_s):.0f} s {'behind' if late_s > 0 else 'ahead'}"
            raise RemoteProtocolError("introduction", f"the caller's clock is {away}; set it, 60 s are allowed")
        if made.nonce in self._seen:
            raise RemoteProtocolError("introduction", "was used before")
        signed = made.signed(self._peer, self._digest, method, subject)
        caller: Caller
        if len(made.public_key) == SESSION_KEY_BYTES:
            caller, is_right = session_of(made.public_key), is_signed(made.public_key, signed, made.signature)
        else:
            caller = peer_id_of(made.public_key)
            is_right = verify(caller, made.public_key, signed, made.signature)
        if not is_right:
            raise RemoteProtocolError("introduction", "its signature is not for this call to this machine")
        self._remember(made.nonce, now_s)
        return caller

    def _remember(self, nonce: bytes, now_s: float) -> None:
        while self._seen:
            nonce_then, then_s = next(iter(self._seen.items()))
            if now_s - then_s < REMEMBERED_S and len(self._seen) < MAX_REMEMBERED:
                break
            del self._seen[nonce_then]
        self._seen[nonce] = now_s
