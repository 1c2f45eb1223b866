"""Turns tokens into text while they arrive: detokenising, stop strings, end-of-sequence ids and the length limit. Pure.

The text of generated tokens is relative to the prompt: `decode(prompt + tokens)` less its longest common prefix with
`decode(prompt)`, special tokens skipped. Only a short window is ever decoded:

    [0, prefix)        settled, never decoded again
    [prefix, read)     settled, decoded again as context for what follows (leading spaces)
    [read, len)        open: its text may still change, because a character is not complete
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from tokenizers import Tokenizer

from swarm.base.errors import ConfigError

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


class GrowingText(Protocol):
    """What a generation needs of its text; `TextStream` describes each."""

    tokens: list[int]

    @property
    def text(self) -> str:
        """Everything returned so far."""

    @property
    def stopped(self) -> bool:
        """Whether the text has ended."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended."""

    @property
    def stop_string(self) -> str:
        """The one that ended it."""

    def push(self, tokens: Sequence[int]) -> str:
        """Take the next tokens, as many as count."""

    def finish(self) -> str:
        """Return what was held back."""

    def first(self, tokens: int) -> GrowingText:
        """The same text as it was after its first tokens, to go on otherwise."""


class TextStream:
    """The text of one generation, piece by piece, and where it ends.

    The pieces that `push` and `finish` return join to `text`. The first token after which the text holds a stop string
    ends it; the text is cut before that string. An end-of-sequence token ends it and has no text. Both belong to
    `tokens`.

    A stop string is looked for in the text without special tokens, whether these are shown or not. One that names a
    special token is looked for in the text with all of them.

    Attributes:
        tokens: the generated tokens that count.
        finish_reason: why it ended; None while it goes on, and after a `finish` that came first.
        stop_string: the one that ended it; empty for any other end.

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
        self._again = partial(TextStream, tokenizer, prompt, stop=stop, eos_ids=eos_ids, max_new_tokens=max_new_tokens)
        self._vocabulary = _Vocabulary(tokenizer.backend_tokenizer)
        special = self._vocabulary.special.values()
        self._named_stop = tuple(string for string in stop if any(token in string for token in special))
        self._stop = tuple(string for string in stop if string not in self._named_stop)
        self._show: frozenset[str] = frozenset()
        self._eos_ids = frozenset(eos_ids)
        self._limit = max_new_tokens
        self._context = self._vocabulary.tail(prompt)
        self._context_text = self._vocabulary.decode(self._context)
        self._open: list[int] = []
        self._in_bytes = False
        self._held = _HeldText(self._show)
        self._pieces: list[str] = []
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = "length" if max_new_tokens == 0 else None
        self.stop_string = ""

    def show(self, special: Collection[str]) -> None:
        """Show these special tokens in the text, of which decoding drops all; to be called before the first `push`."""
        self._show = frozenset(special)
        self._held = _HeldText(self._show)

    def first(self, tokens: int) -> TextStream:
        """The same text as it was after its first tokens, to go on otherwise."""
        again = self._again()
        again.show(self._show)
        again.push(self.tokens[:tokens])
        return again

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
        self._held.text += self._open_text()
        self._settle()
        piece = self._held.release_all()
        self._pieces.append(piece)
        return piece

    def _take(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._eos_ids:
            self.finish_reason = "eos"
            self.finish()
            return
        name = self._vocabulary.special.get(token)
        if name is not None and (self._named_stop or name in self._show):
            fresh = self._open_text()
            if self._is_certain(fresh):
                self._held.text += fresh
                self._settle()
            self._held.special.append((len(self._held.text), name))
        self._open.append(token)
        if self._vocabulary.is_visible(token):
            self._in_bytes = self._vocabulary.is_byte(token)
        fresh = self._open_text()
        whole = self._held.with_text(fresh.rstrip(INCOMPLETE))
        cut = whole.first_stop(self._stop, self._named_stop)
        if cut is not None:
            self._held.text += fresh
            self._pieces.append(self._held.release(cut.place, cut.special))
            self._held = _HeldText(self._show)
            self._settle()
            self.finish_reason, self.stop_string = "stop", cut.string
        elif len(self.tokens) == self._limit:
            self.finish_reason = "length"
            self.finish()
        elif self._is_certain(fresh) or (not fresh and name in self._show):
            self._held.text += fresh
            if fresh:
                self._settle()
            self._pieces.append(self._held.release(*self._held.certain(self._stop, self._named_stop)))

    def _is_certain(self, fresh: str) -> bool:
        """Whether the text of open tokens is there, and no later token changes it."""
        return bool(fresh) and not fresh.endswith(INCOMPLETE) and not self._in_bytes

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


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a stop string begins.

    Attributes:
        place: characters before it.
        special: special tokens before it.
        string: that was found.
    """

    place: int
    special: int
    string: str


