"""What a sweep over one route takes, and what its time is worth to those who share the hops. Pure; learns as it goes.

links      all that no hop computes or waits for: a regression on the sweep's rows
compute    of the hops together, messages included: another one
load       how many sweeps share that compute; prices of shared time follow from it
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from statistics import fmean

from client.control.policy import SWEEPS_IN_FLIGHT
from client.control.regression import OUTLIER, UNSURE, Regression
from client.stats import SweepMeasurement
from swarm.routing.costs import RouteForecast

CLAIM_UNSURE = 3.0
"""What machines claim may be wrong by so many times itself."""
KEPT_SWEEPS = 512
"""The shortest time on the links is that of one among so many."""
USUAL_SWEEPS, USUAL_PART = 32, 7 / 8
"""A crowd makes many of so many sweeps late, or wait; the latest of them are somebody's hiccups."""
NEW_NETWORK = 4.0
"""Later than by so many times what hops computed and waited, it is another network, not a busy machine."""
JITTER, JITTER_MS = 0.05, 2.0
"""By so much links may be slower than at their best without anybody being to blame."""
FIRST_ROWS = 16
"""So many may leave for a link of which only claims are known, however slow they make it."""
CLAIMED_ROWS, GROWTH = 64, 8
"""What machines claim they measured with so many rows; beyond, sweeps become at most so many times as large at once."""
SHARED = 1.5
"""With a load above it forwards may be shared, of which everybody is told a part."""
QUEUED = 0.25
"""A sweep that is later than believed by so much of the links' time waited there for others of its kind, perhaps."""
TELLING_ROWS, PINGS_MS = 8, 5.0
"""A sweep of so many says what a row takes on links at most: what it took beyond pings, themselves late by so much."""
FIRST_LATE = 2.0
"""A first sweep may be late by so many times what hops computed before that tells of its rows on slow links."""
MUCH_SLOWER = 1.5
"""A row takes so many times as long on links as it was believed to: what was learned before says nothing any more."""
OWN = 0.5
"""A sweep that waited for ours for such a part of its waits tells nothing of how many others there are."""
IN_TURN, NEAR = 0.75, 2.0
"""Replies of sweeps that waited for each other on a link come apart by this part of what the rows take there, at least
and at most."""
CHUNKS = range(1, 9)
"""Parts that a sweep may be cut in."""


@dataclass(frozen=True, slots=True)
class Trip:
    """What one sweep took on the links, in milliseconds, beside the least that one like it took.

    Attributes:
        links_ms: all that no hop computed or waited for.
        least_ms: the least that a sweep of as many rows or more took there.
        network_ms: what pings said of the network then.
        computed_ms: at all hops together.
    """

    links_ms: float
    least_ms: float
    network_ms: float
    computed_ms: float

    def late(self, network_ms: float) -> float:
        """By how many times its compute it was late, where the network is as slow as pings say by now."""
        least_ms = self.least_ms + slower(self.network_ms, network_ms)
        late_ms = max(self.links_ms - (1 + JITTER) * least_ms - JITTER_MS, 0.0)
        return late_ms / max(self.computed_ms, 1e-9)


@dataclass(frozen=True, slots=True)
class ReturnedSweep:
    """A sweep that is back, in milliseconds of the client's clock.

    Attributes:
        rows: that every hop computed.
        links_ms: what it took on links.
        left_ms: when it left the first hop.
        back_ms: when its reply came.
    """

    rows: int
    links_ms: float
    left_ms: float
    back_ms: float

    def waited_ms(self, row_ms: float, before: Sequence[ReturnedSweep]) -> float:
        """What it waited for those that left before it, on a link where a row takes so long."""
        waited_ms, passed = 0.0, 0
        for other in reversed(before):
            passed += other.rows
            waited_ms = max(waited_ms, row_ms * passed - (self.left_ms - other.left_ms))
        return waited_ms

    def row_ms(self, base_ms: float, links: int, before: Sequence[ReturnedSweep]) -> float:
        """What a row takes at most on each of so many links, where all else than rows takes `base_ms`.

        A link that takes c per row makes a sweep wait for `max(c · rows_k - ms_k)` over the sweeps k that left the
        first hop before it: those rows, up to its own, have passed it since then (Lindley). So c is the least that any
        k says.
        """
        row_ms, passed = (self.links_ms - base_ms) / (links * self.rows), 0
        for other in reversed(before):
            passed += other.rows
            since_ms = self.left_ms - other.left_ms
            row_ms = min(row_ms, (self.links_ms - base_ms + since_ms) / (links * self.rows + passed))
        return row_ms


