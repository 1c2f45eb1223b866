"""Machines of one local network find each other: what they announce by mDNS, and what they hear (DNS-SD).

An announcement says nothing that a machine of the network could not find by trying: under which addresses the swarm is
joined, its id, which model it serves, whether a key is needed. It gives no right. What is heard comes from whoever is
in the network, so all of it is checked and bounded. Only those count who prove at their own address that they are the
peer that they say (`swarm.directory.peer_proof`), and nothing is joined without the user
(`swarm.directory.joining.lan_choice`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from typing import Final

import psutil
from zeroconf import Error as MdnsError
from zeroconf import NonUniqueNameException, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from swarm.base.errors import ConfigError, RemoteProtocolError
from swarm.base.ids import MAX_MODEL_NAME, SWARM_ID_BYTES, PeerId, SwarmId, is_model_name
from swarm.base.logs import describe
from swarm.base.tasks import TaskScope
from swarm.directory.dht.addresses import check_join_address
from swarm.directory.peer_proof import proven as prove

SERVICE: Final = "_canopy._tcp.local."
FORMAT: Final = "1"
"""Of an announcement; others are not read."""
BROWSE_S: Final = 2.0
"""How long a machine listens for the others, at most."""
QUIET_S: Final = 0.5
"""It stops sooner when it has heard of a swarm, and of no other for so long."""
MAX_SERVICES: Final = 16
"""Announcements that are looked at, at most: the first ones."""
MAX_JOIN: Final = 3
"""Addresses of one announcement."""
MAX_ADDRESS: Final = 200
"""Characters of one of them."""
FINGERPRINT_DIGITS: Final = 12
LOOK_S: Final = 30.0
"""Between two looks at whether this machine's addresses have changed."""
LEAVE_S: Final = 1.0
"""How long taking back an announcement may take."""

