"""Addresses of the DHT: what a configuration says, as multiaddresses, checked. Owns no process and listens nowhere.

It must stay a light import: the DHT process reads it too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarm.base.errors import ConfigError
from swarm.base.ids import SwarmId
from swarm.directory.dialable import IpAddress, interface_addresses, is_reached_by_ipv6
from swarm.link.egress.streams import bracketed
from swarm.link.network_key import NetworkKey
from swarm.protocol.peer_keys import is_peer_id


@dataclass(frozen=True, slots=True)
class PeerSource:
    """Where an address comes from.

    Attributes:
        rank: whose word counts: 0 what was typed, 1 the environment, 2 what is remembered.
        text: as people are told of it.
    """

    rank: int = 0
    text: str = "from --join"


@dataclass(frozen=True, slots=True)
class MetSwarm:
    """A swarm while it is joined.

    Attributes:
        swarm: its id; None in a private one, and in one that has none.
        peers: multiaddresses of its other peers.
        here: those of this machine's own peer; none of a client.
        others: peers that were to be joined and are of other swarms: whose, and the multiaddress.
    """

    swarm: SwarmId | None
    peers: tuple[str, ...]
    here: tuple[str, ...] = ()
    others: tuple[tuple[SwarmId, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Membership:
    """What being one of a swarm takes beside a peer's address; `swarm.directory.joining` makes it, whoever joins passes
    it on.

    Attributes:
        network: the key of a private swarm; None in a swarm that is open to everybody.
        note_peers: takes whom it meets in the swarm, once when it was joined and now and then afterwards.
        note_model: takes the fingerprint of the model that is served or used.
        nobody: what to do where no peer answers.
        proxy: URL of the HTTP proxy that its user set for Canopy; everything leaves through it.
        swarm: the open swarm that is meant; None where its peers say it.
        is_certain: whether peers that were typed cannot mean another one, since an invite names it.
        is_new: whether a swarm begins here that is none of those that this identity was of.
        sources: where each address comes from; those that do not stand here were typed.
    """

    network: NetworkKey | None = None
    note_peers: Callable[[MetSwarm], None] | None = field(default=None, compare=False, repr=False)
    note_model: Callable[[str], None] | None = field(default=None, compare=False, repr=False)
    nobody: str = ""
    proxy: str | None = field(default=None, repr=False)
    swarm: SwarmId | None = None
    is_certain: bool = False
    is_new: bool = False
    sources: Mapping[str, PeerSource] = field(default_factory=dict, compare=False)


OPEN_SWARM = Membership()
"""Of a swarm that everybody may join, and nothing is remembered."""

_EVERYWHERE = ipaddress.IPv4Address("0.0.0.0")
ANSWER_S = 2.0
"""How long a peer's TCP port may take to answer."""
MAX_TRIED = 8
"""Peers whose port is tried, at most."""
NOBODY_ANSWERS = "no peer answers at"
"""How a refusal begins where none of the peers that were named could be asked."""
LOOK_UP_S, SLOW_NAME_S = 8.0, 3.0
"""How long a peer's name may take to be looked up again where nobody answers, and from when on that is the trouble."""
MAX_LISTED = 4
"""Addresses that one line names."""
REFUSED = "refused a stranger"
"""How a line of the DHT process begins that its user wants to know of."""
SLOW = "this machine is too busy: the p2p daemon did not start"
"""With which a refusal begins that another try may change."""


