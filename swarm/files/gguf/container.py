"""The header of a GGUF file: metadata, and where each tensor lies. Every length is checked; no tensor is read.

    magic, version, counts │ metadata: key, type, value … │ tensors: name, shape, type, offset … │ padding │ data

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Final

from swarm.base.errors import UnknownModel, UnsupportedModel
from swarm.files.gguf.encodings import ENCODINGS, Encoding
from swarm.files.gguf.naming import MAGIC

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSIONS: Final = (2, 3)
SHORTEST: Final = 24
"""Bytes of a header without metadata and tensors."""
DEFAULT_ALIGNMENT: Final = 32

MAX_HEADER_BYTES: Final = 512 << 20
"""The largest header that is read: vocabularies of some million tokens fit."""
MAX_TENSORS: Final = 1 << 20
MAX_FIELDS: Final = 1 << 16
MAX_ITEMS: Final = 1 << 24
"""Values of one list in the metadata, at most."""
MAX_NAME_BYTES: Final = 1 << 16
MAX_DIMENSIONS: Final = 4

SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata types of fixed size, as `struct` has them."""
STRING: Final = 8
ARRAY: Final = 9

MetadataValue = bool | int | float | str | list["MetadataValue"]
"""A value of the metadata."""


class ShortHeader(Exception):
    """The bytes at hand end before the header does."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of a file.

    Attributes:
        shape: rows first, as torch has it.
        start: where its bytes begin in the file.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    start: int

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Rows of all its matrices together."""
        return prod(self.shape[:-1])

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return self.rows * self.encoding.row_bytes(self.columns)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says before its tensors begin.

    Attributes:
        tensors: all tensors of this file, by llama.cpp's names.
    """

    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorPlace]
    size_bytes: int

    def text(self, key: str) -> str:
        """A text of the metadata; empty where there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int | None:
        """A whole number of the metadata."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_header(file: Path) -> GgufHeader:
    """Read the header of a GGUF file on this machine.

    Raises:
        UnknownModel: it cannot be opened.
        UnsupportedModel: it is no GGUF file, is damaged, or of a version that is not read.
    """
    try:
        size = file.stat().st_size
        if size < SHORTEST:
            raise UnsupportedModel(f"{file}: no GGUF file: it has {size} bytes; fetch it again")
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return parse_header(mapped, size, str(file))
    except OSError as error:
        raise UnknownModel(f"{file}: {error.strerror or error}") from error
    except ShortHeader:
        raise UnsupportedModel(f"{file}: cut off: it ends within its header; fetch it again") from None


def parse_header(data: bytes | bytearray | mmap.mmap, file_bytes: int, name: str) -> GgufHeader:
    """Read a header.

    Args:
        data: how the file begins; may hold all of it.

    Raises:
        ShortHeader: `data` ends before the header does, or the file does.
        UnsupportedModel: this is no GGUF file, is damaged, or of a version that is not read.
    """
    reader = _Reader(data, name)
    _check_version(reader)
    num_tensors, num_fields = reader.number("Q"), reader.number("Q")
    if num_tensors > MAX_TENSORS or num_fields > MAX_FIELDS:
        raise reader.damaged(f"it names {num_tensors} tensors and {num_fields} fields")
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_fields):
        key = reader.text(MAX_NAME_BYTES)
        metadata[key] = reader.value(reader.number("I"))
    rows = [_tensor_row(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.damaged(f"its alignment is {alignment!r}")
    start = -(-reader.at // alignment) * alignment
    tensors = [TensorPlace(title, shape, encoding, start + offset) for title, shape, encoding, offset in rows]
    _check_places(tensors, start, file_bytes, name)
    return GgufHeader(metadata, {tensor.name: tensor for tensor in tensors}, start)


def _check_version(reader: _Reader) -> None:
    magic = reader.take(4)
    if magic != MAGIC:
        raise UnsupportedModel(f"{reader.name}: no GGUF file: it begins with {bytes(magic)!r}; fetch it again")
    version = reader.number("I")
    if version & 0xFFFF == 0:
        raise UnsupportedModel(f"{reader.name}: a big-endian GGUF file; fetch the one for little-endian machines")
    if version not in VERSIONS:
        raise UnsupportedModel(f"{reader.name}: GGUF version {version}; versions 2 and 3 are read: convert it again")


def _tensor_row(reader: _Reader) -> tuple[str, tuple[int, ...], Encoding, int]:
    title = reader.text(MAX_NAME_BYTES)
    count = reader.number("I")
    if count > MAX_DIMENSIONS:
        raise reader.damaged(f"{title!r} has {count} dimensions")
    shape = tuple(reader.number("Q") for _ in range(count))[::-1]
    kind, offset = reader.number("I"), reader.number("Q")
    encoding = ENCODINGS.get(kind)
    if encoding is None:
        known = ", ".join(one.name.upper() for one in ENCODINGS.values())
        raise UnsupportedModel(f"{reader.name}: {title} is stored in type {kind}, which is not read; read are {known}")
    if shape and shape[-1] % encoding.block:
        raise reader.damaged(f"{title}: {shape[-1]} columns are no whole blocks of {encoding.name.upper()}")
    return title, shape, encoding, offset


def _check_places(tensors: list[TensorPlace], start: int, file_bytes: int, name: str) -> None:
    """Refuse tensors that lie outside of the file, or of which two have one name."""
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise UnsupportedModel(f"{name}: damaged: two tensors have one name; fetch it again")
    ends = max((tensor.start + tensor.size_bytes for tensor in tensors), default=start)
    if ends > file_bytes:
        raise UnsupportedModel(f"{name}: cut off: its tensors end at byte {ends}, it has {file_bytes}; fetch it again")


@dataclass(slots=True)
class _Reader:
    """Reads values one behind the other, never beyond the bytes at hand."""

    data: bytes | bytearray | mmap.mmap
    name: str
    at: int = field(default=0)

    def damaged(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.name}: damaged: {what}; fetch it again")

    def take(self, count: int) -> bytes:
        if self.at + count > MAX_HEADER_BYTES:
            raise self.damaged(f"its header has more than {MAX_HEADER_BYTES >> 20} MiB")
        if self.at + count > len(self.data):
            raise ShortHeader
        taken = bytes(self.data[self.at : self.at + count])
        self.at += count
        return taken

    def number(self, form: str) -> int:
        value: int = struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]
        return value

    def text(self, limit: int = MAX_HEADER_BYTES) -> str:
        length = self.number("Q")
        if length > limit:
            raise self.damaged(f"a text of {length} bytes in its header")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a text in its header is no UTF-8") from None

    def value(self, kind: int) -> MetadataValue:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self._numbers(kind, 1)[0]
        kind, count = self.number("I"), self.number("Q")
        if count > MAX_ITEMS:
            raise self.damaged(f"a list of {count} values in its header")
        return [self.text() for _ in range(count)] if kind == STRING else self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[MetadataValue]:
        form = SCALARS.get(kind)
        if form is None:
            raise self.damaged(f"a value of type {kind} in its header")
        return list(struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize("<" + form))))
