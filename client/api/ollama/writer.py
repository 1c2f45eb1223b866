"""The events of an answer as Ollama's JSON objects: one per piece, and a last one with what it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final, Literal

from client.api.backend import Delta, Finished
from client.api.json_text import JsonObject, arguments_object
from client.api.openai.bodies import chat_log_probs
from client.dialogue.messages import ContentDelta, ReasoningDelta, ToolCall, ToolCallDelta

NS_PER_S: Final = 1e9


def written_time(seconds: float) -> str:
    """A time of the epoch as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class RunWriter:
    """Writes one answer.

    A call is written when it is whole: Ollama's clients take its arguments as an object.
    """

    def __init__(
        self,
        kind: Literal["chat", "generate"],
        model: str,
        clock: Callable[[], float],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._kind = kind
        self._model = model
        self._clock = clock
        self._token_bytes = token_bytes
        self._call: ToolCall | None = None
        self._call_index = -1
        self._calls: list[JsonObject] = []
        self._texts: dict[str, list[str]] = {"content": [], "thinking": []}
        self._log_probs: list[JsonObject] = []

    def take(self, delta: Delta) -> Iterator[JsonObject]:
        """More of the answer."""
        entries = chat_log_probs(delta.log_probs, self._token_bytes)["content"]
        self._log_probs += entries
        for part in delta.parts:
            match part:
                case ContentDelta(text):
                    yield from self._end_call()
                    self._texts["content"].append(text)
                    yield self._line(content=text, log_probs=entries)
                    entries = []
                case ReasoningDelta(text):
                    yield from self._end_call()
                    self._texts["thinking"].append(text)
                    yield self._line(thinking=text)
                case ToolCallDelta():
                    yield from self._grow_call(part)

    def finish(self, finished: Finished) -> Iterator[JsonObject]:
        """The last call, if one is open, and the last line."""
        yield from self._end_call()
        yield {**self._line(), **self._end(finished)}

    def whole(self, finished: Finished) -> JsonObject:
        """The answer as one object, after `finish`."""
        line = self._line(
            content="".join(self._texts["content"]),
            thinking="".join(self._texts["thinking"]),
            calls=self._calls,
            log_probs=self._log_probs,
        )
        return {**line, **self._end(finished)}

    def nothing(self, reason: str) -> JsonObject:
        """The answer to a request that only asks whether the model is there."""
        return {**self._line(), "done": True, "done_reason": reason}

    def _grow_call(self, part: ToolCallDelta) -> Iterator[JsonObject]:
        if self._call is not None and part.index == self._call_index:
            self._call = ToolCall(self._call.id, self._call.name, self._call.arguments + part.arguments)
            return
        yield from self._end_call()
        self._call = ToolCall(part.id, part.name, part.arguments)
        self._call_index = part.index

    def _end_call(self) -> Iterator[JsonObject]:
        call, self._call = self._call, None
        if call is None:
            return
        function = {"index": self._call_index, "name": call.name, "arguments": arguments_object(call.arguments)}
        written = {"id": call.id, "function": function}
        self._calls.append(written)
        yield self._line(calls=[written])

    def _line(
        self,
        *,
        content: str = "",
        thinking: str = "",
        calls: list[JsonObject] | None = None,
        log_probs: list[JsonObject] | None = None,
    ) -> JsonObject:
        thought = {"thinking": thinking} if thinking else {}
        called = {"tool_calls": calls} if calls else {}
        if self._kind == "chat":
            said: JsonObject = {"message": {"role": "assistant", "content": content, **thought, **called}}
        else:
            said = {"response": content, **thought, **called}
        line = {"model": self._model, "created_at": written_time(self._clock()), **said, "done": False}
        return {**line, "logprobs": log_probs} if log_probs else line

    def _end(self, finished: Finished) -> JsonObject:
        stats = finished.result.stats
        first_s = min(stats.time_to_first_token_s, stats.total_s)
        return {
            "done": True,
            "done_reason": "length" if finished.reason == "length" else "stop",
            "total_duration": round(stats.total_s * NS_PER_S),
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": round(first_s * NS_PER_S),
            "eval_count": stats.tokens,
            "eval_duration": round((stats.total_s - first_s) * NS_PER_S),
        }
