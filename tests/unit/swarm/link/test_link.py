"""When a link is pinged: never while other messages keep it busy, but for its round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

import swarm.link.link
from swarm.base.errors import HopError, HopMisbehaved
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.link.link import IDLE_PING_S, PING_S, ROUND_TRIPS_KEPT, WORKING_S, Link
from swarm.link.successor import SuccessorLink, SuccessorStream
from swarm.protocol import wire
from swarm.protocol.messages import Close, Credits, Downstream, Ping, Pong, Ready, RouteHop, Upstream


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(swarm.link.link, "time", clock)
    return clock


@pytest.fixture
def link(clock: Clock) -> Link:
    outbox: asyncio.Queue[Downstream] = asyncio.Queue()
    return Link(RouteHop(PeerId("next"), Span(4, 8)), outbox)


def pinged(link: Link, clock: Clock, seconds: float, every_s: float | None = None) -> Iterator[float]:
    """When it is pinged in so many seconds, while something is sent every so often."""
    began_s = said_s = clock.now_s
    while clock.now_s < began_s + seconds:
        clock.now_s = round(clock.now_s + 0.01, 6)
        if every_s is not None and clock.now_s - said_s >= every_s - 1e-6:
            said_s = clock.now_s
            link.send(Close("as good as a sweep"))
        if link.ping_in_s <= 0:
            link.ping()
            yield clock.now_s - began_s


def test_a_quiet_link_is_pinged_often_while_a_session_works_and_seldom_later(link: Link, clock: Clock) -> None:
    times = list(pinged(link, clock, WORKING_S + 6 * IDLE_PING_S))
    working = [at for at in times if at <= WORKING_S]
    assert len(working) == pytest.approx(WORKING_S / PING_S, abs=2)
    assert len(times) - len(working) == pytest.approx(6, abs=1)


def test_the_least_of_the_latest_round_trips_is_the_networks(link: Link, clock: Clock) -> None:
    def measure(round_trip_s: float) -> None:
        link.ping()
        (nonce,) = link._pings
        clock.now_s += round_trip_s
        link.take(Pong(nonce))

    successor = SuccessorLink.__new__(SuccessorLink)
    successor._stream = SuccessorStream(link.hop, link)
    link.rtt_ms = 70.0
    assert successor.rtt_ms == 70.0, "what dialling took, until a ping is back"
    for round_trip_s in (0.08, 0.05, 0.2):
        measure(round_trip_s)
    assert successor.rtt_ms == pytest.approx(50.0)
    assert link.rtt_ms == pytest.approx(200.0), "who is silent is told by the latest one"
    for _ in range(ROUND_TRIPS_KEPT):
        measure(0.1)
    assert successor.rtt_ms == pytest.approx(100.0), "the network is slower by now"


def test_what_is_sent_stands_for_pings_but_the_round_trip_is_measured(link: Link, clock: Clock) -> None:
    times = list(pinged(link, clock, 9.0, every_s=0.2))
    assert len(times) == pytest.approx(9.0 / IDLE_PING_S, abs=1)
    assert isinstance(link.outbox.get_nowait(), Close)


def test_never_is_a_working_link_quiet_for_longer_than_between_pings(link: Link, clock: Clock) -> None:
    """Or a machine that stopped would be noticed later than one that nothing is sent to."""
    list(pinged(link, clock, 5.0, every_s=0.4))
    sent = link.outbox.qsize()
    kinds = [type(link.outbox.get_nowait()) for _ in range(sent)]
    assert kinds.count(Close) == pytest.approx(5.0 / 0.4, abs=1)
    assert kinds.count(Ping) >= kinds.count(Close) - 1, "one between each two"


class Answering:
    """A stream on which only this is heard."""

    def __init__(self, *data: bytes) -> None:
        self._data = list(data)

    async def read(self) -> object:
        return self._data.pop(0) if self._data else None


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff",
        b"",
        wire.encode_upstream(Ready(0, Credits(0, 1, 1))),
        wire.encode_upstream(Ready(0, Credits(1, 1, 0))),
        wire.encode_upstream(Ready(2**63, Credits(1, 1, 1))),
    ],
    ids=["garbage", "nothing", "no window", "no nodes", "odd number"],
)
async def test_a_machine_that_says_what_nobody_can_read_is_refused(data: bytes, link: Link) -> None:
    heard: list[Upstream | HopError] = []
    said = Pong(1)
    await swarm.link.link._read(cast("Any", Answering(wire.encode_upstream(said), data)), link, heard.append)
    first, error = heard
    assert first == said
    assert isinstance(error, HopMisbehaved)
    assert error.peer == link.hop.peer
