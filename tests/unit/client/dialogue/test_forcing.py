"""Grammars that force calls: they take a call in the family's form, and nothing else."""

from __future__ import annotations

import json
from functools import cache

import llguidance.hf
import pytest
from llguidance import LLMatcher, LLTokenizer

from client.base.options import Grammar
from client.dialogue.forcing import grammar_for
from client.dialogue.messages import ContentDelta, ReasoningDelta, Tool, ToolCallDelta, ToolChoice
from client.dialogue.parsing import joined
from client.dialogue.plan import parser_for
from client.dialogue.template import ChatPrompt, ChatTemplate
from swarm.base.errors import ConfigError
from tests.chat_templates import ADDED, TEMPLATES, chat_tokenizer

LOOK = Tool(
    "look",
    "",
    {
        "type": "object",
        "properties": {"at": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["at"],
        "additionalProperties": False,
    },
    strict=True,
)
GO = Tool("go", "", {"type": "object", "properties": {"to": {"enum": ["up", "down"], "type": "string"}}})
REQUIRED = ToolChoice("required")

HERMES = '<tool_call>\n{"name": "look", "arguments": {"at": "sea", "n": 2}}\n</tool_call>'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜>"
CALLS = {
    "qwen25": HERMES,
    "qwen3": HERMES,
    "gemma": HERMES,
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\nsea\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama31": '{"name": "look", "parameters": {"at": "sea", "n": 2}}',
    "mistral_v3": '[TOOL_CALLS][{"name": "look", "arguments": {"at": "sea", "n": 2}}]',
    "mistral_v13": '[TOOL_CALLS]look[ARGS]{"at": "sea", "n": 2}',
    "deepseek_r1": "<｜tool▁calls▁begin｜>" + V3.replace("{}", '{"at": "sea", "n": 2}') + "<｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "sea", "n": 2}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm45": "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>sea</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "harmony": '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "sea", "n": 2}',
    "phi4_mini": '<|tool_call|>[{"name": "look", "arguments": {"at": "sea", "n": 2}}]<|/tool_call|>',
}


CALLS |= {f"{name}, plain": CALLS[name] for name in ("gemma", "qwen3", "qwen3_coder", "glm45", "deepseek_v31")}


@cache
def made(name: str) -> tuple[ChatTemplate, LLTokenizer]:
    name, _, plain = name.partition(", ")
    tokenizer = chat_tokenizer(TEMPLATES[name], added=() if plain else ADDED)
    return ChatTemplate(tokenizer), llguidance.hf.from_tokenizer(tokenizer)


def takes(name: str, grammar: Grammar | None, text: str) -> bool:
    """Whether the text matches, to its end."""
    template, tokens = made(name)
    assert grammar is not None
    written = LLMatcher.grammar_from_lark(grammar.text)
    if grammar.kind == "json_schema":
        written = LLMatcher.grammar_from_json_schema(grammar.text)
    matcher = LLMatcher(tokens, written)
    assert not matcher.get_error()
    ids = template.tokenizer(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def forced(name: str, choice: ToolChoice = REQUIRED, *, opens: bool = False) -> Grammar:
    grammar = grammar_for(made(name)[0], ChatPrompt((), opens), [LOOK, GO], choice)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("name", CALLS)
def test_a_forced_answer_is_a_call_in_the_form_that_its_parser_reads(name: str) -> None:
    grammar, text = forced(name, opens=name == "deepseek_r1"), CALLS[name]
    thoughts = "hm</think>\n" if name == "deepseek_r1" else ""
    assert takes(name, grammar, thoughts + text)
    assert not takes(name, grammar, thoughts + "I had rather not.")
    assert not takes(name, grammar, thoughts + text.replace("look", "leave"))
    assert not takes(name, grammar, thoughts + text.replace("2", "two")), "arguments follow the schema"
    parser = parser_for(made(name)[0], ChatPrompt(()), [LOOK, GO])
    (call,) = joined([*parser.push(text), *parser.finish()])
    assert isinstance(call, ToolCallDelta)
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "sea", "n": 2})


