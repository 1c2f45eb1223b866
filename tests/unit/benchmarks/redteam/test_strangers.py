"""Attackers come from where strangers come from."""

from __future__ import annotations

import random

from benchmarks.redteam.kit import MANY, Strangers
from node.session.admission import is_near
from swarm.base.quota import address_key


def test_attackers_are_no_neighbours_and_come_from_elsewhere_each_time() -> None:
    rng = random.Random(1)
    first, second = Strangers(rng), Strangers(rng)
    assert len({first[number] for number in range(MANY)}) == MANY
    assert not any(is_near(address_key(f"ipv4:{first[number]}:9")) for number in range(0, MANY, 64))
    assert first[0] != second[0]
