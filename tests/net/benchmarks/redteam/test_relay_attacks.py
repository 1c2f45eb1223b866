"""The red team's attacks on a relay, in short: who needs the relay is served through each of them.

What users feel, `python -m benchmarks redteam` measures.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from benchmarks.redteam.attack import Fight, Kind
from benchmarks.redteam.attacks import relays
from benchmarks.redteam.ground import Ground, NodeMark
from benchmarks.redteam.kit import Kit
from benchmarks.redteam.listing import all_attacks
from swarm.base.layers import Span
from swarm.base.quota import HoldingLimit
from swarm.directory.identity import Identity
from swarm.reach.relay.visits import RelayLimits
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.relay_kit import LiveRelay, open_relay
from tests.sample_records import MODEL

ATTACKS = [name for name, one in all_attacks().items() if one.kind is Kind.RELAYS]
CAME = 8
SMALL = RelayLimits(
    openings=HoldingLimit(4, 12), names=HoldingLimit(2, 6), circuits=HoldingLimit(4, 10), machine_circuits=6
)
"""A relay that a few strangers fill."""


class MemoryKit(Kit):
    """A tool kit for a directory in memory."""

    def __init__(self, ground: Ground, network: MemoryNetwork) -> None:
        super().__init__(ground)
        self._network = network

    async def directory(self) -> Any:  # noqa: ANN401
        return MemoryRegistry(self._network)


async def under(name: str, relay: LiveRelay, came: int) -> Fight:
    """Fight until the honest dialler came through so often."""
    network = MemoryNetwork()
    network.relays[relay.owner.peer_id] = relay.address
    node = NodeMark("127.0.0.1:9", Identity.ephemeral().peer_id, Span(0, 12), "", "")
    ground = Ground("", (node,), MODEL, 8, 8, "cpu-float32", "", "", "")
    both: list[relays.Bystanders] = []

    class Counted(relays.Bystanders):
        def __init__(self, *arguments: Any) -> None:  # noqa: ANN401
            super().__init__(*arguments)
            both.append(self)
            self.is_enough = asyncio.Event()

        def __setattr__(self, key: str, value: object) -> None:
            super().__setattr__(key, value)
            if key == "came" and value == came:
                self.is_enough.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relays, "Bystanders", Counted)
        patch.setattr(relays, "PAUSE_S", 0.05)
        patch.setattr(relays, "COME_S", 10.0)
        async with MemoryKit(ground, network) as kit, asyncio.TaskGroup() as tasks:
            ready = asyncio.Event()
            fight = Fight(ground, kit, (), ready.set)
            striking = tasks.create_task(cast("Any", all_attacks()[name].act(fight)))
            await asyncio.wait_for(ready.wait(), 20)
            fight.started.set()
            await asyncio.wait_for(cast("Any", both[0]).is_enough.wait(), 30)
            striking.cancel()
    return fight


@pytest.mark.parametrize("name", ATTACKS)
async def test_who_needs_the_relay_is_served_through(name: str) -> None:
    async with open_relay(mbit=50.0, limits=SMALL) as relay:
        fight = await under(name, relay, CAME)
        assert not fight.tally.breaches
        assert fight.tally.acts
        assert relay.server.load.circuits <= 10


def test_there_are_attacks_of_every_kind_that_a_relay_bears() -> None:
    assert len(ATTACKS) >= 8
