"""Predicts what a sweep over one route takes, and prices the time of shared hops. Pure; learns as it goes.

links      the time that no hop computes or queues: a regression on the sweep's rows
compute    the time that all hops compute, messages included: another regression, or a staircase where hops pad rows
load       how many sweeps share that compute; the prices of shared time follow from it

Design: docs/design/controller.md.

`Regression` is a line fitted online: old measurements fade, outliers are kept out. `StaircaseRegression` is a staircase
of claimed times, corrected online by what sweeps took.

A hop that pads rows to buckets computes all sizes of one bucket in the same time. So the next node is free until the
bucket is full, and the one after that costs a whole step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add, mul
from statistics import fmean

from client.base.stats import SweepMeasurement
from client.decode.policy import SWEEPS_IN_FLIGHT
from swarm.routing.costs import RouteForecast
from swarm.routing.staircase import BucketSteps, padded_ms, rising

FADE = 0.97
"""Weight of a measurement against that of the next one."""
FIRST_MS = 1.0
FIRST_SLOPE = 1 / 256
"""The first slope where none is claimed, as a part of the level: 256 nodes cost as much as the first one."""
SLOPE_ERROR = 10.0
"""Factor by which the first slope may be wrong; with the noise it says how far x must spread to outweigh that slope."""
OUTLIER_FACTOR = 4.0
"""A residual of more than so many times the usual one is an outlier."""
OUTLIERS_IN_A_ROW = 3
"""So many outliers in a row count as measurements: the line has changed."""
FAR_FACTOR, YOUNG_WEIGHT = 5.0, 8.0
"""While the line has less weight than `YOUNG_WEIGHT`, its usual residual is not known: a measurement of more than
`FAR_FACTOR` times what was expected, as of kernels that load on first use, is an outlier until it comes again."""
MIN_SCALE = 0.03
"""The usual residual is at least this part of the value."""


class Regression:
    """`y = a + b · x`, fitted with fading weights; outliers are kept out until they come several times in a row.

    In a row means that no measurement at a similar x confirmed the line in between: the line may be right for small x
    and wrong for large ones. Until x has varied, the slope is the claimed one, or a small part of the level.

    Attributes:
        a: the level.
        b: the slope.
    """

    def __init__(
        self, slope: float | None = None, slope_error: float = SLOPE_ERROR, level: float | None = None
    ) -> None:
        """Start with a claim.

        Args:
            slope: as claimed; None without a claim.
            slope_error: factor by which that slope may be wrong.
            level: claimed together with the slope: if one is wrong by some factor, so is the other.
        """
        self.a = FIRST_MS if level is None else level
        self.b = FIRST_MS * FIRST_SLOPE if slope is None else slope
        self._slope, self._slope_error, self._level = slope, slope_error, level
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._scale = math.inf
        self._outliers, self._outlier_x = 0, 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    @property
    def _is_young(self) -> bool:
        """Whether little was measured, but something was measured or claimed to compare with."""
        return self._weight < YOUNG_WEIGHT and (self.is_known or self._level is not None)

    def at(self, x: float) -> float:
        """The line's value, never below 0."""
        return max(self.a + self.b * x, 0.0)

    def table(self, xs: Iterable[float]) -> list[float]:
        """The line's values at all of `xs`."""
        a, b = self.a, self.b
        return [max(a + b * x, 0.0) for x in xs]

    def with_new_level(self) -> Regression:
        """The same line; the next measurement sets its level anew, the slope stays until x has varied."""
        line = Regression(self.b, self._slope_error)
        line.a = self.a
        return line

    def assume(self, x: float, y: float) -> None:
        """Take a measurement as the line's value until something better is measured."""
        line = Regression(self._slope, self._slope_error, self._level)
        line.learn(x, y)
        self.a, self.b = line.a, line.b

    def cap_slope(self, slope: float) -> None:
        """Limit the slope to what other measurements allow; the line still passes through the mean of its own."""
        if self.b > slope:
            self.b = slope
            if self.is_known:
                self.a = (self._y - slope * self._x) / self._weight

    def learn(self, x: float, y: float, *, is_shared: bool = False) -> None:
        """Learn from a measurement.

        Args:
            x: rows.
            y: milliseconds.
            is_shared: whether others may have paid a part of y, so that it does not show how wrong the claim is.
        """
        assert math.isfinite(x) and math.isfinite(y), "one number that is none would stay in all sums"  # noqa: PT018
        if self._is_young and self.is_known and FAR_FACTOR * y < self.at(x) and x >= self._x / self._weight / 2:
            # Much faster than all before: those were stalls.
            self.__dict__.update(Regression(self._slope, self._slope_error, self._level).__dict__)
        residual, is_far = abs(y - self.at(x)), self._is_young and y > FAR_FACTOR * self.at(x)
        if is_far or residual > OUTLIER_FACTOR * max(self._scale, MIN_SCALE * self.at(x)):
            is_same = self._outliers > 0 and abs(x - self._outlier_x) <= x / 2
            self._outliers, self._outlier_x = self._outliers + 1, x
            if self._outliers < OUTLIERS_IN_A_ROW and not (is_far and is_same):
                return
            if self.is_known:
                self.__dict__.update(self.with_new_level().__dict__)
        elif self.is_known:
            self._scale = residual if self._scale == math.inf else FADE * self._scale + (1 - FADE) * residual
        if abs(x - self._outlier_x) <= x / 2:
            self._outliers = 0
        self._weight, self._x, self._y = FADE * self._weight + 1, FADE * self._x + x, FADE * self._y + y
        self._xx, self._xy = FADE * self._xx + x * x, FADE * self._xy + x * y
        x, y = self._x / self._weight, self._y / self._weight
        usual = max(y, 0.0) * FIRST_SLOPE
        first = usual if self._slope is None else self._slope
        if self._level is not None and not is_shared:
            first *= max(y, 0.0) / max(self._level + first * x, 1e-9)
        spread, both = max(self._xx - self._weight * x * x, 0.0), self._xy - self._weight * x * y
        pull = max((self._scale / (self._slope_error * max(first, usual, 1e-9))) ** 2, 1.0)
        self.b = first if pull == math.inf else max((both + pull * first) / (spread + pull), 0.0)
        self.a = y - self.b * x


