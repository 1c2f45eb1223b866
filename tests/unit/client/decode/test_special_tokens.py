"""Special tokens in a text: shown where asked for, found as stop strings, and in nobody's way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from client.decode.text_stream import TextStream
from tests.property.tiny_tokenizers import FastTokenizer, byte_level

INNER = byte_level()
INNER.add_special_tokens(["<tool>", "<end>"])
TOKENIZER = FastTokenizer(INNER)


def ids(text: str) -> list[int]:
    found: list[int] = INNER.encode(text).ids
    return found


def read(text: str, stop: Sequence[str] = (), show: Sequence[str] = ()) -> tuple[str, TextStream]:
    stream = TextStream(TOKENIZER, ids("It was"), stop=stop)
    stream.show(show)
    return "".join([*(stream.push([token]) for token in ids(text)), stream.finish()]), stream


def test_shown_tokens_stand_where_they_came() -> None:
    assert read("a night<tool>was<end> dark<tool>", show=["<tool>"])[0] == "a night<tool>was dark<tool>"
    assert read("a night<tool>was<end> dark")[0] == "a nightwas dark"
    assert read("<tool>", show=["<tool>"])[0] == "<tool>"


def test_a_shown_token_goes_out_at_once() -> None:
    stream = TextStream(TOKENIZER, ids("It was"))
    stream.show(["<tool>"])
    assert [stream.push([token]) for token in ids("x<tool>y")] == ["x", "<tool>", "y"]


@pytest.mark.parametrize("stop", ["<end>", "</s>"])
def test_a_stop_string_that_is_a_special_token_fires(stop: str) -> None:
    text, stream = read(f"dark{stop} night", stop=[stop])
    assert (text, stream.finish_reason, stream.stop_string) == ("dark", "stop", stop)
    assert stream.tokens == ids(f"dark{stop}")


def test_a_stop_string_with_a_special_token_in_it_fires() -> None:
    text, stream = read("dark\n<end>was night", stop=["\n<end>wa"])
    assert (text, stream.stop_string) == ("dark", "\n<end>wa")
    assert read("dark\n<tool>was", stop=["\n<end>"], show=["<tool>"])[0] == "dark\n<tool>was"
    assert read("dark<tool>was", stop=["<tool>was"], show=["<tool>"])[0] == "dark"


def test_shown_tokens_do_not_disturb_stop_strings() -> None:
    text, stream = read("a<tool>b<tool>c", stop=["bc"], show=["<tool>"])
    assert (text, stream.stop_string) == ("a<tool>", "bc"), "they are no part of the text that is searched"
    assert read("a <tool>", stop=["too"], show=["<tool>"])[0] == "a <tool>"
    assert read("a<tool>b", stop=["ax"], show=["<tool>"])[0] == "a<tool>b"


def test_the_stop_string_that_fired_is_said() -> None:
    assert read("a dark night", stop=["night", "dark"])[1].stop_string == "dark"
    assert read("a dark night", stop=["xyz"])[1].stop_string == ""
