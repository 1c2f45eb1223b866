"""How far the client is from the tail."""

from __future__ import annotations

import pytest

from node.session.tail import MAX_ROUND_TRIP_MS, ReplyBuffer
from swarm.transport.link import ROUND_TRIPS_KEPT


def test_the_least_of_the_latest_round_trips_counts() -> None:
    replies = ReplyBuffer()
    assert replies.link_ms == 0.0
    for round_trip_ms in (80.0, 50.0, 200.0):
        replies.measured(round_trip_ms)
    assert replies.link_ms == pytest.approx(25.0)
    for _ in range(ROUND_TRIPS_KEPT):
        replies.measured(1e9)
    assert replies.link_ms == MAX_ROUND_TRIP_MS / 2, "whatever a client answers"
