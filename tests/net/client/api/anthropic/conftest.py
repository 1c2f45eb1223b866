"""A server of the Messages API for each module, and the official client."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from client.api.app import build_app
from client.api.context import ApiSettings
from tests.api_server import served
from tests.net.client.api.anthropic.questions import KEY
from tests.scripted_backend import ScriptedBackend, saying


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend(saying("Hello"))


@pytest.fixture(scope="module")
def url(backend: ScriptedBackend) -> Iterator[str]:
    with served(build_app(backend, ApiSettings(keys=(KEY,)))) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made
