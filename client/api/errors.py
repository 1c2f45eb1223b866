"""What goes wrong with a request, as HTTP statuses and as bodies in the form of the dialect that was spoken.

A dialect raises `ApiError`, or lets the library's errors through; `as_api_error` gives each its status and code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from client.api.queue import QueueFull
from swarm.base.errors import (
    Busy,
    ConfigError,
    ContextFull,
    GenerationInterrupted,
    RouteError,
    SwarmError,
    UnknownModel,
)
from swarm.base.plain_text import plain_line

ErrorForm = Literal["openai", "anthropic", "ollama"]
"""Whose error bodies a route writes."""

RETRY_S: Final = 5
"""What `Retry-After` says where nothing better is known."""
ROUTE_RETRY_S: Final = 30
"""What it says while layers are missing: a machine needs about so long to load some."""
NOT_FOUND: Final = "model_not_found"
"""OpenAI's code for a model that does not exist."""
MODELS_NAMED: Final = 8
"""Models that a message names, at most."""
MAX_MESSAGE: Final = 2_000
"""Characters of a message, at most; a model's template may say anything."""

_OPENAI_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class PromptTooLong(ContextFull):
    """A prompt that alone exceeds the context."""

    def __init__(self, message: str, prompt_tokens: int, limit_tokens: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        message: one line for the user.
        code: what went wrong, in OpenAI's words, such as `model_not_found`; None where there is no word.
        param: the field of the request that is at fault; None for none.
        retry_after_s: whole seconds until it is worth asking again; None where asking again does not help.
        anthropic_message: what Anthropic's clients are told instead, where they look for certain words.
        details: more fields of the body, as JSON values; clients that do not know them pass over them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = plain_line(message[:MAX_MESSAGE])
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.details: dict[str, Any] = {}
        self.anthropic_message = self.message

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return {**headers, "www-authenticate": "Bearer"} if self.status == 401 else headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be right, whoever sends it again (400)."""
    return ApiError(400, message, code=code, param=param)


def missing(param: str) -> ApiError:
    """A field that the request must have."""
    return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def unsupported(param: str, message: str) -> ApiError:
    """A field whose meaning this server does not offer: refused, since passing over it would change the answer."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """A request for a model that is none of those that are served."""
    message = f"The model `{name[:200]}` does not exist here; this server speaks for {named_models(served, '`')}."
    return ApiError(404, message, code=NOT_FOUND, param="model")


def unavailable_model(name: str, why: SwarmError) -> ApiError:
    """A model of the swarm that cannot be used from here: its files or its draft stand in the way."""
    if isinstance(why, UnknownModel):
        return as_api_error(why)
    return ApiError(503, f"{name}: {why}", code="model_unavailable", retry_after_s=ROUTE_RETRY_S)


def named_models(names: Sequence[str], quote: str = "") -> str:
    """Some names for a message."""
    shown = ", ".join(f"{quote}{name}{quote}" for name in names[:MODELS_NAMED]) or "none yet"
    return f"{shown} and {len(names) - MODELS_NAMED} more" if len(names) > MODELS_NAMED else shown


def server_leaves() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="server_leaving", retry_after_s=RETRY_S)


def as_api_error(error: Exception) -> ApiError:
    """The same error with its HTTP status; what nobody expected becomes a 500 that tells nothing."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            told = ApiError(400, str(error), code="context_length_exceeded", param="messages")
            told.anthropic_message = (  # by these words Claude Code knows that it has to shorten the conversation
                f"prompt is too long: {error.prompt_tokens} tokens > {error.limit_tokens} maximum"
            )
            return told
        case ContextFull():
            return ApiError(400, str(error), code="context_length_exceeded", param="messages")
        case UnknownModel():
            return ApiError(404, str(error), code=NOT_FOUND, param="model")
        case RouteError():
            told = ApiError(503, str(error), code="layers_missing", retry_after_s=ROUTE_RETRY_S)
            missing = [f"{start}-{end}" for start, end in error.missing]
            told.details = {"missing_layers": missing, "eta_s": error.eta_s}
            return told
        case QueueFull():
            wait_s = max(math.ceil(error.retry_after_s), 1)
            return ApiError(429, str(error), code="rate_limit_exceeded", retry_after_s=wait_s)
        case Busy():
            place = "" if error.position is None else f" {error.position - 1} others wait before this one."
            message = f"The swarm has no memory left for another session; ask again later.{place}"
            again_s = max(math.ceil(error.expected_s or error.retry_after_s or RETRY_S), 1)
            return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=again_s)
        case ConfigError():
            return ApiError(400, str(error), param=getattr(error, "param", None))
        case GenerationInterrupted() | SwarmError():
            return ApiError(503, str(error), code="generation_interrupted", retry_after_s=RETRY_S)
        case _:
            return ApiError(500, "The server failed at this request; its log says more.", code="internal_error")


def form_of(path: str) -> ErrorForm:
    """Whose form errors of a path have; routes of no dialect have OpenAI's."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def error_body(form: ErrorForm, error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """The body of an error, as JSON values; in a stream it is the data of the error event.

    Args:
        request_id: of the request, which Anthropic's bodies repeat.
    """
    match form:
        case "openai":
            kind = _OPENAI_TYPES.get(error.status, "invalid_request_error")
            return {
                "error": {
                    "message": error.message,
                    "type": kind,
                    "param": error.param,
                    "code": error.code,
                    **error.details,
                }
            }
        case "anthropic":
            kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
            told = {"type": kind, "message": error.anthropic_message, **error.details}
            return {"type": "error", "error": told, "request_id": request_id}
        case "ollama":
            return {"error": error.message}
