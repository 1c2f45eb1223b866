"""Whether full packets reach a peer: a path may drop those that are too large for it and say nothing of it.

What passes is then whatever is short: connections stand, greetings are answered, and every longer message hangs.
"""

from __future__ import annotations

import asyncio
import enum
from contextlib import suppress
from typing import Final

from swarm.discovery.node_record import split_address
from swarm.discovery.record_fields import RecordError

GREETING_S: Final = 2.0
"""How long a peer may take to answer a short message, its connection included."""
LARGE_S: Final = 2.0
"""How long it may take to answer a long one after that."""
LARGE_BYTES: Final = 4_096
"""Of the long one: it fills packets of any size that is usual."""
_GREETING: Final = b"\x13/multistream/1.0.0\n"
_UNKNOWN: Final = b"\x03na\n"
_LONG_NAME: Final = b"/canopy/path/" + b"x" * LARGE_BYTES + b"\n"


class PathVerdict(enum.Enum):
    """What reaches a peer."""

    PASSES = "full packets pass"
    SMALL_ONLY = "only small packets pass"
    SILENT = "nothing answers"


async def probe_path(address: str) -> PathVerdict:
    """Ask the DHT peer at `host:port` for a protocol of a very long name, which it says that it does not know.

    Takes four seconds at most, and with a good path two round trips.
    """
    try:
        host, port = split_address(address)
        async with asyncio.timeout(GREETING_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)
    except (OSError, TimeoutError, RecordError, UnicodeError):
        return PathVerdict.SILENT
    verdict = PathVerdict.SILENT
    try:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(GREETING_S):
                writer.write(_GREETING)
                if await reader.readexactly(len(_GREETING)) != _GREETING:
                    return verdict
            verdict = PathVerdict.SMALL_ONLY
            async with asyncio.timeout(LARGE_S):
                writer.write(_varint(len(_LONG_NAME)) + _LONG_NAME)
                await reader.readexactly(len(_UNKNOWN))
            verdict = PathVerdict.PASSES
    except BaseException:
        verdict = PathVerdict.SILENT
        raise
    finally:
        writer.transport.abort()
    return verdict


def _varint(number: int) -> bytes:
    """As libp2p writes lengths: seven bits a byte, the lowest first."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])
