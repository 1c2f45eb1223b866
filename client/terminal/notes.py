"""What the program says while text streams: in its own voice, and on lines of their own. Owns no log level."""

from __future__ import annotations

import logging
from typing import Any, TextIO


class Streamed:
    """Standard output that knows whether its last line is still open."""

    def __init__(self, stream: TextIO) -> None:
        self.is_open = False
        self._stream = stream

    def write(self, text: str) -> int:
        """As a stream does."""
        if text:
            self.is_open = not text.endswith("\n")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever else a stream has
        """As the stream has it."""
        return getattr(self._stream, name)


class Notes(logging.Formatter):
    """Begins a new line where the text's is open."""

    def __init__(self, text: Streamed, form: str) -> None:
        super().__init__(form)
        self._text = text

    def format(self, record: logging.LogRecord) -> str:
        """One note."""
        start, self._text.is_open = "\n" * self._text.is_open, False
        return start + super().format(record)
