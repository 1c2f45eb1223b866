"""One damaged, slow or made-up model hinders no other: in a look-up, in `swarm status`, on the health page."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from swarm import cli
from swarm.base.errors import RegistryError, UnknownModel
from swarm.base.ids import ModelIdentity, PeerId
from swarm.cli import MODELS_LOOKED_UP, MODELS_SHOWN, ShowStatus, show_status
from swarm.directory import registry as listing
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import MODELS_NAMED, name_models, read_models
from swarm.health.state.directory import Directory
from swarm.health.state.verdict import LinkState
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.sample_records import sample_record

PEER = Identity.ephemeral().peer_id


def model(number: int) -> ModelIdentity:
    return ModelIdentity.of(f"model-{number}", f"{number:064x}", "c3" * 32, "d4" * 32, 12)


def record(served: ModelIdentity, state: NodeState = NodeState.SERVING) -> NodeRecord:
    return sample_record(PeerId(PEER), model=served, state=state, sweep_ms=(), expires_at=2e9)


class ManyModels(MemoryRegistry):
    """Lists models of which some fail and some never answer."""

    def __init__(self, models: Sequence[ModelIdentity]) -> None:
        super().__init__(MemoryNetwork())
        self.listed = list(models)
        self.serving: set[str] = set()
        self.damaged: set[str] = set()
        self.slow: set[str] = set()
        self.asked = list[str]()
        self.at_once = self.most_at_once = 0

    async def models(self) -> list[ModelIdentity]:
        return self.listed

    async def records(self, fingerprint: str, num_layers: int, *, within_s: float = 0.0) -> list[NodeRecord]:
        self.asked.append(fingerprint)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await asyncio.sleep(0)
            if fingerprint in self.slow:
                await asyncio.Event().wait()
            if fingerprint in self.damaged:
                raise RegistryError("the DHT did not answer within 15 s")
        finally:
            self.at_once -= 1
        found = next(one for one in self.listed if one.fingerprint == fingerprint)
        return [record(found)] if fingerprint in self.serving else [record(found, NodeState.JOINING)]


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MODEL_S", 0.05)


async def test_models_that_fail_or_stall_leave_the_others_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [model(number) for number in range(20)]
    registry = ManyModels(models)
    registry.damaged, registry.slow = {models[0].fingerprint}, {models[1].fingerprint}
    found = await read_models(registry, models)
    assert set(found.records) == {one.fingerprint for one in models[2:]}
    assert list(found.failed) == [models[0].fingerprint, models[1].fingerprint]
    assert registry.most_at_once <= listing.AT_ONCE
    monkeypatch.setattr(listing, "ALL_S", 0.12)
    registry.slow = {one.fingerprint for one in models[:19]}
    found = await read_models(registry, [models[19], *models[:19]])
    assert set(found.records) == {models[19].fingerprint}
    assert len(found.failed) == 19


async def test_status_shows_what_it_has_and_says_what_it_has_not() -> None:
    models = [model(number) for number in range(1_000)]
    registry = ManyModels(models)
    registry.damaged = {models[3].fingerprint}
    registry.serving = {models[40].fingerprint}
    out = Console(file=io.StringIO(), width=2_000, force_terminal=False)
    await show_status(registry, ShowStatus(("/ip4/192.0.2.1/tcp/1/p2p/Qm",)), out)
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    heads = [line for line in lines if "· fingerprint" in line]
    assert len(heads) == MODELS_SHOWN
    assert heads[0].startswith("model-40 ")
    assert len(set(registry.asked)) == MODELS_LOOKED_UP
    [failed] = [line for line in lines if "could not be read" in line]
    assert "model-3 " in failed
    assert "did not answer" in failed
    [hidden] = [line for line in lines if "not shown" in line]
    assert f"and {1_000 - 1 - MODELS_SHOWN - MODELS_NAMED} more" in hidden
    registry.asked.clear()
    await show_status(registry, ShowStatus(("x",), model="model-900"), out)
    assert registry.asked == [models[900].fingerprint]
    with pytest.raises(UnknownModel, match=f"and {1_000 - MODELS_NAMED} more"):
        cli._chosen(models, "nobody's")
    assert name_models(models[:2]).count("model-") == 2


async def test_the_page_keeps_every_model_but_the_damaged_one() -> None:
    models = [model(number) for number in range(4)]
    registry = ManyModels([*models, replace(models[2], name="other")])
    registry.damaged = {models[1].fingerprint}
    seen, states = dict[str, int](), list[LinkState]()

    def on_records(fingerprint: str, records: Sequence[NodeRecord], _at: float) -> None:
        seen[fingerprint] = len(records)

    directory = Directory(lambda: registry, on_records, lambda state, _: states.append(state), lambda all_, _: all_)
    for _ in range(3):
        await directory.look(registry)
    assert seen == {one.fingerprint: 1 for one in (models[0], models[2], models[3])}
    assert states == [LinkState.OK] * 3
