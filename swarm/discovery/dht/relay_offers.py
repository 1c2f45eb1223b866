"""The question to a DHT peer whether its machine lends a relay, and where: asked and answered in one datum.

A peer speaks of itself alone, and libp2p has authenticated it. So nobody is listed as a relay by another's word.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgpack

from swarm.discovery.node_record import split_address
from swarm.discovery.record_fields import RecordError
from swarm.ids import PeerId
from swarm.runtime.quota import Quota, QuotaLimits, RateLimit
from swarm.transport.relayed import parse_relayed

HANDLER = "canopy/v1/relay"
PEERS_ASKED = 16
"""Peers asked in one look-up, at most; those joined through come first."""
ASK_S = 4.0
"""Time for all their answers; those that came in until then are used."""
MAX_OFFER_BYTES = 320
"""Of one answer: an address, packed."""
_QUESTIONS = "questions for relays"
_LIMITS = QuotaLimits(rates={_QUESTIONS: RateLimit(per_key=0.5, burst=20.0, total=50.0, total_burst=200.0)})


class RelayDesk:
    """Says where this machine lends a relay.

    Attributes:
        address: `host:port`; None where it lends none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Lend nothing yet.

        Args:
            clock: a monotonic one, in seconds.
        """
        self.address: str | None = None
        self._quota = Quota(_LIMITS, clock)

    def answer(self, peer: PeerId) -> bytes:
        """The address, or nil, as msgpack; nil too for who asks too often.

        Args:
            peer: who asks; libp2p has authenticated it.
        """
        packed: bytes = msgpack.packb(self.address if self._quota.spend(_QUESTIONS, peer) else None)
        return packed


def parse_offer(answer: bytes) -> str | None:
    """The `host:port` in an answer; None where it offers none, or is malformed."""
    if len(answer) > MAX_OFFER_BYTES:
        return None
    try:
        address: Any = msgpack.unpackb(answer)
        if not isinstance(address, str) or parse_relayed(address) is not None:
            return None
        split_address(address)
    except (ValueError, RecordError, msgpack.UnpackException):
        return None
    return address
