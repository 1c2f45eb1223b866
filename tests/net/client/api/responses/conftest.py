"""A server of the Responses API for each module, and the official client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from client.api.app import build_app
from client.api.context import ApiSettings
from tests.api_server import served
from tests.net.client.api.responses.questions import KEYS
from tests.scripted_backend import ScriptedBackend, saying


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend(saying("Hello"))


@pytest.fixture(scope="module")
def url(backend: ScriptedBackend) -> Iterator[str]:
    with served(build_app(backend, ApiSettings(keys=KEYS))) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as made:
        yield made
