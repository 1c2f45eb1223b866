"""What a safetensors file's header says of its tensors. Reads no tensor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

MAX_HEADER_BYTES: Final = 100 << 20
"""The largest header that the format allows."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Type and shape of a tensor.

    Attributes:
        kind: its type as the format calls it, such as `BF16` or `F8_E4M3`.
        start: where its bytes begin in the file.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


def header_bytes(file: Path) -> int:
    """How many bytes come before a file's tensors.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ValueError(f"{file} is no safetensors file")
    return 8 + length


def tensor_headers(file: Path) -> dict[str, TensorHeader]:
    """Types and shapes of a file's tensors, by name.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """
    length = header_bytes(file)
    with file.open("rb") as opened:
        content: Any = json.loads(opened.read(length)[8:])
    try:
        return {name: _entry(entry, length) for name, entry in content.items() if name != "__metadata__"}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is no safetensors file") from error


def _entry(entry: Any, data_start: int) -> TensorHeader:  # noqa: ANN401 - anything that JSON can hold
    start, end = entry["data_offsets"]
    return TensorHeader(str(entry["dtype"]), tuple(map(int, entry["shape"])), data_start + start, end - start)
