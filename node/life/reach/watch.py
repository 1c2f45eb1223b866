"""Looks again while the node serves: whether it is still reached as its record says, and what to do if not.

What is seen at a look is a value, and what follows from it is decided without asking anybody (`decide`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from node.life.reach.ladder import Reached, Whereabouts
from swarm.base.errors import ConfigError, RegistryError
from swarm.base.ids import PeerId
from swarm.base.logs import CountedLog
from swarm.directory.node_record import Reach
from swarm.link.endpoint import RelayedAddress, parse_relayed

LOOK_S: Final = 3.0
"""Between looks at what costs nothing: own addresses, the mapping, the relays."""
DIAL_BACK_S: Final = 15.0
"""Between dial-backs where a port leads here; a peer dials back six times a minute for one machine."""
DIAL_BACK_RELAYED_S: Final = 60.0
"""The same for a relayed machine, whose standing connection tells that the relay is there."""
ANSWER_S: Final = 6.0
"""For a dial-back: one peer's whole time. The rest is looked at only afterwards."""
RELAY_GRACE_S: Final = 6.0
"""How long no relay may be left before the ladder is climbed again."""
AGAIN_S: Final = 10.0
"""Until the ladder is climbed again after it led nowhere; doubled each time, up to `LONGEST_S`."""
LONGEST_S: Final = 120.0
BETTER_S: Final = 600.0
"""How often a relayed machine looks whether a better rung holds by now."""
SOON_S: Final = 5.0
"""The same just after a change that cost it a better one: peers and the router often know of it a little later. Doubled
each time, up to `BETTER_S`."""

logger = logging.getLogger(__name__)


class WatchMove(enum.Enum):
    """What to do."""

    STAY = enum.auto()
    OTHER_RELAY = enum.auto()
    """Announce the relay at which the machine stands now; peers knew nothing of it, so nobody is asked."""
    CLIMB = enum.auto()


@dataclass(frozen=True, slots=True)
class Sight:
    """What is seen at a look.

    Attributes:
        own: the addresses of this machine's interfaces, as text.
        mapped: the mapping's `host:port`; None where the router maps nothing.
        is_doubtful: whether the router does not answer, so that nobody knows whether it has the mapping.
        relays: where this machine stands, the one to announce first.
        is_reached: the last dial-back's verdict; None where none was due or nobody could be asked.
        was_asked: whether one was due.
    """

    own: tuple[str, ...] = ()
    mapped: str | None = None
    is_doubtful: bool = False
    relays: tuple[str, ...] = ()
    is_reached: bool | None = None
    was_asked: bool = False


def decide(reached: Reached, before: Sight, now: Sight, alone_s: float) -> tuple[WatchMove, str]:
    """What follows from a look.

    Args:
        reached: how others come to this machine, as the record says.
        before: what was seen when that was found.
        now: what is seen.
        alone_s: for how long it has stood at no relay.

    Returns:
        What to do, and why in a few words.
    """
    if now.own != before.own:
        return WatchMove.CLIMB, "this machine's own addresses changed"
    match reached.reach:
        case Reach.MAPPED if now.mapped != reached.address:
            return (
                WatchMove.CLIMB,
                "the router gave up the port" if now.mapped is None else "the router's address changed",
            )
        case Reach.MAPPED if now.is_doubtful and now.was_asked and now.is_reached is None:
            return WatchMove.CLIMB, "neither the router nor a peer answers"
        case Reach.RELAYED:
            relayed = parse_relayed(reached.address)
            assert relayed is not None, "a relayed machine has a relayed address"
            if relayed.relay not in now.relays:
                if now.relays:
                    return WatchMove.OTHER_RELAY, f"the relay {relayed.relay} is lost"
                if alone_s >= RELAY_GRACE_S:
                    return WatchMove.CLIMB, "no relay is left"
                return WatchMove.STAY, ""
    if now.is_reached is False:
        return WatchMove.CLIMB, f"peers do not reach {reached.address} any more"
    return WatchMove.STAY, ""


