"""JSON that strangers wrote: bodies of requests, and arguments of calls."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from client.api.request_fields import SCOPE as LEFT_OUT
from client.api.request_fields import noting_left_out
from client.api.sse import compact

MAX_DEPTH: Final = 128
"""Of lists and objects within each other: what reads them goes as deep, and Python's stack does not."""
JsonObject = dict[str, Any]
"""A JSON object that is written to a client."""


def read_json(body: bytes) -> Any:  # noqa: ANN401 - JSON values
    """The value of a body. Whatever it holds can be written again: numbers are finite, texts are Unicode.

    Raises:
        json.JSONDecodeError: it is no such JSON, or nested too deeply.
    """
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if "\\u" in text:
            compact(value).encode()  # half of a character has no UTF-8
        _check_depth(value)
    except json.JSONDecodeError:
        raise
    except UnicodeError:
        raise json.JSONDecodeError("text is not valid Unicode", "", 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    return value


def _check_depth(value: object) -> None:
    """Refuse what is nested deeper than `MAX_DEPTH`.

    Raises:
        RecursionError: it is.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


class JsonRequest(Request):
    async def json(self) -> Any:  # noqa: ANN401 - JSON values
        return read_json(await self.body())


class JsonRoute(APIRoute):
    """A route of `JsonRequest`: what cannot be JSON is refused before any dialect sees it.

    A body is JSON whatever its header says: `curl -d` says that it is a form. What the request asks for and does not
    get, since it changes no answer, is named in a header.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
            headers = [*others, (b"content-type", b"application/json")]
            with noting_left_out() as names:
                response = await handle(JsonRequest({**request.scope, "headers": headers}, request.receive))
            request.scope.setdefault(LEFT_OUT, []).extend(f"field {name}" for name in names)
            return response

        return handle_json


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; of a text that was cut, as much as it says."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