STALE_PART = 0.25
"""What measurements of other buckets are worth once one of them has changed."""
CLAIM_WEIGHT = 1.0
"""Of what the other buckets say of one, in measurements of its own."""
BETWEEN = 8
"""Every so many nodes a size is compared that fills no bucket."""
MIN_PROBABILITY = 1 / 256
"""A free node of a lower acceptance probability is not sent: it takes bytes and KV room all the same."""


class StaircaseRegression:
    """Milliseconds against rows, where rows are padded to buckets.

    Each bucket has a mean of its own, with fading weights. One factor corrects the claims of all, as machines that are
    slower than they claim are so at every size; it stands for what a bucket has not seen itself. No larger bucket takes
    less than a smaller one. Outliers are kept out as in `Regression`, by bucket.

    Attributes:
        steps: (rows, milliseconds) of each bucket, as learned.
    """

    def __init__(self, claims: BucketSteps) -> None:
        """Start with claims: (rows, milliseconds), at least one; rows rise, milliseconds do not fall."""
        self._claims = self.steps = claims
        self._means, self._weights = [0.0] * len(claims), [0.0] * len(claims)
        self._outliers, self._scale = [0] * len(claims), math.inf

    @property
    def edges(self) -> tuple[int, ...]:
        """Rows of each bucket."""
        return tuple(rows for rows, _ in self.steps)

    @property
    def b(self) -> float:
        """What one more row costs on the mean, from the smallest bucket to the largest."""
        (first_rows, first_ms), (last_rows, last_ms) = self.steps[0], self.steps[-1]
        return (last_ms - first_ms) / (last_rows - first_rows) if last_rows > first_rows else last_ms / last_rows

    def at(self, rows: int) -> float:
        """Milliseconds of so many rows."""
        return padded_ms(self.steps, rows)

    def table(self, sizes: Iterable[int]) -> list[float]:
        """Milliseconds of each of these numbers of rows."""
        return [padded_ms(self.steps, rows) for rows in sizes]

    def with_new_level(self) -> StaircaseRegression:
        """The same steps; the next measurement scales all of them."""
        return StaircaseRegression(self.steps)

    def learn(self, rows: int, y: float, *, is_shared: bool = False) -> None:
        """Learn from a measurement.

        Args:
            rows: of the sweep; more than the largest bucket holds teach nothing, since they ran in several forwards.
            y: milliseconds.
            is_shared: whether others may have paid a part of y. They pay by rows, so all steps shrink alike.
        """
        if rows > self._claims[-1][0]:
            return
        place, weight = bisect_left(self.edges, rows), sum(self._weights)
        is_young, expected = weight < YOUNG_WEIGHT, self.at(rows)
        if is_young and weight and FAR_FACTOR * y < expected:
            self._weights = [0.0] * len(self._weights)  # much faster than all before: those were stalls
        elif self._is_outlier(place, y, expected, is_young=is_young):
            return
        self._outliers[place] = 0
        self._weights = [FADE * one for one in self._weights]
        self._weights[place] += 1
        self._means[place] += (y - self._means[place]) / self._weights[place]
        self._settle()

    def _is_outlier(self, place: int, y: float, expected: float, *, is_young: bool) -> bool:
        """Whether a measurement is to be left out. What comes again and again is a bucket's new level."""
        residual, is_far = abs(y - expected), is_young and y > FAR_FACTOR * expected
        if is_far or (any(self._weights) and residual > OUTLIER_FACTOR * max(self._scale, MIN_SCALE * expected)):
            self._outliers[place] += 1
            if self._outliers[place] < (2 if is_far else OUTLIERS_IN_A_ROW):
                return True
            # The machine may have changed, and with it the buckets that were not seen since.
            self._weights = [STALE_PART * weight for weight in self._weights]
            self._weights[place] = 0.0
        elif any(self._weights):
            self._scale = residual if self._scale == math.inf else FADE * self._scale + (1 - FADE) * residual
        return False

    def _settle(self) -> None:
        """The steps by what was measured and claimed."""
        claims_ms = [ms for _, ms in self._claims]
        total = sum(map(mul, self._weights, self._means))
        factor = total / max(sum(map(mul, self._weights, claims_ms)), 1e-9)
        weights = [weight + CLAIM_WEIGHT for weight in self._weights]
        means = [
            (own * mean + CLAIM_WEIGHT * factor * claimed_ms) / weight
            for own, mean, claimed_ms, weight in zip(self._weights, self._means, claims_ms, weights, strict=True)
        ]
        self.steps = tuple(zip(self.edges, rising(means, weights), strict=True))


