"""Grammars of picks, in a worker: compiled once, then followed along every path of a tree.

Knows llguidance, and nobody else does. A grammar may come from a stranger, so this runs in processes that can be
killed (`swarm.compute.grammars`): nothing here counts steps, and nothing imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from swarm.base.errors import ConfigError
from swarm.protocol.pick_rules import Grammar

MAX_ERROR_CHARACTERS = 200
JSON_OPTIONS: Final[Any] = {"whitespace_flexible": True, "whitespace_pattern": r" ?|\n {0,16}"}
"""A gap in JSON is bounded: some models would go on with blanks for ever."""
LOOSE_OPTIONS: Final[Any] = {"whitespace_flexible": True}
"""Of a client that checks picks: any gap that JSON knows, since tails of other releases bound gaps otherwise."""
_ANY_OBJECT = json.dumps({"type": "object"})


class GrammarState:
    """One session's place in its grammar: at the end of the committed part of its text."""

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher, ends: Sequence[int]) -> None:
        """Begin at the beginning of a text.

        Args:
            tokenizer: whose tokens the text is of.
            matcher: at the beginning; it is this object's own from now on.
            ends: tokens that end the text.
        """
        self._matcher = matcher
        self._ends = ends
        self._own_ends = [token for token in tokenizer.eos_tokens if token < tokenizer.vocab_size]
        self._closing = frozenset((*ends, *self._own_ends))
        self._path: list[int] = []
        self._taken = 0
        """Tokens of the path that the grammar took: fewer than all where the text does not match it, or has ended."""

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """Go to where the text has its first `kept` tokens as before, and then these."""
        taken = min(self._taken, kept)
        self._back(self._taken - taken)
        self._path = [*self._path[:kept], *new]
        self._taken = taken + self._take(self._path[taken:])

    def masks(self, size: int, paths: Sequence[Sequence[int]]) -> tuple[list[int], list[bytes]]:
        """What the grammar takes next at each node; where it takes nothing, the ends of the text.

        Args:
            size: bytes of a mask: a bit per token, the lowest first.
            paths: [nodes] the generated tokens below the place where `follow` went.

        Returns:
            [nodes] which of the masks each has; and the masks, none twice.

        Raises:
            ConfigError: the grammar exceeds the library's own bounds.
        """
        found: dict[bytes, int] = {}
        chosen = [0] * len(paths)
        below: list[int] = []  # what the matcher took beyond the committed part; siblings follow one another
        for row in sorted(range(len(paths)), key=lambda row: tuple(paths[row])):
            path = paths[row]
            shared = next((i for i, pair in enumerate(zip(below, path, strict=False)) if pair[0] != pair[1]), None)
            shared = min(len(below), len(path)) if shared is None else shared
            self._back(len(below) - shared)
            below = [*path[:shared]]
            if self._taken == len(self._path):
                below = [*path[: shared + self._take(path[shared:])]]
            mask = self._mask(size, is_open=self._taken == len(self._path) and len(below) == len(path))
            chosen[row] = found.setdefault(mask, len(found))
        self._back(len(below))
        return chosen, list(found)

    def forced(self) -> list[int]:
        """How the text goes on where the grammar leaves no choice, as its tokenizer writes that; often not at all."""
        return self._matcher.compute_ff_tokens() if self._taken == len(self._path) else []

    def _mask(self, size: int, *, is_open: bool) -> bytes:
        """What may be picked at the matcher's place.

        Args:
            size: bytes of it.
            is_open: whether the grammar took the whole path.
        """
        bits = bytearray(size)
        if is_open:
            found = self._matcher.compute_bitmask()[:size]
            if self._matcher.is_error():
                raise ConfigError(f"grammar: {_line(self._matcher.get_error())}")
            bits[: len(found)] = found
            for token in self._own_ends:
                bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        if not is_open or self._matcher.is_accepting() or not any(bits):
            for token in self._ends:
                bits[token >> 3] |= 1 << (token & 7)
        return bytes(bits)

    def _take(self, tokens: Sequence[int]) -> int:
        """Take what the grammar takes of these, up to an end of the text: what follows one matches nothing."""
        end = next((place for place, token in enumerate(tokens) if token in self._closing), len(tokens))
        return self._matcher.try_consume_tokens([*tokens[:end]])

    def _back(self, count: int) -> None:
        """Take back the last tokens that were taken."""
        if count and not self._matcher.rollback(count):
            raise ConfigError(f"grammar: {_line(self._matcher.get_error())}")


