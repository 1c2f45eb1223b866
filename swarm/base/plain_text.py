"""What others say, made harmless before a person sees it: no character may command a terminal or hide. Pure."""

from __future__ import annotations

import unicodedata
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
_COMMANDS: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: controls, formats (directions, zero width, tags), lone surrogates, line and paragraph ends."""
_LAYOUT: Final = frozenset("\n\t")
_LETTERS: Final = frozenset("\u200c\u200d\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2")
"""Formats that are part of writing: joiners (Persian, Indic scripts, emoji) and Arabic number signs."""


class Terminal(Protocol):
    """What may be a terminal."""

    def isatty(self) -> bool:
        """Whether it is one."""


def plain(text: str) -> str:
    """The text with U+FFFD for each character that a terminal might obey, or that nobody would see.

    Line feeds, tabs and all that is printable stay. Each character is judged alone, so a text that comes in pieces is
    as safe as one that comes whole.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def plain_line(text: str) -> str:
    r"""The same on one line: a line feed is written `\n`, a tab `\t`."""
    return plain(text).replace("\n", "\\n").replace("\t", "\\t")


def plain_for(stream: Terminal, text: str) -> str:
    """A model's text for a stream: plain on a terminal; in a pipe or a file, as the model said it, byte for byte."""
    return plain(text) if stream.isatty() else text


def _shown(one: str) -> str:
    if one in _LAYOUT or one in _LETTERS or unicodedata.category(one) not in _COMMANDS:
        return one
    return REPLACEMENT
