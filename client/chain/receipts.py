"""What a session's client signs for: how many tokens each machine of its route computed (PROTOCOL S6).

A receipt leaves when a text is over, by a call of its own to hop 0, which passes it on: no sweep waits for it, and no
machine learns more of the client than it knows. Machines of releases that know none pass none on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import RouteHop
from swarm.trust.receipt import MAX_RECEIPT_HOPS, Receipt, ReceiptHop, seal

TELL_S: Final = 1.0
"""How long hop 0 may take to hear of a receipt; a session's end waits for that."""


@dataclass(slots=True)
class ServedTokens:
    """The running totals of one session, in tree nodes that became committed; its chain counts.

    Attributes:
        since: the machines of the newest route, and what was answered before each came.
        committed: how long the session is with the last sweep that left.
        sent: by sweeps that left.
        after: the total after each sweep that is not answered, by its sequence.
        answered: by sweeps that were answered, so that all machines of the route ran them.
        signed: of the newest receipt.
        began_at: when the session was opened, in Unix seconds.
    """

    since: dict[RouteHop, int]
    committed: int = 0
    sent: int = 0
    after: dict[int, int] = field(default_factory=dict)
    answered: int = 0
    signed: int = 0
    began_at: int = field(default_factory=lambda: int(time.time()))

    def follow(self, route: Iterable[RouteHop]) -> None:
        """The session goes on over another route: whoever comes new has a part of what comes from now on."""
        self.since = {hop: self.since.get(hop, self.answered) for hop in route}

    def receipt(self, key: SessionKey, fingerprint: str) -> bytes | None:
        """A receipt for all so far; None where there is nothing new, or the route has too many machines."""
        if self.answered <= self.signed or len(self.since) > MAX_RECEIPT_HOPS:
            return None
        self.signed = self.answered
        hops = tuple(ReceiptHop(hop.peer, hop.span, since) for hop, since in self.since.items())
        now = max(int(time.time()), self.began_at)
        return seal(Receipt(key.public_key, fingerprint, hops, self.answered, self.began_at, now), key)
