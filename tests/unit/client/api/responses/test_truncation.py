"""`truncation: auto`: which turns go, and which stay."""

from __future__ import annotations

import pytest

from client.api.backend import ChatJob, Job
from client.api.responses.routes import truncated
from client.dialogue.messages import Message, ToolCall

CALL = ToolCall("c", "weather", "{}")
TALK = (
    Message("system", "First."),
    Message("user", "1"),
    Message("assistant", "", tool_calls=(CALL,)),
    Message("tool", "sun", tool_call_id="c"),
    Message("assistant", "2"),
    Message("user", "3"),
    Message("assistant", "4"),
    Message("user", "5"),
)


def count(job: Job) -> int:
    """Ten tokens for each message."""
    assert isinstance(job, ChatJob)
    return 10 * len(job.messages)


@pytest.mark.parametrize(
    ("context_length", "kept"),
    [(81, TALK), (80, (TALK[0], *TALK[5:])), (41, (TALK[0], *TALK[5:])), (40, (TALK[0], TALK[7]))],
)
def test_whole_turns_go_and_the_system_stays(context_length: int, kept: tuple[Message, ...]) -> None:
    assert truncated(ChatJob(TALK), count, context_length).messages == kept


def test_the_last_turn_stays_though_it_does_not_fit() -> None:
    assert truncated(ChatJob(TALK), count, 5).messages == (TALK[0], TALK[7])


def test_few_prompts_are_counted() -> None:
    asked = []

    def counted(job: Job) -> int:
        asked.append(job)
        return count(job)

    talk = [Message("user", "x") for _ in range(1_000)]
    assert len(truncated(ChatJob(talk), counted, 401).messages) == 40
    assert len(asked) <= 12
