"""Where attackers come from: loopback addresses that services count as strangers', and not as their own network's.

A service bears 16 times as much from its own network, behind whose addresses many may stand, and holds no garbage
against it. The addresses of `STAND_INS` stand for strangers who come by way of a relay, so what comes from there is
bounded as what comes from anywhere in the world.
"""

from __future__ import annotations

import random

from swarm.runtime.quota import STAND_INS

MANY = 1 << 12
"""Addresses of one attacker, at most."""


class Strangers:
    """Addresses of one attacker; nobody came from there before, so nothing is held against them."""

    def __init__(self, rng: random.Random | None = None) -> None:
        """Choose them.

        Args:
            rng: chooses; a real one by default.
        """
        rng = rng or random.SystemRandom()
        self._first = rng.randrange(1, STAND_INS.num_addresses - MANY - 1)

    def __getitem__(self, number: int) -> str:
        assert 0 <= number < MANY, "an attacker has no more"
        return str(STAND_INS[self._first + number])
