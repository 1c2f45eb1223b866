"""Grammars of sessions: each compiled and followed in a worker of its own, under a lease (`swarm.base.workers`).

One worker reads the tokenizer, and its forks compile one grammar each, so a grammar that takes too much ends alone.
Where several sessions of one asker follow the same one, those that go on are followed again from their texts.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary, finalize

from transformers import PreTrainedTokenizerFast

from swarm.base.errors import ConfigError, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.base.workers import Worker, WorkerEnded, WorkLease, new_worker
from swarm.compute.path_rules import NodeMasks, NodePaths
from swarm.protocol.pick_rules import Grammar, PickRules
from swarm.protocol.session import CommittedToken, SessionState

MAX_COMPILED = 8
"""Compiled grammars that are kept for the next session."""
MAX_LIVE = 64
"""Compiled grammars that are kept or followed."""
GRAMMAR_BYTES: Final = 64 << 20
"""What a grammar may come to take."""
TOKENIZER_BYTES: Final = 1 << 30
READING: Final = WorkLease(cpu_s=30.0, wall_s=60.0)
"""Of a tokenizer; one of 128,000 tokens takes a second or two."""
LIVE_BYTES: Final = 256 << 20
"""What all of them may come to take together: beyond it the largest begins again from its text."""
KEPT_BYTES: Final = 32 << 20
"""What those may take that are kept for the next session."""
COMPILING: Final = WorkLease(cpu_s=4.0, wall_s=30.0)
"""The largest schema of 64 KiB that was found takes 0.9 s, others 1 to 10 ms."""
MATCHING: Final = WorkLease(cpu_s=1.0, wall_s=15.0)
"""Of the masks of a sweep: 0.1 ms for a node as a rule. The first one may build much of a lexer."""
NICENESS: Final = 5
"""By how much workers make way for the node's own computation."""
LEASE_FIELD: Final = "lease"
"""Of the error that says that a grammar took too much."""
_HANDLER: Final = "swarm.compute.grammar:handle"


class LeaseExceeded(RemoteProtocolError):
    """A grammar takes more time or memory than one may."""

    def __init__(self) -> None:
        super().__init__(LEASE_FIELD, "the grammar takes more time or memory than one may")


