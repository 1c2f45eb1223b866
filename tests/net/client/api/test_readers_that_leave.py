"""Clients of every dialect that go away in the middle: their run ends at once."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.scripted_backend import Gate, ScriptedBackend, steps

HI = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "demo-model", "max_tokens": 9, "messages": HI},
    "/api/chat": {"model": "demo-model", "messages": HI},
    "/api/generate": {"model": "demo-model", "prompt": "Hi"},
}


@pytest.mark.parametrize(("path", "body"), ASKED.items(), ids=ASKED.keys())
def test_of_a_stream(url: str, backend: ScriptedBackend, path: str, body: dict[str, Any]) -> None:
    before = backend.closed
    begun, delta, *rest = steps("Hello")
    backend.script = lambda job: [begun, delta, Gate(), *rest]
    with httpx2.stream("POST", f"{url}{path}", json={**body, "stream": True}) as answer:
        assert next(answer.iter_bytes())
    assert backend.wait_closed(before + 1)


@pytest.mark.parametrize(("path", "body"), ASKED.items(), ids=ASKED.keys())
def test_of_a_whole_answer(url: str, backend: ScriptedBackend, path: str, body: dict[str, Any]) -> None:
    before = backend.closed
    begun, *rest = steps("Hello")
    backend.script = lambda job: [begun, Gate(), *rest]
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(f"{url}{path}", json={**body, "stream": False}, timeout=0.2)
    assert backend.wait_closed(before + 1)
