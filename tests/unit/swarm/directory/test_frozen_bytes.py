"""What a node signs of itself is written and read byte for byte as it was when these samples were frozen."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import msgpack

from tests.frozen.signed_samples import FILE, samples


def test_what_is_signed_is_what_was_frozen() -> None:
    found = dict(samples())
    frozen = {name: b64decode(text) for name, text in json.loads(FILE.read_text(encoding="utf-8")).items()}
    assert found.keys() == frozen.keys()
    for name, (written, read, value) in found.items():
        assert read(frozen[name]) == value, name
        then, now = _fields(frozen[name]), _fields(written)
        assert now[: len(then)] == then, name
        assert len(now) > len(then) or written == frozen[name], name


def _fields(data: bytes) -> list[Any]:
    """What was signed, field by field: a later release adds some at the end."""
    if data.startswith(b"{"):
        return list(json.loads(json.loads(data)["body"]).items())
    signed: list[Any] = msgpack.unpackb(msgpack.unpackb(data)[1])
    return signed
