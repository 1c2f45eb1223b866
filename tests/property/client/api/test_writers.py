"""Whatever an answer is made of: the events of each dialect add up to its whole form, and say what was said."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from client.api.anthropic import MessageWriter
from client.api.backend import Begun, Delta, Finished
from client.api.errors import ApiError
from client.api.ollama import RunWriter
from client.api.responses.writer import ResponseWriter
from client.dialogue.messages import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta
from tests.scripted_backend import finished

TEXTS = st.sampled_from(["a", "b ", "é"])
SAID = st.one_of(st.builds(ContentDelta, TEXTS), st.builds(ReasoningDelta, TEXTS), st.just("call"))


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[Delta], Finished]:
    """Deltas of any parts in any order; calls come one after the other, each in one part or in several."""
    parts: list[AnswerDelta] = []
    calls = 0
    for said in draw(st.lists(SAID, max_size=8)):
        if isinstance(said, str):
            pieces = draw(st.sampled_from([[""], ['{"a":1}'], ['{"a"', ":1}"], ["{", '"a":', "1}"]]))
            parts.append(ToolCallDelta(calls, f"call_{calls}", f"tool_{calls}", pieces[0]))
            parts += [ToolCallDelta(calls, "", "", piece) for piece in pieces[1:]]
            calls += 1
        else:
            parts.append(said)
    deltas, place = [], 0
    while place < len(parts):
        taken = draw(st.sampled_from([1, 2, 3, 0]))  # where 0 came first, the simplest answer never ended
        deltas.append(Delta(tuple(parts[place : place + taken]), tokens=(1,) * draw(st.integers(1, 3))))
        place += taken
    tokens = sum(len(delta.tokens) for delta in deltas)
    return deltas, finished("", tokens, draw(st.sampled_from(["stop", "length", "tool_calls"])))


def spoken(deltas: list[Delta], kind: type[ContentDelta | ReasoningDelta]) -> str:
    return "".join(part.text for delta in deltas for part in delta.parts if isinstance(part, kind))


def called(deltas: list[Delta]) -> dict[str, str]:
    """Arguments by the call's name."""
    found: dict[str, str] = {}
    for delta in deltas:
        for part in delta.parts:
            if isinstance(part, ToolCallDelta):
                found[f"tool_{part.index}"] = found.get(f"tool_{part.index}", "") + part.arguments
    return found


@settings(max_examples=25)
@given(answers())
def test_responses(answer: tuple[list[Delta], Finished]) -> None:
    deltas, end = answer
    writer = ResponseWriter({"id": "resp_1"}, lambda delta: [])
    events = list(writer.begin(Begun(7)))
    for delta in deltas:
        events += writer.take(delta)
    events += writer.finish(end)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    texts = ["" for _ in output]
    open_item: int | None = None
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert open_item is None
                open_item = event["output_index"]
            case "output_item.done":
                assert event["output_index"] == open_item
                assert event["item"] == output[open_item]
                open_item = None
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["output_index"] == open_item
                texts[event["output_index"]] += event["delta"]
    assert [_text(item) for item in output] == texts
    message = writer.message()
    assert (message.content, message.reasoning) == (spoken(deltas, ContentDelta), spoken(deltas, ReasoningDelta))
    assert {call.name: call.arguments for call in message.tool_calls} == called(deltas)
    usage = events[-1]["response"]["usage"]
    assert 0 <= usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]


def _text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


@settings(max_examples=25)
@given(answers(), st.integers(0, 8))
def test_a_response_that_fails_closes_what_is_open(answer: tuple[list[Delta], Finished], after: int) -> None:
    deltas, _ = answer
    writer = ResponseWriter({"id": "resp_1"}, lambda delta: [])
    events = list(writer.begin(Begun(7)))
    for delta in deltas[:after]:
        events += writer.take(delta)
    events += writer.fail(ApiError(503, "the chain broke"))
    kinds = [event["type"] for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    assert kinds[-1] == "response.failed"
    assert spoken(deltas[:after], ContentDelta) == writer.message().content


@settings(max_examples=25)
@given(answers())
def test_messages(answer: tuple[list[Delta], Finished]) -> None:
    deltas, end = answer
    writer = MessageWriter("demo-model", 64)
    events = list(writer.begin(Begun(7)))
    for delta in deltas:
        events += writer.take(delta)
    events += writer.finish(end)
    whole = writer.whole(end)
    texts = ["" for _ in whole["content"]]
    open_block: int | None = None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "content_block_delta":
                assert event["index"] == open_block
                delta = event["delta"]
                texts[event["index"]] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    for block, text in zip(whole["content"], texts, strict=True):
        if block["type"] == "tool_use":
            assert called(deltas)[block["name"]] == text
            assert block["input"] == ({"a": 1} if text else {})
        else:
            assert block[block["type"]] == text
    said = [block["text"] for block in whole["content"] if block["type"] == "text"]
    assert "".join(said) == spoken(deltas, ContentDelta)


@settings(max_examples=25)
@given(answers())
def test_ollama(answer: tuple[list[Delta], Finished]) -> None:
    deltas, end = answer
    writer = RunWriter("chat", "demo-model", lambda: 1.0, lambda token: b"")
    lines = [line for delta in deltas for line in writer.take(delta)] + list(writer.finish(end))
    whole = writer.whole(end)["message"]
    assert "".join(line["message"]["content"] for line in lines) == whole["content"] == spoken(deltas, ContentDelta)
    assert whole.get("thinking", "") == spoken(deltas, ReasoningDelta)
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert calls == whole.get("tool_calls", [])
    named = {call["function"]["name"]: call["function"]["arguments"] for call in calls}
    assert named == {name: {"a": 1} if arguments else {} for name, arguments in called(deltas).items()}
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