def sizes_within(edges: Sequence[int], sizes: Sequence[int], max_size: int) -> list[int]:
    """Tree sizes that fill a bucket together with the pending token, and small ones, for drafts that are dear.

    Args:
        edges: rows of each bucket, rising.
        sizes: of trees, rising, the first of them 0.
        max_size: of a tree, at least 1.
    """
    small = [size for size in sizes[1:] if size < edges[0] - 1]
    last = edges[-1]
    full = [edge - 1 for edge in edges] + list(range(2 * last - 1, max_size + last, last))
    return sorted({min(size, max_size) for size in (*small, *full) if size > 0})


def best_fill(
    edges: Sequence[int], probabilities: Sequence[float], price: Callable[[int], float], pending: int
) -> tuple[int, float]:
    """How many nodes, best first, bring most beside what a sweep of them costs.

    Compared are sizes that fill a bucket, all smaller ones than the first of these, and some between them, since links
    may bind before hops do.

    Args:
        edges: rows of each bucket, rising.
        probabilities: of the nodes, falling.
        price: what a sweep of so many nodes costs, in tokens.
        pending: rows beside the nodes: 1 with the pending token.

    Returns:
        The number of nodes, and tokens less their price.
    """
    sums, count = [0.0, *accumulate(probabilities)], len(probabilities)
    full = {edge - pending for edge in edges} | set(range(2 * edges[-1] - pending, count, edges[-1]))
    sizes = {*range(min(edges[0], count)), *range(0, count, BETWEEN), *full, count}
    best = max(sorted(size for size in sizes if 0 <= size <= count), key=lambda nodes: sums[nodes] - price(nodes))
    return best, sums[best] - price(best)


