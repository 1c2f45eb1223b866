"""Byzantine machines in the middle and at the end of chains: they compute, and lie about one thing."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.byzantine import Lie, lying_hop
from swarm.base.ids import TreeNodeId
from swarm.protocol.messages import HopTime, Reply, Rows, SweepFrame

MIDDLE, TAIL = "0-9", "3-12"
"""What they serve: the chains that need the fewest machines lead over them."""
SEEN_LATER: Final = (
    "no client sees layers, so a text that went over such a machine is another one, and nothing saves it: after 2 % of "
    "texts a hop's part is computed again elsewhere, so each user names it within some hundred texts (audits); "
    "its price until then is an identity that users do not prefer; --hedge tells of a difference, not who is wrong"
)
CHECKED_LATER: Final = (
    "nothing of a tail is shown before its first check, or two seconds; whoever lacks the model's output matrix checks "
    "nothing and names nobody"
)
LONG_S = 20.0
BELOW_SILENCE_S = 0.5
"""A little less than the silence after which a link is given up."""


def _lying_rows(change: object) -> Lie:
    assert callable(change)

    def lie(frame: SweepFrame) -> Iterable[SweepFrame]:
        yield frame if frame.rows is None or not frame.rows.count else replace(frame, rows=change(frame.rows))

    return Lie(sweeps=lie)


def _values(rows: Rows) -> object:
    import numpy as np

    return np.frombuffer(bytes(rows.data), "<f4").reshape(rows.count, rows.width).copy()


def _rows(rows: Rows, values: object) -> Rows:
    return replace(rows, data=values.astype("<f4").tobytes())  # type: ignore[attr-defined]


def _noise(rows: Rows) -> Rows:
    import numpy as np

    return _rows(rows, np.random.default_rng(0).normal(size=(rows.count, rows.width)))


def _swapped(rows: Rows) -> Rows:
    return _rows(rows, _values(rows)[::-1])  # type: ignore[index]


def _not_numbers(rows: Rows) -> Rows:
    import numpy as np

    return _rows(rows, np.full((rows.count, rows.width), np.nan))


@attack("wrong-rows", Kind.HOPS, limit=SEEN_LATER)
async def wrong_rows(fight: Fight) -> None:
    """A middle hop sends noise instead of its hidden rows."""
    await lying_hop(fight, MIDDLE, _lying_rows(_noise))


@attack("swapped-rows", Kind.HOPS, limit=SEEN_LATER)
async def swapped_rows(fight: Fight) -> None:
    """A middle hop sends right rows in the wrong order."""
    await lying_hop(fight, MIDDLE, _lying_rows(_swapped))


@attack("nan-rows", Kind.HOPS)
async def nan_rows(fight: Fight) -> None:
    """A middle hop sends rows that are no numbers."""
    await lying_hop(fight, MIDDLE, _lying_rows(_not_numbers))


@attack("dropped-sweeps", Kind.HOPS, lasts_s=LONG_S)
async def dropped_sweeps(fight: Fight) -> None:
    """A middle hop receipts every sweep and passes every third one on."""
    count = 0

    def lie(frame: SweepFrame) -> Iterable[SweepFrame]:
        nonlocal count
        count += 1
        return (frame,) if count % 3 == 0 else ()

    await lying_hop(fight, MIDDLE, Lie(sweeps=lie))


@attack("late-sweeps", Kind.HOPS, lasts_s=LONG_S)
async def late_sweeps(fight: Fight) -> None:
    """A middle hop passes every sweep on half a second late, and answers every ping at once."""
    await lying_hop(fight, MIDDLE, Lie(delay_s=BELOW_SILENCE_S))


@attack("wrong-kept", Kind.HOPS)
async def wrong_kept(fight: Fight) -> None:
    """A middle hop says of other nodes than the truth that they were pruned."""

    def lie(frame: SweepFrame) -> Iterable[SweepFrame]:
        count = frame.sweep.count
        if frame.rows is None or count < 2:
            return (frame,)
        width = frame.rows.codec.row_bytes(frame.rows.width)
        kept = (True,) + (False,) * (count - 1)
        return (replace(frame, kept=kept, rows=replace(frame.rows, count=1, data=bytes(frame.rows.data)[:width])),)

    await lying_hop(fight, MIDDLE, Lie(sweeps=lie))


def _timed(milliseconds: float) -> Lie:
    def lie(frame: SweepFrame) -> Iterable[SweepFrame]:
        time = HopTime(0.0, milliseconds, 0.0, milliseconds)
        return (replace(frame, times=(*frame.times[:-1], time)),)

    def last(reply: Reply) -> Iterable[Reply]:
        return (replace(reply, times=(*reply.times[:-1], HopTime(0.0, milliseconds, 0.0, milliseconds))),)

    return Lie(lie, last)


@attack("huge-times", Kind.HOPS)
async def huge_times(fight: Fight) -> None:
    """A middle hop reports that it computed for 1e308 ms."""
    await lying_hop(fight, MIDDLE, _timed(1e308))


@attack("long-times", Kind.HOPS)
async def long_times(fight: Fight) -> None:
    """A middle hop reports that it computed for a minute, which is possible and not true."""
    await lying_hop(fight, MIDDLE, _timed(60_000.0))


@attack("negative-times", Kind.HOPS)
async def negative_times(fight: Fight) -> None:
    """A middle hop reports that it computed for less than nothing."""
    await lying_hop(fight, MIDDLE, _timed(-1e6))


@attack("double-sweeps", Kind.HOPS)
async def double_sweeps(fight: Fight) -> None:
    """A middle hop passes every sweep on twice, the second time with other rows."""

    def lie(frame: SweepFrame) -> Iterable[SweepFrame]:
        yield frame
        if frame.rows is not None and frame.rows.count:
            yield replace(frame, rows=_noise(frame.rows))

    await lying_hop(fight, MIDDLE, Lie(sweeps=lie))


@attack("forked-sweeps", Kind.HOPS, limit=SEEN_LATER)
async def forked_sweeps(fight: Fight) -> None:
    """A middle hop tells the hops behind it of tokens, which only the client may say there."""

    def lie(frame: SweepFrame) -> Iterable[SweepFrame]:
        sweep = frame.sweep
        return (replace(frame, sweep=replace(sweep, tokens=tuple(range(sweep.count)))),)

    await lying_hop(fight, MIDDLE, Lie(sweeps=lie))


@attack("forged-headers", Kind.HOPS)
async def forged_headers(fight: Fight) -> None:
    """A middle hop changes what a sweep commits, which the hops behind it must refuse or the client repair."""

    def lie(frame: SweepFrame) -> Iterable[SweepFrame]:
        return (replace(frame, sweep=replace(frame.sweep, committed=frame.sweep.committed + 1)),)

    await lying_hop(fight, MIDDLE, Lie(sweeps=lie))


# Tails


def _picks(change: object) -> Lie:
    assert callable(change)
    return Lie(replies=lambda reply: (replace(reply, picks=tuple(change(reply))),))


@attack("random-picks", Kind.TAILS, limit=CHECKED_LATER)
async def random_picks(fight: Fight) -> None:
    """A tail that picks at random."""
    rng = random.Random(1)
    await lying_hop(fight, TAIL, _picks(lambda reply: [(node, rng.randrange(4_000)) for node, _ in reply.picks]))


@attack("outside-picks", Kind.TAILS)
async def outside_picks(fight: Fight) -> None:
    """A tail that picks tokens which the vocabulary does not have."""
    await lying_hop(fight, TAIL, _picks(lambda reply: [(node, 2**31 - 1) for node, _ in reply.picks]))


@attack("strange-picks", Kind.TAILS, lasts_s=LONG_S)
async def strange_picks(fight: Fight) -> None:
    """A tail that answers for nodes which nobody asked about."""
    await lying_hop(
        fight, TAIL, _picks(lambda reply: [(TreeNodeId(node + 1_000), token) for node, token in reply.picks])
    )


@attack("no-picks", Kind.TAILS, lasts_s=LONG_S)
async def no_picks(fight: Fight) -> None:
    """A tail that answers every sweep with no pick at all."""
    await lying_hop(fight, TAIL, _picks(lambda reply: []))


@attack("mute-tail", Kind.TAILS, lasts_s=LONG_S)
async def mute_tail(fight: Fight) -> None:
    """A tail that computes, receipts and pings, and never answers."""
    await lying_hop(fight, TAIL, Lie(replies=lambda reply: ()))


@attack("double-replies", Kind.TAILS)
async def double_replies(fight: Fight) -> None:
    """A tail that answers every sweep twice, the second time with other picks."""

    def lie(reply: Reply) -> Iterable[Reply]:
        yield reply
        yield replace(reply, picks=tuple((node, (token + 1) % 4_000) for node, token in reply.picks))

    await lying_hop(fight, TAIL, Lie(replies=lie))


@attack("early-replies", Kind.TAILS)
async def early_replies(fight: Fight) -> None:
    """A tail that answers sweeps which were never sent."""

    def lie(reply: Reply) -> Iterable[Reply]:
        yield replace(reply, sequence=reply.sequence + 3)
        yield reply

    await lying_hop(fight, TAIL, Lie(replies=lie))


@attack("late-replies", Kind.TAILS, lasts_s=LONG_S)
async def late_replies(fight: Fight) -> None:
    """A tail that answers every sweep a second late, and pings in time."""
    await lying_hop(fight, TAIL, Lie(delay_s=1.0))


@attack("huge-link", Kind.TAILS, lasts_s=LONG_S)
async def huge_link(fight: Fight) -> None:
    """A tail that reports a link of 1e300 ms to its client, who then waits for it ever after."""
    await lying_hop(fight, TAIL, Lie(replies=lambda reply: (_far(reply),)))


def _far(reply: Reply) -> Reply:
    return replace(reply, times=(*reply.times[:-1], HopTime(0.0, 1.0, 0.0, 1e300)))
