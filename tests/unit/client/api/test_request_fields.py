"""One table of fields: the models read what it honours, and no known field is dropped without a word."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import httpx2
import pytest
import pytest_asyncio
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessageParams
from anthropic.types.message_create_params import MessageCreateParamsBase as MessageParams
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from client.api.anthropic import MessagesRequest
from client.api.app import build_app
from client.api.errors import ApiError
from client.api.ollama import ChatRunRequest, GenerateRequest, RunOptions
from client.api.openai.chat import ChatRequest
from client.api.openai.completions import CompletionRequest
from client.api.openai.fields import RequestBody
from client.api.request_fields import (
    FIELDS,
    BodyKind,
    Handling,
    RequestField,
    fields_of,
    noting_left_out,
    take_fields,
)
from client.api.request_fields import HEADER as LEFT_OUT
from client.api.responses.routes import ResponsesRequest
from client.base.options import Grammar
from tests.scripted_backend import ScriptedBackend, saying

MODELS: Final[dict[BodyKind, type[RequestBody]]] = {
    BodyKind.CHAT: ChatRequest,
    BodyKind.COMPLETIONS: CompletionRequest,
    BodyKind.RESPONSES: ResponsesRequest,
    BodyKind.MESSAGES: MessagesRequest,
    BodyKind.OLLAMA_CHAT: ChatRunRequest,
    BodyKind.OLLAMA_GENERATE: GenerateRequest,
    BodyKind.OLLAMA_OPTIONS: RunOptions,
}
HI: Final = [{"role": "user", "content": "Hi"}]
ASKED: Final[dict[BodyKind, tuple[str, dict[str, Any]]]] = {
    BodyKind.CHAT: ("/v1/chat/completions", {"messages": HI}),
    BodyKind.COMPLETIONS: ("/v1/completions", {"prompt": "Hi"}),
    BodyKind.RESPONSES: ("/v1/responses", {"input": "Hi"}),
    BodyKind.MESSAGES: ("/v1/messages", {"model": "demo-model", "messages": HI, "max_tokens": 8}),
    BodyKind.OLLAMA_CHAT: ("/api/chat", {"model": "demo-model", "messages": HI, "stream": False}),
    BodyKind.OLLAMA_GENERATE: ("/api/generate", {"model": "demo-model", "prompt": "Hi", "stream": False}),
}
"""Path and least request of each body."""


def of(handling: Handling) -> list[tuple[BodyKind, RequestField]]:
    """Every field of a handling in every body."""
    return [(body, field) for field in FIELDS if field.handling is handling for body in field.bodies]


def request(body: BodyKind, **fields: object) -> tuple[str, dict[str, Any]]:
    """A request with fields, in Ollama's options where they belong there."""
    if body is BodyKind.OLLAMA_OPTIONS:
        path, least = ASKED[BodyKind.OLLAMA_CHAT]
        return path, {**least, "options": fields}
    path, least = ASKED[body]
    return path, {**least, **fields}


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend(saying("Hello"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(backend: ScriptedBackend) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(build_app(backend))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_of_each_body_a_name_stands_once() -> None:
    names = [(body, field.name) for field in FIELDS for body in field.bodies]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("body", BodyKind, ids=lambda body: body.name)
async def test_the_models_read_what_is_honoured(body: BodyKind) -> None:
    read = {field.alias or name for name, field in MODELS[body].model_fields.items()}
    assert read == {name for name, field in fields_of(body).items() if field.handling is Handling.HONOURED}
    assert MODELS[body].body is body


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (BodyKind.CHAT, ChatParams),
        (BodyKind.COMPLETIONS, CompletionParams),
        (BodyKind.RESPONSES, ResponseParams),
        (BodyKind.MESSAGES, MessageParams),
        (BodyKind.MESSAGES, BetaMessageParams),
    ],
)
async def test_every_field_of_the_official_clients_is_known(body: BodyKind, params: type) -> None:
    assert set(params.__annotations__) - set(fields_of(body)) == set()


async def test_every_refused_field_is_named_and_asks_for_nothing_by_its_neutral_values() -> None:
    refused = of(Handling.REFUSED)
    assert len(refused) > 100
    for body, field in refused:
        with pytest.raises(ApiError) as caught, noting_left_out():
            take_fields(body, {field.name: {"any": "value"}})
        error = caught.value
        assert (error.status, error.param, error.code) == (400, field.name, "unsupported_parameter")
        assert f"'{field.name}' is not supported" in error.message
        with noting_left_out() as names:
            for value in (None, *field.neutral):
                take_fields(body, {field.name: value})
        assert names == []


async def test_every_ignored_field_is_noted() -> None:
    for body, field in of(Handling.IGNORED):
        with noting_left_out() as names:
            take_fields(body, {field.name: {"any": "value"}})
        assert names == [field.name]


async def test_true_is_no_one() -> None:
    with pytest.raises(ApiError, match="typical_p"):
        take_fields(BodyKind.CHAT, {"typical_p": True})


@pytest.mark.parametrize("body", BodyKind, ids=lambda body: body.name)
async def test_a_server_tells_what_it_refuses_and_ignores(http: httpx2.AsyncClient, body: BodyKind) -> None:
    """Of each body the first field of each kind, through a route."""
    (_, refused), *_ = [one for one in of(Handling.REFUSED) if one[0] is body]
    (_, ignored), *_ = [one for one in of(Handling.IGNORED) if one[0] is body]
    path, asked = request(body, **{refused.name: {"any": "value"}})
    answer = await http.post(path, json=asked)
    assert answer.status_code == 400
    assert f"'{refused.name}' is not supported" in answer.text
    path, asked = request(body, **{ignored.name: {"any": "value"}})
    answer = await http.post(path, json=asked)
    assert (answer.status_code, answer.headers.get(LEFT_OUT)) == (200, f"field {ignored.name}")


