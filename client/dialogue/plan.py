"""Everything that one answer of a conversation needs: the prompt, what may be generated, and how it is read."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from client.base.options import Grammar
from client.dialogue.calls import (
    DeepSeekParser,
    GlmParser,
    HarmonyParser,
    LlamaParser,
    MarkedJsonParser,
    MistralParser,
    QwenXmlParser,
)
from client.dialogue.forcing import grammar_for
from client.dialogue.messages import Message, Tool, ToolChoice
from client.dialogue.parsing import AnswerParser, ContentParser, ReasoningParser, new_call_id
from client.dialogue.template import DEFAULT_SWITCHES, ChatPrompt, ChatTemplate, PromptSwitches
from swarm.base.errors import ConfigError

_NINE = string.ascii_letters + string.digits


def parser_for(
    template: ChatTemplate, prompt: ChatPrompt, tools: Sequence[Tool] = (), new_id: Callable[[], str] | None = None
) -> AnswerParser:
    """A parser for the answer to a prompt.

    Args:
        tools: that the model was told of; without any, nothing is a call.
        new_id: gives each call an id, by default a random one in the form that the family wants.
    """
    if template.family == "harmony":
        return HarmonyParser(new_id or new_call_id)
    parser = _calls_parser(template, tools, new_id) if tools else ContentParser()
    if template.thinking is None:
        return parser
    return ReasoningParser(parser, template.thinking, is_open=prompt.opens_reasoning)


def _calls_parser(template: ChatTemplate, tools: Sequence[Tool], new_id: Callable[[], str] | None) -> AnswerParser:
    make_id = new_id or new_call_id
    match template.family:
        case "mistral" | "mistral_json":
            return MistralParser(new_id or _nine_characters)
        case "llama3":
            return LlamaParser(make_id, {tool.name for tool in tools})
        case "phi":
            return MarkedJsonParser(make_id, "<|tool_call|>", "<|/tool_call|>")
        case "deepseek" | "deepseek_v31":
            return DeepSeekParser(make_id)
        case "qwen_xml":
            return QwenXmlParser(make_id, tools)
        case "glm":
            return GlmParser(make_id, tools)
    return MarkedJsonParser(make_id, "<tool_call>", "</tool_call>")


def _nine_characters() -> str:
    return "".join(secrets.choice(_NINE) for _ in range(9))


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """What is asked of a model in a conversation.

    Attributes:
        messages: so far, the system's first if there is one.
        choice: whether they may or must be; with `none` the model is not told of them.
        grammar: what the answer's content has to match where it is no call.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    switches: PromptSwitches = DEFAULT_SWITCHES
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How a model is made to answer.

    Attributes:
        parser: of the answer's text, for this one answer.
        stop: strings that end the answer, beside the caller's own.
        show: special tokens that the text must show, so that the parser sees them: the option `show`.
        grammar: what the whole text has to match: the option `grammar`.
    """

    tokens: tuple[int, ...]
    parser: AnswerParser
    stop: tuple[str, ...]
    show: tuple[str, ...]
    grammar: Grammar | None


def plan_answer(template: ChatTemplate, request: AnswerRequest, new_id: Callable[[], str] | None = None) -> AnswerPlan:
    """Plan one answer; `new_id` gives each of its calls an id, by default a random one.

    Raises:
        ConfigError: the template does not take the messages, or a tool is wanted that there is not.
    """
    choice = request.choice
    tools = () if choice.mode == "none" else tuple(request.tools)
    if choice.mode == "required" and choice.name and choice.name not in {tool.name for tool in tools}:
        raise ConfigError(f"tool_choice: there is no tool {choice.name!r}")
    if choice.mode == "required" and not tools:
        raise ConfigError("tool_choice: a call is required, and there are no tools")
    prompt = template.prompt(request.messages, tools, request.switches)
    return AnswerPlan(
        tokens=prompt.tokens,
        parser=parser_for(template, prompt, tools, new_id),
        stop=template.stop,
        show=template.markers(with_tools=bool(tools)),
        grammar=grammar_for(template, prompt, tools, choice, request.grammar),
    )
