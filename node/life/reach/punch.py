"""A machine's end of holes: a relay says that somebody wants one, and both knock at each other's addresses.

A stranger names the addresses, so they are few and rated. A machine on the Internet knocks at public ones alone, and in
its own network only where the relay sees the stranger at this machine's own public address.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

from swarm.base.errors import SwarmError
from swarm.base.logs import CountedLog, describe
from swarm.base.quota import Quota, QuotaLimits, RateLimit
from swarm.link.egress.streams import Streams, connect
from swarm.reach.paths.hole import Hole, HoleTokens, OwnAddresses, allowed_targets, own_addresses
from swarm.reach.paths.punch import AGREE_S, hear_addresses, told
from swarm.reach.relay.openings import TOKEN_BYTES

MAX_AT_A_TIME: Final = 8
"""Holes that are tried at a time."""
_PUNCHES: Final = "holes"
_LIMITS: Final = QuotaLimits(rates={_PUNCHES: RateLimit(per_key=0.5, burst=16, total=2, total_burst=32)})
"""Per relay, and in total."""

logger = logging.getLogger(__name__)

Adopt = Callable[[str, Streams, str], None]
"""Takes a connection for this machine's gRPC server: from which relay, its streams, and the dialler's address."""


class PunchAnswerer:
    """Knocks where diallers are."""

    def __init__(
        self,
        adopt: Adopt,
        own: Callable[[], OwnAddresses] = own_addresses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._adopt = adopt
        self._own = own
        self._quota = Quota(_LIMITS, clock)
        self._log = CountedLog(logger, clock)
        self._running = 0

    async def answer(self, relay: str, token: str, addresses: Sequence[str]) -> bool:
        """Do what a relay asks for with `PUNCH TOKEN ADDRESSES`; whether a hole came of it.

        Args:
            token: of the circuit, checked.
            addresses: from which the dialler knocks, checked to be `host:port`; the relay vouches for the first one.
        """
        if self._running >= MAX_AT_A_TIME or not self._quota.spend(_PUNCHES, relay):
            self._log.say(relay, f"the relay at {relay} asks for more holes than are made at a time")
            return False
        self._running += 1
        try:
            streams = await self._open(relay, token, addresses)
        except (OSError, TimeoutError, SwarmError) as error:
            logger.debug("no hole to %s: %s", addresses[0], describe(error))
            return False
        finally:
            self._running -= 1
        self._adopt(relay, streams, addresses[0])
        return True

    async def _open(self, relay: str, token: str, addresses: Sequence[str]) -> Streams:
        """The connection that the dialler took.

        Raises:
            OSError, TimeoutError, SwarmError: there is none.
        """
        async with Hole.at(relay, self._own) as hole:
            mine = secrets.token_hex(TOKEN_BYTES)
            same_home = hole.place.shares_home(addresses[0])
            circuit: Streams | None = None
            try:
                async with asyncio.timeout(AGREE_S):
                    circuit = await connect(hole.relay)
                    await circuit.say("TAKE", token)
                    await circuit.say("MEET", mine, told(hole, same_home=same_home, public=True))
                    theirs = await hear_addresses(circuit, "NOW")
            finally:
                if circuit is not None:
                    circuit.close()
            targets = allowed_targets([*addresses, *theirs.addresses], hole.place, same_home=same_home)
            streams, path = await hole.meet(targets, HoleTokens(waits=mine, chooses=theirs.token), chooses=False)
            logger.debug("opened to %s: %s", addresses[0], path.value)
            return streams
