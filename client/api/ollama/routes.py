"""Routes of Ollama's API."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from client.api.backend import Delta, Event, Finished, Job, ModelCard
from client.api.context import Answer, ApiContext
from client.api.errors import ApiError, error_body
from client.api.ollama.models import OLLAMA_VERSION, listed, running, shown, untagged
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
    router = APIRouter(tags=["Ollama"])

    @router.post("/api/chat", response_model=None, summary="Chat")
    async def chat(body: ChatRunRequest, request: Request) -> Response:
        card = await _card(context, body.model)
        writer = RunWriter("chat", body.model, context.settings.clock, context.backend.token_bytes)
        if not body.messages:
            return JSONResponse(writer.nothing(_nothing_done(body)))
        return await _answer(context, chat_job(body), body, writer, request)

    @router.post("/api/generate", response_model=None, summary="Generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        card = await _card(context, body.model)
        writer = RunWriter("generate", body.model, context.settings.clock, context.backend.token_bytes)
        job = generate_job(body, card)
        if not body.prompt:
            return JSONResponse(writer.nothing(_nothing_done(body)))
        return await _answer(context, job, body, writer, request)

    @router.get("/api/tags", response_model=None, summary="Models")
    async def tags() -> Response:
        return JSONResponse({"models": [listed(await context.backend.card())]})

    @router.get("/api/ps", response_model=None, summary="Running models")
    async def ps() -> Response:
        card = await context.backend.card()
        models = [running(card, context.settings.clock())] if card.is_complete else []
        return JSONResponse({"models": models})

    @router.post("/api/show", response_model=None, summary="The model")
    async def show(body: ShowRequest) -> Response:
        return JSONResponse(shown(await _card(context, body.model or body.name or "")))

    @router.get("/api/version", response_model=None, summary="Version")
    async def version() -> Response:
        return JSONResponse({"version": OLLAMA_VERSION})

    async def refuse(request: Request) -> Response:
        raise ApiError(501, REFUSED[request.url.path])

    for path in REFUSED:
        router.add_api_route(path, refuse, methods=["POST", "DELETE"], include_in_schema=False)
    return router


async def _card(context: ApiContext, name: str) -> ModelCard:
    card = await context.backend.card()
    if untagged(name, card) != card.id:
        raise ApiError(404, f"model '{name[:200]}' not found")
    return card


def _nothing_done(body: RunRequest) -> str:
    return "unload" if body.keep_alive in (0, "0", "0s") else "load"


async def _answer(context: ApiContext, job: Job, body: RunRequest, writer: RunWriter, request: Request) -> Response:
    if body.is_streamed:
        answer = await context.begin(job, request)
        return json_lines_response(answer, _frames(writer, answer), _error_frame, context.settings)
    end = await context.read(job, request, lambda event: _take(writer, event))
    _ = list(writer.finish(end))
    return JSONResponse(writer.whole(end))


async def _frames(writer: RunWriter, answer: Answer) -> Frames:
    async for part in answer.events:
        if isinstance(part, Delta):
            for line in writer.take(part):
                yield json_line(line)
        elif isinstance(part, Finished):
            for line in writer.finish(part):
                yield json_line(line)


def _take(writer: RunWriter, event: Event) -> None:
    if isinstance(event, Delta):
        _ = list(writer.take(event))


def _error_frame(error: ApiError) -> bytes:
    return json_line(error_body("ollama", error))
