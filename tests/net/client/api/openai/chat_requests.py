"""Requests for chat completions, in pieces."""

from __future__ import annotations

import inspect
from typing import Any, Final

from openai.resources.chat import Completions

OF_THE_CLIENT: Final = frozenset(inspect.signature(Completions.create).parameters)
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def asked(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """A request's fields; those that OpenAI's client does not know travel as its extra body."""
    known = {"messages": HI, "model": "demo-model", **fields}
    extra = {name: known.pop(name) for name in fields if name not in OF_THE_CLIENT}
    return {**known, **({"extra_body": extra} if extra else {})}
