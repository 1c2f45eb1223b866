"""`POST /v1/completions`: texts that go on without a template, whole and as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from client.api.backend import Delta, Finished, ModelCard, TextJob
from client.api.context import ApiContext, FullAnswer, StartedAnswers, begin_all, complete_all
from client.api.errors import invalid, unsupported
from client.api.json_text import JsonRoute
from client.api.openai.chat import error_frame
from client.api.openai.fields import (
    LEAST_LOG_PROB,
    SamplingRequest,
    TokenId,
    Whole,
    fingerprint,
    for_choice,
    new_id,
    speed,
    token_limit,
    usage,
)
from client.api.request_fields import BodyKind
from client.api.sse import DONE, sse, sse_response
from client.dialogue.messages import ContentDelta
from client.stats import TokenLogProbs

MAX_PROMPTS: Final = 128
MAX_LOG_PROBS: Final = 5
MAX_ANSWERS: Final = 128
DEFAULT_TOKENS: Final = 16
"""`max_tokens` where none is given, as OpenAI has it."""
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`."""

    body = BodyKind.COMPLETIONS

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    best_of: Whole | None = None
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOG_PROBS)] | None = None

    def prompts(self) -> list[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [one for one in prompt if not isinstance(one, int)]

    def jobs(self) -> list[TextJob]:
        """What is asked for: the choices of the first prompt, then those of the next.

        Raises:
            ApiError: a field contradicts another one, or asks for what this server does not offer.
        """
        self.check()
        if self.best_of not in (None, self.choices):
            raise unsupported("best_of", "Use 'n'.")
        if self.echo and self.logprobs is not None:
            raise unsupported(
                "logprobs", "Log-probabilities of a prompt are not known; leave 'echo' or 'logprobs' out."
            )
        prompts = self.prompts()
        if len(prompts) * self.choices > MAX_ANSWERS:
            raise invalid(f"{len(prompts)} prompts with {self.choices} choices each exceed {MAX_ANSWERS}.", "n")
        limits = (self.max_tokens, self.n_predict, DEFAULT_TOKENS)
        options = self.generate_options(max_new_tokens=token_limit(*limits), log_probs=self.logprobs)
        return [TextJob(prompt, for_choice(options, choice)) for prompt in prompts for choice in range(self.choices)]


def routes(context: ApiContext) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """The continuation of one text or several."""
        card = await context.card(body.model)
        jobs = body.jobs()
        writer = CompletionWriter(context, body, card, new_id("cmpl"), int(context.settings.clock()))
        writer.echoes = [_echo(context, job) if body.echo else "" for job in jobs]
        if body.stream:
            answers = await begin_all(context, jobs, request)
            return sse_response(answers, writer.chunks(answers), error_frame, context.settings)
        return JSONResponse(writer.whole(await complete_all(context, jobs, request)))

    return router


def _echo(context: ApiContext, job: TextJob) -> str:
    if isinstance(job.prompt, str):
        return job.prompt
    return b"".join(map(context.backend.token_bytes, job.prompt)).decode(errors="replace")


@dataclass(slots=True)
class CompletionWriter:
    """Writes the answers to one request."""

    context: ApiContext
    request: CompletionRequest
    card: ModelCard
    id: str
    created: int
    echoes: list[str] = field(default_factory=list)

    def whole(self, answers: list[FullAnswer]) -> dict[str, Any]:
        ends = [answer.end for answer in answers]
        choices = []
        for number, answer in enumerate(answers):
            log_probs = self._log_probs(answer.log_probs, 0) if self.request.logprobs is not None else None
            text = self.echoes[number] + answer.content
            choices.append(_choice(number, text, answer.end.reason, log_probs))
        prompt_tokens = sum(answer.prompt_tokens for answer in answers[:: self.request.choices])
        body = {**self._head(), "choices": choices, "usage": usage(prompt_tokens, ends)}
        return {**body, "canopy": speed(ends[0].result)} if self.request.canopy is not None else body

    async def chunks(self, answers: StartedAnswers) -> AsyncGenerator[bytes, None]:
        for number, echo in enumerate(self.echoes):
            if echo:
                yield self._chunk(number, echo, None, None)
        ends: list[Finished] = []
        offsets = [0] * len(answers.jobs)
        async with aclosing(answers.events()) as events:
            async for number, event in events:
                if isinstance(event, Delta):
                    text = _text(event)
                    log_probs = self._log_probs(event.log_probs, offsets[number]) if event.log_probs else None
                    offsets[number] += len(text)
                    if text or log_probs is not None:
                        yield self._chunk(number, text, None, log_probs)
                elif isinstance(event, Finished):
                    ends.append(event)
                    yield self._chunk(number, "", event.reason, None)
        if self.request.wants_usage:
            prompt_tokens = sum(
                answers.prompt_tokens[number] for number in range(0, len(answers.jobs), self.request.choices)
            )
            yield sse({**self._head(), "choices": [], "usage": usage(prompt_tokens, ends)})
        yield DONE

    def _chunk(self, number: int, text: str, reason: str | None, log_probs: dict[str, Any] | None) -> bytes:
        usage_field = {"usage": None} if self.request.wants_usage else {}
        return sse({**self._head(), "choices": [_choice(number, text, reason, log_probs)], **usage_field})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.card.id,
            "system_fingerprint": fingerprint(self.card),
        }

    def _log_probs(self, log_probs: Sequence[TokenLogProbs], offset: int) -> dict[str, Any]:
        """`logprobs` of a choice; of tokens that write the same text the likelier one stands."""

        def text(token: int) -> str:
            return self.context.backend.token_bytes(token).decode(errors="replace")

        tokens = [text(entry.token) for entry in log_probs]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        top = [
            {text(token): max(log_prob, LEAST_LOG_PROB) for token, log_prob in reversed(entry.top)}
            for entry in log_probs
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [max(entry.log_prob, LEAST_LOG_PROB) for entry in log_probs],
            "top_logprobs": top if self.request.logprobs else None,
            "text_offset": offsets,
        }


def _text(delta: Delta) -> str:
    return "".join(part.text for part in delta.parts if isinstance(part, ContentDelta))


def _choice(number: int, text: str, reason: str | None, log_probs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": log_probs, "finish_reason": reason}
