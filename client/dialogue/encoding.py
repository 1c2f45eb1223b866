"""Text to token ids: control tokens that somebody typed are plain text, and a text begins once.

Control tokens are a tokenizer's special tokens and those of its added tokens that the chat template writes itself.
Those in a conversation's own strings are put between two marks before the template is rendered; what comes out between
marks is encoded as plain text. A conversation without control tokens has no marks, and is encoded in one piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerFast

from swarm.base.errors import ConfigError

Json: TypeAlias = Any
"""A value of lists, mappings with text as keys, and scalars."""

_MARKS = range(0xF0000, 0xFFFFE)
"""Characters for private use, of which two that the conversation does not hold become marks."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Two characters that stand around every control token that somebody typed."""

    start: str
    end: str

    @classmethod
    def beside(cls, values: object) -> Marks:
        """Marks that occur nowhere in these values.

        Raises:
            ConfigError: there are none left.
        """
        used = {char for string in _strings(values) for char in string if ord(char) in _MARKS}
        free = (chr(code) for code in _MARKS if chr(code) not in used)
        start, end = next(free, ""), next(free, "")
        if not end:
            raise ConfigError("messages: hold every character for private use; leave one out")
        return cls(start, end)


class ControlTokens:
    """The control tokens of one tokenizer under one chat template, and how text with them is encoded."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str) -> None:
        self._tokenizer = tokenizer
        self._ids = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content in template and not token.content.isspace())
        }
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._typed = re.compile(self._pattern)
        self._newline = self._ids_of("\n")
        self._as_text: dict[str, list[int]] = {}

    def mark(self, value: Json, marks: Marks) -> Json:
        """Put marks around the control tokens of all strings in a value of lists, mappings and scalars."""
        if isinstance(value, str):
            return self._typed.sub(lambda found: f"{marks.start}{found[0]}{marks.end}", value)
        if isinstance(value, Mapping):
            return {self.mark(key, marks): self.mark(item, marks) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, marks) for item in value]
        return value

    def encode(self, text: str, marks: Marks, *, begins: bool = False) -> list[int]:
        """Token ids of a rendered text.

        Args:
            begins: whether the tokenizer adds what it puts around every text.

        Returns:
            The ids of the whole text where it holds no mark. A mark that a template parted from its token goes away,
            and parts the text.
        """
        lone = "|".join(re.escape(mark) for mark in (*_forms(marks.start), *_forms(marks.end)))
        start, end = ("|".join(map(re.escape, _forms(mark))) for mark in (marks.start, marks.end))
        pieces = re.split(f"(?:{start})({self._pattern})(?:{end})|{lone}", text)
        if len(pieces) == 1:
            return list(self._tokenizer(text, add_special_tokens=begins)["input_ids"])
        before, behind = self._around() if begins else ([], [])
        ids = self._ids_of(pieces[0])
        for place, piece in enumerate(pieces[1:], 1):
            if piece:
                ids += self._typed_ids(piece) if place % 2 else self._later(piece)
        return [*before, *ids, *behind]

    def _later(self, piece: str) -> list[int]:
        """Ids of a piece that is not the first, for which a tokenizer must not put a space before it."""
        newline, ids = self._newline, self._ids_of("\n" + piece)
        return ids[len(newline) :] if ids[: len(newline)] == newline else self._ids_of(piece)

    def _typed_ids(self, token: str) -> list[int]:
        """Ids of a control token's characters, which are not its own id."""
        if token not in self._as_text:
            newline, ids = self._plain("\n"), self._plain("\n" + token)
            ids = ids[len(newline) :] if ids[: len(newline)] == newline else self._plain(token)
            if not set(self._ids.values()).isdisjoint(ids):  # a vocabulary that makes it of plain text too
                ids = [one for char in token for one in self._plain(char)]
            self._as_text[token] = ids
        return self._as_text[token]

    def _ids_of(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plain(self, text: str) -> list[int]:
        """Ids of a text in which no added token is looked for."""
        backend = self._tokenizer.backend_tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        splits = [text]
        if backend.pre_tokenizer is not None:
            splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for split in splits for token in backend.model.tokenize(split)]

    def _around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind every text."""
        bare, whole = (list(self._tokenizer("x", add_special_tokens=adds)["input_ids"]) for adds in (False, True))
        for place in range(len(whole) - len(bare) + 1):
            if whole[place : place + len(bare)] == bare:
                return whole[:place], whole[place + len(bare) :]
        return [], []


def encode_text(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of a text that has no template, or has gone through one already: it begins once."""
    ids = list(tokenizer(text)["input_ids"])
    begin = tokenizer.bos_token_id
    if begin is not None and ids[:2] == [begin, begin] and text.startswith(str(tokenizer.bos_token)):
        return ids[1:]
    return ids


def _forms(mark: str) -> Sequence[str]:
    """A mark, and how a template's `tojson` may write it."""
    return mark, json.dumps(mark)[1:-1]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)
