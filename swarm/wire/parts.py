"""One part of a frame (F2), and the limits of the wire. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

PART_BYTES = 1 << 20
"""Most bytes of data in one part."""

MAX_NODES = 65_536
"""Most tree nodes in one message."""

MAX_HOPS = 256
MAX_RECORD_BYTES = 4_096
MAX_HEADERS = 4_096
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1 << 16
SESSION_BYTES = 16
TEXT_CHARACTERS = 256
PEER_CHARACTERS = 128
PADDING_BYTES = 65_536
REASON_CHARACTERS = 1_024


@dataclass(frozen=True, slots=True)
class Part:
    """The next bytes of a frame. `head_bytes` is positive in a frame's first part and 0 in the others."""

    head_bytes: int
    rows_bytes: int
    data: bytes
