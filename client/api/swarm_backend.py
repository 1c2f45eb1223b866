"""The backend over a swarm: queues requests, runs them in sessions that it keeps, and says what became certain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final

from client.api.backend import AnswerEnd, AnswerEvent, ApiCaller, Begun, ChatJob, Delta, Finished, Job, ModelCard
from client.api.queue import FairQueue, QueueLimits
from client.api.sessions import LentSession, SessionLimits, SessionPool
from client.api.swarm_link import ModelLink, Prepared, SwarmLink, SwarmSource
from client.base.stats import Result
from client.dialogue.messages import AnswerDelta, ToolCallDelta
from client.library.session import Piece
from swarm.base.errors import GenerationInterrupted, RouteError
from swarm.base.histogram import Histogram
from swarm.base.tasks import TaskScope, relay

logger = logging.getLogger(__name__)

LONG_PROMPT: Final = 4_096
"""Characters from which a prompt is read beside the event loop."""
AHEAD: Final = 32
"""Events that a run may be ahead of its reader, before the bounded bytes of a stream."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Bounds of the models that are open.

    Attributes:
        open: at a time.
        idle_s: after so long one is given up that nobody asked for.
    """

    open: int = 4
    idle_s: float = 600.0


@dataclass(frozen=True, slots=True)
class BackendLimits:
    queue: QueueLimits = field(default_factory=QueueLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    models: ModelLimits = field(default_factory=ModelLimits)


@dataclass(slots=True)
class RunCounts:
    """What runs came to."""

    finished: int = 0
    left: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    accepted_tokens: int = 0
    first_token: Histogram = field(default_factory=Histogram)

    def add(self, result: Result) -> None:
        stats = result.stats
        self.finished += 1
        self.prompt_tokens += stats.prompt_tokens
        self.reused_tokens += stats.reused_tokens
        self.tokens += stats.tokens
        self.first_token.add_ms(stats.time_to_first_token_s * 1e3)
        self.accepted_tokens += sum(sweep.accepted_tokens for sweep in stats.sweeps)


class SwarmBackend:
    """One model of one swarm."""

    def __init__(
        self,
        source: SwarmSource,
        scope: TaskScope,
        limits: BackendLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        queue: FairQueue | None = None,
    ) -> None:
        """Prepare.

        Args:
            source: where the model is.
            queue: in which the requests wait; None makes one of their own.
        """
        limits = limits or BackendLimits()
        self._scope = scope
        self._clock = clock
        self.link = SwarmLink(source, limits.sessions, clock)
        self.queue = queue or FairQueue(limits.queue, clock)
        self.counts = RunCounts()

    async def card(self) -> ModelCard:
        return await self.link.card()

    def known_card(self) -> ModelCard:
        return self.link.known_card()

    def count(self, job: Job) -> int:
        return self.link.model().reader.count(job)

    def token_bytes(self, token: int) -> bytes:
        return self.link.model().reader.token_bytes(token)

    async def run(self, job: Job, caller: ApiCaller) -> AsyncGenerator[AnswerEvent, None]:
        is_over = False
        try:
            async with aclosing(relay(self._scope, self._answer(job, caller), AHEAD)) as events:
                async for event in events:
                    is_over = isinstance(event, Finished)
                    yield event
        except RouteError as error:
            self.counts.failed += 1
            raise await self.link.explained(error) from error
        except Exception:
            self.counts.failed += 1
            raise
        except BaseException:
            self.counts.left += not is_over
            raise

    async def _answer(self, job: Job, caller: ApiCaller) -> AsyncGenerator[AnswerEvent, None]:
        model = await self.link.sought()
        prepared = await _prepare(model, job)
        async with self.queue.turn(caller.key), model.sessions.lend(prepared.state, caller.key) as (lent, coming):
            yield Begun(len(prepared.state.prompt))
            run = _AnswerRun(prepared, model.sessions, self._clock)
            async with aclosing(run.pieces(lent)) as pieces:
                async for piece in pieces:
                    coming.is_held.set()
                    if piece.result is None:
                        yield run.delta(piece)
                        continue
                    for event in run.end(piece, piece.result):
                        yield event
                    self.counts.add(piece.result)


async def _prepare(model: ModelLink, job: Job) -> Prepared:
    """Read a job: in a thread where it may take long, so that others go on meanwhile."""
    is_short = _size(job) < LONG_PROMPT and not (isinstance(job, ChatJob) and model.reader.template.has_template)
    prepared = model.reader.prepare(job) if is_short else await asyncio.to_thread(model.reader.prepare, job)
    prepared.state.is_held = job.is_whole
    await model.swarm.factory.check_grammar(prepared.state)
    return prepared


def _size(job: Job) -> int:
    if isinstance(job, ChatJob):
        return sum(len(message.content) for message in job.messages) + sum(len(str(tool)) for tool in job.tools)
    return len(job.prompt)


class _AnswerRun:
    """One generation over as many sessions as it takes: a longer text goes on in one with a larger window."""

    def __init__(self, prepared: Prepared, sessions: SessionPool, clock: Callable[[], float]) -> None:
        self._prepared = prepared
        self._sessions = sessions
        self._clock = clock
        self._most = prepared.state.max_new_tokens
        self._calls = False
        self._began = clock()
        self._first_token_s: float | None = None

    async def pieces(self, lent: LentSession) -> AsyncGenerator[Piece, None]:
        """What becomes certain; the last piece has the result of all of it.

        Raises:
            GenerationInterrupted: the chain broke midway.
        """
        state = self._prepared.state
        while True:
            state.max_new_tokens = min(self._most, lent.session.window_tokens - len(state.prompt))
            result = None
            try:
                async with aclosing(lent.session.run(state)) as pieces:
                    async for piece in pieces:
                        result = piece.result
                        if self._first_token_s is None and state.text.tokens:
                            self._first_token_s = self._clock() - self._began
                        whole = self._whole(result) if result is not None and state.text.stopped else None
                        yield replace(piece, result=whole)
            except GenerationInterrupted as error:
                if error.tokens or not lent.was_kept:
                    raise
                await self._again(lent, 0)  # the kept session has ended meanwhile
                continue
            if state.text.stopped:
                lent.sequence, lent.is_good = state.sequence, True
                return
            await self._again(lent, lent.session.window_tokens)

    def delta(self, piece: Piece) -> Delta:
        parts = self._prepared.parser.push(piece.text)
        return self._delta(piece, parts)

    def end(self, piece: Piece, result: Result) -> tuple[Delta, Finished]:
        parser = self._prepared.parser
        last = self._delta(piece, [*parser.push(piece.text), *parser.finish()])
        stop_string = result.stop_string if result.stop_string in self._prepared.stops else ""
        reason: AnswerEnd = "length" if result.finish_reason == "length" else "stop"
        if self._calls and reason == "stop":
            reason = "tool_calls"
        return last, Finished(reason, stop_string, result)

    def _delta(self, piece: Piece, parts: list[AnswerDelta]) -> Delta:
        self._calls = self._calls or any(isinstance(part, ToolCallDelta) for part in parts)
        ends = self._prepared.ends
        said = [place for place, token in enumerate(piece.tokens) if token not in ends]
        log_probs = tuple(piece.log_probs[place] for place in said) if piece.log_probs else ()
        return Delta(tuple(parts), tuple(piece.tokens[place] for place in said), log_probs, piece.sweeps)

    def _whole(self, result: Result) -> Result:
        """The result with times of all sessions together."""
        first_s = self._first_token_s or 0.0
        total_s = self._clock() - self._began
        reused = min(result.stats.reused_tokens, result.stats.prompt_tokens)
        stats = replace(result.stats, time_to_first_token_s=first_s, total_s=total_s, reused_tokens=reused)
        return replace(result, stats=stats)

    async def _again(self, lent: LentSession, larger_than: int) -> None:
        """Put a new session in the place of one that ended or is full; it begins with what a full one holds."""
        self._prepared.state.max_new_tokens = self._most  # the last one may have had room for a single token
        fresh = await self._sessions.renew(lent, self._prepared.state, larger_than, self._most)
        lent.held, lent.session, lent.nodes, lent.was_kept = fresh.held, fresh.session, fresh.nodes, False
