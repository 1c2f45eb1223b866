"""Who computes next: owners by fair queueing, and the sessions of each by deficit round-robin, both on milliseconds.

An owner is whoever sent the sessions, such as an address: many sessions of one owner get together what one session of
another gets. What an owner used is its *virtual time*. The one comes next whose virtual time would be the least after a
turn as long as its last one, so who sends a sweep and waits for its answer does not wait for all who never stop.
Nobody saves time while it is idle: whoever comes back begins where those are that have always had work.

Computes nothing itself.

Source: A. Demers, S. Keshav, S. Shenker, Analysis and Simulation of a Fair Queueing Algorithm, 1989.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

MAX_IDLE_OWNERS = 4_096
"""Owners without work whose virtual time is remembered."""


class Owned(Hashable, Protocol):
    """A session as its turns see it."""

    @property
    def owner(self) -> str:
        """Whose it is."""


OwnedT = TypeVar("OwnedT", bound=Owned)


@dataclass(slots=True)
class _OwnerTime:
    """What an owner used, in milliseconds.

    Attributes:
        virtual_ms: in all, divided by how many sessions' turns it may have in one.
        last_ms: in its last turn, likewise; 0 before the first.
    """

    virtual_ms: float
    last_ms: float = 0.0


class Turns(Generic[OwnedT]):
    """Sessions that wait to compute.

    A balance is what a session may still use of its turn, in milliseconds. It saves nothing while it is idle and keeps
    what it owes: a quantum at most for what it used of others' turns.
    """

    def __init__(self, quantum_ms: float, weight: Callable[[str], int] = lambda owner: 1) -> None:
        """Wait for the first session.

        Args:
            quantum_ms: what a turn adds to a balance.
            weight: how many sessions' turns an owner may have in one of its own, if that many of its sessions wait:
                more than one for a machine that carries the sessions of many.
        """
        self._quantum_ms = quantum_ms
        self._weight = weight
        self._order: deque[str] = deque()
        self._queues: dict[str, deque[OwnedT]] = {}
        self._waiting: set[OwnedT] = set()
        self._balances_ms: WeakKeyDictionary[OwnedT, float] = WeakKeyDictionary()
        self._owners: dict[str, _OwnerTime] = {}
        self._least_ms = 0.0
        self._serving: str | None = None
        self._share_served = 1
        self._left_ms = self._used_ms = 0.0

    def __bool__(self) -> bool:
        """Whether a session waits, apart from the one whose turn it is."""
        return bool(self._order)

    def submit(self, session: OwnedT) -> None:
        """Queue a session; harmless when it is queued already, or has its turn."""
        if session not in self._waiting:
            self._waiting.add(session)
            self._queue(session, is_next=False)

    def begin(self) -> OwnedT:
        """Take the session whose turn it is."""
        owner = self._serving
        if owner not in self._queues or self._left_ms <= 0:
            owner = self._next_owner()
            self._serving, self._share_served = owner, self._share(owner)
            self._left_ms, self._used_ms = self._quantum_ms * self._share_served, 0.0
        session = self._queues[owner].popleft()
        self._drop_empty(owner)
        balance_ms = self._balances_ms.get(session, 0.0)
        self._balances_ms[session] = balance_ms if balance_ms > 0 else balance_ms + self._quantum_ms
        return session

    def left_ms(self, session: OwnedT) -> float:
        """What the session whose turn it is may still use; not above 0 at the end of its turn or its owner's."""
        left_ms = self._balances_ms[session]
        is_alone = not self._order or (len(self._order) == 1 and self._order[0] == session.owner)
        return left_ms if is_alone else min(left_ms, self._left_ms)

    def charge(self, session: OwnedT, milliseconds: float, *, is_lead: bool) -> None:
        """A session used so much; one that joined another's turn owes a quantum at most, and so does its owner."""
        least_ms = float("-inf") if is_lead else -self._quantum_ms
        self._balances_ms[session] = max(self._balances_ms.get(session, 0.0) - milliseconds, least_ms)
        owner = session.owner
        time = self._time_of(owner)
        if owner == self._serving:
            self._left_ms -= milliseconds
            self._used_ms += milliseconds / self._share_served
            time.virtual_ms += milliseconds / self._share_served
            return
        most_ms = max(time.virtual_ms, self._least_ms + self._quantum_ms)  # else it would wait for long when they stop
        time.virtual_ms = min(time.virtual_ms + milliseconds / self._share(owner), most_ms)

    def end(self, session: OwnedT, *, has_work: bool) -> None:
        """The session's turn is over."""
        owner = session.owner
        if has_work:
            self._queue(session, is_next=self._balances_ms[session] > 0)
        else:
            self._waiting.discard(session)
            self._balances_ms[session] = min(self._balances_ms.get(session, 0.0), 0.0)
        if owner not in self._queues or self._left_ms <= 0 or len(self._order) == 1:
            self._pass_on(owner)

    def joining(self, leader: OwnedT) -> Iterator[OwnedT]:
        """Who else waits, in the order of their turns; of another owner no more than in a turn of it."""
        owners = [leader.owner] if leader.owner in self._queues else []
        owners += [owner for owner in self._order if owner != leader.owner]
        many = {owner: len(self._queues[owner]) if owner == leader.owner else self._share(owner) for owner in owners}
        for place in count():
            owners = [owner for owner in owners if place < many[owner]]
            if not owners:
                return
            for owner in owners:
                yield from islice(self._queues[owner], place, place + 1)

    def _share(self, owner: str) -> int:
        return max(min(len(self._queues.get(owner, ())), self._weight(owner)), 1)

    def _next_owner(self) -> str:
        self._least_ms = max(self._least_ms, min(self._owners[owner].virtual_ms for owner in self._order))
        return min(self._order, key=self._after_turn_ms)

    def _after_turn_ms(self, owner: str) -> float:
        time = self._owners[owner]
        return time.virtual_ms + time.last_ms

    def _time_of(self, owner: str) -> _OwnerTime:
        """What an owner used; it is remembered for some time after its last work."""
        time = self._owners.pop(owner, None) or _OwnerTime(self._least_ms)
        self._owners[owner] = time
        if len(self._owners) > MAX_IDLE_OWNERS + len(self._queues) + 1:
            del self._owners[next(known for known in self._owners if known not in self._queues)]
        return time

    def _queue(self, session: OwnedT, *, is_next: bool) -> None:
        owner = session.owner
        if owner not in self._queues:
            self._queues[owner] = deque()
            time = self._time_of(owner)
            time.virtual_ms = max(time.virtual_ms, self._least_ms)
            # The owner whose turn it is goes on where it was.
            (self._order.appendleft if owner == self._serving else self._order.append)(owner)
        queue = self._queues[owner]
        (queue.appendleft if is_next else queue.append)(session)

    def _pass_on(self, owner: str) -> None:
        """The owner's turn is over."""
        if owner != self._serving:
            return
        if owner in self._queues:
            self._order.remove(owner)
            self._order.append(owner)
        self._time_of(owner).last_ms = self._used_ms
        self._serving, self._left_ms = None, 0.0

    def _drop_empty(self, owner: str) -> None:
        if not self._queues[owner]:
            del self._queues[owner]
            self._order.remove(owner)
