"""Every dialect over real nodes: a seed gives the same text in each, and grammars reach the tail."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from client import AsyncSwarm
from client.api.app import build_app
from client.api.swarm_link import SwarmSource
from client.api.swarm_models import ModelSources, SwarmModels
from swarm.base.tasks import TaskScope
from tests.net.three_nodes import three_nodes

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI = [{"role": "user", "content": "Once"}]
SCHEMA = {
    "type": "object",
    "properties": {"is_old": {"type": "boolean"}},
    "required": ["is_old"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the application over three nodes."""
    async with three_nodes() as nodes, TaskScope() as scope:

        def connect() -> AbstractAsyncContextManager[AsyncSwarm]:
            return nodes.swarm.client()

        models = SwarmModels(ModelSources([SwarmSource("demo", connect)]), scope)
        await models.backend("")
        transport = httpx2.ASGITransport(build_app(models))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as made:
            yield made


async def ask(client: httpx2.AsyncClient, path: str, **body: Any) -> dict[str, Any]:  # noqa: ANN401
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def test_a_seed_gives_one_text(client: httpx2.AsyncClient) -> None:
    name = (await client.get("/v1/models")).json()["data"][0]["id"]
    sampling = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5}
    said = await ask(client, "/v1/chat/completions", model=name, messages=HI, max_tokens=8, **sampling)
    text = said["choices"][0]["message"]["content"]
    response = await ask(client, "/v1/responses", model=name, input="Once", max_output_tokens=8, **sampling)
    assert response["output"][0]["content"][0]["text"] == text
    options = {**sampling, "num_predict": 8}
    chat = await ask(client, "/api/chat", model=f"{name}:latest", messages=HI, options=options, stream=False)
    assert chat["message"]["content"] == text
    generated = await ask(client, "/api/generate", model=name, prompt="Once", options=options, stream=False)
    assert generated["response"] == text
    greedy = await ask(client, "/v1/messages", model=name, messages=HI, max_tokens=8, temperature=0)
    chosen = await ask(client, "/v1/responses", model=name, input="Once", max_output_tokens=8, temperature=0)
    assert greedy["content"][0]["text"] == chosen["output"][0]["content"][0]["text"]
    assert greedy["stop_reason"] == "max_tokens"
    counted = await ask(client, "/v1/messages/count_tokens", model=name, messages=HI)
    assert counted["input_tokens"] == chosen["usage"]["input_tokens"]


async def test_schemas_are_kept(client: httpx2.AsyncClient) -> None:
    name = (await client.get("/v1/models")).json()["data"][0]["id"]
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    options = {"num_predict": 60, "temperature": 0}
    response = await ask(client, "/v1/responses", input="Once", text=text, temperature=0, max_output_tokens=60)
    message = await ask(
        client, "/v1/messages", model=name, messages=HI, output_config=config, temperature=0, max_tokens=60
    )
    chat = await ask(client, "/api/chat", model=name, messages=HI, format=SCHEMA, options=options, stream=False)
    texts = [response["output"][0]["content"][0]["text"], message["content"][0]["text"], chat["message"]["content"]]
    assert [type(json.loads(written)["is_old"]) for written in texts] == [bool, bool, bool]
    assert [response["status"], message["stop_reason"], chat["done_reason"]] == ["completed", "end_turn", "stop"]


async def test_a_limit_beyond_the_context_is_one(client: httpx2.AsyncClient) -> None:
    name = (await client.get("/v1/models")).json()["data"][0]["id"]
    asked = {"max_tokens": 100_000, "temperature": 0, "stop_sequences": ["e"]}
    told = await ask(client, "/v1/messages", model=name, messages=HI, **asked)
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "e")


async def test_a_tool_that_must_be_called_is_called(client: httpx2.AsyncClient) -> None:
    """Also where a session is kept whose last text followed the same grammar: it begins anew."""
    name = (await client.get("/v1/models")).json()["data"][0]["id"]
    tool = {"name": "age", "description": "of a thing", "input_schema": SCHEMA, "strict": True}
    choice = {"type": "tool", "name": "age", "disable_parallel_tool_use": True}
    asked = {"tools": [tool], "tool_choice": choice, "max_tokens": 90, "temperature": 0}
    message = await ask(client, "/v1/messages", model=name, messages=HI, **asked)
    function = {"type": "function", "name": "age", "description": "of a thing", "parameters": SCHEMA, "strict": True}
    asked = {"tools": [function], "tool_choice": {"type": "function", "name": "age"}, "parallel_tool_calls": False}
    response = await ask(client, "/v1/responses", input="Once", max_output_tokens=90, temperature=0, **asked)
    assert response["usage"]["input_tokens_details"]["cached_tokens"] > 0
    (call,) = response["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "age", "completed")
    assert isinstance(json.loads(call["arguments"])["is_old"], bool)
    assert message["content"][0]["input"] == json.loads(call["arguments"])
    assert message["stop_reason"] == "tool_use"


async def test_a_custom_tool_s_text_holds_to_its_grammar(client: httpx2.AsyncClient) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: ("+" /[a-c"]{3}/ LF)~2\n%import common.LF'}
    tool = {"type": "custom", "name": "edit", "description": "of a file", "format": grammar}
    asked = {"tools": [tool], "tool_choice": {"type": "custom", "name": "edit"}, "parallel_tool_calls": False}
    response = await ask(client, "/v1/responses", input="Once", max_output_tokens=90, temperature=0, **asked)
    (call,) = response["output"]
    assert (call["type"], call["name"], call["status"]) == ("custom_tool_call", "edit", "completed")
    assert re.fullmatch('([+][a-c"]{3}\n){2}', call["input"]), call["input"]


async def test_a_response_goes_on(client: httpx2.AsyncClient) -> None:
    first = await ask(client, "/v1/responses", input="Once", max_output_tokens=8, temperature=0)
    second = await ask(
        client, "/v1/responses", input="More", previous_response_id=first["id"], max_output_tokens=8, temperature=0
    )
    answer = first["output"][0]["content"][0]["text"]
    messages = [*HI, {"role": "assistant", "content": answer}, {"role": "user", "content": "More"}]
    whole = await ask(client, "/v1/responses", input=messages, max_output_tokens=8, temperature=0)
    assert second["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"]
