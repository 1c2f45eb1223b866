"""What each peer may hold, spend and do wrong: one object for every bound per peer. Pure; the clock is a parameter.

A key stands for whoever pays: mostly an address (`address_key`), else a peer id or a session key. What a key holds
is given back; what it spends comes back with time; what it does wrong is forgotten after a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import unquote

from swarm.base.errors import SwarmError

MAX_KEYS = 4_096
"""Keys that are remembered; about 1 KB each."""
IPV6_LINK = 64
"""Bits of an IPv6 address that name a link: whoever has one address of a /64 has all of it."""
IPV6_HOME = 56
"""The same of a home, which a provider gives 256 links: it pays like one IPv4 address, however many of them it uses."""
IPV6_SITE = 48
"""The same of a site, which is 256 homes, as an IPv4 /24 is 256 addresses."""
IPV4_SITE = 24
NEAR_WEIGHT = 16
"""How many clients a private address may stand for: strangers come from there only by way of a proxy, all of them."""
STAND_INS = IPv4Network("127.64.0.0/10")
"""Loopback addresses that stand for strangers who come by way of a relay (`stand_in`)."""
UNKNOWN = "unknown"
"""The key of whatever has no IP address, such as a Unix socket: all of it together."""


class OverQuota(SwarmError):
    """One key holds as much as it may, or all keys together do."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"too many {kind} at once")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class HoldingLimit:
    """How much may be held at a time, in units of the thing held.

    Attributes:
        per_key: by one key.
        total: by all keys together.
    """

    per_key: int
    total: int


@dataclass(frozen=True, slots=True)
class RateLimit:
    """How much may be spent: a token bucket per key, and one for all keys.

    Attributes:
        per_key: units that come back per second to one key.
        burst: units that one key may spend at once.
        total: units that come back per second to all keys together.
        total_burst: units that all keys together may spend at once.
    """

    per_key: float
    burst: float
    total: float
    total_burst: float


