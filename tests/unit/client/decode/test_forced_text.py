"""What a grammar forces is a guess that no sweep waits long for, and that is given up where it is not taken."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

import client.decode.state as module
from client.decode.state import MAX_LATE, MAX_LEFT, ForcedText
from swarm.base.errors import ConfigError
from swarm.base.tasks import TaskScope


class Place:
    """Forces 7, 8 after every text, once it may answer. asked: how often it was."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.is_broken = False

    async def after(self, sequence: Sequence[int]) -> tuple[int, ...]:
        self.asked += 1
        await self.may_answer.wait()
        if self.is_broken:
            raise ConfigError("too large")
        return 7, 8


def forced_by(place: Place, scope: TaskScope) -> ForcedText:
    return ForcedText(cast("Any", place), scope.spawn)


async def test_an_answer_counts_for_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    place = Place()
    place.may_answer.set()
    async with TaskScope() as scope:
        forced = forced_by(place, scope)
        forced.ask((1,))
        assert forced.known((1,)) == ()
        assert await forced.awaited((1,)) == (7, 8)
        assert forced.known((1,)) == (7, 8)
        assert await forced.awaited((1, 7)) == ()


async def test_no_sweep_waits_for_a_slow_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One question is open at a time; its answer still counts where it comes while the sweep is away."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    place = Place()
    async with TaskScope() as scope:
        forced = forced_by(place, scope)
        for _ in range(MAX_LATE):
            forced.ask((1,))
            assert await forced.awaited((1,)) == ()
        monkeypatch.setattr(module, "PATIENCE_S", 1e6)
        assert await forced.awaited((1,)) == ()
        assert place.asked == 1
        place.may_answer.set()
        assert forced._task is not None
        await forced._task
        assert forced.known((1,)) == (7, 8)


async def test_a_target_that_writes_other_tokens_is_not_asked_about_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    place = Place()
    place.may_answer.set()
    taken, left = (7, 8, 1), (7, 9)
    text: tuple[int, ...] = (1,)
    async with TaskScope() as scope:
        forced = forced_by(place, scope)
        for came in [left] * (MAX_LEFT - 1) + [taken] + [left] * (MAX_LEFT + 2):
            forced.ask(text)
            await forced.awaited(text)
            text += came
    assert place.asked == 2 * MAX_LEFT


async def test_a_grammar_that_takes_too_much_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    place = Place()
    place.is_broken = True
    place.may_answer.set()
    async with TaskScope() as scope:
        forced = forced_by(place, scope)
        for _ in range(3):
            forced.ask((1,))
            assert await forced.awaited((1,)) == ()
    assert place.asked == 1
