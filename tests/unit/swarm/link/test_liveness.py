"""Silence is what is not receipted for too long; slow links and long forwards are not silent."""

from __future__ import annotations

import asyncio
import time

from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.link.link import ROUND_TRIPS, SILENCE_S, Link, LivenessWatch, pause
from swarm.protocol.messages import Attached, RouteHop

RTT_S = 0.05
LIMIT_S = ROUND_TRIPS * RTT_S + SILENCE_S


def test_what_is_receipted_is_never_silent() -> None:
    watch = LivenessWatch()
    assert not watch.is_silent(1e9, RTT_S), "nothing was written"
    watch.write(10.0)
    watch.receipt(1, 10.1)
    assert not watch.is_silent(1e9, RTT_S), "nothing is owed, however long ago it was"


def test_a_part_without_receipt_is_silence_after_the_limit() -> None:
    watch = LivenessWatch()
    watch.write(10.0)
    assert not watch.is_silent(10.0 + LIMIT_S - 0.001, RTT_S)
    assert watch.is_silent(10.0 + LIMIT_S + 0.001, RTT_S)


def test_each_receipt_of_a_large_frame_is_progress() -> None:
    watch = LivenessWatch()
    for _ in range(5):
        watch.write(10.0)
    for parts in range(1, 5):
        watch.receipt(parts, 10.0 + parts * LIMIT_S * 0.9)
    assert not watch.is_silent(10.0 + 4.5 * LIMIT_S * 0.9, RTT_S)
    assert watch.is_silent(10.0 + 4 * LIMIT_S * 0.9 + LIMIT_S + 0.001, RTT_S)


def test_writing_on_and_stale_or_impossible_receipts_are_no_progress() -> None:
    """A peer that is deaf in one direction hears nothing new, whatever it says again and again."""
    watch = LivenessWatch()
    watch.write(10.0)
    watch.receipt(1, 10.0)
    watch.write(11.0)
    for second in range(12, 15):
        watch.write(float(second))
        watch.receipt(1, float(second))
        watch.receipt(99, float(second))
    assert watch.is_silent(11.0 + LIMIT_S + 0.001, RTT_S)


def test_time_in_which_this_side_did_not_run_is_excused() -> None:
    """A lid that was closed for an hour makes nobody silent."""
    watch = LivenessWatch()
    watch.write(10.0)
    watch.excuse(3_600.0)
    assert not watch.is_silent(3_610.0 + LIMIT_S - 0.001, RTT_S)
    assert watch.is_silent(3_610.0 + LIMIT_S + 0.001, RTT_S)


async def test_a_pause_says_how_late_it_ended() -> None:
    def block() -> None:
        time.sleep(0.15)

    asyncio.get_running_loop().call_later(0.01, block)
    assert await pause(0.02) > 0.1


async def test_a_machine_that_stops_before_its_first_pong_is_silent() -> None:
    link = Link(RouteHop(PeerId("somebody"), Span(0, 4)), asyncio.Queue())
    link.watch.write(time.monotonic())
    assert not link.is_silent, "it has not taken the stream: that has a limit of its own"
    link.take(Attached(0, None))
    link.watch.receipt(1, time.monotonic())
    link.watch.write(time.monotonic() - 5.0)
    link.watch.progress_s = time.monotonic() - 5.0
    assert link.is_silent
