"""`truncation: auto`: the oldest turns go until the prompt fits the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from client.api.backend import ChatJob, Job


def truncated(job: ChatJob, count: Callable[[Job], int], context_length: int) -> ChatJob:
    """The job without as few of the oldest turns as make its prompt leave room for an answer.

    System messages stay. A turn goes whole, from a message of the user to the next, so that no output of a tool stands
    without its call. The last turn always stays; where it alone does not fit, the job is too long and is refused when
    it runs.

    Args:
        job: that may be too long.
        count: tokens of a job's prompt; it is asked some times, as many as the number of turns has binary digits.
        context_length: tokens of prompt and answer together.
    """
    messages = list(job.messages)
    starts = [place for place, message in enumerate(messages) if message.role == "user"]
    if not starts or count(job) < context_length:
        return job

    def without(turns: int) -> ChatJob:
        since = starts[turns]
        kept = [message for place, message in enumerate(messages) if message.role == "system" or place >= since]
        return replace(job, messages=tuple(kept))

    turns = range(len(starts))
    fits = bisect_left(turns, True, key=lambda number: count(without(number)) < context_length)
    return without(min(fits, len(starts) - 1))