@pytest.mark.parametrize("body", ASKED, ids=lambda body: body.name)
async def test_what_nobody_knows_is_said(http: httpx2.AsyncClient, body: BodyKind) -> None:
    path, asked = request(body, surprise=1, **{"no\r\nname: x": 1, "é": 1})
    answer = await http.post(path, json=asked)
    assert (answer.status_code, answer.headers.get(LEFT_OUT)) == (200, "field surprise")


@pytest.mark.parametrize(
    "body", [BodyKind.CHAT, BodyKind.COMPLETIONS, BodyKind.RESPONSES, BodyKind.MESSAGES], ids=lambda body: body.name
)
async def test_a_field_of_another_path_that_changes_answers_is_refused(
    http: httpx2.AsyncClient, body: BodyKind
) -> None:
    path, asked = request(body, think=True)
    answer = await http.post(path, json=asked)
    assert answer.status_code == 400
    assert "'think' is not supported here" in answer.text


async def test_many_ignored_fields_make_no_long_header(http: httpx2.AsyncClient) -> None:
    path, asked = request(BodyKind.CHAT, **{f"f{number}": 1 for number in range(5_000)})
    answer = await http.post(path, json=asked)
    assert (answer.status_code, len(answer.headers[LEFT_OUT].split(", "))) == (200, 32)


SCHEMA: Final = {"type": "object"}
OF_SCHEMA: Final = Grammar("json_schema", '{"type":"object"}')
GBNF: Final = 'root ::= "yes" | "no"'
LARK: Final = Grammar("lark", '%llguidance {}\n\nstart: "yes"\n     | "no"\n\n')


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_json": '{"type": "object"}'}, OF_SCHEMA),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a.b", "c"]}, Grammar("regex", r"(a\.b|c)")),
        ({"guided_grammar": GBNF}, LARK),
        ({"guided_grammar": "start: /a/"}, Grammar("lark", "start: /a/")),
        ({"grammar": GBNF}, LARK),
        ({"json_schema": SCHEMA}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, Grammar("json")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("regex", "(a)")),
        ({"structured_outputs": {"grammar": GBNF}}, LARK),
        ({"ignore_eos": True}, None),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
async def test_what_the_text_must_be_is_a_grammar(
    http: httpx2.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    for body in (BodyKind.CHAT, BodyKind.COMPLETIONS, BodyKind.RESPONSES):
        path, asked = request(body, **fields)
        answer = await http.post(path, json=asked)
        assert answer.status_code == 200, answer.text
        assert backend.jobs[-1].options.get("grammar") == grammar


async def test_completions_have_a_response_format(http: httpx2.AsyncClient, backend: ScriptedBackend) -> None:
    path, asked = request(BodyKind.COMPLETIONS, response_format={"type": "json_object"})
    assert (await http.post(path, json=asked)).status_code == 200
    assert backend.jobs[-1].options.get("grammar") == Grammar("json")


@pytest.mark.parametrize("fields", [{"output_format": {"type": "json_schema", "schema": SCHEMA}}])
async def test_messages_take_the_older_name_of_a_format(
    http: httpx2.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any]
) -> None:
    path, asked = request(BodyKind.MESSAGES, **fields)
    assert (await http.post(path, json=asked)).status_code == 200
    assert backend.jobs[-1].options.get("grammar") == OF_SCHEMA


@pytest.mark.parametrize(
    ("fields", "says", "param"),
    [
        ({"guided_regex": "a", "grammar": GBNF}, "'grammar' cannot stand beside 'guided_regex'", "grammar"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "'guided_regex' cannot stand beside 'response_format'",
            "guided_regex",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "cannot stand beside", "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag", "structured_outputs.structural_tag"),
        ({"guided_json": "{"}, "no JSON schema", "guided_json"),
        ({"grammar": "root ::= ("}, "neither GBNF nor Lark", "grammar"),
        ({"grammar": "root ::= a"}, "Rule 'a' not found", "grammar"),
        ({"grammar": 'root ::= start\nstart ::= "a"'}, "Rule 'start' already exists", "grammar"),
        ({"grammar": "root ::= " + "(" * 20_000}, "neither GBNF nor Lark", "grammar"),
        ({"grammar": "root ::= a\n" * 300}, "at most 256 rules", "grammar"),
        ({"grammar": "x" * 70_000}, "at most 65536 bytes", "grammar"),
        ({"chat_template_kwargs": {"style": "loud"}}, "style", "chat_template_kwargs.style"),
        ({"add_generation_prompt": False}, "begins the assistant's turn", "add_generation_prompt"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
async def test_what_cannot_be_a_grammar_is_told(
    http: httpx2.AsyncClient, fields: dict[str, Any], says: str, param: str
) -> None:
    path, asked = request(BodyKind.CHAT, **fields)
    answer = await http.post(path, json=asked)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


async def test_ends_of_text_are_asked_for(http: httpx2.AsyncClient, backend: ScriptedBackend) -> None:
    path, asked = request(BodyKind.CHAT, ignore_eos=True, stop_token_ids=[5, 7.0])
    assert (await http.post(path, json=asked)).status_code == 200
    assert backend.last.options == {"end_tokens": (), "stop_tokens": (5, 7)}
