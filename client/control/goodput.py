"""How much to speculate: the tree size with the most expected tokens per time. Pure; learns from what sweeps took.

    T(n)      a sweep of n = K + 1 rows: links(n) + load · compute(n), each a regression fitted online
    load      1 + waiting / compute at the hops; a millisecond of shared time costs its shadow price
    D(K)      drafting a tree of K nodes: a regression as well
    gain(K)   tokens that a tree of K nodes brings beside the target's own pick: the sum of its nodes' acceptance
              probabilities, averaged over late trees
    goodput   (1 + gain(K)) / (T(K + 1) + D(K)), tokens per millisecond

`plan` says how many nodes to draft, 0 where plain decoding is best; `trim` how many of a tree to send: those whose
acceptance probability exceeds what a node costs at the running goodput; `extend` how many more pay for another sweep
while some are on their way. Source: SmartSpec (arXiv 2406.14066), here per node of a tree; docs/design/controller.md.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from client.control.latency_model import LatencyModel
from client.control.policy import Occupancy, PipelineState, SpeculationPlan
from client.control.regression import Regression
from client.drafting.search.stopping import NO_LIMIT, StopRule
from client.drafting.search.temperatures import TEMPERATURES
from client.drafting.search.tree import DraftTree
from client.stats import SweepMeasurement
from swarm.routing.costs import RouteForecast

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tree sizes that are weighed against each other."""
ROUTES_KEPT = 8
FIRST_SIZE = 16
FIRST_TREES = 3
PROMISING = 0.8
"""First trees that promise so much of plain decoding's speed get another chance: the last was unlucky, perhaps."""
EXPLORED = 0.01
"""At most this part of the time goes to trying what seems worse."""
GAIN_FADE = 0.95
CORRECTION_FADE, CORRECTION_PRIOR, MAX_CORRECTION = 0.97, 0.3, 1.5
"""Expectations are believed as if so many tokens had been expected and accepted."""
FIRST_PRIOR = 2.0
"""The same at first: a sweep or two may be unlucky."""
NEARLY = 0.9
MIN_CHUNKED = 16
"""A tree of more nodes may travel in parts."""
PATIENCE = 2.0
"""So many times what drafting takes as a rule is waited for."""
USUAL_ROUND = 8
"""Nodes that a round of drafting adds."""
TURN = 8
"""Of so many trees one is the next larger size and one the next smaller, or nothing could be learned of sizes."""


