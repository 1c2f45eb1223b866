"""Half-open layer ranges: what a node serves and what a hop of a chain computes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.base.errors import LayersError


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


@dataclass(frozen=True, slots=True)
class SpanBorders:
    """Where a model can be cut: layers that use more of a layer before them than its rows stay on its machine.

    Attributes:
        starts: layers at which a span may begin, rising; the first is 0.
        num_layers: of the whole model.
    """

    starts: tuple[int, ...]
    num_layers: int

    @property
    def ends(self) -> tuple[int, ...]:
        """Where a span may end, rising."""
        return (*self.starts[1:], self.num_layers)

    def allow(self, span: Span) -> bool:
        """Whether a span cuts no layers apart that belong together."""
        return span.start in self.starts and span.end in self.ends

    @property
    def together(self) -> tuple[Span, ...]:
        """Layers that no span may cut apart, in order; empty where a span may begin at every layer."""
        spans = (Span(start, end) for start, end in zip(self.starts, self.ends, strict=True))
        return tuple(span for span in spans if len(span) > 1)

    def check(self, span: Span) -> Span:
        """Return a span that the model has and that cuts nothing apart.

        Raises:
            LayersError: says where the model can be cut instead.
        """
        span.within(self.num_layers)
        if self.allow(span):
            return span
        cut = span.start if span.start not in self.starts else span.end
        ends = (0, *self.ends)
        below, above = max(end for end in ends if end < cut), min(end for end in ends if end > cut)
        raise LayersError(
            f"layers {span}: layers {below}-{above} use each other's keys and must be on one machine; "
            f"write {below} or {above} in place of {cut}"
        )

    def nearest(self, span: Span) -> Span:
        """The allowed span, no longer than this one, that has most of its layers.

        Raises:
            LayersError: what belongs together is longer everywhere.
        """
        if self.allow(span):
            return span
        spans = [Span(start, end) for start in self.starts for end in self.ends if 0 < end - start <= len(span)]
        if not spans:
            shortest = min(end - start for start, end in zip(self.starts, self.ends, strict=True))
            raise LayersError(f"this model is cut into {shortest} layers at least, and {len(span)} were to be held")
        return max(spans, key=lambda one: (min(one.end, span.end) - max(one.start, span.start), len(one)))


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
