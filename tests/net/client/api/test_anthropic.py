"""Anthropic's Messages API by the official client, against its documented shapes.

Each body and each event is read by the client's own models, strictly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from client.api.context import ApiSettings
from client.api.errors import PromptTooLong
from client.base.options import Grammar
from client.dialogue.messages import Message, ReasoningDelta, Tool, ToolCall, ToolCallDelta, ToolChoice
from swarm.base.errors import Busy, ConfigError, GenerationInterrupted, RouteError
from tests.net.client.api.json_shapes import mismatch
from tests.scripted_backend import Script, ScriptedBackend, saying, steps

KEY = "sk-ant-one"
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "of a town", "input_schema": SCHEMA}
CALL = (ToolCallDelta(0, "call_7", "weather", '{"town":'), ToolCallDelta(0, "", "", '"Ulm"}'))
TOOL_USE = {"type": "tool_use", "id": "call_7", "name": "weather", "input": {"town": "Ulm"}}


def request(**asks: Any) -> dict[str, Any]:  # noqa: ANN401
    """The arguments of a call of the client; what its types lack goes into the body."""
    given = {"model": "demo-model", "max_tokens": 64, "messages": HI, **asks}
    extra = {name: given.pop(name) for name in ("temperature", "top_p", "top_k") if name in given}
    return {**given, "extra_body": extra}


@pytest.fixture(scope="module")
def settings() -> ApiSettings:
    return ApiSettings(keys=(KEY,))


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


@dataclass(frozen=True)
class Case:
    """A request, the answer that is played, and the shape of the body."""

    asks: dict[str, Any]
    shape: dict[str, Any]
    script: Script = field(default_factory=lambda: saying("He", "llo"))


BODIES = {
    "message has its documented fields": Case(
        {},
        {
            "id": re.compile("msg_[0-9a-f]{24}"),
            "type": "message",
            "role": "assistant",
            "model": "demo-model",
            "content": [{"type": "text", "text": "Hello"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
        },
    ),
    "usage counts cached and thinking tokens apart": Case(
        {},
        {
            "usage": {
                "input_tokens": 4,
                "cache_read_input_tokens": 3,
                "cache_creation_input_tokens": 0,
                "output_tokens": 3,
                "output_tokens_details": {"thinking_tokens": 1},
            }
        },
        saying(ReasoningDelta("hm"), "He", "llo"),
    ),
    "stop_reason stop_sequence names the sequence": Case(
        {"stop_sequences": ["END"]},
        {"stop_reason": "stop_sequence", "stop_sequence": "END"},
        saying("Hello", stop_string="END"),
    ),
    "stop_reason max_tokens": Case(
        {"max_tokens": 2}, {"stop_reason": "max_tokens"}, saying("He", "llo", reason="length")
    ),
    "stop_reason model_context_window_exceeded": Case(
        {"max_tokens": 900}, {"stop_reason": "model_context_window_exceeded"}, saying("He", reason="length")
    ),
    "stop_reason tool_use, and a block with its input": Case(
        {"tools": [WEATHER]},
        {"stop_reason": "tool_use", "content": [{"type": "text", "text": "Wait."}, TOOL_USE]},
        saying("Wait.", *CALL, reason="tool_calls"),
    ),
    "two calls are two blocks": Case(
        {"tools": [WEATHER]},
        {"content": [TOOL_USE, {"type": "tool_use", "id": "call_8", "name": "weather", "input": {}}]},
        saying(*CALL, ToolCallDelta(1, "call_8", "weather", "{}"), reason="tool_calls"),
    ),
    "a call that was cut has the input so far": Case(
        {"max_tokens": 1},
        {"stop_reason": "max_tokens", "content": [{"type": "tool_use", "input": {"town": "Ulm"}}]},
        saying(ToolCallDelta(0, "call_7", "weather", '{"town":"Ulm","day":'), reason="length"),
    ),
    "thinking is a signed block before the text": Case(
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": re.compile(".+")},
                {"type": "text", "text": "Hello"},
            ]
        },
        saying(ReasoningDelta("hm"), "Hello"),
    ),
    "thinking display omitted hides its text": Case(
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"content": [{"type": "thinking", "thinking": ""}, {"type": "text", "text": "Hello"}]},
        saying(ReasoningDelta("hm"), "Hello"),
    ),
    "an empty answer has no blocks": Case({}, {"content": [], "stop_reason": "end_turn"}, saying()),
}


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES.keys())
def test_body(client: anthropic.Anthropic, backend: ScriptedBackend, case: Case) -> None:
    backend.script = case.script
    body = client.messages.with_raw_response.create(**request(**case.asks))
    told = json.loads(body.text())
    assert mismatch(told, case.shape) == ""
    AnthropicMessage.model_validate(told)
    assert body.headers["request-id"].startswith("req_")


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES.keys())
def test_stream_adds_up_to_the_same_body(client: anthropic.Anthropic, backend: ScriptedBackend, case: Case) -> None:
    backend.script = case.script
    with client.messages.stream(**request(**case.asks)) as stream:
        told = stream.get_final_message().to_dict(mode="json")
    assert mismatch(told, case.shape) == ""
    with client.messages.create(**request(**case.asks), stream=True) as events:
        for event in events:
            EVENTS.validate_python(event.to_dict(mode="json"))


ORDERS = {
    "text": (
        saying("He", "llo"),
        "message_start ping content_block_start content_block_delta content_block_delta content_block_stop "
        "message_delta message_stop",
    ),
    "tool_use after text": (
        saying("Wait.", *CALL, reason="tool_calls"),
        "message_start ping content_block_start content_block_delta content_block_stop "
        "content_block_start content_block_delta content_block_delta content_block_stop message_delta message_stop",
    ),
    "thinking, signed, and text": (
        saying(ReasoningDelta("hm"), "Hello"),
        "message_start ping content_block_start content_block_delta content_block_delta content_block_stop "
        "content_block_start content_block_delta content_block_stop message_delta message_stop",
    ),
    "error in the middle": (
        lambda job: [*steps("He")[:-1], GenerationInterrupted("the chain broke", "He", ())],
        "message_start ping content_block_start content_block_delta error",
    ),
}


@pytest.mark.parametrize(("script", "order"), ORDERS.values(), ids=[f"events of {name}" for name in ORDERS])
def test_order_of_events(url: str, backend: ScriptedBackend, script: Script, order: str) -> None:
    backend.script = script
    told = events_of(url)
    assert [name for name, _ in told] == order.split()
    assert all(data["type"] == name for name, data in told)


def events_of(url: str, **asks: Any) -> list[tuple[str, Any]]:  # noqa: ANN401
    """The events of a stream as they stand on the wire: each a name and its data."""
    body = {"model": "demo-model", "max_tokens": 64, "messages": HI, "stream": True, **asks}
    answer = httpx2.post(f"{url}/v1/messages", json=body, headers={"x-api-key": KEY})
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in answer.text.split("\n\n") if frame and not frame.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]


def test_deltas_of_each_kind(url: str, backend: ScriptedBackend) -> None:
    backend.script = saying(ReasoningDelta("hm"), "Hello", *CALL, reason="tool_calls")
    told = events_of(url)
    starts = [data for name, data in told if name == "content_block_start"]
    assert [start["content_block"] for start in starts] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_7", "name": "weather", "input": {}},
    ]
    deltas = [(data["index"], data["delta"]) for name, data in told if name == "content_block_delta"]
    assert (
        mismatch(
            [delta for _, delta in deltas],
            [
                {"type": "thinking_delta", "thinking": "hm"},
                {"type": "signature_delta", "signature": str},
                {"type": "text_delta", "text": "Hello"},
                {"type": "input_json_delta", "partial_json": '{"town":'},
                {"type": "input_json_delta", "partial_json": '"Ulm"}'},
            ],
        )
        == ""
    )
    assert [index for index, _ in deltas] == [0, 0, 1, 2, 2]


def test_message_delta_has_the_reason_and_the_whole_usage(url: str, backend: ScriptedBackend) -> None:
    backend.script = saying("He", "llo", stop_string="END")
    told = dict(events_of(url))
    start = told["message_start"]["message"]
    assert mismatch(start, {"content": [], "stop_reason": None, "usage": {"input_tokens": 7, "output_tokens": 0}}) == ""
    delta = told["message_delta"]
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert mismatch(delta["usage"], {"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 2}) == ""


def test_an_error_in_mid_stream_is_an_exception(client: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    backend.script = ORDERS["error in the middle"][0]
    with pytest.raises(anthropic.APIStatusError) as caught, client.messages.stream(**request()) as stream:
        stream.get_final_message()
    shape = {"type": "error", "error": {"type": "overloaded_error", "message": str}, "request_id": str}
    assert mismatch(caught.value.body, shape) == ""


def test_models_in_anthropics_form(client: anthropic.Anthropic) -> None:
    listed = client.models.list()
    assert (listed.has_more, listed.first_id, listed.last_id) == (False, "demo-model", "demo-model")
    model = listed.data[0].to_dict(mode="json")
    assert mismatch(model, {"type": "model", "id": "demo-model", "created_at": str, "max_input_tokens": 2048}) == ""
    assert client.models.retrieve("demo-model").to_dict(mode="json") == model
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("other")
    assert mismatch(caught.value.body, {"type": "error", "error": {"type": "not_found_error"}}) == ""


@dataclass(frozen=True)
class Refused:
    """A request, and how it is refused."""

    asks: dict[str, Any]
    status: int
    kind: str
    words: str
    script: Script = field(default_factory=lambda: saying("Hello"))


def raising(error: Exception) -> Script:
    return lambda job: [error]


def of_user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


ERRORS = {
    "another model is 404 not_found_error": Refused({"model": "other"}, 404, "not_found_error", "other"),
    "no messages is 400": Refused({"messages": []}, 400, "invalid_request_error", "messages"),
    "a user's turn without content is 400": Refused(of_user(), 400, "invalid_request_error", "non-empty content"),
    "max_tokens 0 is 400": Refused({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    "a tool without input_schema is 400": Refused(
        {"tools": [{"name": "weather"}]}, 400, "invalid_request_error", "tools.0.input_schema: Field required"
    ),
    "a choice of a tool that is not there is 400": Refused(
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "tool_choice"
    ),
    "a result without its call is 400": Refused(
        of_user({"type": "tool_result", "tool_use_id": "x", "content": "1"}),
        400,
        "invalid_request_error",
        "unexpected `tool_use_id`",
    ),
    "a call without its result is 400": Refused(
        {"messages": [*HI, {"role": "assistant", "content": [TOOL_USE]}]},
        400,
        "invalid_request_error",
        "without `tool_result` blocks",
    ),
    "a prefill that ends in a space is 400": Refused(
        {"messages": [*HI, {"role": "assistant", "content": "Well, "}]},
        400,
        "invalid_request_error",
        "trailing whitespace",
    ),
    "a stop sequence of spaces is 400": Refused(
        {"stop_sequences": [" "]}, 400, "invalid_request_error", "non-whitespace"
    ),
    "too long a prompt is 400": Refused(
        {},
        400,
        "invalid_request_error",
        "prompt is too long: 9000 tokens > 8192 maximum",
        raising(PromptTooLong("too long", 9_000, 8_192)),
    ),
    "what the template does not take is 400": Refused(
        {}, 400, "invalid_request_error", "roles", raising(ConfigError("roles must alternate"))
    ),
    "a full swarm is 429 rate_limit_error": Refused(
        {}, 429, "rate_limit_error", "ask again later", raising(Busy("peer", "0-4", "full"))
    ),
    "missing layers are 503 overloaded_error": Refused(
        {}, 503, "overloaded_error", "5-8", raising(RouteError("nobody serves 5-8", [(5, 8)]))
    ),
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS.keys())
def test_error(client: anthropic.Anthropic, backend: ScriptedBackend, case: Refused, is_streamed: bool) -> None:
    backend.script = case.script
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**request(**case.asks), stream=is_streamed)
    assert caught.value.status_code == case.status
    shape = {"type": "error", "error": {"type": case.kind, "message": str}, "request_id": re.compile("req_.+")}
    assert mismatch(caught.value.body, shape) == ""
    assert case.words in caught.value.message
    if case.status in (429, 503):
        assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_wrong_key_is_401_authentication_error(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client.with_options(api_key="sk-wrong").messages.create(**request())
    assert mismatch(caught.value.body, {"type": "error", "error": {"type": "authentication_error"}}) == ""


def test_a_bearer_token_opens_too(url: str, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello")
    headers = {"authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01"}
    body = {"model": "demo-model", "max_tokens": 9, "messages": HI}
    assert httpx2.post(f"{url}/v1/messages", json=body, headers=headers).status_code == 200


def test_counting_another_model_is_404(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="other", messages=HI)  # type: ignore[arg-type]


def test_missing_max_tokens_is_named(url: str) -> None:
    body = {"model": "demo-model", "messages": HI}
    answer = httpx2.post(f"{url}/v1/messages", json=body, headers={"x-api-key": KEY})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "max_tokens" in answer.json()["error"]["message"]


INPUTS: dict[str, tuple[list[dict[str, Any]], list[Message]]] = {
    "texts and blocks": (
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ],
        [Message("user", "a\nb"), Message("assistant", "c"), Message("user", "d")],
    ),
    "turns of one speaker are one turn": (
        [
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c"},
            {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
            {"role": "user", "content": "e"},
        ],
        [Message("user", "a\nb"), Message("assistant", "cd"), Message("user", "e")],
    ),
    "documents that are text, and search results": (
        [
            {
                "role": "user",
                "content": [
                    {"type": "document", "title": "Log", "source": {"type": "text", "data": "calm"}},
                    {
                        "type": "search_result",
                        "title": "Sea",
                        "source": "book",
                        "content": [{"type": "text", "text": "salt"}],
                    },
                    {"type": "tool_reference", "tool_name": "look"},
                ],
            },
        ],
        [Message("user", "Log\ncalm\nSea\nbook\nsalt\n[The tool look may be called.]")],
    ),
    "thinking, tool_use and tool_result": (
        [
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Wait."},
                    TOOL_USE,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_7", "content": [{"type": "text", "text": "sun"}]},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
        [
            Message("user", "Hi"),
            Message(
                "assistant",
                "Wait.",
                reasoning="hm",
                tool_calls=(ToolCall("call_7", "weather", '{"town": "Ulm"}'),),
            ),
            Message("tool", "sun", tool_call_id="call_7", name="weather"),
            Message("user", "Well?"),
        ],
    ),
    "a result that is an error": (
        [
            {"role": "assistant", "content": [TOOL_USE]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_7", "content": "no such town", "is_error": True}
                ],
            },
        ],
        [
            Message("assistant", "", tool_calls=(ToolCall("call_7", "weather", '{"town": "Ulm"}'),)),
            Message("tool", "Error: no such town", tool_call_id="call_7", name="weather"),
        ],
    ),
    "a system message among the others": (
        [*HI, {"role": "system", "content": "Now be short."}, {"role": "user", "content": "Go"}],
        [Message("user", "Hi"), Message("system", "Now be short."), Message("user", "Go")],
    ),
}


@pytest.mark.parametrize(("given", "messages"), INPUTS.values(), ids=[f"input: {name}" for name in INPUTS])
def test_input(
    client: anthropic.Anthropic, backend: ScriptedBackend, given: list[dict[str, Any]], messages: list[Message]
) -> None:
    backend.script = saying("Hello")
    client.messages.create(**request(messages=given, system=[{"type": "text", "text": "First."}]))
    assert list(backend.last.messages) == [Message("system", "First."), *messages]
    assert not backend.last.continues


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_limit_beyond_the_context_is_one(
    client: anthropic.Anthropic, backend: ScriptedBackend, is_streamed: bool
) -> None:
    """Clients ask for tens of thousands of tokens of any model; stop_reason tells when the context ended before."""
    backend.script = saying("Hello", reason="length")
    if is_streamed:
        with client.messages.stream(**request(max_tokens=100_000)) as stream:
            reason = stream.get_final_message().stop_reason
    else:
        reason = client.messages.create(**request(max_tokens=10_000)).stop_reason
    assert reason == "model_context_window_exceeded"


def test_a_prefill_is_gone_on_with(client: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    backend.script = saying(" there")
    client.messages.create(**request(messages=[*HI, {"role": "assistant", "content": "Hello"}]))
    assert backend.last.continues
    assert backend.last.messages[-1] == Message("assistant", "Hello")


TOOL = Tool("weather", "of a town", SCHEMA)
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {"options": {"max_new_tokens": 64}, "reasoning": None, "tools": ()}),
    "sampling and stops": (
        {"temperature": 0, "top_p": 0.5, "top_k": 5, "stop_sequences": ["a", "b"]},
        {"options": {"max_new_tokens": 64, "temperature": 0, "top_p": 0.5, "top_k": 5, "stop": ("a", "b")}},
    ),
    "thinking enabled": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"reasoning": True}),
    "thinking disabled": ({"thinking": {"type": "disabled"}}, {"reasoning": False}),
    "thinking adaptive": ({"thinking": {"type": "adaptive"}}, {"reasoning": None}),
    "tool_choice auto": (
        {"tools": [WEATHER], "tool_choice": {"type": "auto"}},
        {"tools": (TOOL,), "tool_choice": ToolChoice()},
    ),
    "tool_choice any, one by one": (
        {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": ToolChoice("required", parallel=False)},
    ),
    "tool_choice tool": (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}},
        {"tool_choice": ToolChoice("required", "weather")},
    ),
    "tool_choice none": (
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"tool_choice": ToolChoice("none")},
    ),
    "a strict tool": (
        {"tools": [{**WEATHER, "strict": True}]},
        {"tools": (Tool("weather", "of a town", SCHEMA, True),)},
    ),
    "output_config format json_schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {
            "options": {
                "max_new_tokens": 64,
                "grammar": Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
            }
        },
    ),
    "metadata and cache_control are ignored": (
        {"metadata": {"user_id": "me"}, "cache_control": {"type": "ephemeral"}, "service_tier": "auto"},
        {"options": {"max_new_tokens": 64}},
    ),
}


@pytest.mark.parametrize(("asks", "job"), ASKED.values(), ids=[f"job: {name}" for name in ASKED])
def test_job(client: anthropic.Anthropic, backend: ScriptedBackend, asks: dict[str, Any], job: dict[str, Any]) -> None:
    backend.script = saying("Hello")
    client.messages.create(**request(**asks))
    assert {name: getattr(backend.last, name) for name in job} == job


def test_tokens_are_counted(client: anthropic.Anthropic, backend: ScriptedBackend) -> None:
    told = client.messages.count_tokens(model="demo-model", messages=HI, system="First.", tools=[WEATHER])  # type: ignore[arg-type, list-item]
    assert told.to_dict() == {"input_tokens": 7}
    assert backend.last.messages == (Message("system", "First."), Message("user", "Hi"))
