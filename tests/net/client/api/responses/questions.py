"""What requests ask, and what models answer."""

from __future__ import annotations

from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from client.base.stats import TokenLogProbs
from client.dialogue.messages import ToolCallDelta

KEYS = ("sk-one", "sk-two")
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    "strict": True,
}
CALL = (ToolCallDelta(0, "call_7", "weather", '{"town":'), ToolCallDelta(0, "", "", '"Ulm"}'))
LOG_PROBS = [TokenLogProbs(100, -0.25, ((100, -0.25), (7, -2.0))), TokenLogProbs(101, -0.5)]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
