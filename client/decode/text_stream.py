"""Turns tokens into text while they arrive: detokenising, stop strings, end-of-sequence ids and the length limit. Pure.

The text of generated tokens is relative to the prompt: `decode(prompt + tokens)` less its longest common prefix with
`decode(prompt)`, special tokens skipped. Only a short window is ever decoded:

    [0, prefix)        settled, never decoded again
    [prefix, read)     settled, decoded again as context for what follows (leading spaces)
    [read, len)        open: its text may still change, because a character is not complete
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from tokenizers import Tokenizer

from swarm.errors import ConfigError

FinishReason = Literal["stop", "eos", "length"]

CONTEXT_TOKENS = 8
"""Tokens of the prompt that are decoded as context: more than one character's bytes."""
INCOMPLETE = "\ufffd"
"""What decoding shows for bytes that are not (yet) a character."""


class FastTokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that is needed here."""

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer of the `tokenizers` library beneath."""


class TextStream:
    """The text of one generation, piece by piece, and where it ends.

    The pieces that `push` and `finish` return join to `text`. The first token after which the text holds a stop string
    ends it; the text is cut before that string. An end-of-sequence token ends it and has no text. Both belong to
    `tokens`.

    Attributes:
        tokens: the generated tokens that count.
        finish_reason: why it ended; None while it goes on, and after a `finish` that came first.

    Raises:
        ConfigError: a stop string is empty.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        prompt: Sequence[int],
        *,
        stop: Collection[str] = (),
        eos_ids: Collection[int] = (),
        max_new_tokens: int | None = None,
    ) -> None:
        if "" in stop:
            raise ConfigError("stop strings: an empty one would end every text before it begins")
        self._stop = tuple(stop)
        self._eos_ids = frozenset(eos_ids)
        self._limit = max_new_tokens
        self._vocabulary = _Vocabulary(tokenizer.backend_tokenizer)
        self._context = self._vocabulary.tail(prompt)
        self._context_text = self._vocabulary.decode(self._context)
        self._open: list[int] = []
        self._in_bytes = False
        self._held = ""
        self._pieces: list[str] = []
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = "length" if max_new_tokens == 0 else None

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """Whether the text has ended, so that further tokens do not count."""
        return self.finish_reason is not None

    def push(self, tokens: Sequence[int]) -> str:
        """Take the next tokens, as many as count, and return the text that can no longer change or be cut."""
        before = len(self._pieces)
        for token in tokens:
            if self.stopped:
                break
            self._take(token)
        return "".join(self._pieces[before:])

    def finish(self) -> str:
        """Return what was held back; incomplete characters show as U+FFFD, as in decoding."""
        piece = self._held + self._open_text()
        self._held = ""
        self._settle()
        self._pieces.append(piece)
        return piece

    def _take(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._eos_ids:
            self.finish_reason = "eos"
            self.finish()
            return
        self._open.append(token)
        if self._vocabulary.is_visible(token):
            self._in_bytes = self._vocabulary.is_byte(token)
        fresh = self._open_text()
        cut = _first_stop(self._held + fresh.rstrip(INCOMPLETE), self._stop)
        if cut is not None:
            self._pieces.append((self._held + fresh)[:cut])
            self._held = ""
            self._settle()
            self.finish_reason = "stop"
        elif len(self.tokens) == self._limit:
            self.finish_reason = "length"
            self.finish()
        elif fresh and not fresh.endswith(INCOMPLETE) and not self._in_bytes:
            self._settle()
            text = self._held + fresh
            safe = len(text) - _longest_start(text, self._stop)
            self._pieces.append(text[:safe])
            self._held = text[safe:]

    def _open_text(self) -> str:
        if not self._open:
            return ""
        text = self._vocabulary.decode(self._context + self._open)
        return text[_common_length(text, self._context_text) :]

    def _settle(self) -> None:
        """Make the open tokens the context of what follows."""
        if self._open:
            self._context, self._open = self._open, []
            self._context_text = self._vocabulary.decode(self._context)


class _Vocabulary:
    """A tokenizer, and what has to be known about single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._bytes = {tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)} - {None}

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def is_visible(self, token: int) -> bool:
        """Whether decoding passes the token on; special and unknown ones it drops."""
        return token not in self._special and self._tokenizer.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        """Whether it stands for one byte, as `<0x0A>`: a run of these is decoded as one, so only its end settles it."""
        return token in self._bytes

    def tail(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens that decoding sees, enough as context, cut where no run of bytes is."""
        kept: list[int] = []
        for token in reversed(prompt):
            if len(kept) >= CONTEXT_TOKENS and not self.is_byte(kept[-1]):
                break
            if self.is_visible(token):
                kept.append(token)
        return kept[::-1]


def _common_length(text: str, other: str) -> int:
    if text.startswith(other):
        return len(other)
    return next(place for place, (one, two) in enumerate(zip(text + "\0", other + "\1", strict=False)) if one != two)


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first; of several that end there, the longest."""
    found = [(start + len(string), start) for string in stop if (start := text.find(string)) >= 0]
    return min(found)[1] if found else None


def _longest_start(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    return max(
        (size for string in stop for size in range(1, min(len(string), len(text) + 1)) if text.endswith(string[:size])),
        default=0,
    )
