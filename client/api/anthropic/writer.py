"""The events of an answer as content blocks and stream events of the Messages API.

One writer makes both forms: a stream sends its events, and a whole message is what they add up to.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from client.api.backend import Begun, Delta, Finished
from client.api.context import reasoning_tokens
from client.api.json_text import JsonObject, arguments_object
from client.dialogue.messages import ContentDelta, ReasoningDelta, ToolCallDelta

BlockKind = Literal["text", "thinking", "tool_use"]
SIGNATURE: Final = "unsigned"
"""Stands where Anthropic signs thoughts; here nobody checks it."""


@dataclass(slots=True)
class _OpenBlock:
    """The block that grows now.

    Attributes:
        kind: of it.
        start: what its first event says, as JSON values.
        pieces: of its text.
        call_index: of the call, where it is one.
    """

    kind: BlockKind
    start: JsonObject
    pieces: list[str] = field(default_factory=list)
    call_index: int = -1


class MessageWriter:
    """Writes one message.

    Attributes:
        content: blocks that have ended, as JSON values.
    """

    def __init__(self, model: str, *, hides_thinking: bool = False) -> None:
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._hides_thinking = hides_thinking
        self._open: _OpenBlock | None = None
        self._thinking_tokens = 0
        self.content: list[JsonObject] = []

    def begin(self, begun: Begun) -> Iterator[JsonObject]:
        """The prompt was taken."""
        usage = _usage(begun.prompt_tokens, 0, 0)
        yield {"type": "message_start", "message": self._message([], None, None, usage)}
        yield {"type": "ping"}

    def take(self, delta: Delta) -> Iterator[JsonObject]:
        """More of the answer."""
        self._thinking_tokens += reasoning_tokens(delta)
        for part in delta.parts:
            match part:
                case ContentDelta(text):
                    yield from self._grow("text", {"type": "text", "text": ""}, text)
                case ReasoningDelta(text):
                    start = {"type": "thinking", "thinking": "", "signature": ""}
                    yield from self._grow("thinking", start, "" if self._hides_thinking else text)
                case ToolCallDelta():
                    yield from self._grow_call(part)

    def finish(self, finished: Finished, max_tokens: int) -> Iterator[JsonObject]:
        """The end of the last block, then `message_delta` with the reason and the usage, then `message_stop`."""
        yield from self._end_block()
        reason, stop = stop_reason(finished, max_tokens)
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": self._usage(finished),
        }
        yield {"type": "message_stop"}

    def whole(self, finished: Finished, max_tokens: int) -> JsonObject:
        """The message after its end."""
        reason, stop = stop_reason(finished, max_tokens)
        return self._message(self.content, reason, stop, self._usage(finished))

    def _usage(self, finished: Finished) -> JsonObject:
        stats = finished.result.stats
        usage = _usage(stats.prompt_tokens - stats.reused_tokens, stats.reused_tokens, stats.tokens)
        return {**usage, "output_tokens_details": {"thinking_tokens": min(self._thinking_tokens, stats.tokens)}}

    def _message(
        self, content: list[JsonObject], reason: str | None, stop: str | None, usage: JsonObject
    ) -> JsonObject:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _grow(self, kind: Literal["text", "thinking"], start: JsonObject, text: str) -> Iterator[JsonObject]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin_block(_OpenBlock(kind, start))
        if text:
            delta = {"type": f"{kind}_delta", kind: text}
            yield self._delta(text, delta)

    def _grow_call(self, part: ToolCallDelta) -> Iterator[JsonObject]:
        if self._open is None or self._open.call_index != part.index:
            start = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            yield from self._begin_block(_OpenBlock("tool_use", start, call_index=part.index))
        if part.arguments:
            yield self._delta(part.arguments, {"type": "input_json_delta", "partial_json": part.arguments})

    def _delta(self, text: str, delta: JsonObject) -> JsonObject:
        assert self._open is not None
        self._open.pieces.append(text)
        return {"type": "content_block_delta", "index": len(self.content), "delta": delta}

    def _begin_block(self, block: _OpenBlock) -> Iterator[JsonObject]:
        yield from self._end_block()
        self._open = block
        yield {"type": "content_block_start", "index": len(self.content), "content_block": block.start}

    def _end_block(self) -> Iterator[JsonObject]:
        block = self._open
        if block is None:
            return
        self._open = None
        index, text = len(self.content), "".join(block.pieces)
        if block.kind == "thinking":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": index, "delta": signed}
        yield {"type": "content_block_stop", "index": index}
        self.content.append(_whole_block(block, text))


def _whole_block(block: _OpenBlock, text: str) -> JsonObject:
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "thinking":
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
        case "tool_use":
            return {**block.start, "input": arguments_object(text)}


def stop_reason(finished: Finished, max_tokens: int) -> tuple[str, str | None]:
    """Why the message ended, and the stop sequence that ended it."""
    if finished.stop_string:
        return "stop_sequence", finished.stop_string
    match finished.reason:
        case "tool_calls":
            return "tool_use", None
        case "length":
            is_full = finished.result.stats.tokens < max_tokens
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        case "stop":
            return "end_turn", None


def _usage(input_tokens: int, cached_tokens: int, output_tokens: int) -> JsonObject:
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
