"""What path each pair of homes is expected to have, and when a pair counts as right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.emulation.homes_pairs import MACHINES, PairFinding, best_path, rows
from benchmarks.emulation.homes_paths import HomesPath

EXPECTED = {
    "open": "D D B B B B B D",
    "open two": "D D B B B B B D",
    "cone": "D D L L P R R D",
    "cone.2": "D D L L P R R D",
    "cone two": "D D P P L R R D",
    "symmetric": "D D R R R L R D",
    "carrier": "D D R R R R L D",
    "mapping": "D D B B B B B D",
}
"""Direct, called back, LAN, punched, relayed: whom the machines dial, in their own order. Nobody dials itself."""
WORDS = {
    "D": HomesPath.DIRECT,
    "B": HomesPath.CALLED_BACK,
    "L": HomesPath.LAN,
    "P": HomesPath.PUNCHED,
    "R": HomesPath.RELAYED,
}


@pytest.mark.parametrize("near", EXPECTED)
def test_the_best_path_of_every_pair(near: str) -> None:
    others = [far for far in MACHINES if far != near]
    words = dict(zip(MACHINES, EXPECTED[near].split(), strict=True))
    assert {far: best_path(MACHINES[near], MACHINES[far]) for far in others} == {
        far: WORDS[words[far]] for far in others
    }


def test_a_client_has_no_port_mapped() -> None:
    mapping = MACHINES["mapping"]
    assert best_path(mapping, MACHINES["cone"], "client") is HomesPath.PUNCHED
    assert best_path(mapping, MACHINES["symmetric"], "client") is HomesPath.RELAYED
    assert best_path(MACHINES["open"], MACHINES["symmetric"], "client") is HomesPath.CALLED_BACK


def test_a_pair_is_right_in_path_delay_and_text() -> None:
    right = PairFinding("cone", "cone two", "node", "punched", "direct", 26.0, is_same=True, error=None)
    assert right.is_right
    for wrong in ({"delay_ms": 51.0}, {"found": "relayed"}, {"is_same": False}):
        assert not replace(right, **wrong).is_right
    assert list(rows([right, replace(right, found="relayed")]))[1] == ("cone", "node", "1 / 2", "punched 2")
