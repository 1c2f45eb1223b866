"""What hops report is believed as far as the client's own clock allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from client.base.stats import within_total
from client.chain.answers import Answer
from client.decode.pipeline import SendWindow
from swarm.protocol.limits import MAX_HOP_MS
from swarm.protocol.messages import HopTime, Reply

MS = st.one_of(st.just(0.0), st.just(MAX_HOP_MS), st.floats(0, MAX_HOP_MS))
HOPS = st.lists(st.builds(HopTime, MS, MS, MS, MS), max_size=6)


def sum_ms(hop: HopTime) -> float:
    return hop.queue_ms + hop.compute_ms + hop.other_ms + hop.link_ms


def test_one_hops_lie_costs_the_others_nothing() -> None:
    honest = [HopTime(1.0, 10.0, 0.5, 2.0), HopTime(0.0, 20.0, 0.5, 2.0)]
    link_ms, (first, liar, last) = within_total(4.0, [honest[0], HopTime(0.0, MAX_HOP_MS, 0.0, 0.0), honest[1]], 80.0)
    assert (link_ms, first, last) == (4.0, *honest)
    assert liar == HopTime(0.0, 80.0 - 4.0 - 13.5 - 22.5, 0.0, 0.0)


def test_the_record_of_a_sweep_is_what_its_own_clock_allows() -> None:
    window = SendWindow()
    window.add_prompt(1, 8, "route", 0.0, (True, 0))
    sweep = window.take(1, 0.1)
    assert sweep is not None
    reply = Reply(1, 0, (), (HopTime(0.0, 10.0, 0.0, 5.0), HopTime(0.0, MAX_HOP_MS, 0.0, 0.0)))
    measured = sweep.measured(Answer(reply, 100.0), 5.0, 1)
    assert [hop.compute_ms for hop in measured.hops] == [10.0, 80.0]
    assert measured.other_ms == 0.0


def test_a_slow_ping_hides_no_hop() -> None:
    hops = (HopTime(1.0, 10.0, 0.5, 2.0), HopTime(0.0, 20.0, 0.5, 2.0))
    assert within_total(4_000.0, hops, 80.0) == (44.0, hops)


def test_what_fits_is_not_touched() -> None:
    hops = [HopTime(1.0, 10.0, 0.5, 2.0)] * 3
    assert within_total(4.0, hops, 44.5) == (4.0, tuple(hops))
    assert within_total(4.0, (), 1.0) == (1.0, ())


@given(MS, HOPS, st.floats(0, 2 * MAX_HOP_MS))
def test_no_sweep_took_longer_than_it_was_away(first_link_ms: float, hops: list[HopTime], total_ms: float) -> None:
    link_ms, cut = within_total(first_link_ms, hops, total_ms)
    assert link_ms + sum(map(sum_ms, cut)) <= total_ms * (1 + 1e-9) or list(cut) == hops
    assert link_ms <= total_ms
    for before, after in zip(hops, cut, strict=True):
        for name in ("queue_ms", "compute_ms", "other_ms", "link_ms"):
            assert 0 <= getattr(after, name) <= getattr(before, name)
    if any(map(sum_ms, hops)):  # whoever reports no more than an equal share keeps all of it
        share_ms = (total_ms - link_ms) / len(hops)
        assert all(after == before for before, after in zip(hops, cut, strict=True) if sum_ms(before) < share_ms)
