"""What each token of a tokenizer stands for, as bytes, so that tokens of different tokenizers can be compared. Pure.

    byte-level   `Ġthe`, `Ã©`   a character per byte (GPT-2, Llama 3, Qwen, DeepSeek …)
    metaspace    `▁the`, `é`    text with `▁` for a space, and `<0xC3>` for a byte that has no token (Llama 2, Gemma …)

Control tokens stand for no text: two of them are the same where their names are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerFast

TokenString: TypeAlias = tuple[bool, bytes]
"""Whether it is a control token, and its bytes: of its text, or of its name."""

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTED = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
"""Bytes that byte-level tokenizers write as the character of the same number; others follow from U+0100 on."""


class TokenizerKind(Enum):
    """How a tokenizer writes bytes in its tokens; the value is for people."""

    BYTE_LEVEL = "byte-level"
    METASPACE = "metaspace"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class TokenStrings:
    """What the tokens of one tokenizer stand for.

    Attributes:
        kind: how it writes bytes.
        name: kind and model for people, such as `byte-level BPE`.
        by_id: by id; ids whose bytes are not known are left out.
        prepends: whether it puts a space before a text's first word.
        begins_with: ids that it puts before every text.
        begin_id: its token for the beginning of a text; None for none.
        end_id: its token for the end of a text; None for none.
    """

    kind: TokenizerKind
    name: str
    by_id: dict[int, TokenString]
    prepends: bool
    begins_with: tuple[int, ...]
    begin_id: int | None
    end_id: int | None

    def ids(self) -> dict[TokenString, int]:
        """The id of each string: the lowest one, but a character's own token before the token of its byte."""
        found: dict[TokenString, int] = {}
        for token_id, string in self.by_id.items():
            found.setdefault(string, token_id)
        return found


def read_strings(tokenizer: PreTrainedTokenizerFast, rows: int) -> TokenStrings:
    """Read what a tokenizer's tokens stand for.

    Args:
        tokenizer: of any kind.
        rows: of its model's embedding; ids from here on are left out.
    """
    backend = tokenizer.backend_tokenizer
    parts = [*_parts(backend.decoder), *_parts(backend.pre_tokenizer), *_parts(backend.normalizer)]
    kind = _kind(parts)
    model = type(backend.model).__name__
    plain = backend.encode("a", add_special_tokens=False)
    whole = list(backend.encode("a", add_special_tokens=True).ids)
    by_id = _strings(tokenizer, kind, rows)
    first = by_id.get(plain.ids[0]) if plain.ids else None
    begins_with = whole[: whole.index(plain.ids[0])] if plain.ids and plain.ids[0] in whole else []
    return TokenStrings(
        kind=kind,
        name=model if kind is TokenizerKind.OTHER else f"{kind.value} {model}",
        by_id=by_id,
        prepends=first is not None and first[1].startswith(b" "),
        begins_with=tuple(begins_with),
        begin_id=_within(tokenizer.bos_token_id, rows),
        end_id=_within(tokenizer.eos_token_id, rows),
    )


def added_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Ids that tokenizers add to their model's own tokens, control tokens among them."""
    return set(tokenizer.added_tokens_decoder)


def _strings(tokenizer: PreTrainedTokenizerFast, kind: TokenizerKind, rows: int) -> dict[int, TokenString]:
    """The string of every id below `rows`, tokens that are written as bytes last."""
    added = tokenizer.added_tokens_decoder
    strings: dict[int, TokenString] = {}
    as_bytes: dict[int, TokenString] = {}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if token_id >= rows:
            continue
        if token_id in added:
            strings[token_id] = (added[token_id].special, added[token_id].content.encode("utf-8", "surrogatepass"))
        elif kind is TokenizerKind.BYTE_LEVEL:
            if (data := _from_byte_level(token)) is not None:
                strings[token_id] = (False, data)
        elif kind is TokenizerKind.METASPACE:
            if written := _BYTE_TOKEN.fullmatch(token):
                as_bytes[token_id] = (False, bytes([int(written[1], 16)]))
            else:
                strings[token_id] = (False, token.replace(SPACE_MARK, " ").encode("utf-8", "surrogatepass"))
    return strings | as_bytes


def _from_byte_level(token: str) -> bytes | None:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return None


def _byte_of_char() -> dict[str, int]:
    printed = [byte for part in _PRINTED for byte in part]
    others = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_of_char()


def _parts(component: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a normalizer, pre-tokenizer or decoder
    """The states of a tokenizer's component and of all that it is made of."""
    return [] if component is None else list(_flat(json.loads(component.__getstate__())))


def _flat(state: object) -> Iterator[dict[str, Any]]:
    match state:
        case dict():
            yield state
            for value in state.values():
                yield from _flat(value)
        case list():
            for value in state:
                yield from _flat(value)


def _kind(parts: list[dict[str, Any]]) -> TokenizerKind:
    types = {part.get("type") for part in parts}
    if "ByteLevel" in types:
        return TokenizerKind.BYTE_LEVEL
    marks = any(part.get("type") == "Replace" and SPACE_MARK in json.dumps(part, ensure_ascii=False) for part in parts)
    return TokenizerKind.METASPACE if "Metaspace" in types or marks else TokenizerKind.OTHER


def _within(token_id: object, rows: int) -> int | None:
    return token_id if isinstance(token_id, int) and 0 <= token_id < rows else None
