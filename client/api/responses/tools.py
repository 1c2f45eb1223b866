"""Tools of the Responses API as tools of a conversation, and their calls in the form in which they were declared.

A model knows functions alone. A custom tool is a function whose one argument is its text; a tool of a namespace has
both names in one. Tools that would run at the server are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from client.api.errors import invalid, unsupported
from client.api.json_text import JsonObject
from client.api.openai.chat import ToolName
from client.api.openai.fields import ApiModel
from client.api.request_fields import LeftOut
from client.dialogue.messages import Tool, ToolCall, ToolChoice

MAX_EXPRESSION: Final = 16_384
"""Characters of an expression; rules that name each other twice double it with each step."""
_TOKEN: Final = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|->[ ]*\w+)
    |(?P<string>"(?:[^"\\\n]|\\.)*")(?P<flag>i?)
    |/(?P<regex>(?:[^/\\\n]|\\.)+)/(?P<flags>[a-z]*)
    |%import[ ]+common\.(?P<common>\w+)(?=\s|$)
    |(?P<rule>[?!]?[a-z_]\w*|_?[A-Z]\w*)[ \t]*:
    |(?P<name>[A-Za-z_]\w*)
    |(?P<times>~[ ]*\d+(?:[ ]*\.\.[ ]*\d+)?|\{\d*,?\d*\})
    |(?P<sign>[|()\[\]*+?])""",
    re.VERBOSE,
)
_SIGNS: Final = {"(": "(?:", "[": "(?:", "]": ")?"}
_COMMON: Final = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
_NOT_REGULAR: Final = re.compile(r"\(\?(?!:)|\\[bBAzZ1-9]|\$|(?<!\[)\^")
"""What engines for whole texts have not: looking around, anchors, references."""


def expression_of(grammar: str) -> str | None:
    """The expression that matches the texts of a grammar; None where there is none, or it is too long."""
    try:
        return _LarkRules(dict(_COMMON), grammar).expression("start")
    except (_NotRegularError, RecursionError):
        return None


class _NotRegularError(Exception):
    """A grammar that no expression of a bounded length stands for."""


class _LarkRules:
    """The rules of one grammar, each as an expression once it was wanted."""

    def __init__(self, common: Mapping[str, str], grammar: str) -> None:
        self._known: dict[str, str] = {}
        self._bodies: dict[str, list[re.Match[str]]] = {}
        self._open: set[str] = set()
        body: list[re.Match[str]] = []
        for token in _tokens(grammar):
            if (name := token["rule"]) is not None:
                body = self._bodies[name.lstrip("?!")] = []
            elif (name := token["common"]) is not None:
                if name not in common:
                    raise _NotRegularError
                self._known[name] = common[name]
            else:
                body.append(token)

    def expression(self, name: str) -> str:
        if name not in self._known:
            if name in self._open or name not in self._bodies:
                raise _NotRegularError
            self._open.add(name)
            self._known[name] = self._joined(self._bodies[name])
            self._open.remove(name)
        return self._known[name]

    def _joined(self, body: Sequence[re.Match[str]]) -> str:
        parts, size = [], 0
        for token in body:
            parts.append(self._part(token))
            size += len(parts[-1])
            if size > MAX_EXPRESSION:
                raise _NotRegularError
        return "".join(parts)

    def _part(self, token: re.Match[str]) -> str:
        if token["string"] is not None:
            return _grouped(_literal(token["string"][1:-1]), token["flag"])
        if token["regex"] is not None:
            if _NOT_REGULAR.search(token["regex"]) or token["flags"] not in {"", "i", "s", "is", "si"}:
                raise _NotRegularError
            return _grouped(token["regex"].replace("\\/", "/"), token["flags"])
        if token["name"] is not None:
            return _grouped(self.expression(token["name"]))
        if token["times"] is not None:
            return "{" + re.sub(r"[~{} ]", "", token["times"]).replace("..", ",") + "}"
        return _SIGNS.get(token["sign"], token["sign"])


