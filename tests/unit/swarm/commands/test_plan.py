"""`swarm plan`: what it prints, against records in memory."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm.base.cli import make_console
from swarm.base.errors import ConfigError, LayersError, UnknownModel
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import SpanBorders
from swarm.commands.plan import ShowPlan, show_plan
from swarm.directory.node_record import NodeRecord
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.unit.swarm.directory.test_coverage import JOIN, record

LINE = f"node serve org/demo --layers auto --join {JOIN[0]} --num-layers 4\n"


async def shown(command: ShowPlan, *spans: tuple[int, int]) -> str:
    network = MemoryNetwork()
    for start, end in spans:
        registry = MemoryRegistry(network)
        listed = replace(record(start, end), peer=registry.peer_id, expires_at=time.time() + 60, movable=True)
        await registry.announce(listed)
    out = io.StringIO()
    await show_plan(command, MemoryRegistry(network), make_console(out, soft_wrap=True))
    return " ".join(out.getvalue().replace("│", " ").split(" "))


def cells(text: str, title: str) -> list[str]:
    [line] = [line for line in text.splitlines() if title in line]
    return line.replace(title, "").split()


async def test_a_gap_is_filled_and_everything_is_told() -> None:
    text = await shown(ShowPlan(4, tuple(JOIN), ms=2.0), (0, 4), (8, 12))
    assert "org/demo: joining with 4 layers at 2.00 ms per layer" in text
    assert "chosen: layers 4…7 of 12" in text
    assert cells(text, "layers that nobody holds") == ["4-8", "none"]
    assert cells(text, "layers with one holder") == ["8", "12"]
    assert cells(text, "fewest holders of a layer") == ["0", "1"]
    assert cells(text, "weakest layer, sweeps/s") == ["0.00", "125.00"]
    assert LINE in text
    assert f"node serve org/demo --layers 4-8 --join {JOIN[0]}\n" in text


async def test_moves_that_would_follow_are_told() -> None:
    text = await shown(ShowPlan(6, tuple(JOIN)), (0, 6), (0, 6), (0, 6), (6, 12))
    assert "chosen: layers 6…11 of 12" in text
    assert cells(text, "layers with one holder") == ["6", "0"]
    moving = await shown(ShowPlan(1, tuple(JOIN)), (0, 6), (0, 6), (0, 6), (6, 12))
    assert "would move from layers 0…5 of 12 to " in moving
    assert "layers with one holder to 0" in moving


async def test_layers_that_use_each_others_keys_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def known(model: ModelIdentity) -> SpanBorders:
        asked.append(model.name)
        return SpanBorders((0, 1, 2, 3, 6, 10, 11), 12)

    monkeypatch.setattr("swarm.files.borders.known_borders", known)
    text = await shown(ShowPlan(4, tuple(JOIN), ms=2.0), (0, 3), (7, 12))
    assert asked == ["org/demo"]
    assert "chosen: layers 2…5 of 12" in text, "layers 3…6 would cut 6-10"
    assert "layers that use each other's keys stay on one machine: 3-6, 6-10\n" in text
    assert cells(text, "layers that nobody holds") == ["3-7", "6-7"]
    assert f"node serve org/demo --layers 2-6 --join {JOIN[0]}\n" in text
    monkeypatch.setattr("swarm.files.borders.known_borders", lambda _: SpanBorders((0, 4, 8), 12))
    with pytest.raises(LayersError, match="cut into 4 layers at least, and 2 were"):
        await shown(ShowPlan(2, tuple(JOIN)), (0, 4))


async def test_no_move_is_told_that_would_cut_layers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.files.borders.known_borders", lambda _: SpanBorders((0, 6, 11), 12))
    text = await shown(ShowPlan(1, tuple(JOIN)), (0, 6), (0, 6), (0, 6), (6, 12))
    assert "chosen: layer 11 of 12" in text
    assert "would move" not in text


async def test_a_plan_says_that_it_knows_no_borders_and_nothing_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "where this model may be cut is not known here"
    assert said in await shown(ShowPlan(4, tuple(JOIN)), (0, 4))
    monkeypatch.setattr("swarm.files.borders.known_borders", lambda _: SpanBorders(tuple(range(12)), 12))
    text = await shown(ShowPlan(4, tuple(JOIN)), (0, 4))
    assert said not in text
    assert "stay on one machine" not in text


async def test_mistakes_are_told() -> None:
    good = ShowPlan(4, tuple(JOIN))
    good.check()
    for wrong, part in (
        (replace(good, join=()), "--join"),
        (replace(good, num_layers=0), "--num-layers 0"),
        (replace(good, ms=0.0), "--ms 0"),
    ):
        with pytest.raises(ConfigError, match=part):
            wrong.check()
    with pytest.raises(LayersError, match="the model has 12 layers"):
        await shown(replace(good, num_layers=13), (0, 4))
    with pytest.raises(UnknownModel):
        await shown(good)


async def test_a_machine_that_was_killed_a_moment_ago_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def probe(records: Sequence[NodeRecord], **_: object) -> dict[PeerId, float]:
        return {one.peer: 1.0 for one in records if one.span.start == 0}

    monkeypatch.setattr("swarm.commands.plan.measure_delays", probe)
    text = await shown(ShowPlan(4, tuple(JOIN), ms=2.0), (0, 8), (8, 12))
    assert "chosen: layers 8…11 of 12" in text
    assert cells(text, "layers that nobody holds") == ["8-12", "none"]