class GrammarAccounts(Protocol):
    """What the askers' grammars took of the processors."""

    def grammar_took(self, owner: str, seconds: float) -> None:
        """So much more."""

    def grammar_wait_s(self, owner: str) -> float:
        """How long the next work waits, because they took so much."""


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, which is read with the first one; all within one event loop.

    Attributes:
        is_loose: whether JSON may have any gaps.
        accounts: of those who ask; None where one asks alone.
    """

    def __init__(
        self,
        read: Callable[[], tuple[dict[str, Any], bytes]],
        accounts: GrammarAccounts | None = None,
        *,
        is_loose: bool = False,
    ) -> None:
        """Read nothing yet.

        Args:
            read: the call that reads the tokenizer, in a worker: its head and its text.
            is_loose: whether JSON may have any gaps: to check what others picked.
        """
        self._read, self.is_loose, self.accounts = read, is_loose, accounts
        self._base: Worker | None = None
        self._reading = asyncio.Lock()
        self._kept: OrderedDict[tuple[str, Grammar], CompiledGrammar] = OrderedDict()
        self._live: WeakValueDictionary[tuple[str, Grammar], CompiledGrammar] = WeakValueDictionary()

    @classmethod
    def of_folder(cls, folder: Path, accounts: GrammarAccounts | None = None) -> GrammarCompiler:
        """For the tokenizer of a model's folder."""
        return cls(lambda: ({"path": str(folder / "tokenizer.json"), "eos": None}, b""), accounts)

    @classmethod
    def of_tokenizer(cls, tokenizer: PreTrainedTokenizerFast) -> GrammarCompiler:
        """For a client, to check picks, and for a tokenizer that was read already: with what its config adds to it."""

        def read() -> tuple[dict[str, Any], bytes]:
            backend = copy(tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            return {"path": "", "eos": tokenizer.eos_token_id}, backend.to_str().encode()

        return cls(read, is_loose=True)

    async def compile(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """Compile a grammar, or find it compiled.

        Args:
            owner: who asks for it; askers share nothing.

        Raises:
            ConfigError: it is none, or too large.
            LeaseExceeded: it takes too much time or memory.
            MemoryError: too many others are followed.
        """
        key = owner, grammar
        found = self._kept.pop(key, None) or self._live.get(key)
        if found is None:
            while len(self._live) >= MAX_LIVE and self._kept:
                self._kept.popitem(last=False)
            if len(self._live) >= MAX_LIVE:
                raise MemoryError("too many grammars are followed")
            found = self._live[key] = CompiledGrammar(grammar, self, owner)
        await found.compile()
        self._kept[key] = found
        self.make_room()
        return found

    async def fork(self) -> Worker:
        """A worker for one grammar, which has the tokenizer.

        Raises:
            ConfigError: there is none that could be read.
        """
        async with self._reading:
            with suppress(WorkerEnded):  # somebody killed the one that there was
                if self._base is not None:
                    return self._base.fork(GRAMMAR_BYTES)
            self._base = await self._read_in_worker()
            return self._base.fork(GRAMMAR_BYTES)

    async def _read_in_worker(self) -> Worker:
        head, text = await asyncio.to_thread(self._read)
        try:
            worker = await asyncio.to_thread(new_worker, TOKENIZER_BYTES, NICENESS)
            finalize(self, worker.close)
            _checked(await worker.acall(_HANDLER, {"do": "read", **head}, text, lease=READING))
        except WorkerEnded as error:
            raise ConfigError(f"grammar: this model's tokenizer {error}") from error
        return worker

    def make_room(self) -> None:
        """Keep no more than fits; beyond that, end the largest that is idle, of the asker who takes most."""
        kept = self._kept
        while len(kept) > MAX_COMPILED or sum(grammar.held_bytes for grammar in kept.values()) > KEPT_BYTES:
            kept.popitem(last=False)
        while sum(grammar.held_bytes for grammar in self._live.values()) > LIVE_BYTES:
            taken: Counter[str] = Counter()
            for (owner, _), grammar in self._live.items():
                taken[owner] += grammar.held_bytes
            idle = [(taken[key[0]], one.held_bytes, one) for key, one in self._live.items() if not one.is_working]
            if not idle:
                return
            max(idle, key=lambda entry: entry[:2])[2].close()

    def close(self) -> None:
        self._kept.clear()
        for grammar in list(self._live.values()):
            grammar.close()
        if self._base is not None:
            self._base.close()


class CompiledGrammar:
    """A grammar for one tokenizer, in a worker of its own; any number of sessions of one asker follow it.

    Attributes:
        run: how often its worker was begun.
        held_bytes: what its worker came to take.
    """

    def __init__(self, grammar: Grammar, compiler: GrammarCompiler, owner: str) -> None:
        """Compile nothing yet."""
        self.run = self.held_bytes = 0
        self._cpu_s = 0.0
        self._grammar, self._compiler, self._owner = grammar, compiler, owner
        self._worker: Worker | None = None
        self._turn = asyncio.Lock()
        self._over: list[int] = []

    async def compile(self) -> None:
        """Begin its worker, if it has none.

        Raises:
            ConfigError: it is no grammar, or too large.
            LeaseExceeded: it takes too much time or memory.
        """
        async with self._turn:
            await self._may_go_on()
            await self._ready()

    @property
    def is_working(self) -> bool:
        """Whether somebody waits for its worker."""
        return self._turn.locked()

    async def _ready(self) -> Worker:
        if self._worker is None or self._worker.has_ended:
            self._worker, self._cpu_s = await self._compiler.fork(), 0.0
            finalize(self, self._worker.close)
            self.run += 1
            head = {"do": "compile", "kind": self._grammar.kind, "is_loose": self._compiler.is_loose}
            try:
                await self._call(self._worker, head, self._grammar.text.encode("utf-8", "replace"), COMPILING)
            except BaseException:
                self._worker.close()
                raise
        return self._worker

    async def masks(self, asked: Callable[[], dict[str, Any]]) -> tuple[list[int], bytes]:
        """The masks of one session's nodes.

        Args:
            asked: makes the call, once the worker is there.

        Raises:
            LeaseExceeded: they take too much time or memory.
            ConfigError: they exceed the library's own bounds.
        """
        head, data = await self._follow("masks", asked)
        return head["chosen"], data

    async def forced(self, asked: Callable[[], dict[str, Any]]) -> list[int]:
        """What must follow one text. As `masks`."""
        head, _ = await self._follow("forced", asked)
        forced: list[int] = head["forced"]
        return forced

    async def _follow(self, do: str, asked: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bytes]:
        async with self._turn:
            await self._may_go_on()
            worker = await self._ready()
            over, self._over = self._over, []
            before = self.held_bytes
            found = await self._call(worker, {"do": do, "over": over, **asked()}, b"", MATCHING)
        if self.held_bytes > before:
            self._compiler.make_room()
        return found

    async def _may_go_on(self) -> None:
        """Wait until the asker has paid for what it took."""
        accounts = self._compiler.accounts
        wait_s = 0.0 if accounts is None else accounts.grammar_wait_s(self._owner)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    async def _call(self, worker: Worker, head: dict[str, Any], data: bytes, lease: WorkLease) -> tuple[Any, bytes]:
        said, found, took_s = {"held_bytes": 0}, b"", lease.cpu_s
        try:
            said, found = await worker.acall(_HANDLER, head, data, lease=lease)
            took_s = said["cpu_s"] - self._cpu_s
            self._cpu_s = said["cpu_s"]
        except WorkerEnded as error:
            raise LeaseExceeded from error
        finally:
            self.held_bytes = said["held_bytes"]
            if self._compiler.accounts is not None:
                self._compiler.accounts.grammar_took(self._owner, took_s)
        return _checked((said, found))

    def forget(self, session: int) -> None:
        """A session is over."""
        self._over.append(session)

    def close(self) -> None:
        """Let its worker end; who goes on with it begins another one."""
        self.held_bytes = 0
        if self._worker is not None:
            self._worker.close()


_sessions = count()
"""Numbers of those who follow a grammar."""


class ForcedTokens:
    """One text's place in its grammar, and what must follow it."""

    def __init__(self, grammar: CompiledGrammar, rules: PickRules) -> None:
        self._grammar, self._rules = grammar, rules
        self._session = next(_sessions)
        self._run = 0
        self._text: tuple[int, ...] = ()
        finalize(self, grammar.forget, self._session)

    async def after(self, sequence: Sequence[int]) -> tuple[int, ...]:
        """The tokens that the grammar forces there, as the tokenizer writes them; calls do not overlap.

        Args:
            sequence: the prompt and the text so far.

        Raises:
            ConfigError: they exceed the library's own bounds.
            LeaseExceeded: they take too much time or memory.
        """
        text = tuple(sequence[self._rules.start :])

        def asked() -> dict[str, Any]:
            goes_on = self._run == self._grammar.run and text[: len(self._text)] == self._text
            kept = len(self._text) if goes_on else 0
            self._run, self._text = self._grammar.run, text
            ends = self._rules.end_tokens
            return {"session": self._session, "ends": ends, "kept": kept, "new": text[kept:]}

        return tuple(await self._grammar.forced(asked))


class GrammarPlace:
    """One session's place in its grammar."""

    def __init__(self, grammar: CompiledGrammar, rules: PickRules) -> None:
        self._grammar, self._rules = grammar, rules
        self._session = next(_sessions)
        self._run = 0
        self._path: Sequence[CommittedToken] = ()
        finalize(self, grammar.forget, self._session)

    def masks(self, nodes: Sequence[TreeNodeId], state: SessionState) -> Awaitable[NodeMasks]:
        """What the grammar takes after some nodes; where it takes nothing, the ends of the text.

        Args:
            state: whose nodes they are; it may change while the masks are awaited.

        Raises:
            RemoteProtocolError: it takes too much time or memory.
        """
        paths, start = NodePaths.of(nodes, state), self._rules.start
        prompt = max(start - paths.length, 0)
        vocab_size = state.limits.vocab_size
        text = state.committed[start : max(paths.length, start)]

        def asked() -> dict[str, Any]:
            kept = self._kept(text)
            self._path = text
            return {
                "session": self._session,
                "ends": self._rules.end_tokens,
                "size": -(-vocab_size // 8),
                "kept": kept,
                "new": [token.token for token in text[kept:]],
                "paths": [path[prompt:] for path in paths.below],
            }

        async def answer() -> NodeMasks:
            try:
                chosen, data = await self._grammar.masks(asked)
            except ConfigError as error:
                raise RemoteProtocolError("grammar", str(error)) from error
            return NodeMasks.of(nodes, chosen, data, vocab_size)

        return answer()

    def _kept(self, text: Sequence[CommittedToken]) -> int:
        """How many tokens of the text its worker knows. Ids are never used again."""
        if self._run != self._grammar.run:
            self._run, self._path = self._grammar.run, ()
        kept = min(len(self._path), len(text))
        while kept and self._path[kept - 1].id != text[kept - 1].id:
            kept -= 1
        return kept


def _checked(answer: tuple[dict[str, Any], bytes]) -> tuple[dict[str, Any], bytes]:
    if "refused" in answer[0]:
        raise ConfigError(answer[0]["refused"])
    return answer