@dataclass(frozen=True, slots=True)
class StrikeRule:
    """When a key that does wrong is refused, and for how long.

    Attributes:
        allowed: wrongs that are borne; the next one refuses the key. A key of more weight has so many times as many.
        refuse_s: the first refusal; each further one is twice as long as the one before.
        longest_s: no refusal is longer.
        forget_s: without a wrong for so long, the key starts afresh.
    """

    allowed: int = 3
    refuse_s: float = 5.0
    longest_s: float = 300.0
    forget_s: float = 600.0


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Every bound of one service.

    Attributes:
        holdings: limit per kind of thing that is held.
        rates: limit per kind of thing that is spent.
        strikes: what follows a wrong.
        max_keys: keys remembered. Who holds something is never forgotten; of the others the least recent goes.
    """

    holdings: Mapping[str, HoldingLimit] = field(default_factory=dict)
    rates: Mapping[str, RateLimit] = field(default_factory=dict)
    strikes: StrikeRule = field(default_factory=StrikeRule)
    max_keys: int = MAX_KEYS


@dataclass(slots=True)
class _Bucket:
    left: float
    seen_at: float

    def refill(self, rate: float, burst: float, now: float) -> None:
        self.left = min(burst, self.left + rate * max(now - self.seen_at, 0.0))
        self.seen_at = now


@dataclass(slots=True)
class _Account:
    held: dict[str, int] = field(default_factory=dict)
    buckets: dict[str, _Bucket] = field(default_factory=dict)
    strikes: int = 0
    refusals: int = 0
    struck_at: float = 0.0
    refused_until: float = 0.0


class Quota:
    """All bounds of one service. Every kind must stand in the limits it was made with."""

    def __init__(
        self, limits: QuotaLimits, clock: Callable[[], float], weight: Callable[[str], int] = lambda key: 1
    ) -> None:
        """Start with nothing held, nothing spent.

        Args:
            clock: seconds that never go back, such as `time.monotonic`.
            weight: by how much the limits of a key are multiplied, such as for a machine that carries many clients.
        """
        self._holdings = dict(limits.holdings)
        self._rates = dict(limits.rates)
        self._rule = limits.strikes
        self._max_keys = limits.max_keys
        self._weight = weight
        self._clock = clock
        self._holders: dict[str, _Account] = {}
        self._idle: OrderedDict[str, _Account] = OrderedDict()
        self._totals = dict.fromkeys(self._holdings, 0)
        self._total_buckets = {kind: _Bucket(rate.total_burst, clock()) for kind, rate in self._rates.items()}

    def __len__(self) -> int:
        return len(self._holders) + len(self._idle)

    def take(self, kind: str, key: str, amount: int = 1, *, allowance: int = 0) -> bool:
        """Hold more of something; False, and nothing is taken, where that is more than the limits allow.

        Args:
            amount: how much more.
            allowance: what this key may hold beyond its limit, for a reason of its own.
        """
        if self.held(kind, key) + amount > self.limit(kind, key) + allowance:
            return False
        if self._totals[kind] + amount > self._holdings[kind].total:
            return False
        account = self._account(key)
        if account is None:
            return False
        account.held[kind] = account.held.get(kind, 0) + amount
        self._totals[kind] += amount
        self._idle.pop(key, None)
        self._holders[key] = account
        return True

    def has_room(self, kind: str, key: str, amount: int = 1) -> bool:
        """Whether this key may hold so much more, whatever all keys together hold."""
        return self.held(kind, key) + amount <= self._holdings[kind].per_key * self._weight(key)

    def give(self, kind: str, key: str, amount: int = 1) -> None:
        """Give back what was taken."""
        account = self._holders[key]
        left = account.held[kind] - amount
        assert left >= 0, f"more {kind} given back than taken"
        self._totals[kind] -= amount
        if left:
            account.held[kind] = left
            return
        del account.held[kind]
        if not account.held:
            del self._holders[key]
            self._idle[key] = account
            self._forget_surplus()

    @contextmanager
    def hold(self, kind: str, key: str, amount: int = 1) -> Iterator[None]:
        """Hold something for a block.

        Raises:
            OverQuota: the limits do not allow it.
        """
        if not self.take(kind, key, amount):
            raise OverQuota(kind)
        try:
            yield
        finally:
            self.give(kind, key, amount)

    def held(self, kind: str, key: str) -> int:
        account = self._holders.get(key)
        return 0 if account is None else account.held.get(kind, 0)

    def limit(self, kind: str, key: str) -> int:
        return self._holdings[kind].per_key * self._weight(key)

    def total(self, kind: str) -> int:
        return self._totals[kind]

    def holders(self, kind: str) -> dict[str, float]:
        """Who holds something of `kind`: how much, divided by the key's weight."""
        accounts = ((key, account.held.get(kind, 0)) for key, account in self._holders.items())
        return {key: held / self._weight(key) for key, held in accounts if held}

    def spend(self, kind: str, key: str, amount: float = 1.0) -> bool:
        """Spend `amount` of `kind`; False, and nothing is spent, where that is more than has come back."""
        bucket, total = self._buckets(kind, key)
        if bucket is None or min(bucket.left, total.left) < amount:
            return False
        bucket.left -= amount
        total.left -= amount
        return True

    def charge(self, kind: str, key: str, amount: float) -> None:
        """Spend what was used already, such as time: the key may owe up to one burst, and then waits longer."""
        bucket, total = self._buckets(kind, key)
        rate = self._rates[kind]
        total.left = max(total.left - amount, -rate.total_burst)
        if bucket is not None:
            bucket.left = max(bucket.left - amount, -rate.burst * self._weight(key))

    def wait_s(self, kind: str, key: str, amount: float = 1.0) -> float:
        """Seconds until `amount` could be spent, if nothing else is; infinite beyond a burst."""
        bucket, total = self._buckets(kind, key)
        rate, weight = self._rates[kind], self._weight(key)
        if bucket is None or amount > min(rate.burst * weight, rate.total_burst):
            return float("inf")
        waits = (amount - bucket.left) / (rate.per_key * weight), (amount - total.left) / rate.total
        return max(0.0, *waits)

    def strike(self, key: str) -> bool:
        """The key did wrong; whether it is refused now."""
        account, now, rule = self._account(key), self._clock(), self._rule
        if account is None:
            return True
        if now - account.struck_at > rule.forget_s and now >= account.refused_until:
            account.strikes = account.refusals = 0
        account.struck_at = now
        account.strikes += 1
        if account.strikes >= (rule.allowed + 1) * self._weight(key):
            seconds = min(rule.refuse_s * 2.0 ** min(account.refusals, 64), rule.longest_s)
            account.refused_until = max(account.refused_until, now + seconds)
            account.refusals += 1
            account.strikes = 0
        return now < account.refused_until

    def refused_s(self, key: str) -> float:
        """For how many more seconds this key is refused; 0 if it is not."""
        account = self._holders.get(key) or self._idle.get(key)
        return 0.0 if account is None else max(account.refused_until - self._clock(), 0.0)

    def refused_keys(self) -> frozenset[str]:
        now = self._clock()
        accounts = (*self._holders.items(), *self._idle.items())
        return frozenset(key for key, account in accounts if account.refused_until > now)

    def _buckets(self, kind: str, key: str) -> tuple[_Bucket | None, _Bucket]:
        """The key's bucket, if the key can be remembered, and that of all, both as of now."""
        rate, now, weight = self._rates[kind], self._clock(), self._weight(key)
        total = self._total_buckets[kind]
        total.refill(rate.total, rate.total_burst, now)
        account = self._account(key)
        if account is None:
            return None, total
        bucket = account.buckets.get(kind)
        if bucket is None:
            bucket = account.buckets[kind] = _Bucket(rate.burst * weight, now)
        bucket.refill(rate.per_key * weight, rate.burst * weight, now)
        return bucket, total

    def _account(self, key: str) -> _Account | None:
        """The key's state; None for a new key while all places are taken by keys that hold something."""
        account = self._holders.get(key)
        if account is not None:
            return account
        account = self._idle.get(key)
        if account is None:
            if len(self._holders) >= self._max_keys:
                return None
            account = self._idle[key] = _Account()
        self._idle.move_to_end(key)
        self._forget_surplus()
        return account

    def _forget_surplus(self) -> None:
        while len(self) > self._max_keys and self._idle:
            self._idle.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Preferred:
    """Whom an operator prefers.

    Attributes:
        networks: addresses of clients and machines.
        peers: machines, by their ids.
    """

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    peers: frozenset[str] = frozenset()

    def names(self, key: str, peer: str | None) -> bool:
        """Whether it is one of them.

        Args:
            key: its `address_key`.
            peer: its id; None where it has none.
        """
        if peer in self.peers:
            return True
        try:
            own = ip_network(key)
        except ValueError:
            return False
        return any(one.version == own.version and own.network_address in one for one in self.networks)


