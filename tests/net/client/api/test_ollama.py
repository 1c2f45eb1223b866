"""Ollama's API against the shapes that its documentation states."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from client.api.backend import ChatJob, TextJob
from client.base.options import Grammar
from client.base.stats import TokenLogProbs
from client.dialogue.messages import Message, ReasoningDelta, Tool, ToolCall, ToolCallDelta
from swarm.base.errors import Busy, GenerationInterrupted, RouteError
from tests.net.client.api.json_shapes import mismatch
from tests.scripted_backend import CARD, Script, ScriptedBackend, saying, steps

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a town", "parameters": SCHEMA},
}
CALL = (ToolCallDelta(0, "call_7", "weather", '{"town":'), ToolCallDelta(0, "", "", '"Ulm"}'))
CALLED = {"id": "call_7", "function": {"index": 0, "name": "weather", "arguments": {"town": "Ulm"}}}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
TOOK = {
    "total_duration": 500_000_000,
    "load_duration": 0,
    "prompt_eval_count": 7,
    "prompt_eval_duration": 100_000_000,
    "eval_duration": 400_000_000,
}


@pytest.fixture(autouse=True)
def as_before(backend: ScriptedBackend) -> None:
    backend.script = saying("He", "llo")
    backend.model = CARD


def ask(url: str, path: str, **body: Any) -> httpx2.Response:  # noqa: ANN401
    return httpx2.post(f"{url}{path}", json={"model": "demo-model", **body})


def lines(answer: httpx2.Response) -> list[dict[str, Any]]:
    """The objects of a stream."""
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def said(**message: Any) -> dict[str, Any]:  # noqa: ANN401
    """A line of a chat that goes on."""
    return {
        "model": "demo-model",
        "created_at": TIME,
        "message": {"role": "assistant", "content": "", **message},
        "done": False,
    }


STREAMS = {
    "pieces, then done with durations": (
        {},
        saying("He", "llo"),
        [
            said(content="He"),
            said(content="llo"),
            {**said(), "done": True, "done_reason": "stop", "eval_count": 2, **TOOK},
        ],
    ),
    "done_reason length": (
        {"options": {"num_predict": 1}},
        saying("He", reason="length"),
        [said(content="He"), {"done": True, "done_reason": "length"}],
    ),
    "thinking apart from content": (
        {"think": True},
        saying(ReasoningDelta("hm"), "Hello"),
        [said(thinking="hm"), said(content="Hello"), {"done": True}],
    ),
    "tool_calls with arguments as an object": (
        {"tools": [WEATHER]},
        saying("Wait.", *CALL, reason="tool_calls"),
        [said(content="Wait."), said(tool_calls=[CALLED]), {"done": True, "done_reason": "stop"}],
    ),
    "an error in the middle is a line": (
        {},
        lambda job: [*steps("He")[:-1], GenerationInterrupted("the chain broke", "He", ())],
        [said(content="He"), {"error": re.compile(".*the chain broke")}],
    ),
}


@pytest.mark.parametrize(
    ("asks", "script", "shapes"), STREAMS.values(), ids=[f"chat stream: {name}" for name in STREAMS]
)
def test_chat_stream(
    url: str, backend: ScriptedBackend, asks: dict[str, Any], script: Script, shapes: list[Any]
) -> None:
    backend.script = script
    assert mismatch(lines(ask(url, "/api/chat", messages=HI, **asks)), shapes) == ""


WHOLE: dict[str, tuple[str, dict[str, Any], Script, dict[str, Any]]] = {
    "chat: one object with the message": (
        "/api/chat",
        {"messages": HI},
        saying("He", "llo"),
        {
            "model": "demo-model",
            "created_at": TIME,
            "message": {"role": "assistant", "content": "Hello"},
            "done": True,
            "done_reason": "stop",
            "eval_count": 2,
            **TOOK,
        },
    ),
    "chat: tool_calls and thinking in the message": (
        "/api/chat",
        {"messages": HI, "tools": [WEATHER]},
        saying(ReasoningDelta("hm"), *CALL, reason="tool_calls"),
        {"message": {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [CALLED]}},
    ),
    "generate: one object with the response": (
        "/api/generate",
        {"prompt": "Hi"},
        saying("He", "llo"),
        {"model": "demo-model", "created_at": TIME, "response": "Hello", "done": True, "done_reason": "stop", **TOOK},
    ),
    "generate: thinking beside the response": (
        "/api/generate",
        {"prompt": "Hi", "think": True},
        saying(ReasoningDelta("hm"), "Hello"),
        {"response": "Hello", "thinking": "hm"},
    ),
    "chat: logprobs with the likeliest tokens": (
        "/api/chat",
        {"messages": HI, "logprobs": True, "top_logprobs": 1},
        saying("Hi", log_probs=[TokenLogProbs(100, -0.5, ((100, -0.5),))]),
        {
            "logprobs": [
                {
                    "token": "t100",
                    "logprob": -0.5,
                    "bytes": list(b"t100"),
                    "top_logprobs": [{"token": "t100", "logprob": -0.5, "bytes": list(b"t100")}],
                }
            ]
        },
    ),
    "chat: no messages load the model": (
        "/api/chat",
        {"messages": []},
        saying("x"),
        {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "load"},
    ),
    "generate: no prompt and keep_alive 0 unload it": (
        "/api/generate",
        {"keep_alive": 0},
        saying("x"),
        {"response": "", "done": True, "done_reason": "unload"},
    ),
}


@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE.keys())
def test_whole(url: str, backend: ScriptedBackend, case: tuple[str, dict[str, Any], Script, dict[str, Any]]) -> None:
    path, asks, backend.script, shape = case
    answer = ask(url, path, stream=False, **asks)
    assert answer.status_code == 200
    assert mismatch(answer.json(), shape) == ""


def test_generate_stream(url: str) -> None:
    told = lines(ask(url, "/api/generate", prompt="Hi"))
    assert (
        mismatch(
            told,
            [
                {"model": "demo-model", "created_at": TIME, "response": "He", "done": False},
                {"response": "llo", "done": False},
                {"response": "", "done": True, "done_reason": "stop", "eval_count": 2, **TOOK},
            ],
        )
        == ""
    )


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Ollama's defaults": ({}, {"options": {}, "defaults": DEFAULTS, "reasoning": None, "tools": ()}),
    "every option": (
        {
            "options": {
                "num_predict": 9,
                "temperature": 0,
                "top_k": 5.0,
                "top_p": 0.5,
                "min_p": 0.1,
                "seed": 3,
                "stop": ["a"],
                "repeat_penalty": 1.1,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "num_ctx": 4096,
                "mirostat": 0,
                "repeat_last_n": -1,
            }
        },
        {
            "options": {
                "max_new_tokens": 9,
                "temperature": 0,
                "top_k": 5,
                "top_p": 0.5,
                "min_p": 0.1,
                "seed": 3,
                "stop": ("a",),
                "repetition_penalty": 1.1,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
            }
        },
    ),
    "no limit, no seed, all tokens": (
        {"options": {"num_predict": -1, "seed": -1, "top_k": 0, "top_p": 1, "temperature": 1}},
        {"options": {"temperature": 1, "top_p": 1, "top_k": 0}},
    ),
    "no limit, the best token": ({"options": {"num_predict": 0, "top_p": 0}}, {"options": {"top_p": 1e-9}}),
    "no penalties": (
        {"options": {"repeat_last_n": 0, "repeat_penalty": 1.1, "presence_penalty": 1}},
        {"options": {"repetition_penalty": 1.0}},
    ),
    "format json": ({"format": "json"}, {"options": {"grammar": Grammar("json")}}),
    "format schema": (
        {"format": SCHEMA},
        {"options": {"grammar": Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))}},
    ),
    "think false": ({"think": False}, {"reasoning": False}),
    "think high": ({"think": "high"}, {"reasoning": True}),
    "tools": ({"tools": [WEATHER]}, {"tools": (Tool("weather", "of a town", SCHEMA),)}),
}


@pytest.mark.parametrize(("asks", "job"), ASKED.values(), ids=[f"job: {name}" for name in ASKED])
def test_job(url: str, backend: ScriptedBackend, asks: dict[str, Any], job: dict[str, Any]) -> None:
    assert ask(url, "/api/chat", messages=HI, **asks).status_code == 200
    assert {name: getattr(backend.last, name) for name in job} == job


def call_of(name: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"function": {"name": name, "arguments": {}}, **fields}


def result(text: str, call_id: str, name: str) -> Message:
    return Message("tool", text, tool_call_id=call_id, name=name)


def test_results_find_their_calls(url: str, backend: ScriptedBackend) -> None:
    """By id, by name, or in the order of the calls."""
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [call_of("a"), call_of("b"), call_of("c")],
        },
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of a"},
        {"role": "tool", "content": "of c", "tool_call_id": "call_2"},
        {"role": "user", "content": "Well?"},
    ]
    assert ask(url, "/api/chat", messages=messages).status_code == 200
    calls = tuple(ToolCall(f"call_{place}", name, "{}") for place, name in enumerate("abc"))
    assert list(backend.last.messages) == [
        Message("user", "Hi"),
        Message("assistant", "", reasoning="hm", tool_calls=calls),
        result("of b", "call_1", "b"),
        result("of a", "call_0", "a"),
        result("of c", "call_2", "c"),
        Message("user", "Well?"),
    ]


def test_results_of_one_tool_go_to_its_calls_in_their_order(url: str, backend: ScriptedBackend) -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call_of("a"), call_of("a")]},
        {"role": "tool", "content": "first", "tool_name": "a"},
        {"role": "tool", "content": "second", "tool_name": "a"},
    ]
    assert ask(url, "/api/chat", messages=messages).status_code == 200
    assert list(backend.last.messages[2:]) == [result("first", "call_0", "a"), result("second", "call_1", "a")]


def test_generate_asks_in_the_template_or_goes_on(url: str, backend: ScriptedBackend) -> None:
    ask(url, "/api/generate", prompt="Hi", system="First.")
    assert backend.jobs[-1] == ChatJob((Message("system", "First."), Message("user", "Hi")), defaults=DEFAULTS)  # type: ignore[arg-type]
    ask(url, "/api/generate", prompt="Once", raw=True)
    assert backend.jobs[-1] == TextJob("Once", defaults=DEFAULTS)  # type: ignore[arg-type]
    backend.model = replace(CARD, has_template=False)
    ask(url, "/api/generate", prompt="Twice")
    assert backend.jobs[-1] == TextJob("Twice", defaults=DEFAULTS)  # type: ignore[arg-type]


ERRORS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "another model is 404": ("/api/chat", {"model": "other", "messages": HI}, 404, "model 'other' not found"),
    "another tag is 404": ("/api/chat", {"model": "demo-model:7b", "messages": HI}, 404, "model 'demo-model:7b' not"),
    "show of another model is 404": ("/api/show", {"model": "other"}, 404, "model 'other' not found"),
    "mirostat": ("/api/chat", {"messages": HI, "options": {"mirostat": 1}}, 400, "'mirostat' is not supported"),
    "penalties of the last tokens": (
        "/api/chat",
        {"messages": HI, "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
        400,
        "'repeat_last_n' is -1 or 0 here",
    ),
    "suffix": ("/api/generate", {"prompt": "Hi", "suffix": "x"}, 400, "does not support insert"),
    "template": ("/api/generate", {"prompt": "Hi", "template": "{{ .Prompt }}"}, 400, "'template' is not supported"),
    "context": ("/api/generate", {"prompt": "Hi", "context": [1]}, 400, "'context' is not supported"),
    "raw with system": ("/api/generate", {"prompt": "Hi", "raw": True, "system": "x"}, 400, "raw mode does not"),
    "a role that is not there": ("/api/chat", {"messages": [{"role": "x", "content": ""}]}, 400, "messages[0].role"),
    "embeddings": ("/api/embed", {"input": "Hi"}, 501, "embeddings are not served"),
    "pull": ("/api/pull", {}, 501, "models are not pulled here"),
}


@pytest.mark.parametrize(
    ("path", "asks", "status", "words"), ERRORS.values(), ids=[f"error: {name}" for name in ERRORS]
)
def test_error(url: str, path: str, asks: dict[str, Any], status: int, words: str) -> None:
    answer = ask(url, path, **asks)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert words in answer.json()["error"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(Busy("peer", "0-4", "full"), 429), (RouteError("nobody serves 5-8", [(5, 8)]), 503)],
    ids=["a full swarm is 429", "missing layers are 503"],
)
def test_an_error_before_the_stream_is_a_status(
    url: str, backend: ScriptedBackend, error: Exception, status: int
) -> None:
    backend.script = lambda job: [error]
    answer = ask(url, "/api/chat", messages=HI)
    assert answer.status_code == status
    assert int(answer.headers["retry-after"]) >= 1
    assert set(answer.json()) == {"error"}


def test_what_is_said_of_the_model(url: str, backend: ScriptedBackend) -> None:
    details = {"format": "safetensors", "family": str, "families": list, "parameter_size": str}
    listed = {
        "name": "demo-model:latest",
        "model": "demo-model:latest",
        "size": int,
        "digest": CARD.fingerprint,
        "details": details,
    }
    tags = httpx2.get(f"{url}/api/tags").json()
    assert mismatch(tags, {"models": [{**listed, "modified_at": TIME}]}) == ""
    running = httpx2.get(f"{url}/api/ps").json()
    assert (
        mismatch(running, {"models": [{**listed, "expires_at": TIME, "size_vram": int, "context_length": 2048}]}) == ""
    )
    backend.model = replace(CARD, is_complete=False)
    assert httpx2.get(f"{url}/api/ps").json() == {"models": []}
    shown = ask(url, "/api/show", model="demo-model:latest").json()
    shape = {
        "details": details,
        "model_info": {"general.architecture": "canopy", "canopy.context_length": 2048},
        "capabilities": ["completion", "tools"],
        "modified_at": TIME,
        "template": str,
        "parameters": str,
    }
    assert mismatch(shown, shape) == ""
    assert mismatch(httpx2.get(f"{url}/api/version").json(), {"version": re.compile(r"\d+\.\d+\.\d+")}) == ""


def test_a_field_in_the_wrong_place_is_named_and_ignored(url: str) -> None:
    """As Ollama does; `temperature` belongs to the options."""
    answer = ask(url, "/api/chat", messages=HI, stream=False, temperature=0.1, options={"num_ctx": 9})
    assert (answer.status_code, answer.headers["canopy-left-out"]) == (200, "field temperature, field num_ctx")


def test_the_tag_latest_names_the_model(url: str) -> None:
    answer = ask(url, "/api/chat", model="demo-model:latest", messages=HI, stream=False)
    assert answer.json()["model"] == "demo-model:latest"
