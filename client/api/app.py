"""The API as an ASGI application: every dialect's routes, one guard, and errors in the form of the dialect.

A dialect is a module with `routes(context)`; `DIALECTS` is the register.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from client.api import chat_page, health, reference
from client.api.anthropic import routes as anthropic
from client.api.backend import Backend
from client.api.context import ApiContext, ApiSettings
from client.api.errors import ApiError, as_api_error, invalid
from client.api.guard import OF_DESKTOP, ApiGuard, refusal
from client.api.ollama import routes as ollama
from client.api.openai import chat_completions, completions, models
from client.api.request_fields import LEFT_OUT
from client.api.responses import routes as responses
from swarm.errors import SwarmError
from swarm.runtime.version import VERSION

Routes = Callable[[ApiContext], APIRouter]
DIALECTS: Final[Sequence[Routes]] = (
    health.routes,
    reference.routes,
    models.routes,
    chat_completions.routes,
    completions.routes,
    responses.routes,
    anthropic.routes,
    ollama.routes,
    chat_page.routes,
)
"""Every module's routes. The page comes last, since it answers at `/`."""

_ARMS: Final = frozenset({"str", "int", "float", "bool", "dict", "none"})
_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


def build_app(backend: Backend, settings: ApiSettings | None = None, more: Sequence[Routes] = ()) -> FastAPI:
    """All routes.

    Args:
        backend: the model of the swarm.
        settings: how it behaves towards callers.
        more: routes beside the dialects'.
    """
    settings = settings or ApiSettings()
    context = ApiContext(backend, settings)
    app = FastAPI(
        title="Canopy",
        version=VERSION,
        description="A swarm's model, in the dialects that clients speak.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.leaving = settings.leaving
    for routes in (*more, *DIALECTS):
        app.include_router(routes(context))
    for kind in (ApiError, SwarmError):
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(ApiGuard, settings=settings, requests=context.requests)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.origins,
        allow_origin_regex=OF_DESKTOP,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[LEFT_OUT],
    )
    return app


async def _known(request: Request, error: Exception) -> JSONResponse:
    return refusal(request, as_api_error(error))


async def _not_valid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return refusal(request, from_validation(error.errors()))


async def _of_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ApiError):  # FastAPI wraps what befalls it while it reads a body
        return refusal(request, error.__cause__)
    message = f"{request.method} {request.scope['path'][:200]}: {error.detail}"
    return refusal(request, ApiError(error.status_code, message, code=_CODES.get(error.status_code)))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """What nobody expected; the server logs it, and closes the connection, on which nobody must ask again meanwhile."""
    response = refusal(request, as_api_error(error))
    response.headers["Connection"] = "close"
    return response


def from_validation(problems: Sequence[Any]) -> ApiError:
    """The first problem of a body as OpenAI words it: what is wrong, and with which field."""
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return invalid(f"We could not parse the JSON body of your request: {reason}", code="invalid_json")
    place = [part for part in first["loc"][1:] if not _is_union_arm(part)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".") or None
    missing = first["type"] == "missing"
    named = f"'{param}'" if param else "body"
    message = f"Missing required parameter: {named}." if missing else f"Invalid value for {named}: {first['msg']}."
    return invalid(message, param, "missing_required_parameter" if missing else "invalid_value")


def _is_union_arm(part: object) -> bool:
    """Whether pydantic names one of a field's alternatives here, and no field."""
    return isinstance(part, str) and (part in _ARMS or part[:1].isupper() or not part.isidentifier())
