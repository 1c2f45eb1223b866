"""What a hop signs when a text is over: which streams of which session it had, and their heads (PROTOCOL S4). Pure.

A settling key (ed25519) signs; the machine's identity (RSA) signs that key once, so a signature costs 0.05 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.base.declared import ListForm, Printable, Size, exactly
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.protocol.authority import is_signed
from swarm.protocol.limits import HASH_BYTES, MAX_SETTLED_BYTES, PEER_CHARACTERS, SESSION_KEY_BYTES, Natural
from swarm.protocol.messages import Codec, HopSpan, SessionName, ShortText, SignedMachine
from swarm.protocol.peer_keys import peer_id_of, verify
from swarm.trust.commitment import CommittedStream

VOUCHER: Final = b"canopy-settling-key\n"
SETTLEMENT: Final = b"canopy-settlement\n"
MAX_STREAMS: Final = 64
"""Streams of one side of a session that a hop commits to: the newest ones."""
DATED_S: Final = 120.0
"""How far its date may be from the clock of who asked for it: clocks differ, and it is kept for a while."""


@dataclass(frozen=True, slots=True)
class SettledStream:
    """One stream, as one of its ends signs it.

    Attributes:
        since: generation in which it was attached.
        other: the machine at the other end; empty for the client.
        count: messages.
        sequence: of the last one; 0 without any.
        head: of all of them.
        is_broken: whether something on it could not be committed to; then messages after these are not covered.
    """

    since: Natural
    other: Annotated[str, Printable(PEER_CHARACTERS)]
    count: Natural
    sequence: Natural
    head: Annotated[bytes, exactly(HASH_BYTES)]
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Settlement:
    """What one hop did in one session.

    Attributes:
        session: its name.
        peer: the machine.
        fingerprint: of the model.
        numeric_class: of its layers.
        span: those that the session used.
        num_layers: of the whole model: whose span ends there has picked.
        codec: how rows travelled.
        generation: the newest of which it heard.
        adopted: tokens that the session began with (P15), of which no row travelled.
        received: streams that brought sweeps, oldest first.
        sent: streams that took them on; at the tail, its replies.
        at: when it was signed, in Unix seconds: who asked for it sees that this is true, and others that it is not old.
    """

    session: SessionName
    peer: SignedMachine
    fingerprint: ShortText
    numeric_class: ShortText
    span: HopSpan
    num_layers: Natural
    codec: Codec
    generation: Natural
    adopted: Natural
    received: Annotated[tuple[SettledStream, ...], Size(MAX_STREAMS)]
    sent: Annotated[tuple[SettledStream, ...], Size(MAX_STREAMS)]
    at: Natural

    @property
    def is_tail(self) -> bool:
        """Whether it picked tokens."""
        return self.span.end == self.num_layers


FORM: Final = ListForm(Settlement)


def settled(stream: CommittedStream, me: str) -> SettledStream:
    """A stream as one end of it signs it."""
    other = stream.receiver if stream.sender == me else stream.sender
    last = next(reversed(stream.heads), 0)
    return SettledStream(stream.since, other, stream.count, last, stream.head, stream.is_broken)


def check_date(settlement: Settlement, now_s: float) -> None:
    """That it was signed just now.

    Args:
        now_s: Unix seconds.

    Raises:
        RemoteProtocolError: it was not, or the machine says so.
    """
    if abs(now_s - settlement.at) > DATED_S:
        raise RemoteProtocolError("at", f"{settlement.peer} dates what it signs {now_s - settlement.at:+.0f} s back")


class SettlingKey:
    """A machine's key for settlements, made at its start."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self._public = self._key.public_key().public_bytes_raw()
        self._voucher = b""

    def seal(self, settlement: Settlement, signer: Any) -> bytes:  # noqa: ANN401
        """Sign a settlement.

        Args:
            signer: the machine's identity: `public_key` and `sign`, which vouch for this key once.
        """
        if not self._voucher:
            self._voucher = signer.sign(VOUCHER + self._public)
        body: bytes = msgpack.packb(FORM.encode(settlement))
        parts = [signer.public_key, self._public, self._voucher, body, self._key.sign(SETTLEMENT + body)]
        sealed: bytes = msgpack.packb(parts)
        return sealed


def opened(sealed: bytes) -> Settlement:
    """What a machine signed, once all of its signatures hold.

    Raises:
        RemoteProtocolError: it is malformed (`sealed`), not signed by this key (`settlement`), or the key is not the
            machine's (`voucher`).
    """
    try:
        if len(sealed) > MAX_SETTLED_BYTES:
            raise ValueError("is too large")
        public_key, key, voucher, body, signature = msgpack.unpackb(sealed)
        values = msgpack.unpackb(body)
        if not all(isinstance(part, bytes) for part in (public_key, key, voucher, signature)):
            raise ValueError("holds no keys")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError("sealed", f"is no settlement ({error})") from None
    settlement = FORM.decode(values)
    if msgpack.packb(FORM.encode(settlement)) != body:
        raise RemoteProtocolError("sealed", "is not written in its one form")
    if len(key) != SESSION_KEY_BYTES or not is_signed(key, SETTLEMENT + body, signature):
        raise RemoteProtocolError("settlement", "is not signed by the key that comes with it")
    peer = PeerId(settlement.peer)
    if peer_id_of(public_key) != peer or not verify(peer, public_key, VOUCHER + key, voucher):
        raise RemoteProtocolError("voucher", f"{settlement.peer} did not vouch for this key")
    return settlement