class _HeldText:
    """Text that may still be cut, and the special tokens in it.

    Attributes:
        text: without special tokens.
        special: of each, the characters before it, and its text.
    """

    def __init__(self, show: frozenset[str]) -> None:
        self._show = show
        self.text = ""
        self.special: list[tuple[int, str]] = []

    def with_text(self, text: str) -> _HeldText:
        """The same with more text."""
        made = _HeldText(self._show)
        made.text, made.special = self.text + text, self.special
        return made

    def release(self, place: int, special: int) -> str:
        """Hand out so many characters and special tokens, those that are shown."""
        shown, start = "", 0
        for before, name in self.special[:special]:
            shown += self.text[start : min(before, place)]
            start = min(before, place)
            shown += name if name in self._show else ""
        shown += self.text[start:place]
        self.text = self.text[place:]
        self.special = [(before - place, name) for before, name in self.special[special:]]
        return shown

    def release_all(self) -> str:
        """Hand out everything."""
        return self.release(len(self.text), len(self.special))

    def certain(self, stop: Sequence[str], named_stop: Sequence[str]) -> tuple[int, int]:
        """How many characters and special tokens cannot belong to a stop string any more."""
        place = len(self.text) - _longest_start(self.text, stop)
        special = self._special_until(place)
        if named_stop:
            raw = self._raw()
            raw_place, raw_special = self._places(len(raw) - _longest_start(raw, named_stop))
            place, special = min(place, raw_place), min(special, raw_special)
        return place, special

    def first_stop(self, stop: Sequence[str], named_stop: Sequence[str]) -> _Cut | None:
        """The stop string that is complete first; of several that end there, the longest."""
        cuts = []
        if (found := _first_stop(self.text, stop)) is not None:
            cuts.append(_Cut(found[0], self._special_until(found[0]), found[1]))
        if named_stop and (found := _first_stop(self._raw(), named_stop)) is not None:
            cuts.append(_Cut(*self._places(found[0]), found[1]))
        return min(cuts, key=lambda cut: (cut.place, cut.special), default=None)

    def _special_until(self, place: int) -> int:
        return sum(before <= place for before, _ in self.special)

    def _raw(self) -> str:
        """The text with all special tokens."""
        raw, start = "", 0
        for before, name in self.special:
            raw += self.text[start:before] + name
            start = before
        return raw + self.text[start:]

    def _places(self, raw_place: int) -> tuple[int, int]:
        """Characters and special tokens before a place in the text with all special tokens."""
        added = 0
        for count, (before, name) in enumerate(self.special):
            if raw_place < before + added + len(name):
                return min(raw_place - added, before), count
            added += len(name)
        return raw_place - added, len(self.special)


class _Vocabulary:
    """A tokenizer, and what has to be known about single tokens.

    Attributes:
        special: texts of special tokens by their ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self.special = {number: token.content for number, token in added if token.special}
        self._bytes = {tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)} - {None}

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def is_visible(self, token: int) -> bool:
        """Whether decoding passes the token on; special and unknown ones it drops."""
        return token not in self.special and self._tokenizer.id_to_token(token) is not None

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


def _first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is complete first, and which it is; of several that end there, the longest."""
    found = [(start + len(string), start, string) for string in stop if (start := text.find(string)) >= 0]
    return min(found)[1:] if found else None


def _longest_start(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    return max(
        (size for string in stop for size in range(1, min(len(string), len(text) + 1)) if text.endswith(string[:size])),
        default=0,
    )
