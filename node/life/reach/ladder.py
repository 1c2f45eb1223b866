"""The ladder: direct, mapped, relayed. The first rung by which peers reach this machine is taken, proven by a call.

It asks and decides; what it asks is given to it, so that it is tested without a network. It is climbed before anything
large is loaded, and again whenever the watch finds that something changed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from node.life.reach.standing import Standing
from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId
from swarm.directory.dialable import IpAddress, is_public
from swarm.directory.node_record import Reach
from swarm.link.egress.streams import bracketed
from swarm.link.endpoint import RelayedAddress
from swarm.reach.gateway.ports import NoMapping

logger = logging.getLogger(__name__)

# How others come to this machine, as the ladder found and the watch keeps it. A value and its holder; asks nobody.


@dataclass(frozen=True, slots=True)
class Reached:
    """One rung, proven.

    Attributes:
        address: under which others reach the gRPC service, as the record has it.
        reach: the rung.
        why: one line for the user.
    """

    address: str
    reach: Reach
    why: str


class Whereabouts:
    """How this machine is reached now; it changes while the node serves.

    Attributes:
        now: what the next record says.
    """

    def __init__(self, reached: Reached) -> None:
        self.now = reached

    def move(self, reached: Reached) -> bool:
        """From now on it is reached otherwise; whether that is news to others."""
        is_news = (reached.address, reached.reach) != (self.now.address, self.now.reach)
        self.now = reached
        return is_news


# Which of this machine's addresses peers are asked to call, and whether a swarm is one of private addresses.

MAX_CANDIDATES = 3
"""Own addresses that peers are asked to call: each peer dials back six times a minute for one machine."""
_LOOK_UP_S = 2.0


def candidates(
    host: str, port: int, found: Iterable[IpAddress], *, only_public: bool, prefers_ipv6: bool = False
) -> list[str]:
    """The `host:port` under which peers are asked to call this machine: public ones first, and one of each family.

    Args:
        found: the addresses of the interfaces, for a wildcard.
        only_public: whether peers call no private address, so that to ask for it is vain.
        prefers_ipv6: whether this machine knows its peers by IPv6 alone.
    """
    bound = ip_address("127.0.0.1" if host == "localhost" else host)
    every: list[IpAddress] = list(found) if bound.is_unspecified else [bound]
    every.sort(key=lambda ip: (not is_public(ip), (ip.version == 4) is prefers_ipv6))
    asked = [ip for ip in every if is_public(ip) or not only_public]
    first = asked[:MAX_CANDIDATES]
    others = [ip for ip in asked[MAX_CANDIDATES:] if ip.version not in {one.version for one in first}]
    if others:
        first[-1] = others[0]
    return [f"{bracketed(str(ip))}:{port}" for ip in first]


def knows_ipv6_alone(join: Sequence[str]) -> bool:
    """Whether all peers that are joined are called by IPv6, as multiaddresses say."""
    return bool(join) and all(address.startswith(("/ip6/", "/dns6/")) for address in join)


async def is_public_swarm(join: Sequence[str]) -> bool:
    """Whether one of the peers that are joined has a public address: then peers call no private ones.

    Args:
        join: multiaddresses; a name is looked up.
    """
    for address in join:
        kind, host = address.split("/")[1:3]
        for ip in [ip_address(host)] if kind in ("ip4", "ip6") else await _look_up(host):
            if is_public(ip):
                return True
    return False


async def _look_up(host: str) -> list[IPv4Address | IPv6Address]:
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return [ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


STAND_S: Final = 12.0
"""How long a relay may take to be found and to take this machine."""
RELAYS_TRIED: Final = 2

AskPeers = Callable[[str], Awaitable[bool | None]]
"""Whether peers reach this machine at an address; None where nobody could be asked."""


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
    call_self: AskPeers
    map_port: Callable[[], Awaitable[tuple[str, str]]] | None = None
    unmap: Callable[[], Awaitable[None]] | None = None
    relays: Callable[[], Standing] | None = None
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
