"""One part of a frame (F2). Pure values."""

from __future__ import annotations

from dataclasses import dataclass

PART_BYTES = 1 << 20
"""Most bytes of data in one part."""


@dataclass(frozen=True, slots=True)
class FramePart:
    """The next bytes of a frame. `head_bytes` is positive in a frame's first part and 0 in the others."""

    head_bytes: int
    rows_bytes: int
    data: bytes
