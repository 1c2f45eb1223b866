"""Multi-step speculative sampling through real nodes: what was drawn reaches the tail, and what it picks is walked."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytest_asyncio
import torch

import node.session.sweep_run
from client import AsyncSwarm
from client.chain import answers as replies
from client.chain.chain import Chain
from client.decode.goodput import Goodput
from client.terminal.report import summary
from node.session.hop_session import HopSession
from node.session.sweep_run import SweepRun
from swarm.compute.multistep_sampling import multistep_picks
from swarm.demo import DRAFT, TARGET
from swarm.link import link as watch
from swarm.protocol.messages import Sweep
from swarm.protocol.pick_rules import DraftDistribution
from swarm.routing.costs import RouteForecast
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.net.three_nodes import engine_of, prompt, server_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

NEW_TOKENS = 24
FAR = RouteForecast(links_ms=5_000, compute_ms=10, row_ms=0.1, hops=2)
STRUCK = 6
"""The sweep that waits in a machine when it dies."""
REPLAYED = 0
"""What stands for all sweeps in a snapshot."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here() -> AsyncIterator[InProcessSwarm]:
    """Of each span two machines, for the deaths at the end."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    with pytest.MonkeyPatch.context() as patch:
        for module in (watch, replies):
            patch.setattr(module, "SILENCE_S", 20.0)  # however busy the machine is
        async with in_process_swarm(TARGET, ["0-6", "0-6", "6-12", "6-12"]) as opened:
            for one in opened.nodes:
                await engine_of(one).on_thread(int)  # its thread lives as long as the node
            yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(here: InProcessSwarm) -> AsyncIterator[AsyncSwarm]:
    async with here.client(draft=DRAFT) as swarm:
        await swarm.generate("It", max_new_tokens=3, nodes=1)  # starts every thread that lives as long as they do
        yield swarm


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[DraftDistribution | None]:
    """What the tail was told was drawn, node by node."""
    seen: list[DraftDistribution | None] = []

    def recording(
        probs: torch.Tensor,
        positions: Sequence[int],
        guesses: Sequence[DraftDistribution | None],
        seed: int,
        sequence: int,
    ) -> list[int]:
        seen.extend(guesses)
        return multistep_picks(probs, positions, guesses, seed, sequence)

    monkeypatch.setattr(node.session.sweep_run, "multistep_picks", recording)
    return seen


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are chosen for machines that are far away, however busy this one is."""
    expect = Goodput.expect
    monkeypatch.setattr(Goodput, "expect", lambda self, route, _: expect(self, route, FAR))
    monkeypatch.setattr(Goodput, "observe_sweep", lambda *_: None)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("nodes", [12, None])
async def test_draws_reach_the_tail_and_trees_are_walked(
    nodes: int | None, client: AsyncSwarm, arrived: list[DraftDistribution | None]
) -> None:
    result = await client.generate(
        prompt(0, 60), max_new_tokens=NEW_TOKENS, temperature=1.0, seed=4, nodes=nodes, multistep=True
    )
    assert len(result.tokens) == NEW_TOKENS
    assert result.stats.acceptance_length > 1.3
    assert not result.stats.reproducible
    assert "may differ from run to run (multi-step sampling)" in summary(result.stats)
    assert sum(guess is not None for guess in arrived) >= len(result.stats.sweeps) / 2
    assert any(guess is None for guess in arrived), "leaves have none"


async def test_plain_decoding_by_it_needs_no_draft(client: AsyncSwarm, arrived: list[DraftDistribution | None]) -> None:
    result = await client.generate(prompt(1), max_new_tokens=6, temperature=1.0, seed=4, nodes=0, multistep=True)
    assert result.stats.acceptance_length == 1.0
    assert arrived == [None] * len(result.stats.sweeps)


async def test_greedy_picks_are_the_same_by_either_rule(
    client: AsyncSwarm, arrived: list[DraftDistribution | None]
) -> None:
    texts = [
        (await client.generate(prompt(2), max_new_tokens=12, nodes=6, multistep=multistep)).tokens
        for multistep in (False, True)
    ]
    assert texts[0] == texts[1]
    assert not arrived


async def test_it_is_off_by_default(client: AsyncSwarm, arrived: list[DraftDistribution | None]) -> None:
    result = await client.generate(prompt(3), max_new_tokens=6, temperature=1.0, seed=1, nodes=6)
    assert result.stats.reproducible
    assert not arrived


@pytest.mark.parametrize("place", [0, -1], ids=["the first hop", "the tail"])
async def test_it_goes_on_after_a_death_with_a_sweep_in_flight(
    place: int, client: AsyncSwarm, here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tests here: machines die in them.

    A tail that lives gets what was drawn with the sweep, from the journal, and never for another sweep. A new one picks
    without the draws what its snapshot holds, which has the same law (`swarm.compute.multistep_sampling`), and with
    them afterwards.
    """
    sent, told, arrived = dict[int, Sweep](), defaultdict[int, list[DraftDistribution | None]](list), asyncio.Event()
    send, run, struck = Chain.send, HopSession.next_run, list[str]()

    def sending(chain: Chain, sweep: Sweep) -> None:
        sent[sweep.sequence] = sweep
        send(chain, sweep)

    def recording(
        probs: torch.Tensor,
        positions: Sequence[int],
        guesses: Sequence[DraftDistribution | None],
        seed: int,
        sequence: int,
    ) -> list[int]:
        told[sequence] += guesses
        return multistep_picks(probs, positions, guesses, seed, sequence)

    def stalling(hop: HopSession) -> SweepRun | None:
        queue, is_it = hop.log._queue, hop._context.peer in struck or (hop.is_tail == (place == -1) and not struck)
        if is_it and hop._running is None and queue and queue[0].sweep.sequence >= STRUCK:
            struck[:] = [hop._context.peer]
            arrived.set()
            return None
        return run(hop)

    monkeypatch.setattr(Chain, "send", sending)
    monkeypatch.setattr(node.session.sweep_run, "multistep_picks", recording)
    monkeypatch.setattr(HopSession, "next_run", stalling)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        work = client.generate(
            prompt(0, 60), max_new_tokens=NEW_TOKENS, temperature=1.0, seed=9, nodes=6, multistep=True
        )
        telling = group.create_task(work)
        await arrived.wait()
        [victim] = [one for one in here.nodes if one.peer_id in struck]
        await server_of(victim).stop(None)
        await victim.running.resources.dialer.__aexit__()
    result = telling.result()
    assert len(result.tokens) == NEW_TOKENS
    assert [repair.replaced for repair in result.stats.repairs] == [tuple(struck)]
    drawn = {sequence: set(filter(None, guesses)) for sequence, guesses in told.items()}
    replayed = drawn.pop(REPLAYED, None)
    assert replayed == (None if place == 0 else set())
    assert all(guesses <= set(sent[sequence].guesses) for sequence, guesses in drawn.items())
    assert bool(drawn.get(STRUCK)) == (place == 0), "a tail that lives is told what was drawn, from the journal"
    later = [guesses for sequence, guesses in drawn.items() if sequence > STRUCK and sent[sequence].guesses]
    assert later
    assert all(later)
