"""Anthropic's Messages API by the official client, against its documented shapes: bodies and events.

Each body and each event is read by the client's own models, strictly.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message as AnthropicMessage

from client.dialogue.messages import ReasoningDelta, ToolCallDelta
from swarm.errors import GenerationInterrupted
from tests.net.client.api.anthropic.questions import CALL, EVENTS, HI, KEY, TOOL_USE, WEATHER, request
from tests.net.client.api.json_shapes import mismatch
from tests.scripted_backend import Script, ScriptedBackend, saying, steps


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
