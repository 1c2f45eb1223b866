"""Shown special tokens change nothing else of a text, wherever they and stop strings are."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.client.decode.test_special_tokens import read

WORDS = st.sampled_from(["a", "b", " ", "dark", "<tool>", "<end>", "</s>", "🦜", "\n"])


@given(st.lists(WORDS, max_size=8), st.lists(st.sampled_from(["ab", "b", "<end>", "a<tool>", "\n<end>"]), max_size=2))
def test_what_is_shown_less_the_shown_tokens_is_the_plain_text(words: Sequence[str], stop: Sequence[str]) -> None:
    plain, first = read("".join(words), stop=stop)
    shown, second = read("".join(words), stop=stop, show=["<tool>"])
    assert shown.replace("<tool>", "") == plain
    assert (first.tokens, first.stop_string) == (second.tokens, second.stop_string)
