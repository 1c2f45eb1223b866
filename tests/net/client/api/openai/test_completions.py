"""Completions and models as OpenAI's official client speaks them, against shapes that its documentation states."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion, Model

from client.api.backend import Job, TextJob
from client.base.stats import TokenLogProbs
from tests.net.client.api.json_shapes import mismatch
from tests.scripted_backend import CARD, Script, ScriptedBackend, saying, steps

LOG_PROBS = [TokenLogProbs(100, -0.25, ((100, -0.25), (7, -2.0))), TokenLogProbs(101, -0.5, ((101, -0.5),))]


@dataclass(frozen=True)
class Case:
    """A request, the answer that is played, and the shape of the body."""

    asks: dict[str, Any]
    shape: dict[str, Any]
    script: Script = field(default_factory=lambda: saying("Hel", "lo"))


def choice(text: str, index: int = 0, reason: str = "stop") -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": reason}


def of_prompt(job: Job) -> list[Any]:
    assert isinstance(job, TextJob)
    return steps(f"<{job.prompt}>")


BODIES = {
    "the head of a completion": Case(
        {"prompt": "It was"},
        {
            "id": re.compile("cmpl-.+"),
            "object": "text_completion",
            "created": int,
            "model": "demo-model",
            "system_fingerprint": re.compile("fp_.+"),
            "choices": [choice("Hello")],
            "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
        },
    ),
    "echo of a text": Case({"prompt": "It was ", "echo": True}, {"choices": [choice("It was Hello")]}),
    "echo of tokens": Case({"prompt": [3, 4], "echo": True}, {"choices": [choice("t3t4Hello")]}),
    "several prompts": Case(
        {"prompt": ["a", "b"]},
        {"choices": [choice("<a>"), choice("<b>", 1)], "usage": {"prompt_tokens": 14, "completion_tokens": 2}},
        of_prompt,
    ),
    "several prompts of tokens": Case(
        {"prompt": [[1], [2, 3]]}, {"choices": [choice("<[1]>"), choice("<[2, 3]>", 1)]}, of_prompt
    ),
    "choices of several prompts": Case(
        {"prompt": ["a", "b"], "n": 2, "echo": True},
        {
            "choices": [choice("a<a>"), choice("a<a>", 1), choice("b<b>", 2), choice("b<b>", 3)],
            "usage": {"prompt_tokens": 14, "completion_tokens": 4},
        },
        of_prompt,
    ),
    "length": Case(
        {"prompt": "a", "max_tokens": 2},
        {"choices": [choice("Hello", reason="length")]},
        saying("Hel", "lo", reason="length"),
    ),
    "log-probabilities": Case(
        {"prompt": "a", "logprobs": 2},
        {
            "choices": [
                {
                    "logprobs": {
                        "tokens": ["t100", "t101"],
                        "token_logprobs": [-0.25, -0.5],
                        "top_logprobs": [{"t100": -0.25, "t7": -2.0}, {"t101": -0.5}],
                    }
                }
            ]
        },
        saying("Hel", "lo", log_probs=LOG_PROBS),
    ),
    "log-probabilities without others": Case(
        {"prompt": "a", "logprobs": 0},
        {"choices": [{"logprobs": {"tokens": ["t100", "t101"], "top_logprobs": None}}]},
        saying("Hel", "lo", log_probs=LOG_PROBS),
    ),
}


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES.keys())
def test_body(client: openai.OpenAI, backend: ScriptedBackend, case: Case) -> None:
    backend.script = case.script
    told = json.loads(client.completions.with_raw_response.create(model="demo-model", **case.asks).text)
    assert mismatch(told, case.shape) == ""
    Completion.model_validate(told)


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES.keys())
def test_stream_adds_up_to_the_same_body(client: openai.OpenAI, backend: ScriptedBackend, case: Case) -> None:
    backend.script = case.script
    options: Any = {"include_usage": True}
    with client.completions.create(model="demo-model", stream=True, stream_options=options, **case.asks) as stream:
        chunks = [chunk.to_dict(mode="json") for chunk in stream]
    whole: dict[int, dict[str, Any]] = {}
    for chunk in chunks:  # OpenAI's class does not know the `null` that its service sends before the end
        Completion.model_validate({**chunk, "choices": [part for part in chunk["choices"] if part["finish_reason"]]})
        for part in chunk["choices"]:
            own = whole.setdefault(part["index"], choice("", part["index"]))
            own["text"] += part["text"]
            own["finish_reason"] = part["finish_reason"]
            if part["logprobs"] is not None:
                own["logprobs"] = own["logprobs"] or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
                for name, values in own["logprobs"].items():
                    given = part["logprobs"][name]
                    own["logprobs"][name] = None if given is None else [*values, *given]
    body = {**chunks[-1], "choices": [whole[number] for number in sorted(whole)]}
    assert mismatch(body, case.shape) == ""


def test_options_have_openais_defaults(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    client.completions.create(model="demo-model", prompt="a")
    assert backend.jobs[-1] == TextJob("a", {"max_new_tokens": 16}, is_whole=True)
    for _ in client.completions.create(model="demo-model", prompt="a", stream=True):
        pass
    assert backend.jobs[-1] == TextJob("a", {"max_new_tokens": 16}), "a stream shows what there is"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": 5}, "invalid_value", "prompt"),
        ({"prompt": [-1]}, "invalid_value", "prompt"),
        ({"prompt": ["a"] * 129}, "invalid_value", "prompt"),
        ({"prompt": ["a"] * 64, "n": 4}, None, "n"),
        ({"prompt": "a", "suffix": "z"}, "unsupported_parameter", "suffix"),
        ({"prompt": "a", "best_of": 3}, "unsupported_parameter", "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "unsupported_parameter", "logprobs"),
        ({"prompt": "a", "logprobs": 6}, "invalid_value", "logprobs"),
        ({"prompt": "a", "max_tokens": -2}, "invalid_value", "max_tokens"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_named(client: openai.OpenAI, fields: dict[str, Any], code: str | None, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo-model", **fields)
    assert caught.value.code == code
    assert str(caught.value.param).startswith(param)


def test_models_tell_their_context_and_health(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.model = replace(CARD, is_complete=False, missing=("5-8",), serve_line="node serve demo --layers 5-8")
    (listed,) = client.models.list().data
    assert listed.to_dict() == client.models.retrieve("demo-model").to_dict()
    backend.model = CARD
    shape = {
        "id": "demo-model",
        "object": "model",
        "created": int,
        "owned_by": str,
        "context_length": 2_048,
        "health": {
            "is_complete": False,
            "missing_layers": ["5-8"],
            "serve_line": "node serve demo --layers 5-8",
        },
    }
    assert mismatch(listed.to_dict(), shape) == ""
    Model.model_validate(listed.to_dict())


def test_a_model_with_a_slash_is_found(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.model = replace(CARD, id="people/model-7b")
    assert client.models.retrieve("people/model-7b").id == "people/model-7b"
    backend.model = CARD
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("people/model-7b")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_embeddings_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model="demo-model", input="a")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/files", 404), ("GET", "/v1/completions", 405)])
def test_other_paths_are_told_so(url: str, method: str, path: str, status: int) -> None:
    answer = httpx2.request(method, f"{url}{path}")
    assert answer.status_code == status
    assert mismatch(answer.json(), {"error": {"message": str, "type": "invalid_request_error", "code": str}}) == ""


def test_the_reference_needs_nothing_from_elsewhere(url: str) -> None:
    page = httpx2.get(f"{url}/docs").text
    assert "POST /v1/chat/completions" in page
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["/openapi.json"]
    assert "/v1/completions" in httpx2.get(f"{url}/openapi.json").json()["paths"]
