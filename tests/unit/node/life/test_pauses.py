"""The loop that lets a node pause and go on: in order, by itself, and whatever fails on the way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

import node.life.pauses
from node.life.autostart.pausing import PauseCause, PauseJudge
from node.life.pauses import Pauser, judge_of
from node.model.config import ServeConfig
from swarm.base.errors import NotEnoughSpace
from swarm.base.tasks import TaskScope

QUIET = ServeConfig(layers="auto", device="cpu")


class Stage:
    """A pauser whose cause the test sets, and a node that writes down what it is told."""

    def __init__(self) -> None:
        self.is_on: bool | None = False
        self.fails = 0
        self.done: list[str] = []
        self.said: list[str] = []
        self.changed = asyncio.Event()
        self.looks = 0
        judge = PauseJudge([PauseCause("a game", self.look, 0.0, 0.0)], lambda: float(self.looks))
        self.pauser = Pauser(judge, self.said.append, look_s=0.0, retry_s=0.0)

    def look(self) -> bool | None:
        self.looks += 1
        return self.is_on

    async def pause(self, reason: str) -> None:
        self.done.append(f"pause: {reason}")
        self.changed.set()

    async def resume(self) -> None:
        if self.fails:
            self.fails -= 1
            raise NotEnoughSpace("a game still has the memory")
        self.done.append("resume")
        self.changed.set()

    async def until_changed(self) -> None:
        async with asyncio.timeout(10):
            await self.changed.wait()
        self.changed.clear()


async def test_a_node_pauses_and_goes_on_by_itself() -> None:
    stage = Stage()
    async with TaskScope() as scope:
        scope.spawn(stage.pauser.keep_looking(stage))
        for _ in range(2):
            stage.is_on = True
            await stage.until_changed()
            assert stage.pauser.paused_for == "a game"
            stage.is_on = False
            await stage.until_changed()
    assert stage.done == ["pause: a game", "resume"] * 2
    assert stage.said[:2] == ["pauses: a game", "goes on after a pause: a game no more"]


async def test_a_node_that_cannot_go_on_yet_stays_paused_and_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    stage.fails, stage.is_on = 3, True
    async with TaskScope() as scope:
        scope.spawn(stage.pauser.keep_looking(stage))
        await stage.until_changed()
        stage.is_on = False
        await stage.until_changed()
    assert (stage.done, stage.fails) == (["pause: a game", "resume"], 0)
    assert caplog.messages == ["cannot go on yet after a pause: a game still has the memory"]


async def test_nothing_is_loaded_while_there_is_a_cause_at_the_start() -> None:
    stage = Stage()
    stage.is_on = True
    async with TaskScope() as scope:
        waiting = scope.spawn(stage.pauser.wait_until_free())
        async with asyncio.timeout(10):
            while stage.looks < 3:  # noqa: ASYNC110 - a sensor has no event
                await asyncio.sleep(0)
        assert not waiting.done()
        assert stage.pauser.paused_for == "a game"
        stage.is_on = False
        async with asyncio.timeout(10):
            await waiting
    assert stage.pauser.paused_for is None
    assert stage.said == ["waits, and loads nothing yet: a game"]


async def test_a_sensor_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()

    def fail() -> None:
        raise OSError("odd")

    stage.pauser._judge = PauseJudge([PauseCause("a game", fail, 0.0, 0.0)], lambda: 0.0)
    assert await stage.pauser._look() is None
    stage.pauser.paused_for = "a game"
    assert await stage.pauser._look() == "a game"
    assert caplog.messages == ["cannot see whether to pause: OSError: odd"]


async def test_without_wishes_nothing_is_looked_at() -> None:
    pauser = Pauser(judge_of(QUIET, lambda: 0.0), lambda _: None)
    await pauser.wait_until_free()
    await pauser.keep_looking(Stage())


@pytest.mark.parametrize(
    ("device", "reason"), [("cuda", "another program uses the GPU"), ("cpu", "other programs use the processor")]
)
def test_the_device_that_computes_is_the_one_that_others_may_want(
    device: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Share:
        def __init__(self, *about: object) -> None:
            asked.extend(one for one in about if isinstance(one, str))

        def look(self) -> bool:
            return True

    def props(_: object) -> object:
        return SimpleNamespace(uuid="a9e3eee8-60f2-bfd8-b29c-c9d760e5433e")

    monkeypatch.setattr(node.life.pauses, "pick_device", lambda _: torch.device(device))
    monkeypatch.setattr(torch.cuda, "get_device_properties", props)
    monkeypatch.setattr(node.life.pauses, "GpuShare", Share)
    monkeypatch.setattr(node.life.pauses, "CpuShare", Share)
    config = ServeConfig(layers="auto", pause_when_busy=True, quiet_hours="00:00-23:59")
    assert reason in str(judge_of(config, lambda: 0.0).look())
    assert asked == (["GPU-a9e3eee8-60f2-bfd8-b29c-c9d760e5433e"] if device == "cuda" else [])