def slower(before_ms: float, now_ms: float) -> float:
    """By how much a network has become slower; before anybody knew it, it was as it is."""
    return max(now_ms - before_ms, 0.0) if before_ms else 0.0


def _usual(waits: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """What sweeps waited and computed in all; a wait far beyond the others' is a stall, and counts less."""
    waited, computed = sorted(wait_ms for wait_ms, _ in waits), sum(compute_ms for _, compute_ms in waits)
    usual_ms = fmean(waited[: math.ceil(len(waited) * USUAL_PART)]) + computed / len(waits)
    return sum(min(wait_ms, OUTLIER * usual_ms) for wait_ms in waited), computed


class LatencyModel:
    """What sweeps over one route cost. is_expected: whether anybody said, or anything was measured."""

    def __init__(self, forecast: RouteForecast | None = None) -> None:
        """forecast: what they should cost, as far as anybody knows."""
        self.links, self.compute = Regression(), Regression()
        self.sweeps, self.hops, self._rows = 0, 1, 0
        self._waited = self._computed = self._late = 0.0
        self.is_expected = forecast is not None
        if forecast is not None:
            row_ms, plain_ms = forecast.row_ms, forecast.compute_ms
            self.links = Regression(forecast.link_row_ms)
            self.links.a = forecast.links_ms  # delays say nothing of rates
            self.compute = Regression(row_ms, CLAIM_UNSURE, max(plain_ms - row_ms, 0.0))
            self.hops, self._waited, self._computed = forecast.hops, forecast.waiting_ms, forecast.compute_ms
        self._shadow_price: float | None = None
        self._bottleneck_share: float | None = (forecast.bottleneck_share or None) if forecast is not None else None
        self._links: deque[tuple[int, float, float]] = deque(maxlen=KEPT_SWEEPS)
        self._most_row_ms: deque[float] = deque(maxlen=USUAL_SWEEPS)
        self._trips: deque[Trip] = deque(maxlen=USUAL_SWEEPS)
        self._waits: deque[tuple[float, float]] = deque(maxlen=USUAL_SWEEPS)
        self._queues: deque[tuple[float, ...]] = deque(maxlen=USUAL_SWEEPS)
        self._before: SweepMeasurement | None = None
        self._ours: deque[ReturnedSweep] = deque(maxlen=SWEEPS_IN_FLIGHT)
        self._network_ms = 0.0
        self._shares: tuple[float, ...] = ()

    @property
    def most(self) -> int:
        """Nodes of the largest sweep that it can speak of: claims and lines that are wrong are found out by and by."""
        return max(GROWTH * self._rows, CLAIMED_ROWS)

    @property
    def most_at_first(self) -> float:
        """Nodes that may be unanswered in all until links were measured, which may be far slower than anybody said.

        Were they `UNSURE` times as slow, rows would keep them busy for one plain trip.
        """
        if self.links.is_known or self.links.b <= 0:
            return math.inf
        return max(self.sweep_ms(0) / (UNSURE * self.links.b), FIRST_ROWS)

    @property
    def load(self) -> float:
        """How many sweeps share the hops' compute, this one included."""
        return 1 + (self._waited / self._computed if self._computed > 0 else 0.0)

    @property
    def sharers(self) -> float:
        """How many sweeps share the machines: those that wait at hops, and those that make everything else late."""
        return self.load + self._late

    @property
    def bottleneck_share(self) -> float:
        """The part of what hops compute, and wait for others, that one has at most: no more sweeps pass than there."""
        if self._bottleneck_share is None:  # until the next sweep is back: every node of a tree asks for it
            waits = [sum(hop) for hop in zip(*self._queues, strict=True)] or [0.0] * len(self._shares)
            more = (self.load - 1) / (sum(waits) or 1.0)
            both = [share + more * wait_ms for share, wait_ms in zip(self._shares, waits, strict=True)]
            self._bottleneck_share = max(both) / sum(both) if both else 1 / self.hops
        return self._bottleneck_share

    @property
    def shadow_price(self) -> float:
        """What a millisecond of the hops' time costs, where everybody who shares them takes one more.

        A millisecond makes everybody wait, who then comes back later and so waits for less: mean value analysis of a
        closed queue (Schweitzer's approximation), with the sharers inferred from how long one waits. Between `sharers`,
        where the machines are always busy, and its square, where sweeps are on links for most of the time.
        """
        if self._shadow_price is None:  # until the next sweep is back: every node of a tree asks for it
            sharers = self.sharers
            links_ms, hops_ms = self.links.at(1), sharers * self.compute.at(1)
            away = links_ms / (links_ms + hops_ms) if links_ms > 0 else 0.0
            self._shadow_price = sharers / (1 - (1 - 1 / sharers) * away)
        return self._shadow_price

    @property
    def per_node_ms(self) -> float:
        """What one more node costs."""
        return self.links.b + self.shadow_price * self.compute.b

    @property
    def marginal_latency_ms(self) -> float:
        """By how much one more node delays the reply to its sweep."""
        return self.links.b + self.load * self.compute.b

    def sweep_ms(self, nodes: int) -> float:
        """What a sweep of a pending token and so many nodes takes."""
        return self.sweeps_ms((nodes,))[0]

    def sweeps_ms(self, sizes: Sequence[int]) -> list[float]:
        """What sweeps of a pending token and so many nodes each take."""
        links, compute, load = self.links, self.compute, self.load
        return [links.at(nodes + 1) + load * compute.at(nodes + 1) for nodes in sizes]

    def service_interval_ms(self, nodes: int) -> float:
        """For how long a further sweep keeps a hop or a link busy, with the load that waits there.

        At least its share of a trip: no more than so many may be unanswered, however fast hops and links are.
        """
        share_ms = self.sweep_ms(0) / SWEEPS_IN_FLIGHT
        hop_ms = self.load * self.compute.at(nodes) * self.bottleneck_share
        return max(hop_ms, self.links.b * nodes / max(self.hops - 1, 1), share_ms)

    def price_ms(self, nodes: int, others: float = 1.0) -> float:
        """What a further sweep costs: its slot, and at every hop the time of those who wait behind it.

        others: what a millisecond of theirs is worth, where one of its own is worth 1.
        """
        dear, compute_ms = self.shadow_price, self.compute.at(nodes)
        waiting_ms = (dear - 1) * compute_ms * (others - self.bottleneck_share)
        return max(dear * compute_ms * self.bottleneck_share, self.service_interval_ms(nodes)) + waiting_ms

    def node_price_ms(self, others: float = 1.0) -> float:
        """What one more node of a further sweep costs beside the slot, which it may fill or not."""
        dear = self.shadow_price
        return (dear * self.bottleneck_share + (dear - 1) * (others - self.bottleneck_share)) * self.compute.b

    def chunk(self, nodes: int) -> int:
        """Nodes of each part, where a tree is best cut, so that a hop works while the next part travels."""
        parts = min(CHUNKS, key=lambda count: self._in_parts(-(-nodes // count), count))
        return -(-nodes // parts)

    def _in_parts(self, nodes: int, count: int) -> float:
        """Until the last of so many parts is back."""
        return self.sweep_ms(nodes) + (count - 1) * self.service_interval_ms(nodes + 1)

    def again(self) -> LatencyModel:
        """What to expect of another route."""
        other = LatencyModel()
        other.links, other.compute = self.links.again(), self.compute.again()
        other.hops, other.is_expected, other._rows = self.hops, self.is_expected, self._rows
        return other

    def learn(self, sweep: SweepMeasurement) -> None:
        """A sweep came back."""
        self._learn(sweep)
        rows = sweep.rows
        if rows >= TELLING_ROWS and sweep.network_ms:
            self._most_row_ms.append(max(sweep.links_ms - sweep.network_ms + PINGS_MS, 0.0) / rows)
        self.links.bound(min(self._most_row_ms, default=math.inf))

    def _learn(self, sweep: SweepMeasurement) -> None:
        rows, self._shadow_price, self._bottleneck_share = sweep.rows, None, None
        self._rows = max(self._rows, rows)
        self.sweeps, self.hops, self.is_expected = self.sweeps + 1, max(len(sweep.hops), 1), True
        self.compute.learn(rows, sweep.computed_ms, is_shared=self.load > SHARED)
        self._share(sweep)
        own_ms = self._own_wait_ms(sweep)
        is_alone = sweep.is_alone and own_ms <= max(OWN * sweep.waited_ms, JITTER_MS)
        links_ms, ours = sweep.links_ms, self._passed(sweep)
        row_ms = self._row_ms(ours, sweep) if ours is not None else 0.0
        if row_ms:
            base_ms = sweep.network_ms or self.links.a
            if not self.links.is_known or row_ms > MUCH_SLOWER * self.links.b:
                self.links = Regression(row_ms)
                self._most_row_ms.clear()
            self.links.learn(rows, base_ms + row_ms * rows)
            return
        if not is_alone or self._is_near(rows):  # it waited for its own kind, at hops and on links
            is_first = self.sweeps == 1 and not sweep.network_ms
            if not self.links.is_known and (is_first or links_ms < self.links.at(rows)):
                self.links.suppose(rows, links_ms)  # too much, but better than nothing
            return
        self.links.learn(rows, links_ms)
        self._trips.append(self._compare(rows, links_ms, sweep))
        lates = sorted(trip.late(self._network_ms) for trip in self._trips)
        self._late = fmean(lates[: math.ceil(len(lates) * USUAL_PART)])
        self._waits.append((sweep.waited_ms, sweep.computed_ms))
        if len(sweep.waits_ms) == len(self._shares):
            self._queues.append(sweep.waits_ms)
        self._waited, self._computed = _usual(self._waits)

    def _own_wait_ms(self, sweep: SweepMeasurement) -> float:
        """What it waited at hops for the sweep of ours before it, by what hops said of both; links are the same.

        What was to be over by then may have taken longer.
        """
        before, self._before = self._before, sweep
        if before is None or before.sent_ms is None or sweep.sent_ms is None:
            return 0.0
        leaves_ms, comes_ms, own_ms = before.sent_ms, sweep.sent_ms, 0.0
        theirs = map(add, before.waits_ms, before.computes_ms)
        ours = zip(sweep.waits_ms, sweep.computes_ms, strict=True)
        for passed_ms, (waited_ms, computed_ms) in zip(theirs, ours, strict=False):
            leaves_ms += passed_ms
            own_ms += min(max(leaves_ms - comes_ms, 0.0), waited_ms)
            comes_ms += waited_ms + computed_ms
        return own_ms

    def _share(self, sweep: SweepMeasurement) -> None:
        """Note which hop computed how much of it."""
        if not sweep.computes_ms or sweep.computed_ms <= 0:
            return
        shares = tuple(ms / sweep.computed_ms for ms in sweep.computes_ms)
        if len(self._shares) != len(shares):
            self._shares = shares
            self._queues.clear()
        weight = max(1 / self.sweeps, 1 / USUAL_SWEEPS)
        self._shares = tuple(old + weight * (new - old) for old, new in zip(self._shares, shares, strict=True))

    def learn_prompt(self, sweep: SweepMeasurement) -> None:
        """A part of the prompt came back: so many rows tell of links that nobody measured, before a tree has to.

        Where pings do not know the delays, it may be all theirs. No line can be fitted through such: TCP begins with a
        few packets and doubles them with every round trip, which rows behind them do not wait for. So a row takes more
        than what is left beside those trips, and less than what is left without them.
        """
        network_ms, self._before = sweep.network_ms, sweep
        if not network_ms:
            self._ours.clear()
            return
        ours = self._passed(sweep)
        if ours is None or self.links.is_known:
            return
        starting_ms, links = 2 * network_ms * math.log2(ours.rows + 1), max(len(sweep.hops) - 1, 1)
        before, believed_ms = list(self._ours)[:-1], self.links.b
        least_ms = links * ours.row_ms(network_ms + starting_ms, links, before)
        most_ms = links * ours.row_ms(network_ms, links, before)
        if least_ms > MUCH_SLOWER * believed_ms or 0 < MUCH_SLOWER * most_ms < believed_ms:
            self.links, self._shadow_price = Regression(max(least_ms, min(most_ms, believed_ms))), None
            self.links.a = network_ms

    def _passed(self, sweep: SweepMeasurement) -> ReturnedSweep | None:
        """Note a sweep of this stretch of the pipe, in which it was never empty; None where nobody knows of all."""
        if sweep.sent_ms is None or not sweep.behind:  # nothing that we know of is in its way
            self._ours.clear()
        if sweep.sent_ms is None:
            return None
        left_ms, back_ms = sweep.sent_ms + sweep.first_hop_ms, sweep.sent_ms + sweep.total_ms
        self._ours.append(ReturnedSweep(sweep.rows, sweep.links_ms, left_ms, back_ms))
        return self._ours[-1]

    def _is_near(self, rows: int) -> bool:
        """Whether the last reply may have waited on a link for the one before it: its rows followed those at once."""
        if len(self._ours) < 2:
            return False
        last, ours = list(self._ours)[-2:]
        return ours.back_ms - last.back_ms < NEAR * self.links.b / max(self.hops - 1, 1) * rows

    def _row_ms(self, ours: ReturnedSweep, sweep: SweepMeasurement) -> float:
        """What a row takes on all links, where a sweep was so late that they are slower than believed; else 0."""
        rows, links_ms, before = ours.rows, ours.links_ms, list(self._ours)[:-1]
        late_ms = links_ms - (1 + QUEUED) * self.links.at(rows) - JITTER_MS
        late_ms -= NEW_NETWORK * max((self.load - 1) * sweep.computed_ms, sweep.waited_ms)  # a crowd explains so much
        if late_ms <= 0:
            return 0.0
        base_ms = sweep.network_ms or self.links.a
        if not before:  # of a first sweep pings alone tell whether delays are as promised
            is_slow = not self.links.is_known and sweep.network_ms and late_ms > FIRST_LATE * sweep.computed_ms
            return (links_ms - base_ms) / rows if is_slow else 0.0
        links = max(self.hops - 1, 1)
        alone_ms, row_ms = ours.row_ms(base_ms, links, ()), ours.row_ms(base_ms, links, before)
        last = before[-1]
        last_ms = base_ms + links * row_ms * last.rows + last.waited_ms(row_ms, before[:-1])
        # What a lost packet held is late all of a sudden, and comes at once with what came after it.
        is_gradual = abs(last.links_ms - last_ms) <= (links_ms - base_ms) / 2
        is_in_turn = ours.back_ms - last.back_ms >= IN_TURN * row_ms * rows
        return links * row_ms if row_ms < alone_ms and is_gradual and is_in_turn else 0.0

    def _compare(self, rows: int, links_ms: float, sweep: SweepMeasurement) -> Trip:
        """What shows by how much machines that had no time for it made a sweep late, beside what its hops report.

        Whatever a sweep of as many rows or more once did in less time was not the bytes, nor the network, as far as
        that has not become slower since.
        """
        if sweep.network_ms and not self._network_ms:
            self._links = deque(((more, ms, sweep.network_ms) for more, ms, _ in self._links), KEPT_SWEEPS)
        self._network_ms = now_ms = sweep.network_ms or self._network_ms
        others = (other_ms + slower(then_ms, now_ms) for more, other_ms, then_ms in self._links if more >= rows)
        trip = Trip(links_ms, min(others, default=links_ms), now_ms, sweep.computed_ms)
        if trip.late(now_ms) * sweep.computed_ms > NEW_NETWORK * (sweep.computed_ms + sweep.waited_ms):
            self._links.clear()
            trip = replace(trip, least_ms=links_ms)
        self._links.append((rows, links_ms, now_ms))
        return trip