def _tokens(grammar: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(grammar):
        token = _TOKEN.match(grammar, place)
        if token is None:
            raise _NotRegularError
        place = token.end()
        if token["skip"] is None:
            yield token


def _grouped(expression: str, flags: str = "") -> str:
    return f"(?{flags}:{expression})"


def _literal(text: str) -> str:
    """A string of Lark as an expression for itself."""
    escapes = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
    plain = re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), text)
    if re.search(r"\\[xuU]", text):
        raise _NotRegularError
    return (
        re.sub(r"([\\.+*?()|\[\]{}^$/-])", r"\\\1", plain)
        .replace("\n", "\\n")
        .replace("\t", "\\t")
        .replace("\r", "\\r")
    )


INPUT: Final = "input"
"""The one argument of a custom tool."""
NAME_JOINT: Final = "__"
"""Stands between a namespace and a name in the name that the model knows."""


class FunctionSpec(ApiModel):
    """A function of the client."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(ApiModel):
    """What the text of a custom tool looks like."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomSpec(ApiModel):
    """A tool of the client that takes a text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: InputFormat | None = None


class OtherSpec(ApiModel):
    """A tool that would run at the server."""

    type: str = Field(examples=["web_search"])


def _arm(value: object) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return {"function": "Function", "custom": "Custom", "namespace": "Namespace"}.get(str(kind), "Other")


ClientSpec = Annotated[
    Annotated[FunctionSpec, Tag("Function")]
    | Annotated[CustomSpec, Tag("Custom")]
    | Annotated[OtherSpec, Tag("Other")],
    Discriminator(_arm),
]


class NamespaceSpec(ApiModel):
    """Tools of the client under one name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[ClientSpec]


