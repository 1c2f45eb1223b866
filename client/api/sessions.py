"""Sessions that are kept between requests, so that a prompt which begins like an earlier one does not travel again.

A session is one sequence. Of the idle ones of its own key a request takes that whose sequence has most in common with
its prompt. Else a new one is opened, which begins with the tokens that any session of the key has in common with the
prompt (P15), one that computes them just now included: of many requests with one opening the first computes it.

A key that got another key's session would learn from `cached_tokens`, and from the time to the first token, what the
other one wrote. Kept sessions hold memory of the swarm's nodes: they are few, and none is kept idle for long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from client.decode.state import GenerationState
from client.library.session import Beginning, Session, SessionOpener
from swarm.base.errors import Busy
from swarm.base.tasks import HeldContext, TaskScope

logger = logging.getLogger(__name__)

FIRST_WINDOW_TOKENS: Final = 2_048
"""Window that a session reserves at first."""
MIN_SHARED_TOKENS: Final = 32
"""Tokens that a prompt and a session must have in common at least, for the session to be worth more than another."""
OPENING_S: Final = 120.0
"""How long a request waits for another one that computes the opening of both."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of what is kept.

    Attributes:
        idle_s: how long one is kept.
        share: whether a key's request may take a session of another key.
    """

    kept: int = 8
    idle_s: float = 60.0
    share: bool = False


@dataclass(slots=True)
class LentSession:
    """An open session and what it holds.

    Attributes:
        nodes: tree nodes of a sweep that it was opened for.
        owner: key whose request opened it.
        sequence: token ids that its machines hold.
        was_kept: whether an earlier request opened it.
        is_good: whether it may be kept; whoever uses it says so at the end.
        is_proved: whether it holds one text alone, which is to be proved.
    """

    held: HeldContext[Session]
    session: Session
    nodes: int
    owner: str
    sequence: tuple[int, ...] = ()
    was_kept: bool = False
    is_good: bool = False
    is_proved: bool = False
    idle_since: float = field(default=0.0)

    def fits(self, prompt_tokens: int, nodes: int) -> bool:
        """Whether a prompt and at least one token have room, with trees of this size."""
        return prompt_tokens < self.session.window_tokens and nodes <= self.nodes


@dataclass(frozen=True, slots=True)
class ComingPrompt:
    """A prompt that machines compute just now.

    Attributes:
        is_held: set once the machines hold it, or never will.
    """

    owner: str
    tokens: Sequence[int]
    is_held: asyncio.Event = field(default_factory=asyncio.Event)


class SessionPool:
    """Opens sessions, lends them and keeps some.

    Attributes:
        opener: of sessions of one model.
        reused: how often a kept one was lent.
        opened: how often a new one was opened.
        begun: how often it began with tokens that machines held.
    """

    def __init__(
        self,
        opener: SessionOpener,
        scope: TaskScope,
        limits: SessionLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.opener = opener
        self._scope = scope
        self._limits = limits
        self._clock = clock
        self._idle: list[LentSession] = []
        self._lent: list[LentSession] = []
        self._coming: list[ComingPrompt] = []
        self.reused = 0
        self.opened = 0
        self.begun = 0
        scope.spawn(self._forget_old(), "kept sessions")

    @property
    def idle(self) -> int:
        return len(self._idle)

    @asynccontextmanager
    async def lend(self, state: GenerationState, owner: str) -> AsyncIterator[tuple[LentSession, ComingPrompt]]:
        """A session for a generation: a kept one that shares its prompt's beginning, else a new one.

        A text that is to be proved gets one of its own. Any other is kept afterwards where `is_good` was set, else
        closed. With the first token `is_held` is to be set, so that requests with the same opening go on.

        Raises:
            RouteError: nobody serves some layers.
            HopError: no machine takes the session.
        """
        lent = None if state.is_proved else self._shared(state, owner)
        if lent is None and not state.is_proved:
            await self._wait_for_opening(state, owner)
        coming = ComingPrompt(owner, state.prompt)
        self._coming.append(coming)
        try:
            lent = lent or await self.open(state, owner, 0, state.max_new_tokens)
            self._lent.append(lent)
            try:
                yield lent, coming
            finally:
                self._lent.remove(lent)
                await self._take_back(lent)
        finally:
            self._coming.remove(coming)
            coming.is_held.set()

    async def open(self, state: GenerationState, owner: str, larger_than: int, max_new_tokens: int) -> LentSession:
        """A new session with room for the sequence so far and half as much again, up to the model's context.

        The next turn of a conversation goes on in it, so the window is not cut to what this request may come to. Where
        machines have no room for that, it is.

        Args:
            larger_than: tokens of the window that was too small; 0 for none.
            max_new_tokens: that may come after the prompt in all.
        """
        window, most = self._windows(state, larger_than, max_new_tokens)
        try:
            return await self._open(window, state, owner)
        except Busy:
            if not self._idle and most >= window:
                raise
        await self.clear()  # what is kept takes the room that is needed
        try:
            return await self._open(window, state, owner)
        except Busy:
            if most >= window:
                raise
        return await self._open(most, state, owner)

    async def clear(self) -> None:
        idle, self._idle = self._idle, []
        for lent in idle:
            await lent.held.close()

    async def renew(
        self, lent: LentSession, state: GenerationState, larger_than: int, max_new_tokens: int
    ) -> LentSession:
        """A session in the place of one that was lent and ended, or is full: then it begins with what that holds.

        Args:
            larger_than: tokens of the window that was too small; 0 where the session has ended.
            max_new_tokens: as of `open`.
        """
        await lent.held.close()
        return await self.open(state, lent.owner, larger_than, max_new_tokens)

    def _windows(self, state: GenerationState, larger_than: int, max_new_tokens: int) -> tuple[int, int]:
        """The window of a new session, and the least that will do."""
        limit = self.opener.target.max_positions
        most = len(state.prompt) + max_new_tokens
        window = most if state.is_proved else FIRST_WINDOW_TOKENS  # one session proves one text
        while window < len(state.sequence) * 3 // 2 or window <= larger_than:
            window *= 2
        return (window, most) if limit is None else (min(window, limit), min(most, limit))

    async def _wait_for_opening(self, state: GenerationState, owner: str) -> None:
        """Wait while other requests of this owner compute more of the prompt's beginning than any session holds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(OPENING_S):
                while True:
                    held = max((len(tokens) for _, tokens in self._held(state, owner)), default=0)
                    coming = [
                        (shared, one)
                        for one in self._coming
                        if (self._limits.share or one.owner == owner) and not one.is_held.is_set()
                        if (shared := common_prefix(one.tokens, state.prompt)) >= held + MIN_SHARED_TOKENS
                    ]
                    if not coming:
                        return
                    await max(coming, key=lambda pair: pair[0])[1].is_held.wait()

    def _held(self, state: GenerationState, owner: str) -> list[tuple[LentSession, tuple[int, ...]]]:
        """Sessions of this owner, each with the tokens of the sequence that all its machines hold for certain."""
        sequence = state.sequence
        return [
            (lent, tuple(sequence[: min(common_prefix(lent.session.held, sequence), len(sequence) - 1)]))
            for lent in (*self._idle, *self._lent)
            if self._limits.share or lent.owner == owner
        ]

    async def _open(self, window_tokens: int, state: GenerationState, owner: str) -> LentSession:
        held: HeldContext[Session] = HeldContext(self._scope)
        beginning = Beginning(state.sequence, state.max_new_tokens, self._secret(owner), state.is_proved)
        session = await held.open(self.opener.open(window_tokens, state.nodes, beginning))
        self.opened += 1
        self.begun += bool(session.held)
        return LentSession(held, session, state.nodes, owner, is_proved=state.is_proved)

    def _secret(self, owner: str) -> bytes:
        """Of all who may use what others of them had computed: a key's own, or everyone's here."""
        return blake2b(b"" if self._limits.share else owner.encode(), key=self.opener.secret).digest()

    def _shared(self, state: GenerationState, owner: str) -> LentSession | None:
        """The kept session of this owner whose sequence has most in common with the prompt.

        One that would lose most of its sequence is left to the conversation that it belongs to, while others may still
        be kept.
        """
        fitting = [
            (common_prefix(lent.sequence, state.prompt), lent)
            for lent in self._idle
            if (self._limits.share or lent.owner == owner) and lent.fits(len(state.prompt), state.nodes)
        ]
        shared, best = max(fitting, key=lambda pair: pair[0], default=(0, None))
        if best is None:
            return None
        is_full = len(self._idle) >= self._limits.kept
        is_own = shared >= MIN_SHARED_TOKENS and 2 * shared >= len(best.sequence)
        if not is_own and not is_full:
            return None
        if not is_own and shared < MIN_SHARED_TOKENS:
            wanted = min(len(state.prompt) + state.max_new_tokens, FIRST_WINDOW_TOKENS)
            roomy = [lent for _, lent in fitting if lent.session.window_tokens >= wanted]
            best = min(roomy, key=lambda lent: lent.idle_since, default=None)
            if best is None:
                return None  # one that is soon full would be worth less than a new one
        self._idle.remove(best)
        best.was_kept, best.is_good = True, False
        self.reused += 1
        return best

    async def _take_back(self, lent: LentSession) -> None:
        if not lent.is_good or lent.is_proved or self._limits.kept == 0:
            await lent.held.close()
            return
        lent.idle_since = self._clock()
        self._idle.append(lent)
        if len(self._idle) > self._limits.kept:
            await self._idle.pop(0).held.close()

    async def _forget_old(self) -> None:
        while True:
            await asyncio.sleep(max(self._limits.idle_s / 4, 0.05))
            now = self._clock()
            while self._idle and now - self._idle[0].idle_since >= self._limits.idle_s:
                await self._idle.pop(0).held.close()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from their beginning."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, high = 0, length  # the first `low` are the same, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle)
    return low
