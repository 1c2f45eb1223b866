"""What the grammar forces after the certain text: keys, quotes and braces of JSON, the frame of a tool call.

The grammar's worker is asked while the loop has other work, and awaited for a moment only: no sweep waits for a slow
worker. As with any draft the target decides, which may write the same text in other tokens than its tokenizer would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from swarm.errors import SwarmError
from swarm.inference.grammars import ForcedTokens

PATIENCE_S = 0.005
"""How long a sweep waits for the answer, which takes less than a millisecond as a rule."""
MAX_LATE = 3
"""Answers in a row that may come late; then no sweep of the text waits for one any more."""
MAX_LEFT = 3
"""Answers in a row that the text may leave, since its target writes other tokens; then nothing more is asked."""

Tokens = tuple[int, ...]
Spawn = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]
"""Starts work that somebody else owns."""


class ForcedText:
    """What a grammar forces next in one text."""

    def __init__(self, place: ForcedTokens, spawn: Spawn) -> None:
        """Ask nothing yet.

        Args:
            place: follows the text.
            spawn: starts a question.
        """
        self._place: ForcedTokens | None = place
        self._spawn = spawn
        self._task: asyncio.Task[None] | None = None
        self._found: tuple[Tokens, Tokens] = (), ()
        self._late = self._left = 0

    def ask(self, sequence: Tokens) -> None:
        """Ask what must follow, unless another question is open."""
        before, forced = self._found
        came = sequence[len(before) :]
        if forced and came:
            shared = min(len(came), len(forced))
            self._left = 0 if came[:shared] == forced[:shared] else self._left + 1
        if self._left == MAX_LEFT:
            self._place = None
        if self._place is not None and (self._task is None or self._task.done()):
            self._task = self._spawn(self._ask(self._place, sequence))

    async def awaited(self, sequence: Tokens) -> Tokens:
        """The same as `known`, after a moment's wait where an answer is not there yet."""
        if self._task is not None and self._late < MAX_LATE:
            done, _ = await asyncio.wait((self._task,), timeout=PATIENCE_S)
            self._late = 0 if done else self._late + 1
        return self.known(sequence)

    def known(self, sequence: Tokens) -> Tokens:
        """What must follow, if that was asked and the answer is there."""
        return self._found[1] if self._found[0] == sequence else ()

    async def _ask(self, place: ForcedTokens, sequence: Tokens) -> None:
        try:
            self._found = sequence, await place.after(sequence)
        except (SwarmError, MemoryError, OSError):  # a guess less; the tail will tell what matters
            self._place = None
