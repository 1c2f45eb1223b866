"""Routes of Ollama's API."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from client.api.backend import AnswerEvent, Delta, Finished, Job, ModelCard
from client.api.context import ApiContext, StartedAnswer
from client.api.errors import ApiError, error_body
from client.api.json_text import JsonRoute
from client.api.ollama.models import OLLAMA_VERSION, listed, running, shown, tagged
from client.api.ollama.request import ChatRunRequest, GenerateRequest, RunRequest, chat_job, generate_job
from client.api.ollama.writer import RunWriter
from client.api.openai.fields import ApiModel
from client.api.sse import Frames, json_line, json_lines_response

REFUSED: Final = {
    "/api/embed": "embeddings are not served",
    "/api/embeddings": "embeddings are not served",
    "/api/create": "models are not made here: the swarm serves one",
    "/api/copy": "models are not copied here: the swarm serves one",
    "/api/pull": "models are not pulled here: the swarm serves one",
    "/api/push": "models are not pushed from here: the swarm serves one",
    "/api/delete": "models are not deleted here: the swarm serves one",
}
"""Paths of Ollama's that change or embed, and why they are refused."""


class ShowRequest(ApiModel):
    """Of `/api/show`; older clients say `name`."""

    model: str | None = None
    name: str | None = None


def routes(context: ApiContext) -> APIRouter:
    """All routes."""
    router = APIRouter(tags=["Ollama"], route_class=JsonRoute)
    service = _Ollama(context)
    router.post("/api/chat", response_model=None, summary="Chat")(service.chat)
    router.post("/api/generate", response_model=None, summary="Generate")(service.generate)
    router.get("/api/tags", response_model=None, summary="Models")(service.tags)
    router.get("/api/ps", response_model=None, summary="Running models")(service.ps)
    router.post("/api/show", response_model=None, summary="The model")(service.show)
    router.get("/api/version", response_model=None, summary="Version")(_version)
    for path in REFUSED:
        router.add_api_route(path, _refuse, methods=["POST", "DELETE"], include_in_schema=False)
    return router


class _Ollama:
    """What the routes share."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def chat(self, body: ChatRunRequest, request: Request) -> Response:
        """Answer a conversation; without messages, say that the model is there."""
        self._card(body.model)
        writer = self._writer("chat", body)
        if not body.messages:
            return JSONResponse(writer.nothing(_nothing_done(body)))
        return await self._answer(chat_job(body), body, writer, request)

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt or go on with a text; without a prompt, say that the model is there."""
        job = generate_job(body, self._card(body.model))
        writer = self._writer("generate", body)
        if not body.prompt:
            return JSONResponse(writer.nothing(_nothing_done(body)))
        return await self._answer(job, body, writer, request)

    async def tags(self) -> Response:
        """The swarm's model, by each of its names."""
        card = await self._context.backend.card()
        return JSONResponse({"models": [listed(replace(card, id=name)) for name in self._context.names(card)]})

    async def ps(self) -> Response:
        """The model, if every layer is served."""
        card = await self._context.backend.card()
        models = [running(card, self._context.settings.clock())] if card.is_complete else []
        return JSONResponse({"models": models})

    async def show(self, body: ShowRequest) -> Response:
        """What is known of the model."""
        return JSONResponse(shown(self._card(body.model or body.name or "")))

    def _card(self, name: str) -> ModelCard:
        card = self._context.backend.known_card()
        known = {named for one in self._context.names(card) for named in (one, tagged(one))}
        if name not in known and not self._context.settings.any_model:
            raise ApiError(404, f"model '{name[:200]}' not found")
        return card

    def _writer(self, kind: Literal["chat", "generate"], body: RunRequest) -> RunWriter:
        return RunWriter(kind, body.model, self._context.settings.clock, self._context.backend.token_bytes)

    async def _answer(self, job: Job, body: RunRequest, writer: RunWriter, request: Request) -> Response:
        if body.is_streamed:
            answer = await self._context.begin(job, request)
            return json_lines_response(answer, _frames(writer, answer), _error_frame, self._context.settings)
        end = await self._context.read(job, request, lambda event: _take(writer, event))
        _ = list(writer.finish(end))
        return JSONResponse(writer.whole(end))


async def _version() -> Response:
    """The release of Ollama whose API this is."""
    return JSONResponse({"version": OLLAMA_VERSION})


async def _refuse(request: Request) -> Response:
    raise ApiError(501, REFUSED[request.scope["path"]])


def _nothing_done(body: RunRequest) -> str:
    return "unload" if body.keep_alive in (0, "0", "0s") else "load"


async def _frames(writer: RunWriter, answer: StartedAnswer) -> Frames:
    async for part in answer.events:
        if isinstance(part, Delta):
            for line in writer.take(part):
                yield json_line(line)
        elif isinstance(part, Finished):
            for line in writer.finish(part):
                yield json_line(line)


def _take(writer: RunWriter, event: AnswerEvent) -> None:
    if isinstance(event, Delta):
        _ = list(writer.take(event))


def _error_frame(error: ApiError) -> bytes:
    return json_line(error_body("ollama", error))
