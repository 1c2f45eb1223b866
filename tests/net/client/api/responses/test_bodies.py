"""OpenAI's Responses API by the official client, against its documented shapes: bodies and events.

Each body and each event is read by the client's own models, strictly.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from client.dialogue.messages import ReasoningDelta, ToolCallDelta
from swarm.base.errors import GenerationInterrupted
from tests.net.client.api.json_shapes import mismatch
from tests.net.client.api.responses.questions import CALL, EVENTS, LOG_PROBS, SCHEMA, WEATHER
from tests.scripted_backend import Script, ScriptedBackend, saying, steps


@dataclass(frozen=True)
class Case:
    """A request, the answer that is played, and the shape of the body."""

    asks: dict[str, Any]
    shape: dict[str, Any]
    script: Script = field(default_factory=lambda: saying("He", "llo"))


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
        saying(ReasoningDelta("hm"), "He", "llo"),
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
        saying("He", "llo", reason="length"),
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
        saying("He", "llo", log_probs=LOG_PROBS),
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
        saying("He", "llo"),
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
        saying("He", reason="length"),
        "created in_progress output_item.added content_part.added output_text.delta output_text.done "
        "content_part.done output_item.done incomplete",
    ),
    "error in the middle": (
        lambda job: [*steps("He")[:-1], GenerationInterrupted("the chain broke", "He", ())],
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
    assert mismatch(failed["output"], [text_item("He", "incomplete")]) == ""
    error = next(event for event in told if event["type"] == "error")
    assert mismatch(error, {"code": "generation_interrupted", "message": str, "param": None}) == ""
