"""What a session's client signs for: how many tokens each machine of its route computed (PROTOCOL S7).

A receipt leaves when a text is over, by a call of its own to hop 0, which passes it on: no sweep waits for it, and no
machine learns more of the client than it knows. Machines of releases that know none pass none on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import RouteHop
from swarm.trust.receipt import MAX_RECEIPT_HOPS, Receipt, seal

TELL_S: Final = 1.0
"""How long hop 0 may take to hear of a receipt; a session's end waits for that."""


@dataclass(slots=True)
class ServedTokens:
    """The running totals of one session, in tree nodes that became committed; its chain counts.

    Attributes:
        route: the newest one.
        since: what was answered before it began.
        committed: how long the session is with the last sweep that left.
        sent: by sweeps that left.
        after: the total after each sweep that is not answered, by its sequence.
        answered: by sweeps that were answered, so that all machines of the route ran them.
        signed: of the newest receipt.
        began_at: when the session was opened, in Unix seconds.
    """

    route: tuple[RouteHop, ...]
    since: int = 0
    committed: int = 0
    sent: int = 0
    after: dict[int, int] = field(default_factory=dict)
    answered: int = 0
    signed: int = 0
    began_at: int = field(default_factory=lambda: int(time.time()))

    def follow(self, route: tuple[RouteHop, ...]) -> None:
        """The session goes on over another route, to which belongs what is answered from now on."""
        self.route, self.since = route, self.answered

    def receipt(self, key: SessionKey, fingerprint: str) -> bytes | None:
        """A receipt for all so far; None where there is nothing new, or the route has too many machines."""
        if self.answered <= max(self.signed, self.since) or len(self.route) > MAX_RECEIPT_HOPS:
            return None
        self.signed = self.answered
        times = self.began_at, max(int(time.time()), self.began_at)
        return seal(Receipt(key.public_key, fingerprint, self.route, self.since, self.answered, *times), key)
