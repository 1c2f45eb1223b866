"""Whatever ids a text holds, a draft of another tokenizer can read it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drafting.other_tokenizers import byte_level, demo_tokenizer, metaspace, passages
from client.draft.vocabulary.matching import ModelVocabulary, Translation, match_vocabularies

ROWS = 700
TOKENS = st.one_of(st.integers(0, 300), st.integers(0, 5_000))  # bytes that are no characters; words; ids of no token
STEPS = st.lists(st.tuples(st.integers(0, 40), st.lists(TOKENS, max_size=12)), min_size=1, max_size=8)


@pytest.fixture(scope="module", params=[byte_level, metaspace], ids=["byte-level", "metaspace"])
def translation(request: pytest.FixtureRequest) -> Translation:
    tokenizer = request.param(passages()[:6], ROWS)
    found = match_vocabularies(
        ModelVocabulary(demo_tokenizer(), 4_096), ModelVocabulary(tokenizer, ROWS - 10)
    ).translation
    assert found is not None
    return found


@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_any_ids_in_any_order_are_read(translation: Translation, steps: list[tuple[int, list[int]]]) -> None:
    """Each step keeps some tokens and goes on with others. What is read has rows, and is about as long as the text."""
    context, text = translation.make_context(), tuple[int, ...]()
    for kept, further in steps:
        text = (*text[:kept], *further)
        ids = context.follow(text)
        assert 1 <= len(ids) <= 1 + 32 * len(text)
        assert all(0 <= token < ROWS - 10 for token in ids)
        assert context.follow(text) == ids, "the same text again is read the same"


@settings(max_examples=30, deadline=None)
@given(words=st.lists(st.text(max_size=8), max_size=30), cut=st.integers(0, 60))
def test_any_text_is_read_alike_at_once_and_step_by_step(translation: Translation, words: list[str], cut: int) -> None:
    tokenizer = demo_tokenizer()
    text = tuple(tokenizer.encode(" ".join(words), add_special_tokens=False))
    grown = translation.make_context()
    for end in (*range(min(cut, len(text)), len(text), 3), len(text)):
        ids = grown.follow(text[:end])
    assert ids == translation.make_context().follow(text)
