"""A client of an older release: it says what that release said, byte for byte, and waits for Ready in between."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from swarm.link.link import Metadata
from swarm.protocol import wire
from swarm.protocol.frames import FrameAssembler
from swarm.protocol.messages import Ready, Reply

ANSWER_S = 10.0

Call = tuple[list[bytes], Metadata]
"""What is written on a stream, part by part, and how its caller introduces itself."""


async def picks_of(address: str, link: Call, replies: Call) -> list[list[int]]:
    """The node's answer to the first sweep: (tree node, token picked after it).

    Args:
        address: `host:port` of a node of an insecure swarm.
        link: the attach, then the sweep.
        replies: the request.
    """
    async with asyncio.timeout(ANSWER_S), grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.stream_stream(wire.LINK)(metadata=link[1])
        heard: Any = channel.stream_stream(wire.REPLIES)(metadata=replies[1])
        try:
            attach, sweep = link[0]
            await call.write(attach)
            while not isinstance(wire.decode_upstream(await call.read()), Ready):
                pass
            await call.write(sweep)
            await heard.write(replies[0][0])
            joiner = FrameAssembler()
            while not isinstance(message := joiner.feed(await heard.read()), Reply):
                pass
        finally:
            call.cancel()
            heard.cancel()
    return [list(pick) for pick in message.picks]
