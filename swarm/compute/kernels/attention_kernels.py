"""The kernels of `swarm.compute.kernels.tree_attention`: store, items, rows, combine. Nothing is chosen here.

A row's result depends on its own path alone: sums run over positions, cut where SPLIT, BLOCK and RUN say.
Names: m is the largest score so far and total the sum of weights so far, both as powers of two; `part` is a partial
result, which holds both and the weighted values. k and v count the numbers of a key and a value.

Constants that many of them take:
    widths    numbers of a key and of a value, both again as powers of two, bytes that rows of each are aligned to
    rules     positions that a row sees, bound on scores (0: none, each), positions at a time
"""

from __future__ import annotations

import triton
import triton.language as tl

from swarm.compute.kernels import batch_plan
from swarm.compute.kernels.arithmetic import multiply_add, rounded
from swarm.compute.kernels.support import is_interpreted

HEAD = tl.constexpr(batch_plan.HEAD)
FIELDS = tl.constexpr(batch_plan.FIELDS)
ITEM = tl.constexpr(batch_plan.ITEM)
SPLIT = tl.constexpr(batch_plan.SPLIT)
RUN = tl.constexpr(batch_plan.RUN)
SHARE = tl.constexpr(batch_plan.BLOCK)
"""A row's own program goes on from the last whole block of so many positions."""
LINE = tl.constexpr(3)
"""Numbers of a session in the table: address of its keys, of its values, capacity."""
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def _session_kv(
    addresses: tl.tensor, session: tl.tensor, head: tl.tensor, widths: tl.constexpr, element: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Where a session keeps a head's key and value of slot 0. Nothing else knows what a line of the table says."""
    line = addresses + session * LINE
    offset = tl.cast(head, tl.int64) * tl.load(line + 2)
    keys = tl.load(line).to(tl.pointer_type(element)) + offset * widths[0]
    values = tl.load(line + 1).to(tl.pointer_type(element)) + offset * widths[1]
    return keys, values


@triton.jit
def store(  # noqa: PLR0913 - a kernel's
    key: tl.tensor,
    value: tl.tensor,
    addresses: tl.tensor,
    plan: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    widths: tl.constexpr,
) -> None:
    """New keys and values to their slots: a program per row and KV head."""
    row, head = tl.program_id(0), tl.program_id(1)
    session = tl.load(plan + HEAD + row * FIELDS)
    if session >= 0:
        slot = tl.load(plan + HEAD + row * FIELDS + 1).to(tl.int64)
        keys, values = _session_kv(addresses, session, head, widths, key.dtype.element_ty)
        k, v = tl.arange(0, widths[2]), tl.arange(0, widths[3])
        new = tl.load(key + head * k_head + row * k_row + k, k < widths[0])
        tl.store(keys + slot * widths[0] + k, new, k < widths[0])
        new = tl.load(value + head * v_head + row * v_row + v, v < widths[1])
        tl.store(values + slot * widths[1] + v, new, v < widths[1])


@triton.jit
def _add_block(  # noqa: PLR0913 - a kernel's
    query: tl.tensor,
    m: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slot: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    widths: tl.constexpr,
    rules: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a block of positions to a partial result.

    Args:
        query: [lanes, padded key width]
        m: [lanes]
        total: [lanes]
        out: [lanes, padded value width]
        keys: where slot 0 is.
        values: where slot 0 is.
        slot: int64 [block], -1 for none.
        seen: bool [lanes, block]
        scale: of query · key; where scores have no bound, as a power of two.
    """
    align_k: tl.constexpr = widths[4]
    align_v: tl.constexpr = widths[5]
    bound: tl.constexpr = rules[1]
    k, v = tl.arange(0, widths[2]), tl.arange(0, widths[3])
    held = tl.multiple_of(keys + slot[None, :] * widths[0] + k[:, None], [align_k, 1])
    held = tl.load(held, (slot >= 0)[None, :] & (k < widths[0])[:, None], 0.0)
    nothing = tl.zeros([query.shape[0], held.shape[1]], tl.float32)
    scores = multiply_add(query, held, nothing, INTERPRETED) * scale
    if bound > 0:
        # tanh by its exponential; as a power of two
        e = tl.exp2(tl.abs(scores) * (-2 * LOG2E / bound))
        bounded = (1 - e) / (1 + e) * (bound * LOG2E)
        scores = tl.where(scores < 0, -bounded, bounded)
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(m - safe)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    held = tl.multiple_of(values + slot[:, None] * widths[1] + v[None, :], [1, align_v])
    held = tl.load(held, (slot >= 0)[:, None] & (v < widths[1])[None, :], 0.0)
    return new, total, multiply_add(rounded(weights, held.dtype, INTERPRETED), held, out * shrink[:, None], INTERPRETED)


@triton.jit
def _fold(  # noqa: PLR0913 - a kernel's
    m: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    part_m: tl.tensor,
    part_total: tl.tensor,
    part_out: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a partial result. An empty one changes no bit, and added to nothing it stays as it is.

    Written as fma, so that every kernel rounds alike: nothing is left to the compiler's taste.
    """
    new = tl.maximum(m, part_m)
    safe = tl.where(new == float("-inf"), 0.0, new)
    shrink, weight = tl.exp2(m - safe), tl.exp2(part_m - safe)
    total = tl.fma(part_total, weight, total * shrink)
    return new, total, tl.fma(part_out, weight[:, None], out * shrink[:, None])


@triton.jit
def _slots(plan: tl.tensor, field: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Slots of some positions of a row; -1 behind its own."""
    front, position = tl.load(field + 2), tl.load(field + 3)
    listed = plan + tl.load(plan + 2) + tl.load(field + 4) - front
    return tl.where(place < front, place, tl.load(listed + place, (place >= front) & (place <= position), -1))


@triton.jit
def _part_of(split: tl.tensor, folded: tl.tensor) -> tl.tensor:
    """Which of a row's partial results is a split's: there is one for each run of those that are folded."""
    return tl.where(split < folded, split // RUN, split - folded + (folded + RUN - 1) // RUN)


@triton.jit
def items(  # noqa: PLR0913 - a kernel's
    query: tl.tensor,
    addresses: tl.tensor,
    plan: tl.tensor,
    part_out: tl.tensor,
    part_ml: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    scale: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    tile: tl.constexpr,
    lanes: tl.constexpr,
    merged: tl.constexpr,
    widths: tl.constexpr,
    rules: tl.constexpr,
) -> None:
    """Work off the plan's items, per KV head: a tile of rows against what lies in front of each of them.

    `merged`: only whole splits in front of rows; items of no rows are a single row's last splits.
    """
    unit: tl.constexpr = SPLIT if merged else SHARE
    block: tl.constexpr = rules[2]
    padded: tl.constexpr = widths[3]
    lane, k, v = tl.arange(0, lanes), tl.arange(0, widths[2]), tl.arange(0, padded)
    for work in range(tl.program_id(0), tl.load(plan) * kv_heads, tl.num_programs(0)):
        item, head = plan + tl.load(plan + 1) + work // kv_heads * ITEM, work % kv_heads
        first, rows, split = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        session, splits = tl.load(item + 3), tl.load(item + 4)
        row = first + lane // group
        there = (lane // group < tl.maximum(rows, 1)) & (lane // group < tile)
        field = plan + HEAD + row * FIELDS
        position = tl.load(field + 3, there, 0)
        until = tl.load(field + 2, there, 0) // unit * unit
        if merged:
            until = tl.where(rows > 0, until, position + 1)
        low = position - rules[0] if rules[0] > 0 else position * 0 - 1  # what a row sees lies above
        begin, end = split * SPLIT, (split + splits) * SPLIT
        sees = there & (tl.maximum(begin, low + 1) < tl.minimum(end, until))
        start = tl.maximum(begin, (tl.min(tl.where(sees, low, end), 0) + 1) // block * block)
        stop = tl.minimum(end, tl.max(tl.where(sees, until, 0), 0))
        if stop > start:
            query_heads = head * group + lane % group
            keys, values = _session_kv(addresses, session, head, widths, query.dtype.element_ty)
            at_query = query + query_heads[:, None] * q_head + row[:, None] * q_row + k[None, :]
            q = tl.load(at_query, there[:, None] & (k < widths[0])[None, :], 0.0)
            m = tl.full([lanes], float("-inf"), tl.float32)
            total = tl.zeros([lanes], tl.float32)
            out = tl.zeros([lanes, padded], tl.float32)
            if merged:
                if rows > 0:
                    for at in range(start, stop, block):
                        place = at + tl.arange(0, block)
                        seen = (place[None, :] < until[:, None]) & (place[None, :] > low[:, None])
                        slot = place.to(tl.int64)
                        m, total, out = _add_block(q, m, total, out, keys, values, slot, seen, scale, widths, rules)
                else:
                    for at in range(start, stop, block):
                        place = at + tl.arange(0, block)
                        seen = (place[None, :] < until[:, None]) & (place[None, :] > low[:, None])
                        slot = _slots(plan, plan + HEAD + first * FIELDS, place).to(tl.int64)
                        m, total, out = _add_block(q, m, total, out, keys, values, slot, seen, scale, widths, rules)
            else:
                for one in range(start // SPLIT, (stop - 1) // SPLIT + 1):
                    part_m = tl.full([lanes], float("-inf"), tl.float32)
                    part_total = tl.zeros([lanes], tl.float32)
                    part = tl.zeros([lanes, padded], tl.float32)
                    for at in range(tl.maximum(start, one * SPLIT), tl.minimum(stop, (one + 1) * SPLIT), block):
                        place = at + tl.arange(0, block)
                        seen = (place[None, :] < until[:, None]) & (place[None, :] > low[:, None])
                        slot = place.to(tl.int64)
                        part_m, part_total, part = _add_block(
                            q, part_m, part_total, part, keys, values, slot, seen, scale, widths, rules
                        )
                    m, total, out = _fold(m, total, out, part_m, part_total, part)
            nth = tl.load(field + 5, there, 0) + _part_of(split, tl.load(field + 6, there, 0))
            index = nth.to(tl.int64) * (kv_heads * group) + query_heads
            tl.store(part_out + index[:, None] * widths[1] + v[None, :], out, sees[:, None] & (v < widths[1])[None, :])
            tl.store(part_ml + index * 2, m, sees)
            tl.store(part_ml + index * 2 + 1, total, sees)


@triton.jit
def own_blocks(  # noqa: PLR0913 - a kernel's
    query: tl.tensor,
    addresses: tl.tensor,
    plan: tl.tensor,
    part_out: tl.tensor,
    part_ml: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    scale: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    lanes: tl.constexpr,
    widths: tl.constexpr,
    rules: tl.constexpr,
) -> None:
    """A row's last blocks, whose slots are looked up, per KV head; goes on from what `items` has of the same split."""
    row, head = tl.program_id(0), tl.program_id(1)
    field = plan + HEAD + row * FIELDS
    session = tl.load(field)
    if session >= 0:
        block: tl.constexpr = rules[2]
        lane, k, v = tl.arange(0, lanes), tl.arange(0, widths[2]), tl.arange(0, widths[3])
        there, query_heads = lane < group, head * group + lane
        front, position = tl.load(field + 2), tl.load(field + 3)
        keys, values = _session_kv(addresses, session, head, widths, query.dtype.element_ty)
        at_query = query + query_heads[:, None] * q_head + row * q_row + k[None, :]
        q = tl.load(at_query, there[:, None] & (k < widths[0])[None, :], 0.0)
        done = front // SHARE * SHARE
        low = position - rules[0] if rules[0] > 0 else -1
        start = tl.maximum(done, (low + 1) // block * block)
        for split in range(start // SPLIT, position // SPLIT + 1):
            begin, end = split * SPLIT, (split + 1) * SPLIT
            nth = tl.load(field + 5) + _part_of(split, tl.load(field + 6))
            index = nth.to(tl.int64) * (kv_heads * group) + query_heads
            begun = there & (tl.maximum(begin, low + 1) < tl.minimum(end, done))
            m = tl.load(part_ml + index * 2, begun, float("-inf"))
            total = tl.load(part_ml + index * 2 + 1, begun, 0.0)
            at_part = part_out + index[:, None] * widths[1] + v[None, :]
            out = tl.load(at_part, begun[:, None] & (v < widths[1])[None, :], 0.0)
            for at in range(tl.maximum(start, begin), tl.minimum(end, position + 1), block):
                place = at + tl.arange(0, block)
                seen = there[:, None] & ((place > low) & (place <= position))[None, :]
                slot = _slots(plan, field, place).to(tl.int64)
                m, total, out = _add_block(q, m, total, out, keys, values, slot, seen, scale, widths, rules)
            tl.store(at_part, out, there[:, None] & (v < widths[1])[None, :])
            tl.store(part_ml + index * 2, m, there)
            tl.store(part_ml + index * 2 + 1, total, there)


@triton.jit
def _fold_stored(  # noqa: PLR0913 - a kernel's
    m: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    part_out: tl.tensor,
    part_ml: tl.tensor,
    index: tl.tensor,
    there: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add RUN stored partial results, in order, of which those within `[begin, end)` are there.

    Args:
        m: [h]
        total: [h]
        out: [h, padded value width]
        index: [h] of the first one.
        there: bool [h] heads that there are.
    """
    v = tl.arange(0, out.shape[1])
    for step in tl.static_range(RUN):
        loads = there & (step >= begin) & (step < end)
        part_m = tl.load(part_ml + (index + step * heads) * 2, loads, float("-inf"))
        part_total = tl.load(part_ml + (index + step * heads) * 2 + 1, loads, 0.0)
        at_part = part_out + (index + step * heads)[:, None] * width + v[None, :]
        part = tl.load(at_part, loads[:, None] & (v < width)[None, :], 0.0)
        m, total, out = _fold(m, total, out, part_m, part_total, part)
    return m, total, out


@triton.jit
def combine(  # noqa: PLR0913 - a kernel's
    part_out: tl.tensor,
    part_ml: tl.tensor,
    plan: tl.tensor,
    sinks: tl.tensor,
    result: tl.tensor,
    heads: tl.constexpr,
    at_once: tl.constexpr,
    has_sinks: tl.constexpr,
    widths: tl.constexpr,
    rules: tl.constexpr,
) -> None:
    """A row's partial results become one, `at_once` heads a program: those of a run of splits first, then the runs.

    Rows of nobody become zeros.
    """
    padded: tl.constexpr = widths[3]
    row = tl.program_id(0)
    head, v = tl.program_id(1) * at_once + tl.arange(0, at_once), tl.arange(0, padded)
    there = head < heads
    field = plan + HEAD + row * FIELDS
    m = tl.full([at_once], float("-inf"), tl.float32)
    total = tl.zeros([at_once], tl.float32)
    out = tl.zeros([at_once, padded], tl.float32)
    if tl.load(field) >= 0:
        if has_sinks:
            m = tl.load(sinks + head, there, float("-inf")).to(tl.float32) * LOG2E
            total = tl.where(m == float("-inf"), 0.0, 1.0)
        position, folded = tl.load(field + 3), tl.load(field + 6)
        runs = folded // RUN
        splits = position // SPLIT + 1
        first = tl.maximum(position - rules[0] + 1, 0) // SPLIT if rules[0] > 0 else 0  # none in front of it is seen
        index = tl.load(field + 5).to(tl.int64) * heads + head
        for run in range(first // RUN // RUN * RUN, runs, RUN):
            begin, end = first // RUN - run, runs - run
            m, total, out = _fold_stored(
                m, total, out, part_out, part_ml, index + run * heads, there, begin, end, heads, widths[1]
            )
        piece = index + runs * heads  # the folded splits of a run whose other splits are not
        index += _part_of(folded, folded) * heads - folded * heads
        for split in range(tl.maximum(first // RUN, runs) * RUN, splits, RUN):
            goes_on = there & (split < folded) & (first < folded)
            part_m = tl.load(part_ml + piece * 2, goes_on, float("-inf"))
            part_total = tl.load(part_ml + piece * 2 + 1, goes_on, 0.0)
            at_part = part_out + piece[:, None] * widths[1] + v[None, :]
            part = tl.load(at_part, goes_on[:, None] & (v < widths[1])[None, :], 0.0)
            begin, end = tl.maximum(first, folded) - split, splits - split
            part_m, part_total, part = _fold_stored(
                part_m, part_total, part, part_out, part_ml, index + split * heads, there, begin, end, heads, widths[1]
            )
            m, total, out = _fold(m, total, out, part_m, part_total, part)
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    at_result = result + (row * heads + head)[:, None].to(tl.int64) * widths[1] + v[None, :]
    tl.store(at_result, rounded(out, result.dtype.element_ty, INTERPRETED), there[:, None] & (v < widths[1])[None, :])