@dataclass(frozen=True, slots=True)
class Senses:
    """What the watch asks.

    Attributes:
        peer: this machine.
        look: what is seen without asking peers.
        dial_back: whether peers reach an address; None where nobody could be asked.
        climb: climbs the ladder, quickly or not; raises ConfigError where nothing holds.
        announce: tells the directory how this machine is reached now.
        say: takes lines for the user.
    """

    peer: PeerId
    look: Callable[[], Sight]
    dial_back: Callable[[str], Awaitable[bool | None]]
    climb: Callable[[bool], Awaitable[Reached]]
    announce: Callable[[], Awaitable[None]]
    say: Callable[[str], object]


class Watch:
    """Watches one machine."""

    def __init__(self, whereabouts: Whereabouts, senses: Senses, clock: Callable[[], float]) -> None:
        """Begin with what the ladder found.

        Args:
            whereabouts: how it is reached; changed here.
        """
        self._whereabouts = whereabouts
        self._senses = senses
        self._clock = clock
        now = clock()
        self._before = senses.look()
        self._dialled_at = self._climbed_at = self._stood_at = now
        self._wait_s = AGAIN_S
        self._better_s = BETTER_S
        self._is_lost = self._was_doubtful = False
        self._log = CountedLog(logger, clock)

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except RegistryError as error:
                self._log.say("directory", f"cannot look how this machine is reached: {error}")

    async def look(self) -> None:
        """Look once, and do what follows."""
        now, reached, senses = self._clock(), self._whereabouts.now, self._senses
        sight = senses.look()
        if sight.relays:
            self._stood_at = now
        move, why = decide(reached, self._before, sight, now - self._stood_at)
        is_relayed = reached.reach is Reach.RELAYED
        is_due = now - self._dialled_at >= (DIAL_BACK_RELAYED_S if is_relayed else DIAL_BACK_S)
        is_doubtful = reached.reach is Reach.MAPPED and sight.is_doubtful and not self._was_doubtful
        self._was_doubtful = sight.is_doubtful
        if move is WatchMove.STAY and (is_due or is_doubtful):
            self._dialled_at = now
            verdict = None
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    verdict = await senses.dial_back(reached.address)
            move, why = decide(
                reached, self._before, replace(sight, is_reached=verdict, was_asked=True), now - self._stood_at
            )
            if verdict:
                self._is_lost = False
        if move is WatchMove.STAY and is_relayed and now - self._climbed_at >= self._better_s:
            move, why = WatchMove.CLIMB, ""
        match move:
            case WatchMove.OTHER_RELAY:
                await self._move_to_relay(sight.relays[0], why)
            case WatchMove.CLIMB if not self._is_lost or now - self._climbed_at >= self._wait_s:
                await self._climb(sight, why)

    async def _move_to_relay(self, relay: str, why: str) -> None:
        address = str(RelayedAddress(self._senses.peer, relay))
        await self._be(Reached(address, Reach.RELAYED, f"{why}; reached through {relay}"))

    async def _climb(self, sight: Sight, why: str) -> None:
        self._climbed_at = self._clock()
        try:
            quickly = self._whereabouts.now.reach is not Reach.RELAYED
            reached = await self._senses.climb(quickly)
        except ConfigError as error:
            self._before = sight
            self._wait_s = min(2 * self._wait_s, LONGEST_S) if self._is_lost else AGAIN_S
            self._is_lost = True
            self._better_s = min(2 * self._better_s, BETTER_S)
            self._log.say("reach", f"{why or 'looked again'}: {error}; trying again")
            return
        self._is_lost = False
        self._better_s = SOON_S if why else min(2 * self._better_s, BETTER_S)
        self._before = self._senses.look()
        is_unasked = quickly and reached.reach is Reach.RELAYED
        self._dialled_at = self._clock() - (DIAL_BACK_RELAYED_S if is_unasked else 0.0)
        await self._be(Reached(reached.address, reached.reach, f"{why}; {reached.why}" if why else reached.why))

    async def _be(self, reached: Reached) -> None:
        if self._whereabouts.move(reached):
            self._senses.say(reached.why)
            await self._senses.announce()
