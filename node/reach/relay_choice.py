"""Which relays a machine stands at: near ones, not full, and not the same for all machines of a place. Pure but `ask`.

A sweep goes through every hop of a chain, so it pays the way to each hop's relay: the delay counts first. Machines that
are near to each other find the same relays near; each takes its own two of them by rendezvous hashing, so that the loss
of one relay does not take two hops of a chain together.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swarm.egress.streams import MAX_LINE_BYTES, connect, words
from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId
from swarm.ways.local_dialler import DialRelay

NEAR_FACTOR: Final = 1.5
NEAR_MS: Final = 10.0
"""A relay is near whose delay is at most 1.5 times that of the nearest one, and 10 ms more."""
FULL: Final = 0.8
"""A relay that carries more of what it may is taken only where no other one is left."""
ASK_S: Final = 3.0
"""Time for a relay to answer how much it carries."""


@dataclass(frozen=True, slots=True)
class RelayProbe:
    """A relay that answered.

    Attributes:
        address: its `host:port`.
        peer: whose it is; None where only the address is known.
        delay_ms: half of a round trip to it.
        load: part of its circuits, or of its lent rate, that is in use; 0 to 1.
    """

    address: str
    peer: PeerId | None
    delay_ms: float
    load: float


def in_order(probes: Sequence[RelayProbe], own: PeerId) -> list[RelayProbe]:
    """The relays, those first that this machine should stand at."""
    if not probes:
        return []
    nearest_ms = min(probes, key=lambda probe: (probe.load > FULL, probe.delay_ms)).delay_ms
    near_ms = nearest_ms * NEAR_FACTOR + NEAR_MS

    def place(probe: RelayProbe) -> tuple[bool, bool, float, bytes]:
        is_far = probe.delay_ms > near_ms
        return probe.load > FULL, is_far, probe.delay_ms if is_far else 0.0, _rendezvous(own, probe.address)

    return sorted(probes, key=place)


def parse_load(line: bytes) -> float:
    """Read `LOAD CIRCUITS LIMIT MBIT LENT-MBIT`: the larger of the two parts in use, 0 to 1.

    Raises:
        RemoteProtocolError: it is none.
    """
    match words(line):
        case ["LOAD", circuits, limit, rate, lent]:
            try:
                used, may = (float(circuits), float(rate)), (float(limit), float(lent))
            except ValueError:
                raise RemoteProtocolError("load", "not four numbers") from None
            parts = [one / most if most > 0 else 1.0 for one, most in zip(used, may, strict=True)]
            if not all(0 <= part <= 1e6 for part in parts):  # nor is what is no number
                raise RemoteProtocolError("load", "not four numbers that a relay can have")
            return min(max(parts), 1.0)
        case _:
            raise RemoteProtocolError("load", "a relay says LOAD and four numbers")


async def ask(address: str, peer: PeerId | None = None, dial: DialRelay = connect) -> RelayProbe | None:
    """Ask a relay how much it carries, and measure the way; None where it gives no sound answer in time."""
    try:
        async with asyncio.timeout(ASK_S):
            ends = await dial(address)
            try:
                asked = time.perf_counter()
                ends.writer.write(b"LOAD\n")
                line = await ends.reader.readuntil(b"\n")
                delay_ms = (time.perf_counter() - asked) * 1e3 / 2
            finally:
                ends.close()
        if len(line) > MAX_LINE_BYTES:
            return None
        return RelayProbe(address, peer, delay_ms, parse_load(line))
    except (OSError, TimeoutError, RemoteProtocolError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None


def _rendezvous(own: PeerId, address: str) -> bytes:
    return hashlib.sha256(f"{own} {address}".encode()).digest()
