"""`node serve` with nothing decides by itself: model, type and layers come from the swarm that it joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import node.life.arrival
import node.life.joining
from node.life.serve import Node
from node.model.config import ServeConfig
from swarm.base.errors import NotEnoughSpace, TooSlow
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.demo import TARGET
from swarm.directory.node_record import NodeRecord
from swarm.routing.latency import measure_delays
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.memory_registry import MemoryRegistry

JOIN = ("/ip4/192.0.2.1/tcp/31337/p2p/QmbLHAnMoJPWSCR5Zhtx6BHJX9KiKNN6tpvbUcqanj75Nb",)
HERE = ServeConfig(join=JOIN, host="127.0.0.1", threads=1, drain=0.0, lan="no", relay="off")
"""Nobody is there who could dial back or lend a relay, so neither is waited for."""


@pytest.fixture(autouse=True)
def at_the_models_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The swarm calls its model `demo-target`, and it is found here."""
    monkeypatch.chdir(TARGET.parent)
    monkeypatch.setattr(node.life.joining, "SETTLE_S", 0.0)
    monkeypatch.setattr(node.life.arrival, "ASK_AGAIN_S", 0.0)


async def test_it_takes_the_swarms_model_its_type_and_the_layers_that_are_missing() -> None:
    said: list[str] = []
    async with in_process_swarm(TARGET, ["0-4", "4-8"], dtype="bfloat16") as swarm:
        async with Node(HERE, said.append, MemoryRegistry(swarm.network)) as alone:
            record = alone.serving()
            assert record.numeric_class == "cpu-bfloat16"
            assert record.span.end == 12
        said = [line for line in said if not line.startswith("join")]  # what happens meanwhile
        lines = [line.partition(":")[0] for line in said]
        assert lines[:6] == ["model", "swarm", "layers", "computes", "reached", "gives"]
        assert said[0].endswith("the one that this swarm serves")
        assert said[1] == "swarm: 2 nodes serve it already, and nobody holds layers 8…11"
        assert "on cpu in bfloat16, as 2 nodes of the swarm" in said[3]


async def test_layers_of_a_machine_that_was_killed_a_moment_ago_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with in_process_swarm(TARGET, ["0-4", "4-8", "8-12"]) as swarm:
        killed = swarm.nodes[1].peer_id
        real = measure_delays

        async def probe(records: Sequence[NodeRecord], *, insecure: bool) -> dict[PeerId, float]:
            found = await real(records, insecure=insecure)
            return {peer: ms for peer, ms in found.items() if peer != killed}

        monkeypatch.setattr("node.life.planning.measure_delays", probe)
        said: list[str] = []
        async with Node(replace(HERE, num_layers=4), said.append, MemoryRegistry(swarm.network)) as alone:
            assert alone.serving().span == Span(4, 8)
        assert "swarm: 2 nodes serve it already, and nobody holds layers 4…7" in said


async def refusal_in(swarm: InProcessSwarm, kind: type[Exception]) -> str:
    registry = MemoryRegistry(swarm.network)
    with pytest.raises(kind) as refused:
        async with Node(HERE, lambda _: None, registry):
            pass
    listed = await MemoryRegistry(swarm.network).records(swarm.nodes[0].identity.fingerprint, 12)
    assert registry.peer_id not in {record.peer for record in listed}
    return str(refused.value)


async def test_a_machine_that_is_too_slow_or_too_small_says_so_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_process_swarm(TARGET, ["0-12", "0-12"]) as swarm:
        loads: list[object] = []
        monkeypatch.setattr("node.life.span_host.load", loads.append)
        monkeypatch.setattr("node.life.joining.TOO_SLOW", 0.0)
        assert "would slow down every chain" in await refusal_in(swarm, TooSlow)
        monkeypatch.setattr("node.life.planning.free_bytes", lambda _: 1 << 20)
        said = await refusal_in(swarm, NotEnoughSpace)
        assert "this machine is too small: not one layer fits" in said
        assert "GiB are missing" in said
        assert not loads
