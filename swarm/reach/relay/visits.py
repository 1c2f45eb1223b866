"""Connections to a relay: who pays for them, what they hold, what each may cost, and who goes where it is full."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from swarm.base.ids import PeerId
from swarm.base.quota import NEAR_WEIGHT, HoldingLimit, Quota, QuotaLimits, RateLimit, is_private
from swarm.reach.relay.connection import RelayConnection

CONNECTIONS: Final = "connections"
OPENINGS: Final = "openings"
NAMES: Final = "names"
CIRCUITS: Final = "circuits"
SEEN: Final = "questions for an address"
NEW: Final = "new connections"
SUMMONS: Final = "summons"
OWN_SUMMONS: Final = "summons by one dialler"
PROOFS: Final = "questions whose relay this is"
BEYOND: Final = "links to nodes that stand elsewhere"


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Every bound of a relay. An address is an IPv4 address or an IPv6 /56; private ones have 16 times as much.

    Attributes:
        connections: of an address, and in all.
        openings: connections that have not said yet what they want.
        names: machines that are reached through this relay.
        circuits: of a dialler's address, and in all; each may hold 128 KiB of memory.
        machine_circuits: to one machine.
        seen: connections kept open because they asked for their address.
        new: connections per second.
        summons: what one machine is told to open or to call, per second: its key is the machine.
        own_summons: what one address has one machine told, per second: a fifth of what the machine bears, so that
            nobody alone uses that up, whatever its address may stand for.
        proofs: answers to WHO per second: each is a signature.
        beyond: links per second to nodes that do not stand here, for who comes by the TLS port: each may take a look-up
            in the directory and a call.
        idle_s: a circuit that carries nothing for so long is closed.
    """

    connections: HoldingLimit = field(default_factory=lambda: HoldingLimit(96, 1_024))
    openings: HoldingLimit = field(default_factory=lambda: HoldingLimit(16, 128))
    names: HoldingLimit = field(default_factory=lambda: HoldingLimit(8, 256))
    circuits: HoldingLimit = field(default_factory=lambda: HoldingLimit(32, 128))
    machine_circuits: int = 48
    seen: HoldingLimit = field(default_factory=lambda: HoldingLimit(8, 64))
    new: RateLimit = field(default_factory=lambda: RateLimit(4.0, 64.0, 200.0, 800.0))
    summons: RateLimit = field(default_factory=lambda: RateLimit(20.0, 100.0, 200.0, 800.0))
    own_summons: RateLimit = field(default_factory=lambda: RateLimit(4.0, 20.0, 400.0, 1_600.0))
    proofs: RateLimit = field(default_factory=lambda: RateLimit(0.2, 6.0, 4.0, 40.0))
    beyond: RateLimit = field(default_factory=lambda: RateLimit(1.0, 20.0, 10.0, 80.0))
    idle_s: float = 60.0

    def quota(self, clock: Callable[[], float]) -> Quota:
        """The same as one object that counts."""
        holdings = {
            CONNECTIONS: self.connections,
            OPENINGS: self.openings,
            NAMES: self.names,
            CIRCUITS: self.circuits,
            SEEN: self.seen,
        }
        rates = {
            NEW: self.new,
            SUMMONS: self.summons,
            OWN_SUMMONS: self.own_summons,
            PROOFS: self.proofs,
            BEYOND: self.beyond,
        }
        return Quota(QuotaLimits(holdings, rates), clock, weight_of)


@dataclass(eq=False, slots=True)
class Visit:
    """One connection.

    Attributes:
        connection: what it says and hears.
        is_taken: whether it is the machine's end of a circuit; whose task ends it then.
        is_confined: whether it came by the TLS port: its network may let nothing else out.
    """

    connection: RelayConnection
    places: dict[str, _RelayPlace] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    is_taken: bool = False
    is_confined: bool = False

    @property
    def key(self) -> str:
        """Who pays."""
        return self.connection.key

    def end(self) -> None:
        if self.task is not None:
            self.task.cancel()


