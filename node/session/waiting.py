"""Who waits for room at a full node, and in which order (PROTOCOL P16). Pure: owns no session and no clock.

Nobody is held on a stream: who is refused is told its place and when to ask again, and keeps the place while it asks.
Room that comes free is for those who stand first, for a moment also between two times that they ask.

First come those whose owner has least here, then who came first. Owners of one network count as `NETWORK_OWNERS`
owners at most, so many names gain nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from node.session.admission import NETWORK_OWNERS, OwnerStanding

MAX_WAITING: Final = 64
"""Places; who has least takes the place of who has most."""
WAIT_S: Final = 30.0
"""How long a place is kept."""
SILENT_S: Final = 8.0
"""The same for one whose owner does not ask again."""
CLAIM_S: Final = 0.5
"""How long room that came free is kept for who stands first; then whoever asks has it."""
LEAST_RETRY_S: Final = 0.5
MOST_RETRY_S: Final = 3.0
FIRST_GUESS_S: Final = 5.0
"""Between two sessions that end, before any did."""
_NEWEST: Final = 0.2
"""Weight of the newest interval in the mean."""


@dataclass(frozen=True, slots=True)
class WaitingPlace:
    """A session's place in the waiting list.

    Attributes:
        owner: who pays for the session.
        ticket: by which it is known again.
    """

    owner: str
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Turn:
    """When a place is worth another try.

    Attributes:
        position: among those that wait, from 1.
        expected_s: until there should be room for it.
        retry_after_s: until it should ask again.
    """

    position: int
    expected_s: float
    retry_after_s: float


@dataclass(slots=True)
class _Waiting:
    tokens: int
    since_s: float
    asked_s: float


class WaitingList:
    """The places of one node."""

    def __init__(self, standing: Callable[[str], OwnerStanding], clock: Callable[[], float]) -> None:
        """Begin with an empty list.

        Args:
            standing: what an owner counts for.
            clock: seconds that never go back.
        """
        self._standing, self._clock = standing, clock
        self._places: dict[WaitingPlace, _Waiting] = {}
        self._between_s, self._ended_s = FIRST_GUESS_S, clock()
        self._freed: deque[tuple[float, int]] = deque(maxlen=MAX_WAITING)

    def __len__(self) -> int:
        self._forget()
        return len(self._places)

    def ahead_of(self, place: WaitingPlace, sessions: Mapping[str, int]) -> list[int]:
        """The KV tokens that each who stands before this place waits for; a new one is thought to stand there.

        Args:
            sessions: how many sessions each owner has here.
        """
        order = self._order({place: self._clock()}, sessions)
        return [self._places[other].tokens for other in order[: order.index(place)]]

    def join(self, place: WaitingPlace, tokens: int, sessions: Mapping[str, int]) -> Turn | None:
        """Wait, or wait on; None where others have better claims to all places.

        Args:
            tokens: KV tokens that it waits for.
            sessions: as of `ahead_of`.
        """
        now_s = self._clock()
        known = self._places.get(place)
        self._places[place] = _Waiting(tokens, now_s if known is None else known.since_s, now_s)
        order = self._order({}, sessions)
        if len(order) > MAX_WAITING:
            del self._places[order.pop()]
        if place not in self._places:
            return None
        position = order.index(place) + 1
        expected_s = position * self._between_s
        return Turn(position, expected_s, min(max(expected_s / 2, LEAST_RETRY_S), MOST_RETRY_S))

    def kept(self, ahead: Sequence[int]) -> int:
        """KV tokens of the room that is kept for those who stand before: what came free a moment ago."""
        now_s = self._clock()
        while self._freed and now_s - self._freed[0][0] > CLAIM_S:
            self._freed.popleft()
        return min(sum(ahead), sum(tokens for _, tokens in self._freed))

    def leave(self, place: WaitingPlace) -> None:
        """There was room for it."""
        self._places.pop(place, None)

    def ended(self, tokens: int) -> None:
        """A session ended, so there is room for so many more KV tokens."""
        now_s = self._clock()
        self._freed.append((now_s, tokens))
        self._between_s += _NEWEST * (min(now_s - self._ended_s, WAIT_S) - self._between_s)
        self._ended_s = now_s

    def _order(self, more: Mapping[WaitingPlace, float], sessions: Mapping[str, int]) -> list[WaitingPlace]:
        """All places, and `more` that came at these moments; those of owners that have least first."""
        self._forget()
        since_s = {place: waiting.since_s for place, waiting in self._places.items()}
        since_s = since_s | {place: came_s for place, came_s in more.items() if place not in since_s}
        owners, networks = Counter(sessions), Counter[str]()
        for owner, count in sessions.items():
            network = self._standing(owner).network
            networks[network or owner] += count
        ranks: dict[WaitingPlace, float] = {}
        for place in sorted(since_s, key=since_s.__getitem__):
            standing = self._standing(place.owner)
            network = standing.network or place.owner
            of_network = networks[network] / NETWORK_OWNERS if standing.network else 0.0
            ranks[place] = max(owners[place.owner] / (standing.sessions * standing.shares), of_network)
            owners[place.owner] += 1
            networks[network] += 1
        return sorted(ranks, key=lambda place: (ranks[place], since_s[place]))

    def _forget(self) -> None:
        now_s = self._clock()
        for place, waiting in list(self._places.items()):
            if now_s - waiting.since_s > WAIT_S or now_s - waiting.asked_s > SILENT_S:
                del self._places[place]
