"""Grammars of picks: compiled once, then followed along every path of a tree. Knows llguidance, and nobody else does.

A grammar may come from a stranger: its size, its compilation, its lexer's states, each mask and how many are kept are
bounded. What exceeds a bound is refused; it never makes another text.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from swarm.errors import ConfigError, RemoteProtocolError
from swarm.protocol.pick_rules import Grammar, PickRules
from swarm.protocol.session import CommittedToken

MAX_COMPILED = 8
"""Compiled grammars that are kept for the next session."""
MAX_LIVE = 64
"""Compiled grammars that are kept or followed; each may come to take 40 MB."""
MASKS_S, MASK_S = 0.25, 0.001
"""What the masks of some nodes may take of a CPU: so much, and so much per node; one takes 0.1 ms as a rule."""
MAX_ERROR_CHARACTERS = 200
STACK_BYTES = 512 << 20
"""Address space of the thread that compiles; 64 KiB of text can name ten thousand rules, each below the last."""
_STACKS = threading.Lock()
_LIMITS: Final[Mapping[str, Any]] = {
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
}
"""Symbols; work of building the lexer (20 ms), and of one mask (7 ms, 3 ms); states, of 2 kB each."""
JSON_OPTIONS: Final[Any] = {"whitespace_flexible": True, "whitespace_pattern": r" ?|\n {0,16}"}
"""A gap in JSON is bounded: some models would go on with blanks for ever."""
_ANY_OBJECT = json.dumps({"type": "object"})


class CompiledGrammar:
    """A grammar for one tokenizer; any number of sessions begin from it.

    Attributes:
        tokenizer: its ids.
    """

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher) -> None:
        self.tokenizer = tokenizer
        self._matcher = matcher

    def begin(self) -> LLMatcher:
        """A matcher at the beginning of a text."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, which is read with the first one. Any thread may call it."""

    def __init__(self, read: Callable[[], LLTokenizer]) -> None:
        """Read nothing yet.

        Args:
            read: makes the tokenizer; it takes about a second for a large one. Raises ConfigError where there is none.
        """
        self._read = read
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._live: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()

    @classmethod
    def of_folder(cls, folder: Path) -> GrammarCompiler:
        """For the tokenizer of a model's folder."""

        def read() -> LLTokenizer:
            try:
                return LLTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"grammar: this model's tokenizer.json cannot be read ({_line(error)})") from error

        return cls(read)

    @classmethod
    def of_tokenizer(cls, tokenizer: PreTrainedTokenizerFast) -> GrammarCompiler:
        """For a tokenizer that was read already."""
        return cls(lambda: from_tokenizer(tokenizer))

    def kept(self, grammar: Grammar) -> CompiledGrammar | None:
        """The grammar, if it is compiled already; never waits."""
        return self._compiled.get(grammar)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, on the calling thread: an event loop calls it on another one.

        Raises:
            ConfigError: it is none, or too large.
            MemoryError: too many others are followed.
        """
        with self._lock:
            found = self._compiled.pop(grammar, None) or self._live.get(grammar)
            if found is None:
                if len(self._live) >= MAX_LIVE:
                    raise MemoryError("too many grammars are followed")
                if self._tokenizer is None:
                    self._tokenizer = self._read()
                found = CompiledGrammar(self._tokenizer, _matcher(self._tokenizer, _source(grammar)))
            self._compiled[grammar] = self._live[grammar] = found
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return found


class GrammarState:
    """One session's place in its grammar: at the end of the committed part of its text."""

    def __init__(self, grammar: CompiledGrammar, rules: PickRules) -> None:
        self._grammar, self._matcher = grammar, grammar.begin()
        self._start = rules.start
        self._ends = rules.end_tokens
        self._own_ends = [token for token in grammar.tokenizer.eos_tokens if token < grammar.tokenizer.vocab_size]
        self._closing = frozenset((*rules.end_tokens, *self._own_ends))
        self._path: list[CommittedToken] = []
        self._taken = 0
        """Tokens of the path that the grammar took: fewer than all where the text does not match it, or has ended."""

    def follow(self, committed: Sequence[CommittedToken], length: int) -> None:
        """Go to the end of the first `length` committed tokens, of which those from `start` on are matched."""
        path, new = self._path, committed[self._start : max(length, self._start)]
        kept = min(len(path), len(new))
        while kept and path[kept - 1].id != new[kept - 1].id:
            kept -= 1
        taken = min(self._taken, kept)
        self._back(self._taken - taken)
        self._path = [*path[:kept], *new[kept:]]
        self._taken = taken + self._take([token.token for token in self._path[taken:]])

    def mask(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Leave at each node what the grammar takes next, in place; where it takes nothing, the ends of the text.

        Args:
            logits: float32 [len(paths), vocab_size]
            paths: [nodes] the generated tokens below the place where `follow` went.

        Raises:
            RemoteProtocolError: the grammar takes too much time or memory.
        """
        vocab_size = logits.shape[1]
        blocked = np.full((len(paths), -(-vocab_size // 8)), 0xFF, dtype=np.uint8)  # a bit per token, the lowest first
        below: list[int] = []  # what the matcher took beyond the committed part; siblings follow one another
        budget_s = time.thread_time() + MASKS_S + MASK_S * len(paths)
        for row in sorted(range(len(paths)), key=lambda row: tuple(paths[row])):
            path = paths[row]
            shared = next((i for i, pair in enumerate(zip(below, path, strict=False)) if pair[0] != pair[1]), None)
            shared = min(len(below), len(path)) if shared is None else shared
            self._back(len(below) - shared)
            below = [*path[:shared]]
            if self._taken == len(self._path):
                below = [*path[: shared + self._take(path[shared:])]]
            self._open(blocked[row], is_open=self._taken == len(self._path) and len(below) == len(path))
            if time.thread_time() > budget_s:
                self._back(len(below))
                raise RemoteProtocolError("grammar", "takes too long to match")
        self._back(len(below))
        bits = np.unpackbits(blocked, axis=1, count=vocab_size, bitorder="little")
        logits.masked_fill_(torch.from_numpy(bits).view(torch.bool).to(logits.device), -torch.inf)

    def _open(self, blocked: NDArray[np.uint8], *, is_open: bool) -> None:
        """Unblock what may be picked at the matcher's place.

        Args:
            blocked: bits of one row, all set so far.
            is_open: whether the grammar took the whole path.
        """
        if is_open:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: len(blocked)]
            if self._matcher.is_error():
                raise RemoteProtocolError("grammar", _line(self._matcher.get_error()))
            np.invert(bits, out=blocked[: len(bits)])
            for token in self._own_ends:
                blocked[token >> 3] |= 1 << (token & 7)
        if not is_open or self._matcher.is_accepting() or bool((blocked == 0xFF).all()):
            for token in self._ends:
                blocked[token >> 3] &= ~(1 << (token & 7)) & 0xFF

    def _take(self, tokens: Sequence[int]) -> int:
        """Take what the grammar takes of these, up to an end of the text: what follows one matches nothing."""
        end = next((place for place, token in enumerate(tokens) if token in self._closing), len(tokens))
        return self._matcher.try_consume_tokens([*tokens[:end]])

    def _back(self, count: int) -> None:
        """Take back the last tokens that were taken."""
        if count and not self._matcher.rollback(count):
            raise RemoteProtocolError("grammar", _line(self._matcher.get_error()))


def _matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile, on a thread with a deep stack: the library goes down a chain of a grammar's rules by recursion.

    Raises:
        ConfigError: it is no grammar, or too large.
    """
    made: list[LLMatcher] = []

    def work() -> None:
        made.append(LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**_LIMITS)))

    with _STACKS:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name="grammar")
            thread.start()
        except RuntimeError as error:
            raise ConfigError(f"grammar: there is no memory to compile one ({_line(error)})") from error
        finally:
            threading.stack_size(usual)
    thread.join()
    if not made or made[0].is_error():
        raise ConfigError(f"grammar: {_line(made[0].get_error()) if made else 'cannot be compiled'}")
    return made[0]


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it.

    Raises:
        ConfigError: it is no JSON.
    """
    match grammar.kind:
        case "json" | "json_schema":
            text = _ANY_OBJECT if grammar.kind == "json" else grammar.text
            try:
                json.loads(text)  # the library's own words for this are about its envelope
                return LLMatcher.grammar_from_json_schema(text, JSON_OPTIONS)
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
