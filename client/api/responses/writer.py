"""The events of an answer as items and typed events of the Responses API.

One writer makes both forms: a stream sends its events, and a whole response is what they add up to.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from client.api.backend import Begun, Finished
from client.api.errors import ApiError
from client.api.json_text import JsonObject
from client.api.responses.tools import DeclaredTool, InputReader, custom_call, model_name
from client.api.writers import AnswerWriter, LogProbEntries
from client.dialogue.messages import Message, ToolCall, ToolCallDelta

ItemKind = Literal["message", "reasoning", "function_call", "custom_tool_call"]

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


def new_id(prefix: str) -> str:
    """A name that nobody guesses, such as `resp_…`."""
    return f"{prefix}_{secrets.token_hex(24)}"


@dataclass(slots=True)
class _OpenItem:
    """The item that grows now; its text is put together when it ends."""

    place: int
    item: JsonObject
    kind: ItemKind
    pieces: list[str] = field(default_factory=list)
    log_probs: list[JsonObject] = field(default_factory=list)
    call_index: int = -1
    reader: InputReader | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, text: str) -> JsonObject:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.log_probs if text else []}


class ResponseWriter(AnswerWriter):
    def __init__(
        self,
        head: Mapping[str, Any],
        entries: LogProbEntries,
        declared: Mapping[str, DeclaredTool] | None = None,
        clock: Callable[[], float] = time.time,
        keep: Callable[[JsonObject, Message], JsonObject] = lambda response, answer: response,
    ) -> None:
        """Write nothing yet.

        Args:
            head: the fields of the response that do not change, its id among them.
            declared: how tools were declared, by the names that the model knows; others are functions.
            clock: seconds of the epoch.
            keep: stores the whole response and its answer, before the client hears of its end; returns it.
        """
        super().__init__(entries)
        self._clock = clock
        self._keep = keep
        self._final: JsonObject | None = None
        self._declared = declared or {}
        self._head = dict(head)
        self._sequence_number = 0
        self._open: _OpenItem | None = None
        self.output: list[JsonObject] = []

    def begin(self, begun: Begun) -> Iterator[JsonObject]:
        yield self._event("response.created", response=self.response("in_progress"))
        yield self._event("response.in_progress", response=self.response("in_progress"))

    def _write_content(self, text: str, entries: list[JsonObject]) -> Iterator[JsonObject]:
        return self._grow("message", text, entries)

    def _write_reasoning(self, text: str) -> Iterator[JsonObject]:
        return self._grow("reasoning", text, [])

    def finish(self, finished: Finished) -> Iterator[JsonObject]:
        """The end: `response.completed`, or `response.incomplete` where the length ended it."""
        is_cut = finished.reason == "length"
        if self._open is None and not self.output:
            yield from self._begin_item("message")
        yield from self._end_item("incomplete" if is_cut else "completed")
        yield self._event("response.incomplete" if is_cut else "response.completed", response=self.whole(finished))

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        """An error in mid-stream: `error`, then `response.failed` with what there was."""
        yield self._event("error", code=error.code, message=error.message, param=error.param)
        yield from self._end_item("incomplete")
        told = {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}
        yield self._event("response.failed", response=self.response("failed", error=told, output=self.output))

    def whole(self, finished: Finished) -> JsonObject:
        if self._final is None:
            is_cut = finished.reason == "length"
            response = self.response(
                "incomplete" if is_cut else "completed",
                output=self.output,
                usage=self._usage(finished),
                incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
                completed_at=None if is_cut else int(self._clock()),
            )
            self._final = self._keep(response, self.message())
        return self._final

    def message(self) -> Message:
        texts: dict[str, list[str]] = {"message": [], "reasoning": []}
        calls = []
        for item in self.output:
            if "call_id" in item:
                name = model_name(item["name"], item.get("namespace"))
                is_custom = item["type"] == "custom_tool_call"
                call = custom_call(item["call_id"], name, item["input"]) if is_custom else None
                calls.append(call or ToolCall(item["call_id"], name, item["arguments"]))
            else:
                texts[item["type"]] += [part["text"] for part in item["content"]]
        return Message(
            "assistant", "".join(texts["message"]), reasoning="".join(texts["reasoning"]), tool_calls=tuple(calls)
        )

    def response(self, status: str, **fields: Any) -> JsonObject:  # noqa: ANN401 - JSON values
        empty: JsonObject = {
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            "completed_at": None,
        }
        return {**self._head, "status": status, **empty, **fields}

    def _event(self, kind: str, **fields: Any) -> JsonObject:  # noqa: ANN401 - JSON values
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event

    def _grow(
        self, kind: Literal["message", "reasoning"], text: str, entries: list[JsonObject]
    ) -> Iterator[JsonObject]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin_item(kind)
        item = self._open
        assert item is not None
        item.pieces.append(text)
        place = {"item_id": item.item["id"], "output_index": item.place, "content_index": 0}
        if kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **place, delta=text)
            return
        item.log_probs += entries
        yield self._event("response.output_text.delta", **place, delta=text, logprobs=entries)

    def _write_call(self, part: ToolCallDelta) -> Iterator[JsonObject]:
        item = self._open
        if item is None or item.call_index != part.index:
            yield from self._end_item("completed")
            item = self._add_call(part)
            yield self._event("response.output_item.added", output_index=item.place, item={**item.item})
        text = part.arguments if item.reader is None else item.reader.push(part.arguments)
        if text:
            yield self._call_delta(item, text)

    def _add_call(self, part: ToolCallDelta) -> _OpenItem:
        tool = self._declared.get(part.name) or DeclaredTool(part.name)
        kind: ItemKind = "custom_tool_call" if tool.is_custom else "function_call"
        named = {"call_id": part.id, "name": tool.name, **({"namespace": tool.namespace} if tool.namespace else {})}
        prefix, empty = ("ctc", "input") if tool.is_custom else ("fc", "arguments")
        item = self._add(kind, {"type": kind, "id": new_id(prefix), **named, empty: ""})
        item.call_index = part.index
        item.reader = InputReader() if tool.is_custom else None
        return item

    def _call_delta(self, item: _OpenItem, text: str) -> JsonObject:
        item.pieces.append(text)
        kind = "function_call_arguments" if item.reader is None else "custom_tool_call_input"
        place = {"item_id": item.item["id"], "output_index": item.place}
        return self._event(f"response.{kind}.delta", **place, delta=text)

    def _begin_item(self, kind: Literal["message", "reasoning"]) -> Iterator[JsonObject]:
        yield from self._end_item("completed")
        if kind == "message":
            item = self._add(kind, {"type": kind, "id": new_id("msg"), "role": "assistant", "content": []})
        else:
            item = self._add(kind, {"type": kind, "id": new_id("rs"), "summary": [], "content": []})
        yield self._event("response.output_item.added", output_index=item.place, item={**item.item})
        yield self._event(
            "response.content_part.added",
            item_id=item.item["id"],
            output_index=item.place,
            content_index=0,
            part=item.part(""),
        )

    def _add(self, kind: ItemKind, item: JsonObject) -> _OpenItem:
        self._open = _OpenItem(len(self.output), {**item, "status": "in_progress"}, kind)
        return self._open

    def _end_item(self, status: str) -> Iterator[JsonObject]:
        item = self._open
        if item is None:
            return
        self._open = None
        place = {"item_id": item.item["id"], "output_index": item.place}
        if item.reader is not None:
            if rest := item.reader.finish():
                yield self._call_delta(item, rest)
            done = {**item.item, "input": item.text, "status": status}
            yield self._event("response.custom_tool_call_input.done", **place, input=done["input"])
        elif item.kind == "function_call":
            done = {**item.item, "arguments": item.text, "status": status}
            yield self._event(
                "response.function_call_arguments.done", **place, name=done["name"], arguments=done["arguments"]
            )
        else:
            part = item.part(item.text)
            done = {**item.item, "content": [part], "status": status}
            if item.kind == "message":
                log_probs = {"logprobs": item.log_probs}
                yield self._event("response.output_text.done", **place, content_index=0, text=part["text"], **log_probs)
            else:
                yield self._event("response.reasoning_text.done", **place, content_index=0, text=part["text"])
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        self.output.append(done)
        yield self._event("response.output_item.done", output_index=item.place, item=done)

    def _usage(self, finished: Finished) -> JsonObject:
        stats = finished.result.stats
        return {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": stats.tokens,
            "output_tokens_details": {"reasoning_tokens": min(self.reasoning_tokens, stats.tokens)},
            "total_tokens": stats.prompt_tokens + stats.tokens,
        }
