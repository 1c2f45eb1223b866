"""The newest state as bytes, and its readers: each gets the newest when it is ready, and none delays others."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator
from typing import Any, Final

MAX_READERS: Final = 500
HEARTBEAT_S: Final = 10.0
_HEARTBEAT: Final = b": still here\n\n"


class StatePublisher:
    """Holds one state; `publish` replaces it and wakes the readers."""

    def __init__(self) -> None:
        self.readers = 0
        self.version = 0
        self.state: dict[str, Any] = {}
        self._json = b"{}"
        self._packed: bytes | None = None
        self._frame = b""
        self._news = asyncio.Event()
        self._is_closed = False

    @property
    def json(self) -> bytes:
        return self._json

    @property
    def packed(self) -> bytes:
        """The same, compressed with gzip once for all readers."""
        if self._packed is None:
            self._packed = gzip.compress(self._json, compresslevel=1)
        return self._packed

    @property
    def has_room(self) -> bool:
        return self.readers < MAX_READERS and not self._is_closed

    def publish(self, state: dict[str, Any]) -> None:
        """Make this the newest state.

        Raises:
            ValueError: it holds a number that JSON does not have.
        """
        text = _dumped(state)
        self.state = state
        self._json, self._packed = text.encode("utf-8", "replace"), None
        self._frame = b"event: state\ndata: " + self._json + b"\n\n"
        self.version += 1
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    async def frames(self, heartbeat_s: float = HEARTBEAT_S) -> AsyncGenerator[bytes, None]:
        """Server-sent events: every newer state, and a heartbeat where none comes."""
        self.readers += 1
        seen = 0
        try:
            while not self._is_closed:
                if seen != self.version:
                    seen = self.version
                    yield self._frame
                    continue
                try:
                    async with asyncio.timeout(heartbeat_s):
                        await self._news.wait()
                except TimeoutError:
                    yield _HEARTBEAT
        finally:
            self.readers -= 1

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def is_json(value: object) -> bool:
    """Whether a value can be a part of a state."""
    try:
        _dumped(value)
    except ValueError:
        return False
    return True


def _dumped(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
