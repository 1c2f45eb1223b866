"""Connections to a relay, from the moment that they are accepted: who pays for them, and what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.ids import PeerId
from swarm.relay.connection import RelayConnection
from swarm.relay.limits import CIRCUITS, CONNECTIONS, NEW, OPENINGS, RelayLimits, RelayPlace, RelayPlaces, weight_of


@dataclass(eq=False, slots=True)
class Visit:
    """One connection.

    Attributes:
        connection: what it says and hears.
        places: what it holds, by kind.
        task: serves it.
        is_taken: whether it is the machine's end of a circuit; whose task ends it then.
        is_confined: whether it came by the TLS port: its network may let nothing else out.
    """

    connection: RelayConnection
    places: dict[str, RelayPlace] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    is_taken: bool = False
    is_confined: bool = False

    @property
    def key(self) -> str:
        """Who pays."""
        return self.connection.key

    def end(self) -> None:
        """End it soon."""
        if self.task is not None:
            self.task.cancel()


class Visits:
    """All connections to one relay."""

    def __init__(self, limits: RelayLimits, clock: Callable[[], float]) -> None:
        """Nobody is here.

        Args:
            limits: what each address may cost.
            clock: a monotonic one, in seconds.
        """
        self._quota = limits.quota(clock)
        self._places = RelayPlaces(limits, self._quota)

    def admit(self, visit: Visit) -> bool:
        """Let somebody say what it wants; False where its address has had enough."""
        return self.spend(NEW, visit.key) and self.hold(visit, CONNECTIONS) and self.hold(visit, OPENINGS)

    def hold(self, visit: Visit, kind: str, machine: PeerId | None = None) -> bool:
        """Let a visit hold something until it leaves, or loses it to somebody who has less.

        Args:
            visit: by whom.
            kind: what.
            machine: of a circuit: whom it leads to.
        """
        place = self._places.take(kind, visit.key, visit.end, machine=machine)
        if place is not None:
            visit.places[kind] = place
        return place is not None

    def give(self, visit: Visit, kind: str) -> None:
        """Take something from a visit before it leaves."""
        self._places.give(visit.places[kind])

    def leave(self, visit: Visit) -> None:
        """Close its connection, and take back what it holds."""
        visit.connection.close()
        for place in visit.places.values():
            self._places.give(place)

    def spend(self, kind: str, key: str) -> bool:
        """Spend one of a kind that comes back with time; False where there is none."""
        return self._quota.spend(kind, key)

    def crowd(self, key: str) -> float:
        """Among how many circuits an address divides its share."""
        return self._quota.held(CIRCUITS, key) / weight_of(key)

    @property
    def circuits(self) -> int:
        """Circuits of all."""
        return self._quota.total(CIRCUITS)
