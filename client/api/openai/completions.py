"""`POST /v1/completions`: texts that go on without a template, whole and as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from client.api.backend import Delta, Finished, TextJob
from client.api.context import ApiContext, FullAnswer, ModelContext
from client.api.errors import invalid, unsupported
from client.api.json_text import JsonObject, JsonRoute
from client.api.openai.choices import ChoicesWriter
from client.api.openai.fields import (
    LEAST_LOG_PROB,
    SamplingRequest,
    TokenId,
    Whole,
    for_choice,
    token_limit,
)
from client.api.request_fields import BodyKind
from client.api.sse import sse
from client.base.stats import TokenLogProbs
from client.dialogue.messages import ContentDelta

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
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """The continuation of one text or several."""
        asked = await context.of(body.model)
        jobs = body.jobs()
        return await CompletionWriter(asked, body, jobs).respond(jobs, request)

    return router


def _echo(context: ModelContext, job: TextJob) -> str:
    if isinstance(job.prompt, str):
        return job.prompt
    return b"".join(map(context.backend.token_bytes, job.prompt)).decode(errors="replace")


class CompletionWriter(ChoicesWriter):
    kinds = ("text_completion", "text_completion")

    def __init__(self, context: ModelContext, request: CompletionRequest, jobs: Sequence[TextJob]) -> None:
        super().__init__(context, request, "cmpl")
        self._top_log_probs = request.logprobs
        self._echoes = [_echo(context, job) if request.echo else "" for job in jobs]
        self._offsets = [0] * len(jobs)

    def _begin(self, number: int) -> Iterator[bytes]:
        if echo := self._echoes[number]:
            yield self._chunk(number, echo)

    def _deltas(self, number: int, delta: Delta) -> Iterator[bytes]:
        text, offset = _text(delta), self._offsets[number]
        log_probs = self._log_probs(delta.log_probs, offset) if delta.log_probs else None
        self._offsets[number] += len(text)
        if text or log_probs is not None:
            yield self._chunk(number, text, log_probs=log_probs)

    def _end(self, number: int, end: Finished) -> bytes:
        return self._chunk(number, "", end.reason)

    def _choice(self, number: int, answer: FullAnswer) -> JsonObject:
        log_probs = self._log_probs(answer.log_probs, 0) if self._top_log_probs is not None else None
        return _choice(number, self._echoes[number] + answer.content, answer.end.reason, log_probs)

    def _chunk(self, number: int, text: str, reason: str | None = None, log_probs: JsonObject | None = None) -> bytes:
        return sse(self._chunk_of(_choice(number, text, reason, log_probs)))

    def _log_probs(self, log_probs: Sequence[TokenLogProbs], offset: int) -> JsonObject:
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
            "top_logprobs": top if self._top_log_probs else None,
            "text_offset": offsets,
        }


def _text(delta: Delta) -> str:
    return "".join(part.text for part in delta.parts if isinstance(part, ContentDelta))


def _choice(number: int, text: str, reason: str | None, log_probs: JsonObject | None) -> JsonObject:
    return {"index": number, "text": text, "logprobs": log_probs, "finish_reason": reason}
