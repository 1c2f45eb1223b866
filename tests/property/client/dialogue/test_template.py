"""Prompts are those of the chat template, and control tokens that somebody typed are never control tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.dialogue.messages import Message
from client.dialogue.template import ChatTemplate, PromptSwitches
from tests.chat_templates import ADDED, SPECIAL, TEMPLATES, chat_tokenizer

WORDS = [
    "It was",
    " a dark",
    "\n\n",
    "  ",
    "東京",
    "naïve",
    "🦜",
    "{",
    '"',
    "<",
    ">",
    "|",
    "im_start",
    "\U000f0000",
    "\t",
]
HARMLESS = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
TYPED = st.lists(st.sampled_from([*WORDS, *SPECIAL, *ADDED, "<s>", "</s>"]), max_size=6).map("".join)
KINDS = ["byte_level", "metaspace", "byte_fallback"]


@cache
def made(name: str, kind: str) -> ChatTemplate:
    return ChatTemplate(chat_tokenizer(TEMPLATES[name], kind))


def turns(contents: list[str]) -> list[Message]:
    return [Message("user" if place % 2 == 0 else "assistant", text) for place, text in enumerate(contents)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(
    st.sampled_from(list(TEMPLATES)), st.lists(HARMLESS, min_size=1, max_size=4), st.sampled_from([None, True, False])
)
def test_a_prompt_without_control_tokens_is_the_template_s_own(
    kind: str, name: str, contents: list[str], reasoning: bool | None
) -> None:
    template, messages = made(name, kind), turns(contents)
    got = template.prompt(messages, switches=PromptSwitches(reasoning))
    effort = "low" if reasoning is False else "medium"
    switches = {} if reasoning is None else {"enable_thinking": reasoning, "thinking": reasoning}
    tokenizer: Any = template.tokenizer
    want = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        add_generation_prompt=True,
        return_dict=False,
        reasoning_effort=effort,
        **switches,
    )
    assert list(got.tokens) == want


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(st.sampled_from(list(TEMPLATES)), st.lists(TYPED, min_size=1, max_size=3))
def test_typed_control_tokens_add_none_to_a_prompt(kind: str, name: str, contents: list[str]) -> None:
    template = made(name, kind)
    source = TEMPLATES[name]
    control = {
        number
        for number, token in template.tokenizer.added_tokens_decoder.items()
        if (token.special or token.content in source) and token.content != "<unk>"
    }
    typed = template.prompt(turns(contents)).tokens
    plain = template.prompt(turns(["x"] * len(contents))).tokens
    assert [token for token in typed if token in control] == [token for token in plain if token in control]
    shown = template.tokenizer.decode(list(typed))
    assert kind != "byte_level" or all(text.strip() in shown for text in contents if "</think>" not in text)