@dataclass(slots=True)
class Gain:
    """Tokens that trees of `SIZES` bring beside the target's own pick, as late trees' probabilities say.

    Attributes:
        expected: per size, with trees as they were.
        whole: per size, had those been finished that were left because the rest could go later.
        trees: how many were learned from.
    """

    expected: list[float] = field(default_factory=lambda: [0.0] * len(SIZES))
    whole: list[float] = field(default_factory=lambda: [0.0] * len(SIZES))
    trees: int = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was drafted."""
        return self.trees > 0

    def learn(self, probabilities: Sequence[float], planned: int, *, is_settled: bool = True) -> None:
        """A tree was drafted: its nodes' acceptance probabilities, falling, out of so many planned nodes.

        Where as many were found, larger trees are extrapolated: probabilities fall as one over the rank.
        """
        sums, drafted = [0.0, *itertools.accumulate(probabilities)], len(probabilities)
        tail = probabilities[-1] * drafted if probabilities else 0.0
        weight = max(1 - GAIN_FADE, 1 / (self.trees + 1))
        for place, size in enumerate(SIZES):
            found = sums[min(size, drafted)]
            extrapolated = tail * math.log(size / drafted) if tail and size > drafted else 0.0
            expected = found + extrapolated * (drafted >= planned)
            whole = found + extrapolated * (drafted >= planned or not is_settled)
            self.expected[place] += weight * (expected - self.expected[place])
            self.whole[place] += weight * (whole - self.whole[place])
        self.trees += 1


@dataclass(slots=True)
class AcceptanceCorrection:
    """How many tokens are accepted per expected one: probabilities are learned too, and may be wrong meanwhile.

    Attributes:
        expected: tokens that late trees should have brought, fading.
        accepted: tokens that they brought, fading.
    """

    expected: float = FIRST_PRIOR
    accepted: float = FIRST_PRIOR

    def learn(self, sweep: SweepMeasurement) -> None:
        """A sweep came back."""
        self.expected = (
            CORRECTION_FADE * self.expected + (1 - CORRECTION_FADE) * CORRECTION_PRIOR + sweep.expected_tokens
        )
        self.accepted = (
            CORRECTION_FADE * self.accepted + (1 - CORRECTION_FADE) * CORRECTION_PRIOR + sweep.accepted_tokens
        )

    @property
    def ratio(self) -> float:
        """Accepted tokens per expected token."""
        return min(self.accepted / self.expected, MAX_CORRECTION)


class Goodput:
    """Chooses tree sizes for all generations of one client."""

    def __init__(self, most: int) -> None:
        """most: nodes of the largest tree."""
        self.most = most
        self.draft, self.round = Regression(), Regression()
        self._routes: dict[Hashable, LatencyModel] = {}
        self._used: tuple[Hashable, LatencyModel] | None = None
        self._gains = [Gain() for _ in range(len(TEMPERATURES) + 1)]
        self._correction = AcceptanceCorrection()
        self._time_ms = self._explored_ms = self._running = 0.0
        self._others = 1.0
        self._early = self._read = 0
        self._valued: tuple[LatencyModel, Gain] | None = None  # for which time is valued, as long as nothing is learned

    def cost_of(self, route: Hashable) -> LatencyModel:
        """What is known of a route; a new one begins with what was known of the last."""
        if self._used is not None and self._used[0] is route:  # as a rule
            return self._used[1]
        cost = self._routes.pop(route, None)
        if cost is None:
            cost = next(reversed(self._routes.values())).again() if self._routes else LatencyModel()
        self._routes[route] = cost
        self._used = route, cost
        while len(self._routes) > ROUTES_KEPT:
            self._routes.pop(next(iter(self._routes)))
        return cost

    def plan(self, route: Hashable, temperature: float, room: int) -> SpeculationPlan:
        """How many nodes to draft for the next sweep, at most `room`; 0: none, plain decoding is best."""
        cost, gain = self.cost_of(route), self._gain_of(temperature)
        most = int(min(room, self.most, cost.most, cost.most_at_first))
        plain_ms = cost.sweep_ms(0)
        if most < 1:
            return SpeculationPlan(0, plain_ms, "no room for a tree")
        if not gain.is_known or not cost.is_expected:
            return SpeculationPlan(min(most, FIRST_SIZE), plain_ms, "nothing is known yet", is_whole=True)
        sizes = sorted({min(size, most) for size in SIZES[1:]})
        (rates,) = self._rates(sizes, cost, gain.expected)
        place = max(range(len(sizes)), key=rates.__getitem__)
        size, rate, plain = sizes[place], rates[place], 1 / max(plain_ms, 1e-9)
        if rate >= plain:
            turn = {TURN // 2 - 1: 1, TURN - 1: -1}.get(cost.sweeps % TURN, 0)
            if turn and 0 <= place + turn < len(sizes) and rates[place + turn] >= NEARLY * rate:
                tried = sizes[place + turn]
                return SpeculationPlan(tried, cost.sweep_ms(tried), f"{size} seems best, {tried} is tried")
            reason = f"up to {size} nodes: {_per_s(rate)} against {_per_s(plain)} plain"
            return SpeculationPlan(size, cost.sweep_ms(size), reason)
        (promised,) = self._rates(sizes, cost, gain.expected, corrected=1.0)
        if gain.trees < FIRST_TREES and max(promised) >= PROMISING * plain:
            return SpeculationPlan(min(most, FIRST_SIZE), cost.sweep_ms(size), "little is known yet", is_whole=True)
        took = cost.sweep_ms(size) + self.draft.at(size)
        if self._explored_ms + took <= EXPLORED * self._time_ms:
            self._explored_ms += took
            reason = "tries whether a tree is worth it by now"
            return SpeculationPlan(size, cost.sweep_ms(size), reason, is_whole=True, is_trial=True)
        return SpeculationPlan(0, plain_ms, f"plain: {_per_s(plain)} against {_per_s(rate)} with {size} nodes")

    def stop_rule(self, route: Hashable, temperature: float, planned: SpeculationPlan) -> StopRule:
        """What a node and a round of drafting must bring."""
        cost = self.cost_of(route)
        if planned.is_whole or not cost.is_expected:
            return NO_LIMIT
        rate = self._value_time(cost, temperature)
        round_ms = self.round.at(1) if self.round.is_known else 0.0
        per_ms = rate / self._correction.ratio
        return StopRule(per_ms * cost.per_node_ms, per_ms * round_ms, per_ms * cost.price_ms(USUAL_ROUND, self._others))

    def patience_ms(self, route: Hashable, nodes: int) -> float:
        """For how long a sweep should wait for a tree of so many nodes, or a reply for one that grows.

        As long as a sweep without a tree takes: so what waits in vain is at most twice as late; but drafting that
        takes long as a rule was chosen all the same.
        """
        cost = self.cost_of(route)
        usual_ms = PATIENCE * self.draft.at(nodes) if self.draft.is_known else 0.0
        return max(cost.sweep_ms(0), usual_ms) if cost.is_expected else math.inf

    def trim(
        self, route: Hashable, temperature: float, probabilities: Sequence[float], planned: SpeculationPlan
    ) -> SpeculationPlan:
        """How many of a tree's nodes, best first, are worth sending."""
        cost, partial_tree = self.cost_of(route), replace(planned, is_whole=False)
        threshold = self.stop_rule(route, temperature, partial_tree).min_probability
        nodes = sum(probability > threshold for probability in probabilities)
        predicted_ms = cost.sweep_ms(nodes) if cost.is_expected else None
        if planned.is_trial:
            return replace(planned, nodes=nodes, predicted_ms=predicted_ms)
        if nodes == len(probabilities):
            reason = f"all {nodes} nodes are worth more than the {threshold:.3f} tokens that one costs"
        else:
            reason = (
                f"node {nodes + 1} has a probability of {probabilities[nodes]:.3f} and costs {threshold:.3f} tokens"
            )
        if nodes > MIN_CHUNKED and (chunk := cost.chunk(nodes)) < nodes:
            return SpeculationPlan(nodes, cost.sweep_ms(chunk), f"{reason}; in parts of {chunk}", chunk=chunk)
        return SpeculationPlan(nodes, predicted_ms, reason)

    def max_nodes(self, route: Hashable, temperature: float, room: int, ahead: PipelineState) -> int:
        """Most further nodes that another sweep may have while some are on their way; 0 to wait for those.

        Where plain decoding is best, drafting has the time that is left before the next reply.
        """
        cost = self.cost_of(route)
        size = int(min(room, self.most, cost.most, cost.most_at_first - ahead.nodes))
        if size < 1 or not self._gain_of(temperature).is_known:
            return 0
        if not cost.is_expected:
            return min(size, FIRST_SIZE)
        is_late = self.round.is_known and self.round.at(1) > ahead.reply_ms
        if is_late and self._value_time(cost, temperature) <= 1 / max(cost.sweep_ms(0), 1e-9):
            return 0  # the reply would wait for a draft that is not worth its time
        return cost.chunk(size) if size > MIN_CHUNKED else size

    def min_probability(self, route: Hashable, temperature: float) -> float:
        """A node less likely to be accepted is not worth being in another sweep, however many others share it."""
        cost = self.cost_of(route)
        rate = self._value_time(cost, temperature)
        return rate / self._correction.ratio * cost.node_price_ms(self._others)

    def extend(self, route: Hashable, probabilities: Sequence[float], ahead: PipelineState) -> SpeculationPlan:
        """How many of such nodes, best first, another sweep is to carry; 0 where they are not worth the hops' time.

        Beside its price, a larger sweep is answered later, which matters if the walk comes to its first node at all.
        Where many nodes are worth it, they go in parts.
        """
        cost, nodes = self.cost_of(route), 0
        price_ms, marginal_latency_ms = (
            cost.price_ms(0, self._others),
            probabilities[0] * cost.marginal_latency_ms if probabilities else 0.0,
        )
        gain = -self._running * price_ms
        while nodes < len(probabilities):  # which fall, while what one more costs does not
            step_ms = cost.price_ms(nodes + 1, self._others) - price_ms
            step = probabilities[nodes] * self._correction.ratio - self._running * (step_ms + marginal_latency_ms)
            if step <= 0:
                break
            nodes, price_ms, gain = nodes + 1, price_ms + step_ms, gain + step
        if gain <= 0:
            return SpeculationPlan(0, None, "nothing below what is on its way is worth another sweep")
        if nodes > MIN_CHUNKED:
            nodes = cost.chunk(nodes)
        reason = f"goes on below what is on its way, where the best node has a probability of {probabilities[0]:.3f}"
        return SpeculationPlan(nodes, ahead.busy_ms + cost.sweep_ms(nodes - 1), reason)

    def has_time(self, ahead: PipelineState) -> bool:
        """Whether another round of drafting fits before hops can take another sweep."""
        return self.round.is_known and ahead.busy_ms >= self.round.at(1)

    def occupancy(self, route: Hashable, nodes: int) -> Occupancy:
        """For how long so many nodes keep hops and links busy."""
        cost = self.cost_of(route)
        return Occupancy(cost.service_interval_ms(nodes), cost.load * cost.compute.at(nodes) + cost.links.b * nodes)

    def observe_draft(self, temperature: float, tree: DraftTree, planned: SpeculationPlan, draft_ms: float) -> None:
        """A tree was drafted; one that came too early for a source tells nothing of later ones.

        One for which a source read the text first, cold perhaps, tells nothing of what they take. But where one is
        followed by others of its kind, that is how trees are here.
        """
        self._early = self._early + 1 if tree.is_early else 0
        self._read = self._read + 1 if tree.has_read else 0
        if 0 < self._early < FIRST_TREES:
            return
        self._gain_of(temperature).learn(tree.acceptance_probs, planned.nodes, is_settled=tree.is_settled)
        if not 0 < self._read < FIRST_TREES:
            self.draft.learn(len(tree), draft_ms)
            if tree.rounds:
                self.round.learn(1, draft_ms / tree.rounds)
        self._time_ms += draft_ms
        self._valued = None

    def observe_sweep(self, route: Hashable, sweep: SweepMeasurement) -> None:
        """A sweep came back."""
        cost, self._valued = self.cost_of(route), None
        if sweep.is_prompt:
            cost.learn_prompt(sweep)
            return
        cost.learn(sweep)
        self._correction.learn(sweep)
        self._time_ms += sweep.total_ms

    def expect(self, route: Hashable, forecast: RouteForecast) -> None:
        """What sweeps should cost on a route of which nothing is known yet, as its machines claim."""
        if route not in self._routes:
            self._routes[route] = LatencyModel(forecast)

    def _gain_of(self, temperature: float) -> Gain:
        return self._gains[bisect_left(TEMPERATURES, temperature)]

    def _rates(
        self, sizes: Sequence[int], cost: LatencyModel, *gains: Sequence[float], corrected: float | None = None
    ) -> list[list[float]]:
        """Tokens per millisecond with trees of such sizes, for each of these gains.

        corrected: accepted tokens per expected one, None for what late sweeps say.
        """
        draft = self.draft if self.draft.is_known else None
        times = [
            max(ms + (draft.at(size) if draft and size else 0.0), 1e-9)
            for size, ms in zip(sizes, cost.sweeps_ms(sizes), strict=True)
        ]
        # What comes beyond the promise makes time dearer only where others wait for it.
        part = min(self._correction.ratio, cost.load) if corrected is None else corrected
        places = [bisect_left(SIZES, size) for size in sizes]
        return [[(1 + gained[place] * part) / ms for place, ms in zip(places, times, strict=True)] for gained in gains]

    def _value_time(self, cost: LatencyModel, temperature: float) -> float:
        """What a millisecond is worth now, in tokens; that of others is worth what whole trees would bring."""
        gain = self._gain_of(temperature)
        if self._valued is None or self._valued[0] is not cost or self._valued[1] is not gain:
            sizes = SIZES[: bisect_right(SIZES, min(self.most, cost.most))]
            expected, whole = self._rates(sizes, cost, gain.expected, gain.whole)
            self._running = max(expected)
            self._others = max(whole) / self._running
            self._valued = cost, gain
        return self._running


def _per_s(rate_per_ms: float) -> str:
    return f"{rate_per_ms * 1e3:.1f} tokens/s"
