"""Machines that say nothing, links that are lost, long ways: on a virtual clock, with the times that users wait.

Nothing breaks here but by plan, so a machine that is taken for dead is one that is silent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from client import Result
from client.base.options import GenerateOptions
from swarm.link.link import PING_S, SILENCE_S
from tests.memory_links import MemoryLinks, MemoryServer
from tests.net.killable_nodes import CHAIN, KillableNodes
from tests.net.three_nodes import prompt, server_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

IDS = prompt(4, 24)
SPARES = ("b0", "b1", "b2")
SAMPLED: GenerateOptions = {"max_new_tokens": 16, "nodes": 6, "temperature": 1.0, "seed": 7}
FAR_S = 0.15
NOTICED_S = PING_S + SILENCE_S + 1.5
"""Silence, and at most a second and a half for a search, an attach and a replay."""
PLANS = 10


def machine(nodes: KillableNodes, name: str) -> MemoryServer:
    server = server_of(nodes[name])
    assert isinstance(server, MemoryServer)
    return server


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def restored(nodes: KillableNodes, links: MemoryLinks) -> AsyncIterator[None]:
    """Afterwards all machines speak, all links are there, and all are near."""
    near_s = links.delay_s
    yield
    links.mute()
    links.lost.clear()
    for name in nodes.nodes:
        machine(nodes, name).delay_s = near_s


async def told(nodes: KillableNodes, at: Sequence[tuple[str, int]], strike: Sequence[str]) -> Result:
    """A text; what is in `strike` happens as soon as its machine has the sweep of that number."""
    arrived = [nodes.stall(name, sweep) for name, sweep in at]
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **SAMPLED))
        for event, (name, _), how in zip(arrived, at, strike, strict=True):
            waiting = group.create_task(event.wait())
            await asyncio.wait([waiting, telling], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await nodes.announce(*SPARES)
            await hit(nodes, name, how)
    return telling.result()


async def hit(nodes: KillableNodes, name: str, how: str) -> None:
    node, before, links = nodes[name], CHAIN.index(name) - 1, machine(nodes, name).links
    match how:
        case "dies":
            await nodes.kill(name)
        case "is mute":
            links.mute(*links.muted, machine(nodes, name), node.registry.identity.public_key)
            nodes.go_on(name)
        case "is cut off":
            sender = nodes.chains[-1]._key if before < 0 else nodes[CHAIN[before]].registry.identity
            links.lose(machine(nodes, name), sender.public_key)
            nodes.go_on(name)
        case _:
            raise AssertionError(how)


@pytest.mark.parametrize("victim", CHAIN)
async def test_a_machine_that_says_nothing_more_is_replaced_in_time(victim: str, nodes: KillableNodes) -> None:
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    loop = asyncio.get_running_loop()
    began = loop.time()
    result = await told(nodes, [(victim, 4)], ["is mute"])
    assert result.tokens == plain
    (repair,) = result.stats.repairs
    assert repair.replaced == (nodes[victim].peer_id,)
    assert loop.time() - began < NOTICED_S, "and not seconds later"


@pytest.mark.parametrize("victim", CHAIN)
async def test_a_machine_that_one_link_is_lost_to_is_gone_around(victim: str, nodes: KillableNodes) -> None:
    """It lives, and all others reach it."""
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    result = await told(nodes, [(victim, 4)], ["is cut off"])
    assert result.tokens == plain
    assert result.stats.repairs


async def test_whoever_is_far_away_is_not_taken_for_dead(nodes: KillableNodes) -> None:
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    for name in CHAIN:
        machine(nodes, name).delay_s = FAR_S
    loop = asyncio.get_running_loop()
    began = loop.time()
    result = await nodes.client.generate(IDS, **SAMPLED)
    assert result.tokens == plain
    assert result.stats.repairs == ()
    assert loop.time() - began > len(result.stats.sweeps) * 3 * FAR_S, "each sweep went over three links"


@pytest.mark.parametrize("seed", range(PLANS))
async def test_whatever_happens_in_whichever_order_the_text_is_the_same(seed: int, nodes: KillableNodes) -> None:
    """Two machines of a chain with spares die, fall silent or are cut off, at any sweep."""
    rng = random.Random(seed)
    plain = await nodes.undisturbed(IDS, **SAMPLED)
    victims = rng.sample(CHAIN, 2)
    at = [(name, sweep) for sweep, name in sorted((rng.randint(1, 5), name) for name in victims)]
    result = await told(nodes, at, rng.choices(("dies", "is mute", "is cut off"), k=2))
    assert result.tokens == plain
    assert result.stats.repairs
