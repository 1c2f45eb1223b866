"""The backend over real nodes: exact texts, kept sessions, readers that go away, layers that are missing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rich.console import Console

import client.api.sessions
from client import AsyncSwarm
from client.api.backend import AnswerEvent, ApiCaller, Begun, ChatJob, Delta, Finished, Job, TextJob
from client.api.openai.fields import choice_grammar, schema_grammar, written_grammar
from client.api.sessions import LentSession
from client.api.swarm_backend import BackendLimits, SwarmBackend
from client.api.swarm_link import SwarmSource
from client.base.options import GenerateOptions, Grammar
from client.decode.state import GenerationState
from client.dialogue.messages import ContentDelta, Message
from node.model.in_class import load_in_class
from swarm.base.errors import ConfigError, ContextFull
from swarm.base.tasks import TaskScope
from swarm.commands.verify import VerifyText, verify_text
from swarm.demo import TARGET
from swarm.trust.claims import read_claims
from swarm.trust.verify import AGREES
from tests.net.raw_client import info
from tests.net.three_nodes import ThreeNodes, prompt, three_nodes, until_freed

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS: GenerateOptions = {"temperature": 0.8, "seed": 5, "max_new_tokens": 12}
ME = ApiCaller("me")
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0},
        "b": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Running:
    """Three nodes and a backend over them."""

    nodes: ThreeNodes
    backend: SwarmBackend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with three_nodes() as nodes, TaskScope() as scope:

        def connect() -> AbstractAsyncContextManager[AsyncSwarm]:
            return nodes.swarm.client()

        backend = SwarmBackend(SwarmSource("demo", connect), scope, BackendLimits())
        scope.spawn(backend.link.keep())
        await backend.link.tried.wait()
        yield Running(nodes, backend)


async def events(backend: SwarmBackend, job: Job, caller: ApiCaller = ME) -> list[AnswerEvent]:
    async with aclosing(backend.run(job, caller)) as run:
        return [event async for event in run]


def chat(text: str, **options: object) -> ChatJob:
    return ChatJob([Message("user", text)], GenerateOptions(**{**OPTIONS, **options}))  # type: ignore[typeddict-item]


def text_of(found: list[AnswerEvent]) -> str:
    parts = [part for event in found if isinstance(event, Delta) for part in event.parts]
    return "".join(part.text for part in parts if isinstance(part, ContentDelta))


def end_of(found: list[AnswerEvent]) -> Finished:
    assert isinstance(found[-1], Finished)
    return found[-1]


async def test_texts_are_those_of_the_library(running: Running) -> None:
    found = await events(running.backend, TextJob("It was a dark night", OPTIONS))
    alone = await running.nodes.client.generate("It was a dark night", **OPTIONS)
    assert isinstance(found[0], Begun)
    assert text_of(found) == alone.text == end_of(found).result.text
    assert end_of(found).result.tokens == alone.tokens
    assert end_of(found).reason == "length"


async def test_a_request_that_comes_before_the_swarm_is_found_waits_for_it(running: Running) -> None:
    async with TaskScope() as scope:
        backend = SwarmBackend(SwarmSource("demo", running.nodes.swarm.client), scope)
        scope.spawn(backend.link.keep())
        assert end_of(await events(backend, TextJob("It was", OPTIONS))).reason == "length"


async def test_an_answer_is_the_conversations(running: Running) -> None:
    found = await events(running.backend, chat("Where is the captain?"))
    async with running.nodes.client.chat(**OPTIONS) as conversation:
        said = await conversation.say("Where is the captain?")
    assert text_of(found) == said.text
    assert running.backend.count(chat("Where is the captain?")) == said.stats.prompt_tokens


async def test_a_shared_beginning_does_not_travel_again(running: Running) -> None:
    prompt = "Once upon a time there was a captain who had lost his boat in the dark of a long night at sea. " * 3
    first = end_of(await events(running.backend, TextJob(prompt + "He", OPTIONS))).result.stats
    second = end_of(await events(running.backend, TextJob(prompt + "She", OPTIONS))).result
    assert second.stats.reused_tokens >= first.prompt_tokens - 2
    alone = await running.nodes.client.generate(prompt + "She", **OPTIONS)
    assert second.tokens == alone.tokens


async def test_a_proved_answer_has_a_session_of_its_own(running: Running, tmp_path: Path) -> None:
    prompt = "Once upon a time there was a captain who had lost his boat in the dark of a long night at sea. " * 3
    sessions = running.backend.link.sessions
    assert sessions is not None
    alone = end_of(await events(running.backend, TextJob(prompt, OPTIONS))).result
    idle, opened = sessions.idle, sessions.opened
    options: GenerateOptions = {**OPTIONS, "proof": "rows"}
    found = end_of(await events(running.backend, TextJob(prompt, options))).result
    assert found.tokens == alone.tokens
    assert found.stats.reused_tokens == 0, "machines sign nothing of rows that they held before"
    assert (sessions.idle, sessions.opened) == (idle, opened + 1)
    assert found.proof is not None
    assert (found.proof.problems, found.proof.unsigned) == ((), ())
    assert found.proof.signed_tokens == len(alone.tokens)
    file = tmp_path / "proof"
    file.write_bytes(found.proof.data)
    console = Console(record=True, width=200)
    assert verify_text(VerifyText(file, str(TARGET)), console, read_claims, load_in_class) == AGREES, (
        console.export_text()
    )


async def test_a_long_text_goes_on_in_a_larger_window(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.api.sessions, "FIRST_WINDOW_TOKENS", 16)
    backend = running.backend
    assert backend.link.sessions is not None
    await backend.link.sessions.clear()
    opened = backend.link.sessions.opened
    options: GenerateOptions = {"temperature": 0.8, "seed": 6, "max_new_tokens": 36}
    found = await events(backend, TextJob("It was", options))
    alone = await running.nodes.client.generate("It was", **options)
    assert end_of(found).result.tokens == alone.tokens
    assert text_of(found) == alone.text
    assert backend.link.sessions.opened - opened >= 3, "windows of 16, 32 and 38 tokens"
    assert end_of(found).result.stats.tokens == len(alone.tokens)


async def test_a_session_after_a_full_one_has_room_for_trees(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.api.sessions, "FIRST_WINDOW_TOKENS", 16)
    backend, asked = running.backend, []
    sessions = backend.link.sessions
    assert sessions is not None
    await sessions.clear()
    opened = sessions._open

    async def recorded(window_tokens: int, state: GenerationState, owner: str) -> LentSession:
        asked.append((window_tokens, state.nodes))
        return await opened(window_tokens, state, owner)

    monkeypatch.setattr(sessions, "_open", recorded)
    ids = prompt(3, 48)
    await events(backend, TextJob(ids[:20], {**OPTIONS, "max_new_tokens": 2}))
    await events(backend, TextJob(ids, {**OPTIONS, "max_new_tokens": 2}))
    (first, nodes), (second, others) = asked
    assert (first, second) == (32, 128)
    assert nodes == others > 0


async def test_turns_with_short_answers_go_on_where_the_last_one_ended(running: Running) -> None:
    backend, ids = running.backend, prompt(5, 180)
    assert backend.link.sessions is not None
    await backend.link.sessions.clear()
    options: GenerateOptions = {**OPTIONS, "max_new_tokens": 8}
    await events(backend, TextJob(ids[:90], options))
    for length in (120, 150, 180):
        turn = end_of(await events(backend, TextJob(ids[:length], options))).result
        assert turn.stats.reused_tokens >= length - 30 - 1
    alone = await running.nodes.client.generate(ids, **options)
    assert turn.tokens == alone.tokens


async def test_one_key_learns_nothing_of_what_another_asked(running: Running) -> None:
    backend, ids = running.backend, prompt(6, 58)
    assert backend.link.sessions is not None
    await backend.link.sessions.clear()

    async def reused(key: str) -> int:
        found = [event async for event in backend.run(TextJob(ids, OPTIONS), ApiCaller(key))]
        return end_of(found).result.stats.reused_tokens

    assert [await reused(key) for key in ("one", "another", "one")] == [0, 0, 57]


async def test_a_reader_that_goes_away_frees_every_hop(running: Running) -> None:
    backend = running.backend
    assert backend.link.sessions is not None
    await backend.link.sessions.clear()
    run = backend.run(TextJob("It was a dark night", {**OPTIONS, "max_new_tokens": 2_000, "nodes": 0}), ME)
    async with aclosing(run):
        assert isinstance(await anext(run), Begun)
        assert isinstance(await anext(run), Delta)
        assert [(await info(node)).sessions for node in running.nodes.nodes] == [1, 1, 1]
    async with asyncio.timeout(5):
        await until_freed(running.nodes.nodes)
    assert backend.queue.running == 0


async def test_a_kept_session_that_ended_meanwhile_is_opened_again(running: Running) -> None:
    backend, prompt = running.backend, "The old captain looked at the sea and at his boat. " * 6
    await events(backend, TextJob(prompt, OPTIONS))
    for node in running.nodes.nodes:
        node.sessions.close_all("idle for too long")
    await until_freed(running.nodes.nodes)
    found = await events(backend, TextJob(prompt, OPTIONS))
    alone = await running.nodes.client.generate(prompt, **OPTIONS)
    assert end_of(found).result.tokens == alone.tokens


async def test_what_cannot_be_is_refused_before_it_waits(running: Running) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        await events(running.backend, TextJob("It was", {"temperature": -1.0}))
    limit = running.nodes.client.target.max_positions or 0
    with pytest.raises(ContextFull, match="maximum context length"):
        await events(running.backend, TextJob([5] * limit, {"max_new_tokens": 1}))
    assert running.backend.queue.running == 0


async def test_a_limit_is_cut_to_what_the_context_leaves(running: Running) -> None:
    limit = running.nodes.client.target.max_positions or 0
    options: GenerateOptions = {"temperature": 0.8, "seed": 5, "max_new_tokens": 10**12, "end_tokens": ()}
    end = end_of(await events(running.backend, TextJob([5] * (limit - 4), options)))
    assert (end.reason, end.result.stats.tokens) == ("length", 4)


async def test_the_checkpoints_sampling_holds_where_a_request_says_nothing(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request, then checkpoint, then what the dialect takes otherwise."""
    defaults = running.backend.link.model().swarm.factory.defaults
    least: GenerateOptions = {"seed": 5, "max_new_tokens": 12}

    async def text(options: GenerateOptions) -> str:
        return text_of(await events(running.backend, TextJob("It was", options)))

    async def alone(**options: Any) -> str:  # noqa: ANN401
        result = await running.nodes.client.generate("It was", **{**least, **options})
        return result.text

    plain = await text(least)
    monkeypatch.setitem(defaults, "temperature", 0.7)
    monkeypatch.setitem(defaults, "top_k", 3)
    monkeypatch.setitem(defaults, "repetition_penalty", 1.3)
    own = await text(least)
    asked = await text({**least, "temperature": 0.9, "top_k": 0, "repetition_penalty": 1.0})
    monkeypatch.undo()
    assert plain == await alone(temperature=1.0)
    assert own == await alone(temperature=0.7, top_k=3, repetition_penalty=1.3)
    assert asked == await alone(temperature=0.9)
    assert len({plain, own, asked}) == 3, "the options tell"


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (choice_grammar(["yes, it is.", "no"]), r"yes, it is\.|no"),
        (written_grammar('root ::= "a" [0-9]{1,3} ("x" | "y")', "grammar"), r"a\d{1,3}[xy]"),
        (schema_grammar(SCHEMA), r'\{"a":\d+,"b":\[(true|false)(,(true|false)){1,2}\]\}'),
    ],
    ids=["choice", "GBNF", "compact JSON"],
)
async def test_a_text_is_what_a_field_says(running: Running, grammar: Grammar, pattern: str) -> None:
    for seed in range(3):
        options: GenerateOptions = {"temperature": 1.0, "seed": seed, "max_new_tokens": 200, "grammar": grammar}
        end = end_of(await events(running.backend, chat("Is it?", **options)))
        assert end.reason == "stop"
        assert re.fullmatch(pattern, end.result.text), end.result.text


async def test_ends_of_text_are_those_that_were_asked_for(running: Running) -> None:
    options: GenerateOptions = {"temperature": 1.0, "seed": 1, "max_new_tokens": 40, "end_tokens": ()}
    whole = end_of(await events(running.backend, TextJob("It was", options))).result
    assert (whole.finish_reason, len(whole.tokens)) == ("length", 40)
    stop = whole.tokens[20]
    cut = end_of(await events(running.backend, TextJob("It was", {**options, "stop_tokens": (stop,)})))
    assert cut.reason == "stop"
    assert cut.result.tokens == whole.tokens[: whole.tokens.index(stop) + 1]


async def test_a_bad_regex_is_told_with_its_cause(running: Running) -> None:
    with pytest.raises(ConfigError, match="unclosed group"):
        await events(running.backend, TextJob("It was", {"grammar": Grammar("regex", "(" + "a" * 300)}))


async def test_the_card_tells_the_context(running: Running) -> None:
    card = await running.backend.card()
    assert (card.is_complete, card.missing, card.serve_line) == (True, (), "")
    assert card.context_length == running.nodes.client.target.max_positions
