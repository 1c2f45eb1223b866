"""What tokens stand for."""

from __future__ import annotations

from tokenizers import pre_tokenizers

from benchmarks.drafting.other_tokenizers import demo_tokenizer, metaspace
from client.draft.vocabulary.token_strings import TokenizerKind, read_strings

TEXT = "Ünder the ☂, 3 cafés\n\t(naïve) — 日本"


def test_byte_level_tokens_join_to_the_text() -> None:
    tokenizer = demo_tokenizer()
    strings = read_strings(tokenizer, 4_096)
    assert strings.kind is TokenizerKind.BYTE_LEVEL
    assert strings.name == "byte-level BPE"
    assert b"".join(strings.by_id[token][1] for token in tokenizer.encode(TEXT)) == TEXT.encode()
    assert not strings.prepends
    assert strings.by_id[1] == (True, b"<s>")
    single = {data for _, data in strings.by_id.values() if len(data) == 1}
    assert len(single) == len(pre_tokenizers.ByteLevel.alphabet()) == 256


def test_metaspace_tokens_join_to_the_text_with_a_space_before_it() -> None:
    tokenizer = metaspace([TEXT[:20]], 300)
    strings = read_strings(tokenizer, len(tokenizer))
    assert strings.name == "metaspace BPE"
    assert strings.prepends
    ids = tokenizer.encode(TEXT)
    assert any(token.startswith("<0x") for token in tokenizer.convert_ids_to_tokens(ids)), "bytes stand for some"
    assert b"".join(strings.by_id[token][1] for token in ids) == b" " + TEXT.encode()


def test_a_character_is_its_own_token_before_it_is_a_byte() -> None:
    tokenizer = metaspace(["abc"], 262)
    assert read_strings(tokenizer, 262).ids()[False, b"a"] == tokenizer.get_vocab()["a"]


def test_ids_without_a_row_are_left_out() -> None:
    assert max(read_strings(metaspace(["abc"], 262), 100).by_id) == 99
