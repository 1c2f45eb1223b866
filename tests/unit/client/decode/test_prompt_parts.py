"""Parts of a prompt: smaller where a chain takes long for them, and large again where it does not."""

from __future__ import annotations

import pytest

from client.decode.prompt_parts import LARGEST_UNANSWERED, MIN_PART, PART_MS, PARTS_PER_HOP, PromptParts


def test_parts_grow_smaller_while_a_chain_takes_long_and_larger_again() -> None:
    parts = PromptParts(512)
    parts.answered(512, PART_MS * 2)
    assert parts.tokens == 256
    parts.answered(512, PART_MS * 3)
    assert parts.tokens == 256, "it was sent before"
    for _ in range(9):
        parts.answered(parts.tokens, PART_MS * 2)
    assert parts.tokens == MIN_PART
    parts.answered(parts.tokens, PART_MS / 2)
    assert parts.tokens == MIN_PART, "neither long nor short"
    for _ in range(9):
        parts.answered(parts.tokens, PART_MS / 8)
    assert parts.tokens == 512


def test_no_part_is_larger_than_was_asked_for() -> None:
    parts = PromptParts(16)
    for _ in range(3):
        parts.answered(16, PART_MS * 2)
    assert parts.tokens == 16


def test_a_part_that_takes_a_minute_leads_to_parts_within_the_limit() -> None:
    """A token takes longer the more there are before it: no part is away as long as a chain may be silent."""
    parts, start, away_ms = PromptParts(512), 0, 0.0
    while start < 100_000:
        tokens = parts.tokens
        ms = tokens * (10.0 + start / 250)
        away_ms = max(away_ms, 3 * ms)  # behind two others
        parts.answered(tokens, 3 * ms)
        start += tokens
    assert away_ms < 60_000


@pytest.mark.parametrize(
    ("hops", "tokens", "unanswered"),
    [(1, 512, 3), (2, 128, 12), (6, 128, 12), (12, 64, 24), (24, 32, 48), (200, 32, 48)],
)
def test_a_chain_is_full_of_parts_within_what_a_session_reserves(hops: int, tokens: int, unanswered: int) -> None:
    parts = PromptParts(512, hops)
    assert (parts.tokens, parts.unanswered) == (tokens, unanswered)
    assert parts.tokens * parts.unanswered <= LARGEST_UNANSWERED * 512
    assert hops == 1 or parts.unanswered >= min(PARTS_PER_HOP * hops, LARGEST_UNANSWERED * 512 // MIN_PART)
    parts.answered(tokens, PART_MS / 8)
    assert parts.tokens == tokens, "a chain's parts do not grow beyond its own"


@pytest.mark.parametrize("hops", [1, 3, 40])
def test_small_parts_that_were_asked_for_stay(hops: int) -> None:
    parts = PromptParts(4, hops)
    assert (parts.tokens, parts.unanswered) == (4, LARGEST_UNANSWERED)
