"""OpenAI's Responses API by the official client, against its documented shapes: what each field asks for."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from client.base.options import Grammar
from client.dialogue.messages import Message, Tool, ToolCall, ToolChoice
from tests.net.client.api.responses.questions import KEYS, SCHEMA, WEATHER
from tests.scripted_backend import ScriptedBackend, saying

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
    "nothing": ({}, {"options": {}, "reasoning": None, "tools": ()}),
    "effort none": ({"reasoning": {"effort": "none"}}, {"reasoning": False}),
    "effort low": ({"reasoning": {"effort": "low"}}, {"reasoning": True}),
    "json_object": (
        {"text": {"format": {"type": "json_object"}}},
        {"options": {"grammar": Grammar("json")}},
    ),
    "json_schema": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"options": {"grammar": Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))}},
    ),
    "top_logprobs": ({"top_logprobs": 3}, {"options": {"log_probs": 3}}),
    "extra sampling fields": (
        {"extra_body": {"seed": -1, "stop": "x", "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}},
        {
            "options": {
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


def test_a_limit_beyond_the_context_is_one(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello", reason="length")
    told = client.responses.create(model="demo-model", input="Hi", max_output_tokens=9_999)
    assert (told.status, told.max_output_tokens) == ("incomplete", 9_999)


def test_input_tokens_are_counted(client: openai.OpenAI) -> None:
    told = client.responses.input_tokens.count(model="demo-model", input="Hi", tools=[WEATHER])  # type: ignore[list-item]
    assert told.to_dict() == {"object": "response.input_tokens", "input_tokens": 7}


def test_what_is_ignored_is_named(url: str) -> None:
    body = {"input": "Hi", "surprise": {"a": 1}, "safety_identifier": "x", "prompt_cache_key": "y"}
    answer = httpx2.post(f"{url}/v1/responses", json=body, headers={"authorization": f"Bearer {KEYS[0]}"})
    assert answer.status_code == 200
    assert answer.headers["canopy-left-out"] == "field surprise, field safety_identifier, field prompt_cache_key"
