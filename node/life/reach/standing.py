"""Standing connections to relays: by them a machine that nobody can dial is called.

Two are kept, at different relays. The record names one; when it dies, the other one is named at once. Whatever carries
bytes is a connection of its own (`node.life.reach.circuits`), so a lost standing connection ends no circuit by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from node.life.reach.circuits import CONNECT_S, Circuits
from swarm.base.errors import RegistryError, RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.base.logs import CountedLog
from swarm.base.plain_text import plain_line
from swarm.base.quota import Quota, QuotaLimits, RateLimit, parse_ip
from swarm.base.tasks import TaskScope, unending
from swarm.directory.dialable import DialPolicy, is_public
from swarm.directory.identity import Identity
from swarm.directory.node_record import split_address
from swarm.directory.registry import RelayOffer
from swarm.link.egress.ports import Egress
from swarm.link.egress.streams import MAX_LINE_BYTES, Streams, connect, words
from swarm.reach.paths.local_dialler import DialRelay
from swarm.reach.relay.openings import DEAD_S, NONCE_BYTES, check_token, parse_addresses, prove_presence

logger = logging.getLogger(__name__)

# Which relays a machine stands at: near ones, not full, and not the same for all machines of a place.
#
# A sweep goes through every hop of a chain, so it pays the way to each hop's relay: the delay counts first. Machines
# that are near to each other find the same relays near; each takes its own two of them by rendezvous hashing, so that
# the loss of one relay does not take two hops of a chain together.

NEAR_FACTOR: Final = 1.5
NEAR_MS: Final = 10.0
"""A relay is near whose delay is at most 1.5 times that of the nearest one, and 10 ms more."""
FULL: Final = 0.8
"""A relay that carries more of what it may is taken only where no other one is left."""
ASK_S: Final = 3.0
"""Time for a relay to answer how much it carries."""


@dataclass(frozen=True, slots=True)
class RelayProbe:
    """A relay that answered.

    Attributes:
        address: its `host:port`.
        peer: whose it is; None where only the address is known.
        delay_ms: half of a round trip to it.
        load: part of its circuits, or of its lent rate, that is in use; 0 to 1.
    """

    address: str
    peer: PeerId | None
    delay_ms: float
    load: float


def in_order(probes: Sequence[RelayProbe], own: PeerId) -> list[RelayProbe]:
    """The relays, those first that this machine should stand at."""
    if not probes:
        return []
    nearest_ms = min(probes, key=lambda probe: (probe.load > FULL, probe.delay_ms)).delay_ms
    near_ms = nearest_ms * NEAR_FACTOR + NEAR_MS

    def place(probe: RelayProbe) -> tuple[bool, bool, float, bytes]:
        is_far, rendezvous = probe.delay_ms > near_ms, hashlib.sha256(f"{own} {probe.address}".encode()).digest()
        return probe.load > FULL, is_far, probe.delay_ms if is_far else 0.0, rendezvous

    return sorted(probes, key=place)


def parse_load(line: bytes) -> float:
    """Read `LOAD CIRCUITS LIMIT MBIT LENT-MBIT`: the larger of the two parts in use, 0 to 1.

    Raises:
        RemoteProtocolError: it is none.
    """
    match words(line):
        case ["LOAD", circuits, limit, rate, lent]:
            try:
                used, may = (float(circuits), float(rate)), (float(limit), float(lent))
            except ValueError:
                raise RemoteProtocolError("load", "not four numbers") from None
            parts = [one / most if most > 0 else 1.0 for one, most in zip(used, may, strict=True)]
            if not all(0 <= part <= 1e6 for part in parts):  # nor is what is no number
                raise RemoteProtocolError("load", "not four numbers that a relay can have")
            return min(max(parts), 1.0)
        case _:
            raise RemoteProtocolError("load", "a relay says LOAD and four numbers")


async def ask_relay(address: str, peer: PeerId | None = None, dial: DialRelay = connect) -> RelayProbe | None:
    """Ask a relay how much it carries, and measure the way; None where it gives no sound answer in time."""
    try:
        async with asyncio.timeout(ASK_S):
            ends = await dial(address)
            try:
                asked = time.perf_counter()
                ends.writer.write(b"LOAD\n")
                line = await ends.reader.readuntil(b"\n")
                delay_ms = (time.perf_counter() - asked) * 1e3 / 2
            finally:
                ends.close()
        if len(line) > MAX_LINE_BYTES:
            return None
        return RelayProbe(address, peer, delay_ms, parse_load(line))
    except (OSError, TimeoutError, RemoteProtocolError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None


WANTED: Final = 2
"""Relays at which a machine stands."""
STEADY_S: Final = 60.0
"""Who stood for so long has not failed before."""
RETRY_S: Final = (1.0, 60.0)
"""How long a relay that was lost or refused is left alone: doubled each time, up to the second number."""
LOOK_S: Final = 15.0
"""How often relays are looked for again while one is missing."""
MAX_OFFERS: Final = 16
"""Relays that are measured at a time."""
MAX_REMEMBERED: Final = 256
"""Relays whose failures are remembered."""
_ASKED: Final = "requests to dial"
_LIMITS: Final = QuotaLimits(rates={_ASKED: RateLimit(per_key=0.5, burst=20, total=2, total_burst=60)})


class RelayLost(Exception):
    """A standing connection ended, or never stood; the message says why."""


@dataclass(frozen=True, slots=True)
class PunchRequest:
    """A dialler wants a hole.

    Attributes:
        relay: `host:port`; TAKE is said there first.
        token: of the circuit.
        addresses: `host:port` from which the dialler knocks.
        seen: this machine's own address as that relay sees it.
    """

    relay: str
    token: str
    addresses: tuple[str, ...]
    seen: str


OnPunch = Callable[[PunchRequest], Awaitable[None]]
FindRelays = Callable[[], Awaitable[Sequence[RelayOffer]]]
AskRelay = Callable[[str, PeerId | None], Awaitable[RelayProbe | None]]


@dataclass(slots=True)
class _Failures:
    """What is remembered of a relay that was lost.

    Attributes:
        count: in a row.
        until: when it is tried again, by the loop's clock.
        why: the last reason.
    """

    count: int
    until: float
    why: str


@dataclass(frozen=True, slots=True)
class StandingOptions:
    """What differs between machines.

    Attributes:
        policy: which relays are dialled.
        only: the one relay to stand at, `host:port`; None: those that the directory knows.
        on_punch: makes holes; None: diallers stay with the relay.
        egress: of a machine whose network lets little out.
        members: secret of a private swarm, whose relays carry nobody else.
    """

    policy: DialPolicy
    only: str | None = None
    on_punch: OnPunch | None = None
    egress: Egress | None = None
    members: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Stand:
    """A connection that stands.

    Attributes:
        relay: `host:port`.
        seen: this machine's `host:port` as the relay sees it.
    """

    relay: str
    seen: str


class Standing:
    """Keeps the connections; `run` never ends.

    Attributes:
        changed: set when a connection stands or is lost; whoever looks clears it.
    """

    def __init__(
        self,
        identity: Identity,
        circuits: Circuits,
        find: FindRelays,
        options: StandingOptions,
        probe: AskRelay | None = None,
    ) -> None:
        self.changed = asyncio.Event()
        self._identity = identity
        self._circuits = circuits
        self._find = find
        self._options = options
        self._dial: DialRelay = connect if options.egress is None else options.egress.open_relay
        self._probe = probe or partial(ask_relay, dial=self._dial)
        self._stands: list[_Stand] = []  # the one that is announced first
        self._failures: dict[str, _Failures] = {}
        self._quota = Quota(_LIMITS, lambda: asyncio.get_running_loop().time())
        self._log = CountedLog(logger)
        self._dialling = asyncio.Lock()
        self._taken: dict[str, PeerId | None] = {}

    @property
    def relays(self) -> tuple[str, ...]:
        """`host:port` of the relays at which this machine stands; the first one is to be announced."""
        return tuple(stand.relay for stand in self._stands)

    @property
    def seen(self) -> frozenset[str]:
        """The IP addresses from which this machine comes, as its relays see it."""
        return frozenset(split_address(stand.seen)[0] for stand in self._stands)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why relays were lost that were not reached again; one line each."""
        return tuple(f"{relay}: {one.why}" for relay, one in self._failures.items() if relay not in self.relays)

    def prefer_other(self) -> None:
        """Announce another relay first: peers do not come through the one that is announced now."""
        self._stands = [*self._stands[1:], *self._stands[:1]]

    async def stands(self, limit_s: float) -> bool:
        """Wait until this machine stands at a relay; False where that takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self._stands:
                    self.changed.clear()
                    await self.changed.wait()
        return bool(self._stands)

    async def run(self) -> None:
        """Keep the connections for ever."""
        async with TaskScope() as scope:
            for number in range(WANTED):
                scope.spawn(unending(self._keep_one, f"standing connection {number + 1}", pause_s=0.0))
            await asyncio.Event().wait()

    async def _keep_one(self) -> None:
        """Stand at one relay until it is lost; where there is none, wait a little."""
        async with self._dialling:  # the two choose one after the other
            probe = await self._choose()
            if probe is not None:
                self._taken[probe.address] = probe.peer
        if probe is None:
            await asyncio.sleep(self._pause_s())
            return
        began = asyncio.get_running_loop().time()
        try:
            await self._stand(probe)
        except RelayLost as lost:
            if asyncio.get_running_loop().time() - began >= STEADY_S:
                self._failures.pop(probe.address, None)
            self._note_failure(probe.address, str(lost))
        finally:
            self._taken.pop(probe.address, None)

    def _pause_s(self) -> float:
        """Until relays are looked for again: when one that failed is due, or others may have come."""
        now = asyncio.get_running_loop().time()
        due = [one.until - now for one in self._failures.values() if one.until > now]
        longest_s = LOOK_S if self._stands else RETRY_S[0]
        return max(min([longest_s, *due]), RETRY_S[0] / 2) * random.uniform(1.0, 1.5)

    async def _choose(self) -> RelayProbe | None:
        """The best relay that is not taken and did not fail lately."""
        now = asyncio.get_running_loop().time()
        offers: Sequence[RelayOffer | str]
        if self._options.only is not None:
            offers = [self._options.only]
        else:
            try:
                offers = await self._find()
            except RegistryError as error:
                self._log.say("finding", f"cannot ask for relays: {error}")
                return None
        wanted = {}
        for offer in offers[:MAX_OFFERS]:
            address, peer = (offer, None) if isinstance(offer, str) else (offer.address, offer.peer)
            failed = self._failures.get(address)
            is_due = failed is None or failed.until <= now
            is_taken = address in self._taken or (peer is not None and peer in self._taken.values())
            is_other = not is_taken and peer != self._identity.peer_id
            if is_due and is_other and await self._may_stand(address, peer):
                wanted[address] = peer
        probes = await asyncio.gather(*(self._probe(address, peer) for address, peer in wanted.items()))
        for address, probe in zip(wanted, probes, strict=True):
            if probe is None:
                self._note_failure(address, "does not answer", is_news=not any(probes))
        # Of a relay that answers by both families, the address that it prefers: more of the others reach that one.
        found = list({probe.peer or probe.address: probe for probe in reversed(probes) if probe is not None}.values())
        return next(iter(in_order(found, self._identity.peer_id)), None)

    async def _may_stand(self, address: str, peer: PeerId | None) -> bool:
        """Whether a relay may be dialled; behind a proxy this machine may know no names."""
        policy, egress = self._options.policy, self._options.egress
        if egress is not None:
            egress.know_relay(address, peer)
            if egress.proxy is not None:
                return policy.allows(address)
        return await policy.resolve(address) is not None

    def _note_failure(self, relay: str, why: str, *, is_news: bool = True) -> None:
        """Leave a relay alone for a while; where others answer, that is nobody's trouble."""
        known = self._failures.pop(relay, None)
        count = 1 if known is None else known.count + 1
        wait_s = min(RETRY_S[0] * 2.0 ** min(count - 1, 16), RETRY_S[1]) * random.uniform(0.5, 1.5)
        while len(self._failures) >= MAX_REMEMBERED:
            self._failures.pop(next(iter(self._failures)))
        self._failures[relay] = _Failures(count, asyncio.get_running_loop().time() + wait_s, why)
        line = f"relay {plain_line(relay)}: {plain_line(why)}"
        if is_news:
            self._log.say(relay, line)
        else:
            logger.info("%s", line)

    async def _stand(self, probe: RelayProbe) -> None:
        """Stand at a relay.

        Raises:
            RelayLost: it ended, or never stood.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                ends = await self._dial(probe.address)
        except (OSError, TimeoutError) as error:
            raise RelayLost("cannot be dialled") from error
        stand = None
        try:
            async with asyncio.timeout(CONNECT_S):
                stand = _Stand(probe.address, await self._introduce(ends, probe))
            self._stands.append(stand)
            self.changed.set()
            await self._listen(ends, stand)
        except TimeoutError:
            raise RelayLost("is silent") from None
        except (OSError, RemoteProtocolError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise RelayLost(str(error) if isinstance(error, RemoteProtocolError) else "ended the connection") from error
        finally:
            ends.abort()
            if stand in self._stands:
                self._stands.remove(stand)
                self.changed.set()

    async def _introduce(self, ends: Streams, probe: RelayProbe) -> str:
        """Say HERE and prove it; this machine's address as the relay sees it."""
        reader, writer = ends.reader, ends.writer
        own = self._identity
        writer.write(f"HERE {own.peer_id}\n".encode())
        match await _line(reader):
            case ["PROVE", relay, nonce]:
                if probe.peer is not None and relay != probe.peer:
                    raise RemoteProtocolError("prove", "answers under another name than the directory has")
                key, signature = prove_presence(own, PeerId(relay), _nonce(nonce) + self._options.members)
            case said:
                raise RemoteProtocolError("prove", _refusal(said))
        writer.write(f"PROOF {key} {signature}\n".encode())
        match await _line(reader):
            case ["OK", seen]:
                (address,) = parse_addresses(seen, limit=1)
                return address
            case said:
                raise RemoteProtocolError("ok", _refusal(said))

    async def _listen(self, ends: Streams, stand: _Stand) -> None:
        """Do what a relay asks for, until it is silent or ends."""
        reader, writer = ends.reader, ends.writer
        async with TaskScope() as punches:
            while True:
                async with asyncio.timeout(DEAD_S):
                    said = await _line(reader)
                if said == ["PING"]:
                    writer.write(b"PONG\n")
                    continue
                self._answer(said, stand, punches)

    def _answer(self, said: list[str], stand: _Stand, punches: TaskScope) -> None:
        match said:
            case ["OPEN", token, *hint]:
                dialler = parse_addresses(hint[0], limit=1)[0] if len(hint) == 1 else ""
                self._circuits.take(stand.relay, stand.relay, check_token(token), dialler)
            case ["CALL", token, address]:
                (called,) = parse_addresses(address, limit=1)
                if self._may_dial(called, stand):
                    self._circuits.take(stand.relay, called, check_token(token), called)
            case ["PUNCH", token, listed]:
                request = PunchRequest(stand.relay, check_token(token), parse_addresses(listed), stand.seen)
                if self._options.on_punch is not None and self._quota.spend(_ASKED, stand.relay):
                    punches.spawn(self._punch(self._options.on_punch, request))
            case _:
                raise RemoteProtocolError("relay", "says what no relay says")

    def _may_dial(self, address: str, stand: _Stand) -> bool:
        """Whether to dial an address that a stranger named: where this machine's own is public, only public ones."""
        seen, relay = parse_ip(stand.seen), parse_ip(stand.relay)
        # A relay on the Internet that claims to see a private address is not believed.
        is_public_here = seen is None or is_public(seen) or (relay is not None and is_public(relay))
        policy = DialPolicy(only_public=is_public_here)
        if not policy.allows(address):
            self._log.say("calls", "was asked to call a private address, and does not")
            return False
        return self._quota.spend(_ASKED, stand.relay)

    async def _punch(self, on_punch: OnPunch, request: PunchRequest) -> None:
        try:
            await on_punch(request)
        except (OSError, TimeoutError, RemoteProtocolError) as error:
            logger.debug("no hole", exc_info=error)


async def _line(reader: asyncio.StreamReader) -> list[str]:
    """The words of one line that a relay said.

    Raises:
        RemoteProtocolError: it is malformed or too long.
        asyncio.IncompleteReadError: the connection ended.
    """
    line = await reader.readuntil(b"\n")
    if len(line) > MAX_LINE_BYTES:
        raise RemoteProtocolError("relay", f"says a line of more than {MAX_LINE_BYTES} bytes")
    return words(line)


def _nonce(word: str) -> bytes:
    try:
        nonce = bytes.fromhex(word)
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise RemoteProtocolError("prove", f"a nonce has {NONCE_BYTES} bytes")
    return nonce


def _refusal(said: list[str]) -> str:
    return "refuses: " + " ".join(said[1:])[:200] if said[:1] == ["NO"] else "does not answer as a relay does"
