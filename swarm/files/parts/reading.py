"""Which file on this machine a weight file's bytes are read from: the whole one, or its part if that has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from swarm.files.parts.byte_ranges import ByteRanges
from swarm.files.tensor_header import header_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from swarm.files.parts.part_file import PartFile


class HasParts(Protocol):
    """Where files come from of which parts may be here: a hub."""

    def part_file(self, name: str) -> PartFile | None:
        """The part of a file that is here, or comes to be."""


def header_file(whole: Path, name: str, hub: HasParts | None) -> Path | None:
    """The file that a safetensors header is read from: the whole one, else its part if that has it; None where neither.

    Args:
        whole: where it is, or comes to be.
        hub: whence it comes; None for a folder of the user's.
    """
    if hub is None or whole.exists():
        return whole
    part = hub.part_file(name)
    if part is None or not part.here().covers(ByteRanges.of([(0, 8)])):
        return None
    length = header_bytes(part.data)
    return part.data if part.here().covers(ByteRanges.of([(0, length)])) else None


def readable_file(whole: Path, name: str, hub: HasParts | None, needed: Callable[[], ByteRanges], model: str) -> Path:
    """The file to read some bytes from: no hole of a part is ever read.

    Args:
        whole: where it is, or comes to be.
        hub: whence it comes; None for a folder of the user's.
        needed: which bytes; asked where the whole file is not here.

    Raises:
        UnsupportedModel: only a part is here, and it lacks some of these.
    """
    if hub is None or whole.exists():
        return whole
    part = hub.part_file(name)
    if part is None or not part.is_here:
        return whole
    part.check(needed(), model)
    return part.data
