"""Several answers to one request: started together, read as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request

from client.api.backend import AnswerEvent, Job
from client.api.context import ApiContext, FullAnswer, StartedAnswer, while_there
from swarm.runtime.tasks import TaskScope

_AHEAD = 64
"""Events that may wait for the reader before the runs pause."""


@dataclass(frozen=True, slots=True)
class StartedAnswers:
    """Runs whose prompts were taken.

    Attributes:
        each: in the order of the jobs.
    """

    each: Sequence[StartedAnswer]

    async def close(self) -> None:
        """End every run."""
        for answer in self.each:
            await answer.close()

    async def events(self) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
        """The runs' events as they come, each with the number of its run; read and closed in one task.

        Raises:
            SwarmError: the first error of any run.
        """
        if len(self.each) == 1:
            async for event in self.each[0].events:
                yield 0, event
            return
        queue: asyncio.Queue[tuple[int, AnswerEvent | Exception | None]] = asyncio.Queue(_AHEAD)
        async with TaskScope() as scope:
            for number, answer in enumerate(self.each):
                scope.spawn(_pump(number, answer, queue), f"choice {number}")
            left = len(self.each)
            while left:
                number, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield number, item


async def _pump(
    number: int, answer: StartedAnswer, queue: asyncio.Queue[tuple[int, AnswerEvent | Exception | None]]
) -> None:
    try:
        async for event in answer.events:
            await queue.put((number, event))
    except Exception as error:  # noqa: BLE001 - raised again where the reader is
        await queue.put((number, error))
    else:
        await queue.put((number, None))


async def begin_all(context: ApiContext, jobs: Sequence[Job], request: Request) -> StartedAnswers:
    """Start every job and wait until each prompt was taken; errors as of `ApiContext.begin`, after which none runs."""
    context.say_left_out(jobs[0], request)
    caller = context.caller(request)
    started: dict[int, StartedAnswer] = {}

    async def begin(number: int) -> None:
        started[number] = await context.start(jobs[number], caller)

    try:
        async with while_there(request), TaskScope() as scope:
            await asyncio.wait([scope.spawn(begin(number), f"choice {number}") for number in range(len(jobs))])
    except BaseException:
        await StartedAnswers(list(started.values())).close()
        raise
    return StartedAnswers([started[number] for number in range(len(jobs))])


async def complete_all(context: ApiContext, jobs: Sequence[Job], request: Request) -> list[FullAnswer]:
    """Run every job to its end; errors as of `ApiContext.complete`."""
    answers = await begin_all(context, jobs, request)
    full = [FullAnswer(answer.begun.prompt_tokens) for answer in answers.each]
    try:
        async with while_there(request), aclosing(answers.events()) as events:
            async for number, event in events:
                full[number].take(event)
    finally:
        await answers.close()
    return full
