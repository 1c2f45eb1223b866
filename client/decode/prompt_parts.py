"""How many tokens of a prompt travel in its next part. Pure."""

from __future__ import annotations

from typing import Final

PART_MS: Final = 15_000.0
"""A part that is away for longer is too large: a chain without a reply for 120 s counts as broken, and each token
attends to all before it, so that later parts take longer than earlier ones."""
MIN_PART: Final = 32
"""Tokens of a part at least: fewer are hardly faster."""


class PromptParts:
    """Learns from each part that came back.

    Attributes:
        tokens: of the next part, at most.
    """

    def __init__(self, most: int) -> None:
        """Begin with the largest parts."""
        self.tokens = most
        self._most = most

    def answered(self, tokens: int, total_ms: float) -> None:
        """A part of so many tokens came back after so long; one from before the last halving says nothing new."""
        if total_ms > PART_MS and tokens <= self.tokens:
            self.tokens = max(self.tokens // 2, min(MIN_PART, self._most))
        elif total_ms < PART_MS / 4:
            self.tokens = min(2 * self.tokens, self._most)
