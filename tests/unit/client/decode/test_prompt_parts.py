"""Parts of a prompt: smaller where a chain takes long for them, and large again where it does not."""

from __future__ import annotations

from client.decode.prompt_parts import MIN_PART, PART_MS, PromptParts


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
