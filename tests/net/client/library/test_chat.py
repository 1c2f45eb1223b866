"""Conversations over real nodes: the session is kept, only new tokens travel, and nothing that happens loses a turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import pytest
import pytest_asyncio

import client.library.chat
from client import Message
from client.base.options import GenerateOptions
from client.library.chat import Conversation
from client.library.session import SessionOpener
from swarm.base.errors import ConfigError, ContextFull, GenerationInterrupted, RouteError
from swarm.protocol.messages import Counters
from swarm.routing.route import Route
from tests.net.raw_client import info
from tests.net.three_nodes import ThreeNodes, grown, three_nodes, until_freed

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS: GenerateOptions = {"temperature": 0.8, "seed": 5, "max_new_tokens": 12}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[ThreeNodes]:
    async with three_nodes() as running:
        yield running


async def counters(running: ThreeNodes) -> list[Counters]:
    return [(await info(node)).counters for node in running.nodes]


async def sessions(running: ThreeNodes) -> list[int]:
    return [(await info(node)).sessions for node in running.nodes]


def prompt_of(running: ThreeNodes, messages: tuple[Message, ...]) -> tuple[int, ...]:
    conversation = Conversation(running.client.target.tokenizer)
    for message in messages:
        conversation.add(message.role, message.content)
    return conversation.plan().tokens


async def test_the_stop_string_that_ended_an_answer_is_said(running: ThreeNodes) -> None:
    whole = await running.client.generate("It was a dark night", **OPTIONS)
    assert whole.stop_string == ""
    stop = whole.text[3:6]
    stopping: GenerateOptions = {**OPTIONS, "stop": ["never said", stop]}
    cut = await running.client.generate("It was a dark night", **stopping)
    assert (cut.text, cut.finish_reason, cut.stop_string) == (whole.text[: whole.text.find(stop)], "stop", stop)


THINKS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<think>{# </think> #}"


async def test_thoughts_come_apart_from_the_text_and_leave_the_history(
    running: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.client.target.tokenizer, "chat_template", THINKS)
    async with running.client.chat(**OPTIONS) as chat:
        pieces = [piece async for piece in chat.stream("Where is the captain?")]
        assert chat.history == (Message("user", "Where is the captain?"), Message("assistant", ""))
        alone = await running.client.generate(prompt_of(running, tuple(chat.history[:1])), **OPTIONS)
    assert "".join(piece.reasoning for piece in pieces) == alone.text.strip()
    assert all(not piece.text for piece in pieces)
    result = pieces[-1].result
    assert result is not None
    assert (result.text, result.tokens) == ("", alone.tokens)


@pytest.mark.parametrize("nodes", [0, 16])
async def test_only_new_tokens_travel(nodes: int, running: ThreeNodes) -> None:
    options: GenerateOptions = {**OPTIONS, "nodes": nodes}
    async with running.client.chat(**options) as chat:
        first = await chat.say("Where is the captain?")
        assert await sessions(running) == [1, 1, 1]
        before = await counters(running)
        second = await chat.say("And the boat?")
        stats = second.stats
        assert stats.prompt_tokens > stats.reused_tokens >= first.stats.prompt_tokens + len(first.tokens) - 2
        sent = stats.prompt_tokens - stats.reused_tokens - 1 + sum(1 + sweep.nodes for sweep in stats.sweeps)
        after = await counters(running)
        assert grown(before, after, "rows_in_forwards") == grown(before, after, "tree_nodes") == [sent] * 3
        assert await sessions(running) == [1, 1, 1]
    await until_freed(running.nodes)


async def test_every_answer_is_that_of_a_fresh_session(running: ThreeNodes) -> None:
    plain: GenerateOptions = {**OPTIONS, "nodes": 0}
    async with running.client.chat(**OPTIONS) as chat:
        for text in ("Where is the captain?", "And the boat?", "Why?"):
            result = await chat.say(text)
            prompt = prompt_of(running, tuple(chat.history[:-1]))
            alone = await running.client.generate(prompt, **plain)
            assert (result.tokens, result.text) == (alone.tokens, alone.text)
            assert chat.history[-1] == Message("assistant", result.text)
        assert result.stats.reused_tokens > result.stats.prompt_tokens / 2


async def test_a_left_answer_stays_as_far_as_it_was_read_and_its_session_goes_on(running: ThreeNodes) -> None:
    async with running.client.chat(**OPTIONS) as chat:
        await chat.say("Where is the captain?")
        read = ""
        async with aclosing(chat.stream("Tell me all of it.", max_new_tokens=200)) as pieces:
            async for piece in pieces:
                read += piece.text
                if len(read) > 20:
                    break
        assert chat.history[-1] == Message("assistant", read)
        assert chat.stats is not None
        assert (chat.stats.seed, chat.stats.tokens > 0) == (5, True), "of what was stopped"
        result = await chat.say("Go on.")
        assert chat.stats == result.stats
        assert result.stats.reused_tokens > result.stats.prompt_tokens - 12, "the kept session was used"
        prompt = prompt_of(running, tuple(chat.history[:-1]))
        alone = await running.client.generate(prompt, **OPTIONS)
        assert result.tokens == alone.tokens


async def test_a_session_that_ended_meanwhile_is_replayed_when_it_is_needed(running: ThreeNodes) -> None:
    async with running.client.chat(**OPTIONS) as chat:
        await chat.say("Where is the captain?")
        for one in running.nodes:
            one.sessions.close_all("idle for too long")
        await until_freed(running.nodes)
        before = await counters(running)
        result = await chat.say("And the boat?")
        assert result.stats.reused_tokens > 0
        assert result.stats.repairs
        assert grown(before, await counters(running), "restores") == [1, 1, 1]
    async with running.client.chat(**OPTIONS) as chat:
        await chat.say("Where is the captain?")
        assert (await chat.say("And the boat?")).text == result.text


async def test_a_full_window_is_opened_again_with_room_for_later(
    running: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.library.chat, "FIRST_WINDOW_TOKENS", 32)
    async with running.client.chat(**OPTIONS) as chat:
        reused = [(await chat.say("Where is it?")).stats.reused_tokens for _ in range(6)]
        assert 1 < reused.count(0) < 5
        assert reused[-1] > 0


async def test_a_broken_chain_keeps_the_history_and_the_next_turn_works(
    running: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_way_around(*_: object, **__: object) -> Route:
        raise RouteError("the node leaves", ())

    monkeypatch.setattr(SessionOpener, "_detour", no_way_around)
    monkeypatch.setattr(running.client, "_opener", replace(running.client._opener, wait_s=0.0))
    async with running.client.chat(**OPTIONS) as chat:
        await chat.say("Where is the captain?")
        read = ""

        async def cut_midway() -> None:
            nonlocal read
            async for piece in chat.stream("Tell me all of it.", max_new_tokens=200):
                read += piece.text
                running.nodes[1].sessions.close_all("the node leaves")

        with pytest.raises(GenerationInterrupted, match="the node leaves"):
            await cut_midway()
        assert read
        assert chat.history[-1] == Message("assistant", read)
        assert (await chat.say("Go on.")).text


@pytest.mark.parametrize("given", [None, 5, [1.5], ["It"]])
async def test_what_is_no_prompt_is_refused_by_name(given: object, running: ThreeNodes) -> None:
    with pytest.raises(ConfigError, match="prompt: give text, or token ids"):
        await running.client.generate(cast("str", given))


async def test_what_is_no_text_is_refused_by_name(running: ThreeNodes) -> None:
    with pytest.raises(ConfigError, match="prompt: is not valid text"):
        await running.client.generate("x\ud83d")
    async with running.client.chat(**OPTIONS) as chat:
        with pytest.raises(ConfigError, match="prompt: is not valid text"):
            await chat.say("x\ud83d")
        assert not chat.history


async def test_what_cannot_be_leaves_the_conversation_as_it_was(running: ThreeNodes) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens"):
        running.client.chat(max_new_tokens=0)
    async with running.client.chat(**OPTIONS) as chat:
        await chat.say("Where is the captain?")
        before = tuple(chat.history)
        with pytest.raises(ConfigError, match="temperature"):
            await chat.say("And the boat?", temperature=-1.0)
        with pytest.raises(ContextFull, match="clear it and begin again"):
            await chat.say("word " * (running.client.target.max_positions or 0))
        assert tuple(chat.history) == before
        assert (await chat.say("And the boat?")).stats.reused_tokens > 0
        await chat.clear()
        assert not chat.history


async def test_near_the_end_of_the_context_the_answer_gets_what_is_left(running: ThreeNodes) -> None:
    limit = running.client.target.max_positions
    assert limit is not None
    async with running.client.chat(**OPTIONS) as chat:
        words = "word " * (limit - 16)
        room = limit - len(prompt_of(running, (Message("user", words),)))
        assert 0 < room < 20
        result = await chat.say(words, max_new_tokens=100)
        assert len(result.tokens) <= room
