from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from tokenizers import Tokenizer

from client.decode.text_stream import TextStream
from swarm import demo
from swarm.base.errors import ConfigError
from tests.property.tiny_tokenizers import KINDS, FastTokenizer

DEMO = Tokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
EOS = 2
PROMPT = DEMO.encode("It was a dark night").ids


def ids(text: str) -> list[int]:
    found: list[int] = DEMO.encode(text).ids
    return found


def test_leading_space_of_the_first_token_stays() -> None:
    stream = TextStream(FastTokenizer(DEMO), PROMPT)
    assert stream.push(ids(" and")) == " and"


def test_metaspace_space_after_a_prompt_is_shown_and_without_one_is_not() -> None:
    tokenizer = KINDS["metaspace"]
    night = tokenizer.encode("night").ids
    assert TextStream(FastTokenizer(tokenizer), tokenizer.encode("dark").ids).push(night) == " night"
    assert TextStream(FastTokenizer(tokenizer), []).push(night) == "night"


def test_special_tokens_at_the_end_of_the_prompt_do_not_hide_its_text() -> None:
    tokenizer = KINDS["metaspace"]
    prompt = tokenizer.encode("dark").ids + [1] * 20
    assert TextStream(FastTokenizer(tokenizer), prompt).push(tokenizer.encode("night").ids) == " night"


def test_a_character_that_began_in_the_prompt_is_shown_whole() -> None:
    tokens = ids("🦜")
    for cut in range(1, len(tokens)):
        stream = TextStream(FastTokenizer(DEMO), PROMPT + tokens[:cut])
        assert stream.push(tokens[cut:]) == "🦜"
    tokenizer = KINDS["byte_fallback"]
    tokens = [tokenizer.get_vocab()[name] for name in ["<0x0A>"] * 9 + ["<0xE2>", "<0x82>", "<0xAC>"]]
    stream = TextStream(FastTokenizer(tokenizer), tokens[:-1])
    assert stream.push(tokens[-1:] + tokenizer.encode("dark").ids) == "\n" * 9 + "€dark"


def test_a_split_character_waits_for_its_last_byte() -> None:
    tokens = ids("🦜")
    assert len(tokens) > 1
    stream = TextStream(FastTokenizer(DEMO), PROMPT)
    assert [stream.push([token]) for token in tokens] == [""] * (len(tokens) - 1) + ["🦜"]


def test_an_incomplete_character_at_the_end_shows_as_replacement() -> None:
    stream = TextStream(FastTokenizer(DEMO), PROMPT, max_new_tokens=1)
    assert stream.push(ids("🦜")) == "\ufffd"
    assert stream.finish_reason == "length"
    interrupted = TextStream(FastTokenizer(DEMO), PROMPT)
    assert interrupted.push(ids("🦜")[:1]) == ""
    assert interrupted.finish() == "\ufffd"
    assert interrupted.finish_reason is None


def test_a_stop_string_across_tokens_and_pushes_is_cut_exactly() -> None:
    tokens = ids(" and the wind was cold.\n\nThen he")
    stream = TextStream(FastTokenizer(DEMO), PROMPT, stop=["\n\nThen"])
    pieces = [stream.push([token]) for token in tokens]
    assert "".join(pieces) + stream.finish() == stream.text == " and the wind was cold."
    assert stream.finish_reason == "stop"
    assert "\n\nThen" in DEMO.decode(stream.tokens)
    assert "\n\nThen" not in DEMO.decode(stream.tokens[:-1])


def test_what_could_begin_a_stop_string_is_held_until_it_does_not() -> None:
    stream = TextStream(FastTokenizer(DEMO), PROMPT, stop=["ab!"])
    tokens = [ids("a")[0], ids("b")[0], ids("c")[0]]
    assert [stream.push([token]) for token in tokens] == ["", "", "abc"]


