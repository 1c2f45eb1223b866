"""The fault-tolerance benchmark's pure parts: a sweep that keeps nothing, luck that can be had again, and its cells."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

from benchmarks.recovery.failure_injection import FailureInjector
from benchmarks.recovery.fault_tolerance import Options, Run, is_same, sheet, whole_sweep
from swarm.ids import PeerId
from swarm.layers import Span
from swarm.protocol.messages import RouteHop
from swarm.protocol.session import Limits, SessionState

RUN = Run("Canopy", 0.0, (1, 2, 3, 4), 2.0, 4, 0)
HOPS = [RouteHop(PeerId(f"peer {number}"), Span(number, number + 1)) for number in range(3)]


class Lossy:
    """A node, of which only what it loses matters."""

    def __init__(self) -> None:
        self.sessions = self
        self.lost = 0

    def close_all(self, _: str) -> None:
        self.lost += 1


def injectors(chance: float, seed: int) -> tuple[FailureInjector, list[Lossy]]:
    nodes = {hop.peer: Lossy() for hop in HOPS}
    return FailureInjector(cast(Any, nodes), chance, random.Random(seed)), list(nodes.values())


def test_whole_sweeps_are_legal_and_nothing_is_left_of_the_one_before() -> None:
    state = SessionState(Limits(vocab_size=100, window_tokens=8, sweeps=2, nodes=8))
    for sequence in ((1, 2, 3), (1, 2, 3, 4), (9, 8), (1,) * 8):
        sweep = whole_sweep(sequence, state)
        applied = state.apply(sweep)
        assert [node.token for node in state.live.values()] == list(sequence)
        assert applied.positions == tuple(range(len(sequence)))
        assert sweep.picks_from == applied.appended[-1]
        assert state.committed == []


def test_each_hop_is_as_unlucky_as_its_chance_and_the_seed_say() -> None:
    (one, lossy), (other, _), (never, _) = injectors(0.1, 5), injectors(0.1, 5), injectors(0.0, 5)
    for _ in range(400):
        for some in (one, other, never):
            some.step(HOPS)
    assert (one.steps, never.losses) == (400, 0)
    assert one.losses == other.losses == sum(node.lost for node in lossy)
    assert all(20 <= node.lost <= 60 for node in lossy)


def test_time_of_texts_that_were_given_up_counts_and_their_tokens_do_not() -> None:
    runs = [RUN, replace(RUN, seconds=8.0, losses=2), replace(RUN, tokens=(), seconds=6.0, losses=7)]
    never = replace(RUN, way="restart", tokens=(), losses=9)
    made = sheet([never, *runs], Options(chances=(0.0,)))
    assert made.rows == [("restart", "– (–; 9)"), ("Canopy", "0.50 (0.50; 9)")]


def test_other_tokens_are_seen() -> None:
    assert is_same([RUN, replace(RUN, tokens=())])
    assert not is_same([RUN, replace(RUN, tokens=(1, 2, 3, 5))])
