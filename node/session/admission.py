"""Whom a node lets in: what one address may hold, open and ask for, by one quota (docs/decisions/0035).

Knows addresses and no sessions. `node.session.table` asks it for sessions, `node.session.service` for everything else.
"""

from __future__ import annotations

import enum
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from swarm.base.errors import RemoteProtocolError, SwarmError
from swarm.base.ids import PeerId, SessionId
from swarm.base.logs import CountedLog, describe
from swarm.base.quota import (
    MAX_KEYS,
    NEAR_WEIGHT,
    NOBODY_PREFERRED,
    UNKNOWN,
    HoldingLimit,
    OverQuota,
    Preferred,
    Quota,
    QuotaLimits,
    RateLimit,
    StrikeRule,
    is_private,
    site_key,
)
from swarm.link.link import introduction_in
from swarm.protocol.authority import is_signed, proven_owner, session_of
from swarm.protocol.limits import SESSION_KEY_BYTES
from swarm.protocol.messages import Attach
from swarm.protocol.peer_keys import peer_id_of, verify

logger = logging.getLogger(__name__)

# Who opens a call to this node: a hop by its identity, or a client by its session's key (PROTOCOL R15).

CLOCKS_DIFFER_S = 60.0
"""How far a caller's clock may be from this one."""
REMEMBERED_S = 2 * CLOCKS_DIFFER_S
"""From the earliest moment at which an introduction is believed to the last one."""
MAX_REMEMBERED = 65_536
"""Introductions of that time: 10 MB. Beyond it the oldest is forgotten."""

Caller = PeerId | SessionId
"""A machine, or the client of one session."""


class CallerCheck:
    """Believes each introduction once."""

    def __init__(self, peer: PeerId, digest: bytes, clock: Callable[[], float] = time.time) -> None:
        """Have heard nobody.

        Args:
            digest: SHA-256 of its certificate; empty in an insecure swarm.
        """
        self._peer, self._digest = peer, digest
        self._clock = clock
        self._seen: OrderedDict[bytes, float] = OrderedDict()

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None, method: str, subject: bytes) -> Caller:
        """Who makes this call: a peer id (text), or the session whose client it is (bytes).

        Args:
            method: the full name of the gRPC method.
            subject: what the call begins with.

        Raises:
            RemoteProtocolError: nobody whom this call can be believed.
        """
        made = introduction_in(metadata or ())
        now_s = self._clock()
        late_s = now_s - made.time_ms / 1e3
        if abs(late_s) > CLOCKS_DIFFER_S:
            away = f"{abs(late_s):.0f} s {'behind' if late_s > 0 else 'ahead'}"
            raise RemoteProtocolError("introduction", f"the caller's clock is {away}; set it, 60 s are allowed")
        if made.nonce in self._seen:
            raise RemoteProtocolError("introduction", "was used before")
        signed = made.signed(self._peer, self._digest, method, subject)
        caller: Caller
        if len(made.public_key) == SESSION_KEY_BYTES:
            caller, is_right = session_of(made.public_key), is_signed(made.public_key, signed, made.signature)
        else:
            caller = peer_id_of(made.public_key)
            is_right = verify(caller, made.public_key, signed, made.signature)
        if not is_right:
            raise RemoteProtocolError("introduction", "its signature is not for this call to this machine")
        self._remember(made.nonce, now_s)
        return caller

    def _remember(self, nonce: bytes, now_s: float) -> None:
        while self._seen:
            nonce_then, then_s = next(iter(self._seen.items()))
            if now_s - then_s < REMEMBERED_S and len(self._seen) < MAX_REMEMBERED:
                break
            del self._seen[nonce_then]
        self._seen[nonce] = now_s


WAITING: Final = "streams without a session"
SESSIONS: Final = "sessions"
CALLS: Final = "calls"
MANIFESTS: Final = "lists of weight files"
SHOWN: Final = "parts of what was settled"
REPORTS: Final = "reports"
OPENED: Final = "new streams"
FIRST: Final = "first streams"
INSISTED: Final = "refusals"
SIGNED: Final = "refusals with a signature"
DECODED: Final = "milliseconds of decoding"
REROUTED: Final = "new routes"
SUCCESSORS: Final = "new machines to go on with"
DIALLED: Final = "new machines for all sessions of an owner"

