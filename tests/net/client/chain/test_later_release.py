"""A swarm in which everybody also says what only a later release knows: this one reads past it."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.demo import TARGET
from swarm.directory.node_record import NodeRecord
from swarm.directory.sealing import Seal
from swarm.protocol.messages import Frame
from swarm.protocol.wire import encode_frame
from tests.in_process_swarm import in_process_swarm

UNKNOWN = bytes([15 << 3 | 2, 5]) + b"later"
"""A field of a number that no message has."""


async def test_what_a_later_release_adds_hinders_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_record = Seal.body
    added: list[str] = []

    def more_fields(seal: Seal[NodeRecord], record: NodeRecord) -> list[Any]:
        added.append("record")
        return [*encode_record(seal, record), {"later": [1, 2, 3]}]

    def more_bytes(message: Frame) -> bytes:
        added.append("frame")
        return encode_frame(message) + UNKNOWN

    monkeypatch.setattr(Seal, "body", more_fields)
    monkeypatch.setattr("swarm.protocol.frames.encode_frame", more_bytes)
    async with in_process_swarm(TARGET, ["0-6", "6-12"]) as running, running.client() as client:
        result = await client.generate("It was", max_new_tokens=4, nodes=1)
    assert len(result.tokens) == 4
    assert not result.stats.repairs
    assert set(added) == {"record", "frame"}
