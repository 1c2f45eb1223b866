"""What requests ask, and what models answer."""

from __future__ import annotations

from typing import Any

from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from client.dialogue.messages import ToolCallDelta

KEY = "sk-ant-one"
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "of a town", "input_schema": SCHEMA}
CALL = (ToolCallDelta(0, "call_7", "weather", '{"town":'), ToolCallDelta(0, "", "", '"Ulm"}'))
TOOL_USE = {"type": "tool_use", "id": "call_7", "name": "weather", "input": {"town": "Ulm"}}


def request(**asks: Any) -> dict[str, Any]:  # noqa: ANN401
    """The arguments of a call of the client; what its types lack goes into the body."""
    given = {"model": "demo-model", "max_tokens": 64, "messages": HI, **asks}
    extra = {name: given.pop(name) for name in ("temperature", "top_p", "top_k") if name in given}
    return {**given, "extra_body": extra}