LIMITS: Final = QuotaLimits(
    holdings={
        WAITING: HoldingLimit(per_key=64, total=2_048),
        SESSIONS: HoldingLimit(per_key=16, total=1_024),
        REPORTS: HoldingLimit(per_key=1, total=4),
    },
    rates={
        CALLS: RateLimit(per_key=100, burst=200, total=4_000, total_burst=8_000),
        MANIFESTS: RateLimit(per_key=0.2, burst=16, total=4, total_burst=64),
        SHOWN: RateLimit(per_key=8, burst=64, total=64, total_burst=512),
        REPORTS: RateLimit(per_key=4 / 3_600, burst=4, total=32 / 3_600, total_burst=32),
        OPENED: RateLimit(per_key=20, burst=256, total=150, total_burst=1_024),
        FIRST: RateLimit(per_key=0.1, burst=8, total=1e6, total_burst=1e6),
        INSISTED: RateLimit(per_key=2, burst=64, total=1e6, total_burst=1e6),
        SIGNED: RateLimit(per_key=20, burst=64, total=200, total_burst=400),
        DECODED: RateLimit(per_key=100, burst=2_000, total=1e6, total_burst=1e6),
        REROUTED: RateLimit(per_key=10, burst=200, total=1e6, total_burst=1e6),
        SUCCESSORS: RateLimit(per_key=4 / 60, burst=8, total=1e6, total_burst=1e6),
        DIALLED: RateLimit(per_key=1, burst=64, total=100, total_burst=4_096),
    },
    strikes=StrikeRule(allowed=3, refuse_s=5.0, longest_s=300.0, forget_s=600.0),
)
MATCHED: Final = "milliseconds of matching"
GRAMMARS: Final = QuotaLimits(
    rates={MATCHED: RateLimit(per_key=250, burst=3_000, total=1_500, total_burst=6_000)},
    strikes=StrikeRule(allowed=2, refuse_s=5.0, longest_s=300.0, forget_s=600.0),
)
"""Of grammars alone: whose third one takes too much is refused any; what others take is paid for by waiting."""
CARRIED: Final = "hop "
"""What the key of a machine that carries others' sessions begins with."""
PAID_BY: Final = "for "
"""What stands in a key between such a machine and whose session it carries."""
PREFERRED: Final = "own "
"""What the key of whom the operator prefers begins with."""
CONTRIBUTED: Final = "gave "
"""What the key of a proven contributor begins with; its shares, peer id and address follow."""
PAYER_BYTES: Final = 8
PREFERRED_SHARES: Final = 8
"""A millisecond of theirs counts for an eighth, and so does what they hold."""


