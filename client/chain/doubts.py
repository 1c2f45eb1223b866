"""Does a route pick what the own draft lets expect? A sequential test of each route; it accuses nobody. Pure.

A draft's calibration says with which probability the target picks its best candidate. Where another model answers, that
happens less often, for certain; where the same one was quantised, hardly.

    s0, s1    the probability said, its log-odds less `TOLERANCE` (still honest), or less `SUBSTITUTED`
    ratio     product over picks: s1/s0 where the candidate was picked, (1 − s1)/(1 − s0) where not
    ratio ≥ 1/FALSE_ALARM  doubtful        ratio ≤ MISSED  nothing found: the test begins anew

If the true probability is s0 or more, the ratio is a supermartingale, so a run ends doubtful with a probability of at
most `FALSE_ALARM`, however long it is (Ville). Source: Wald, "Sequential tests of statistical hypotheses", 1945.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

FALSE_ALARM: Final = 1e-4
MISSED: Final = 1e-2
TOLERANCE: Final = 0.5
"""A calibration may be so far off, in log-odds: another kind of text, a draft that adapts."""
SUBSTITUTED: Final = 2.0
CERTAIN: Final = 0.02, 0.98
"""Probabilities are taken to lie within these: one wrong certainty must not decide."""
MAX_ROUTES: Final = 64
_UPPER, _LOWER = -math.log(FALSE_ALARM), math.log(MISSED)


class Doubts:
    """The tests of one client's routes, the newest `MAX_ROUTES`."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[frozenset[str], float] = OrderedDict()
        self._doubtful: set[frozenset[str]] = set()

    def note(self, peers: Iterable[str], said: float, *, is_picked: bool) -> None:
        """A pick became certain below which the draft had a best candidate.

        Args:
            peers: machines of the route that picked it.
            said: with which probability it should be that candidate.
            is_picked: whether it is.
        """
        route = frozenset(peers)
        odds = _log_odds(min(max(said, CERTAIN[0]), CERTAIN[1]))
        honest, other = (1 / (1 + math.exp(less - odds)) for less in (TOLERANCE, SUBSTITUTED))
        ratio = self._ratios.pop(route, 0.0)
        ratio += math.log(other / honest) if is_picked else math.log((1 - other) / (1 - honest))
        if ratio >= _UPPER:
            self._doubtful.add(route)
        elif ratio <= _LOWER:
            self._doubtful.discard(route)
        self._ratios[route] = 0.0 if ratio <= _LOWER else min(ratio, _UPPER)
        if len(self._ratios) > MAX_ROUTES:
            gone, _ = self._ratios.popitem(last=False)
            self._doubtful.discard(gone)

    def of(self, peer: str) -> float:
        """How much a machine is to be doubted, 0 to 1: as the most doubtful route that it was in; 1 is an alarm."""
        found = (
            1.0 if route in self._doubtful else max(ratio, 0.0) / _UPPER
            for route, ratio in self._ratios.items()
            if peer in route
        )
        return max(found, default=0.0)


def _log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))
