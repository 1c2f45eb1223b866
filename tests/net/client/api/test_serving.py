"""The API as `client api` serves it, over real nodes, by OpenAI's client: exact texts, and what befalls a swarm."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from client import AsyncSwarm
from client.api.command import ServerOptions, listening, served_api
from client.api.sessions import SessionLimits
from client.api.swarm_backend import BackendLimits
from client.api.swarm_link import SwarmSource
from client.api.swarm_models import ModelSources
from client.base.options import GenerateOptions
from swarm.base.errors import ConfigError, RouteError
from swarm.demo import TARGET
from tests.in_process_swarm import in_process_swarm
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.raw_client import info
from tests.net.three_nodes import ThreeNodes, three_nodes, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAY: Any = [{"role": "user", "content": "Where is the captain?"}]
PROMPT = "It was a dark night"


@dataclass(frozen=True, slots=True)
class Served:
    """Three nodes, and the API over them."""

    nodes: ThreeNodes
    url: str
    client: openai.AsyncOpenAI


@asynccontextmanager
async def serving(source: SwarmSource, kept: int = 8) -> AsyncIterator[str]:
    options = ServerOptions(port=0, limits=BackendLimits(sessions=SessionLimits(kept)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with served_api(ModelSources([source]), options, taken) as url:
            yield url


async def until_answered(client: openai.AsyncOpenAI) -> None:
    """Wait until the API has found its swarm."""
    while True:
        try:
            await client.completions.create(model="", prompt="It", max_tokens=1)
        except openai.InternalServerError:
            await asyncio.sleep(0.05)
        else:
            return


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with three_nodes() as nodes:

        def connect() -> AbstractAsyncContextManager[AsyncSwarm]:
            return nodes.swarm.client()

        async with (
            serving(SwarmSource("demo-target", connect)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            await until_answered(client)
            yield Served(nodes, url, client)


async def test_a_completion_is_that_of_the_library(served: Served) -> None:
    alone = await served.nodes.client.generate(PROMPT, max_new_tokens=16, temperature=1.0, seed=3)
    answer = await served.client.completions.create(model="demo-target", prompt=PROMPT, seed=3)
    assert answer.choices[0].text == alone.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == alone.stats.prompt_tokens
    assert answer.usage.completion_tokens == len(alone.tokens)


async def test_a_streamed_answer_is_that_of_the_library(served: Served) -> None:
    options: GenerateOptions = {"max_new_tokens": 16, "temperature": 0.7, "seed": 4}
    async with served.nodes.client.chat(**options) as chat:
        alone = await chat.say("Where is the captain?")
    stream = await served.client.chat.completions.create(
        model="", messages=SAY, max_tokens=16, temperature=0.7, seed=4, stream=True
    )
    said = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(said) == alone.text
    assert len(said) > 3


async def test_choices_are_those_of_their_seeds(served: Served) -> None:
    answer = await served.client.completions.create(model="", prompt=PROMPT, seed=8, n=3, max_tokens=8)
    for number, choice in enumerate(answer.choices):
        alone = await served.nodes.client.generate(PROMPT, max_new_tokens=8, temperature=1.0, seed=8 + number)
        assert choice.text == alone.text


async def test_a_stop_string_cuts_exactly(served: Served) -> None:
    whole = await served.client.completions.create(model="", prompt=PROMPT, seed=3, max_tokens=24)
    text = whole.choices[0].text
    stop = text[16:20]
    stream = await served.client.completions.create(
        model="", prompt=PROMPT, seed=3, max_tokens=24, stop=[stop, "\0"], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_sweeps_behind_a_stream_spell_it(served: Served) -> None:
    stream = await served.client.chat.completions.create(
        model="", messages=SAY, max_tokens=12, seed=4, stream=True, extra_body={"canopy": {"trace": True}}
    )
    chunks = [chunk.model_dump() async for chunk in stream]
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    sweeps = [sweep for chunk in chunks for sweep in (chunk.get("canopy") or {}).get("sweeps", ())]
    assert "".join(token["text"] for sweep in sweeps for token in sweep["emitted"]) == said != ""
    assert all(len(sweep["hops"]) == 3 and sweep["hops"][0]["name"] for sweep in sweeps)


async def test_log_probabilities_spell_the_text(served: Served) -> None:
    answer = await served.client.chat.completions.create(
        model="", messages=SAY, seed=5, max_tokens=12, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    written = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert written.decode().startswith(choice.message.content or "?")
    for token in choice.logprobs.content:
        best = [top.logprob for top in token.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert len(best) == 3
        assert token.logprob <= best[0] <= 0


async def test_a_schema_is_kept(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "who": {"enum": ["a", "b"]}},
        "required": ["n", "who"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema, "strict": True}}
    for seed in (1, 2):
        answer = await served.client.chat.completions.create(
            model="", messages=SAY, seed=seed, max_tokens=200, response_format=wanted, temperature=0.5
        )
        assert answer.choices[0].finish_reason == "stop"
        read = json.loads(answer.choices[0].message.content or "")
        assert isinstance(read["n"], int)
        assert read["who"] in {"a", "b"}


async def test_a_tool_is_called_where_it_must_be(served: Served) -> None:
    parameters = {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 5}},
        "required": ["town"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    answer = await served.client.chat.completions.create(
        model="",
        messages=SAY,
        temperature=0,
        max_tokens=200,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"town"}


async def test_a_client_that_goes_away_frees_every_hop(served: Served) -> None:
    def connect() -> AbstractAsyncContextManager[AsyncSwarm]:
        return served.nodes.swarm.client()

    async def sessions() -> list[int]:
        return [(await info(node)).sessions for node in served.nodes.nodes]

    async with (
        serving(SwarmSource("demo-target", connect), kept=0) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        await until_answered(client)

        async def settled() -> bool:
            return len(set(await sessions())) == 1

        await until(settled)  # what earlier tests left ends hop by hop
        before = await sessions()
        extra = {"canopy": {"nodes": 0}}
        stream = await client.completions.create(
            model="", prompt=PROMPT, max_tokens=1_500, stream=True, extra_body=extra
        )
        async for _ in stream:
            break
        assert await sessions() == [number + 1 for number in before]
        await stream.close()

        async def freed() -> bool:
            return await sessions() == before

        await until(freed)


async def test_many_at_once_each_get_their_own_text(served: Served) -> None:
    async def one(seed: int) -> tuple[str, str]:
        answer = await served.client.completions.create(model="", prompt=PROMPT, seed=seed, max_tokens=8)
        alone = await served.nodes.client.generate(PROMPT, max_new_tokens=8, temperature=1.0, seed=seed)
        return answer.choices[0].text, alone.text

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(seed)) for seed in range(4)]
    for task in tasks:
        mine, alone = task.result()
        assert mine == alone


async def test_metrics_count_what_was_done(served: Served) -> None:
    async def values() -> dict[str, float]:
        async with httpx2.AsyncClient() as http:
            page = (await http.get(f"{served.url}/metrics")).text
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("canopy_api")]
        return {name: float(value) for name, value in lines}

    prompt = "Once upon a time there was a captain who had lost his boat in the dark of a long night. " * 3
    for _ in range(2):
        await served.client.completions.create(model="", prompt=prompt, max_tokens=4)
    after, own = await values(), 'model="demo-target"'
    assert after['canopy_api_requests_total{dialect="openai",status="200"}'] >= 2
    assert after[f'canopy_api_runs_total{{end="finished",{own}}}'] >= 2
    assert after[f"canopy_api_generated_tokens_total{{{own}}}"] >= 2
    assert after[f"canopy_api_reused_prompt_tokens_total{{{own}}}"] > 30
    assert (
        after[f"canopy_api_first_token_seconds_count{{{own}}}"]
        == after[f'canopy_api_runs_total{{end="finished",{own}}}']
    )
    assert (after["canopy_api_running"], after[f"canopy_api_model_found{{{own}}}"]) == (0, 1)


async def test_it_starts_before_the_swarm_and_finds_it_later(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.api.swarm_link.RETRY_S", 0.01)
    tries = 0

    def connect() -> AbstractAsyncContextManager[AsyncSwarm]:
        nonlocal tries
        tries += 1
        if tries == 3:
            return served.nodes.swarm.client()
        return served.nodes.swarm.client(registry=MemoryRegistry(MemoryNetwork()))

    async with (
        serving(SwarmSource("demo-target", connect, ("/ip4/10.0.0.1/tcp/1/p2p/QmPeer",))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        httpx2.AsyncClient() as http,
    ):
        answer = await http.post(f"{url}/v1/chat/completions", json={"messages": SAY})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        await until_answered(client)
        assert (await http.get(f"{url}/health")).status_code == 200


async def test_missing_layers_are_named_with_the_line_that_serves_them() -> None:
    def connect() -> AbstractAsyncContextManager[AsyncSwarm]:
        raise RouteError("nobody serves layers 4-8 of demo; this fills the gap: node serve demo --layers 4-8", [(4, 8)])

    source = SwarmSource("demo", connect, ("/ip4/10.0.0.1/tcp/1/p2p/QmPeer",))
    async with serving(source) as url, httpx2.AsyncClient() as http:
        body: dict[str, Any] = {}
        while body.get("missing_layers") != ["4-8"]:
            answer = await http.post(f"{url}/v1/chat/completions", json={"messages": SAY})
            body = answer.json()["error"]
        assert (answer.status_code, body["code"]) == (503, "layers_missing")
        assert "node serve demo --layers 4-8" in body["message"]
        card = (await http.get(f"{url}/health")).json()["model"]
        assert card["missing"] == ["4-8"]
        assert card["serve_line"] == "node serve demo --layers 4-8 --join /ip4/10.0.0.1/tcp/1/p2p/QmPeer"


async def test_a_gap_is_named_and_the_page_of_health_knows_it() -> None:
    async with in_process_swarm(TARGET, ["0-4", "8-12"]) as swarm:

        def connect() -> AbstractAsyncContextManager[AsyncSwarm]:
            return swarm.client(wait=0.0)

        async with serving(SwarmSource("demo-target", connect)) as url, httpx2.AsyncClient() as http:
            card: dict[str, Any] = {}
            while not card.get("fingerprint"):
                card = (await http.get(f"{url}/health")).json()["model"]
            assert (card["is_complete"], card["missing"]) == (False, ["4-8"])
            assert card["serve_line"].startswith("node serve demo-target --layers 4-8")
            answer = await http.post(f"{url}/v1/chat/completions", json={"messages": SAY})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["missing_layers"]) == (503, "layers_missing", ["4-8"])
            assert "node serve" in error["message"]
            assert (await http.get(f"{url}/v1/models")).json()["data"][0]["health"]["missing_layers"] == ["4-8"]


async def test_a_model_that_cannot_be_ends_the_command() -> None:
    def connect() -> AbstractAsyncContextManager[AsyncSwarm]:
        raise ConfigError("no such folder")

    with pytest.raises(ConfigError, match="no such folder"):
        async with serving(SwarmSource("demo", connect)):
            await asyncio.Event().wait()


async def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1 port {port} \(.*\); choose another"):
            listening("127.0.0.1", port)
