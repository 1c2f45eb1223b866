"""How a prompt is cut: tokens of its next part, and how many parts may be unanswered. Pure.

A chain is a pipeline: all its hops and links have work once about two parts per hop are on their way, and the first
part is through it the sooner the smaller it is. One hop alone has the next part already, and runs large ones faster.
"""

from __future__ import annotations

from typing import Final

LARGEST_UNANSWERED: Final = 3
"""Parts of the largest size that may be unanswered, for which sessions reserve nodes; smaller ones have as many tokens
together."""
CHAIN_PART: Final = 128
"""Tokens of a part where rows travel between machines, at most."""
PARTS_PER_HOP: Final = 2
"""Unanswered parts per hop at least: one that is computed, one that travels."""
PART_MS: Final = 15_000.0
"""A part that is away for longer is too large: a chain without a reply for 120 s counts as broken, and each token
attends to all before it, so that later parts take longer than earlier ones."""
MIN_PART: Final = 32
"""Tokens of a part at least: fewer are hardly faster."""


class PromptParts:
    """Learns from each part that came back.

    Attributes:
        tokens: of the next part, at most.
        unanswered: parts that may be unanswered, if the credits allow it.
    """

    def __init__(self, most: int, hops: int = 1) -> None:
        """Begin with the largest parts.

        Args:
            most: tokens of a part at most, whatever the chain.
            hops: machines of the chain.
        """
        together = LARGEST_UNANSWERED * most
        if hops > 1:
            most = min(most, max(min(CHAIN_PART, together // (PARTS_PER_HOP * hops)), MIN_PART))
        self.tokens = self._most = most
        self.unanswered = together // most

    def answered(self, tokens: int, total_ms: float) -> None:
        """A part of so many tokens came back after so long; one from before the last halving says nothing new."""
        if total_ms > PART_MS and tokens <= self.tokens:
            self.tokens = max(self.tokens // 2, min(MIN_PART, self._most))
        elif total_ms < PART_MS / 4:
            self.tokens = min(2 * self.tokens, self._most)
