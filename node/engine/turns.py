"""Who computes next: owners in turn, and the sessions of each in turn, by milliseconds (deficit round-robin on both).

An owner is whoever sent the sessions, such as an address: many sessions of one owner get together what one session of
another gets. Computes nothing itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from itertools import count, islice
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

MAX_DEBTORS = 4_096
"""Owners without work whose debts are remembered."""


class Owned(Hashable, Protocol):
    """A session as its turns see it."""

    @property
    def owner(self) -> str:
        """Whose it is."""


OwnedT = TypeVar("OwnedT", bound=Owned)


class Turns(Generic[OwnedT]):
    """Sessions that wait to compute.

    A balance is what a session, or an owner, may still use of its turn, in milliseconds. It saves nothing while it is
    idle and keeps what it owes: a quantum at most for what it used of others' turns. An owner alone owes nobody.
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
        self._owners_ms: dict[str, float] = {}
        self._serving: str | None = None

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
        while True:
            owner = self._order[0]
            if self._serving != owner:
                self._serving = owner
                most_ms = self._quantum_ms * self._share(owner)
                owed_ms = 0.0 if len(self._order) == 1 else self._owners_ms.get(owner, 0.0)
                self._owners_ms[owner] = min(owed_ms, 0.0) + most_ms
            if self._owners_ms[owner] > 0:
                break
            self._pass_on(owner)
        session = self._queues[owner].popleft()
        self._drop_empty(owner)
        balance_ms = self._balances_ms.get(session, 0.0)
        self._balances_ms[session] = balance_ms if balance_ms > 0 else balance_ms + self._quantum_ms
        return session

    def left_ms(self, session: OwnedT) -> float:
        """What the session whose turn it is may still use; not above 0 at the end of its turn or its owner's."""
        left_ms = self._balances_ms[session]
        is_alone = not self._order or (len(self._order) == 1 and self._order[0] == session.owner)
        return left_ms if is_alone else min(left_ms, self._owners_ms.get(session.owner, 0.0))

    def charge(self, session: OwnedT, milliseconds: float, *, is_lead: bool) -> None:
        """A session used so much; one that joined another's turn owes a quantum at most."""
        least_ms = float("-inf") if is_lead else -self._quantum_ms
        self._balances_ms[session] = max(self._balances_ms.get(session, 0.0) - milliseconds, least_ms)
        least_ms = float("-inf") if session.owner == self._serving else -self._quantum_ms
        self._owners_ms[session.owner] = max(self._owners_ms.get(session.owner, 0.0) - milliseconds, least_ms)

    def end(self, session: OwnedT, *, has_work: bool) -> None:
        """The session's turn is over."""
        owner = session.owner
        if has_work:
            self._queue(session, is_next=self._balances_ms[session] > 0)
        else:
            self._waiting.discard(session)
            self._balances_ms[session] = min(self._balances_ms.get(session, 0.0), 0.0)
        if owner in self._queues and (self._owners_ms.get(owner, 0.0) <= 0 or len(self._order) == 1):
            self._pass_on(owner)
        elif owner not in self._queues:
            self._rest(owner)

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
        return max(min(len(self._queues[owner]), self._weight(owner)), 1)

    def _queue(self, session: OwnedT, *, is_next: bool) -> None:
        owner = session.owner
        if owner not in self._queues:
            self._queues[owner] = deque()
            # The owner whose turn it is goes on where it was.
            (self._order.appendleft if owner == self._serving else self._order.append)(owner)
        queue = self._queues[owner]
        (queue.appendleft if is_next else queue.append)(session)

    def _pass_on(self, owner: str) -> None:
        self._order.remove(owner)
        self._order.append(owner)
        self._serving = None

    def _drop_empty(self, owner: str) -> None:
        if not self._queues[owner]:
            del self._queues[owner]
            self._order.remove(owner)

    def _rest(self, owner: str) -> None:
        """An owner has no work: only what it owes is remembered."""
        self._serving = None if self._serving == owner else self._serving
        left_ms = self._owners_ms.pop(owner, 0.0)
        if left_ms < 0:
            self._owners_ms[owner] = left_ms
        if len(self._owners_ms) > MAX_DEBTORS + len(self._queues):
            del self._owners_ms[next(known for known in self._owners_ms if known not in self._queues)]
