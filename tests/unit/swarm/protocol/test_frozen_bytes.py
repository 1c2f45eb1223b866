"""The bytes of every kind of message are what they were: read as they were meant, and written as they were."""

from __future__ import annotations

import json

from tests.frozen.wire_samples import FILE, samples


def test_messages_are_read_and_written_byte_for_byte() -> None:
    held = json.loads(FILE.read_text())
    found = samples()
    assert found.keys() == held.keys()
    for name, ((encode, decode), message) in found.items():
        data = bytes.fromhex(held[name])
        assert encode(message) == data, name
        assert decode(data) == message, name
