"""Prompts on a chain in virtual time: all hops have work, and no more is unanswered than sessions reserve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from benchmarks.control.prefill import InLargeParts, Options, first_token_s, measure
from benchmarks.simulation.chain import Costs, SimulatedSweep, VirtualChain
from client.decode.prompt_parts import CHAIN_PART, LARGEST_UNANSWERED, PARTS_PER_HOP
from client.library.jobs import PREFILL_CHUNK

TOKENS = 4_000


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[SimulatedSweep]]:
    """The parts of the prompt that were on their way, each time that a hop was given one."""
    forward, found = VirtualChain._forward, list[Sequence[SimulatedSweep]]()

    def noted(self: VirtualChain, flight: SimulatedSweep, hop: int, then: object) -> None:
        found.append([sweep for sweep in self._flights if sweep.rows > 1])
        forward(self, flight, hop, then)  # type: ignore[arg-type]

    monkeypatch.setattr(VirtualChain, "_forward", noted)
    return found


def costs_of(hops: int) -> Costs:
    return Costs(12.5, 40, 5.0, 1.0, row_bytes=8_192, others=(0.0,) * hops, paces=(1.0,) * hops)


@pytest.mark.parametrize("hops", [2, 6, 12])
def test_two_parts_per_hop_are_on_their_way(hops: int, unanswered: list[Sequence[SimulatedSweep]]) -> None:
    asyncio.run(first_token_s(TOKENS, costs_of(hops)))
    assert max(map(len, unanswered)) >= PARTS_PER_HOP * hops
    assert max(sum(sweep.rows for sweep in sent) for sent in unanswered) <= LARGEST_UNANSWERED * PREFILL_CHUNK
    assert max(sweep.rows for sent in unanswered for sweep in sent) <= CHAIN_PART


def test_one_hop_alone_gets_large_parts(unanswered: list[Sequence[SimulatedSweep]]) -> None:
    assert asyncio.run(first_token_s(TOKENS, costs_of(1))) == asyncio.run(
        first_token_s(TOKENS, costs_of(1), InLargeParts)
    )
    assert max(map(len, unanswered)) == LARGEST_UNANSWERED
    assert max(sweep.rows for sent in unanswered for sweep in sent) == PREFILL_CHUNK


def test_a_chain_is_busy_all_the_time() -> None:
    """What it takes is near what its slowest link takes, and far from what large parts take."""
    cell = measure(TOKENS, 6, Options())
    assert cell.packed < cell.chosen < 0.5 * cell.as_alone
    assert cell.packed < 1.4 * cell.bound
