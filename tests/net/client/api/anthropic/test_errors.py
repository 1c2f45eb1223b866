"""Anthropic's Messages API by the official client, against its documented shapes: errors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import pytest

from client.api.errors import PromptTooLong
from swarm.errors import Busy, ConfigError, RouteError
from tests.net.client.api.anthropic.questions import HI, KEY, TOOL_USE, WEATHER, request
from tests.net.client.api.json_shapes import mismatch
from tests.scripted_backend import Script, ScriptedBackend, saying


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
