"""What parsers make of answers in the forms that the families of models write."""

from __future__ import annotations

import json
from itertools import count

import pytest

from client.dialogue.messages import AnswerDelta, ContentDelta, ReasoningDelta, Tool, ToolCallDelta
from client.dialogue.parsing import joined
from client.dialogue.plan import parser_for
from client.dialogue.template import ChatPrompt, ChatTemplate
from tests.chat_templates import TEMPLATES, chat_tokenizer

LOOK = Tool(
    "look",
    "Looks somewhere.",
    {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}, "required": ["at"]},
)
WAIT = Tool("wait", "", {"type": "object", "properties": {}})
ARGUMENTS = '{"at": "the \\"sea\\"", "n": 2}'


def filled(text: str) -> str:
    return text.replace("%s", ARGUMENTS)


V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n%s\n```<｜tool▁call▁end｜>"
V31_CALL = "<｜tool▁call▁begin｜>look<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
GLM_CALL = '<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the "sea"</arg_value>\n<arg_key>n</arg_key>\n'
GLM_CALL += "<arg_value>2</arg_value>\n</tool_call>"
XML_CALL = '<tool_call>\n<function=look>\n<parameter=at>\nthe "sea"\n</parameter>\n<parameter=n>\n2\n</parameter>\n'
XML_CALL += "</function>\n</tool_call>"
HERMES_CALL = filled('<tool_call>\n{"name": "look", "arguments": %s}\n</tool_call>')
WRITTEN = {
    "hermes": ("qwen25", HERMES_CALL, "\n"),
    "hermes, reordered": ("qwen25", '<tool_call>{"arguments": %s, "name": "look"}</tool_call>', ""),
    "hermes, unclosed": ("qwen3", '<tool_call>\n{"name": "look", "arguments": %s}', ""),
    "qwen coder": ("qwen3_coder", XML_CALL, "\n"),
    "qwen coder, as hermes": ("qwen3_coder", HERMES_CALL, "\n"),
    "llama": ("llama31", '{"name": "look", "parameters": %s}', "; "),
    "llama, tagged": ("llama31", '<|python_tag|>{"name": "look", "parameters": %s}', ""),
    "llama, typed": ("llama31", '{"type": "function", "name": "look", "parameters": %s}', ""),
    "mistral": ("mistral_v3", '[TOOL_CALLS] [{"name": "look", "arguments": %s, "id": "abc"}]', ""),
    "mistral, named": ("mistral_v13", "[TOOL_CALLS]look[ARGS]%s", ""),
    "mistral, with ids": ("mistral_v13", "[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]%s", ""),
    "deepseek": ("deepseek_r1", f"<｜tool▁calls▁begin｜>{filled(V3_CALL)}<｜tool▁calls▁end｜>", ""),
    "deepseek v3.1": ("deepseek_v31", f"<｜tool▁calls▁begin｜>{filled(V31_CALL)}<｜tool▁calls▁end｜>", ""),
    "glm": ("glm45", GLM_CALL, "\n"),
    "glm, in one line": ("glm45", GLM_CALL.replace("\n", ""), ""),
    "phi": ("phi4_mini", '<|tool_call|>[{"name": "look", "arguments": %s}]<|/tool_call|>', ""),
    "stand-in": ("gemma", HERMES_CALL, "\n"),
}
FORMS = {form: (name, filled(text), between) for form, (name, text, between) in WRITTEN.items()}


def parts(name: str, text: str, *, opens: bool = False, step: int = 3) -> list[AnswerDelta]:
    ids = count()
    template = ChatTemplate(chat_tokenizer(TEMPLATES[name]))
    parser = parser_for(template, ChatPrompt((), opens), [LOOK, WAIT], lambda: f"id{next(ids)}")
    pieces = [text[place : place + step] for place in range(0, len(text), step)]
    return joined([*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()])


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_read_in_the_form_of_its_family(form: str) -> None:
    name, text, _ = FORMS[form]
    (call,) = parts(name, text)
    assert isinstance(call, ToolCallDelta)
    assert (call.index, call.id, call.name) == (0, "id0", "look")
    assert json.loads(call.arguments) == json.loads(ARGUMENTS)


@pytest.mark.parametrize("form", FORMS)
def test_text_stands_before_a_call_and_behind_it(form: str) -> None:
    name, text, _ = FORMS[form]
    if name == "llama31" and not text.startswith("<|"):
        return
    found = parts(name, f"I look.\n\n{text}\n\nSo.")
    assert [type(part) for part in found] == [ContentDelta, ToolCallDelta, ContentDelta]
    assert found[0] == ContentDelta("I look.")
    assert found[2] == ContentDelta("\n\nSo.")


@pytest.mark.parametrize("form", [form for form, (_, _, between) in FORMS.items() if between])
def test_calls_that_follow_each_other_are_counted(form: str) -> None:
    name, text, between = FORMS[form]
    found = parts(name, text + between + text)
    assert [(call.index, call.id) for call in found if isinstance(call, ToolCallDelta)] == [(0, "id0"), (1, "id1")]
    assert len(found) == 2


def test_calls_in_one_list_are_counted() -> None:
    one = '{"name": "wait", "arguments": {}}'
    for name, text in (
        ("mistral_v3", f"[TOOL_CALLS][{one}, {one}]"),
        ("qwen25", f"<tool_call>[{one},{one}]</tool_call>"),
    ):
        found = parts(name, text)
        assert [(call.index, call.arguments) for call in found if isinstance(call, ToolCallDelta)] == [
            (0, "{}"),
            (1, "{}"),
        ]


def test_a_call_may_go_without_arguments() -> None:
    assert parts("qwen25", '<tool_call>{"name": "wait"}</tool_call>') == [ToolCallDelta(0, "id0", "wait", "{}")]


def test_arguments_go_out_while_they_come() -> None:
    template = ChatTemplate(chat_tokenizer(TEMPLATES["qwen25"]))
    parser = parser_for(template, ChatPrompt(()), [LOOK], lambda: "id")
    assert parser.push('<tool_call>\n{"name": "look", "argu') == []
    assert parser.push('ments": {"at": "the') == [ToolCallDelta(0, "id", "look", '{"at": "the')]
    assert parser.push(" sea") == [ToolCallDelta(0, "", "", " sea")]
    assert parser.push('"}}\n</tool_call>') == [ToolCallDelta(0, "", "", '"}')]
    assert parser.finish() == []


@pytest.mark.parametrize("step", [1, 7, 5000])
def test_a_name_that_does_not_end_is_no_call_to_stream(step: int) -> None:
    text = '<tool_call>{"name": "' + "x" * 3000 + '", "arguments": {}}</tool_call>'
    (call,) = parts("qwen25", text, step=step)
    assert isinstance(call, ToolCallDelta)
    assert call.arguments == "{}"


MALFORMED = {
    "no JSON": ("qwen25", "<tool_call>\nlook!\n</tool_call>"),
    "no name": ("qwen25", '<tool_call>{"arguments": {}}</tool_call>'),
    "arguments misspelt": ("qwen25", '<tool_call>{"name": "look", "argument": {"at": "x"}}</tool_call>'),
    "cut": ("qwen25", '<tool_call>{"name": "lo'),
    "mistral": ("mistral_v3", "[TOOL_CALLS] look around"),
    "mistral, no object": ("mistral_v13", "[TOOL_CALLS]look[ARGS]around"),
    "llama, no tool": ("llama31", '{"name": "Ann", "parameters": {"age": 3}}'),
    "llama, other": ("llama31", '{"answer": 3}'),
    "llama, code": ("llama31", "<|python_tag|>print(1)"),
    "deepseek": ("deepseek_v31", "<｜tool▁calls▁begin｜>x<｜tool▁call▁begin｜>look<｜tool▁sep｜>no"),
    "deepseek, unfenced": ("deepseek_r1", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n{}"),
    "glm": ("glm45", "<tool_call>look at the sea</tool_call>"),
    "qwen coder": ("qwen3_coder", "<tool_call>\n<function=look at>\n</tool_call>"),
    "phi": ("phi4_mini", "<|tool_call|>[1]<|/tool_call|>"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_no_call_is_content(case: str) -> None:
    name, text = MALFORMED[case]
    assert parts(name, text) == [ContentDelta(text)]


def test_a_call_that_breaks_in_its_arguments_stays_as_far_as_it_came() -> None:
    found = parts("qwen25", '<tool_call>{"name": "look", "arguments": {"at": oh no}}</tool_call>')
    assert found == [ToolCallDelta(0, "id0", "look", '{"at": '), ContentDelta("oh no}}</tool_call>")]
    cut = parts("qwen25", '<tool_call>{"name": "look", "arguments": {"at": "the s')
    assert cut == [ToolCallDelta(0, "id0", "look", '{"at": "the s')]


@pytest.mark.parametrize("name", ["qwen3", "glm45", "deepseek_r1", "deepseek_v31"])
def test_thoughts_are_parted_from_the_answer(name: str) -> None:
    want = [ReasoningDelta("hm,\n so"), ContentDelta("Yes.")]
    assert parts(name, "<think>\nhm,\n so\n</think>\n\nYes.") == want
    assert parts(name, "hm,\n so\n</think>\n\nYes.", opens=True) == want
    assert parts(name, "hm", opens=True) == [ReasoningDelta("hm")]
    assert parts(name, "Yes, <think> is a tag.") == [ContentDelta("Yes, <think> is a tag.")]


def test_a_call_follows_thoughts() -> None:
    found = parts("qwen3", f"<think>\nwhere?\n</think>\n\n{HERMES_CALL}")
    assert [type(part) for part in found] == [ReasoningDelta, ToolCallDelta]


def test_channels_are_thoughts_calls_and_content() -> None:
    text = "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    text += "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>" + ARGUMENTS
    want = [ReasoningDelta("Where?"), ContentDelta("I look."), ToolCallDelta(0, "id0", "look", ARGUMENTS)]
    assert parts("harmony", text + "<|call|>") == want
    assert parts("harmony", text) == want
    swapped = " to=functions.look<|channel|>commentary json<|message|>{}<|call|>"
    assert parts("harmony", swapped) == [ToolCallDelta(0, "id0", "look", "{}")]
    final = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>4\n<|return|>"
    assert parts("harmony", final) == [ReasoningDelta("Easy."), ContentDelta("4\n")]
    assert parts("harmony", "No channel at all.") == [ContentDelta("No channel at all.")]
