"""Delays on real sockets: nodes publish them, `swarm route` measures and shows them, the dead cost little time."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

import node.life.announcer
from swarm.base.cli import make_console
from swarm.base.errors import ConfigError, RouteError, UnknownModel
from swarm.base.ids import PeerId
from swarm.commands.route import ShowRoute, show_route
from swarm.demo import TARGET
from swarm.directory.node_record import NodeRecord
from swarm.routing.latency import TIMEOUT_S, measure_delays, measure_rate
from tests.devices import DEVICE
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.net.raw_client import info
from tests.net.three_nodes import engine_of, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

JOIN = ("/ip4/192.0.2.1/tcp/1/p2p/Qm",)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here() -> AsyncIterator[InProcessSwarm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.life.announcer, "ANNOUNCE_S", 0.05)
        async with in_process_swarm(TARGET, ["0-6", "4-12", "6-12"]) as running:
            for one in running.nodes:
                await engine_of(one).on_thread(int)  # an idle node measures itself: its thread lives as long as it does
            yield running


async def records(here: InProcessSwarm) -> list[NodeRecord]:
    identity = here.nodes[0].identity
    return await here.nodes[0].registry.records(identity.fingerprint, identity.num_layers)


async def test_nodes_publish_delays_to_those_who_may_follow_and_their_uplink(here: InProcessSwarm) -> None:
    first, *lasts = (running.peer_id for running in here.nodes)

    async def published() -> bool:
        await info(here.nodes[0])  # over the network, so that the nodes have their turn
        own = next(one for one in await records(here) if one.peer == first)
        return len(own.delays_ms) == 2 and own.uplink_mbit_per_s is not None

    await until(published)
    by_peer = {one.peer: one for one in await records(here)}
    assert {peer for peer, _ in by_peer[first].delays_ms} == set(lasts)
    assert all(0 < delay_ms < 1_000 for _, delay_ms in by_peer[first].delays_ms)
    assert all(by_peer[peer].delays_ms == () for peer in lasts), "nobody follows the last layer"
    assert by_peer[first].row_bytes == 4 * here.nodes[0].running.host.model.hidden_size


async def test_the_dead_cost_a_second_at_most(here: InProcessSwarm) -> None:
    alive = (await records(here))[0]
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        silent = replace(alive, peer=PeerId("silent"), address=f"127.0.0.1:{deaf.getsockname()[1]}")
        closed = replace(alive, peer=PeerId("closed"), address="127.0.0.1:1")
        started = time.perf_counter()
        found = await measure_delays([silent, alive, closed], 0.5)
        assert set(found) == {alive.peer}
        assert time.perf_counter() - started < TIMEOUT_S * 5
        assert await measure_rate(closed) is None
        assert await measure_rate(silent, 0.1) is None


async def shown(here: InProcessSwarm, **options: object) -> str:
    out = io.StringIO()
    command = replace(ShowRoute(join=JOIN), **options)  # type: ignore[arg-type]
    console = make_console(out, soft_wrap=True)
    await show_route(command, here.nodes[0].registry, console)
    return out.getvalue()


async def test_route_says_which_way_and_why(here: InProcessSwarm) -> None:
    first, second, third = (running.peer_id for running in here.nodes)
    text = await shown(here)
    assert "demo-target · 12 layers · tree of 16 nodes" in text
    assert f"{first[:4]}…{first[-6:]}" in text
    assert here.nodes[0].address in text
    assert "ms per sweep, drafting not counted (back from the tail" in text
    assert f"numeric class {DEVICE}-float32" in text
    assert "tokens/s" in text
    assert "next best:" in text
    without = await shown(here, avoid=(second[-6:],), nodes=0)
    assert third[-6:] in without
    assert second[-6:] not in without
    assert "no other chain" in without


async def test_route_without_a_way_names_the_gap_and_the_line_that_fills_it(here: InProcessSwarm) -> None:
    first, second, _ = (running.peer_id for running in here.nodes)
    with pytest.raises(
        RouteError, match=r"nobody serves layers 0…3 .* node serve demo-target --layers 0-4 --join /ip4"
    ):
        await shown(here, avoid=(first,))
    with pytest.raises(ConfigError, match=f"--avoid 'Nobody': no such peer; there are .*{second[-6:]}"):
        await shown(here, avoid=("Nobody",))
    with pytest.raises(UnknownModel, match="nobody serves 'other'; this swarm has: demo-target"):
        await shown(here, model="other")
