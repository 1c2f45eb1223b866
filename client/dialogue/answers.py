"""The parser of an answer, by the family of its model's template."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence

from client.dialogue.deepseek_calls import DeepSeekParser
from client.dialogue.harmony import HarmonyParser
from client.dialogue.json_calls import LlamaParser, MarkedJsonParser, MistralParser
from client.dialogue.messages import Tool
from client.dialogue.parsing import AnswerParser, ContentParser, ReasoningParser, new_call_id
from client.dialogue.template import ChatPrompt, ChatTemplate
from client.dialogue.xml_calls import GlmParser, QwenXmlParser

_NINE = string.ascii_letters + string.digits


def parser_for(
    template: ChatTemplate, prompt: ChatPrompt, tools: Sequence[Tool] = (), new_id: Callable[[], str] | None = None
) -> AnswerParser:
    """A parser for the answer to a prompt.

    Args:
        template: that made the prompt.
        prompt: that is answered.
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
    """An id as Mistral's templates want it."""
    return "".join(secrets.choice(_NINE) for _ in range(9))
