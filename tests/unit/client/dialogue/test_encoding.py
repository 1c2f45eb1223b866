"""A text begins once, whoever wrote its beginning."""

from __future__ import annotations

import pytest

from client.dialogue.encoding import encode_text
from tests.chat_templates import chat_tokenizer

TOKENIZER = chat_tokenizer(None)
BEGIN = TOKENIZER.bos_token_id


@pytest.mark.parametrize("text", ["It was", "<s>It was", "<s>[INST] It was[/INST]", "", "<s>"])
def test_a_text_begins_once(text: str) -> None:
    ids = encode_text(TOKENIZER, text)
    assert ids[0] == BEGIN
    assert ids.count(BEGIN) == 1
    assert ids == TOKENIZER(text if text.startswith("<s>") else "<s>" + text, add_special_tokens=False)["input_ids"]


def test_what_somebody_wrote_twice_stays_twice() -> None:
    assert encode_text(TOKENIZER, "<s><s>x").count(BEGIN) == 2
