"""TCP segments that fit every path, so that a path MTU black hole stops nothing."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

SEGMENT_BYTES: Final = 1_220
"""Of TCP in one packet: 1,280 bytes, which every path of IPv6 carries, less the headers of IPv6 and TCP."""


def keep_segments_small(sock: socket.socket) -> None:
    """Let a TCP socket send and announce segments that fit any path; it listens, or is not connected yet."""
    if hasattr(socket, "TCP_MAXSEG"):
        with suppress(OSError):  # some systems let nobody choose it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
