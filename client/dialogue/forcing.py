"""Grammars under which an answer is a call, or a call follows its tool's schema, in the form of each family.

Written in the dialect of llguidance. A marker that is an added token is named by its id, any other is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from client.base.options import Grammar, json_rule
from client.dialogue.messages import Tool, ToolChoice
from client.dialogue.template import ChatPrompt, ChatTemplate, ToolFamily
from swarm.base.errors import ConfigError

_ANY_OBJECT = {"type": "object"}
_TEXT = r"/(.|\n)*/"
_BLANKS = {"whitespace_flexible": True, "whitespace_pattern": " ?"}
"""A call's arguments may have the blanks that models have learned to write there; others only cost tokens."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family writes calls.

    Attributes:
        head: up to the arguments; `{name}` and `{json_name}` stand for the tool's name.
        trigger: with which calls begin in the middle of a text.
        is_single: whether an answer has one call at most.
    """

    head: str
    tail: str
    first: str = ""
    between: str = ""
    last: str = ""
    trigger: str = ""
    is_single: bool = False


_OBJECT = '{{"name": {json_name}, "arguments": '
_HERMES = CallForm("<tool_call>\n" + _OBJECT, "}}\n</tool_call>", between="\n", trigger="<tool_call>")
_FORMS: dict[ToolFamily, CallForm] = {
    "": _HERMES,
    "hermes": _HERMES,
    "llama3": CallForm('{{"name": {json_name}, "parameters": ', "}}", is_single=True),
    "mistral_json": CallForm(_OBJECT, "}}", "[TOOL_CALLS][", ", ", "]", "[TOOL_CALLS]"),
    "mistral": CallForm("[TOOL_CALLS]{name}[ARGS]", "", trigger="[TOOL_CALLS]"),
    "phi": CallForm(_OBJECT, "}}", "<|tool_call|>[", ", ", "]<|/tool_call|>", "<|tool_call|>"),
    "harmony": CallForm(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", trigger="", is_single=True
    ),
    "deepseek": CallForm(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        *("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>"),
    ),
    "deepseek_v31": CallForm(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        *("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>"),
    ),
    "qwen_xml": CallForm(
        "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", between="\n", trigger="<tool_call>"
    ),
    "glm": CallForm("<tool_call>{name}\n", "</tool_call>", between="\n", trigger="<tool_call>"),
}


def grammar_for(
    template: ChatTemplate,
    prompt: ChatPrompt,
    tools: Sequence[Tool],
    choice: ToolChoice,
    answer: Grammar | None = None,
) -> Grammar | None:
    """What an answer has to match.

    Args:
        tools: that the model was told of.
        choice: whether it must call one of them.
        answer: what the answer's content has to match where it is no call, such as a JSON schema.

    Returns:
        None where any text will do. Thoughts before the answer are free, where the template marks them.

    Raises:
        ConfigError: the answer's schema is no JSON.
    """
    if choice.mode == "required" and tools:
        asked = [tool for tool in tools if choice.name in {"", tool.name}]
        return _Writer(template, prompt).calls(asked, choice)
    if answer is not None:
        return _Writer(template, prompt).content(answer, tools if choice.mode == "auto" else (), choice)
    if choice.mode == "auto" and any(tool.strict for tool in tools):
        return _Writer(template, prompt).free_calls(tools)
    return None


@dataclass(slots=True)
class _Writer:
    template: ChatTemplate
    prompt: ChatPrompt
    rules: list[str] = field(default_factory=list)

    def calls(self, tools: Sequence[Tool], choice: ToolChoice) -> Grammar:
        """Thoughts, then one call or several."""
        return self._grammar(f"{self._thoughts()} {self._some(tools, choice, self._form())}")

    def free_calls(self, tools: Sequence[Tool]) -> Grammar | None:
        """Any text, in which a call follows its tool's schema. None for families whose calls no marker begins."""
        form = self._form()
        if not form.trigger:
            return None
        loose = [tool if tool.strict else replace(tool, parameters=_ANY_OBJECT) for tool in tools]
        one = self._one_of(loose, replace(form, head=form.head.removeprefix(form.trigger)))
        first, more = form.first.removeprefix(form.trigger), f"({self._text(form.between)} {one})*"
        if not form.first:  # every call has its own trigger
            more = ""
        trigger = self._special(form.trigger)
        if trigger is None:
            self.rules.append(f"begin[lazy]: /(.|\\n)*{_escaped(form.trigger)}/")
        else:
            self.rules.append(f"begin: {_TEXT} {trigger}")
        parts = ("begin", self._text(first), one, more, self._text(form.last))
        self.rules += [f"called: {' '.join(filter(None, parts))}", f"rest: {_TEXT}"]
        return self._grammar(f"{self._thoughts()} called* rest")

    def content(self, answer: Grammar, tools: Sequence[Tool], choice: ToolChoice) -> Grammar:
        """Thoughts, then content that matches a grammar, or calls."""
        thoughts = self._thoughts()
        head = self._text("<|channel|>final<|message|>") if self.template.family == "harmony" else ""
        if answer.kind == "lark" or not (thoughts or tools):
            return answer
        self.rules.append(f"content: {head} {_body(answer)}")
        form = self._form()
        if self.template.family == "llama3":  # a call that is told from an answer in JSON
            tag = "<|python_tag|>"
            form, tools = replace(form, first=tag), tools if tag in self.template.added_ids else ()
        self.rules.append(f"said: content | {self._some(tools, choice, form)}" if tools else "said: content")
        return self._grammar(f"{thoughts} said")

    def _some(self, tools: Sequence[Tool], choice: ToolChoice, form: CallForm) -> str:
        one = self._one_of(tools, form)
        more = f"({self._text(form.between)} {one})*" if choice.parallel and not form.is_single else ""
        return " ".join(filter(None, (self._text(form.first), one, more, self._text(form.last))))

    def _form(self) -> CallForm:
        return _FORMS[self.template.family]

    def _one_of(self, tools: Sequence[Tool], form: CallForm) -> str:
        for place, tool in enumerate(tools):
            head = form.head.format(name=tool.name, json_name=json.dumps(tool.name))
            parts = (self._text(head), self._arguments(place, tool), self._text(form.tail.format()))
            self.rules.append(f"call_{place}: {' '.join(filter(None, parts))}")
        return f"({' | '.join(f'call_{place}' for place in range(len(tools)))})"

    def _arguments(self, place: int, tool: Tool) -> str:
        if self.template.family in {"qwen_xml", "glm"} and isinstance(tool.parameters.get("properties"), Mapping):
            return self._tagged(place, tool)
        if self.template.family in {"qwen_xml", "glm"}:
            return ""
        schema = {"type": "object", **tool.parameters}
        self.rules.append(f"arguments_{place}: {_json(schema)}")
        return f"arguments_{place}"

    def _tagged(self, place: int, tool: Tool) -> str:
        """Arguments between tags, in the schema's order; those that are not required may be left out."""
        required = tool.parameters.get("required", ())
        parts = []
        for number, (key, schema) in enumerate(tool.parameters["properties"].items()):
            name = f"argument_{place}_{number}"
            before, behind = f"<parameter={key}>\n", "\n</parameter>\n"
            if self.template.family == "glm":
                before, behind = f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"
            self.rules.append(f"{name}: {self._text(before)} {self._value(name, schema, tool, behind)}")
            parts.append(name if key in required else f"{name}?")
        return " ".join(parts)

    def _value(self, name: str, schema: object, tool: Tool, behind: str) -> str:
        schema = dict(schema) if isinstance(schema, Mapping) else {}
        if schema.get("type") != "string":
            definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
            self.rules.append(f"{name}_value: {_json({**schema, **definitions})}")
            return f"{name}_value {self._text(behind)}"
        if isinstance(choices := schema.get("enum"), Sequence):
            return f"({' | '.join(json.dumps(str(choice)) for choice in choices)}) {self._text(behind)}"
        return self._free_until(f"{name}_value", behind)

    def _free_until(self, name: str, end: str) -> str:
        """A rule for any text up to a marker, which may be a special token."""
        special = self._special(end.strip())
        if special is None:
            self.rules.append(f"{name}[lazy]: /(.|\\n)*{_escaped(end)}/")
            return name
        self.rules.append(f"{name}: {_TEXT}")
        return f"{name} {self._text(end)}"

    def _thoughts(self) -> str:
        """Thoughts that come first, if the model thinks."""
        if self.template.family == "harmony":
            start = self._text("<|channel|>analysis<|message|>")
            end = self._text("<|end|><|start|>assistant")
            self.rules.append(f"thoughts: {start} {_TEXT} {end}")
            return "thoughts?"
        if self.template.thinking is None:
            return ""
        if self.prompt.closes_reasoning:
            return "/\\n{0,2}/"
        start, end = self.template.thinking
        inner = self._free_until("inner", end)
        space = r"/[ \n]{0,4}/"
        if self.prompt.opens_reasoning:
            self.rules.append(f"thoughts: {inner} {space}")
            return "thoughts"
        self.rules.append(f"thoughts: {space} {self._text(start)} {inner} {space}")
        return "thoughts?"

    def _text(self, text: str) -> str:
        """A text as a grammar has it: special tokens by their ids, the rest in quotes."""
        special = self.template.added_ids
        if not text:
            return ""
        pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        parts = re.split(f"({pattern})", text)
        return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)

    def _special(self, text: str) -> str | None:
        """A special token as a grammar has it; None where the text is none."""
        number = self.template.added_ids.get(text)
        return None if number is None else f"<[{number}]>"

    def _grammar(self, start: str) -> Grammar:
        return Grammar("lark", "\n".join(["%llguidance {}", f"start: {start.strip()}", *self.rules, ""]))


def _body(answer: Grammar) -> str:
    """A grammar as a part of another.

    Raises:
        ConfigError: a schema is no JSON.
    """
    if answer.kind == "regex":
        return "/" + re.sub(r"(?<!\\)/", r"\\/", answer.text) + "/"
    try:
        schema = _ANY_OBJECT if answer.kind == "json" else json.loads(answer.text)
    except ValueError:
        raise ConfigError("grammar: the JSON schema is no JSON") from None
    return json_rule(schema)


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/").replace("\\<", "<").replace("\\>", ">")


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _BLANKS})}"