CLAIM_ERROR = 3.0
"""Factor by which machines' claims may be wrong."""
KEPT_SWEEPS = 512
"""The shortest time on the links is looked for among so many sweeps."""
USUAL_SWEEPS, USUAL_PART = 32, 7 / 8
"""Lateness and waits are averaged over so many sweeps, without the latest ones, which are single stalls."""
NEW_NETWORK = 4.0
"""A sweep that is late by so many times what hops computed and queued met a slower network, not a busy machine."""
JITTER, JITTER_MS = 0.05, 2.0
"""Links may be slower than at their best by this part and by so many milliseconds without a busy machine."""
MIN_FIRST_ROWS = 16
"""Nodes that may be in flight over links of which only claims are known, however slow these are."""
CLAIMED_ROWS, GROWTH = 64, 8
"""Machines measure what they claim with so many rows; beyond, sweeps grow by at most this factor at once."""
SHARED_LOAD = 1.5
"""With a higher load, forward passes may be shared between sessions, and each reports a part of the time."""
QUEUED = 0.25
"""A sweep that is later than predicted by this part of the links' time may have queued behind own sweeps there."""
TELLING_ROWS, PINGS_MS = 8, 5.0
"""A sweep of so many rows bounds what a row takes on links: its time there beyond pings, which may err so much."""
FIRST_LATE = 2.0
"""A first sweep that is late by so many times what hops computed met slow links."""
MUCH_SLOWER = 1.5
"""Where a row takes so many times as long on links as predicted, what was learned before is dropped."""
MAX_OWN_WAIT_PART = 0.5
"""A sweep that queued behind own sweeps for more than this part of its waits does not show the load of others."""
IN_TURN, NEAR = 0.75, 2.0
"""Replies of sweeps that queued behind each other on a link come apart by at least and at most so many times what the
rows take there."""
CHUNKS = range(1, 9)
"""Numbers of parts that a tree may be cut into."""


@dataclass(frozen=True, slots=True)
class LinkTime:
    """What one sweep took on the links, beside the shortest time of one like it.

    Attributes:
        links_ms: the time that no hop computed or queued.
        min_ms: the shortest such time of a sweep of as many rows or more.
        network_ms: one way over all links, as pings measured it then.
        computed_ms: what all hops computed.
    """

    links_ms: float
    min_ms: float
    network_ms: float
    computed_ms: float

    def late_ratio(self, network_ms: float) -> float:
        """By how many times its compute it was late, if the network then was as slow as pings say it is now."""
        min_ms = self.min_ms + slowdown_ms(self.network_ms, network_ms)
        late_ms = max(self.links_ms - (1 + JITTER) * min_ms - JITTER_MS, 0.0)
        return late_ms / max(self.computed_ms, 1e-9)


@dataclass(frozen=True, slots=True)
class ReturnedSweep:
    """A sweep that came back; times by the client's clock.

    Attributes:
        rows: rows that every hop computed.
        links_ms: the time that no hop computed or queued.
        left_ms: when it left the first hop.
        back_ms: when its reply came.
    """

    rows: int
    links_ms: float
    left_ms: float
    back_ms: float

    def waited_ms(self, row_ms: float, before: Sequence[ReturnedSweep]) -> float:
        """How long it queued behind those that left before it, on a link where a row takes so long."""
        waited_ms, passed = 0.0, 0
        for other in reversed(before):
            passed += other.rows
            waited_ms = max(waited_ms, row_ms * passed - (self.left_ms - other.left_ms))
        return waited_ms

    def row_ms(self, base_ms: float, links: int, before: Sequence[ReturnedSweep]) -> float:
        """What a row takes at most on each of so many links, where all else than rows takes `base_ms`.

        A link that takes c per row makes a sweep queue for `max(c · rows_k - ms_k)` over the sweeps k that left the
        first hop before it, where rows_k rows passed in ms_k since then (Lindley's recursion). So the smallest c that
        any k allows is a bound.
        """
        row_ms, passed = (self.links_ms - base_ms) / (links * self.rows), 0
        for other in reversed(before):
            passed += other.rows
            since_ms = self.left_ms - other.left_ms
            row_ms = min(row_ms, (self.links_ms - base_ms + since_ms) / (links * self.rows + passed))
        return row_ms


def slowdown_ms(before_ms: float, now_ms: float) -> float:
    """By how much a network became slower; 0 where nothing was measured before."""
    return max(now_ms - before_ms, 0.0) if before_ms else 0.0


