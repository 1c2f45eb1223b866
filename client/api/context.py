"""What every dialect works with: the backend, the settings, who asks, and the start of an answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from starlette.requests import Request

from client.api.backend import AnswerEvent, ApiCaller, Backend, Begun, ChatJob, Delta, Finished, Job, ModelCard, Models
from client.api.errors import ApiError, invalid, server_leaves, unknown_model
from client.api.proofs import PATH as PROOFS
from client.api.proofs import SCOPE as PROOF
from client.api.proofs import ProofShelf, asked_proof
from client.api.request_fields import LeftOutLog
from client.base.stats import TokenLogProbs
from client.dialogue.messages import ContentDelta, ReasoningDelta, ToolCall, ToolCallDelta
from swarm.base.tasks import TaskScope

MAX_BODY_BYTES: Final = 8 * 2**20
REQUEST_ID: Final = "canopy.request_id"
"""Where the guard leaves the name of a request, in the scope."""
GONE: Final = 499
"""The status of a request whose client has gone; nobody sees it but the counters."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """How the API behaves towards those who call it.

    Attributes:
        keys: API keys of which a caller must show one; empty asks for none.
        hosts: names and addresses that a `Host` header may have, without the port; empty accepts any.
        aliases: further names of the first model.
        any_model: whether every name of no model is taken for it too.
        origins: web pages' origins, such as `https://chat.example.org`, that may call it; `*` accepts any.
        body_s: seconds in which a request's body has to come.
        keep_alive_s: seconds of silence after which a stream carries a comment.
        stalled_s: seconds that a reader may take nothing before it is cut, and that a run may wait for it in all.
        max_unread_bytes: what a run may be ahead of its reader.
        clock: seconds of the epoch.
        leaving: set when the server ends, so that what still runs is told.
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    any_model: bool = False
    origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    body_s: float = 60.0
    keep_alive_s: float = 10.0
    stalled_s: float = 30.0
    max_unread_bytes: int = 2**20
    clock: Callable[[], float] = time.time
    leaving: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class StartedAnswer:
    """A run whose prompt was taken.

    Attributes:
        events: the others; `close` it where they are not read to the end, and every hop is free.
    """

    begun: Begun
    events: AsyncGenerator[AnswerEvent, None]

    async def close(self) -> None:
        await self.events.aclose()


@dataclass(slots=True)
class FullAnswer:
    """An answer that was read to its end, put together."""

    prompt_tokens: int
    content: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    tool_calls: list[ToolCall] = field(default_factory=list)
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def end(self) -> Finished:
        assert self.finished is not None, "a run ends with Finished or an error"
        return self.finished

    def take(self, event: AnswerEvent) -> None:
        if isinstance(event, Begun):
            self.prompt_tokens = event.prompt_tokens
        elif isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, Delta):
            self.log_probs += event.log_probs
            self.reasoning_tokens += reasoning_tokens(event)
            for part in event.parts:
                match part:
                    case ContentDelta():
                        self.content += part.text
                    case ReasoningDelta():
                        self.reasoning += part.text
                    case ToolCallDelta():
                        self._take_call(part)

    def _take_call(self, part: ToolCallDelta) -> None:
        if part.index == len(self.tool_calls):
            self.tool_calls.append(ToolCall(part.id, part.name, part.arguments))
            return
        call = self.tool_calls[part.index]
        self.tool_calls[part.index] = ToolCall(call.id, call.name, call.arguments + part.arguments)


@dataclass(slots=True)
class RequestCounts:
    """Answers so far."""

    by_status: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, dialect: str, status: int) -> None:
        self.by_status[dialect, status] = self.by_status.get((dialect, status), 0) + 1


