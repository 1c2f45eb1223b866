"""The way past a relay: both ends agree through it on addresses and tokens, and then connect to each other.

The relay tells each end whence the other one comes. Through the circuit that `PUNCH` opens go two lines:

    MEET TOKEN ADDRESSES           the machine: what it says first, and where it may be found
    NOW TOKEN ADDRESSES            the dialler: what it answers, and further addresses; `-` for none

Private addresses are told only where the relay sees both at one public address.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.base.plain_text import plain_line
from swarm.link.egress.streams import Streams, connect
from swarm.reach.paths.hole import Hole, HoleTokens, OwnAddresses, allowed_targets, own_addresses
from swarm.reach.paths.way import REMEMBERED_S, NoWay, OpenedWay
from swarm.reach.relay.openings import MAX_ADDRESSES, TOKEN_BYTES, check_token, parse_addresses

AGREE_S: Final = 5.0
"""How long both ends may take to agree."""
LONGEST_LEAD_S: Final = 0.25
"""How long the dialler waits, at most, for its word to arrive before it knocks."""
NO_ADDRESSES: Final = "-"


class PunchWay:
    name = "punch"

    def __init__(self, own: Callable[[], OwnAddresses] = own_addresses) -> None:
        self._own = own

    async def open(self, peer: PeerId, relay: str) -> OpenedWay:
        """A connection past the relay; errors as of every way."""
        async with Hole.at(relay, self._own) as hole:
            agreed = await _agree(hole, peer)
            targets = allowed_targets(agreed.addresses, hole.place, same_home=agreed.same_home)
            try:
                streams, path = await hole.meet(targets, agreed.tokens, chooses=True)
            except TimeoutError as error:
                raise NoWay("the routers between let no hole be punched", REMEMBERED_S) from error
            return OpenedWay(streams, path)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What both ends know before they knock.

    Attributes:
        addresses: where the other end says it may be found; not checked yet.
        tokens: by which they know each other.
        same_home: whether the relay sees both at one public address.
    """

    addresses: tuple[str, ...]
    tokens: HoleTokens
    same_home: bool


async def _agree(hole: Hole, peer: PeerId) -> Agreement:
    """The dialler's side; returns about when its last word arrives."""
    circuit: Streams | None = None
    try:
        async with asyncio.timeout(AGREE_S):
            circuit = await connect(hole.relay)
            asked_at = time.monotonic()
            await circuit.say("PUNCH", peer, ",".join(hole.public[:MAX_ADDRESSES]))
            seen = await _seen(circuit)
            theirs = await hear_addresses(circuit, "MEET")
            took_s = time.monotonic() - asked_at
            mine = secrets.token_hex(TOKEN_BYTES)
            same_home = hole.place.shares_home(seen)
            await circuit.say("NOW", mine, told(hole, same_home=same_home))
            await asyncio.sleep(min(took_s / 4, LONGEST_LEAD_S))
    finally:
        if circuit is not None:
            circuit.close()
    return Agreement(theirs.addresses, HoleTokens(waits=theirs.token, chooses=mine), same_home)


@dataclass(frozen=True, slots=True)
class ToldAddresses:
    """What one end says: its token, and where it may be found."""

    token: str
    addresses: tuple[str, ...]


def told(hole: Hole, *, same_home: bool, public: bool = False) -> str:
    """The addresses of one end for the other, as they are written.

    Args:
        same_home: whether private ones may be told.
        public: whether public ones are to be told.
    """
    listed = [*(hole.private if same_home else ()), *(hole.public if public else ())]
    return ",".join(listed[:MAX_ADDRESSES]) or NO_ADDRESSES


async def hear_addresses(circuit: Streams, verb: str) -> ToldAddresses:
    """What the other end says.

    Raises:
        NoWay: the circuit has ended.
        RemoteProtocolError: it says something else.
    """
    match await circuit.hear():
        case []:
            raise NoWay("the other end does not answer")
        case [word, token, listed] if word == verb:
            addresses = () if listed == NO_ADDRESSES else parse_addresses(listed)
            return ToldAddresses(check_token(token), addresses)
        case _:
            raise RemoteProtocolError(verb, "the other end says something else")


async def _seen(circuit: Streams) -> str:
    """Whence the machine comes, in the relay's words."""
    match await circuit.hear():
        case []:
            raise NoWay("the relay ended the connection")
        case ["OK", address]:
            return parse_addresses(address, limit=1)[0]
        case ["NO", *reason]:
            raise NoWay(f"the relay refuses: {plain_line(' '.join(reason))[:80]}")
        case _:
            raise RemoteProtocolError("PUNCH", "the relay does not say whence the machine comes")