class AddressRefused(SwarmError):
    """This address did wrong lately."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"this address sent what is refused; try again in {seconds:.0f} s")


class OwnerClass(enum.StrEnum):
    """What kind of owner a key names, as far as anybody is told."""

    PREFERRED = "preferred"
    CONTRIBUTOR = "contributor"
    NEAR = "near"
    CARRIER = "carrier"
    STRANGER = "stranger"

    @classmethod
    def of(cls, key: str) -> OwnerClass:
        """The class of a key."""
        if key.startswith(PREFERRED):
            return cls.PREFERRED
        if key.startswith(CONTRIBUTED):
            return cls.CONTRIBUTOR
        if key.startswith(CARRIED):
            return cls.CARRIER
        return cls.NEAR if is_near(key) else cls.STRANGER


def owner_of(
    address: str,
    attach: Attach,
    caller: Caller,
    preferred: Preferred = NOBODY_PREFERRED,
    contributors: Mapping[PeerId, int] = MappingProxyType({}),
) -> str:
    """Who pays for a session: the client's address or, behind hop 0, the machine that carries it for others.

    Args:
        address: by `address_key`.
        caller: who opened the stream; a client is known by its session alone.
        preferred: whom the operator prefers.
        contributors: how many shares each has, by peer id.
    """
    key = address if attach.index == 0 else CARRIED + address
    peer = caller if isinstance(caller, str) else None
    owner = proven_owner(attach) if preferred.peers or contributors else None
    if owner in preferred.peers:
        return f"{PREFERRED}{owner}"
    if preferred.names(address, peer):
        return PREFERRED + key
    shares = contributors.get(owner, 0) if owner is not None else 0
    return f"{CONTRIBUTED}{shares} {owner} {key}" if shares else key


def who_erred(key: str) -> str:
    """The key that is charged for malformed messages of an owner: of a contributor, its address."""
    return key.split(" ", 3)[3] if OwnerClass.of(key) is OwnerClass.CONTRIBUTOR else key


def payer_of(account: str, attach: Attach) -> str:
    """The owner whose turns a session takes: who pays for it here, or at the machine that carries it for others."""
    is_carried = CARRIED in account and OwnerClass.of(account) is not OwnerClass.CONTRIBUTOR
    return f"{account} {PAID_BY}{attach.payer.hex()}" if is_carried and attach.payer else account


def weight_of(key: str) -> int:
    """How many clients an address may stand for: many, where they reach the node through one machine."""
    return 1 if OwnerClass.of(key) in (OwnerClass.STRANGER, OwnerClass.CONTRIBUTOR) else NEAR_WEIGHT


NETWORK_OWNERS: Final = 4
"""Strangers of one network count as so many of them at most, however many they are."""


@dataclass(frozen=True, slots=True)
class OwnerStanding:
    """What an owner counts for among others.

    Attributes:
        sessions: how many sessions' turns it may have in one of its own, if that many of its sessions wait: more than
            one for a machine that carries the sessions of many.
        shares: by how much its time is worth less than others': more than one for whom the operator prefers.
        network: where it comes from; None: from nowhere that others come from.
        neighbours: as how many owners its network counts at most.
    """

    sessions: int = 1
    shares: int = 1
    network: str | None = None
    neighbours: int = NETWORK_OWNERS

    @property
    def crowd(self) -> str | None:
        """Owners with whom it may be one person; None: it is taken for one."""
        return self.network if self.neighbours == NETWORK_OWNERS else None


def of_one(owner: str) -> OwnerStanding:
    """What an owner counts for of whom nothing is known."""
    return OwnerStanding()


@lru_cache(maxsize=MAX_KEYS)
def standing_of(key: str) -> OwnerStanding:
    """What an address counts for where machines compute."""
    match OwnerClass.of(key):
        case OwnerClass.CARRIER if PAID_BY in key:
            return OwnerStanding(network=key.partition(f" {PAID_BY}")[0], neighbours=NEAR_WEIGHT)
        case OwnerClass.PREFERRED:
            return OwnerStanding(weight_of(key.removeprefix(PREFERRED)), PREFERRED_SHARES)
        case OwnerClass.CONTRIBUTOR:
            _, shares, owner, _ = key.split(" ", 3)
            return OwnerStanding(shares=int(shares), network=f"owner {owner}", neighbours=int(shares))
        case OwnerClass.STRANGER:
            return OwnerStanding(network=f"network {site_key(key)}")
        case _:
            return OwnerStanding(NEAR_WEIGHT)


def is_near(key: str) -> bool:
    """Whether an address is this machine's or its private network's.

    Strangers come from there only by way of a proxy, and then all of them do.
    """
    return key == UNKNOWN or is_private(key)  # unknown: a Unix socket


class GrammarsRefused(RemoteProtocolError):
    """Grammars of this asker took too much lately."""

    def __init__(self, seconds: float) -> None:
        super().__init__("grammar", f"of who asked for some that take too much; try again in {seconds:.0f} s")


class Admission:
    """One node's quota, and its log of whom it refused.

    Attributes:
        quota: what each address holds and spent.
        preferred: whom the operator prefers.
        contributors: how many shares each contributor has, by peer id.
    """

    def __init__(
        self,
        limits: QuotaLimits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
        preferred: Preferred = NOBODY_PREFERRED,
    ) -> None:
        self.preferred = preferred
        self.contributors: Mapping[PeerId, int] = {}
        self._secret = secrets.token_bytes(PAYER_BYTES)
        self.quota = Quota(limits, clock, weight_of)
        self._grammars = Quota(GRAMMARS, clock, weight_of)
        self._log = CountedLog(logger, clock)

    def payer_tag(self, address: str) -> bytes:
        """What names a client's network to the hops behind, and its address to nobody."""
        named = (standing_of(address).network or address).encode()
        return blake2b(named, key=self._secret, digest_size=PAYER_BYTES).digest()

    def check_call(self, address: str) -> None:
        """Let a unary call in.

        Raises:
            SwarmError: too many of them come, or the address is refused.
        """
        self._check_strikes(address)
        if not self.quota.spend(CALLS, address):
            self.insisted(address)
            raise OverQuota(CALLS)

    def check_manifest(self, address: str) -> None:
        """Let this address have the list of weight files, which is large.

        Raises:
            SwarmError: it, or all together, ask for it too often.
        """
        if not self.quota.spend(MANIFESTS, address):
            self.insisted(address)
            raise OverQuota(MANIFESTS)

    def check_show(self, address: str) -> None:
        """Let this address have a part of what its session settled, a mebibyte.

        Raises:
            OverQuota: it, or all together, ask for them too often; whoever waits a second may ask again.
        """
        if not self.quota.spend(SHOWN, address):
            raise OverQuota(SHOWN)

    @contextmanager
    def report(self, address: str) -> Iterator[None]:
        """Let this address report what another machine signed, which costs a recomputation.

        Raises:
            OverQuota: it, or all together, report too much.
        """
        if not self.quota.take(REPORTS, address):
            raise OverQuota(REPORTS)
        try:
            if not self.quota.spend(REPORTS, address):
                raise OverQuota(REPORTS)
            yield
        finally:
            self.quota.give(REPORTS, address)

    @contextmanager
    def stream(self, address: str) -> Iterator[ExitStack]:
        """Let a stream in that has no session yet; what it gets, it closes once it has one.

        Who has sessions here may open a stream for each of them besides: its chains may change all at once. The first
        streams of an address count for it alone, so that a crowd that opens them all the time keeps no newcomer out.

        Raises:
            SwarmError: too many of them come or wait, or the address is refused.
        """
        self._check_strikes(address)
        if not self.quota.spend(FIRST, address) and not self.quota.spend(OPENED, address):
            self.insisted(address)
            raise OverQuota(OPENED)
        if self.quota.wait_s(DECODED, address, 0.0) > 0:
            raise OverQuota(DECODED)
        keys = (address, CARRIED + address, PREFERRED + address, PREFERRED + CARRIED + address)
        sessions = sum(self.quota.held(SESSIONS, key) for key in keys)
        if not self.quota.take(WAITING, address, allowance=sessions):
            raise OverQuota(WAITING)
        with ExitStack() as waiting:
            waiting.callback(self.quota.give, WAITING, address)
            yield waiting

    def check_reroute(self, owner: str) -> None:
        """Let a session's owner change its route: to check one, and to answer that it leads nowhere, costs signatures.

        Raises:
            OverQuota: it does so faster than chains break.
        """
        if not self.quota.spend(REROUTED, owner):
            raise OverQuota(REROUTED)

    def decoded(self, owner: str, seconds: float) -> None:
        """A large head of a session took so long to decode; what a machine carries for others is not its own."""
        owner = who_erred(owner)
        if OwnerClass.of(owner) not in (OwnerClass.CARRIER, OwnerClass.PREFERRED):
            self.quota.charge(DECODED, owner, seconds * 1e3)

    def may_sign(self, address: str) -> bool:
        """Whether a refusal of a stream of this address is worth a signature, which costs most of it."""
        return self.quota.spend(SIGNED, address)

    def insisted(self, address: str) -> None:
        """This address was refused what it asked for. Who goes on asking, faster than anybody retries, does wrong."""
        if not self.quota.spend(INSISTED, address):
            self.strike(address)

    def shut_out(self) -> frozenset[str]:
        """The addresses that are refused now for what they did."""
        return self.quota.refused_keys()

    def strike(self, address: str) -> None:
        """This address sent garbage. One of a private network is not refused for it: it may stand for everybody."""
        address = who_erred(address)
        if not is_near(address.removeprefix(PREFERRED)):
            self.quota.strike(address)

    def check_grammar(self, owner: str) -> None:
        """Let an owner's session follow a grammar.

        Raises:
            GrammarsRefused: too many of its grammars took too much.
        """
        seconds = self._grammars.refused_s(owner)
        if seconds > 0:
            raise GrammarsRefused(seconds)

    def grammar_exceeded(self, owner: str) -> None:
        """A grammar of this owner took too much here or at a tail behind; of a private network as for `strike`."""
        if not is_near(owner.removeprefix(PREFERRED).removeprefix(CARRIED)):
            self._grammars.strike(owner)

    def grammar_took(self, owner: str, seconds: float) -> None:
        """Grammars of this owner took so much of the processors."""
        self._grammars.charge(MATCHED, owner, seconds * 1e3)

    def grammar_wait_s(self, owner: str) -> float:
        """How long its next work waits, because they took so much."""
        return self._grammars.wait_s(MATCHED, owner, 0.0)

    def refused(self, address: str, error: Exception) -> None:
        """Log that something of this address was refused, once a minute for each."""
        self._log.say(address, f"refused what {address} sent: {describe(error)}")

    def _check_strikes(self, address: str) -> None:
        seconds = self.quota.refused_s(address)
        if seconds > 0:
            raise AddressRefused(seconds)
