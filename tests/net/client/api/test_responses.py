"""OpenAI's Responses API as the official client speaks it, against shapes that its documentation states.

Each body and each event is read by the client's own models, strictly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from client.api.app import build_app
from client.api.context import ApiSettings
from client.dialogue.messages import Message, ReasoningDelta, Tool, ToolCall, ToolCallDelta, ToolChoice
from client.options import Grammar
from client.stats import TokenLogProbs
from swarm.errors import Busy, ContextFull, GenerationInterrupted, RouteError
from tests.api_server import served
from tests.json_shapes import mismatch
from tests.scripted_backend import Script, ScriptedBackend, saying, steps

KEYS = ("sk-one", "sk-two")
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    "strict": True,
}
CALL = (ToolCallDelta(0, "call_7", "weather", '{"town":'), ToolCallDelta(0, "", "", '"Ulm"}'))
LOG_PROBS = [TokenLogProbs(100, -0.25, ((100, -0.25), (7, -2.0))), TokenLogProbs(101, -0.5)]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend(saying("Hello"))


@pytest.fixture(scope="module")
def url(backend: ScriptedBackend) -> Iterator[str]:
    with served(build_app(backend, ApiSettings(keys=KEYS))) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as made:
        yield made


@dataclass(frozen=True)
class Case:
    """A request, the answer that is played, and the shape of the body."""

    asks: dict[str, Any]
    shape: dict[str, Any]
    script: Script = field(default_factory=lambda: saying("Hel", "lo"))


def text_item(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": re.compile("msg_.+"), "role": "assistant", "status": status, "content": [part]}


def call_item(status: str = "completed", arguments: str = '{"town":"Ulm"}') -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": re.compile("fc_.+"),
        "call_id": "call_7",
        "name": "weather",
        "arguments": arguments,
        "status": status,
    }


BODIES = {
    "response object has its documented fields": Case(
        {"input": "Hi"},
        {
            "id": re.compile("resp_[0-9a-f]{48}"),
            "object": "response",
            "created_at": float,
            "completed_at": float,
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "model": "demo-model",
            "output": [text_item("Hello")],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": True,
            "temperature": 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "truncation": "disabled",
            "metadata": {},
        },
    ),
    "usage counts cached and reasoning tokens": Case(
        {"input": "Hi"},
        {
            "usage": {
                "input_tokens": 7,
                "input_tokens_details": {"cached_tokens": 3},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 1},
                "total_tokens": 10,
            }
        },
        saying(ReasoningDelta("hm"), "Hel", "lo"),
    ),
    "reasoning is an item before the message": Case(
        {"input": "Hi", "reasoning": {"effort": "high"}},
        {
            "reasoning": {"effort": "high"},
            "output": [
                {
                    "type": "reasoning",
                    "id": re.compile("rs_.+"),
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                text_item("Hello"),
            ],
        },
        saying(ReasoningDelta("hm"), "Hello"),
    ),
    "function_call item has call_id, name and arguments": Case(
        {"input": "Hi", "tools": [WEATHER]},
        {"status": "completed", "output": [call_item()], "tools": [WEATHER]},
        saying(*CALL, reason="tool_calls"),
    ),
    "two calls are two items": Case(
        {"input": "Hi", "tools": [WEATHER]},
        {
            "output": [
                text_item("Both."),
                call_item(),
                {"type": "function_call", "call_id": "call_8", "arguments": "{}"},
            ]
        },
        saying("Both.", *CALL, ToolCallDelta(1, "call_8", "weather", "{}"), reason="tool_calls"),
    ),
    "length ends as incomplete with max_output_tokens": Case(
        {"input": "Hi", "max_output_tokens": 2},
        {
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
            "max_output_tokens": 2,
            "output": [text_item("Hello", "incomplete")],
        },
        saying("Hel", "lo", reason="length"),
    ),
    "a call that was cut is incomplete": Case(
        {"input": "Hi", "tools": [WEATHER]},
        {"status": "incomplete", "output": [call_item("incomplete", '{"town":')]},
        saying(CALL[0], reason="length"),
    ),
    "an empty answer is a message without text": Case({"input": "Hi"}, {"output": [text_item("")]}, saying()),
    "metadata, user and instructions come back": Case(
        {"input": "Hi", "metadata": {"a": "b"}, "user": "me", "instructions": "Be short."},
        {"metadata": {"a": "b"}, "user": "me", "instructions": "Be short."},
    ),
    "temperature, top_p and truncation come back": Case(
        {"input": "Hi", "temperature": 0.5, "top_p": 0.25, "truncation": "auto", "parallel_tool_calls": False},
        {"temperature": 0.5, "top_p": 0.25, "truncation": "auto", "parallel_tool_calls": False},
    ),
    "text.format json_schema comes back": Case(
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        saying('{"n":1}'),
    ),
    "logprobs stand in the text part": Case(
        {"input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {
            "top_logprobs": 2,
            "output": [
                {
                    "content": [
                        {
                            "logprobs": [
                                {
                                    "token": "t100",
                                    "bytes": list(b"t100"),
                                    "logprob": -0.25,
                                    "top_logprobs": [
                                        {"token": "t100", "bytes": list(b"t100"), "logprob": -0.25},
                                        {"token": "t7", "bytes": list(b"t7"), "logprob": -2.0},
                                    ],
                                },
                                {"token": "t101", "logprob": -0.5, "top_logprobs": []},
                            ]
                        }
                    ]
                }
            ],
        },
        saying("Hel", "lo", log_probs=LOG_PROBS),
    ),
    "tool_choice of a function comes back": Case(
        {"input": "Hi", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
        {"tool_choice": {"type": "function", "name": "weather"}},
        saying(*CALL, reason="tool_calls"),
    ),
    "store false comes back": Case({"input": "Hi", "store": False}, {"store": False}),
}


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES.keys())
def test_body(client: openai.OpenAI, backend: ScriptedBackend, case: Case) -> None:
    backend.script = case.script
    body = client.responses.with_raw_response.create(model="demo-model", **case.asks)
    told = json.loads(body.text)
    assert mismatch(told, case.shape) == ""
    Response.model_validate(told)
    assert body.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES.keys())
def test_stream_adds_up_to_the_same_body(client: openai.OpenAI, backend: ScriptedBackend, case: Case) -> None:
    backend.script = case.script
    with client.responses.create(model="demo-model", stream=True, **case.asks) as stream:
        events = [event.to_dict(mode="json") for event in stream]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event)
    assert mismatch(events[-1]["response"], case.shape) == ""
    with client.responses.stream(model="demo-model", **without_schema(case.asks)) as accumulated:
        assert len(list(accumulated)) == len(events)


def without_schema(asks: dict[str, Any]) -> dict[str, Any]:
    """The client parses what a schema asks for, which needs a class of its own."""
    return {name: value for name, value in asks.items() if name != "text"}


ORDERS = {
    "text": (
        saying("Hel", "lo"),
        "created in_progress output_item.added content_part.added output_text.delta output_text.delta output_text.done "
        "content_part.done output_item.done completed",
    ),
    "function call": (
        saying(*CALL, reason="tool_calls"),
        "created in_progress output_item.added function_call_arguments.delta function_call_arguments.delta "
        "function_call_arguments.done output_item.done completed",
    ),
    "reasoning, then text": (
        saying(ReasoningDelta("hm"), "Hello"),
        "created in_progress output_item.added content_part.added reasoning_text.delta reasoning_text.done "
        "content_part.done output_item.done output_item.added content_part.added output_text.delta output_text.done "
        "content_part.done output_item.done completed",
    ),
    "length": (
        saying("Hel", reason="length"),
        "created in_progress output_item.added content_part.added output_text.delta output_text.done "
        "content_part.done output_item.done incomplete",
    ),
    "error in the middle": (
        lambda job: [*steps("Hel")[:-1], GenerationInterrupted("the chain broke", "Hel", ())],
        "created in_progress output_item.added content_part.added output_text.delta error output_text.done "
        "content_part.done output_item.done failed",
    ),
}


@pytest.mark.parametrize(("script", "order"), ORDERS.values(), ids=[f"events of {name}" for name in ORDERS])
def test_order_of_events(client: openai.OpenAI, backend: ScriptedBackend, script: Script, order: str) -> None:
    backend.script = script
    with client.responses.create(model="demo-model", input="Hi", stream=True) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
    assert kinds == order.split()


def test_failed_response_tells_its_error(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = ORDERS["error in the middle"][0]
    with client.responses.create(model="demo-model", input="Hi", stream=True) as stream:
        told: list[dict[str, Any]] = [event.to_dict(mode="json") for event in stream]
    failed = told[-1]["response"]
    assert mismatch(failed, {"status": "failed", "error": {"code": "server_error", "message": str}}) == ""
    assert mismatch(failed["output"], [text_item("Hel", "incomplete")]) == ""
    error = next(event for event in told if event["type"] == "error")
    assert mismatch(error, {"code": "generation_interrupted", "message": str, "param": None}) == ""


@dataclass(frozen=True)
class Refused:
    """A request, and how it is refused."""

    asks: dict[str, Any]
    status: int
    error: dict[str, Any]
    script: Script = field(default_factory=lambda: saying("Hello"))


def raising(error: Exception) -> Script:
    return lambda job: [error]


def refused_field(name: str) -> dict[str, Any]:
    return {"type": "invalid_request_error", "code": "unsupported_parameter", "param": name, "message": str}


ERRORS = {
    "another model is 404 model_not_found": Refused(
        {"input": "Hi", "model": "other"}, 404, {"code": "model_not_found", "param": "model"}
    ),
    "no input is 400 with param": Refused(
        {"input": ""}, 400, {"code": "missing_required_parameter", "param": "input", "type": "invalid_request_error"}
    ),
    "an image is refused by its place": Refused(
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        400,
        refused_field("input[0].content[0].type"),
    ),
    "a file is refused by its place": Refused(
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_file"}]}]},
        400,
        refused_field("input[0].content[1].type"),
    ),
    "web search is refused by its place": Refused(
        {"input": "Hi", "tools": [WEATHER, {"type": "web_search"}]}, 400, refused_field("tools[1].type")
    ),
    "a hosted tool as the choice is refused": Refused(
        {"input": "Hi", "tool_choice": {"type": "file_search"}}, 400, refused_field("tool_choice")
    ),
    "a choice of a function that is not there is 400": Refused(
        {"input": "Hi", "tool_choice": {"type": "function", "name": "x"}}, 400, {"param": "tool_choice"}
    ),
    "background is refused": Refused({"input": "Hi", "background": True}, 400, refused_field("background")),
    "a conversation is refused": Refused({"input": "Hi", "conversation": "conv_1"}, 400, refused_field("conversation")),
    "a stored prompt is refused": Refused({"prompt": {"id": "pmpt_1"}}, 400, refused_field("prompt")),
    "an include that is not served is refused": Refused(
        {"input": "Hi", "include": ["file_search_call.results"]}, 400, refused_field("include[0]")
    ),
    "temperature over 2 is 400 with param": Refused(
        {"input": "Hi", "temperature": 2.5}, 400, {"param": "temperature", "code": "invalid_value"}
    ),
    "an unknown previous response is 400": Refused(
        {"input": "Hi", "previous_response_id": "resp_none"},
        400,
        {"code": "previous_response_not_found", "param": "previous_response_id"},
    ),
    "an output without its call is 400": Refused(
        {"input": [{"type": "function_call_output", "call_id": "call_x", "output": "1"}]},
        400,
        {"param": "input[0]", "message": "No tool call found for function call output with call_id call_x."},
    ),
    "too long a prompt is context_length_exceeded": Refused(
        {"input": "Hi"}, 400, {"code": "context_length_exceeded"}, raising(ContextFull("too long"))
    ),
    "a full swarm is 429 rate_limit_exceeded": Refused(
        {"input": "Hi"}, 429, {"code": "rate_limit_exceeded"}, raising(Busy("peer", "0-4", "full"))
    ),
    "missing layers are 503": Refused(
        {"input": "Hi"},
        503,
        {"code": "layers_missing", "missing_layers": ["5-8"]},
        raising(RouteError("5-8", [(5, 8)])),
    ),
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS.keys())
def test_error(client: openai.OpenAI, backend: ScriptedBackend, case: Refused, is_streamed: bool) -> None:
    backend.script = case.script
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(**{"model": "demo-model", **case.asks}, stream=is_streamed)
    assert caught.value.status_code == case.status
    assert mismatch(caught.value.response.json()["error"], case.error) == ""
    if case.status in (429, 503):
        assert int(caught.value.response.headers["retry-after"]) >= 1


INPUTS: dict[str, tuple[Any, list[Message]]] = {
    "a text": ("Hi", [Message("user", "Hi")]),
    "messages of every role": (
        [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
            },
            {"role": "user", "content": "Again"},
        ],
        [
            Message("system", "Be short."),
            Message("user", "Hi"),
            Message("assistant", "Hello"),
            Message("user", "Again"),
        ],
    ),
    "thoughts, calls and outputs": (
        [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "b", "output": "noon"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "sun"}]},
        ],
        [
            Message("user", "Hi"),
            Message(
                "assistant",
                "",
                reasoning="hm",
                tool_calls=(ToolCall("a", "weather", "{}"), ToolCall("b", "time", "{}")),
            ),
            Message("tool", "noon", tool_call_id="b", name="time"),
            Message("tool", "sun", tool_call_id="a", name="weather"),
        ],
    ),
}


@pytest.mark.parametrize(("given", "messages"), INPUTS.values(), ids=[f"input: {name}" for name in INPUTS])
def test_input(client: openai.OpenAI, backend: ScriptedBackend, given: Any, messages: list[Message]) -> None:  # noqa: ANN401
    backend.script = saying("Hello")
    client.responses.create(model="demo-model", input=given, instructions="First.")
    assert list(backend.last.messages) == [Message("system", "First."), *messages]


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_output_tokens, temperature, top_p": (
        {"max_output_tokens": 9, "temperature": 0, "top_p": 0.5},
        {"options": {"max_new_tokens": 9, "temperature": 0, "top_p": 0.5}},
    ),
    "nothing": ({}, {"options": {"temperature": 1.0}, "reasoning": None, "tools": ()}),
    "effort none": ({"reasoning": {"effort": "none"}}, {"reasoning": False}),
    "effort low": ({"reasoning": {"effort": "low"}}, {"reasoning": True}),
    "json_object": (
        {"text": {"format": {"type": "json_object"}}},
        {"options": {"temperature": 1.0, "grammar": Grammar("json")}},
    ),
    "json_schema": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"options": {"temperature": 1.0, "grammar": Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))}},
    ),
    "top_logprobs": ({"top_logprobs": 3}, {"options": {"temperature": 1.0, "log_probs": 3}}),
    "extra sampling fields": (
        {"extra_body": {"seed": -1, "stop": "x", "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}},
        {
            "options": {
                "temperature": 1.0,
                "seed": 2**63 - 1,
                "stop": ("x",),
                "top_k": 5,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
            }
        },
    ),
    "tools that must be called one by one": (
        {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
        {
            "tools": (Tool("weather", "of a town", WEATHER["parameters"], strict=True),),
            "tool_choice": ToolChoice("required", parallel=False),
        },
    ),
    "one function": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
        {"tool_choice": ToolChoice("required", "weather")},
    ),
    "allowed tools": (
        {
            "tools": [WEATHER, {**WEATHER, "name": "other"}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "other"}],
            },
        },
        {
            "tools": (Tool("other", "of a town", WEATHER["parameters"], strict=True),),
            "tool_choice": ToolChoice("required"),
        },
    ),
}


@pytest.mark.parametrize(("asks", "job"), ASKED.values(), ids=[f"job: {name}" for name in ASKED])
def test_job(client: openai.OpenAI, backend: ScriptedBackend, asks: dict[str, Any], job: dict[str, Any]) -> None:
    backend.script = saying("Hello")
    client.responses.create(model="demo-model", input="Hi", **asks)
    assert {name: getattr(backend.last, name) for name in job} == job


def test_a_response_goes_on_without_the_instructions(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying(ReasoningDelta("hm"), "Fine.", *CALL, reason="tool_calls")
    first = client.responses.create(model="demo-model", input="Hi", instructions="First.", tools=[WEATHER])  # type: ignore[list-item]
    backend.script = saying("Sun.")
    second = client.responses.create(
        model="demo-model",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": "call_7", "output": "sun"}],
        instructions="Second.",
    )
    answer = Message(
        "assistant", "Fine.", reasoning="hm", tool_calls=(ToolCall("call_7", "weather", '{"town":"Ulm"}'),)
    )
    result = Message("tool", "sun", tool_call_id="call_7", name="weather")
    assert list(backend.last.messages) == [Message("system", "Second."), Message("user", "Hi"), answer, result]
    assert second.previous_response_id == first.id
    client.responses.create(model="demo-model", previous_response_id=second.id, input="Thanks")
    assert list(backend.last.messages) == [
        Message("user", "Hi"),
        answer,
        result,
        Message("assistant", "Sun."),
        Message("user", "Thanks"),
    ]


def test_a_streamed_response_is_stored_when_it_ends(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello")
    with client.responses.create(model="demo-model", input="Hi", stream=True) as stream:
        *_, last = stream
    assert last.type == "response.completed"
    assert client.responses.retrieve(last.response.id).output_text == "Hello"


def test_stored_responses_are_read_and_forgotten(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello")
    made = client.responses.create(model="demo-model", input="Hi")
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    items = client.responses.input_items.list(made.id)
    assert (
        mismatch(
            [item.to_dict() for item in items.data],
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}], "id": str}],
        )
        == ""
    )
    raw = client.responses.with_raw_response.delete(made.id)
    assert json.loads(raw.text) == {"id": made.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)


def test_nobody_reads_the_response_of_another_key(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying("Secret")
    made = client.responses.create(model="demo-model", input="Hi")
    stranger = client.with_options(api_key=KEYS[1])
    for ask in (stranger.responses.retrieve, stranger.responses.delete, stranger.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        stranger.responses.create(model="demo-model", input="What?", previous_response_id=made.id)
    assert client.responses.retrieve(made.id).output_text == "Secret"


def test_store_false_keeps_nothing(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello")
    made = client.responses.create(model="demo-model", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_input_tokens_are_counted(client: openai.OpenAI) -> None:
    told = client.responses.input_tokens.count(model="demo-model", input="Hi", tools=[WEATHER])  # type: ignore[list-item]
    assert told.to_dict() == {"object": "response.input_tokens", "input_tokens": 7}


def test_a_wrong_key_is_401(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="sk-wrong").responses.create(model="demo-model", input="Hi")
    assert caught.value.code == "invalid_api_key"


def test_unknown_fields_are_ignored(url: str) -> None:
    body = {"input": "Hi", "surprise": {"a": 1}, "safety_identifier": "x", "prompt_cache_key": "y"}
    answer = httpx2.post(f"{url}/v1/responses", json=body, headers={"authorization": f"Bearer {KEYS[0]}"})
    assert answer.status_code == 200
