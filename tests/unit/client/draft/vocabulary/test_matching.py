"""Which tokens a draft and a target share, and what is refused."""

from __future__ import annotations

import re

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.drafting.other_tokenizers import byte_level, fast_tokenizer, metaspace
from client.draft.vocabulary.matching import ModelVocabulary, match_vocabularies
from swarm.base.errors import IncompatibleDraft

TEXTS = ["the tide is on the turn", "the lamp is in the window", "and the kettle is on the boil"]


def words(*tokens: str, added: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer that knows these tokens, then those that were added to it."""
    tokenizer = Tokenizer(WordLevel({token: token_id for token_id, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.add_tokens([AddedToken(token, special=True) for token in added])
    return fast_tokenizer(tokenizer)


ELEVEN = tuple("abcdefghijk")


def test_equal_tokenizers_need_no_translation_whatever_the_padding() -> None:
    shared = match_vocabularies(ModelVocabulary(words(*ELEVEN), 64), ModelVocabulary(words(*ELEVEN), 12))
    assert shared.translation is None
    assert (shared.vocab_tokens, shared.shared, shared.known) == (11, 11, 11)


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (ModelVocabulary(words(*ELEVEN), 12), ModelVocabulary(words(*ELEVEN), 10), range(10)),
        (ModelVocabulary(words(*ELEVEN), 10), ModelVocabulary(words(*ELEVEN), 12), range(10)),
        (
            ModelVocabulary(words(*ELEVEN, added=("<l>", "<m>", "<n>")), 16),
            ModelVocabulary(words(*ELEVEN), 16),
            range(11),
        ),
        (ModelVocabulary(words(*ELEVEN), 16), ModelVocabulary(words(*ELEVEN, added=("<l>", "<m>")), 16), range(11)),
        (
            ModelVocabulary(words(*ELEVEN, added=("<turn>", "<m>")), 16),
            ModelVocabulary(words(*ELEVEN, added=("<reserved>", "<m>")), 16),
            (*range(11), 12),
        ),
    ],
    ids=["no row in the draft", "no row in the target", "target's own at the end", "draft's own", "a name reserved"],
)
def test_ids_that_one_side_lacks_are_left_out(target: ModelVocabulary, draft: ModelVocabulary, expected: range) -> None:
    shared = match_vocabularies(target, draft)
    able = list(range(shared.vocab_tokens))
    if shared.translation is not None:
        token_map = shared.translation.token_map
        able = [token for token in able if token_map.draft_id(token) == token]
        assert shared.translation.is_aligned
    assert able == list(expected)
    assert shared.shared == len(expected)


def test_other_merges_share_tokens_of_equal_bytes() -> None:
    target, draft = byte_level(TEXTS, 300), byte_level([*TEXTS, "the theme of the thesis"] * 2, 290)
    shared = match_vocabularies(ModelVocabulary(target, 300), ModelVocabulary(draft, 290))
    assert shared.translation is not None
    assert not shared.translation.is_aligned
    ours, theirs = target.convert_ids_to_tokens, draft.convert_ids_to_tokens
    pairs = {token: own for token in range(300) if (own := shared.translation.token_map.draft_id(token)) is not None}
    assert len(pairs) == shared.shared > 258, "the bytes, both control tokens, and some words"
    assert all(ours(token) == theirs(own) for token, own in pairs.items())
    part = f"({shared.shared} of {shared.known}), and drafts no others"
    assert shared.coverage == f"knows {100 * shared.shared / shared.known:.1f} % of the target's tokens {part}"


def test_byte_level_and_metaspace_meet_in_bytes() -> None:
    target, draft = byte_level(TEXTS, 300), metaspace(TEXTS, 310)
    shared = match_vocabularies(ModelVocabulary(target, 300), ModelVocabulary(draft, 310))
    assert shared.translation is not None
    own, token_map = draft.get_vocab(), shared.translation.token_map
    for token, expected in [("Ġthe", "▁the"), ("e", "e"), ("Ċ", "<0x0A>")]:
        assert token_map.draft_id(target.get_vocab()[token]) == own[expected]


def test_what_cannot_be_compared_is_refused_in_one_line() -> None:
    with pytest.raises(IncompatibleDraft) as refused:
        match_vocabularies(ModelVocabulary(byte_level(TEXTS, 300), 300), ModelVocabulary(words("the", "tide"), 64))
    assert re.search(r"token id 0 is '<pad>' to the target and 'the' to the draft", str(refused.value))
    assert "WordLevel (the draft) and byte-level BPE (the target) have no bytes in common" in str(refused.value)
    assert "\n" not in str(refused.value)