@dataclass(frozen=True, slots=True)
class DhtConfig:
    """How to take part in the DHT.

    Attributes:
        join: multiaddresses of peers; empty for the first peer of a swarm.
        host: IP address to listen on; 0.0.0.0 is every address, of IPv6 too where it leads here.
        port: port to listen on; 0 is any free one.
        announce_host: IP address or name under which others reach this machine, where it differs from `host`.
        announce_port: port under which they do, where it differs from `port`, as behind a router.
        identity_path: of the key file; None for an identity in memory.
        client_mode: nothing listens here, and nothing is stored here for others; own records are filed as by any peer.
        allow_private: others that ask for it are dialled back at private addresses also where this machine has a
            public one.
        membership: of the swarm.
    """

    join: tuple[str, ...] = ()
    host: str = "0.0.0.0"
    port: int = 0
    announce_host: str | None = None
    announce_port: int | None = None
    identity_path: Path | None = None
    client_mode: bool = False
    allow_private: bool = False
    membership: Membership = OPEN_SWARM


@dataclass(frozen=True, slots=True)
class ListenAddresses:
    """Where a DHT peer listens and which peers it joins, as multiaddresses.

    Attributes:
        announce: under what others reach it; None for what it listens on.
        sources: of each peer, its rank and where its address comes from.
        proxy: URL of the HTTP proxy through which peers are reached; None: nothing is between.
    """

    join: tuple[str, ...]
    host: tuple[str, ...]
    announce: tuple[str, ...] | None
    client: bool
    allow_private: bool = False
    sources: tuple[tuple[int, str], ...] = ()
    proxy: str | None = field(default=None, repr=False)

    def listed(self) -> str:
        """The peers, each with where its address comes from."""
        texts = [text for _, text in self.sources] or [PeerSource().text] * len(self.join)
        named = [f"{one} ({text})" for one, text in zip(self.join, texts, strict=True)]
        more = [f"{len(named) - MAX_LISTED} more"] if len(named) > MAX_LISTED else []
        return ", ".join([*named[:MAX_LISTED], *more]) or "no address"


def listen_addresses(config: DhtConfig) -> ListenAddresses:
    """Turn a configuration into multiaddresses.

    Raises:
        ConfigError: an address is malformed.
    """
    for address in config.join:
        check_join_address(address)
    try:
        host = ipaddress.ip_address("127.0.0.1" if config.host == "localhost" else config.host)
    except ValueError as error:
        raise ConfigError(f"--host {config.host!r} is not an IP address; 0.0.0.0 listens everywhere") from error
    port, announce = config.port, None
    if config.announce_host is not None:
        port = port or free_port(host.version)
        announce = (f"{_host_part(config.announce_host)}/tcp/{config.announce_port or port}",)
    listened = [f"/ip{host.version}/{host}/tcp/{port}"]
    by_ipv6 = any(address.startswith("/ip6/") for address in config.join)
    is_reached = is_reached_by_ipv6(interface_addresses(), joins_by_ipv6=by_ipv6)
    if host == _EVERYWHERE and not config.client_mode and is_reached:
        listened.append(f"/ip6/::/tcp/{port}")  # libp2p listens to one family at a time
    found = [config.membership.sources.get(one, PeerSource()) for one in config.join]
    sources = tuple((one.rank, one.text) for one in found)
    private, proxy = config.allow_private, config.membership.proxy
    return ListenAddresses(config.join, tuple(listened), announce, config.client_mode, private, sources, proxy)


async def answers(join: Sequence[str], limit_s: float = ANSWER_S) -> bool:
    """Whether a TCP port of one of these peers answers: then it is no peer that is missing, but time."""

    async def ask(address: str) -> bool:
        _, _, host, transport, port, *_ = address.split("/")
        if transport != "tcp":
            return False
        try:
            async with asyncio.timeout(limit_s):
                _, writer = await asyncio.open_connection(host, int(port))
        except (OSError, TimeoutError, UnicodeError):
            return False
        writer.close()
        return True

    return any(await asyncio.gather(*map(ask, join[:MAX_TRIED])))


