"""The stop rule of the search: when another round of drafting does not pay. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


def _always(_rounds: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class StopRule:
    """When another round of drafting does not pay; costs are in tokens, as the running goodput values time.

    Attributes:
        min_probability: no sweep carries a node of a lower acceptance probability.
        per_round: tokens that another round of drafting costs.
        per_sweep: tokens that another sweep costs. A round that should bring more than that can wait until this tree
            is in flight.
        go_on: whether there is time for a round; called before each, with the number of rounds since drafting began.
    """

    min_probability: float = 0.0
    per_round: float = 0.0
    per_sweep: float = math.inf
    go_on: Callable[[int], bool] = _always


NO_LIMIT = StopRule()
"""Drafts until the tree is settled."""