@dataclass(frozen=True, slots=True)
class ApiContext:
    """Given to every dialect's `routes`."""

    models: Models
    settings: ApiSettings
    requests: RequestCounts = field(default_factory=RequestCounts)
    left_out: LeftOutLog = field(default_factory=LeftOutLog)
    proofs: ProofShelf = field(default_factory=ProofShelf)

    def caller(self, request: Request) -> ApiCaller:
        """Who asks; `client.api.guard` has checked the key."""
        key = api_key(request)
        if self.settings.keys and key:
            return ApiCaller(hashlib.sha256(key.encode()).hexdigest()[:16])
        return ApiCaller(request.client.host if request.client is not None else "")

    async def of(self, model: str | None) -> ModelContext:
        """What a request works with that names this model; an empty name and an alias mean the first one.

        Raises:
            ApiError: there is no such model here (404).
            SwarmError: as `Models.backend`.
        """
        name = model or ""
        backend = await self.models.backend("" if name in self.settings.aliases else name)
        if backend is None and self.settings.any_model:
            name, backend = "", await self.models.backend("")
        if backend is None:
            raise unknown_model(name, [card.id for card in await self.models.cards()])
        card = backend.known_card()
        return ModelContext(self, backend, replace(card, id=name) if name else card)

    async def cards(self) -> list[ModelCard]:
        """Every model, and the first one by each of its names."""
        cards = [card for card in await self.models.cards() if card.id]
        return [*cards[:1], *(replace(cards[0], id=name) for name in self.settings.aliases if cards), *cards[1:]]

    async def card(self, name: str) -> ModelCard:
        """One of `cards`; the model is not opened for it.

        Raises:
            ApiError: there is no such model here (404).
        """
        cards = await self.cards()
        others = cards[:1] if self.settings.any_model else []
        found = [one for one in cards if one.id == name] or others
        if found:
            return found[0]
        raise unknown_model(name, [card.id for card in cards])


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What the answer to one request works with.

    Attributes:
        api: that of all models.
        card: the model's as last read, under the name that it was asked by.
    """

    api: ApiContext
    backend: Backend
    card: ModelCard

    @property
    def settings(self) -> ApiSettings:
        return self.api.settings

    async def begin(self, job: Job, request: Request) -> StartedAnswer:
        """Start a run and wait until its prompt was taken; errors until then become HTTP statuses.

        Raises:
            ApiError: the client has gone meanwhile.
            SwarmError: as `Backend.run`.
        """
        self.say_left_out(job, request)
        caller = self.api.caller(request)
        asked, name = asked_proof(request), request_id(request) or ""
        if asked == "none":
            events = self.backend.run(job, caller)
        else:
            request.scope[PROOF].append(PROOFS + name)
            proved = replace(job, options={**job.options, "proof": asked})
            events = self.api.proofs.watch(self.backend.run(proved, caller), name, caller)
        async with while_there(request):
            return await _started(events)

    def say_left_out(self, job: Job, request: Request) -> None:
        """Have the answer's header say what the job goes without."""
        if isinstance(job, ChatJob) and job.left_out:
            self.api.left_out.say(job.left_out, request.scope)

    async def start(self, job: Job, caller: ApiCaller) -> StartedAnswer:
        """The same for a caller that nobody watches."""
        return await _started(self.backend.run(job, caller))

    async def read(self, job: Job, request: Request, take: Callable[[AnswerEvent], None]) -> Finished:
        """Run to the end and hand every event to `take`; the value is the last one. Errors as in `begin`."""
        answer = await self.begin(replace(job, is_whole=True), request)
        take(answer.begun)
        end: Finished | None = None
        async with aclosing(answer.events) as events, while_there(request):
            async for event in events:
                take(event)
                end = event if isinstance(event, Finished) else None
        assert end is not None, "a run ends with Finished or an error"
        return end


async def _started(events: AsyncGenerator[AnswerEvent, None]) -> StartedAnswer:
    try:
        begun = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    assert isinstance(begun, Begun), "a run begins with Begun"
    return StartedAnswer(begun, events)


def reasoning_tokens(delta: Delta) -> int:
    is_thought = bool(delta.parts) and all(isinstance(part, ReasoningDelta) for part in delta.parts)
    return len(delta.tokens) if is_thought else 0


def api_key(request: Request) -> str:
    """The key that a request shows, in the header of OpenAI's clients or of Anthropic's; empty for none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def request_id(request: Request) -> str | None:
    """The name of a request, which its answer carries."""
    name: str | None = request.scope.get(REQUEST_ID)
    return name


def speaks_anthropic(request: Request) -> bool:
    """Whether a request is of a client of Anthropic's, which says so in a header."""
    return "anthropic-version" in request.headers


class _ClientGone(Exception):
    """The client closed its connection."""


@asynccontextmanager
async def while_there(request: Request) -> AsyncIterator[None]:
    """Cancel what is inside when the client goes away, or when the server ends.

    Raises:
        ApiError: which of them.
    """
    leaving: asyncio.Event = request.app.state.leaving

    async def leave() -> None:
        await leaving.wait()
        raise server_leaves()

    async def watch() -> None:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone

    try:
        async with TaskScope() as scope:
            scope.spawn(watch(), "client")
            scope.spawn(leave(), "server")
            yield
    except _ClientGone:
        raise ApiError(GONE, "the client has gone") from None


_AHEAD: Final = 64
"""Events that may wait for the reader before the runs pause."""
AT_ONCE: Final = 4
"""Answers to one request that run or wait for their turn at a time."""


@dataclass(frozen=True, slots=True)
class StartedAnswers:
    """Runs of which the first has begun: its prompt was taken.

    The others begin while events are read, so that none holds a place among those that run and waits for another.
    """

    context: ModelContext
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


async def begin_all(context: ModelContext, jobs: Sequence[Job], request: Request) -> StartedAnswers:
    """Start the first job and wait until its prompt was taken; errors as of `ApiContext.begin`."""
    if len(jobs) > 1 and asked_proof(request) != "none":
        raise invalid("A proof is of one answer: ask for it without 'n'.", "n")
    return StartedAnswers(context, jobs, context.api.caller(request), await context.begin(jobs[0], request))


async def complete_all(context: ModelContext, jobs: Sequence[Job], request: Request) -> list[FullAnswer]:
    """Run every job to its end; errors as of `ApiContext.complete`."""
    answers = await begin_all(context, [replace(job, is_whole=True) for job in jobs], request)
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
