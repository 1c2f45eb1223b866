"""A server that takes small bodies alone."""

from __future__ import annotations

import pytest

from client.api.context import ApiSettings


@pytest.fixture(scope="module")
def settings() -> ApiSettings:
    return ApiSettings(max_body_bytes=100_000)
