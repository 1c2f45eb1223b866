"""Parsers of answers: any split gives the same parts, nothing is lost, and no text raises an error."""

from __future__ import annotations

from functools import cache
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.dialogue.messages import AnswerDelta, Tool, ToolCallDelta
from client.dialogue.parsing import joined
from client.dialogue.plan import parser_for
from client.dialogue.template import ChatPrompt, ChatTemplate
from tests.chat_templates import TEMPLATES, chat_tokenizer
from tests.unit.client.dialogue.test_answers import FORMS

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
PARSED = [name for name in TEMPLATES if name not in {"chatml", "gemma", "smollm2"}]


@st.composite
def answers(draw: st.DrawFn, name: str) -> str:
    """Calls in the form of a family, thoughts and words, of which some are cut out."""
    calls = [text for family, text, _ in FORMS.values() if family == name]
    text = "".join(draw(st.lists(st.sampled_from([*FRAGMENTS, *calls * 8]), max_size=10)))
    start = draw(st.integers(0, len(text)))
    return text[:start] + text[start + draw(st.integers(0, 12)) :]


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(chat_tokenizer(TEMPLATES[name]))


def parts(name: str, pieces: list[str], *, opens: bool = False, tools: bool = True) -> list[AnswerDelta]:
    ids = count()
    prompt = ChatPrompt((), opens_reasoning=opens)
    parser = parser_for(template_of(name), prompt, TOOLS if tools else (), lambda: f"id{next(ids)}")
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined([*deltas, *parser.finish()])


@pytest.mark.parametrize("name", PARSED)
@settings(max_examples=20)
@given(st.data())
def test_any_split_gives_the_same_parts_and_nothing_is_lost(name: str, data: st.DataObject) -> None:
    text, opens = data.draw(answers(name)), data.draw(st.booleans())
    whole = parts(name, [text], opens=opens)
    assert parts(name, list(text), opens=opens) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parts(name, [text[i:j] for i, j in pairwise([0, *cuts, len(text)])], opens=opens) == whole
    found = "".join(delta.arguments if isinstance(delta, ToolCallDelta) else delta.text for delta in whole)
    if name != "harmony":
        assert all(found.count(word) >= text.count(word) for word in ("Hi", "東"))
    if name != "harmony" and "<think>" not in text and not opens and not found_calls(whole):
        assert found == text


@pytest.mark.parametrize("name", ["qwen3", "mistral_v13"])
@settings(max_examples=20)
@given(st.data())
def test_without_tools_nothing_is_a_call(name: str, data: st.DataObject) -> None:
    assert not found_calls(parts(name, [data.draw(answers(name))], tools=False))


def found_calls(deltas: list[AnswerDelta]) -> list[ToolCallDelta]:
    return [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
