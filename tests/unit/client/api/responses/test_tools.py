"""Tools of the Responses API: how they are declared, offered, called and read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from client.api.errors import ApiError
from client.api.request_fields import LeftOut
from client.api.responses.tools import AnyToolSpec, DeclaredTool, InputReader, OfferedTools, read_tools
from client.dialogue.messages import Tool, ToolChoice

SPECS: TypeAdapter[list[AnyToolSpec]] = TypeAdapter(list[AnyToolSpec])
LOOK = {"type": "function", "name": "look", "description": "around", "parameters": {"type": "object"}, "strict": True}
SHIP = {
    "type": "namespace",
    "name": "ship",
    "description": "of ours",
    "tools": [LOOK, {"type": "custom", "name": "log"}],
}


def offered(*specs: dict[str, Any], choice: Any = None) -> OfferedTools:  # noqa: ANN401
    return read_tools(SPECS.validate_python(list(specs)), choice, parallel=True, left_out=LeftOut())


def test_a_namespace_s_tools_have_both_names() -> None:
    tools = offered(LOOK, SHIP)
    assert [tool.name for tool in tools.tools] == ["look", "ship__look", "ship__log"]
    assert tools.tools[0] == Tool("look", "around", {"type": "object"}, strict=True)
    assert tools.declared["ship__look"] == DeclaredTool("look", "ship")
    assert tools.declared["ship__log"] == DeclaredTool("log", "ship", is_custom=True)
    assert list(tools.echo) == [LOOK, SHIP]


def test_the_last_declaration_of_a_name_counts() -> None:
    tools = offered(LOOK, {**LOOK, "description": "again"})
    assert [tool.description for tool in tools.tools] == ["again"]


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "look"}, "look"),
        ({"type": "function", "name": "look", "namespace": "ship"}, "ship__look"),
        ({"type": "function", "name": "ship__look"}, "ship__look"),
        ({"type": "custom", "name": "log"}, "ship__log"),
    ],
)
def test_a_choice_finds_its_tool(choice: dict[str, str], name: str) -> None:
    assert offered(LOOK, SHIP, choice=choice).choice == ToolChoice("required", name)


def test_a_choice_of_what_is_not_there_is_refused() -> None:
    with pytest.raises(ApiError, match="not found"):
        offered(SHIP, choice={"type": "function", "name": "look", "namespace": "boat"})


def test_a_custom_tool_s_expression_holds_for_its_text() -> None:
    spec = {"type": "custom", "name": "at", "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
    (tool,) = offered(spec).tools
    assert tool.strict
    assert tool.parameters["properties"]["input"]["pattern"] == "^(?:a|b)$"


@pytest.mark.parametrize(
    ("definition", "holds"),
    [('start: "+" /(.*)/ LF\n%import common.LF', True), ('start: "(" start? ")"', False)],
)
def test_a_custom_tool_s_grammar_holds_where_it_is_regular(definition: str, holds: bool) -> None:
    given = {"type": "grammar", "syntax": "lark", "definition": definition}
    (tool,) = offered({"type": "custom", "name": "edit", "format": given}).tools
    text = tool.parameters["properties"]["input"]
    assert definition in text["description"]
    assert (tool.strict, "pattern" in text) == (holds, holds)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b\\" \\\\ \\u00e9cu \\ud83d\\ude00"}', 'a\n"b" \\ écu 😀'),
        (' { "input" : "a\nb" } ', "a\nb"),
        ('{"other": "a"}', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ("plain words", "plain words"),
        ('{"input": "cut', "cut"),
        ('{"input": "half \\ud83d"}', "half \ufffd"),
        ('{"more": 1, "input": "a"}', "a"),
        ('"a"', '"a"'),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1_000])
def test_a_text_is_read_out_of_arguments(arguments: str, text: str, size: int) -> None:
    reader = InputReader()
    pieces = [reader.push(arguments[start : start + size]) for start in range(0, len(arguments), size)]
    assert "".join(pieces) + reader.finish() == text
    json.dumps(text).encode()


def test_a_text_streams() -> None:
    reader = InputReader()
    assert [reader.push(piece) for piece in ('{"input": "', "on", "e\\", "ntwo", '"}')] == ["", "on", "e", "\ntwo", ""]
    assert reader.finish() == ""