_FINGERPRINT = re.compile(f"[0-9a-f]{{{FINGERPRINT_DIGITS}}}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LanSwarm:
    """A swarm, as a machine of the local network announces it.

    Attributes:
        join: multiaddresses of peers of the swarm, that machine's own first.
        model: name of the model that it serves; None where it serves none, as a bootstrap peer.
        fingerprint: how the model's fingerprint begins, `FINGERPRINT_DIGITS` hex digits; empty without a model.
        is_private: whether the swarm takes nobody without its key.
        swarm: the open swarm's id; None where it has none.
    """

    join: tuple[str, ...]
    model: str | None = None
    fingerprint: str = ""
    is_private: bool = False
    swarm: SwarmId | None = None

    @property
    def host(self) -> str:
        """The IP address or name of the peer that is dialled first."""
        return self.join[0].split("/")[2]

    @property
    def peer(self) -> PeerId:
        """Who is dialled first; nobody else can answer in its place."""
        return PeerId(self.join[0].rpartition("/")[2])


def announced(
    own: Sequence[str],
    joined: Sequence[str],
    model: tuple[str, str] | None = None,
    *,
    is_private: bool = False,
    swarm: SwarmId | None = None,
) -> LanSwarm | None:
    """What a member of a swarm tells the local network; None where nothing of it could be dialled from there.

    Args:
        own: multiaddresses of this machine's DHT peer; empty where others cannot dial it.
        joined: those of the peers through which it joined.
    """
    known = dict.fromkeys([*own, *joined])
    others = [one for one in known if len(one) <= MAX_ADDRESS and not one.startswith(("/ip4/127.", "/ip6/::1/"))]
    if not others:
        return None
    name, fingerprint = model or (None, "")
    return LanSwarm(tuple(others[:MAX_JOIN]), name, fingerprint[:FINGERPRINT_DIGITS], is_private, swarm)


def txt_of(swarm: LanSwarm) -> dict[str, str]:
    """An announcement as the TXT record of its service."""
    addresses = {f"join{number}": address for number, address in enumerate(swarm.join)}
    model = {} if swarm.model is None else {"model": swarm.model, "fingerprint": swarm.fingerprint}
    named = {} if swarm.swarm is None else {"swarm": swarm.swarm.hex()}
    return {"format": FORMAT, "private": str(int(swarm.is_private)), **named, **model, **addresses}


def read_txt(txt: Mapping[bytes, bytes | None]) -> LanSwarm:
    """Read the TXT record of a service; keys that this version does not know are ignored.

    Raises:
        RemoteProtocolError: names the key at fault.
    """
    if _value(txt, "format", 8) != FORMAT:
        raise RemoteProtocolError("format", "an announcement of another release")
    keys = [f"join{number}" for number in range(MAX_JOIN)]
    join = tuple(_join(_value(txt, key, MAX_ADDRESS)) for key in keys if txt.get(key.encode()))
    if not join:
        raise RemoteProtocolError("join0", "is missing")
    is_private = _value(txt, "private", 8) != "0"  # whatever it is: a swarm that says so wants a key
    swarm = _swarm(_value(txt, "swarm", 2 * SWARM_ID_BYTES))
    if b"model" not in txt:
        return LanSwarm(join, is_private=is_private, swarm=swarm)
    model, fingerprint = _value(txt, "model", MAX_MODEL_NAME), _value(txt, "fingerprint", FINGERPRINT_DIGITS)
    if not is_model_name(model):
        raise RemoteProtocolError("model", "is no name of a model")
    if _FINGERPRINT.fullmatch(fingerprint) is None:
        raise RemoteProtocolError("fingerprint", f"is not {FINGERPRINT_DIGITS} hex digits")
    return LanSwarm(join, model, fingerprint, is_private, swarm)


def private_addresses() -> list[str]:
    """This machine's IPv4 addresses in local networks; empty on a machine that has a public one.

    mDNS listens at all addresses of a machine, and no stranger of the Internet is to be answered.
    """
    cards, states = psutil.net_if_addrs(), psutil.net_if_stats()
    found = [
        IPv4Address(one.address)
        for card, addresses in cards.items()
        for one in addresses
        if one.family == socket.AF_INET and card in states and states[card].isup
    ]
    if any(ip.is_global for ip in found):
        return []
    return sorted(str(ip) for ip in found if not ip.is_loopback)


async def keep_announced(
    swarm: LanSwarm,
    addresses: Callable[[], list[str]] = private_addresses,
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Announce a swarm until this is cancelled, also when the machine comes into another network.

    A network that does not let it costs a log line and nothing else.
    """
    last = ""
    while True:
        now = addresses()
        try:
            async with _announcing(swarm, now):
                while addresses() == now:
                    await wait(LOOK_S)
        except (OSError, MdnsError, TimeoutError) as trouble:
            if describe(trouble) != last:
                last = describe(trouble)
                logger.info("not announced in the local network: %s", last)
            await wait(LOOK_S)


async def _proven(swarm: LanSwarm) -> LanSwarm | None:
    """An announcement of whom it says that it is, with the addresses of that peer alone; None of anybody else.

    Others' addresses prove nothing of who announces them: they are met in the swarm.
    """
    own = [one for one in swarm.join if one.endswith(f"/{swarm.peer}")]
    verdicts = await prove(own)
    join = tuple(one for one in own if verdicts.get(one))
    if not join:
        logger.info("%s does not prove that it is the peer that it announces", swarm.host)
        return None
    return replace(swarm, join=join)


async def browse(
    addresses: Collection[str] | None = None, limit_s: float = BROWSE_S, quiet_s: float = QUIET_S
) -> list[LanSwarm]:
    """The swarms that machines of the local network announce and prove to be of, each once, by their peer ids.

    Args:
        addresses: the IPv4 addresses to ask from; None: this machine's in local networks.
        limit_s: how long to listen, at most.
        quiet_s: how long nothing new must have come to stop sooner.
    """
    own = list(private_addresses() if addresses is None else addresses)
    if not own:
        return []
    hearing = _Hearing()
    try:
        async with (
            AsyncZeroconf(interfaces=own) as mdns,
            AsyncServiceBrowser(mdns.zeroconf, SERVICE, handlers=[hearing.on_change]),
        ):
            await hearing.listen(mdns.zeroconf, limit_s, quiet_s)
    except (OSError, MdnsError) as trouble:
        logger.info("the local network was not asked: %s", describe(trouble))
    return _distinct([one for one in await asyncio.gather(*map(_proven, hearing.swarms)) if one is not None])


class _Hearing:
    """What comes in while a machine listens."""

    def __init__(self) -> None:
        self.swarms: list[LanSwarm] = []
        self._names: asyncio.Queue[str | None] = asyncio.Queue(2 * MAX_SERVICES)  # None: a swarm was read
        self._seen: set[str] = set()

    def on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """Called by the browser; names beyond the first `MAX_SERVICES` are not heard."""
        if state_change is ServiceStateChange.Removed or name in self._seen or len(self._seen) >= MAX_SERVICES:
            return
        self._seen.add(name)
        self._names.put_nowait(name)

    async def listen(self, mdns: Zeroconf, limit_s: float, quiet_s: float) -> None:
        """Ask what the names stand for, until time is up or nothing new comes."""
        async with TaskScope() as asking:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    while True:
                        async with asyncio.timeout(quiet_s if self.swarms else None):
                            name = await self._names.get()
                        if name is not None:
                            asking.spawn(self._ask(mdns, name, limit_s))

    async def _ask(self, mdns: Zeroconf, name: str, limit_s: float) -> None:
        try:
            info = AsyncServiceInfo(SERVICE, name)
            if await info.async_request(mdns, limit_s * 1e3):
                self.swarms.append(read_txt(info.properties))
                self._names.put_nowait(None)
        except (RemoteProtocolError, MdnsError, ValueError) as error:
            logger.info("an announcement of the local network is not understood: %s", describe(error))


@asynccontextmanager
async def _announcing(swarm: LanSwarm, addresses: list[str]) -> AsyncIterator[None]:
    if not addresses:
        yield
        return
    mdns = AsyncZeroconf(interfaces=addresses)
    try:
        short = swarm.peer[-12:]
        info = AsyncServiceInfo(
            SERVICE,
            f"{short}.{SERVICE}",
            port=int(swarm.join[0].split("/")[4]),
            properties=txt_of(swarm),
            server=f"canopy-{short.lower()}.local.",
            parsed_addresses=addresses,
        )
        with suppress(NonUniqueNameException):  # this machine's own, of a network that it was in before
            await (await mdns.async_register_service(info, allow_name_change=True))
        yield
    finally:
        with suppress(TimeoutError, OSError, MdnsError):
            async with asyncio.timeout(LEAVE_S):
                await mdns.async_close()


def _distinct(swarms: Sequence[LanSwarm]) -> list[LanSwarm]:
    """One announcement per swarm, by its id or its peer: one that names a model stands for it."""
    chosen: dict[object, LanSwarm] = {}
    for swarm in sorted(swarms, key=lambda one: (one.model is None, one.peer)):
        chosen.setdefault(swarm.swarm or swarm.peer, swarm)
    return list(chosen.values())


def _swarm(said: str) -> SwarmId | None:
    if not said:
        return None
    try:
        return SwarmId(bytes.fromhex(said.ljust(2 * SWARM_ID_BYTES, "?")))
    except ValueError as error:
        raise RemoteProtocolError("swarm", f"is not {2 * SWARM_ID_BYTES} hex digits") from error


def _value(txt: Mapping[bytes, bytes | None], key: str, limit: int) -> str:
    value = txt.get(key.encode()) or b""
    if len(value) > limit or not value.isascii() or not value.decode("ascii", "replace").isprintable():
        raise RemoteProtocolError(key, f"is not printable ASCII of at most {limit} characters")
    return value.decode()


def _join(address: str) -> str:
    try:
        check_join_address(address)
    except ConfigError as error:
        raise RemoteProtocolError("join", "is no peer address") from error
    return address
