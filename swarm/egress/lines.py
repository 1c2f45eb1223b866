"""Lines of words, as relays and those who use them speak before bytes are passed. Pure."""

from __future__ import annotations

from typing import Final

from swarm.errors import RemoteProtocolError

MAX_LINE_BYTES: Final = 512
"""Of an opening, and of everything that a relay says; its line feed included."""


def words(line: bytes) -> list[str]:
    """The words of a line.

    Raises:
        RemoteProtocolError: it is too long or not printable ASCII.
    """
    if len(line) > MAX_LINE_BYTES:
        raise RemoteProtocolError("opening", f"a line has at most {MAX_LINE_BYTES} bytes")
    text = line.removesuffix(b"\n").removesuffix(b"\r")
    if not text.isascii() or not text.decode("ascii", "replace").isprintable():
        raise RemoteProtocolError("opening", "a line is printable ASCII")
    return text.decode().split(" ")