@pytest.mark.parametrize(("stop", "text"), [(["abc", "b"], "a"), (["bc", "abc"], ""), (["c", "abcd"], "ab")])
def test_the_stop_string_that_is_complete_first_wins(stop: list[str], text: str) -> None:
    stream = TextStream(FastTokenizer(DEMO), PROMPT, stop=stop)
    assert stream.push(ids("abcd")) == text
    assert stream.stopped


@pytest.mark.parametrize("eos", [EOS, 7])
def test_any_eos_id_ends_the_text_inside_an_accepted_path(eos: int) -> None:
    stream = TextStream(FastTokenizer(DEMO), PROMPT, eos_ids=[EOS, 7], stop=["xx"])
    tokens = ids(" box")
    assert stream.push([*tokens, eos, *tokens]) == " box"
    assert stream.tokens == [*tokens, eos]
    assert stream.finish_reason == "eos"
    assert stream.push(tokens) == stream.finish() == ""


def test_the_limit_cuts_inside_an_accepted_path() -> None:
    tokens = ids(" and the wind was cold")
    stream = TextStream(FastTokenizer(DEMO), PROMPT, max_new_tokens=3)
    assert stream.push(tokens) == DEMO.decode(tokens[:3])
    assert stream.tokens == tokens[:3]
    assert stream.finish_reason == "length"


def test_a_limit_of_zero_is_an_end() -> None:
    stream = TextStream(FastTokenizer(DEMO), PROMPT, max_new_tokens=0)
    assert stream.stopped
    assert stream.push(PROMPT) == stream.text == ""


def test_a_stop_string_at_the_limit_counts_as_stop() -> None:
    tokens = ids(" and.")
    assert len(tokens) == 2
    stream = TextStream(FastTokenizer(DEMO), PROMPT, stop=["."], max_new_tokens=2)
    assert stream.push(tokens) == " and"
    assert stream.finish_reason == "stop"


def test_special_tokens_have_no_text() -> None:
    stream = TextStream(FastTokenizer(DEMO), PROMPT)
    assert stream.push([1, *ids(" and"), 0, *ids(" the")]) == " and the"


def test_a_byte_token_may_complete_a_stop_string_at_once() -> None:
    tokenizer = KINDS["byte_fallback"]
    stream = TextStream(FastTokenizer(tokenizer), tokenizer.encode("dark").ids, stop=["\x07"])
    assert stream.push([tokenizer.get_vocab()["<0x07>"]]) == ""
    assert stream.finish_reason == "stop"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        TextStream(FastTokenizer(DEMO), PROMPT, stop=["\n", ""])


class Counting:
    """A tokenizer that remembers the longest sequence it had to decode."""

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, tokens: Sequence[int], **options: bool) -> str:
        self.longest = max(self.longest, len(tokens))
        return str(DEMO.decode(tokens, **options))

    def __getattr__(self, name: str) -> object:
        return getattr(DEMO, name)


def test_a_short_window_is_decoded_and_never_the_whole_text() -> None:
    counting = Counting()
    stream = TextStream(FastTokenizer(cast(Tokenizer, counting)), PROMPT * 100, stop=["nowhere"])
    text = " and the wind – was cold 🦜." * 20
    assert stream.push(ids(text)) + stream.finish() == text
    assert len(stream.tokens) > 200
    assert counting.longest <= 16


def test_a_text_goes_back_to_its_first_tokens_and_on_otherwise() -> None:
    tokens, others = ids(" and the captain said 🦜 no more"), ids(" but 🦜 stop it")
    whole = TextStream(FastTokenizer(DEMO), PROMPT, stop=["stop"], max_new_tokens=50)
    whole.show(["<eos>"])
    whole.push(tokens)
    for kept in range(len(tokens)):
        again = whole.first(kept)
        fresh = TextStream(FastTokenizer(DEMO), PROMPT, stop=["stop"], max_new_tokens=50)
        fresh.push([*tokens[:kept], *others])
        again.push(others)
        assert (again.text, again.tokens, again.finish_reason) == (fresh.text, fresh.tokens, fresh.finish_reason)
        assert again.stop_string == "stop"