def _total_waits(waits: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """What sweeps queued and computed in all; a wait far above the others' is a stall and is capped."""
    waited, computed = sorted(wait_ms for wait_ms, _ in waits), sum(compute_ms for _, compute_ms in waits)
    usual_ms = fmean(waited[: math.ceil(len(waited) * USUAL_PART)]) + computed / len(waits)
    return sum(min(wait_ms, OUTLIER_FACTOR * usual_ms) for wait_ms in waited), computed


class LatencyModel:
    """What sweeps over one route take and cost.

    Attributes:
        links: milliseconds against rows.
        compute: milliseconds against rows.
        sweeps: how many were learned from.
        hops: machines of the route.
        is_expected: whether anything was forecast or measured.
    """

    def __init__(self, forecast: RouteForecast | None = None) -> None:
        """Start from a forecast, if there is one."""
        self.links = Regression()
        self.compute: Regression | StaircaseRegression = Regression()
        self.sweeps, self.hops, self._rows = 0, 1, 0
        self._waited = self._computed = self._late_ratio = 0.0
        self.is_expected = forecast is not None
        if forecast is not None:
            row_ms, plain_ms = forecast.row_ms, forecast.compute_ms
            self.links = Regression(forecast.link_row_ms)
            self.links.a = forecast.links_ms  # delays do not show rates
            self.compute = Regression(row_ms, CLAIM_ERROR, max(plain_ms - row_ms, 0.0))
            if forecast.steps:
                self.compute = StaircaseRegression(forecast.steps)
            self.hops, self._waited, self._computed = forecast.hops, forecast.waiting_ms, forecast.compute_ms
        self._shadow_price: float | None = None
        self._bottleneck_share: float | None = (forecast.bottleneck_share or None) if forecast is not None else None
        self._links: deque[tuple[int, float, float]] = deque(maxlen=KEPT_SWEEPS)
        self._max_row_ms: deque[float] = deque(maxlen=USUAL_SWEEPS)
        self._link_times: deque[LinkTime] = deque(maxlen=USUAL_SWEEPS)
        self._waits: deque[tuple[float, float]] = deque(maxlen=USUAL_SWEEPS)
        self._queues: deque[tuple[float, ...]] = deque(maxlen=USUAL_SWEEPS)
        self._before: SweepMeasurement | None = None
        self._returned: deque[ReturnedSweep] = deque(maxlen=SWEEPS_IN_FLIGHT)
        self._network_ms = 0.0
        self._shares: tuple[float, ...] = ()

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest sweep that it can predict; grows step by step, so that wrong claims show in time."""
        return max(GROWTH * self._rows, CLAIMED_ROWS)

    @property
    def max_unanswered_nodes(self) -> float:
        """Nodes that may be in flight in all until links are measured; infinite afterwards.

        Links may be far slower than claimed: if they are `SLOPE_ERROR` times as slow, so many rows keep them busy for
        the time of one plain sweep.
        """
        if self.links.is_known or self.links.b <= 0:
            return math.inf
        return max(self.sweep_ms(0) / (SLOPE_ERROR * self.links.b), MIN_FIRST_ROWS)

    @property
    def load(self) -> float:
        """How many sweeps share the hops' compute, this one included."""
        return 1 + (self._waited / self._computed if self._computed > 0 else 0.0)

    @property
    def sharers(self) -> float:
        """How many sweeps share the machines: those that queue at hops, and those that make everything else late."""
        return self.load + self._late_ratio

    @property
    def bottleneck_share(self) -> float:
        """The busiest hop's part of what all hops compute and queue; it bounds how many sweeps pass."""
        if self._bottleneck_share is None:  # until the next sweep is back: every node of a tree asks for it
            waits = [sum(hop) for hop in zip(*self._queues, strict=True)] or [0.0] * len(self._shares)
            more = (self.load - 1) / (sum(waits) or 1.0)
            both = [share + more * wait_ms for share, wait_ms in zip(self._shares, waits, strict=True)]
            self._bottleneck_share = max(both) / sum(both) if both else 1 / self.hops
        return self._bottleneck_share

    @property
    def shadow_price(self) -> float:
        """What a millisecond of the hops' time costs, where all sharers take one more.

        A millisecond makes all others wait, who then come back later and so meet a shorter queue: mean value analysis
        of a closed queue (Schweitzer's approximation), with the number of sharers inferred from the waits. It lies
        between `sharers`, where the machines are always busy, and its square, where sweeps are mostly on links.
        """
        if self._shadow_price is None:  # until the next sweep is back: every node of a tree asks for it
            sharers = self.sharers
            links_ms, hops_ms = self.links.at(1), sharers * self.compute.at(1)
            away = links_ms / (links_ms + hops_ms) if links_ms > 0 else 0.0
            self._shadow_price = sharers / (1 - (1 - 1 / sharers) * away)
        return self._shadow_price

    @property
    def edges(self) -> tuple[int, ...]:
        """Rows up to which a sweep is computed in the same time; empty where every row costs."""
        return self.compute.edges if isinstance(self.compute, StaircaseRegression) else ()

    @property
    def _free(self) -> float:
        """How much of a row's own time is free: all of it within a bucket.

        Those who share a hop fill its buckets together. So their time is priced by the mean row in both cases.
        """
        return 1.0 if self.edges else 0.0

    @property
    def per_node_ms(self) -> float:
        """What one more node costs; on a staircase, until the bucket is full."""
        return self.links.b + (self.shadow_price - self._free) * self.compute.b

    @property
    def marginal_latency_ms(self) -> float:
        """By how much one more node delays the reply to its sweep; on a staircase, until the bucket is full."""
        return self.links.b + (self.load - self._free) * self.compute.b

    def later_ms(self, nodes: int) -> float:
        """By how much so many nodes delay the reply to their sweep, beside one without any."""
        return self.links.b * nodes + self.load * (self.compute.at(nodes) - self.compute.at(0))

    def sweep_ms(self, nodes: int) -> float:
        """What a sweep of a pending token and so many nodes takes."""
        return self.sweeps_ms((nodes,))[0]

    def sweeps_ms(self, sizes: Sequence[int]) -> list[float]:
        """What sweeps of a pending token and so many nodes each take."""
        rows, load = [nodes + 1 for nodes in sizes], self.load
        both = zip(self.links.table(rows), self.compute.table(rows), strict=True)
        return [links_ms + load * compute_ms for links_ms, compute_ms in both]

    def service_interval_ms(self, nodes: int) -> float:
        """How long a further sweep keeps the busiest hop or link busy, with the load that queues there.

        At least its share of a round trip, since only `SWEEPS_IN_FLIGHT` sweeps may be unanswered.
        """
        return self._interval_ms(nodes, self.compute.at(nodes), self.sweep_ms(0) / SWEEPS_IN_FLIGHT)

    def _interval_ms(self, nodes: int, compute_ms: float, least_ms: float) -> float:
        hop_ms = self.load * compute_ms * self.bottleneck_share
        return max(hop_ms, self.links.b * nodes / max(self.hops - 1, 1), least_ms)

    def price_ms(self, nodes: int, others: float = 1.0) -> float:
        """What a further sweep costs: its service interval, and the time of those who wait behind it at every hop.

        Args:
            nodes: that it carries.
            others: value of a millisecond of theirs, where one of its own is worth 1.
        """
        return next(self.prices_ms((nodes,), others))

    def prices_ms(self, sizes: Iterable[int], others: float = 1.0) -> Iterator[float]:
        """What further sweeps of these numbers of nodes cost, each as in `price_ms`."""
        price, share, least_ms = self.shadow_price, self.bottleneck_share, self.sweep_ms(0) / SWEEPS_IN_FLIGHT
        for nodes in sizes:
            compute_ms = self.compute.at(nodes)
            interval_ms = self._interval_ms(nodes, compute_ms, least_ms)
            yield max(price * compute_ms * share, interval_ms) + (price - 1) * compute_ms * (others - share)

    def node_price_ms(self, others: float = 1.0) -> float:
        """What one more node of a further sweep costs, the service interval not counted."""
        price, share = self.shadow_price, self.bottleneck_share
        return ((price - self._free) * share + (price - 1) * (others - share)) * self.compute.b

    def chunk(self, nodes: int) -> int:
        """Nodes of each part, where a tree is cut so that its last part is back soonest."""
        sizes = [-(-nodes // count) for count in CHUNKS]
        if self.edges:  # or parts that fill a bucket, together with the pending token
            full = [edge - 1 for edge in self.edges if 1 < edge <= nodes]
            return min((*sizes, *full), key=lambda size: self._in_parts(size, -(-nodes // size)))
        parts = min(CHUNKS, key=lambda count: self._in_parts(sizes[count - 1], count))
        return sizes[parts - 1]

    def _in_parts(self, nodes: int, count: int) -> float:
        """Time until the last of `count` parts is back."""
        return self.sweep_ms(nodes) + (count - 1) * self.service_interval_ms(nodes + 1)

    def for_another_route(self) -> LatencyModel:
        """What to expect of another route: the same slopes, new levels."""
        other = LatencyModel()
        other.links, other.compute = self.links.with_new_level(), self.compute.with_new_level()
        other.hops, other.is_expected, other._rows = self.hops, self.is_expected, self._rows
        return other

    def learn(self, sweep: SweepMeasurement) -> None:
        """Learn from a decode sweep that came back."""
        self._learn(sweep)
        rows = sweep.rows
        if rows >= TELLING_ROWS and sweep.network_ms:
            self._max_row_ms.append(max(sweep.links_ms - sweep.network_ms + PINGS_MS, 0.0) / rows)
        self.links.cap_slope(min(self._max_row_ms, default=math.inf))

    def _learn(self, sweep: SweepMeasurement) -> None:
        rows, self._shadow_price, self._bottleneck_share = sweep.rows, None, None
        self._rows = max(self._rows, rows)
        self.sweeps, self.hops, self.is_expected = self.sweeps + 1, max(len(sweep.hops), 1), True
        self.compute.learn(rows, sweep.computed_ms, is_shared=self.load > SHARED_LOAD)
        self._share(sweep)
        own_ms = self._own_wait_ms(sweep)
        is_alone = sweep.is_alone and own_ms <= max(MAX_OWN_WAIT_PART * sweep.waited_ms, JITTER_MS)
        links_ms, ours = sweep.links_ms, self._note_returned(sweep)
        row_ms = self._row_ms(ours, sweep) if ours is not None else 0.0
        if row_ms:
            base_ms = sweep.network_ms or self.links.a
            if not self.links.is_known or row_ms > MUCH_SLOWER * self.links.b:
                self.links = Regression(row_ms)
                self._max_row_ms.clear()
            self.links.learn(rows, base_ms + row_ms * rows)
            return
        if not is_alone or self._may_have_queued(rows):  # it queued behind own sweeps, at hops or on links
            is_first = self.sweeps == 1 and not sweep.network_ms
            if not self.links.is_known and (is_first or links_ms < self.links.at(rows)):
                self.links.assume(rows, links_ms)  # an upper bound, better than nothing
            return
        self.links.learn(rows, links_ms)
        self._link_times.append(self._compare(rows, links_ms, sweep))
        delays = sorted(link_time.late_ratio(self._network_ms) for link_time in self._link_times)
        self._late_ratio = fmean(delays[: math.ceil(len(delays) * USUAL_PART)])
        self._waits.append((sweep.waited_ms, sweep.computed_ms))
        if len(sweep.waits_ms) == len(self._shares):
            self._queues.append(sweep.waits_ms)
        self._waited, self._computed = _total_waits(self._waits)

    def _own_wait_ms(self, sweep: SweepMeasurement) -> float:
        """How long it queued at hops behind the client's sweep before it, by what the hops report of both.

        Both are assumed to take the same time on links. The sweep before may have taken longer than predicted.
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
        """Note which hop computed which part of it."""
        if not sweep.computes_ms or sweep.computed_ms <= 0:
            return
        shares = tuple(ms / sweep.computed_ms for ms in sweep.computes_ms)
        if len(self._shares) != len(shares):
            self._shares = shares
            self._queues.clear()
        weight = max(1 / self.sweeps, 1 / USUAL_SWEEPS)
        self._shares = tuple(old + weight * (new - old) for old, new in zip(self._shares, shares, strict=True))

    def learn_prompt(self, sweep: SweepMeasurement) -> None:
        """Learn the links' rate from a part of the prompt that came back, before a tree has to.

        Only where pings know the delays. No line can be fitted: TCP begins with a few packets and doubles them with
        every round trip, and later rows do not wait for those trips. So what a row takes lies between what is left
        with these trips taken off and what is left without them.
        """
        network_ms, self._before = sweep.network_ms, sweep
        if not network_ms:
            self._returned.clear()
            return
        ours = self._note_returned(sweep)
        if ours is None or self.links.is_known:
            return
        starting_ms, links = 2 * network_ms * math.log2(ours.rows + 1), max(len(sweep.hops) - 1, 1)
        before, believed_ms = list(self._returned)[:-1], self.links.b
        min_ms = links * ours.row_ms(network_ms + starting_ms, links, before)
        max_ms = links * ours.row_ms(network_ms, links, before)
        if min_ms > MUCH_SLOWER * believed_ms or 0 < MUCH_SLOWER * max_ms < believed_ms:
            self.links, self._shadow_price = Regression(max(min_ms, min(max_ms, believed_ms))), None
            self.links.a = network_ms

    def _note_returned(self, sweep: SweepMeasurement) -> ReturnedSweep | None:
        """Note a sweep beside those since the pipeline was last empty; None where unknown sweeps were in flight."""
        if sweep.sent_ms is None or not sweep.behind:  # no own sweep was in its way
            self._returned.clear()
        if sweep.sent_ms is None:
            return None
        left_ms, back_ms = sweep.sent_ms + sweep.first_hop_ms, sweep.sent_ms + sweep.total_ms
        self._returned.append(ReturnedSweep(sweep.rows, sweep.links_ms, left_ms, back_ms))
        return self._returned[-1]

    def _may_have_queued(self, rows: int) -> bool:
        """Whether the last sweep may have queued on a link behind the one before: their replies came close together."""
        if len(self._returned) < 2:
            return False
        last, ours = list(self._returned)[-2:]
        return ours.back_ms - last.back_ms < NEAR * self.links.b / max(self.hops - 1, 1) * rows

    def _row_ms(self, ours: ReturnedSweep, sweep: SweepMeasurement) -> float:
        """What a row takes on all links, if the sweep was so late that they are slower than predicted; else 0."""
        rows, links_ms, before = ours.rows, ours.links_ms, list(self._returned)[:-1]
        late_ms = links_ms - (1 + QUEUED) * self.links.at(rows) - JITTER_MS
        late_ms -= NEW_NETWORK * max((self.load - 1) * sweep.computed_ms, sweep.waited_ms)  # the load explains so much
        if late_ms <= 0:
            return 0.0
        base_ms = sweep.network_ms or self.links.a
        if not before:  # for a first sweep only pings show whether delays are as claimed
            is_slow = not self.links.is_known and sweep.network_ms and late_ms > FIRST_LATE * sweep.computed_ms
            return (links_ms - base_ms) / rows if is_slow else 0.0
        links = max(self.hops - 1, 1)
        alone_ms, row_ms = ours.row_ms(base_ms, links, ()), ours.row_ms(base_ms, links, before)
        last = before[-1]
        last_ms = base_ms + links * row_ms * last.rows + last.waited_ms(row_ms, before[:-1])
        # Behind a lost packet, sweeps are late all of a sudden and come back together.
        is_gradual = abs(last.links_ms - last_ms) <= (links_ms - base_ms) / 2
        is_in_turn = ours.back_ms - last.back_ms >= IN_TURN * row_ms * rows
        return links * row_ms if row_ms < alone_ms and is_gradual and is_in_turn else 0.0

    def _compare(self, rows: int, links_ms: float, sweep: SweepMeasurement) -> LinkTime:
        """Compare a sweep with the fastest of as many rows or more: the difference shows busy machines between hops.

        Bytes do not explain it, nor does the network, once the slowdown that pings show is added.
        """
        if sweep.network_ms and not self._network_ms:
            self._links = deque(((more, ms, sweep.network_ms) for more, ms, _ in self._links), KEPT_SWEEPS)
        self._network_ms = now_ms = sweep.network_ms or self._network_ms
        others = (other_ms + slowdown_ms(then_ms, now_ms) for more, other_ms, then_ms in self._links if more >= rows)
        link_time = LinkTime(links_ms, min(others, default=links_ms), now_ms, sweep.computed_ms)
        if link_time.late_ratio(now_ms) * sweep.computed_ms > NEW_NETWORK * (sweep.computed_ms + sweep.waited_ms):
            self._links.clear()
            link_time = replace(link_time, min_ms=links_ms)
        self._links.append((rows, links_ms, now_ms))
        return link_time
