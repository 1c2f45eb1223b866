"""The question to a DHT peer whether its machine lends a relay, and where: asked and answered in one datum.

A peer speaks of itself alone, and libp2p has authenticated it. So nobody is listed as a relay by another's word.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgpack

from swarm.base.ids import PeerId
from swarm.base.quota import Quota, QuotaLimits, RateLimit
from swarm.directory.node_record import split_address
from swarm.directory.sealing import RecordError
from swarm.link.endpoint import parse_relayed

HANDLER = "canopy/v1/relay"
PEERS_ASKED = 16
"""Peers asked in one look-up, at most; those joined through come first."""
ASK_S = 4.0
"""Time for all their answers; those that came in until then are used."""
MAX_OFFER_BYTES = 640
"""Of one answer: its addresses, packed."""
MAX_ADDRESSES = 2
"""Of one relay: one of each family."""
ASKS_ALL = b"all"
"""The question that is answered with a list. Any other one, as of an older release, is answered with one address."""
_QUESTIONS = "questions for relays"
_LIMITS = QuotaLimits(rates={_QUESTIONS: RateLimit(per_key=0.5, burst=20.0, total=50.0, total_burst=200.0)})


class RelayDesk:
    """Says where this machine lends a relay.

    Attributes:
        addresses: `host:port` each, the best first; none where it lends none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.addresses: tuple[str, ...] = ()
        self._quota = Quota(_LIMITS, clock)

    def answer(self, peer: PeerId, question: bytes = b"") -> bytes:
        """The addresses, or the best one, or nil, as msgpack; nil too for who asks too often.

        Args:
            peer: who asks; libp2p has authenticated it.
            question: `ASKS_ALL`, or anything else.
        """
        offered = self.addresses if self._quota.spend(_QUESTIONS, peer) else ()
        said = list(offered[:MAX_ADDRESSES]) if question == ASKS_ALL else next(iter(offered), None)
        packed: bytes = msgpack.packb(said or None)
        return packed


def parse_offer(answer: bytes) -> tuple[str, ...]:
    """The `host:port` in an answer, the best first; none where it offers none, or any of them is malformed."""
    if len(answer) > MAX_OFFER_BYTES:
        return ()
    try:
        said: Any = msgpack.unpackb(answer)
        addresses = [said] if isinstance(said, str) else said
        if not isinstance(addresses, list) or len(addresses) > MAX_ADDRESSES:
            return ()
        for address in addresses:
            if not isinstance(address, str) or parse_relayed(address) is not None:
                return ()
            split_address(address)
    except (ValueError, RecordError, msgpack.UnpackException):
        return ()
    return tuple(addresses)
