"""Whatever the tokens and however they arrive, the text is what decoding everything at once would give."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from client.decode.text_stream import INCOMPLETE, TextStream
from tests.property.tiny_tokenizers import KINDS, LINES, FastTokenizer

EOS = 1
PHRASES = ["It was a dark night", " nobody slept.", "夜は暗い。 naïve", "🦜🦜 and  two"]


def relative(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    before, full = tokenizer.decode(prompt), tokenizer.decode(prompt + tokens)
    common = max(size for size in range(len(before) + 1) if full.startswith(before[:size]))
    return full[common:]


def expected(tokenizer: Tokenizer, case: Generation) -> tuple[str, int, str | None]:
    """The definition, at quadratic cost: text, number of tokens that count, reason."""
    text = ""
    for count in range(len(case.tokens) + 1):
        before, text = text, relative(tokenizer, case.prompt, case.tokens[:count])
        if count and case.tokens[count - 1] == EOS:
            return before, count, "eos"
        shown = text.rstrip(INCOMPLETE)
        for end in range(1, len(shown) + 1) if any(string in shown for string in case.stop) else ():
            starts = [end - len(string) for string in case.stop if shown[:end].endswith(string)]
            if starts:
                return text[: min(starts)], count, "stop"
        if count == case.limit:
            return text, count, "length"
    return text, len(case.tokens), None


def odd_tokens(tokenizer: Tokenizer) -> list[int]:
    """Pieces of characters, single bytes that fit together or do not, special tokens and an unknown one."""
    pieces = tokenizer.encode("€ꙮ", add_special_tokens=False).ids
    single = [tokenizer.token_to_id(f"<0x{value:02X}>") for value in (0x41, 0x0A, 0xE2, 0x82, 0xAC, 0xFF)]
    return [*pieces, *(token for token in single if token is not None), 0, EOS, tokenizer.get_vocab_size() + 1]


@dataclass(frozen=True, slots=True)
class Generation:
    prompt: list[int]
    tokens: list[int]
    cuts: list[int]
    stop: list[str]
    limit: int | None


@st.composite
def generations(draw: st.DrawFn, tokenizer: Tokenizer) -> Generation:
    """Encoded text mixed with odd tokens, pushed in any pieces, with stop strings that often occur."""
    words = st.text(st.sampled_from([*sorted(set("".join(LINES))), "ꙮ", "𓂀", INCOMPLETE]), max_size=12)
    encoded = (words | st.sampled_from(PHRASES)).map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    odd = st.lists(st.sampled_from(odd_tokens(tokenizer)), min_size=1, max_size=5)
    parts = st.lists(encoded | odd, max_size=5)
    prompt, tokens = ([token for part in draw(parts) for token in part] for _ in range(2))
    text = relative(tokenizer, prompt, tokens)
    starts = draw(st.lists(st.integers(0, max(0, len(text) - 1)), max_size=2))
    stop = [text[start : start + draw(st.integers(1, 4))] or "x" for start in starts]
    stop += [string[1:] for string in stop if len(string) > 2 and draw(st.booleans())]
    return Generation(
        prompt,
        tokens,
        draw(st.lists(st.integers(0, len(tokens)), max_size=6)),
        stop,
        draw(st.none() | st.integers(0, 30)),
    )


@pytest.mark.parametrize("name", sorted(KINDS))
@settings(max_examples=150)
@given(st.data())
def test_pieces_join_to_the_text_that_decoding_at_once_gives(name: str, data: st.DataObject) -> None:
    tokenizer = KINDS[name]
    case = data.draw(generations(tokenizer))
    stream = TextStream(FastTokenizer(tokenizer), case.prompt, stop=case.stop, eos_ids={EOS}, max_new_tokens=case.limit)
    bounds = pairwise([0, *sorted(case.cuts), len(case.tokens)])
    pieces = [stream.push(case.tokens[start:end]) for start, end in bounds]
    pieces.append(stream.finish())
    text, count, reason = expected(tokenizer, case)
    assert "".join(pieces) == stream.text == text
    assert stream.tokens == case.tokens[:count]
    assert stream.finish_reason == reason


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", sorted(KINDS))
def test_text_is_held_back_only_inside_a_character(name: str, line: str) -> None:
    tokenizer = KINDS[name]
    tokens = tokenizer.encode(line).ids
    stream = TextStream(FastTokenizer(tokenizer), tokens)
    for count, token in enumerate(tokens, start=1):
        stream.push([token])
        now = relative(tokenizer, tokens, tokens[:count])
        assert stream.text == now or now.endswith(INCOMPLETE) or str(tokenizer.id_to_token(token)).startswith("<0x")
