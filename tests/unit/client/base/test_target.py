"""Which of the listed models a client takes: what is only listed hinders nobody."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from client.base.target import ModelSearch, Target, check_fingerprint, find_in_swarm
from node.life.model_finder import swarms_model
from swarm.base.errors import ConfigError, ModelMismatch, RouteError, UnknownModel
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.routing.served import ServedModels
from tests.memory_registry import MemoryNetwork, MemoryRegistry

HONEST = ModelIdentity.of("org/demo", "b2" * 32, "c3" * 32, "d4" * 32, 12)
OTHER_WEIGHTS = [ModelIdentity.of("org/demo", "b2" * 32, f"{number:064x}", "d4" * 32, 12) for number in range(40)]
NO_TOKENIZER: Any = None
TARGET = Target("org/demo", "b2" * 32, "d4" * 32, NO_TOKENIZER, frozenset(), 100, 12, None)
IDENTITIES = [Identity.ephemeral() for _ in range(6)]


class Swarm:
    """A directory, and which of its machines answer a call."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.alive: set[PeerId] = set()
        self._used = 0

    async def list(self, model: ModelIdentity, *spans: tuple[int, int], answers: bool = True) -> None:
        for start, end in spans:
            node = MemoryRegistry(self.network, IDENTITIES[self._used % len(IDENTITIES)])
            self._used += 1
            about = (node.peer_id, model, Span(start, end), "192.0.2.7:1", NodeState.SERVING, "cpu-float32", "0")
            await node.announce(NodeRecord(*about, None, (), 9, 9, 1, time.time() + 60 + self._used / 1e3))
            if answers:
                self.alive.add(node.peer_id)

    async def probe(self, records: Sequence[NodeRecord]) -> dict[PeerId, float]:
        return {record.peer: 1.0 for record in records if record.peer in self.alive}

    async def find(self, target: Target = TARGET, fingerprint: str | None = None) -> ModelIdentity:
        search = ModelSearch(("/ip4/192.0.2.1/tcp/1/p2p/Qm",), fingerprint, self.probe)
        return await find_in_swarm(target, MemoryRegistry(self.network), search)


async def honest_swarm() -> Swarm:
    swarm = Swarm()
    await swarm.list(HONEST, (0, 6), (6, 12))
    return swarm


async def test_a_complete_chain_of_machines_that_do_not_answer_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    swarm = await honest_swarm()
    liar = min(OTHER_WEIGHTS, key=lambda model: model.fingerprint)
    await swarm.list(liar, (0, 12), (0, 12), (0, 12), answers=False)
    with caplog.at_level(logging.WARNING):
        assert await swarm.find() == HONEST
    (line,) = caplog.messages
    assert HONEST.fingerprint[:12] in line
    assert liar.fingerprint[:12] in line
    assert "--fingerprint" in line


async def test_a_fingerprint_that_this_machine_can_compute_is_taken_whatever_else_is_served() -> None:
    swarm = await honest_swarm()
    await swarm.list(OTHER_WEIGHTS[0], (0, 12), (0, 12), (0, 12))
    assert await swarm.find(replace(TARGET, fingerprint=HONEST.fingerprint)) == HONEST
    assert await swarm.find() == OTHER_WEIGHTS[0], "nothing tells this client which weights are right: most nodes"


async def test_other_weights_than_the_ones_here_are_told(caplog: pytest.LogCaptureFixture) -> None:
    swarm = await honest_swarm()
    assert await swarm.find(replace(TARGET, fingerprint="ab" * 32)) == HONEST
    assert "other weights" in caplog.text


async def test_a_fingerprint_can_be_asked_for() -> None:
    swarm = await honest_swarm()
    other = OTHER_WEIGHTS[0]
    await swarm.list(other, (0, 12))
    for asked in (other.fingerprint, other.fingerprint[:8]):
        assert await swarm.find(fingerprint=asked) == other
    with pytest.raises(RouteError, match="nobody serves org/demo with the fingerprint abababab"):
        await swarm.find(fingerprint="ab" * 4)
    with pytest.raises(ConfigError, match="8 to 64"):
        check_fingerprint("ab")
    with pytest.raises(ModelMismatch, match="12 layers"):
        await swarm.find(replace(TARGET, num_layers=13), HONEST.fingerprint)


async def test_other_layers_or_another_config_are_another_model() -> None:
    swarm = Swarm()
    await swarm.list(ModelIdentity.of("org/demo", "b2" * 32, "c3" * 32, "d4" * 32, 13), (0, 13))
    await swarm.list(ModelIdentity.of("org/demo", "aa" * 32, "c3" * 32, "d4" * 32, 12), (0, 12))
    with pytest.raises(ModelMismatch, match="org/demo here has config b2b2"):
        await swarm.find()
    await swarm.list(HONEST, (0, 12))
    assert await swarm.find() == HONEST


async def test_the_search_is_bounded_and_goes_on_behind_the_first_lies() -> None:
    swarm, asked = await honest_swarm(), []
    lies = sorted(OTHER_WEIGHTS, key=lambda model: model.fingerprint)[:12]

    class Counting(MemoryRegistry):
        async def records(self, fingerprint: str, num_layers: int, *, within_s: float = 0.0) -> list[NodeRecord]:
            asked.append(fingerprint)
            return await super().records(fingerprint, num_layers, within_s=within_s)

    served = ServedModels(Counting(swarm.network), swarm.probe)
    assert await served.best([*lies, HONEST]) == HONEST
    assert len(asked) == 13
    asked.clear()
    assert await served.best(OTHER_WEIGHTS) == OTHER_WEIGHTS[0]
    assert len(asked) == 32


async def test_a_node_that_is_told_no_model_takes_the_one_that_is_served() -> None:
    swarm = await honest_swarm()
    served = ServedModels(MemoryRegistry(swarm.network), swarm.probe)
    lie = ModelIdentity.of("lie", "aa" * 32, "c3" * 32, "d4" * 32, 12)
    await swarm.list(lie, (0, 12), answers=False)
    assert await swarms_model(served, [lie, HONEST, OTHER_WEIGHTS[0]]) == "org/demo"
    assert await swarms_model(served, [HONEST, OTHER_WEIGHTS[0]]) == "org/demo"
    with pytest.raises(UnknownModel, match="say which MODEL"):
        await swarms_model(served, [lie, OTHER_WEIGHTS[0]])
    with pytest.raises(UnknownModel, match="none"):
        await swarms_model(served, [])
