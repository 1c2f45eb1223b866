"""Conversations as tokens: the model's template, one beginning of text, and the stand-in for models without one."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from client.dialogue.messages import Message
from client.dialogue.template import TRANSCRIPT_STOP
from client.library.chat import Conversation
from swarm.base.errors import ConfigError
from tests.property.tiny_tokenizers import byte_level

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}hi"


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One that puts a beginning of text before every text, as Llama's does."""
    inner = byte_level()
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))])
    made: Any = cast("Any", PreTrainedTokenizerFast)(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return cast("PreTrainedTokenizerFast", made)


def text(conversation: Conversation, of: PreTrainedTokenizerFast) -> str:
    return str(of.decode(list(conversation.plan().tokens)))


def test_the_template_writes_the_only_beginning_of_text() -> None:
    made = tokenizer(TEMPLATE)
    assert made("x").input_ids[0] == made.bos_token_id, "the tokenizer adds one to a plain text"
    conversation = Conversation(made, system="be brief")
    conversation.add("user", "hello")
    assert text(conversation, made) == "<s>[system]be brief[user]hello[assistant]"
    assert conversation.plan().tokens.count(made.bos_token_id) == 1
    assert (conversation.has_template, conversation.template.stop) == (True, ())


def test_without_a_template_the_turns_are_a_transcript() -> None:
    made = tokenizer(None)
    conversation = Conversation(made)
    for role, content in (("user", "hello"), ("assistant", "hi"), ("user", "more")):
        conversation.add(role, content)  # type: ignore[arg-type]
    assert text(conversation, made) == "<s>User: hello\n\nAssistant: hi\n\nUser: more\n\nAssistant:"
    assert (conversation.has_template, conversation.template.stop) == (False, TRANSCRIPT_STOP)


def test_a_conversation_the_template_refuses_is_one_line() -> None:
    conversation = Conversation(tokenizer(NO_SYSTEM), system="be brief")
    conversation.add("user", "hello")
    with pytest.raises(ConfigError, match="does not take this conversation: System role not supported") as caught:
        conversation.plan()
    assert "\n" not in str(caught.value)


def test_clearing_keeps_what_the_system_says() -> None:
    conversation = Conversation(tokenizer(None), system="be brief")
    conversation.add("user", "hello")
    conversation.take_back()
    assert conversation.messages == [Message("system", "be brief")]
    conversation.add("user", "hello")
    conversation.clear()
    assert conversation.messages == [Message("system", "be brief")]
