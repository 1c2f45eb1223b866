"""Plans of random batches against their trees: each row sees its path, each position once, and all fits the room."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.ids import TreeNodeId
from swarm.compute.kernels.batch_plan import (
    BLOCK,
    FIELDS,
    HEAD,
    ITEM,
    MERGED_ROWS,
    RUN,
    SPLIT,
    BatchPlan,
    PlannedSession,
    PlanOverflow,
    part_count,
    plan_batch,
    plan_words,
)
from swarm.compute.kv_slots import KvSlots

MOST_TOKENS = 128 << 10


@dataclass
class Grown:
    """A session with a tree, kept twice: in `KvSlots`, and as parents."""

    slots: KvSlots
    parents: dict[int, int | None] = field(default_factory=dict)
    visible: np.ndarray = field(init=False)

    def append(self, parents: list[int | None]) -> None:
        """Add nodes; their parents are counted among live nodes and new ones, None is the tip."""
        first = max(self.parents, default=-1) + 1
        names = [*map(int, self.slots.ids), *range(first, first + len(parents))]
        positions = dict(zip(map(int, self.slots.ids), self.slots.positions[self.slots.committed :], strict=True))
        for node, parent in zip(range(first, first + len(parents)), parents, strict=True):
            above = None if parent is None else names[parent]
            self.parents[node] = above
            positions[node] = self.slots.committed if above is None else positions[above] + 1
        new = names[len(self.slots.ids) :]
        above_new = [None if self.parents[node] is None else TreeNodeId(self.parents[node] or 0) for node in new]
        ids = [TreeNodeId(node) for node in new]
        self.visible = self.slots.append(ids, above_new, [int(positions[node]) for node in new])

    def path(self, node: int) -> list[int]:
        """Live nodes from a child of the tip down to this one."""
        path = [node]
        while (above := self.parents[path[0]]) is not None:
            path.insert(0, above)
        return path

    def commit(self, node: int) -> None:
        """Make its path tokens; what lies below it stays."""
        path = self.path(node)
        live = [int(other) for other in self.slots.ids]
        below = [other for other in live if other not in path and node in self.path(other)]
        self.slots.commit([TreeNodeId(each) for each in path], [TreeNodeId(each) for each in below])
        self.parents = {each: None if self.parents[each] == node else self.parents[each] for each in below}


@st.composite
def sessions(draw: st.DrawFn) -> Grown:
    grown = Grown(KvSlots(MOST_TOKENS))
    grown.slots.committed = draw(st.integers(0, 700) | st.integers(0, MOST_TOKENS - 200))
    for count in draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)):
        node: int | None = draw(st.sampled_from([None, *sorted(grown.parents)]))
        if node is not None:
            grown.commit(node)
        live = len(grown.slots.ids)
        is_chain = draw(st.booleans())
        above = [draw(st.none() | st.integers(0, live + row - 1)) if live + row else None for row in range(count)]
        grown.append([live + row - 1 if is_chain and row else above[row] for row in range(count)])
    return grown


def seen(plan: BatchPlan, row: int, committed: int) -> list[int]:
    """Slots that a row sees behind the committed tokens, by position."""
    _, _, front, position, start, *_ = map(int, plan.words[HEAD + row * FIELDS :][:FIELDS])
    listed = plan.words[plan.words[2] + start :]
    return [place if place < front else int(listed[place - front]) for place in range(committed, position + 1)]


@given(st.lists(sessions(), min_size=1, max_size=3), st.sampled_from([1, 3, 16]))
@settings(max_examples=60)
def test_each_row_sees_its_path_and_each_position_is_added_once(batch: list[Grown], tile: int) -> None:
    rows = sum(len(grown.visible) for grown in batch)
    planned = [PlannedSession(line + 5, grown.slots.committed, grown.visible) for line, grown in enumerate(batch)]
    for bucket in {max(rows, MERGED_ROWS), max(rows, 64)}:
        plan = plan_batch(planned, bucket, tile, MOST_TOKENS)
        fields = plan.words[HEAD : HEAD + bucket * FIELDS].reshape(bucket, FIELDS)
        assert (fields[rows:] == -1).all()
        row = 0
        for line, grown in enumerate(batch):
            slots = grown.slots
            for node in map(int, slots.ids[len(slots.ids) - len(grown.visible) :]):
                path = [slots.committed + slots.ids.index(TreeNodeId(each)) for each in grown.path(node)]
                assert fields[row, :2].tolist() == [line + 5, path[-1]]
                assert plan.positions[row] == fields[row, 3] == slots.committed + len(path) - 1
                assert seen(plan, row, slots.committed) == path
                assert fields[row, 2] >= slots.committed
                row += 1
        check_cover(plan, fields[:rows].astype(np.int64), is_merged=bucket <= MERGED_ROWS)


def part_of(split: int, folded: int) -> int:
    """Which of a row's partial results is a split's."""
    return split // RUN if split < folded else split - folded - (-folded // RUN)


def check_cover(plan: BatchPlan, fields: np.ndarray, *, is_merged: bool) -> None:
    """Items, and each row's last blocks where they have no items, cover each row's positions once, part by part."""
    count, begin = plan.words[:2]
    items = plan.words[begin : begin + count * ITEM].reshape(-1, ITEM)
    unit = SPLIT if is_merged else BLOCK
    spans: dict[int, list[tuple[int, int]]] = {row: [] for row in range(len(fields))}
    parts: Counter[tuple[int, int]] = Counter()
    for first, several, split, line, splits in items.tolist():
        assert several or splits == 1
        for row in range(first, first + max(several, 1)):
            assert fields[row, 0] == line
            until = fields[row, 2] // unit * unit if several else fields[row, 3] + 1
            start, stop = split * SPLIT, min((split + splits) * SPLIT, until)
            if start < stop:
                spans[row].append((start, stop))
                parts[row, part_of(split, fields[row, 6])] += 1
                assert splits == 1 or split + splits <= fields[row, 6]
    for row, (_, _, front, position, _, start, folded) in enumerate(fields.tolist()):
        if not is_merged:
            done = front // unit * unit
            for split in range(done // SPLIT, position // SPLIT + 1):
                parts[row, part_of(split, folded)] = 1
            if done <= position:
                spans[row].append((done, position + 1))
        edges = [edge for span in sorted(spans[row]) for edge in span]
        assert edges[0] == 0
        assert edges[-1] == position + 1
        assert edges[1:-1:2] == edges[2::2]
        mine = sorted(part for of, part in parts if of == row)
        assert mine == list(range(part_of(position // SPLIT, folded) + 1))
        assert start == sum(part_of(last // SPLIT, many) + 1 for last, many in fields[:row, [3, 6]].tolist())
    assert set(parts.values()) == {1}
    assert plan.parts == len(parts)


@given(st.integers(1, 600), st.integers(0, MOST_TOKENS - 600), st.sampled_from([1, 5, 16]))
@settings(max_examples=40)
def test_rows_that_continue_the_tokens_always_fit(count: int, committed: int, tile: int) -> None:
    chain = PlannedSession(0, committed, np.tri(count, dtype=np.bool_))
    bucket = max(16, 1 << (count - 1).bit_length())
    plan = plan_batch([chain], bucket, tile, MOST_TOKENS)
    assert len(plan.words) <= plan_words(bucket, MOST_TOKENS)
    assert plan.parts <= part_count(bucket, MOST_TOKENS)


def deep(count: int) -> np.ndarray:
    """A node, and beside it a chain of which nothing continues the tokens."""
    visible = np.tri(count, dtype=np.bool_)
    visible[1:, 0] = False
    return visible


def test_what_does_not_fit_is_refused_and_fits_when_it_is_cut() -> None:
    visible = deep(512)
    with pytest.raises(PlanOverflow, match="too many ancestors"):
        plan_batch([PlannedSession(0, 3000, visible)], 512, 16, 4096)
    for start in range(0, 512, 32):
        plan_batch([PlannedSession(0, 3000, visible[start : start + 32, : start + 32])], 512, 16, 4096)
    for end in (100, 511):
        plan_batch([PlannedSession(0, 3000, visible[end : end + 1, : end + 1])], 16, 16, 4096)
    with pytest.raises(PlanOverflow, match="17 rows in a bucket of 16"):
        plan_batch([PlannedSession(0, 0, np.tri(17, dtype=np.bool_))], 16, 16)
    with pytest.raises(PlanOverflow, match="a position of 40 in sessions of 40"):
        plan_batch([PlannedSession(0, 40, np.tri(1, dtype=np.bool_))], 16, 16, 40)


def test_an_empty_batch_has_rows_of_nobody_only() -> None:
    plan = plan_batch([], 16, 16, 4096)
    assert (plan.words[HEAD:] == -1).all()
    assert (plan.words[0], plan.parts, len(plan.positions)) == (0, 0, 0)
