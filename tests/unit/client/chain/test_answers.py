"""Waiting for an answer, for some time at most."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from client.chain.answers import Answers, PickCheck
from swarm.base.errors import (
    HopClosed,
    HopError,
    HopMisbehaved,
    PicksRefuted,
    RemoteProtocolError,
    SwarmError,
    Unreachable,
)
from swarm.base.ids import PeerId, TreeNodeId
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.link.dial import Connection
from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import RepliesRequest, Reply, RouteHop, Sweep

if TYPE_CHECKING:
    from swarm.compute.grammars import GrammarPlace
    from swarm.protocol.session import SessionState

TAIL = RouteHop(PeerId("QmTail"), Span(4, 12))
SWEEP = Sweep(1, 0, TreeNodeId(0), (7, 8), (None, TreeNodeId(0)), TreeNodeId(0), 3, 0)
FIRST = Reply(1, 3, ((TreeNodeId(0), 5), (TreeNodeId(1), 6)), ())


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


def nobody() -> Connection:
    raise AssertionError("no stream is opened here")


@pytest.mark.parametrize(
    ("again", "is_blamed"),
    [
        pytest.param(FIRST, False, id="the same"),
        pytest.param(Reply(1, 3, ((TreeNodeId(1), 6),), ()), False, id="the same, where a node died"),
        pytest.param(Reply(1, 3, ((TreeNodeId(0), 5), (TreeNodeId(1), 9)), ()), True, id="another pick"),
        pytest.param(Reply(1, 4, ((TreeNodeId(0), 5), (TreeNodeId(1), 9)), ()), False, id="computed anew"),
    ],
)
async def test_a_tail_that_takes_a_pick_back_is_left_and_its_first_word_counts(again: Reply, is_blamed: bool) -> None:
    troubles: list[SwarmError] = []
    key = SessionKey.fresh()
    answers = Answers(key, troubles.append)
    async with TaskScope() as scope:
        stream = answers.follow(scope, [(TAIL, nobody)], RepliesRequest(key.session, 3), list)
        answers.expect(SWEEP)
        answers._hear(stream, FIRST)
        answers._hear(stream, again)
        answers.close()
    assert (await answers.next(1.0, lambda: False)).reply == FIRST
    assert not answers.has_next, "what comes again is no second answer"
    assert [type(error) for error in troubles] == [HopMisbehaved] * is_blamed
    assert stream.is_broken == is_blamed
    if is_blamed:
        assert "picked 6 before" in str(troubles[0])


def gone() -> Connection:
    raise Unreachable(TAIL.peer, str(TAIL.span), "is not dialled here")


async def test_what_waits_for_answers_hears_of_a_refuted_tail_first_and_the_tail_is_heard_no_more() -> None:
    key = SessionKey.fresh()
    answers = Answers(key, lambda _: None)
    async with TaskScope() as scope:
        stream = answers.follow(scope, [(TAIL, gone)], RepliesRequest(key.session, 3), list)
        answers.expect(SWEEP)
        answers._hear(stream, FIRST)
        refuted = PicksRefuted(TAIL.peer, str(TAIL.span), "picked otherwise")
        answers.refute(refuted)
        answers.expect(replace(SWEEP, sequence=2))
        answers._hear(stream, replace(FIRST, sequence=2))
        with pytest.raises(PicksRefuted):
            await answers.next(1.0, lambda: False)
        assert (await answers.next(1.0, lambda: False)).reply == FIRST, "an answered sweep is accounted for"
        assert not answers.has_next

        async def refute() -> None:
            await asyncio.sleep(0)
            answers.refute(refuted)

        with pytest.raises(PicksRefuted):
            await asyncio.gather(answers.next(5.0, lambda: False), refute())
        answers.refute(refuted)
        answers.forget_refuted()
        with pytest.raises(HopError):  # nothing is left of it
            await answers.next(0.01, lambda: False)
        answers.close()


def test_no_pick_is_padding() -> None:
    check = PickCheck(7, lambda error: None)
    check.check(FIRST)
    with pytest.raises(RemoteProtocolError, match="token 7 after node 1, which the tokenizer does not have"):
        check.check(replace(FIRST, picks=((TreeNodeId(0), 6), (TreeNodeId(1), 7))))


async def test_a_grammar_that_the_client_cannot_follow_ends_the_text() -> None:
    """Else a tail that ignores it would be believed."""

    class Place:
        async def masks(self, nodes: object, state: object) -> None:
            raise RemoteProtocolError("lease", "takes too much")

    ended: list[SwarmError] = []
    check = PickCheck(7, ended.append)
    check.follow(cast("GrammarPlace", Place()))
    async with TaskScope() as scope:
        check.expect(SWEEP, cast("SessionState", None), scope)
        task = check.awaited(1)
        assert task is not None
        await task
    assert [str(error) for error in ended] == ["lease: takes too much"]
