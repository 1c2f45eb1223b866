"""A backend that plays what a test wrote: events, errors, waits. No swarm, no model; answers are the test's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from client.api.backend import AnswerEnd, AnswerEvent, ApiCaller, Begun, ChatJob, Delta, Finished, Job, ModelCard
from client.base.stats import Result, Stats, SweepMeasurement, TokenLogProbs
from client.dialogue.messages import AnswerDelta, ContentDelta

CARD = ModelCard(
    id="demo-model",
    created=1_760_000_000,
    context_length=2_048,
    fingerprint="0123456789abcdef" * 4,
    is_complete=True,
    missing=(),
    serve_line="",
    has_template=True,
    tool_family="hermes",
)


class Gate:
    """A step at which a run waits until any thread opens it."""

    def __init__(self) -> None:
        self._is_open = False
        self._is_reached = threading.Event()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        """Let every run pass, now and later."""
        self._is_open = True
        for loop, event in self._waiting:
            loop.call_soon_threadsafe(event.set)

    def wait_reached(self) -> bool:
        """Whether a run comes here within a while."""
        return self._is_reached.wait(10)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """That of the last run that came here."""
        return self._waiting[-1][0]

    async def passed(self) -> None:
        event = asyncio.Event()
        self._waiting.append((asyncio.get_running_loop(), event))
        self._is_reached.set()
        if not self._is_open:
            await event.wait()


Step = AnswerEvent | Exception | Gate
Script = Callable[[Job], Iterable[Step]]


@dataclass(slots=True)
class ScriptedBackend:
    """Plays `script` for every job, as every model of a server.

    Attributes:
        script: steps of a run, in order: events are handed out, errors raised, gates waited for.
        model: what `card` returns.
        others: cards of further models.
        asked: names that were asked for.
        tokens: what `count` returns; an error is raised.
        jobs: those that were run.
        callers: theirs.
        closed: how many runs ended, however they did.
        ended: notified with each.
    """

    script: Script
    model: ModelCard = CARD
    others: Sequence[ModelCard] = ()
    tokens: int | Exception = 7
    asked: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    callers: list[ApiCaller] = field(default_factory=list)
    closed: int = 0
    ended: threading.Condition = field(default_factory=threading.Condition)

    def wait_closed(self, runs: int) -> bool:
        """Whether so many runs end within a while."""
        with self.ended:
            return self.ended.wait_for(lambda: self.closed >= runs, 10)

    async def cards(self) -> list[ModelCard]:
        return [self.model, *self.others]

    async def backend(self, name: str) -> ScriptedBackend | None:
        self.asked.append(name)
        return self if name in ("", *(card.id for card in await self.cards())) else None

    async def card(self) -> ModelCard:
        return self.model

    def known_card(self) -> ModelCard:
        return self.model

    def count(self, job: Job) -> int:
        self.jobs.append(job)
        if isinstance(self.tokens, Exception):
            raise self.tokens
        return self.tokens

    def token_bytes(self, token: int) -> bytes:
        return f"t{token}".encode()

    async def run(self, job: Job, caller: ApiCaller) -> AsyncGenerator[AnswerEvent, None]:
        self.jobs.append(job)
        self.callers.append(caller)
        try:
            for step in self.script(job):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, Gate):
                    await step.passed()
                else:
                    yield step
        finally:
            with self.ended:
                self.closed += 1
                self.ended.notify_all()

    @property
    def last(self) -> ChatJob:
        """The last job, of a chat."""
        job = self.jobs[-1]
        assert isinstance(job, ChatJob)
        return job


def saying(*parts: str | AnswerDelta, **options: Any) -> Script:  # noqa: ANN401
    """The script of an answer; arguments as of `steps`."""
    return lambda job: steps(*parts, **options)


def steps(
    *parts: str | AnswerDelta,
    reason: AnswerEnd = "stop",
    stop_string: str = "",
    prompt_tokens: int = 7,
    log_probs: Sequence[TokenLogProbs] = (),
) -> list[AnswerEvent]:
    """The events of an answer: one delta, with one token, per part; a string is content.

    Args:
        parts: of the answer.
        reason: why it ends.
        stop_string: that ended it.
        prompt_tokens: of the prompt.
        log_probs: one per part.
    """
    deltas = [ContentDelta(part) if isinstance(part, str) else part for part in parts]
    events: list[AnswerEvent] = [Begun(prompt_tokens)]
    for place, delta in enumerate(deltas):
        events.append(Delta((delta,), (100 + place,), tuple(log_probs[place : place + 1])))
    text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    return [*events, finished(text, len(deltas), reason, stop_string, prompt_tokens)]


def finished(
    text: str, tokens: int, reason: AnswerEnd = "stop", stop_string: str = "", prompt_tokens: int = 7
) -> Finished:
    """The last event; of its prompt 3 tokens were kept, and one sweep brought 2 drafted tokens where there were 3."""
    end = {"stop": "stop" if stop_string else "eos", "length": "length", "tool_calls": "eos"}[reason]
    ids = tuple(range(100, 100 + tokens))
    result = Result(text, ids, end, stats(tokens, prompt_tokens), (), stop_string)  # type: ignore[arg-type]
    return Finished(reason, stop_string, result)


def stats(tokens: int, prompt_tokens: int) -> Stats:
    """Of an answer."""
    sweep = SweepMeasurement(
        nodes=4, emitted=min(tokens, 3), draft_ms=1.0, total_ms=9.0, first_link_ms=0.5, hops=(), depth=3
    )
    return Stats(
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        reused_tokens=3,
        prefill_sweeps=1,
        seed=11,
        reproducible=True,
        numeric_class="cpu-float32",
        time_to_first_token_s=0.1,
        total_s=0.5,
        sweeps=(sweep,),
        hops=("abcdefgh 0-4",),
    )
