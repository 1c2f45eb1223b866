"""What one machine learned about ways to peers: what failed lately, and what worked. Pure; the clock is a parameter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.ids import PeerId
from swarm.ways.way import Way

MAX_PEERS: Final = 512
"""Peers that are remembered; the least recent one is forgotten for a new one."""


@dataclass(slots=True)
class _Learned:
    """About one peer.

    Attributes:
        again_at: per way that failed, when it may be tried again.
        worked: the way that worked last, and has not failed since.
    """

    again_at: dict[str, float] = field(default_factory=dict)
    worked: str | None = None


class WayMemory:
    """Knows nothing at first. Its ways are few, so only peers are bounded."""

    def __init__(self, clock: Callable[[], float], max_peers: int = MAX_PEERS) -> None:
        """Start.

        Args:
            clock: seconds that never go back.
            max_peers: how many are remembered.
        """
        self._clock = clock
        self._max_peers = max_peers
        self._learned: OrderedDict[PeerId, _Learned] = OrderedDict()

    def __len__(self) -> int:
        """Peers remembered."""
        return len(self._learned)

    def worth_trying(self, peer: PeerId, ways: Sequence[Way]) -> list[Way]:
        """The ways that did not fail lately, the one that worked first."""
        learned = self._learned.get(peer)
        if learned is None:
            return list(ways)
        now = self._clock()
        left = [way for way in ways if learned.again_at.get(way.name, now) <= now]
        return sorted(left, key=lambda way: way.name != learned.worked)

    def works(self, peer: PeerId) -> bool:
        """Whether some way worked the last time it was tried."""
        learned = self._learned.get(peer)
        return learned is not None and learned.worked is not None

    def worked(self, peer: PeerId, way: Way) -> None:
        """A way led to the peer."""
        learned = self._about(peer)
        learned.worked = way.name
        learned.again_at.pop(way.name, None)

    def failed(self, peer: PeerId, way: Way, again_s: float) -> None:
        """A way did not lead to the peer.

        Args:
            peer: whom.
            way: which.
            again_s: seconds until it may be tried again.
        """
        learned = self._about(peer)
        if learned.worked == way.name:
            learned.worked = None
        learned.again_at[way.name] = self._clock() + again_s

    def _about(self, peer: PeerId) -> _Learned:
        learned = self._learned.setdefault(peer, _Learned())
        self._learned.move_to_end(peer)
        while len(self._learned) > self._max_peers:
            self._learned.popitem(last=False)
        return learned
