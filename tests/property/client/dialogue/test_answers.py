"""Parsers of answers: any split gives the same parts, nothing is lost, and no text raises an error."""

from __future__ import annotations

from functools import cache
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.dialogue.answers import parser_for
from client.dialogue.messages import AnswerDelta, ContentDelta, ReasoningDelta, Tool, ToolCallDelta
from client.dialogue.parsing import joined
from client.dialogue.template import ChatTemplate, Prompt
from tests.chat_templates import TEMPLATES, chat_tokenizer

TOOLS = [
    Tool("look", "", {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}),
    Tool("wait", "", {"type": "object", "properties": {}}),
]
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "\n", " ", "Hi", "<", "look", "wait", "{", "}", "[", "]"),
    *('{"name": "look", "arguments": {"at": "東 \\"x\\""}}', '{"name": "wait", "arguments": {}}', '"name"', ":", ","),
    *('{"name": "wait", "parameters": {"n": 1}, "id": "a"}', '{"arguments": {"at": "x"}, "name": "look"}', ";"),
    *('{"name": "look", "arguments": {"at": ', '"x', '"}}', '{"at": "y"}', "1e5", "<function=look>", "</function>"),
    *("<parameter=at>", "</parameter>", "\nx\n", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<arg_key>"),
    *("</arg_key>", "<arg_value>", "</arg_value>", "at", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "```"),
    *(
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "```json\n",
        "function",
        "<|start|>",
        "assistant",
    ),
    *("<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis", "final", "commentary", " to=functions.look"),
    *("<|constrain|>", "json", "<|tool_call|>", "<|/tool_call|>"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
PARSED = [name for name in TEMPLATES if name not in {"chatml", "gemma"}]


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(chat_tokenizer(TEMPLATES[name]))


def parts(name: str, pieces: list[str], *, opens: bool = False, tools: bool = True) -> list[AnswerDelta]:
    ids = count()
    prompt = Prompt((), opens_reasoning=opens)
    parser = parser_for(template_of(name), prompt, TOOLS if tools else (), lambda: f"id{next(ids)}")
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined([*deltas, *parser.finish()])


@pytest.mark.parametrize("name", PARSED)
@settings(max_examples=60)
@given(TEXTS, st.booleans(), st.lists(st.integers(1, 9), max_size=30))
def test_any_split_gives_the_same_parts(name: str, text: str, opens: bool, sizes: list[int]) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    whole = parts(name, [text], opens=opens)
    assert parts(name, [*pieces, rest], opens=opens) == whole
    assert parts(name, list(text), opens=opens) == whole


@pytest.mark.parametrize("name", PARSED)
@settings(max_examples=60)
@given(TEXTS)
def test_without_calls_and_thoughts_the_content_is_the_text(name: str, text: str) -> None:
    found = parts(name, [text])
    if name == "harmony" or not all(isinstance(delta, ContentDelta) for delta in found) or "<think>" in text:
        return
    assert "".join(delta.text for delta in found if isinstance(delta, ContentDelta)) == text


@pytest.mark.parametrize("name", PARSED)
@settings(max_examples=60)
@given(TEXTS)
def test_nothing_that_a_model_says_is_lost(name: str, text: str) -> None:
    """Words that are no markup are found again in some part."""
    words = ["Hi", "東"]
    found = "".join(
        delta.text if isinstance(delta, ContentDelta | ReasoningDelta) else delta.name + delta.arguments
        for delta in parts(name, [text])
    )
    if name != "harmony":
        assert all(found.count(word) == text.count(word) for word in words)


@pytest.mark.parametrize("name", PARSED)
@given(TEXTS)
def test_without_tools_nothing_is_a_call(name: str, text: str) -> None:
    if name != "harmony":
        assert not any(isinstance(delta, ToolCallDelta) for delta in parts(name, [text], tools=False))
