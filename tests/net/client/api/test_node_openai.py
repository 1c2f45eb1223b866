"""OpenAI's official Node client: one process asks for every case, and each test reads what its case saw."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.api.app import build_app
from client.api.backend import ChatJob, Job
from client.base.stats import TokenLogProbs
from client.dialogue.messages import ToolCallDelta
from swarm.base.errors import GenerationInterrupted
from tests.api_server import served
from tests.net.client.api.json_shapes import mismatch
from tests.scripted_backend import ScriptedBackend, Step, steps

NPM = Path(__file__).parents[3] / "npm"
pytestmark = pytest.mark.needs_npm

CALL = (ToolCallDelta(0, "call_7", "weather", '{"town":'), ToolCallDelta(0, "", "", '"Ulm"}'))
CALLED = ["call_7", "weather", {"town": "Ulm"}]
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "completion_tokens_details": {"accepted_prediction_tokens": int},
}
SEEN: dict[str, Any] = {
    "chat": {"text": "Hello", "reason": "stop", "usage": USAGE, "request_id": str},
    "chat_stream": {"text": "Hello", "usage": USAGE},
    "chat_tools": {"call": CALLED, "reason": "tool_calls"},
    "chat_runner": [CALLED],
    "chat_schema": {"town": "Ulm"},
    "chat_log_probs": [["t100", -0.5, 1], ["t101", -1.5, 0]],
    "unknown_model": {
        "kind": "NotFoundError",
        "status": 404,
        "code": "model_not_found",
        "param": "model",
        "type": "invalid_request_error",
    },
    "bad_field": {"kind": "BadRequestError", "status": 400, "param": "temperature"},
    "broken_stream": {"kind": "APIError", "code": "generation_interrupted"},
    "response": {"text": "Hello", "status": "completed", "again": "Hello"},
    "response_stream": {
        "text": "Hello",
        "kinds": [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ],
    },
    "response_tools": [["function_call", "call_7", '{"town":"Ulm"}']],
    "models": ["demo-model"],
}


def answer(job: Job) -> list[Step]:
    """What fits the job: a call where there are tools, JSON where there is a grammar, else a greeting."""
    assert isinstance(job, ChatJob)
    if job.tools:
        return [*steps(*CALL, reason="tool_calls")]
    if job.options.get("grammar") is not None:
        return [*steps('{"town":"Ulm"}')]
    if job.options.get("log_probs") is not None:
        log_probs = [TokenLogProbs(100, -0.5, ((100, -0.5),)), TokenLogProbs(101, -1.5)]
        return [*steps("He", "llo", log_probs=log_probs)]
    return [*steps("He", "llo")]


def broken(job: Job) -> list[Step]:
    return [*steps("He")[:-1], GenerationInterrupted("the chain broke", "He", ())]


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, Any]]:
    """What the client saw, by case."""
    backend = ScriptedBackend(answer)
    with served(build_app(backend)) as url:
        result = run_cases(url, [name for name in SEEN if name != "broken_stream"])
        backend.script = broken
        yield result | run_cases(url, ["broken_stream"])


def run_cases(url: str, names: list[str]) -> dict[str, Any]:
    command = ["node", str(NPM / "openai.mjs"), f"{url}/v1", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize(("name", "shape"), SEEN.items(), ids=[f"node client: {name}" for name in SEEN])
def test_case(seen: dict[str, Any], name: str, shape: Any) -> None:  # noqa: ANN401
    assert mismatch(seen[name], shape) == ""


def test_the_lock_file_names_no_registry() -> None:
    assert "resolved" not in (NPM / "package-lock.json").read_text()
