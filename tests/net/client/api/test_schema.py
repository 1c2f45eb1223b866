"""Whatever the API's own description allows, no request makes the server fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig

from client.api.app import build_app
from client.api.context import ApiSettings
from tests.api_server import served
from tests.scripted_backend import ScriptedBackend, saying

APP = build_app(ScriptedBackend(saying("Hel", "lo")), ApiSettings(max_body_bytes=200_000))
OPERATIONS = [(path, method) for path, methods in APP.openapi()["paths"].items() for method in methods]
EXAMPLES = 12


@pytest.fixture(scope="module")
def described() -> Iterator[schemathesis.BaseSchema]:
    with served(APP) as url:
        config = SchemathesisConfig.from_dict({"base-url": url})
        yield schemathesis.openapi.from_dict(APP.openapi(), config=config)


@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=[f"{method} {path}" for path, method in OPERATIONS])
def test_no_request_makes_the_server_fail(described: schemathesis.BaseSchema, path: str, method: str) -> None:
    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=described[path][method.upper()].as_strategy())
    def check(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(checks=[not_a_server_error], timeout=20)

    check()
