"""A server of all dialects over a backend that is played, one for each module, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest

from client.api.app import build_app
from client.api.context import ApiSettings
from tests.api_server import served
from tests.scripted_backend import ScriptedBackend, saying


@pytest.fixture(scope="module")
def settings() -> ApiSettings:
    return ApiSettings()


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend(saying("Hello"))


@pytest.fixture(scope="module")
def url(backend: ScriptedBackend, settings: ApiSettings) -> Iterator[str]:
    with served(build_app(backend, settings)) as base:
        yield base


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, trust_env=False) as made:
        yield made


@pytest.fixture(scope="module")
def client(url: str, settings: ApiSettings) -> Iterator[openai.OpenAI]:
    key = next(iter(settings.keys), "none")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as made:
        yield made
