"""A server that asks for a key."""

from __future__ import annotations

import pytest

from client.api.context import ApiSettings
from tests.net.client.api.responses.questions import KEYS


@pytest.fixture(scope="module")
def settings() -> ApiSettings:
    return ApiSettings(keys=KEYS)
