"""At which addresses a machine knocks that another one names: it looks into nobody's network. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Final

from swarm.discovery.dialable import IpAddress, is_dialable, is_public
from swarm.discovery.node_record import split_address
from swarm.discovery.sealing import RecordError
from swarm.relay.openings import MAX_ADDRESSES
from swarm.runtime.quota import IPV6_LINK
from swarm.ways.own_addresses import OwnAddresses

MIN_PORT: Final = 1024
"""No router and no system gives a lower port to whoever connects; services of others listen there."""


@dataclass(frozen=True, slots=True)
class Vantage:
    """Where a machine is, as far as another one may be told to knock there.

    Attributes:
        seen: `host:port`, this machine's end as the relay sees it.
        relay_host: IP address of the relay.
        own: this machine's addresses.
    """

    seen: str
    relay_host: str
    own: OwnAddresses

    @property
    def only_public(self) -> bool:
        """Whether it calls none but public addresses.

        A relay on the Internet that claims to see a private address is not believed.
        """
        return is_public(_ip(self.seen)) or is_public(ip_address(self.relay_host))

    def shares_home(self, their_seen: str) -> bool:
        """Whether another machine comes from the same public address, or from one link of IPv6."""
        mine, theirs = _ip(self.seen), _ip(their_seen)
        if mine.version == 6:
            return theirs in ip_network((int(mine), IPV6_LINK), strict=False)
        return mine == theirs


@dataclass(frozen=True, slots=True)
class Targets:
    """Where to knock.

    Attributes:
        lan: `host:port` in this machine's own network: tried first.
        far: `host:port` elsewhere.
    """

    lan: tuple[str, ...] = ()
    far: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lan or self.far)


def allowed_targets(named: Sequence[str], place: Vantage, *, same_home: bool) -> Targets:
    """The addresses among those named at which this machine may knock.

    Args:
        named: `host:port` with IP addresses, as another machine says them.
        place: where this machine is.
        same_home: whether the relay sees both machines at one public address.
    """
    lan: list[str] = []
    far: list[str] = []
    for address in list(dict.fromkeys(named))[:MAX_ADDRESSES]:
        try:
            ip, port = _ip(address), split_address(address)[1]
        except (RecordError, ValueError):
            continue
        if port < MIN_PORT or address == place.seen or ip.is_link_local:
            continue
        if same_home and place.own.is_in_lan(ip):
            lan.append(address)
        elif is_dialable(ip, own_is_public=place.only_public):
            far.append(address)
    return Targets(tuple(lan), tuple(far))


def _ip(address: str) -> IpAddress:
    """The IP address in `host:port`.

    Raises:
        RecordError, ValueError: it has none.
    """
    return ip_address(split_address(address)[0].strip("[]"))