@pytest.mark.parametrize("name", CALLS)
def test_a_named_tool_is_the_only_one(name: str) -> None:
    thoughts = "hm</think>\n" if name == "deepseek_r1" else ""
    only_go = forced(name, ToolChoice("required", "go"), opens=bool(thoughts))
    assert not takes(name, only_go, thoughts + CALLS[name])


def test_several_calls_are_allowed_unless_they_are_refused() -> None:
    two = f"{HERMES}\n{HERMES}"
    assert takes("qwen25", forced("qwen25"), two)
    assert not takes("qwen25", forced("qwen25", ToolChoice("required", parallel=False)), two)


def test_thoughts_come_first_where_the_template_marks_them() -> None:
    assert takes("qwen3", forced("qwen3"), f"<think>\nhm, ...?\n</think>\n\n{HERMES}")
    assert takes("qwen3", forced("qwen3", opens=True), f"hm\n</think>\n\n{HERMES}")
    assert not takes("qwen3", forced("qwen3", opens=True), HERMES), "what opens has to close"
    closed = grammar_for(made("qwen3")[0], ChatPrompt((), closes_reasoning=True), [LOOK], REQUIRED)
    assert not takes("qwen3", closed, f"<think>hm</think>{HERMES}")
    assert takes("qwen3, plain", forced("qwen3, plain"), f"<think>\nhm\n</think>\n\n{HERMES}")
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert takes("harmony", forced("harmony"), analysis + CALLS["harmony"])


@pytest.mark.parametrize("name", [name for name in CALLS if name not in {"llama31", "harmony"}])
def test_calls_of_strict_tools_follow_their_schema_also_where_they_are_not_forced(name: str) -> None:
    grammar = grammar_for(made(name)[0], ChatPrompt(()), [LOOK, GO], ToolChoice())
    assert takes(name, grammar, "I had rather not.")
    assert takes(name, grammar, f"I look.\n{CALLS[name]}")
    assert not takes(name, grammar, f"I look.\n{CALLS[name].replace('2', 'two')}")
    assert grammar_for(made(name)[0], ChatPrompt(()), [GO], ToolChoice()) is None, "no tool is strict"


SCHEMA = Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))


def test_an_answer_s_schema_leaves_thoughts_free() -> None:
    def asked(name: str, *, opens: bool = False) -> Grammar | None:
        return grammar_for(made(name)[0], ChatPrompt((), opens), [], ToolChoice(), SCHEMA)

    assert asked("qwen25") == SCHEMA
    assert takes("qwen3", asked("qwen3"), '<think>\nhm {\n</think>\n\n{"a":1}')
    assert takes("qwen3", asked("qwen3"), '{"a":1}')
    assert takes("qwen3", asked("qwen3", opens=True), 'hm\n</think>\n\n{"a":1}')
    assert not takes("qwen3", asked("qwen3"), '<think>\n</think>\n\n{"a":"x"}')
    final = '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{"a":1}'
    assert takes("harmony", asked("harmony"), final)
    parser = parser_for(made("harmony")[0], ChatPrompt(()))
    assert joined([*parser.push(final), *parser.finish()]) == [ReasoningDelta("hm"), ContentDelta('{"a":1}')]


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_s_schema_leaves_calls_free(name: str) -> None:
    grammar = grammar_for(made(name)[0], ChatPrompt(()), [LOOK, GO], ToolChoice(), SCHEMA)
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert takes(name, grammar, head + '{"a":1}')
    assert takes(name, grammar, ("<|python_tag|>" if name == "llama31" else "") + CALLS[name])
    assert not takes(name, grammar, head + '{"a":"x"}')
    assert not takes(name, grammar, head + "Well.")


def test_a_schema_that_is_no_json_is_one_line() -> None:
    with pytest.raises(ConfigError, match="no JSON"):
        grammar_for(made("qwen3")[0], ChatPrompt(()), [], ToolChoice(), Grammar("json_schema", "{} start: x"))


def test_an_expression_for_an_answer_leaves_thoughts_free() -> None:
    grammar = grammar_for(made("qwen3")[0], ChatPrompt(()), [], ToolChoice(), Grammar("regex", r"[a-z]+/[0-9]+\/x"))
    assert takes("qwen3", grammar, "<think>hm</think>\nab/12/x")
    assert not takes("qwen3", grammar, "<think>hm</think>\nab")
