"""What a client believes machines hold: the names of its texts' blocks, and the chain over which each was computed.

A belief that is wrong costs nothing: hops say what they hold when a session opens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarm.protocol.messages import RouteHop

MAX_NAMES = 16_384
"""Names that are remembered: of a million tokens, 3 MB."""


class KnownPrefixes:
    """The newest `MAX_NAMES` names."""

    def __init__(self) -> None:
        self._hops: OrderedDict[bytes, tuple[RouteHop, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hops)

    def note(self, names: Sequence[bytes], hops: tuple[RouteHop, ...]) -> None:
        """A chain holds the blocks with these names, from a text's first on."""
        for name in reversed(names):  # the first ones are forgotten last
            self._hops[name] = hops
            self._hops.move_to_end(name)
        while len(self._hops) > MAX_NAMES:
            self._hops.popitem(last=False)

    def longest(self, names: Sequence[bytes]) -> tuple[int, tuple[RouteHop, ...]]:
        """How many of a text's first blocks some chain holds, and its hops; 0 and none where none does."""
        for place in reversed(range(len(names))):
            if (hops := self._hops.get(names[place])) is not None:
                return place + 1, hops
        return 0, ()
