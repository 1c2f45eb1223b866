"""What a client signs of a session for the machines that served it: how many tokens each computed (PROTOCOL S7). Pure.

One signature of the session's key covers a whole route. Numbers are running totals of the session, so a later receipt
of the same route takes the place of an earlier one. A new route begins where the one before had come to: all machines
of a receipt computed the same tokens. Keys of sessions are free: by itself a receipt proves nothing. What it is worth
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
from swarm.protocol.limits import MAX_RECEIPT_BYTES, SESSION_KEY_BYTES, Counted
from swarm.protocol.messages import RouteHop, ShortText

RECEIPT: Final = b"canopy-receipt\n"
MAX_RECEIPT_HOPS: Final = 48
"""Machines of a route for which a receipt is made: so many fit, and one message of telemetry holds it."""
FRESH_S: Final = 3_600.0
"""How long after it was signed a receipt counts."""
MAX_SESSION_S: Final = 86_400.0
"""For how long after a session began its receipts count."""
SKEW_S: Final = 60.0
"""How far clocks may differ, as for introductions (R15)."""
UnixS = Annotated[int, below(1 << 40)]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a session's route computed so far.

    Attributes:
        session_key: public key of the session, after which it is named (R14).
        fingerprint: of the model, hex digits.
        route: all machines, from layer 0 to the last; second replicas are not named.
        since: the session's running total when this route began.
        tokens: the running total now: tree nodes that became committed by sweeps that were answered.
        began_at: when the session was opened, in Unix seconds of its client's clock; the same in all its receipts.
        issued_at: when this was signed, likewise.
    """

    session_key: Annotated[bytes, exactly(SESSION_KEY_BYTES)]
    fingerprint: ShortText
    route: Annotated[tuple[RouteHop, ...], Size(MAX_RECEIPT_HOPS, 1)]
    since: Counted
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
        if self.since >= self.tokens:
            raise Broken("since", "leaves no token to this route")
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

    def hop_of(self, peer: PeerId) -> RouteHop | None:
        """A machine's part; None where it has none."""
        return next((hop for hop in self.route if hop.peer == peer), None)

    @property
    def leg(self) -> tuple[tuple[RouteHop, ...], int]:
        """The route from its beginning on: whoever shows a receipt of one leg was in all of it."""
        return self.route, self.since

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
