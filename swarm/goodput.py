"""How much to speculate: the tree size with the most expected tokens per time. Pure; learns from what sweeps took.

    T(n)      a sweep of n = K + 1 nodes: links(n) + load · compute(n), each a line fitted online
    load      1 + waiting / compute at the hops; under load a node's compute is paid by all who share them (`dearness`)
    D(K)      drafting a tree of K nodes: a line as well
    gain(K)   tokens that a tree of K nodes brings beside the target's own: the sum of its calibrated chances, averaged
    goodput   (1 + gain(K)) / (T(K + 1) + D(K)), tokens per millisecond

`plan` says how many nodes to draft, 0 where plain decoding is best; `cut` how many of a tree are worth sending: those
whose chance exceeds what a node costs at the running goodput; `further` how many more are worth another sweep while
some are on their way. Source: SmartSpec (arXiv 2406.14066), here per node of a tree; DESIGN §7.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from swarm.budget import EVERYTHING, Ahead, Busy, Choice, Spent, Worth
from swarm.chance import TEMPERATURES
from swarm.tree import DraftTree

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tree sizes that are weighed against each other."""
ROUTES_KEPT = 8
FIRST_SIZE = 16
FIRST_TREES = 3
PROMISING = 0.8
"""So much of plain decoding's speed gives the first trees another chance: one had little to hope for, perhaps."""
EXPLORED = 0.01
"""At most this part of the time goes to trying what seems worse."""
FADE = 0.97
"""What an older measurement weighs beside the next one."""
FIRST_MS = 1.0
FIRST_SLOPE = 1 / 256
"""Where nobody says what a node costs: 256 of them as much as the first one."""
UNSURE = 10.0
"""The first slope may be wrong by so many times itself: noise beside that says how far x must spread to outweigh it."""
OUTLIER = 4.0
"""A residual of so many times the usual one is no news, unless it comes again and again."""
STUBBORN = 3
KEPT_SWEEPS = 512
"""The shortest time on the links is that of one among so many."""
USUAL_SWEEPS, USUAL_PART = 32, 7 / 8
"""A crowd makes many of so many sweeps late; the latest of them are somebody's hiccups."""
NEW_NETWORK = 4.0
"""Later than by so many times what hops computed and waited, it is another network, not a busy machine."""
JITTER, JITTER_MS = 0.05, 2.0
"""By so much links may be slower than at their best without anybody being to blame."""
LEAST_SCALE = 0.03
GAIN_FADE = 0.95
TRUST_FADE, TRUSTED, MOST_TRUST = 0.97, 0.3, 1.5
"""Promises are believed as if so many tokens had been promised and had come."""
NEARLY = 0.9
CHUNKS = range(1, 9)
LEAST_CUT = 16
"""Nodes that are worth cutting."""
USUAL_ROUND = 8
"""Nodes that a round of drafting adds."""
MOST_ROUNDS = 16
TURN = 8
"""Of so many trees one is the next larger size and one the next smaller, or nothing could be learned of sizes."""


class Line:
    """`y = a + b · x`, fitted with fading weights; outliers are kept out until they come several times in a row.

    Until x has varied, the slope is `slope`, or a little of the level where nobody knows one.
    """

    def __init__(self, slope: float | None = None) -> None:
        self.a, self.b = FIRST_MS, FIRST_MS * FIRST_SLOPE if slope is None else slope
        self._slope = slope
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._scale = math.inf
        self._odd = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    def at(self, x: float) -> float:
        """The line's value, never below 0."""
        return max(self.a + self.b * x, 0.0)

    def again(self) -> Line:
        """The same line, where the next measurement sets the level anew; the slope stays until x has varied."""
        line = Line(self.b)
        line.a = self.a
        return line

    def learn(self, x: float, y: float) -> None:
        """A measurement."""
        residual = abs(y - self.at(x))
        if residual > OUTLIER * max(self._scale, LEAST_SCALE * self.at(x)):
            self._odd += 1
            if self._odd < STUBBORN:
                return
            self.__dict__.update(self.again().__dict__)
        elif self.is_known:
            self._scale = residual if self._scale == math.inf else FADE * self._scale + (1 - FADE) * residual
        self._odd = 0
        self._weight, self._x, self._y = FADE * self._weight + 1, FADE * self._x + x, FADE * self._y + y
        self._xx, self._xy = FADE * self._xx + x * x, FADE * self._xy + x * y
        x, y = self._x / self._weight, self._y / self._weight
        usual = max(y, 0.0) * FIRST_SLOPE
        first = usual if self._slope is None else self._slope
        spread, both = max(self._xx - self._weight * x * x, 0.0), self._xy - self._weight * x * y
        pull = max((self._scale / (UNSURE * max(first, usual, 1e-9))) ** 2, 1.0)
        self.b = first if pull == math.inf else max((both + pull * first) / (spread + pull), 0.0)
        self.a = y - self.b * x


