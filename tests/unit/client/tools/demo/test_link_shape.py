"""The link's model on a clock of the test's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from client.tools.demo.link_shape import EmulatedLink, Ends, Interface, LinkShape, matching_links
from swarm.base.errors import ConfigError

PACKET_BYTES = 1_250
"""One millisecond at 10 Mbit/s."""


def never() -> float:
    raise AssertionError("a draw without losses and jitter")


def link(shape: LinkShape, chance: Callable[[], float] = never) -> EmulatedLink:
    return EmulatedLink(shape, Interface(), Interface(), chance)


def delivered(one: EmulatedLink, sent_s: Sequence[float]) -> list[float | None]:
    """When packets sent at these times, in order, are there."""
    due = [one.depart(now_s, PACKET_BYTES) for now_s in sent_s]
    return [None if due_s is None else one.arrive(due_s, PACKET_BYTES) for due_s in due]


def test_a_lone_packet_takes_its_delay_and_its_bytes_once() -> None:
    assert delivered(link(LinkShape(25)), [1.0]) == pytest.approx([1.025])
    assert delivered(link(LinkShape(25, mbit=10)), [1.0]) == pytest.approx([1.026])


def test_packets_follow_each_other_at_the_rate() -> None:
    times = delivered(link(LinkShape(5, mbit=10)), [1.0, 1.0, 1.0, 1.0015, 2.0])
    assert times == pytest.approx([1.006, 1.007, 1.008, 1.009, 2.006])


def test_links_share_the_interface_of_their_sender() -> None:
    shape, out = LinkShape(mbit=10), Interface()
    one, other = (EmulatedLink(shape, out, Interface(), never) for _ in range(2))
    assert [one.depart(1.0, PACKET_BYTES), other.depart(1.0, PACKET_BYTES)] == pytest.approx([1.001, 1.002])


def test_links_share_the_interface_of_their_receiver() -> None:
    near_in = Interface()
    near, far = (EmulatedLink(LinkShape(delay_ms, mbit=10), Interface(), near_in, never) for delay_ms in (1, 100))
    due = {name: one.depart(1.0, PACKET_BYTES) for name, one in (("far", far), ("near", near))}
    assert due == pytest.approx({"far": 1.101, "near": 1.002})
    assert near.arrive(1.002, PACKET_BYTES) == pytest.approx(1.002), "what comes from afar later does not hold it up"
    assert far.arrive(1.101, PACKET_BYTES) == pytest.approx(1.101)
    assert near.arrive(1.1015, PACKET_BYTES) == pytest.approx(1.102), "its first bit came while the other was passing"


def test_the_queue_is_bounded_where_packets_leave() -> None:
    times = delivered(link(LinkShape(mbit=10, queue_ms=3)), [1.0] * 6)
    assert times[:4] == pytest.approx([1.001, 1.002, 1.003, 1.004])
    assert times[4:] == [None, None]


def test_the_queue_is_bounded_where_packets_arrive() -> None:
    near_in = Interface()
    links = [EmulatedLink(LinkShape(mbit=10, queue_ms=3), Interface(), near_in, never) for _ in range(6)]
    times = [one.arrive(1.001, PACKET_BYTES) for one in links]
    assert times[:4] == pytest.approx([1.001, 1.002, 1.003, 1.004])
    assert times[4:] == [None, None]


def test_no_rate_no_queue() -> None:
    assert delivered(link(LinkShape(1, queue_ms=0)), [1.0] * 100) == pytest.approx([1.001] * 100)


def test_jitter_is_a_uniform_draw_on_top() -> None:
    draws = iter([0.0, 0.5, 0.999])
    times = delivered(link(LinkShape(10, jitter_ms=4), lambda: next(draws)), [1.0, 2.0, 3.0])
    assert times == pytest.approx([1.010, 2.012, 3.013996])


def test_jitter_keeps_the_order() -> None:
    times = delivered(link(LinkShape(10, jitter_ms=50), random.Random(5).random), [i / 1e3 for i in range(200)])
    assert times == sorted(time for time in times if time is not None)
    assert len(set(times)) < len(times), "some waited for one before them"


def test_a_shorter_delay_keeps_the_order() -> None:
    one = link(LinkShape(100))
    first = one.depart(1.0, PACKET_BYTES)
    one.shape = LinkShape(1)
    assert [first, one.depart(1.001, PACKET_BYTES), one.depart(2.0, PACKET_BYTES)] == pytest.approx([1.1, 1.1, 2.001])


def test_losses_are_seeded_and_hold_the_interface() -> None:
    shape = LinkShape(mbit=10, loss=0.25, queue_ms=1e6)
    once, again = (delivered(link(shape, random.Random(3).random), [1.0] * 1_000) for _ in range(2))
    assert once == again
    assert 250 - 82 < once.count(None) < 250 + 82, "six standard deviations: once in 5e8 seeds; this seed is fixed"
    assert max(time for time in once if time is not None) > 1.99


@pytest.mark.parametrize(
    "wrong",
    [{"delay_ms": -1}, {"jitter_ms": -1}, {"queue_ms": -1}, {"mbit": 0}, {"loss": 1.5}, {"delay_ms": float("nan")}],
)
def test_what_no_link_can_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        LinkShape(**wrong)


def test_ends_name_links() -> None:
    links: list[Ends] = [(0, 1), (1, 0), (2, 1)]
    assert matching_links((None, None), links) == links
    assert matching_links((None, 1), links) == [(0, 1), (2, 1)]
    assert matching_links((0, None), links) == [(0, 1)]
    assert matching_links((1, 2), links) == []
