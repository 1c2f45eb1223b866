"""What can be read on the wire: nothing of a prompt, of a row or of a text, between client and node or two nodes."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import grpc.aio
import pytest

from swarm.demo import TARGET
from swarm.link.dial import Dialer
from swarm.link.endpoint import Endpoint
from swarm.protocol.frames import split
from swarm.protocol.messages import Frame, Reply, SweepFrame
from tests.in_process_swarm import in_process_swarm
from tests.net.tee import Tee
from tests.net.three_nodes import prompt

SPANS = ("0-6", "6-12")
IDS = prompt(4, 24)
SLICE = slice(200, 264)
"""Of a message: far from its head, and too long to stand anywhere by chance."""


def packed(tokens: tuple[int, ...]) -> bytes:
    """Token ids as protobuf packs them: seven bits a byte, the last one without the highest."""
    encoded = bytearray()
    for token in tokens:
        while token > 0x7F:
            encoded.append(token & 0x7F | 0x80)
            token >>= 7
        encoded.append(token)
    return bytes(encoded)


@pytest.mark.parametrize("insecure", [False, True])
async def test_a_capture_shows_no_token_and_no_row(insecure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same search finds all of it where the swarm is insecure."""
    straight, ways, tee = Dialer.channel, dict[str, str](), Tee()
    rows, replies = list[bytes](), list[bytes]()

    def by_tee(dialer: Dialer, endpoint: Endpoint, stuck: grpc.aio.Channel | None = None) -> grpc.aio.Channel:
        return straight(dialer, replace(endpoint, address=ways.get(endpoint.address, endpoint.address)), stuck)

    def noted(message: Frame, part_bytes: int) -> list[bytes]:
        parts = list(split(message, part_bytes))
        match message:
            case SweepFrame(rows=found) if found is not None:
                rows.extend(part[SLICE] for part in parts)
            case Reply():
                replies.extend(parts)
            case _:
                pass
        return parts

    for module in ("swarm.link.link", "node.session.service"):
        monkeypatch.setattr(f"{module}.split", noted)
    monkeypatch.setattr(Dialer, "channel", by_tee)
    async with in_process_swarm(TARGET, SPANS, insecure=insecure) as here, AsyncExitStack() as stack:
        for node in here.nodes:
            ways[node.address] = await stack.enter_async_context(tee.before(node.address))
        swarm = await stack.enter_async_context(here.client(insecure=insecure))
        await swarm.generate(IDS, max_new_tokens=4, nodes=0)
        records = await here.nodes[0].registry.records(here.nodes[0].identity.fingerprint, 12)
    assert [bool(record.certificate) for record in records] == [not insecure] * 2
    assert len(tee.seen) > 10_000, "all links lead through it"
    assert len(rows) >= 4
    assert len(replies) >= 4
    assert all(len(row) == 64 for row in rows)
    secrets = [packed(IDS[:16]), packed(IDS[8:20]), *rows, *replies]
    assert [secret in tee.seen for secret in secrets] == [insecure] * len(secrets)
