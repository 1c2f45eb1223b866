"""Log lines beside streamed text: each begins on a line of its own. Owns no log level."""

from __future__ import annotations

import logging
from typing import Any, TextIO

from swarm.runtime.logs import OneLineFormatter


class LineTrackingStream:
    """An output stream that knows whether its last line is open.

    Attributes:
        is_open: whether the last text that was written did not end its line.
    """

    def __init__(self, stream: TextIO) -> None:
        self.is_open = False
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, as a stream does; returns the characters written."""
        if text:
            self.is_open = not text.endswith("\n")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a stream
        """Any other attribute of the stream."""
        return getattr(self._stream, name)


class NoteFormatter(OneLineFormatter):
    """Formats log records; begins a new line where the text's last line is open."""

    def __init__(self, text: LineTrackingStream, fmt: str) -> None:
        super().__init__(fmt)
        self._text = text

    def format(self, record: logging.LogRecord) -> str:
        """The log line, after a line break where one is missing."""
        start, self._text.is_open = "\n" * self._text.is_open, False
        return start + super().format(record)
