"""Several answers to one request: none holds a place and waits for another, and few run at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx2
import pytest

from client.api.app import build_app
from client.api.backend import AnswerEvent, ApiCaller, Job
from client.api.context import AT_ONCE
from tests.scripted_backend import ScriptedBackend, saying

WORDS = ("word ",) * 200
"""More events than may wait for a reader."""


@dataclass(slots=True)
class FewPlaces(ScriptedBackend):
    """A run holds a place from its beginning to its end.

    Attributes:
        places: for runs.
        running: how many there are now.
        most: at a time so far.
    """

    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    running: int = 0
    most: int = 0

    async def run(self, job: Job, caller: ApiCaller) -> AsyncGenerator[AnswerEvent, None]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async with self.places, aclosing(ScriptedBackend.run(self, job, caller)) as events:
                async for event in events:
                    yield event
        finally:
            self.running -= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_share_the_only_place(*, stream: bool) -> None:
    backend = FewPlaces(saying(*WORDS))
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 6, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    transport = httpx2.ASGITransport(build_app(backend))
    async with asyncio.timeout(15), httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        answer = await http.post("/v1/chat/completions", json=body, timeout=15)
    assert answer.status_code == 200
    assert f'"completion_tokens":{6 * len(WORDS)}' in answer.text
    assert (backend.closed, backend.most) == (6, AT_ONCE)
