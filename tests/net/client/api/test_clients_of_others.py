"""Examples of other makers' clients as they are written, and requests of Open WebUI as its 0.12.4 sends them."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from client.base.options import Grammar
from tests.net.client.api.json_shapes import mismatch
from tests.scripted_backend import CARD, ScriptedBackend, saying

EXAMPLES = Path(__file__).parents[4] / "examples" / "api"
MODEL = "demo-target"
RUN = ("openai_python.py", "anthropic_python.py", "huggingface_python.py")
TRIED_BY_HAND = {
    *("openai_node.mjs", "litellm_python.py", "langchain_python.py"),
    *("extra-openai-models.yaml", "continue.yaml"),
}
"""Their packages are not installed for the tests; docs/guides/clients.md says with which versions they were tried."""
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend(saying("At ", "sea."), replace(CARD, id=MODEL))


def test_every_example_is_tried() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {*RUN, *TRIED_BY_HAND}
    page = (EXAMPLES.parents[1] / "docs/guides/clients.md").read_text(encoding="utf-8")
    assert [name for name in (*RUN, *TRIED_BY_HAND) if name not in page] == []


@pytest.mark.parametrize("name", RUN)
def test_an_example_prints_the_answer(
    name: str, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CANOPY_API", url)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the tests' own: it stops this client too
    runpy.run_path(str(EXAMPLES / name))
    assert capsys.readouterr().out == "At sea.\n"


def test_configurations_name_what_the_api_answers_to() -> None:
    llm = yaml.safe_load((EXAMPLES / "extra-openai-models.yaml").read_text(encoding="utf-8"))
    editor = yaml.safe_load((EXAMPLES / "continue.yaml").read_text(encoding="utf-8"))
    told = {(one["model_name"], one["api_base"]) for one in llm}
    told |= {(one["model"], one["apiBase"]) for one in editor["models"]}
    assert told == {(MODEL, "http://127.0.0.1:8000/v1")}


@pytest.mark.parametrize("field", ["value", "schema"])
def test_a_schema_beside_json_object_is_kept(field: str, http: httpx2.Client, backend: ScriptedBackend) -> None:
    """Hugging Face's client sends it as `value`, llama.cpp's and others as `schema`."""
    body = {
        "messages": [{"role": "user", "content": "Who?"}],
        "response_format": {"type": "json_object", field: SCHEMA},
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert backend.last.options.get("grammar") == Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is he?"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "chat": {"stream": True, "model": MODEL, "messages": ASKED, "stream_options": {"include_usage": True}},
    "with parameters": {
        **{"stream": True, "model": MODEL, "messages": ASKED, "temperature": 0.8, "top_p": 0.9, "min_p": 0.0},
        **{"max_tokens": 64, "frequency_penalty": 0.1, "presence_penalty": 0.0, "seed": 3, "stop": ["\n\n"]},
        **{"top_k": 40, "logit_bias": {"100": 5}, "reasoning_effort": "low"},
    },
    "title": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "### Task:\n…"}],
        "stream": False,
        "max_tokens": 1000,
    },
    "go on": {
        **{"stream": True, "model": MODEL, "continue_final_message": True, "add_generation_prompt": False},
        "messages": [*ASKED, {"role": "assistant", "content": "At"}],
    },
    "text in parts": {
        **{"stream": True, "model": MODEL},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Where is he?"}]}],
    },
}


@pytest.mark.parametrize("name", REQUESTS)
def test_open_webuis_requests_are_answered(name: str, http: httpx2.Client, backend: ScriptedBackend) -> None:
    body = REQUESTS[name]
    answer = http.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer none"})
    assert answer.status_code == 200
    if not body["stream"]:
        assert answer.json()["choices"][0]["message"]["content"] == "At sea."
        return
    *chunks, done = [event.data for event in httpx2.EventSource(answer)]
    assert done == "[DONE]"
    deltas = [choice["delta"] for chunk in map(json.loads, chunks) for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "At sea."
    assert backend.last.continues == (name == "go on")


def test_open_webui_finds_the_model_in_both_dialects(http: httpx2.Client) -> None:
    models = http.get("/v1/models", headers={"authorization": "Bearer none"}).json()
    assert mismatch(models, {"object": "list", "data": [{"id": MODEL, "owned_by": str}]}) == ""
    assert mismatch(http.get("/api/version").json(), {"version": str}) == ""
    assert mismatch(http.get("/api/tags").json(), {"models": [{"name": str, "model": str, "details": dict}]}) == ""
