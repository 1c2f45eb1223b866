"""Sets of bytes of a file, as half-open ranges. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

ByteRange = tuple[int, int]
"""First byte, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class ByteRanges:
    """Bytes of a file.

    Attributes:
        ranges: in order; none is empty, and no two touch.
    """

    ranges: tuple[ByteRange, ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[ByteRange], gap: int = 0) -> Self:
        """The bytes of some ranges, in whatever order, with what lies between two that are so close or closer.

        Raises:
            ValueError: a range is none.
        """
        merged: list[ByteRange] = []
        for start, end in sorted(ranges):
            if not 0 <= start <= end:
                raise ValueError(f"no range of bytes: {start} to {end}")
            if start == end:
                continue
            if merged and start - merged[-1][1] <= gap:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return cls(tuple(merged))

    def __iter__(self) -> Iterator[ByteRange]:
        return iter(self.ranges)

    @property
    def size_bytes(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def with_ranges(self, others: Iterable[ByteRange], gap: int = 0) -> ByteRanges:
        """These bytes and others."""
        return ByteRanges.of([*self.ranges, *others], gap)

    def without(self, others: ByteRanges) -> ByteRanges:
        """Those of these bytes that are none of the others."""
        left: list[ByteRange] = []
        rest = iter(others)
        other = next(rest, None)
        for start, end in self.ranges:
            at = start
            while other is not None and other[0] < end:
                if other[0] > at:
                    left.append((at, other[0]))
                at = max(at, other[1])
                if other[1] > end:
                    break
                other = next(rest, None)
            if at < end:
                left.append((at, end))
        return ByteRanges(tuple(left))

    def covers(self, others: ByteRanges) -> bool:
        """Whether all the others are among these."""
        return not others.without(self).ranges