@dataclass(eq=False, slots=True)
class _RelayPlace:
    """What a visit holds.

    Attributes:
        kind: one of the kinds above.
        machine: of a circuit: whom it leads to.
        is_held: until it was given back.
    """

    kind: str
    visit: Visit
    machine: PeerId | None = None
    is_held: bool = True


class Visits:
    """All connections to one relay, and what they hold.

    Where a kind is used up, its heaviest holder gives way to whoever holds less: so a stranger with many connections
    shuts nobody out. Of an address's openings the oldest goes, which is the slowest; of all else the newest, so that
    what works goes on.
    """

    def __init__(self, limits: RelayLimits, clock: Callable[[], float]) -> None:
        self._quota = limits.quota(clock)
        self._machine_circuits = limits.machine_circuits
        self._taken: dict[str, dict[_RelayPlace, None]] = {}  # in the order in which they were taken

    def admit(self, visit: Visit) -> bool:
        """Let somebody say what it wants; False where its address has had enough."""
        return self.spend(NEW, visit.key) and self.hold(visit, CONNECTIONS) and self.hold(visit, OPENINGS)

    def hold(self, visit: Visit, kind: str, machine: PeerId | None = None) -> bool:
        """Let a visit hold something until it leaves, or loses it to somebody who has less.

        Args:
            machine: of a circuit: whom it leads to.

        Returns:
            False where its address has as much as it may, or nobody has to give way.
        """
        taken, key = self._taken.setdefault(kind, {}), visit.key
        if machine is not None:
            to_machine = [place for place in taken if place.machine == machine]
            if len(to_machine) >= self._machine_circuits and not self._make_room(to_machine, key):
                return False
        if not self._quota.take(kind, key):
            is_own_limit = self._quota.held(kind, key) >= self._quota.limit(kind, key)
            if is_own_limit or not self._make_room(taken, key) or not self._quota.take(kind, key):
                return False
        place = visit.places[kind] = _RelayPlace(kind, visit, machine)
        taken[place] = None
        return True

    def give(self, visit: Visit, kind: str) -> None:
        """Take something from a visit before it leaves."""
        self._give(visit.places[kind])

    def leave(self, visit: Visit) -> None:
        """Close its connection, and take back what it holds."""
        visit.connection.close()
        for place in visit.places.values():
            self._give(place)

    def spend(self, kind: str, key: str) -> bool:
        """Spend one of a kind that comes back with time; False where there is none."""
        return self._quota.spend(kind, key)

    def crowd(self, key: str) -> float:
        """Among how many circuits an address divides its share."""
        return self._quota.held(CIRCUITS, key) / weight_of(key)

    @property
    def circuits(self) -> int:
        return self._quota.total(CIRCUITS)

    def _give(self, place: _RelayPlace) -> None:
        """Give back what was taken; once more does nothing."""
        if place.is_held:
            place.is_held = False
            del self._taken[place.kind][place]
            self._quota.give(place.kind, place.visit.key)

    def _make_room(self, among: Iterable[_RelayPlace], newcomer: str) -> bool:
        """End a place of who holds most by its weight, if that is more than what the newcomer would hold."""
        listed = list(among)
        held = Counter(place.visit.key for place in listed)
        if not held:
            return False
        heaviest = max(held, key=lambda key: (held[key] / weight_of(key), key))
        if held[heaviest] / weight_of(heaviest) <= (held[newcomer] + 1) / weight_of(newcomer):
            return False
        own = [place for place in listed if place.visit.key == heaviest]
        victim = own[0] if own[0].kind == OPENINGS else own[-1]
        self._give(victim)
        victim.visit.end()
        return True


def weight_of(key: str) -> int:
    """How many clients an address may stand for."""
    return NEAR_WEIGHT if is_private(key) else 1
