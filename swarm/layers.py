"""Half-open layer ranges: what a node serves and what a hop of a chain computes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.errors import LayersError


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Layers `[start, end)` of a model.

    Raises:
        LayersError: the range is empty, reversed or negative.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise LayersError(f"layers {self.start}-{self.end}: a span is start-end with 0 <= start < end")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read `"0-20"` as layers 0…19.

        Raises:
            LayersError: the text is not `start-end`.
        """
        match = re.fullmatch(r"\s*(\d{1,6})\s*-\s*(\d{1,6})\s*", text)
        if match is None:
            raise LayersError(f"layers {text!r}: write start-end, half-open, such as 0-20 for layers 0…19")
        return cls(int(match[1]), int(match[2]))

    def within(self, num_layers: int) -> Span:
        """Return self when the model has these layers.

        Raises:
            LayersError: the span ends beyond the model.
        """
        if self.end > num_layers:
            raise LayersError(f"layers {self}: the model has {num_layers} layers, so the end is at most {num_layers}")
        return self

    def describe(self, num_layers: int) -> str:
        """The span with inclusive ends, for messages: `layers 0…19 of 40`."""
        return f"{name_layers([self])} of {num_layers}"

    def contains(self, other: Span) -> bool:
        """Whether every layer of `other` is in this span."""
        return self.start <= other.start and other.end <= self.end


def name_layers(spans: Sequence[Span]) -> str:
    """Spans with inclusive ends, for messages: `layer 3`, `layers 0…3, 6 and 8…11`.

    Only options, and what a user is to type, are half-open.
    """
    texts = [f"{span.start}" if len(span) == 1 else f"{span.start}…{span.end - 1}" for span in spans]
    noun = "layer" if len(spans) == 1 and len(spans[0]) == 1 else "layers"
    return f"{noun} {' and '.join([', '.join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)}"


def missing_layers(spans: Iterable[Span], num_layers: int) -> list[tuple[int, int]]:
    """The half-open ranges of `[0, num_layers)` that no span covers, in order."""
    gaps: list[tuple[int, int]] = []
    reached = 0
    for span in sorted(spans):
        if span.start > reached:
            gaps.append((reached, min(span.start, num_layers)))
        reached = max(reached, span.end)
    if reached < num_layers:
        gaps.append((reached, num_layers))
    return [(start, end) for start, end in gaps if start < end]
