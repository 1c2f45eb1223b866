"""The page of dialects names every field that a request may have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from client.api.anthropic.request import MessagesRequest
from client.api.ollama.request import ChatRunRequest, GenerateRequest, RunOptions
from client.api.openai.fields import ApiModel
from client.api.responses.request import ResponsesRequest
from client.api.responses.store import MAX_AGE_S, MAX_BYTES, MAX_RESPONSE_BYTES, MAX_RESPONSES

PAGE = (Path(__file__).parents[3] / "docs/reference/api-dialects.md").read_text()
PARTS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])


@pytest.mark.parametrize(
    ("part", "model"),
    [
        ("Responses (OpenAI)", ResponsesRequest),
        ("Messages (Anthropic)", MessagesRequest),
        ("Ollama", ChatRunRequest),
        ("Ollama", GenerateRequest),
        ("Ollama", RunOptions),
    ],
)
def test_every_field_is_named(part: str, model: type[ApiModel]) -> None:
    named = set(re.findall(r"`(\w+)`", PARTS[part]))
    assert set(model.model_fields) - named == set()


def test_the_bounds_are_those_of_the_code() -> None:
    assert f"| {MAX_RESPONSES:,} |" in PAGE
    assert f"| {MAX_BYTES >> 20} MiB |" in PAGE
    assert f"| {MAX_RESPONSE_BYTES >> 20} MiB |" in PAGE
    assert f"| {MAX_AGE_S / 3600:.0f} hours |" in PAGE
