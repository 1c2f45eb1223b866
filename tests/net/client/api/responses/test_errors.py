"""OpenAI's Responses API by the official client, against its documented shapes: errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from swarm.base.errors import Busy, ContextFull, RouteError
from tests.net.client.api.json_shapes import mismatch
from tests.scripted_backend import Script, ScriptedBackend, saying


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


def test_a_wrong_key_is_401(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="sk-wrong").responses.create(model="demo-model", input="Hi")
    assert caught.value.code == "invalid_api_key"