NOBODY_PREFERRED: Final = Preferred()


def address_key(peer: str) -> str:
    """Who pays for what comes from this address: an IPv4 address whole, of an IPv6 address its /56, which is a home.

    An IPv4 address inside an IPv6 one (mapped, or 6to4) counts as that IPv4 address.

    Args:
        peer: as gRPC names a connection: "ipv4:192.0.2.1:5", "ipv6:[2001:db8::1]:5" (brackets may be escaped),
            "unix:…"; or a bare IP address.
    """
    found = parse_ip(peer)
    if found is None:
        return UNKNOWN
    if isinstance(found, IPv4Address):
        return str(found)
    return str(IPv6Network((int(found), IPV6_HOME), strict=False))


def site_key(peer: str) -> str:
    """With whom an address shares what is scarce: of IPv4 the /24, of IPv6 the /48.

    Args:
        peer: as for `address_key`.
    """
    found = parse_ip(peer)
    if found is None:
        return UNKNOWN
    return str(ip_network((found, IPV4_SITE if isinstance(found, IPv4Address) else IPV6_SITE), strict=False))


def link_of(peer: str) -> str:
    """An address as others may know it: an IPv4 address whole, an IPv6 one up to its /64; `UNKNOWN` where it is none.

    Args:
        peer: as for `address_key`.
    """
    found = parse_ip(peer)
    if found is None:
        return UNKNOWN
    bits = IPV6_LINK if isinstance(found, IPv6Address) else found.max_prefixlen
    return str(ip_network((found, bits), strict=False).network_address)


def stand_in(way: str, peer: str) -> str:
    """The loopback address that stands for somebody who comes by way of a relay.

    A relay may lie about who comes, so its name is in it: what it makes up costs nobody who comes another way.

    Args:
        way: the relay's name, or another one's who says who comes.
        peer: who comes, as for `address_key`.
    """
    digest = sha256(f"{way} {address_key(peer)}".encode()).digest()
    return str(STAND_INS[1 + int.from_bytes(digest[:8], "big") % (STAND_INS.num_addresses - 2)])


def is_stand_in(address: str) -> bool:
    """Whether an IP address stands for a stranger, and is no address of anybody."""
    found = parse_ip(address)
    return isinstance(found, IPv4Address) and found in STAND_INS


def is_private(key: str) -> bool:
    """Whether the address that a key names is this machine's or its private network's; `UNKNOWN` names none.

    What stands for a stranger is not: it stands for one, as a public address does.
    """
    try:
        address = ip_network(key).network_address
    except ValueError:
        return False
    return not address.is_global and address not in STAND_INS


def parse_ip(peer: str) -> IPv4Address | IPv6Address | None:
    """The IP address in gRPC's name of a connection, as for `address_key`; None if it has none."""
    text = unquote(peer).removeprefix("ipv4:").removeprefix("ipv6:")
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, IPv6Address):
        return found.ipv4_mapped or found.sixtofour or found
    return found
