"""What a client signs of a session for the machines that served it: how many tokens each computed (PROTOCOL S6). Pure.

One signature of the session's key covers a whole route. Numbers are running totals of the session, so a later receipt
takes the place of an earlier one. Keys of sessions are free: by itself a receipt proves nothing. What it is worth
follows from who else shows the same one (`swarm.health.state.contributions`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgpack

from swarm.base.declared import Broken, ListForm, Size, below, exactly
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId, SessionId
from swarm.protocol.authority import SessionKey, is_signed, session_of
from swarm.protocol.limits import SESSION_KEY_BYTES, Counted
from swarm.protocol.messages import HopSpan, ShortText, SignedMachine

RECEIPT: Final = b"canopy-receipt\n"
MAX_RECEIPT_BYTES: Final = 4_096
MAX_RECEIPT_HOPS: Final = 48
"""Machines of a route for which a receipt is made: so many fit, and one message of telemetry holds it."""
FRESH_S: Final = 3_600.0
"""How long after it was signed a receipt counts."""
MAX_SESSION_S: Final = 86_400.0
"""For how long after a session began its receipts count."""
SKEW_S: Final = 60.0
"""How far clocks may differ, as for introductions (R15)."""
SealedReceipt = Annotated[bytes, Size(MAX_RECEIPT_BYTES, 1)]
UnixS = Annotated[int, below(1 << 40)]


@dataclass(frozen=True, slots=True)
class ReceiptHop:
    """A machine's part of a receipt.

    Attributes:
        peer: the machine.
        span: the layers that the session used there.
        since: the session's running total when the machine came into its route.
    """

    peer: SignedMachine
    span: HopSpan
    since: Counted


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a session's route computed so far.

    Attributes:
        session_key: public key of the session, after which it is named (R14).
        fingerprint: of the model, hex digits.
        route: all machines, from layer 0 to the last.
        tokens: tree nodes that became committed in this session by sweeps that were answered; a running total.
        began_at: when the session was opened, in Unix seconds of its client's clock; the same in all its receipts.
        issued_at: when this was signed, likewise.
    """

    session_key: Annotated[bytes, exactly(SESSION_KEY_BYTES)]
    fingerprint: ShortText
    route: Annotated[tuple[ReceiptHop, ...], Size(MAX_RECEIPT_HOPS, 1)]
    tokens: Counted
    began_at: UnixS
    issued_at: UnixS

    def check(self) -> None:
        """Refuse a route with gaps or with one machine twice, totals beyond the session's, and times in reverse."""
        ends = [0, *(hop.span.end for hop in self.route)]
        if any(hop.span.start != end for hop, end in zip(self.route, ends, strict=False)):
            raise Broken("route", "its spans do not follow one another from layer 0 on")
        if len({hop.peer for hop in self.route}) < len(self.route):
            raise Broken("route", "a machine stands in it twice")
        if max(hop.since for hop in self.route) > self.tokens:
            raise Broken("since", "is beyond the session's tokens")
        if self.began_at > self.issued_at:
            raise Broken("began_at", "is later than issued_at")

    @property
    def session(self) -> SessionId:
        """The name of its session."""
        return session_of(self.session_key)

    @property
    def num_layers(self) -> int:
        """Layers of the whole route."""
        return self.route[-1].span.end

    def hop_of(self, peer: PeerId) -> ReceiptHop | None:
        """A machine's part; None where it has none."""
        return next((hop for hop in self.route if hop.peer == peer), None)

    def untimely(self, now: float) -> str | None:
        """Why it does not count now, by its times; None where it does.

        Args:
            now: Unix seconds.
        """
        if not now - FRESH_S <= self.issued_at <= now + SKEW_S:
            return "issued_at"
        return None if self.began_at >= now - MAX_SESSION_S else "began_at"


FORM: Final = ListForm(Receipt)


def seal(receipt: Receipt, key: SessionKey) -> bytes:
    """Sign a receipt with its session's key."""
    body: bytes = msgpack.packb(FORM.encode(receipt))
    sealed: bytes = msgpack.packb([body, key.sign(RECEIPT + body)])
    return sealed


def opened(sealed: bytes) -> Receipt:
    """The receipt, once its signature holds.

    Raises:
        RemoteProtocolError: with the field: `receipt` where it is none or written in another form, `signature`, or a
            field that breaks its bounds.
    """
    try:
        if len(sealed) > MAX_RECEIPT_BYTES:
            raise ValueError("is too large")
        body, signature = msgpack.unpackb(sealed)
        values = msgpack.unpackb(body)
        if not isinstance(signature, bytes) or msgpack.packb([body, signature]) != sealed:
            raise ValueError("is written otherwise")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError("receipt", f"is none ({error})") from None
    receipt = FORM.decode(values)
    if msgpack.packb(FORM.encode(receipt)) != body:
        raise RemoteProtocolError("receipt", "is not written in its one form")
    if not is_signed(receipt.session_key, RECEIPT + body, signature):
        raise RemoteProtocolError("signature", "is not of the session's key")
    return receipt
