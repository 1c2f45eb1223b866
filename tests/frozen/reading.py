"""The frozen files, and how an older release reads: by its own proto, and by the places of a list."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

FOLDER: Final = Path(__file__).parent
NOW: Final = 1_800_000_000.0
"""When everything in the files was written."""
NONCE: Final = bytes(range(16))


@dataclass(frozen=True, slots=True)
class Frozen:
    """What one release wrote.

    Attributes:
        name: of the file.
        content: of the file.
    """

    name: str
    content: dict[str, Any]

    def data(self, *keys: str | int) -> bytes:
        """The bytes at a place of the file."""
        found: Any = self.content
        for key in keys:
            found = found[key]
        return b64decode(found)

    def message(self, name: str, data: bytes) -> Message:
        """Bytes as that release reads them, by its own proto."""
        return _classes(self.data("wire", "descriptor"))[f"swarm.wire.v1.{name}"].FromString(data)


@cache
def releases() -> tuple[Frozen, ...]:
    """All frozen releases."""
    files = sorted(FOLDER.glob("release_*.json"))
    return tuple(Frozen(file.stem, json.loads(file.read_text(encoding="utf-8"))) for file in files)


@cache
def _classes(descriptor: bytes) -> dict[str, type[Message]]:
    pool = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto.FromString(descriptor)
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name], pool)


def plain(value: Any) -> Any:  # noqa: ANN401
    """A decoded value as JSON; bytes become their length, since no later release changes those."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(one) for name, one in asdict(value).items()}
    match value:
        case Enum():
            return value.value
        case bytes() | bytearray() | memoryview():
            return {"bytes": len(value)}
        case dict():
            return {str(key): plain(one) for key, one in value.items()}
        case list() | tuple():
            return [plain(one) for one in value]
        case _:
            return value


def holds(now: Any, then: Any) -> bool:  # noqa: ANN401
    """Whether a value is what an older release wrote, with more fields perhaps."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and holds(now[key], value) for key, value in then.items())
    if isinstance(then, list):
        return isinstance(now, list) and len(now) >= len(then) and all(map(holds, now, then))
    return type(now) is type(then) and now == then
