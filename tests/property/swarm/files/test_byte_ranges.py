"""Ranges of bytes are sets of bytes: each operation is the sets' own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.files.parts.byte_ranges import ByteRange, ByteRanges

ENDS = st.integers(0, 40)
RANGES = st.lists(st.tuples(ENDS, ENDS).map(lambda pair: (min(pair), max(pair))), max_size=8)


def bytes_of(ranges: ByteRanges) -> set[int]:
    return {one for start, end in ranges for one in range(start, end)}


@given(RANGES, RANGES)
def test_they_are_sets(first: list[ByteRange], second: list[ByteRange]) -> None:
    ours, others = ByteRanges.of(first), ByteRanges.of(second)
    mine, theirs = bytes_of(ours), bytes_of(others)
    assert mine == {one for start, end in first for one in range(start, end)}
    assert ours.size_bytes == len(mine)
    assert bytes_of(ours.without(others)) == mine - theirs
    assert bytes_of(ours.with_ranges(second)) == mine | theirs
    assert ours.covers(others) == (mine >= theirs)


@given(RANGES, st.integers(0, 10))
def test_they_are_in_order_apart_and_not_empty(ranges: list[ByteRange], gap: int) -> None:
    for made in (ByteRanges.of(ranges, gap), ByteRanges.of(ranges).without(ByteRanges.of(ranges[:2]))):
        assert all(start < end for start, end in made)
        assert all(one[1] < other[0] for one, other in zip(made.ranges, made.ranges[1:], strict=False))
    assert all(
        other[0] - one[1] > gap
        for made in [ByteRanges.of(ranges, gap)]
        for one, other in zip(made.ranges, made.ranges[1:], strict=False)
    )


@pytest.mark.parametrize("wrong", [(-1, 4), (5, 4)])
def test_what_is_no_range_is_refused(wrong: ByteRange) -> None:
    with pytest.raises(ValueError, match="no range of bytes"):
        ByteRanges.of([wrong])