@dataclass(slots=True)
class Gain:
    """Tokens that trees of `SIZES` bring beside the target's own pick, as late trees promised."""

    expected: list[float] = field(default_factory=lambda: [0.0] * len(SIZES))
    trees: int = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was drafted."""
        return self.trees > 0

    def learn(self, chances: Sequence[float], planned: int) -> None:
        """A tree was drafted: its nodes' chances, falling, out of so many planned ones.

        Where as many were found, larger trees are guessed: chances fall as one over the rank.
        """
        sums, drafted = [0.0, *itertools.accumulate(chances)], len(chances)
        tail = chances[-1] * drafted if chances and drafted >= planned else 0.0
        for place, size in enumerate(SIZES):
            found = sums[size] if size <= drafted else sums[-1] + (tail * math.log(size / drafted) if tail else 0.0)
            weight = max(1 - GAIN_FADE, 1 / (self.trees + 1))
            self.expected[place] += weight * (found - self.expected[place])
        self.trees += 1


class RouteCost:
    """What sweeps over one route cost."""

    def __init__(self, row_ms: float | None = None) -> None:
        """row_ms: what one more node should cost, as far as anybody knows."""
        self.links, self.compute = Line(0.0 if row_ms is not None else None), Line(row_ms)
        self.sweeps, self.hops = 0, 1
        self._waited = self._computed = self._late = 0.0
        self._links: deque[tuple[int, float]] = deque(maxlen=KEPT_SWEEPS)
        self._lates: deque[float] = deque(maxlen=USUAL_SWEEPS)

    @property
    def load(self) -> float:
        """How many sweeps share the hops' compute, this one included."""
        return 1 + (self._waited / self._computed if self._computed > 0 else 0.0)

    @property
    def crowd(self) -> float:
        """How many sweeps share the machines: those that wait at hops, and those that make everything else late."""
        return self.load + self._late

    @property
    def dearness(self) -> float:
        """What a millisecond of the hops' time costs, where everybody who shares them takes one more.

        A millisecond makes everybody wait, who then comes back later and so waits for less: mean value analysis of a
        closed queue (Schweitzer's approximation), with the sharers inferred from how long one waits. Between `crowd`,
        where the machines are always busy, and its square, where sweeps are on links for most of the time.
        """
        crowd = self.crowd
        links_ms, hops_ms = self.links.at(1), crowd * self.compute.at(1)
        away = links_ms / (links_ms + hops_ms) if links_ms > 0 else 0.0
        return crowd / (1 - (1 - 1 / crowd) * away)

    @property
    def per_node_ms(self) -> float:
        """What one more node costs."""
        return self.links.b + self.dearness * self.compute.b

    @property
    def later_ms(self) -> float:
        """By how much one more node delays the reply to its sweep."""
        return self.links.b + self.load * self.compute.b

    def sweep_ms(self, nodes: int) -> float:
        """What a sweep of a pending token and so many nodes takes."""
        return self.links.at(nodes + 1) + self.load * self.compute.at(nodes + 1)

    def slot_ms(self, nodes: int) -> float:
        """For how long a further sweep keeps a hop or a link busy, with the load that waits there."""
        return max(self.load * self.compute.at(nodes) / self.hops, self.links.b * nodes / max(self.hops - 1, 1))

    def price_ms(self, nodes: int) -> float:
        """What a further sweep costs: its slot, and at every hop the time of those who wait behind it."""
        dear, hop_ms = self.dearness, self.compute.at(nodes) / self.hops
        return max(dear * hop_ms, self.slot_ms(nodes)) + (dear - 1) * hop_ms * (self.hops - 1)

    def chunk(self, nodes: int) -> int:
        """Nodes of each part, where a tree is best cut, so that a hop works while the next part travels."""
        parts = min(CHUNKS, key=lambda count: self._in_parts(-(-nodes // count), count))
        return -(-nodes // parts)

    def _in_parts(self, nodes: int, count: int) -> float:
        """Until the last of so many parts is back."""
        return self.sweep_ms(nodes) + (count - 1) * self.slot_ms(nodes + 1)

    def again(self) -> RouteCost:
        """What to expect of another route."""
        other = RouteCost()
        other.links, other.compute = self.links.again(), self.compute.again()
        return other

    def learn(self, spent: Spent) -> None:
        """A sweep came back."""
        rows = spent.nodes + 1
        self.sweeps, self.hops = self.sweeps + 1, max(spent.hops, 1)
        self.compute.learn(rows, spent.computed_ms)
        if not spent.alone:  # it waited for its own kind, at hops and on links
            return
        links_ms = max(spent.total_ms - spent.waited_ms - spent.computed_ms, 0.0)
        self.links.learn(rows, links_ms)
        self._lates.append(self._late_ms(rows, links_ms, spent) / max(spent.computed_ms, 1e-9))
        usual = sorted(self._lates)[: math.ceil(len(self._lates) * USUAL_PART)]
        self._late = fmean(usual)
        self._waited = FADE * self._waited + spent.waited_ms
        self._computed = FADE * self._computed + spent.computed_ms

    def _late_ms(self, rows: int, links_ms: float, spent: Spent) -> float:
        """By how much machines that had no time for it made a sweep late, beside what its hops report.

        Whatever a sweep of as many rows or more once did in less time was not the bytes.
        """
        least_ms = min((other_ms for more, other_ms in self._links if more >= rows), default=links_ms)
        late_ms = max(links_ms - (1 + JITTER) * least_ms - JITTER_MS, 0.0)
        if late_ms > NEW_NETWORK * (spent.computed_ms + spent.waited_ms):
            self._links.clear()
            late_ms = 0.0
        self._links.append((rows, links_ms))
        return late_ms


@dataclass(slots=True)
class Trust:
    """How much of what trees promise comes true: chances are learned too, and may be wrong meanwhile."""

    promised: float = TRUSTED
    brought: float = TRUSTED

    def learn(self, spent: Spent) -> None:
        """A sweep came back."""
        self.promised = TRUST_FADE * self.promised + (1 - TRUST_FADE) * TRUSTED + spent.promised
        self.brought = TRUST_FADE * self.brought + (1 - TRUST_FADE) * TRUSTED + spent.brought

    @property
    def part(self) -> float:
        """Tokens that come per token that is promised."""
        return min(self.brought / self.promised, MOST_TRUST)


class Goodput:
    """Chooses tree sizes for all generations of one client."""

    def __init__(self, most: int) -> None:
        """most: nodes of the largest tree."""
        self.most = most
        self.draft, self.round = Line(), Line()
        self._routes: dict[Hashable, RouteCost] = {}
        self._gains = [Gain() for _ in range(len(TEMPERATURES) + 1)]
        self._trust = Trust()
        self._time_ms = self._explored_ms = self._running = 0.0

    def cost_of(self, route: Hashable) -> RouteCost:
        """What is known of a route; a new one begins with what was known of the last."""
        cost = self._routes.pop(route, None)
        if cost is None:
            cost = next(reversed(self._routes.values())).again() if self._routes else RouteCost()
        self._routes[route] = cost
        while len(self._routes) > ROUTES_KEPT:
            self._routes.pop(next(iter(self._routes)))
        return cost

    def plan(self, route: Hashable, temperature: float, room: int) -> Choice:
        """How many nodes to draft for the next sweep, at most `room`; 0: none, plain decoding is best."""
        cost, gain = self.cost_of(route), self._gain_of(temperature)
        most = min(room, self.most)
        plain_ms = cost.sweep_ms(0)
        if most < 1:
            return Choice(0, plain_ms, "no room for a tree")
        if not gain.is_known or not cost.links.is_known:
            return Choice(min(most, FIRST_SIZE), plain_ms, "nothing is known yet", is_trial=True)
        sizes = sorted({min(size, most) for size in SIZES[1:]})
        rates = [self._rate(size, cost, gain) for size in sizes]
        place = max(range(len(sizes)), key=rates.__getitem__)
        size, rate, plain = sizes[place], rates[place], 1 / max(plain_ms, 1e-9)
        if rate >= plain:
            turn = {TURN // 2 - 1: 1, TURN - 1: -1}.get(cost.sweeps % TURN, 0)
            if turn and 0 <= place + turn < len(sizes) and rates[place + turn] >= NEARLY * rate:
                tried = sizes[place + turn]
                return Choice(tried, cost.sweep_ms(tried), f"{size} seems best, {tried} is tried", is_trial=True)
            reason = f"up to {size} nodes: {_per_s(rate)} against {_per_s(plain)} plain"
            return Choice(size, cost.sweep_ms(size), reason)
        if gain.trees < FIRST_TREES and rate >= PROMISING * plain:
            return Choice(min(most, FIRST_SIZE), cost.sweep_ms(size), "little is known yet", is_trial=True)
        took = cost.sweep_ms(size) + self.draft.at(size)
        if self._explored_ms + took <= EXPLORED * self._time_ms:
            self._explored_ms += took
            return Choice(size, cost.sweep_ms(size), "tries whether a tree is worth it by now", is_trial=True)
        return Choice(0, plain_ms, f"plain: {_per_s(plain)} against {_per_s(rate)} with {size} nodes")

    def worth(self, route: Hashable, temperature: float, planned: Choice) -> Worth:
        """What a node and a round of drafting must bring."""
        cost = self.cost_of(route)
        if planned.is_trial or not cost.links.is_known:
            return EVERYTHING
        rate = self._running = self._best_rate(cost, self._gain_of(temperature))
        round_ms = self.round.at(1) if self.round.is_known else 0.0
        dear = rate / self._trust.part
        return Worth(dear * cost.per_node_ms, dear * round_ms, dear * cost.price_ms(USUAL_ROUND))

    def cut(self, route: Hashable, temperature: float, chances: Sequence[float], planned: Choice) -> Choice:
        """How many of a tree's nodes, best first, are worth sending."""
        cost, least = self.cost_of(route), self.worth(route, temperature, planned).least
        nodes = sum(chance > least for chance in chances)
        predicted_ms = cost.sweep_ms(nodes) if cost.links.is_known else None
        if planned.is_trial:
            return replace(planned, nodes=nodes, predicted_ms=predicted_ms)
        if nodes == len(chances):
            reason = f"all {nodes} nodes are worth more than the {least:.3f} tokens that one costs"
        else:
            reason = f"node {nodes + 1} has a chance of {chances[nodes]:.3f} and costs {least:.3f} tokens"
        if nodes > LEAST_CUT and (chunk := cost.chunk(nodes)) < nodes:
            return Choice(nodes, cost.sweep_ms(chunk), f"{reason}; in parts of {chunk}", chunk=chunk)
        return Choice(nodes, predicted_ms, reason)

    def more(self, route: Hashable, temperature: float, room: int, ahead: Ahead) -> int:
        """Most further nodes that another sweep may have while some are on their way; 0 to wait for those."""
        cost, size = self.cost_of(route), min(room, self.most)
        if not self._gain_of(temperature).is_known or not cost.links.is_known:
            return 0
        return cost.chunk(size) if size > LEAST_CUT else size

    def least(self, route: Hashable, temperature: float) -> float:
        """A node of a lower chance is not worth being in another sweep, however many others share it."""
        cost = self.cost_of(route)
        self._running = self._best_rate(cost, self._gain_of(temperature))
        return self._running / self._trust.part * (cost.price_ms(1) - cost.price_ms(0))

    def further(self, route: Hashable, chances: Sequence[float], ahead: Ahead) -> Choice:
        """How many of such nodes, best first, another sweep is to carry; 0 where they are not worth the hops' time.

        Beside its price, a larger sweep is answered later, which matters if the walk comes to its first node at all.
        Where many nodes are worth it, they go in parts.
        """
        cost, nodes = self.cost_of(route), 0
        price_ms, later_ms = cost.price_ms(0), chances[0] * cost.later_ms if chances else 0.0
        gain = -self._running * price_ms
        while nodes < len(chances):  # which fall, while what one more costs does not
            more_ms = cost.price_ms(nodes + 1) - price_ms
            more = chances[nodes] * self._trust.part - self._running * (more_ms + later_ms)
            if more <= 0:
                break
            nodes, price_ms, gain = nodes + 1, price_ms + more_ms, gain + more
        if gain <= 0:
            return Choice(0, None, "nothing below what is on its way is worth another sweep")
        if nodes > LEAST_CUT:
            nodes = cost.chunk(nodes)
        reason = f"goes on below what is on its way, where the best node has a chance of {chances[0]:.3f}"
        return Choice(nodes, ahead.busy_ms + cost.sweep_ms(nodes - 1), reason)

    def pause(self, ahead: Ahead) -> int:
        """Rounds of drafting that fit before the first hop can take another sweep, at least 1."""
        round_ms = self.round.at(1) if self.round.is_known else math.inf
        return min(max(int(ahead.busy_ms / max(round_ms, 1e-3)), 1), MOST_ROUNDS)

    def busy(self, route: Hashable, nodes: int) -> Busy:
        """For how long so many nodes keep hops busy."""
        cost = self.cost_of(route)
        return Busy(cost.slot_ms(nodes), cost.load * cost.compute.at(nodes))

    def drafted(self, temperature: float, tree: DraftTree, planned: Choice, draft_ms: float) -> None:
        """A tree was drafted; one that came too early for a source tells nothing of later ones."""
        if tree.is_early:
            return
        self._gain_of(temperature).learn(tree.chances, planned.nodes)
        self.draft.learn(len(tree), draft_ms)
        if tree.rounds:
            self.round.learn(1, draft_ms / tree.rounds)
        self._time_ms += draft_ms

    def spent(self, route: Hashable, spent: Spent) -> None:
        """A sweep came back."""
        self.cost_of(route).learn(spent)
        self._trust.learn(spent)
        self._time_ms += spent.total_ms

    def expect(self, route: Hashable, row_ms: float) -> None:
        """What one more node should cost on a route of which nothing is known yet, as its machines claim."""
        if route not in self._routes:
            self._routes[route] = RouteCost(row_ms)

    def _gain_of(self, temperature: float) -> Gain:
        return self._gains[bisect_left(TEMPERATURES, temperature)]

    def _rate(self, nodes: int, cost: RouteCost, gain: Gain) -> float:
        place = min(bisect_left(SIZES, nodes), len(SIZES) - 1)
        draft_ms = self.draft.at(nodes) if nodes and self.draft.is_known else 0.0
        gained = gain.expected[place] * self._trust.part if nodes else 0.0
        return (1 + gained) / max(cost.sweep_ms(nodes) + draft_ms, 1e-9)

    def _best_rate(self, cost: RouteCost, gain: Gain) -> float:
        return max(self._rate(size, cost, gain) for size in SIZES if size <= self.most)


def _per_s(rate_per_ms: float) -> str:
    return f"{rate_per_ms * 1e3:.1f} tokens/s"
