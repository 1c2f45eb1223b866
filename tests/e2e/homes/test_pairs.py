"""Machines at home, each behind its own kind of router, serve one swarm: every pair finds its path, and no fault of a
router or of a relay changes a text.

The programs are started once, as a user starts them, with no option of the network but whom to join.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from benchmarks.emulation import homes_swarm
from benchmarks.emulation.home_router import RouterKind, UnaskedTraffic
from benchmarks.emulation.homes import Home, HomesNetwork, HomesPlan
from benchmarks.emulation.homes_client import PROMPT
from benchmarks.emulation.homes_swarm import HomesClient, HomesSwarm, open_homes_swarm
from swarm.demo import TARGET
from tests.e2e.homes.paths import HomesPath, path_between
from tests.forked.machines import forked_json_program, forked_program

pytestmark = [
    pytest.mark.crossing,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.needs_root,
    pytest.mark.needs_program("nft", "nftables"),
    pytest.mark.needs_program("conntrack", "conntrack"),
    pytest.mark.needs_program("miniupnpd", "miniupnpd"),
]

WHOLE, FIRST, SECOND = "0-12", "0-6", "6-12"
CELL_TOKENS, FAULT_TOKENS, FAULT_AFTER = 6, 40, 8
LEG_MS = 25.0
LATER_THAN_OPEN_S = 30.0
"""How much later than a machine with a public address one behind a router is listed, at most: all steps of the ladder
are bounded, and what a start computes is the same."""
ATTEMPTS = 4
"""A better path than the relay's may come with a later connection."""
HOMES: Final = (
    Home("open", RouterKind.OPEN),
    Home("cone", machines=2),
    Home("cone two", unasked=UnaskedTraffic.REJECT),
    Home("symmetric", RouterKind.SYMMETRIC),
    Home("carrier", maps_ports=True, carrier=RouterKind.SYMMETRIC),
    Home("mapping", maps_ports=True),
)
"""As the carrier draws ports, the home behind it is another symmetric one, and its own router maps in vain."""
REACH: Final = {
    "open": "direct",
    "mapping": "mapped",
    **dict.fromkeys(("cone", "cone.2", "cone two", "symmetric", "carrier"), "relayed"),
}
CELLS: Final = [
    ("open", "carrier", HomesPath.CALLED_BACK),
    ("cone", "open", HomesPath.DIRECT),
    ("cone", "cone.2", HomesPath.LAN),
    ("cone", "cone two", HomesPath.PUNCHED),
    ("cone", "carrier", HomesPath.RELAYED),
    ("symmetric", "mapping", HomesPath.DIRECT),
    ("symmetric", "carrier", HomesPath.RELAYED),
    ("mapping", "cone two", HomesPath.CALLED_BACK),
    ("cone two", "cone", HomesPath.PUNCHED),
    ("carrier", "cone two", HomesPath.RELAYED),
]
"""Who dials, whom, and the path that must come about. The client, which is public, dials the first of them itself."""


@dataclass(frozen=True, slots=True)
class Town:
    """A swarm in homes, with a client on a public host."""

    swarm: HomesSwarm
    client: HomesClient
    reference: list[int]

    def job(self, first: str, second: str, tokens: int, *spare: str) -> dict[str, Any]:
        peers = self.swarm.peers
        hops = [[peers[first], FIRST], [peers[second], SECOND]]
        return {"hops": hops, "spare": [[peers[name], WHOLE] for name in spare], "new_tokens": tokens}

    def check(self, told: dict[str, Any], tokens: int) -> None:
        assert told["error"] is None, told
        assert told["tokens"] == self.reference[:tokens]


def reference_text(tokens: int) -> list[int]:
    model = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    with torch.no_grad():
        made = model.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return cast("list[int]", made[0, len(PROMPT) :].tolist())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def town(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Town]:
    folder: Path = tmp_path_factory.mktemp("homes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(homes_swarm, "start_program", forked_program)
        patch.setattr(homes_swarm, "json_program", forked_json_program)
        async with make_town(folder) as town:
            yield town


@asynccontextmanager
async def make_town(folder: Path) -> AsyncIterator[Town]:
    async with HomesNetwork(HomesPlan(HOMES)) as world, open_homes_swarm(world, folder) as swarm:
        first = await swarm.bootstrap("P")
        peers = [first, await swarm.bootstrap("Q", join=[first])]
        for name in REACH:
            await swarm.serve(name, WHOLE, peers)
        reference = await asyncio.to_thread(reference_text, FAULT_TOKENS)
        client = await swarm.client("C", peers)
        await client.wait_up(*(swarm.peers[name] for name in REACH))
        yield Town(swarm, client, reference)


async def test_each_machine_is_listed_as_its_router_lets_it_be_reached(town: Town) -> None:
    found = {name: town.client.listed[town.swarm.peers[name]] for name in REACH}
    assert {name: listed["reach"] for name, listed in found.items()} == REACH
    took_s = {name: listed["at"] - town.swarm.started_at[name] for name, listed in found.items()}
    late = {name: seconds for name, seconds in took_s.items() if seconds > took_s["open"] + LATER_THAN_OPEN_S}
    assert not late, took_s


@pytest.mark.parametrize(("near", "far", "path"), CELLS)
async def test_a_pair_finds_its_path(town: Town, near: str, far: str, path: HomesPath) -> None:
    for _ in range(ATTEMPTS):
        told = await town.client.generate(town.job(near, far, CELL_TOKENS))
        town.check(told, CELL_TOKENS)
        found = await path_between(town.swarm.world, near, far)
        if found is path.seen_as and told["links_ms"] and path.fits(told["links_ms"][1], LEG_MS):
            break
    assert found is path.seen_as
    assert told["links_ms"], "no sweep came back whole"
    assert path.fits(told["links_ms"][1], LEG_MS), told["links_ms"]


async def test_a_text_outlives_a_restart_of_the_router(town: Town) -> None:
    await town.client.begin(town.job("cone", "open", FAULT_TOKENS), FAULT_AFTER)
    await town.swarm.world.restart("cone")
    town.check(await town.client.finish(), FAULT_TOKENS)


async def test_a_text_outlives_its_relay(town: Town) -> None:
    near, far = "carrier", "symmetric"
    town.check(await town.client.generate(town.job(near, far, CELL_TOKENS)), CELL_TOKENS)
    assert await path_between(town.swarm.world, near, far) is HomesPath.RELAYED
    await town.client.begin(town.job(near, far, FAULT_TOKENS), FAULT_AFTER)
    town.swarm.kill(town.swarm.relay_of(town.client, far))
    told = await town.client.finish()
    town.check(told, FAULT_TOKENS)
    assert told["repairs"] >= 1, "the circuit ended with its relay"
