"""What is remembered of ways: failures for ten minutes, successes until they fail, and of few peers."""

from __future__ import annotations

from swarm.base.ids import PeerId
from swarm.reach.paths.local_dialler import WayMemory
from swarm.reach.paths.way import REMEMBERED_S, OpenedWay

ALICE, BOB = PeerId("alice"), PeerId("bob")


class NamedWay:
    def __init__(self, name: str) -> None:
        self.name = name

    async def open(self, peer: PeerId, relay: str) -> OpenedWay:
        raise NotImplementedError


CALL, PUNCH = NamedWay("call-back"), NamedWay("punch")
WAYS = [CALL, PUNCH]


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_what_failed_is_not_tried_again_for_ten_minutes() -> None:
    clock = Clock()
    memory = WayMemory(clock)
    memory.failed(ALICE, CALL, REMEMBERED_S)
    assert memory.worth_trying(ALICE, WAYS) == [PUNCH]
    assert memory.worth_trying(BOB, WAYS) == WAYS, "a hole is between two"
    clock.now += REMEMBERED_S - 1
    assert memory.worth_trying(ALICE, WAYS) == [PUNCH]
    clock.now += 1
    assert memory.worth_trying(ALICE, WAYS) == WAYS
    assert REMEMBERED_S == 600


def test_what_worked_comes_first_until_it_fails() -> None:
    memory = WayMemory(Clock())
    assert not memory.works(ALICE)
    memory.worked(ALICE, PUNCH)
    assert memory.works(ALICE)
    assert memory.worth_trying(ALICE, WAYS) == [PUNCH, CALL]
    memory.failed(ALICE, CALL, 1)
    assert memory.works(ALICE), "that one does"
    memory.failed(ALICE, PUNCH, 1)
    assert not memory.works(ALICE)
    assert memory.worth_trying(ALICE, WAYS) == []


def test_few_peers_are_remembered() -> None:
    memory = WayMemory(Clock(), max_peers=3)
    for number in range(100):
        memory.worked(ALICE, PUNCH)
        memory.failed(PeerId(f"peer {number}"), CALL, 60)
        assert len(memory) <= 3
    assert memory.works(ALICE), "the least recent one goes"
    assert memory.worth_trying(PeerId("peer 0"), WAYS) == WAYS
