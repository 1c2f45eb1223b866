"""Whether full packets reach a peer: a path may drop those that are too large for it and say nothing of it.

What passes is then whatever is short: connections stand, greetings are answered, and every longer message hangs.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Final

from swarm.link.egress.streams import split_host

GREETING_S: Final = 2.0
"""How long a peer may take to answer a short message, its connection included."""
LARGE_S: Final = 4.0
"""How long it may take to answer one that fills packets."""
_GREETING: Final = b"\x13/multistream/1.0.0\n"
_UNKNOWN: Final = b"\x03na\n"
_NAME: Final = b"/canopy/path/" + b"x" * 900 + b"\n"
_NAMES: Final = 4


class PathVerdict(enum.Enum):
    """What reaches a peer."""

    PASSES = "full packets pass"
    SMALL_ONLY = "only small packets pass"
    SILENT = "nothing answers, or something that is no peer"


async def probe_path(address: str) -> PathVerdict:
    """Ask the DHT peer at `host:port` for protocols of long names, of which it says that it does not know them.

    With a good path it takes two round trips, and eight seconds at most. Where they are not answered and a short name
    is, it was their length.
    """
    match await _answers(address, _NAMES):
        case True:
            return PathVerdict.PASSES
        case False if await _answers(address, 0):
            return PathVerdict.SMALL_ONLY
        case _:
            return PathVerdict.SILENT


async def _answers(address: str, names: int) -> bool | None:
    """Whether a peer answers so many long names after a greeting; None where it is not greeted as a peer greets."""
    try:
        host, port = split_host(address)
        async with asyncio.timeout(GREETING_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)  # of any segments: that is asked
    except (OSError, TimeoutError, ValueError):
        return None
    is_greeted = False
    try:
        async with asyncio.timeout(GREETING_S):
            writer.write(_GREETING)
            is_greeted = await reader.readexactly(len(_GREETING)) == _GREETING
        if is_greeted and names:
            async with asyncio.timeout(LARGE_S):
                writer.write(names * (_varint(len(_NAME)) + _NAME))
                return await reader.readexactly(len(_UNKNOWN)) == _UNKNOWN or None
    except TimeoutError:
        return False if is_greeted else None
    except (OSError, asyncio.IncompleteReadError):  # ended by somebody who does not like it, such as a firewall
        return None
    finally:
        writer.transport.abort()
    return is_greeted or None


def _varint(number: int) -> bytes:
    """As libp2p writes lengths: seven bits a byte, the lowest first."""
    return bytes([number & 0x7F | 0x80, number >> 7])
