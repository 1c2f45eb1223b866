"""Anthropic's Messages API by the official client, against its documented shapes: what each field asks for."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from client.dialogue.messages import Message, Tool, ToolCall, ToolChoice
from client.options import Grammar
from tests.net.client.api.anthropic.questions import HI, SCHEMA, TOOL_USE, WEATHER, request
from tests.scripted_backend import ScriptedBackend, saying

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
