"""When drafting on is not worth it: the stop rule of the search. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


def _always(_rounds: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class StopRule:
    """When drafting on is not worth it; costs are in tokens, as the running goodput values time.

    Attributes:
        min_probability: a node less likely to be accepted will not be sent.
        per_round: tokens that another round of drafting costs.
        per_sweep: tokens that another sweep costs; a round that should bring more can wait until this tree is on its
            way.
        go_on: asked before each round, given how many there were since drafting began: whether there is time for it.
    """

    min_probability: float = 0.0
    per_round: float = 0.0
    per_sweep: float = math.inf
    go_on: Callable[[int], bool] = _always


NO_LIMIT = StopRule()
