"""Chat completions as OpenAI's official client speaks them, against shapes that its documentation states.

Each body and each chunk is read by the client's own models.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from client.base.options import Grammar
from client.base.stats import TokenLogProbs
from client.dialogue.messages import Message, ReasoningDelta, Tool, ToolCall, ToolCallDelta, ToolChoice
from tests.net.client.api.json_shapes import mismatch
from tests.net.client.api.openai.chat_requests import CLOCK, NAMED, WEATHER, asked
from tests.scripted_backend import Script, ScriptedBackend, saying

CALL = (ToolCallDelta(0, "call_7", "weather", '{"town":'), ToolCallDelta(0, "", "", '"Ulm"}'))
LOG_PROBS = [TokenLogProbs(100, -0.25, ((100, -0.25), (7, -2.0))), TokenLogProbs(101, float("-inf"))]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 3,
        "audio_tokens": 0,
    },
}


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@dataclass(frozen=True)
class Case:
    """A request, the answer that is played, and the shape of the body."""

    asks: dict[str, Any]
    shape: dict[str, Any]
    script: Script = field(default_factory=lambda: saying("Hel", "lo"))


def choice(content: str | None, reason: str = "stop", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    message = {"role": "assistant", "content": content, "refusal": None, **more}
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}


BODIES = {
    "the head of a completion": Case(
        {},
        {
            "id": re.compile("chatcmpl-.+"),
            "object": "chat.completion",
            "created": int,
            "model": "demo-model",
            "system_fingerprint": re.compile("fp_.+"),
            "choices": [choice("Hello")],
        },
    ),
    "usage with details": Case({}, {"usage": USAGE}),
    "length": Case({"max_tokens": 2}, {"choices": [choice("Hello", "length")]}, saying("Hel", "lo", reason="length")),
    "an empty answer": Case({}, {"choices": [choice("")], "usage": {"completion_tokens": 0}}, saying()),
    "a tool call": Case(
        {"tools": [WEATHER]},
        {
            "choices": [
                choice(
                    None,
                    "tool_calls",
                    tool_calls=[
                        {
                            "id": "call_7",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"town":"Ulm"}'},
                        }
                    ],
                )
            ]
        },
        saying(*CALL, reason="tool_calls"),
    ),
    "two tool calls after a text": Case(
        {"tools": [WEATHER, CLOCK]},
        {
            "choices": [
                choice(
                    "Both.",
                    "tool_calls",
                    tool_calls=[{"id": "call_7"}, {"id": "call_8", "function": {"name": "clock", "arguments": "{}"}}],
                )
            ]
        },
        saying("Both.", *CALL, ToolCallDelta(1, "call_8", "clock", "{}"), reason="tool_calls"),
    ),
    "reasoning beside the content": Case(
        {"reasoning_effort": "high"},
        {
            "choices": [choice("Hello", reasoning_content="hm")],
            "usage": {"completion_tokens_details": {"reasoning_tokens": 1}},
        },
        saying(ReasoningDelta("hm"), "Hello"),
    ),
    "log-probabilities": Case(
        {"logprobs": True, "top_logprobs": 2},
        {
            "choices": [
                {
                    "logprobs": {
                        "content": [
                            {
                                "token": "t100",
                                "logprob": -0.25,
                                "bytes": list(b"t100"),
                                "top_logprobs": [
                                    {"token": "t100", "logprob": -0.25, "bytes": list(b"t100")},
                                    {"token": "t7", "logprob": -2.0, "bytes": list(b"t7")},
                                ],
                            },
                            {"token": "t101", "logprob": -9999.0, "bytes": list(b"t101"), "top_logprobs": []},
                        ],
                        "refusal": None,
                    }
                }
            ]
        },
        saying("Hel", "lo", log_probs=LOG_PROBS),
    ),
    "two choices": Case(
        {"n": 2},
        {
            "choices": [choice("Hello"), {**choice("Hello"), "index": 1}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11},
        },
    ),
    "JSON as it was made": Case(
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "one", "schema": SCHEMA, "strict": True},
            }
        },
        {"choices": [choice('{"n": 1}')]},
        saying('{"n":', " 1}"),
    ),
    "the canopy extension": Case(
        {"canopy": {"nodes": 4}},
        {"canopy": {"seed": 11, "tokens_per_s": float, "acceptance_length": float, "hops": ["abcdefgh 0-4"]}},
    ),
}


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES.keys())
def test_body(client: openai.OpenAI, backend: ScriptedBackend, case: Case) -> None:
    backend.script = case.script
    answer = client.chat.completions.with_raw_response.create(**asked(**case.asks))
    told = json.loads(answer.text)
    assert mismatch(told, case.shape) == ""
    ChatCompletion.model_validate(told)
    assert answer.headers["x-request-id"].startswith("req_")


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that chunks add up to."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            own = choices.setdefault(part["index"], choice(""))
            own["index"], message, delta = part["index"], own["message"], part["delta"]
            own["finish_reason"] = part["finish_reason"]
            message["content"] += delta.get("content") or ""
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": call["type"], "function": {**call["function"]}})
                else:
                    assert "id" not in call, "an id comes once"
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if part["logprobs"] is not None:
                own["logprobs"] = own["logprobs"] or {"content": [], "refusal": None}
                own["logprobs"]["content"] += part["logprobs"]["content"]
    for own in choices.values():
        if "tool_calls" in own["message"]:
            own["message"]["content"] = own["message"]["content"] or None
    return [choices[number] for number in sorted(choices)]


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES.keys())
def test_stream_adds_up_to_the_same_body(client: openai.OpenAI, backend: ScriptedBackend, case: Case) -> None:
    backend.script = case.script
    options = {"include_usage": True}
    with client.chat.completions.create(**asked(stream=True, stream_options=options, **case.asks)) as stream:
        chunks = [chunk.to_dict(mode="json") for chunk in stream]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        ChatCompletionChunk.model_validate(chunk)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    head = {name: part for name, part in case.shape.items() if name not in {"object", "canopy"}}
    body = {**chunks[0], "choices": joined(chunks), "usage": chunks[-1]["usage"]}
    assert mismatch(body, head) == ""
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    for number in range(case.asks.get("n", 1)):
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == number]
        assert own[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert [part["finish_reason"] is None for part in own] == [True] * (len(own) - 1) + [False]
        assert own[-1]["delta"] == {}


def test_stream_without_usage_has_none(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying("Hel", "lo")
    with client.chat.completions.create(**asked(stream=True)) as stream:
        chunks = [chunk.to_dict(mode="json") for chunk in stream]
    assert [part["delta"].get("content") for chunk in chunks for part in chunk["choices"]] == ["", "Hel", "lo", None]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"temperature": 0, "top_p": 0.5}, {"temperature": 0, "top_p": 0.5}),
        ({"top_p": 0}, {"top_p": 1e-9}),
        ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"max_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_tokens": 65_535}, {"max_new_tokens": 65_535}),
        ({"max_tokens": -1}, {}),
        ({"max_tokens": None}, {}),
        ({"max_tokens": 6.0}, {"max_new_tokens": 6}),
        ({"max_completion_tokens": -1, "max_tokens": 3}, {}),
        ({"max_completion_tokens": 4, "max_tokens": 3}, {"max_new_tokens": 4}),
        ({"seed": 7}, {"seed": 7}),
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"stop": "\n"}, {"stop": ("\n",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": []}, {"stop": ()}),
        ({"frequency_penalty": 0.5, "presence_penalty": -1}, {"frequency_penalty": 0.5, "presence_penalty": -1}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"repetition_penalty": 1, "presence_penalty": 0}, {"repetition_penalty": 1, "presence_penalty": 0}),
        ({"logit_bias": {"12": -100, "7": 5}}, {"logit_bias": {12: -100, 7: 5}}),
        ({"logprobs": True}, {"log_probs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"log_probs": 20}),
        ({"logprobs": False}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"grammar": Grammar("json")}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}},
            {"grammar": Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))},
        ),
        ({"canopy": {"nodes": 16, "trace": True}}, {"nodes": 16, "trace": True}),
        ({"user": "me", "odd": 1, "metadata": {"a": "b"}, "store": False}, {}),
    ],
    ids=lambda value: json.dumps(value, default=str)[:70],
)
def test_fields_become_options(
    client: openai.OpenAI, backend: ScriptedBackend, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    backend.script = saying("Hello")
    client.chat.completions.create(**asked(**fields))
    assert backend.last.options == options
    assert backend.last.defaults == {"temperature": 1.0}


def test_choices_have_seeds_of_their_own(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    before = len(backend.jobs)
    client.chat.completions.create(**asked(n=4, seed=7))
    assert sorted(job.options["seed"] or 0 for job in backend.jobs[before:]) == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"role": "developer", "content": "Be brief."}, Message("system", "Be brief.")),
        ({"role": "assistant", "content": None}, Message("assistant", "")),
        ({"role": "user", "content": "Hi", "name": "ann"}, Message("user", "Hi", name="ann")),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            Message("user", "ab"),
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_7", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
                ],
            },
            Message("assistant", "", tool_calls=(ToolCall("call_7", "weather", "{}"),)),
        ),
        ({"role": "assistant", "refusal": "No."}, Message("assistant", "No.")),
        (
            {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
            Message("assistant", "Hello", reasoning="hm"),
        ),
        (
            {"role": "tool", "tool_call_id": "call_7", "content": "rain"},
            Message("tool", "rain", tool_call_id="call_7"),
        ),
    ],
    ids=["developer", "no content", "name", "parts", "calls", "refusal", "reasoning", "tool"],
)
def test_messages_are_read(
    client: openai.OpenAI, backend: ScriptedBackend, given: dict[str, Any], read: Message
) -> None:
    client.chat.completions.create(**asked(messages=[given]))
    assert list(backend.last.messages) == [read]


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"tools": [WEATHER]}, ToolChoice()),
        ({"tools": [WEATHER], "tool_choice": "none"}, ToolChoice("none")),
        ({"tools": [WEATHER], "tool_choice": "required"}, ToolChoice("required")),
        ({"tools": [WEATHER], "tool_choice": NAMED}, ToolChoice("required", "weather")),
        ({"tools": [WEATHER], "tool_choice": ALLOWED}, ToolChoice("required")),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, ToolChoice(parallel=False)),
        ({"tool_choice": "none"}, ToolChoice("none")),
    ],
    ids=["auto", "none", "required", "named", "allowed", "one at a time", "none without tools"],
)
def test_tool_choice_is_read(
    client: openai.OpenAI, backend: ScriptedBackend, fields: dict[str, Any], read: ToolChoice
) -> None:
    client.chat.completions.create(**asked(**fields))
    assert backend.last.tool_choice == read
    if fields.get("tools"):
        function: Any = WEATHER["function"]
        assert list(backend.last.tools) == [Tool("weather", "of a town", function["parameters"], strict=True)]


def test_some_of_many_tools_are_allowed(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    many: list[Any] = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(300)]
    client.chat.completions.create(**asked(tools=[*many, WEATHER]))
    assert len(backend.last.tools) == 301
    client.chat.completions.create(**asked(tools=[*many, WEATHER], tool_choice=ALLOWED))
    assert [tool.name for tool in backend.last.tools] == ["weather"]
