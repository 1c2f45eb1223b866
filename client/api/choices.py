"""Several answers to one request: a few at a time, read as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import Request

from client.api.backend import AnswerEvent, ApiCaller, Begun, Job
from client.api.context import ApiContext, FullAnswer, StartedAnswer, while_there
from swarm.runtime.tasks import TaskScope

_AHEAD: Final = 64
"""Events that may wait for the reader before the runs pause."""
AT_ONCE: Final = 4
"""Answers to one request that run or wait for their turn at a time."""


@dataclass(frozen=True, slots=True)
class StartedAnswers:
    """Runs of which the first has begun: its prompt was taken.

    The others begin while events are read, so that none holds a place among those that run and waits for another.

    Attributes:
        context: to start them in.
        jobs: one per answer.
        caller: who asks.
        first: the first answer.
        prompt_tokens: of each answer that has begun.
    """

    context: ApiContext
    jobs: Sequence[Job]
    caller: ApiCaller
    first: StartedAnswer
    prompt_tokens: dict[int, int] = field(default_factory=dict)

    async def close(self) -> None:
        """End the first run; the others end with `events`."""
        await self.first.close()

    async def events(self) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
        """The runs' events as they come, each with the number of its run; read and closed in one task.

        Raises:
            SwarmError: the first error of any run.
        """
        self.prompt_tokens[0] = self.first.begun.prompt_tokens
        if len(self.jobs) == 1:
            async for event in self.first.events:
                yield 0, event
            return
        queue: asyncio.Queue[tuple[int, AnswerEvent | Exception | None]] = asyncio.Queue(_AHEAD)
        room = asyncio.Semaphore(AT_ONCE)
        async with TaskScope() as scope:
            for number in range(len(self.jobs)):
                scope.spawn(self._pump(number, queue, room), f"choice {number}")
            left = len(self.jobs)
            while left:
                number, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                elif isinstance(item, Begun):
                    self.prompt_tokens[number] = item.prompt_tokens
                else:
                    yield number, item

    async def _pump(
        self, number: int, queue: asyncio.Queue[tuple[int, AnswerEvent | Exception | None]], room: asyncio.Semaphore
    ) -> None:
        async with room:
            try:
                answer = self.first if number == 0 else await self.context.start(self.jobs[number], self.caller)
                async with aclosing(answer.events) as events:
                    await queue.put((number, answer.begun))
                    async for event in events:
                        await queue.put((number, event))
            except Exception as error:  # noqa: BLE001 - raised again where the reader is
                await queue.put((number, error))
            else:
                await queue.put((number, None))


async def begin_all(context: ApiContext, jobs: Sequence[Job], request: Request) -> StartedAnswers:
    """Start the first job and wait until its prompt was taken; errors as of `ApiContext.begin`."""
    return StartedAnswers(context, jobs, context.caller(request), await context.begin(jobs[0], request))


async def complete_all(context: ApiContext, jobs: Sequence[Job], request: Request) -> list[FullAnswer]:
    """Run every job to its end; errors as of `ApiContext.complete`."""
    answers = await begin_all(context, jobs, request)
    full = [FullAnswer(0) for _ in jobs]
    try:
        async with while_there(request), aclosing(answers.events()) as events:
            async for number, event in events:
                full[number].take(event)
    finally:
        await answers.close()
    for number, prompt_tokens in answers.prompt_tokens.items():
        full[number].prompt_tokens = prompt_tokens
    return full
