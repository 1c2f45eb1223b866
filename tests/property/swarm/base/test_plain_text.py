"""Whatever a text holds, what is shown of it commands no terminal, and what can be read is not touched."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from swarm.base.plain_text import plain, plain_line

ANY = st.text(st.characters(codec=None, categories=None) | st.characters(categories=("Cc", "Cf", "Cs", "Zl", "Zp")))
READABLE = st.text(st.characters(categories=("L", "M", "N", "P", "S", "Zs", "Co")))


@given(ANY)
def test_no_control_is_left_but_line_feed_and_tab(text: str) -> None:
    shown = plain(text)
    assert len(shown) == len(text)
    assert {unicodedata.category(one) for one in shown if one not in "\n\t"}.isdisjoint({"Cc", "Cs", "Zl", "Zp"})
    assert plain(shown) == shown
    shown.encode()  # lone surrogates cannot be


@given(READABLE)
def test_what_can_be_read_stays(text: str) -> None:
    assert plain(text) == text


@given(ANY, ANY)
def test_a_text_in_pieces_is_shown_as_the_whole_is(first: str, rest: str) -> None:
    assert plain(first) + plain(rest) == plain(first + rest)


@given(ANY)
def test_a_line_is_one_line(text: str) -> None:
    shown = plain_line(text)
    assert len(shown.splitlines()) <= 1
    assert plain_line(shown) == shown
