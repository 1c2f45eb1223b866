"""Waiting for an answer, for some time at most."""

from __future__ import annotations

import asyncio

import pytest

from client.chain.answers import Answers
from swarm.errors import HopClosed, HopError
from swarm.protocol.authority import SessionKey


async def test_who_is_idle_hears_an_answer_at_once_and_waits_for_the_next_one_again() -> None:
    answers = Answers(SessionKey.fresh(), lambda _: None)
    await answers.idle(0.01)
    assert not answers.has_next, "the time was over"
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(answers.idle(60))
        await asyncio.sleep(0)
        answers.give_up(HopClosed("QmPeer", "0-4", "went away"))
    async with asyncio.timeout(5):
        await answers.idle(60)
    assert answers.has_next
    with pytest.raises(HopError, match="went away"):
        await answers.next(1.0, lambda: False)
    with pytest.raises(TimeoutError):  # what was heard is no news
        async with asyncio.timeout(0.01):
            await answers.idle(60)