AnyToolSpec = Annotated[
    Annotated[FunctionSpec, Tag("Function")]
    | Annotated[CustomSpec, Tag("Custom")]
    | Annotated[NamespaceSpec, Tag("Namespace")]
    | Annotated[OtherSpec, Tag("Other")],
    Discriminator(_arm),
]


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """How a tool was declared."""

    name: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """What the model is told of."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    declared: Mapping[str, DeclaredTool] = field(default_factory=dict)
    echo: tuple[JsonObject, ...] = ()


def model_name(name: str, namespace: str | None) -> str:
    return f"{namespace}{NAME_JOINT}{name}" if namespace else name


def custom_call(call_id: str, name: str, text: str) -> ToolCall:
    """A call of a custom tool as one of a function."""
    return ToolCall(call_id, name, json.dumps({INPUT: text}, ensure_ascii=False))


def read_tools(
    specs: Sequence[AnyToolSpec], choice: str | Mapping[str, Any] | None, *, parallel: bool, left_out: LeftOut
) -> OfferedTools:
    """The tools that may be called, and whether they must be.

    Args:
        choice: `tool_choice`.
        parallel: whether an answer may have several calls.
        left_out: takes what is not offered.

    Raises:
        ApiError: the choice wants a tool that is not there.
    """
    tools: dict[str, Tool] = {}
    declared: dict[str, DeclaredTool] = {}
    echo: list[JsonObject] = []
    for spec in specs:
        shown = []
        for member, namespace in _members(spec):
            if isinstance(member, OtherSpec):
                left_out.tool(member.type)
                continue
            is_custom = isinstance(member, CustomSpec)
            tool = _custom(member, namespace) if isinstance(member, CustomSpec) else _function(member, namespace)
            tools[tool.name] = tool  # the last of one name counts
            declared[tool.name] = DeclaredTool(member.name, namespace, is_custom)
            shown.append(_echo(member))
        echo += [{**_echo(spec), "tools": shown}] if isinstance(spec, NamespaceSpec) else shown
    offered, asked = _chosen(tuple(tools.values()), declared, choice, parallel)
    return OfferedTools(offered, asked, declared, tuple(echo))


def _members(spec: AnyToolSpec) -> Iterator[tuple[FunctionSpec | CustomSpec | OtherSpec, str]]:
    if isinstance(spec, NamespaceSpec):
        yield from ((member, spec.name) for member in spec.tools)
    else:
        yield spec, ""


def _function(spec: FunctionSpec, namespace: str) -> Tool:
    name = model_name(spec.name, namespace)
    return Tool(name, spec.description or "", spec.parameters or {}, bool(spec.strict))


def _custom(spec: CustomSpec, namespace: str) -> Tool:
    """A function with a text, which follows its grammar; one that is not regular is only told to the model."""
    text: JsonObject = {"type": "string", "description": "The whole input, as plain text."}
    is_strict = False
    if spec.format is not None and spec.format.type == "grammar":
        definition = spec.format.definition or ""
        expression: str | None = definition
        if spec.format.syntax != "regex":
            text["description"] += f" It follows this grammar, in Lark's syntax:\n{definition}"
            expression = expression_of(definition)
        if expression is not None:
            text["pattern"] = f"^(?:{expression})$"
        is_strict = expression is not None
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return Tool(model_name(spec.name, namespace), spec.description or "", schema, is_strict)


def _echo(spec: ApiModel) -> JsonObject:
    shown = spec.model_dump(exclude={"tools"})
    if isinstance(spec, FunctionSpec):
        described = {"description": spec.description or None, "parameters": spec.parameters or {}}
        return {**shown, **described, "strict": bool(spec.strict)}
    return {name: value for name, value in shown.items() if value is not None}


def _chosen(
    tools: tuple[Tool, ...],
    declared: Mapping[str, DeclaredTool],
    choice: str | Mapping[str, Any] | None,
    parallel: bool,
) -> tuple[tuple[Tool, ...], ToolChoice]:
    match choice:
        case None:
            return tools, ToolChoice(parallel=parallel)
        case "none" | "auto" | "required" as mode:
            if mode == "required" and not tools:
                raise invalid("Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
            return tools, ToolChoice(mode, parallel=parallel)
        case {"type": "function" | "custom"}:
            return tools, ToolChoice("required", _named(choice, declared), parallel)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = [_named(entry, declared) for entry in allowed if mode == "required" or _is_ours(entry)]
            return tuple(tool for tool in tools if tool.name in names), ToolChoice(mode, parallel=parallel)
        case _:
            words = "This choice of tools is not supported; functions, custom tools and allowed_tools are."
            raise unsupported("tool_choice", words)


def _is_ours(entry: object) -> bool:
    return isinstance(entry, Mapping) and entry.get("type") in {"function", "custom"}


def _named(entry: object, declared: Mapping[str, DeclaredTool]) -> str:
    """The name that the model knows, of the tool that an entry names.

    Raises:
        ApiError: it is no tool of the client, or is not there.
    """
    match entry:
        case {"type": "function" | "custom", "name": str(name), **more}:
            namespace = more.get("namespace")
            for known, tool in declared.items():
                if (known == name and not namespace) or (tool.name == name and namespace in (None, tool.namespace)):
                    return known
            raise invalid(f"Tool choice 'function' not found in 'tools' parameter: {name[:100]}.", "tool_choice")
        case _:
            raise unsupported("tool_choice.tools", "Only functions and custom tools are supported.")


_HEAD: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WHOLE_CHARACTERS: Final = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB]..\\u[dD][c-fC-F][0-9a-fA-F]{2})+'
)


class InputReader:
    """The text of a custom tool out of the arguments of its call, whose JSON comes in pieces."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._rest = ""
        self._has_begun = False
        self._said = ""

    def push(self, arguments: str) -> str:
        """Take more of the JSON; returns what it adds to the text."""
        self._pieces.append(arguments)
        self._rest += arguments
        if not self._has_begun:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._has_begun = True
            self._rest = self._rest[head.end() :]
        found = _WHOLE_CHARACTERS.match(self._rest)
        if found is None:
            return ""
        self._rest = self._rest[found.end() :]
        try:
            text = str(json.loads(f'"{found[0]}"', strict=False))
        except ValueError:
            return ""
        self._said += text
        return text

    def finish(self) -> str:
        """The JSON has ended; returns the end of the text. What is no object with the text is the text itself."""
        text = self._whole()
        return text.removeprefix(self._said) if text.startswith(self._said) else ""

    def _whole(self) -> str:
        arguments = "".join(self._pieces)
        try:
            value = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return self._said or arguments
        texts = [entry for entry in value.values() if isinstance(entry, str)] if isinstance(value, dict) else []
        given = value.get(INPUT) if isinstance(value, dict) else None
        text = given if isinstance(given, str) else texts[0] if len(texts) == 1 else arguments
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
