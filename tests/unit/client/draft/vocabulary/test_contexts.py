"""A draft's reading of the target's text: its own tokenizer's, done again at the tail alone."""

from __future__ import annotations

import copy
import random
from typing import Any, cast

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.drafting.other_tokenizers import byte_level, demo_tokenizer, metaspace, passages
from client.draft.vocabulary import matching
from client.draft.vocabulary.matching import (
    MAX_PIECE_TOKENS,
    PIECE_TOKENS,
    AlignedContext,
    DraftEncoder,
    RetokenisedContext,
    TokenMap,
    spell_by,
)
from client.draft.vocabulary.token_strings import read_strings


def prefixed(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level with a space before a text's first word, as older models have it."""
    tokenizer = byte_level(texts, size)
    tokenizer.backend_tokenizer.pre_tokenizer = cast("Any", pre_tokenizers.ByteLevel(add_prefix_space=True))
    return tokenizer


def marked(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Metaspace by the pre-tokenizer of that name, in a sequence with another one."""
    tokenizer = metaspace(texts, size)
    steps = [pre_tokenizers.Metaspace(prepend_scheme="first", split=False), pre_tokenizers.Digits(True)]
    tokenizer.backend_tokenizer.normalizer = cast("Any", None)
    tokenizer.backend_tokenizer.pre_tokenizer = cast("Any", pre_tokenizers.Sequence(cast("Any", steps)))
    return tokenizer


KINDS = {"byte-level": byte_level, "prefixed": prefixed, "metaspace": metaspace, "pre-tokenizer": marked}


@pytest.fixture(scope="module")
def usual() -> PreTrainedTokenizerFast:
    return demo_tokenizer()


@pytest.fixture(scope="module", params=list(KINDS))
def other(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return KINDS[request.param](passages()[:12], 700)


class CountingEncoder(DraftEncoder):
    """Counts the bytes that it encodes."""

    count = 0

    def ids(self, data: bytes) -> list[int]:
        self.count += len(data)
        return super().ids(data)


def made(target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast) -> tuple[RetokenisedContext, CountingEncoder]:
    encoder = CountingEncoder(draft, read_strings(draft, len(draft)))
    return RetokenisedContext(read_strings(target, len(target)), encoder), encoder


@pytest.mark.parametrize("reverse", [False, True], ids=["the draft's", "the target's"])
def test_a_growing_text_is_read_as_the_tokenizer_would(
    usual: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast, *, reverse: bool
) -> None:
    """Grown by a few tokens, cut back, edited: what is read is what the other tokenizer makes of all the text."""
    target, draft = (other, usual) if reverse else (usual, other)
    context, _ = made(target, draft)
    rng = random.Random(3)
    texts = [tuple(target.encode(text)) for text in passages()[12:15]]
    sequence: tuple[int, ...] = texts[0][:40]
    for step in range(60):
        if step % 12 == 11:
            sequence = sequence[: rng.randrange(1, len(sequence))]
        start = len(sequence)
        sequence += rng.choice(texts)[start : start + rng.randrange(9)]
        text = str(target.decode(list(sequence))).removeprefix(" ")  # the one that a tokenizer put there
        if "\ufffd" not in text:  # which ends within a character
            assert context.follow(sequence) == tuple(draft.encode(text)), text[-40:]


def test_a_long_prompt_is_read_as_the_tokenizer_would(
    usual: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast
) -> None:
    text = " ".join(passages()[:12])
    context, _ = made(usual, other)
    assert context.follow(tuple(usual.encode(text))) == tuple(other.encode(text))
    assert len(context._anchors) >= len(usual.encode(text)) / PIECE_TOKENS - 2


def test_a_sweep_reads_no_more_than_the_last_word_and_what_is_new(
    usual: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast
) -> None:
    context, encoder = made(usual, other)
    sequence = tuple(usual.encode(" ".join(passages()[:4])))
    context.follow(sequence[:-60])
    for end in range(len(sequence) - 59, len(sequence) + 1):
        encoder.count = 0
        context.follow(sequence[:end])
        assert encoder.count <= 60


def test_a_text_without_words_is_read_in_bounded_pieces(
    usual: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast
) -> None:
    context, encoder = made(usual, other)
    sequence = tuple(usual.encode("0123456789" * 700))
    assert len(sequence) > 3 * MAX_PIECE_TOKENS
    context.follow(sequence)
    encoder.count = 0
    context.follow((*sequence, sequence[0]))
    assert encoder.count <= 10 * MAX_PIECE_TOKENS


def test_a_text_that_ends_within_a_character_is_read_in_bytes(
    usual: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast
) -> None:
    context, encoder = made(usual, other)
    snowman = usual.encode(" a ☃")
    assert len(snowman) >= 4, "the demo's tokenizer has no token for it"
    strings = encoder.strings.by_id
    read = [b"".join(strings[own][1] for own in context.follow(tuple(snowman[:end]))) for end in range(2, 6)]
    assert all(data.lstrip().startswith(b"a") and b"\xef" not in data for data in read), "nothing is replaced"
    assert read[-1].decode().endswith("☃")


def test_control_tokens_are_those_of_the_draft_or_spelt(
    usual: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast
) -> None:
    """`<s>` begins a text, `</s>` ends a part of it, whatever the draft calls them; `<mask>` is only a name to it."""
    wider = copy.deepcopy(usual)
    wider.add_special_tokens({"mask_token": "<mask>"})
    context, encoder = made(wider, other)
    begin, end, mask = wider.encode("<s></s><mask>")
    words = wider.encode(" lamp")
    ids = context.follow((begin, *words, end, *words, mask, *words))
    lamp, own = encoder.ids(b" lamp"), encoder.strings
    begun = [] if own.begin_id is None else [own.begin_id]
    assert own.end_id is not None
    assert list(ids) == [*begun, *lamp, own.end_id, *lamp, *encoder.ids(b"<mask>"), *lamp]
    assert context.follow(()) == ((own.begin_id or own.end_id),), "a draft cannot begin from nothing"


def test_an_id_that_the_draft_lacks_is_spelt_out(usual: PreTrainedTokenizerFast) -> None:
    token_map = TokenMap([(token, token) for token in range(4_095)], draft_rows=4_095)
    asked: list[int] = []
    wider = copy.deepcopy(usual)
    wider.add_tokens(["<pad>", "<turn>"], special_tokens=True)
    spell = spell_by(wider, usual, 4_095)

    def spelling(token: int) -> tuple[int, ...]:
        asked.append(token)
        return tuple(spell(token))

    context = AlignedContext(token_map, spelling, begin=7)
    turn = tuple(usual.encode("<turn>"))
    assert context.follow((5, 4_097, 6)) == (5, *turn, 6)
    assert context.follow((5, 4_097, 6, 8)) == (5, *turn, 6, 8)
    assert context.follow((5, 9)) == (5, 9)
    assert context.follow((4_095, 5_000)) == (7,), "nothing is left of it"
    assert asked == [4_097, 4_095, 5_000], "what both sequences begin with is not done again"


def test_within_a_text_no_space_is_put_before_a_word(
    usual: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast
) -> None:
    _, encoder = made(usual, other)
    for data in (b"lamp", b" lamp", b"3 lamps\n\n in 3"):
        assert b"".join(encoder.strings.by_id[own][1] for own in encoder.ids(data)) == data


def test_what_somebody_typed_is_text(usual: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> None:
    """Letters that spell a control token's name do not become one."""
    _, encoder = made(usual, other)
    for name in other.all_special_tokens:
        assert encoder.control_id(name.encode()) not in encoder.ids(name.encode())
    assert matching.common_prefix((1, 2, 3), (1, 2, 4)) == 2