async def names_at_fault(join: Sequence[str], limit_s: float = LOOK_UP_S) -> str:
    """A clause about host names of peers that cannot be looked up, or only slowly; empty where that is no trouble."""

    async def look_up(name: str) -> str:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            async with asyncio.timeout(limit_s):
                await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except TimeoutError:
            return f"; the name server did not say where {name} is within {limit_s:.0f} s"
        except (OSError, UnicodeError) as error:
            return f"; the name {name} cannot be looked up: {getattr(error, 'strerror', None) or error}"
        took_s = loop.time() - asked_at
        return f"; looking up {name} took {took_s:.0f} s, for the name server is slow" if took_s >= SLOW_NAME_S else ""

    names = dict.fromkeys(one.split("/")[2] for one in join if one.startswith("/dns"))
    return "".join(await asyncio.gather(*map(look_up, [*names][:MAX_LISTED])))


def family_of(address: str) -> int | None:
    """The IP version of a multiaddress; None of a name that may have addresses of both."""
    return {"ip4": 4, "dns4": 4, "ip6": 6, "dns6": 6}.get(address.split("/")[1])


def lacking_family(join: Sequence[str], own: Sequence[IpAddress] | None = None) -> str:
    """A clause that says that this machine has no address of the only family by which peers are reached; else empty.

    Args:
        join: multiaddresses of the peers.
        own: this machine's addresses (default: those of its interfaces).
    """
    families = {family_of(one) for one in join if not one.startswith(("/ip4/127.", "/ip6/::1/"))}
    here = {ip.version for ip in (interface_addresses() if own is None else own)}
    if len(families) != 1 or None in families or not here or families & here:
        return ""
    (there,) = families
    return f"; this machine has no IPv{there} address, and they have no other: ask for one by IPv{10 - (there or 4)}"


def host_and_port(multiaddress: str) -> str:
    """`/ip4/192.0.2.1/tcp/80` as `192.0.2.1:80`."""
    _, _, host, _, port, *_ = multiaddress.split("/")
    return f"{bracketed(host)}:{port}"


def chooses_port(config: DhtConfig) -> bool:
    """Whether `listen_addresses` chooses a port: one that is announced must be known before anything listens."""
    return config.announce_host is not None and config.port == 0


def check_port_free(config: DhtConfig) -> None:
    """Refuse a port on which another program listens: libp2p would share it, and peers would reach either of the two.

    Raises:
        ConfigError: the port is taken.
    """
    if config.port == 0:
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error}; choose another") from error


def check_own_address(host: str) -> None:
    """Refuse an address that this machine does not have.

    Raises:
        ConfigError: it cannot be bound here.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            raise ConfigError(f"--host {host}: this machine has no such address") from None


def check_join_address(address: str, named: str = "--join") -> None:
    """Refuse what is no libp2p address with a peer id.

    Raises:
        ConfigError: the address is malformed.
    """
    match = _JOIN.fullmatch(address)
    if match is None or not is_peer_id(match["peer"]) or not 0 < int(match["tcp"] or match["udp"]) < 65_536:
        raise ConfigError(
            f"{named} {address[:120]!r} is no peer address; it looks like /ip4/203.0.113.5/tcp/31337/p2p/Qm…, "
            "or /dns/example.org/tcp/443/tls/p2p/Qm…, as `swarm bootstrap` and `node serve` print it"
        )


_JOIN = re.compile(
    r"/(ip4/[0-9.]+|ip6/[0-9A-Fa-f:.]+|dns[46]?/[A-Za-z0-9._-]+)"
    r"/(tcp/(?P<tcp>[0-9]{1,5})(/tls)?|udp/(?P<udp>[0-9]{1,5})(/quic(-v1)?)?)/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]+)"
)


def _host_part(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError as error:
        if re.fullmatch(r"[A-Za-z0-9._-]{1,253}", host):
            return f"/dns/{host}"
        raise ConfigError(f"--announce-address {host!r} is neither an IP address nor a host name") from error
    return f"/ip{address.version}/{address}"


def free_port(version: int) -> int:
    """A TCP port of this machine on which nothing listens now, for IP version 4 or 6."""
    with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
