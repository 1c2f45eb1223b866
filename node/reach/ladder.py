"""The ladder: direct, mapped, relayed. The first rung by which peers reach this machine is taken, proven by a call.

It asks and decides; what it asks is given to it, so that it is tested without a network. It is climbed before anything
large is loaded, and again whenever the watch finds that something changed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from node.reach.reached import Reached
from swarm.discovery.node_record import Reach
from swarm.errors import ConfigError
from swarm.gateway.ports import NoMapping
from swarm.ids import PeerId
from swarm.transport.endpoint import RelayedAddress

STAND_S: Final = 12.0
"""How long a relay may take to be found and to take this machine."""
RELAYS_TRIED: Final = 2

AskPeers = Callable[[str], Awaitable[bool | None]]
"""Whether peers reach this machine at an address; None where nobody could be asked."""

logger = logging.getLogger(__name__)


class Relays(Protocol):
    """Standing connections to relays (`node.reach.standing`)."""

    @property
    def relays(self) -> tuple[str, ...]:
        """Where this machine stands; the first is the one to announce."""
        ...

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why it does not stand elsewhere."""
        ...

    def prefer_other(self) -> None:
        """Put another one first."""
        ...

    async def stands(self, limit_s: float) -> bool:
        """Wait until it stands somewhere."""
        ...


@dataclass(frozen=True, slots=True)
class Rungs:
    """What the ladder stands on.

    Attributes:
        peer: this machine.
        announced: `host:port` that the user announces; then nothing else is tried.
        own: `host:port` of this machine's own addresses that peers may call, best first.
        fallback: what is announced where nobody can be asked.
        is_first: whether this machine joined nobody, so that nobody could be asked.
        dial_back: asks peers to call.
        call_self: whether this machine reaches itself at a relayed address.
        map_port: has the router map the port; gives its external `host:port` and how. None: it may not be asked.
        unmap: gives that port back.
        relays: brings standing connections up and gives them; None: no relay is to be used.
        is_narrow: whether large packets do not pass here, and nobody says so: a relay is tried first, which keeps what
            comes small.
    """

    peer: PeerId
    announced: str | None
    own: Callable[[], Sequence[str]]
    fallback: str
    is_first: bool
    dial_back: AskPeers
    call_self: Callable[[str], Awaitable[bool]]
    map_port: Callable[[], Awaitable[tuple[str, str]]] | None = None
    unmap: Callable[[], Awaitable[None]] | None = None
    relays: Callable[[], Relays] | None = None
    is_narrow: bool = False


class Ladder:
    """Climbs.

    Attributes:
        tried: what the last climb found on each rung below the one that it took; one line each.
    """

    def __init__(self, rungs: Rungs) -> None:
        self.tried: list[str] = []
        self._rungs = rungs
        self._unasked: str | None = None

    async def climb(self, *, quickly: bool = False) -> Reached:
        """The first rung that holds.

        Args:
            quickly: take a relay that leads here without asking peers: when a way in is lost, the directory's
                connections mostly are too, and whoever asks them waits. Peers are to be asked soon.

        Raises:
            ConfigError: none does; `tried` says what was tried.
        """
        self.tried, self._unasked = [], None
        rungs = self._rungs
        if rungs.announced is not None:
            return await self._announced(rungs.announced)
        if quickly and rungs.relays is not None:
            rungs.relays()  # they are looked for while the router is asked
        relayed = partial(self._relayed, quickly=quickly)
        found: list[Callable[[], Awaitable[Reached | None]]] = [self._direct, self._mapped, relayed]
        if rungs.is_narrow and rungs.relays is not None:
            found = [relayed, self._direct, self._mapped]
        for rung in found:
            reached = await rung()
            if reached is not None:
                return reached
        if self._unasked is not None:
            return self._direct_at(self._unasked, None)
        port = rungs.fallback.rpartition(":")[2]
        raise ConfigError(
            f"peers cannot reach {rungs.fallback}: open or forward the port ({port}, TCP) and give --announce-address, "
            "or join a swarm in which somebody lends a relay"
        )

    async def _announced(self, address: str) -> Reached:
        verdict = await self._rungs.dial_back(address)
        if verdict is False:
            raise ConfigError(f"peers cannot reach {address}: open or forward the port, or give --announce-address")
        return self._direct_at(address, verdict)

    async def _direct(self) -> Reached | None:
        own = self._rungs.own()
        for address in own:
            verdict = await self._rungs.dial_back(address)
            if verdict or (verdict is None and self._rungs.is_first):
                return self._direct_at(address, verdict)
            if verdict is None:
                self._unasked = self._unasked or address
        if own:
            self.tried.append(f"direct: peers cannot reach {', '.join(own)}")
        else:
            self.tried.append("direct: this machine has no public address of its own")
        return None

    def _direct_at(self, address: str, verdict: bool | None) -> Reached:
        if verdict is None and self._rungs.is_first:
            why = "no peer yet that could dial back: this is the first machine of the swarm"
        elif verdict is None:
            why = f"no peer could dial back: nobody knows whether {address} can be called"
        else:
            why = f"reached directly: peers can call {address}"
        return Reached(address, Reach.DIRECT, why)

    async def _mapped(self) -> Reached | None:
        rungs = self._rungs
        if rungs.map_port is None:
            self.tried.append("mapped: --no-port-mapping forbids to ask the router")
            return None
        try:
            address, protocol = await rungs.map_port()
        except NoMapping as none:
            self.tried.append(f"mapped: {none}")
            return None
        if await rungs.dial_back(address):
            return Reached(address, Reach.MAPPED, f"reached by a port of the router: {address}, mapped by {protocol}")
        self.tried.append(
            f"mapped: the router maps {address} ({protocol}), but peers cannot reach that: another router is before it"
        )
        if rungs.unmap is not None:
            await rungs.unmap()
        return None

    async def _relayed(self, *, quickly: bool) -> Reached | None:
        if self._rungs.relays is None:
            self.tried.append("relayed: --relay off forbids it")
            return None
        relays = self._rungs.relays()
        if not await relays.stands(STAND_S):
            why = "; ".join(relays.troubles) or "no peer of the swarm lends one"
            self.tried.append(f"relayed: no relay takes this machine: {why}")
            return None
        failed: list[str] = []
        for _ in range(RELAYS_TRIED):
            relay = next(iter(relays.relays), None)
            if relay is None or relay in failed:
                break
            address = str(RelayedAddress(self._rungs.peer, relay))
            if await (self._rungs.call_self if quickly else self._rungs.dial_back)(address) is not False:
                return Reached(address, Reach.RELAYED, f"reached through the relay {relay}")
            failed.append(relay)
            relays.prefer_other()
        self.tried.append(f"relayed: peers do not come through {', '.join(failed)}")
        return None
