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

from client.api import anthropic, ollama, site
from client.api.backend import Models
from client.api.context import ApiContext, ApiSettings
from client.api.errors import ApiError, as_api_error, invalid
from client.api.guard import OF_DESKTOP, ApiGuard, refusal
from client.api.openai import chat, completions, models
from client.api.proofs import HEADER as PROOF
from client.api.proofs import routes as proof_routes
from client.api.request_fields import HEADER as LEFT_OUT
from client.api.responses import routes as responses
from swarm.base.errors import SwarmError
from swarm.base.version import VERSION

Routes = Callable[[ApiContext], APIRouter]
DIALECTS: Final[Sequence[Routes]] = (
    site.health_routes,
    site.reference_routes,
    lambda context: proof_routes(context.proofs, context.caller),
    models.routes,
    chat.routes,
    completions.routes,
    responses.routes,
    anthropic.routes,
    ollama.routes,
    site.page_routes,
)
"""Every module's routes. The page comes last, since it answers at `/`."""

_ARMS: Final = frozenset({"str", "int", "float", "bool", "dict", "none"})
_KINDS: Final = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""What pydantic's errors of kind want."""
_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


def build_app(models: Models, settings: ApiSettings | None = None, more: Sequence[Routes] = ()) -> FastAPI:
    """All routes.

    Args:
        models: of the swarm.
        settings: how it behaves towards callers.
    """
    settings = settings or ApiSettings()
    context = ApiContext(models, settings)
    app = FastAPI(
        title="Canopy",
        version=VERSION,
        description="A swarm's models, in the dialects that clients speak.",
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
        expose_headers=[LEFT_OUT, PROOF],
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
    problem, reason = _broken_rule(problems)
    place = _place(problem)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".") or None
    missing = problem["type"] == "missing"
    named = f"'{param}'" if param else "body"
    message = f"Missing required parameter: {named}." if missing else f"Invalid value for {named}: {reason}."
    return invalid(message, param, "missing_required_parameter" if missing else "invalid_value")


def _broken_rule(problems: Sequence[Any]) -> tuple[Any, str]:
    """The problem that tells most, and its words.

    Where a field has alternatives, each has told why it does not take the value: one that took its kind and found a
    rule broken tells more than one that wants another kind.
    """
    first = problems[0]
    arm = next((at for at, part in enumerate(first["loc"]) if at and _is_union_arm(part)), None)
    field = first["loc"] if arm is None else first["loc"][:arm]
    same = [one for one in problems if one["loc"][: len(field)] == field] if arm is not None else [first]
    best = max(same, key=lambda one: (_wanted(one) is None, len(_place(one))))
    if _wanted(best) is None:
        return best, best["msg"].removeprefix("Value error, ").replace(" after validation", "")
    level = [one for one in same if len(_place(one)) == len(_place(best))]
    wanted = dict.fromkeys(filter(None, map(_wanted, level)))
    return best, f"expected {' or '.join(wanted)}, got {_kind(best.get('input'))}"


def _wanted(problem: Any) -> str | None:  # noqa: ANN401 - pydantic's
    """What kind of value was wanted; None where the kind was right."""
    if problem["type"] == "literal_error":
        return str(problem["ctx"]["expected"])
    return _KINDS.get(problem["type"])


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _place(problem: Any) -> list[str | int]:  # noqa: ANN401 - pydantic's
    return [part for part in problem["loc"][1:] if not _is_union_arm(part)]


def _is_union_arm(part: object) -> bool:
    """Whether pydantic names one of a field's alternatives here, and no field."""
    return isinstance(part, str) and (part in _ARMS or part[:1].isupper() or not part.isidentifier())
