"""Chat completions that go wrong: fields, swarms, readers; told as OpenAI's documentation states."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from client.api.app import build_app
from client.api.context import ApiSettings
from client.api.queue import QueueFull
from swarm.base.errors import Busy, ConfigError, ContextFull, GenerationInterrupted, RouteError
from tests.api_server import served
from tests.net.client.api.json_shapes import mismatch
from tests.net.client.api.openai.chat_requests import CLOCK, HI, NAMED, asked
from tests.scripted_backend import Gate, ScriptedBackend, steps


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": "Hi"}, 400, "invalid_value", "messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, 400, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, 400, None, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_value", "messages[0].content"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            400,
            "missing_required_parameter",
            "messages[0].tool_call_id",
        ),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"temperature": 2.5}, 400, "invalid_value", "temperature"),
        ({"temperature": True}, 400, "invalid_value", "temperature"),
        ({"top_p": 1.1}, 400, "invalid_value", "top_p"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": "5"}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": 6.5}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": -2}, 400, "invalid_value", "max_tokens"),
        ({"n": 129}, 400, "invalid_value", "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "invalid_value", "stop"),
        ({"stop": ""}, 400, "invalid_value", "stop"),
        ({"stop": 5}, 400, "invalid_value", "stop"),
        ({"frequency_penalty": 3}, 400, "invalid_value", "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, 400, None, "logit_bias"),
        ({"logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias"),
        ({"top_logprobs": 5}, 400, None, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, None, "stream_options"),
        ({"tools": [{"type": "function"}]}, 400, "missing_required_parameter", "tools[0].function"),
        ({"tools": [{"type": "custom"}], "tool_choice": "required"}, 400, None, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            400,
            "invalid_value",
            "tools[0].function.name",
        ),
        ({"tool_choice": "required"}, 400, None, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": NAMED}, 400, None, "tool_choice"),
        (
            {
                "tools": [CLOCK],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
            },
            400,
            None,
            "tool_choice",
        ),
        ({"functions": [{"name": "clock"}]}, 400, "unsupported_parameter", "functions"),
        ({"modalities": ["text", "audio"]}, 400, "unsupported_parameter", "modalities"),
        (
            {"response_format": {"type": "json_schema"}},
            400,
            "missing_required_parameter",
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format.type"),
        ({"model": "gpt-9"}, 404, "model_not_found", "model"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_named(
    client: openai.OpenAI, fields: dict[str, Any], status: int, code: str | None, param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**asked(**fields))
    error = caught.value
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.type == "invalid_request_error"
    assert isinstance(error, openai.NotFoundError if status == 404 else openai.BadRequestError)


BUSY = Busy("peer", "0-4", "no KV left")
FAILURES: dict[str, tuple[Exception, int, dict[str, Any]]] = {
    "the context is full": (
        ContextFull("This model's maximum context length is 10 tokens."),
        400,
        {"code": "context_length_exceeded", "type": "invalid_request_error", "param": "messages"},
    ),
    "an option is wrong": (ConfigError("top_p must lie in (0, 1]"), 400, {"type": "invalid_request_error"}),
    "the queue is full": (
        QueueFull("64 requests wait", 7.2),
        429,
        {"code": "rate_limit_exceeded", "type": "rate_limit_error"},
    ),
    "KV is full": (BUSY, 429, {"code": "rate_limit_exceeded", "type": "rate_limit_error"}),
    "layers are missing": (
        RouteError("nobody serves layers 4-8; this fills the gap: node serve demo --layers 4-8", [(4, 8)]),
        503,
        {"code": "layers_missing", "missing_layers": ["4-8"], "eta_s": None, "type": "service_unavailable_error"},
    ),
    "the chain broke": (GenerationInterrupted("broke", "", ()), 503, {"code": "generation_interrupted"}),
    "nobody expected it": (ValueError("secret"), 500, {"code": "internal_error", "type": "server_error"}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", FAILURES)
def test_an_error_before_the_first_token_is_a_status(
    client: openai.OpenAI, backend: ScriptedBackend, name: str, *, stream: bool
) -> None:
    raised, status, body = FAILURES[name]
    backend.script = lambda job: [raised]
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**asked(stream=stream))
    error = caught.value
    assert error.status_code == status
    assert mismatch(error.body, {"message": str, "param": body.get("param"), **body}) == ""
    assert "secret" not in str(error.body)
    waits = {"the queue is full": "8", "KV is full": "5", "layers are missing": "30", "the chain broke": "5"}
    assert error.response.headers.get("retry-after") == waits.get(name)
    is_closed = error.response.headers.get("connection") == "close"
    assert is_closed is (status == 500), "the server closes it, and another request must not meet that"


def test_an_error_in_mid_stream_is_an_event(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = lambda job: [*steps("Hel", "lo")[:2], GenerationInterrupted("the chain broke", "Hel", (1,))]
    chunks: list[ChatCompletionChunk] = []
    with (
        client.chat.completions.create(**asked(stream=True)) as stream,
        pytest.raises(openai.APIError, match="the chain broke") as caught,
    ):
        chunks.extend(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hel"
    assert mismatch(caught.value.body, {"code": "generation_interrupted", "param": None}) == ""


def test_an_error_in_one_of_several_streams_ends_all(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    before = backend.closed
    gate = Gate()

    def script(job: Any) -> list[Any]:  # noqa: ANN401
        return [*steps("Hel")[:1], gate if job.options["seed"] == 1 else GenerationInterrupted("broke", "", ())]

    backend.script = script
    with (
        client.chat.completions.create(**asked(stream=True, n=2, seed=1)) as stream,
        pytest.raises(openai.APIError, match="broke"),
    ):
        list(stream)
    assert backend.closed == before + 2


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"\xff", "application/json", 400, "invalid_json"),
        (b"[]", "application/json", 400, "invalid_value"),
        (b"", "application/json", 400, "missing_required_parameter"),
        (b'{"messages": NaN}', "application/json", 400, "invalid_json"),
        (b"[" * 50_000, "application/json", 400, "invalid_json"),
        (b"x" * 100_001, "application/json", 413, "request_too_large"),
        (b"a=b", "application/x-www-form-urlencoded", 400, "invalid_json"),
    ],
    ids=["cut", "no UTF-8", "a list", "nothing", "NaN", "nested too deeply", "too large", "a form"],
)
def test_what_is_no_request_is_told(url: str, content: bytes, kind: str, status: int, code: str | None) -> None:
    answer = httpx2.post(f"{url}/v1/chat/completions", content=content, headers={"content-type": kind})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert error["type"] == "invalid_request_error"


def test_a_body_without_a_length_is_bounded_too(url: str) -> None:
    answer = httpx2.post(
        f"{url}/v1/chat/completions",
        content=iter([b"x" * 60_000] * 2),
        headers={"content-type": "application/json"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_a_server_that_ends_answers_what_still_runs(backend: ScriptedBackend) -> None:
    settings, gate = ApiSettings(), Gate()
    first, *rest = steps("Hello")
    backend.script = lambda job: [first, gate, *rest]
    with served(build_app(backend, settings)) as base, ThreadPoolExecutor(1) as other:
        asked = other.submit(httpx2.post, f"{base}/v1/chat/completions", json={"messages": HI}, timeout=20)
        assert gate.wait_reached()
        gate.loop.call_soon_threadsafe(settings.leaving.set)
        answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_leaving")
