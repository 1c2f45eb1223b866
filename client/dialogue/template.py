"""From a conversation to a prompt's token ids, by the model's chat template or a plain stand-in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import finalize

from transformers import PreTrainedTokenizerFast

from client.dialogue.encoding import ControlTokens, Json, Marks
from client.dialogue.families import MARKERS, ToolFamily, family_of, thinking_of
from client.dialogue.history import (
    alternating,
    introduced,
    introduction,
    message_dicts,
    nine_characters,
    tool_dicts,
    with_thoughts_apart,
    with_tools_in_system,
    without_calls,
    without_lost_thoughts,
)
from client.dialogue.messages import Message, Tool
from client.dialogue.rendering import TemplateRenderer, rendered
from client.options import check_text
from swarm.errors import ConfigError

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
        tokens: ids.
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
            switches: of this answer.

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
        """Whether the template joins a call's arguments as text."""
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