class _Here:
    """What this process holds: a tokenizer, the grammar that it was forked for, and who follows that."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._matchers: list[LLMatcher] = []
        """The grammar, and with any gaps in JSON, where what others picked is to be checked."""
        self._states: dict[int, list[GrammarState]] = {}
        self._shared_kb = 0

    def bill(self) -> dict[str, Any]:
        """What this process came to take: bytes beyond what it shares, and seconds of a processor."""
        used = getrusage(RUSAGE_SELF)
        return {"held_bytes": (used.ru_maxrss - self._shared_kb) << 10, "cpu_s": used.ru_utime + used.ru_stime}

    def read(self, path: str, text: str, eos: int | None) -> None:
        """Read the tokenizer that all forks share."""
        try:
            text = text or Path(path).read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, eos_token=eos)
        except (OSError, ValueError) as error:
            raise ConfigError(f"grammar: this model's tokenizer.json cannot be read ({_line(error)})") from error

    def compile(self, kind: Any, text: str, *, is_loose: bool) -> None:  # noqa: ANN401 (as JSON has it)
        """Compile this process's grammar."""
        assert self._tokenizer is not None
        self._shared_kb = getrusage(RUSAGE_SELF).ru_maxrss
        self._matchers = [compiled(self._tokenizer, Grammar(kind, text))]
        if is_loose and kind in ("json", "json_schema"):
            self._matchers.append(compiled(self._tokenizer, Grammar(kind, text), is_loose=True))

    def masks(self, asked: Mapping[str, Any]) -> tuple[list[int], list[bytes]]:
        """One session's masks, after it went on."""
        found = [state.masks(asked["size"], asked["paths"]) for state in self._followed(asked)]
        return found[0] if len(found) == 1 else _either(*found)

    def forced(self, asked: Mapping[str, Any]) -> list[int]:
        """What must follow one session's text, after it went on."""
        return self._followed(asked)[0].forced()

    def _followed(self, asked: Mapping[str, Any]) -> list[GrammarState]:
        """One session's places, where its text ends now."""
        session = asked["session"]
        if session not in self._states:
            tokenizer = self._tokenizer
            assert tokenizer is not None
            states = [GrammarState(tokenizer, matcher.deep_copy(), asked["ends"]) for matcher in self._matchers]
            self._states[session] = states
        for state in self._states[session]:
            state.follow(asked["kept"], asked["new"])
        return self._states[session]

    def forget(self, sessions: Sequence[int]) -> None:
        """Sessions that are over."""
        for session in sessions:
            self._states.pop(session, None)


_here = _Here()


def handle(head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """One call of `swarm.compute.grammars`, in a worker."""
    try:
        match head["do"]:
            case "read":
                _here.read(head["path"], data.decode(), head["eos"])
            case "compile":
                _here.compile(head["kind"], data.decode(), is_loose=head["is_loose"])
            case "masks":
                _here.forget(head["over"])
                chosen, masks = _here.masks(head)
                return {"chosen": chosen, **_here.bill()}, b"".join(masks)
            case "forced":
                _here.forget(head["over"])
                return {"forced": _here.forced(head), **_here.bill()}, b""
    except ConfigError as error:
        return {"refused": str(error), **_here.bill()}, b""
    return _here.bill(), b""


def compiled(tokenizer: LLTokenizer, grammar: Grammar, *, is_loose: bool = False) -> LLMatcher:
    """A matcher at the beginning of a text.

    Args:
        tokenizer: whose tokens the text is of.
        is_loose: whether JSON may have any gaps.

    Raises:
        ConfigError: it is no grammar, or too large.
    """
    matcher = LLMatcher(tokenizer, _source(grammar, LOOSE_OPTIONS if is_loose else JSON_OPTIONS), log_level=0)
    if matcher.is_error():
        raise ConfigError(f"grammar: {_line(matcher.get_error())}")
    return matcher


def _either(one: tuple[list[int], list[bytes]], other: tuple[list[int], list[bytes]]) -> tuple[list[int], list[bytes]]:
    """What one of two grammars takes at each node."""
    found: dict[tuple[int, int], int] = {}
    chosen = [found.setdefault(pair, len(found)) for pair in zip(one[0], other[0], strict=True)]
    masks = []
    for first, second in found:
        bits = int.from_bytes(one[1][first]) | int.from_bytes(other[1][second])
        masks.append(bits.to_bytes(len(one[1][first])))
    return chosen, masks


def _source(grammar: Grammar, json_options: Any) -> str:  # noqa: ANN401 (as the library has it)
    """The grammar as llguidance reads it.

    Raises:
        ConfigError: it is no JSON.
    """
    match grammar.kind:
        case "json" | "json_schema":
            text = _ANY_OBJECT if grammar.kind == "json" else grammar.text
            try:
                json.loads(text)  # the library's own words for this are about its envelope
                return LLMatcher.grammar_from_json_schema(text, json_options)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"grammar: no JSON schema ({_line(error)})") from None
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _line(error: object) -> str:
    """The first line of what the library says, and its cause where a later one names it, printable."""
    first, *others = str(error).strip().splitlines() or [""]
    cause = next((line.removeprefix("error:") for line in others if line.startswith("error:")), "")
    said = f"{first[: MAX_ERROR_CHARACTERS - len(cause)]}{cause}"[:MAX_ERROR_CHARACTERS]
    return "".join(character if character.isprintable() else "\ufffd" for character in said)
