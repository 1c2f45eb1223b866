"""Bodies that are no JSON, or JSON that cannot be written again."""

from __future__ import annotations

import json

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from client.api.json_text import MAX_DEPTH, JsonRoute, arguments_object, read_json

NOT_READ = {
    "half of a character": b'{"a": "\\ud83d"}',
    "half of a character as a name": b'{"\\udc00": 1}',
    "bytes that are no UTF-8": b'{"a": "\xff"}',
    "half of a character in bytes": b'{"a": "\xed\xa0\x80"}',
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": [-Infinity]}',
    "a number that is too large": b'{"a": 1e999}',
    "a number of too many digits": b'{"a": ' + b"1" * 5_000 + b"}",
    "no JSON": b'{"a": }',
    "two values": b"{} {}",
    "deep lists": b"[" * 100_000,
    "one object too deep": b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
    "one list too deep": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
}


@pytest.mark.parametrize("body", NOT_READ.values(), ids=NOT_READ.keys())
def test_what_is_not_read(body: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        read_json(body)


def test_the_deepest_list_is_read() -> None:
    body = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(read_json(body.encode())) == body


@pytest.mark.parametrize("value", [{"a": "\U0001f600", "b": 1.5e300}, [], "é", {"a": "\\ud800"}, None])
@pytest.mark.parametrize("is_ascii", [False, True], ids=["utf-8", "escaped"])
def test_what_is_read(value: object, is_ascii: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=is_ascii).encode()) == value


class Asked(BaseModel):
    a: object


def test_a_route_refuses_it_before_its_handler() -> None:
    app, router = FastAPI(), APIRouter(route_class=JsonRoute)

    @router.post("/")
    async def handle(body: Asked) -> object:
        return body.a

    app.include_router(router)
    with TestClient(app) as client:
        assert client.post("/", json={"a": 1}).json() == 1
        headers = {"content-type": "application/json"}
        answers = [client.post("/", content=body, headers=headers) for body in NOT_READ.values()]
    assert [answer.status_code for answer in answers] == [422] * len(NOT_READ)
    assert {answer.json()["detail"][0]["type"] for answer in answers} == {"json_invalid"}


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": {"b": "c', {"a": {"b": "c"}}),
        ('{"a": 1, "b', {"a": 1}),
        ("", {}),
        ("[1]", {}),
        ("none", {}),
        ('{"a": NaN}', {}),
    ],
)
def test_arguments_are_an_object(arguments: str, value: dict[str, object]) -> None:
    assert arguments_object(arguments) == value
