"""From a conversation to a prompt's token ids, by the model's chat template or a plain stand-in."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal
from weakref import finalize

from transformers import PreTrainedTokenizerFast

from client.base.options import check_text
from client.dialogue.encoding import ControlTokens, Json, Marks
from client.dialogue.messages import Message, Tool, ToolCall
from client.dialogue.rendering import TemplateRenderer, rendered
from swarm.base.errors import ConfigError

ToolFamily = Literal[
    "", "hermes", "qwen_xml", "llama3", "mistral_json", "mistral", "phi", "harmony", "deepseek", "deepseek_v31", "glm"
]
"""Empty where a template knows no tools; such a model is told of them in the form of Hermes."""

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""What stands around thoughts: the first pair whose end the template names is its own."""

MARKERS: dict[ToolFamily, tuple[str, ...]] = {
    "": ("<tool_call>", "</tool_call>"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen_xml": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral_json": ("[TOOL_CALLS]",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "phi": ("<|tool_call|>", "<|/tool_call|>"),
    "harmony": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    "deepseek": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
}
"""Per family, the tokens that its parser must see, also where decoding drops special ones."""


def family_of(template: str) -> ToolFamily:
    """The family whose markers a chat template writes."""
    if "<|channel|>" in template:
        return "harmony"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek" if "```json" in template else "deepseek_v31"
    if "[TOOL_CALLS]" in template:
        return "mistral" if "[ARGS]" in template else "mistral_json"
    if "<|tool_call|>" in template:
        return "phi"
    if "<arg_key>" in template:
        return "glm"
    if "<function=" in template:
        return "qwen_xml"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3"
    return ""


def thinking_of(template: str) -> tuple[str, str] | None:
    """What stands around thoughts under a chat template; None where it marks none, or marks them by channels."""
    if "<|channel|>" in template:
        return None
    return next((pair for pair in THINKING if pair[1] in template), None)


TemplateDict = dict[str, Any]

HERMES_INTRODUCTION = (
    "You may call functions to help with the user's query. Each line between <tools> and </tools> describes one:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "For each call, write a JSON object with the function's name and its arguments between <tool_call> and "
    "</tool_call>:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{"the argument": "its value"}}}}\n</tool_call>'
)
"""For a model whose template shows no tools."""
DEEPSEEK_INTRODUCTION = (
    "## Tools\nYou have access to the following tools, each a JSON object:\n\n{tools}\n\n"
    "To call tools, write exactly this, with the arguments as a JSON object:\n{example}"
)
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>the name\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
_DEEPSEEK_V31_CALL = "<｜tool▁call▁begin｜>the name<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def alternating(messages: Sequence[Message]) -> list[Message]:
    """The conversation for a strict template: one system message at its beginning, then turns of changing speakers.

    A later system message is said by the user.
    """
    out: list[Message] = []
    for message in messages:
        if message.role == "system" and any(earlier.role != "system" for earlier in out):
            message = replace(message, role="user")
        last = out[-1] if out else None
        if last is None or last.role != message.role or message.role == "tool" or last.tool_calls:
            out.append(message)
            continue
        parts = (last.content, message.content), (last.reasoning, message.reasoning)
        content, reasoning = ("\n\n".join(filter(None, part)) for part in parts)
        out[-1] = replace(message, content=content, reasoning=reasoning)
    return out


def tool_dicts(tools: Sequence[Tool]) -> list[TemplateDict]:
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": _plain(tool.parameters)},
        }
        for tool in tools
    ]


def message_dicts(
    messages: Sequence[Message], *, as_text: bool, call_id: Callable[[str], str] = str
) -> list[TemplateDict]:
    """Messages as templates expect them.

    Args:
        as_text: whether a call's arguments are its JSON text; else the object that it stands for.
        call_id: gives a call's id in the form that the template wants.
    """
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_message_dict(message, names, as_text=as_text, call_id=call_id) for message in messages]


def nine_characters(call_id: str) -> str:
    """A call's id as Mistral's templates want it: nine letters and digits."""
    if len(call_id) == len("abcdefghi") and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def with_thoughts_apart(messages: Sequence[Message], marks: tuple[str, str]) -> list[Message]:
    """The conversation with thoughts that stand in an assistant's content, as some clients send them, apart from it."""
    start, end = marks
    out = []
    for message in messages:
        text = message.content.lstrip()
        if message.role == "assistant" and not message.reasoning and text.startswith(start) and end in text:
            thoughts, _, content = text.removeprefix(start).partition(end)
            message = replace(message, reasoning=thoughts.strip(), content=content.lstrip())
        out.append(message)
    return out


def without_lost_thoughts(messages: Sequence[Message]) -> list[Message]:
    """The conversation for GPT-OSS, whose template takes a call with thoughts or with content, and not with both."""
    return [
        replace(message, reasoning="") if message.tool_calls and message.content else message for message in messages
    ]


def with_tools_in_system(messages: Sequence[TemplateDict], tools: Sequence[TemplateDict]) -> list[TemplateDict]:
    """The conversation for a template that reads tools from its system's message, as JSON text."""
    text = json.dumps(list(tools), ensure_ascii=False)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def without_calls(messages: Sequence[Message]) -> list[Message]:
    """The conversation for a template that knows neither calls nor results: both are written as Hermes does."""
    out: list[Message] = []
    is_result = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if is_result:
                out[-1] = replace(out[-1], content=f"{out[-1].content}\n{text}")
            else:
                out.append(Message("user", text))
            is_result = True
            continue
        is_result = False
        if message.tool_calls:
            calls = [_hermes_call(call) for call in message.tool_calls]
            message = replace(message, content="\n".join(filter(None, [message.content, *calls])), tool_calls=())
        out.append(message)
    return out


def introduced(messages: Sequence[TemplateDict], text: str) -> list[TemplateDict]:
    """The conversation with a text of ours at the end of the system's message."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def introduction(tools: Sequence[TemplateDict], family: ToolFamily) -> str:
    """What a model is told of tools that its template does not show."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if family in {"deepseek", "deepseek_v31"}:
        call = _DEEPSEEK_CALL if family == "deepseek" else _DEEPSEEK_V31_CALL
        call = call.format(arguments='{"the argument": "its value"}')
        return DEEPSEEK_INTRODUCTION.format(tools=lines, example=f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>")
    return HERMES_INTRODUCTION.format(tools=lines)


def _message_dict(
    message: Message, names: Mapping[str, str], *, as_text: bool, call_id: Callable[[str], str]
) -> TemplateDict:
    made: TemplateDict = {"role": message.role, "content": message.content}
    name = message.name or names.get(message.tool_call_id, "")
    if name:
        made["name"] = name
    if message.role == "tool" and message.tool_call_id:
        made["tool_call_id"] = call_id(message.tool_call_id)
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "type": "function",
                "id": call_id(call.id),
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if as_text else _arguments(call),
                },
            }
            for call in message.tool_calls
        ]
    return made


def _arguments(call: ToolCall) -> TemplateDict:
    """The object that arguments stand for.

    Raises:
        ConfigError: they stand for none.
    """
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"messages: the arguments of the call {call.name!r} are no JSON object")
    return dict(value)


def _hermes_call(call: ToolCall) -> str:
    arguments = call.arguments.strip() or "{}"
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n</tool_call>'


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


TRANSCRIPT = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}"
    "{{ '\n\n' if not loop.last or add_generation_prompt else '' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For a model without a template: the conversation written down as a play."""
_TOOLS = re.compile(r"\btools\b")
_TOOLS_IN_MESSAGE = re.compile(r"\bmessage(\.|\[['\"])tools\b")
_PROBE = Tool("probe_of_a_tool", "", {})
TRANSCRIPT_STOP = ("\nUser:", "\nSystem:")
"""Where a model that goes on writing the play begins the next line of its user."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it.

    Attributes:
        opens_reasoning: whether it ends with the mark after which the model thinks.
        closes_reasoning: whether it ends with the mark behind which it answers, so that it does not think.
    """

    tokens: tuple[int, ...]
    opens_reasoning: bool = False
    closes_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class PromptSwitches:
    """How a conversation becomes a prompt.

    Attributes:
        reasoning: whether to think first, where the template knows a switch; None leaves it to the model.
        continues: whether the last message is the assistant's own beginning, which the answer goes on with.
    """

    reasoning: bool | None = None
    continues: bool = False


DEFAULT_SWITCHES = PromptSwitches()


class ChatTemplate:
    """The chat template of one tokenizer.

    Attributes:
        has_template: whether the model brings one; without it turns are joined as a plain transcript.
        family: in which form the template writes tool calls; empty when it knows none.
        thinking: what stands around thoughts; None where the template marks none so.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._renderer = TemplateRenderer()
        finalize(self, self._renderer.close)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        source = self._source(with_tools=True)
        self.family: ToolFamily = family_of(source) if self.has_template else ""
        self.thinking = thinking_of(source) if self.has_template else None

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer, beside the model's own ends of text."""
        return () if self.has_template else TRANSCRIPT_STOP

    def markers(self, *, with_tools: bool) -> tuple[str, ...]:
        """Special tokens that the text of an answer has to show, so that it can be parsed into its parts."""
        wanted = {*(self.thinking or ()), *(MARKERS[self.family] if with_tools or self.family == "harmony" else ())}
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple(token.content for token in added if token.special and token.content in wanted)

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """The ids of the tokenizer's added tokens, special or not."""
        return {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template tells the model which tools there are."""
        source = self._source(with_tools=True)
        if not self.has_template or _TOOLS.search(source) is None:
            return False
        if _TOOLS_IN_MESSAGE.search(source):
            return True
        messages = message_dicts([Message("user", "x")], as_text=False)
        try:
            return _PROBE.name in self._render(messages, tool_dicts([_PROBE]), DEFAULT_SWITCHES, source)
        except ConfigError:  # it wants another conversation than this
            return True

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), switches: PromptSwitches = DEFAULT_SWITCHES
    ) -> ChatPrompt:
        """The tokens after which the assistant speaks next.

        Content, names and arguments are plain text, also where they look like control tokens. A template writes its own
        beginning of text, so the tokenizer adds none to it.

        Args:
            messages: so far, the system's first if there is one.
            tools: that the model is told of.

        Raises:
            ConfigError: the template does not take these messages, such as a system message where it knows none, or
                they are not valid text.
        """
        try:
            return self._prompt(list(messages), tools, switches)
        except ConfigError:  # agents send several system messages, late ones, and turns of one speaker in a row
            plain = alternating(messages)
            if plain == list(messages):
                raise
            return self._prompt(plain, tools, switches)

    def _prompt(self, messages: list[Message], tools: Sequence[Tool], switches: PromptSwitches) -> ChatPrompt:
        if self.thinking is not None and not switches.continues:
            messages = with_thoughts_apart(messages, self.thinking)
        if self.family == "harmony":
            messages = without_lost_thoughts(messages)
        if not self.family and not self.shows_tools:
            messages = without_calls(messages)
        source, offered = self._source(with_tools=bool(tools)), tool_dicts(tools)
        call_id = nine_characters if self.family.startswith("mistral") else str
        given = message_dicts(messages, as_text=self._wants_text, call_id=call_id)
        marks = Marks.beside([given, offered])
        control = self._control(source)
        values, shown = control.mark(given, marks), control.mark(offered, marks)
        if tools and not self.shows_tools:
            values, shown = introduced(values, introduction(shown, self.family)), []
        elif tools and _TOOLS_IN_MESSAGE.search(source):
            values = with_tools_in_system(values, shown)
        text = self._render(values, shown or None, switches, source)
        tokens = tuple(control.encode(text, marks, begins=not self.has_template))
        if self.thinking is None:
            return ChatPrompt(tokens)
        is_open, is_closed = (text.rstrip().endswith(mark) for mark in self.thinking)
        return ChatPrompt(tokens, is_open, is_closed)

    @property
    def _wants_text(self) -> bool:
        return self.family in {"deepseek", "deepseek_v31"}

    def _source(self, *, with_tools: bool) -> str:
        """The template's text; some models bring one for conversations with tools and one for those without."""
        if not self.has_template:
            return TRANSCRIPT
        template = self.tokenizer.chat_template
        if isinstance(template, dict):
            names = ("tool_use", "default") if with_tools else ("default", "tool_use")
            found = next((template[name] for name in names if name in template), None)
            return str(next(iter(template.values())) if found is None else found)
        return str(template)

    def _control(self, source: str) -> ControlTokens:
        if source not in self._controls:
            self._controls[source] = ControlTokens(self.tokenizer, source)
        return self._controls[source]

    @cached_property
    def _controls(self) -> dict[str, ControlTokens]:
        return {}

    def _render(self, messages: Json, tools: Json, switches: PromptSwitches, source: str) -> str:
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values = {
            **self.tokenizer.special_tokens_map,
            **_reasoning_switches(source, switches.reasoning),
            "conversations": [given],
            "tools": tools,
            "add_generation_prompt": not switches.continues,
            "continue_final_message": switches.continues,
        }
        if not given:
            raise ConfigError("this model's chat template does not take this conversation: it is empty")
        render = self._renderer.render if self.has_template else rendered
        return check_text(render(source, values), "prompt")


def _reasoning_switches(source: str, reasoning: bool | None) -> dict[str, Any]:
    """The variables by which a template is told whether the model thinks first."""
    if reasoning is None:
        return {}
    values = {"enable_thinking": reasoning, "thinking": reasoning, "reasoning_effort": "medium" if reasoning else "low"}
    return {name: value for name, value in values.items() if re.search(rf"(?<![\w.'\"]){name}\b(?!['\"])", source)}
