"""When drafting on is not worth it: the stop rule of the search. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


def _always(_rounds: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class StopRule:
    """When drafting on is not worth it.

    least: tokens; a node of a lower chance will not be sent. per_round: tokens that another round of drafting costs.
    alone: tokens that another sweep costs; a round that should bring more can wait until this tree is on its way.
    go_on: asked before each round, given how many there were since drafting began: whether there is time for it.
    """

    least: float = 0.0
    per_round: float = 0.0
    alone: float = math.inf
    go_on: Callable[[int], bool] = _always


NO_LIMIT = StopRule()
