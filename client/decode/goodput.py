"""How much to speculate: the tree size with the most expected tokens per time. Pure; learns from what sweeps took.

    T(n)      a sweep of n = K + 1 rows: links(n) + load · compute(n), each a regression fitted online
    load      1 + waiting / compute at the hops; a millisecond of shared time costs its shadow price
    D(K)      drafting a tree of K nodes: a regression as well
    gain(K)   tokens that a tree of K nodes brings beside the target's own pick: the sum of its nodes' acceptance
              probabilities, averaged over late trees
    goodput   (1 + gain(K)) / (T(K + 1) + D(K)), tokens per millisecond

`plan` says how many nodes to draft, 0 where plain decoding is best; `trim` how many of a tree to send: those whose
acceptance probability exceeds what a node costs at the running goodput; `extend` how many more pay for another sweep
while some are in flight. Source: SmartSpec (arXiv 2406.14066), here per node of a tree; docs/design/controller.md.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from client.base.stats import SweepMeasurement
from client.decode.latency_model import MIN_PROBABILITY, LatencyModel, Regression, best_fill, sizes_within
from client.decode.policy import Occupancy, PipelineState, SpeculationPlan
from client.draft.search.calibration import TEMPERATURES
from client.draft.search.tree import NO_LIMIT, DraftTree, StopRule
from swarm.routing.costs import RouteForecast

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tree sizes that are weighed against each other."""
ROUTES_KEPT = 8
"""Routes whose latency models are kept."""
FIRST_SIZE = 16
"""Nodes of a tree while nothing is known."""
FIRST_TREES = 3
"""Trees that are drafted before what the first ones show is believed."""
MIN_EXPECTED_SPEED = 0.8
"""Drafting goes on for the first trees, while the speed expected of one is at least this part of plain decoding's."""
MAX_EXPLORED = 0.01
"""Part of the time that trying what seems worse may take."""
GAIN_FADE = 0.95
CORRECTION_FADE, CORRECTION_PRIOR, MAX_CORRECTION = 0.97, 0.3, 1.5
"""How expected and accepted tokens fade; a prior of as many expected as accepted; the highest ratio of both."""
FIRST_PRIOR = 2.0
"""The prior before the first sweep: a sweep or two may be unlucky."""
MIN_TRIED_SPEED = 0.9
"""A neighbouring size is tried if its expected speed is at least this part of the best size's."""
MIN_CHUNKED = 16
"""A tree of more nodes may travel in parts."""
PATIENCE = 2.0
"""A draft is awaited for so many times what drafting usually takes."""
ROUND_NODES = 8
"""Nodes that a round of drafting usually adds."""
TRIAL_PERIOD = 8
"""Of so many trees one has the next larger size and one the next smaller, so that the latency model sees several."""


@dataclass(slots=True)
class Gain:
    """Tokens that trees of `SIZES` should bring beside the target's own pick, by late trees' acceptance probabilities.

    Attributes:
        expected: per size, for trees as they were drafted.
        whole: per size, as if trees had been finished whose drafting stopped because the rest could go later.
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
        """Learn from a tree that was drafted.

        Where as many nodes were found as planned, larger trees are extrapolated: probabilities fall as one over the
        rank.

        Args:
            probabilities: its nodes' acceptance probabilities, falling.
            planned: how many nodes it was to have.
            is_settled: whether further drafting would have changed nothing.
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
    """How many tokens are accepted per expected one; acceptance probabilities may be wrong while they are learned.

    Attributes:
        expected: tokens that late trees should have brought; old ones fade.
        accepted: tokens that they brought; old ones fade.
    """

    expected: float = FIRST_PRIOR
    accepted: float = FIRST_PRIOR

    def learn(self, sweep: SweepMeasurement) -> None:
        """Learn from a sweep that came back."""
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
    """Chooses tree sizes for all generations of one client.

    Attributes:
        max_tree_nodes: nodes of the largest tree.
        draft: milliseconds that drafting takes, against nodes.
        round: milliseconds of one round of drafting, against 1.
    """

    def __init__(self, max_tree_nodes: int) -> None:
        """Know nothing yet; trees have at most `max_tree_nodes` nodes."""
        self.max_tree_nodes = max_tree_nodes
        self.draft, self.round = Regression(), Regression()
        self._routes: dict[Hashable, LatencyModel] = {}
        self._used: tuple[Hashable, LatencyModel] | None = None
        self._gains = [Gain() for _ in range(len(TEMPERATURES) + 1)]
        self._correction = AcceptanceCorrection()
        self._time_ms = self._explored_ms = self._running = 0.0
        self._others = 1.0
        self._early = self._read = 0
        self._valued: tuple[LatencyModel, Gain] | None = None  # for which time was valued, until something is learned

    def latency_model(self, route: Hashable) -> LatencyModel:
        """The latency model of a route; a new one begins with what was learned of the last."""
        if self._used is not None and self._used[0] is route:  # the usual case
            return self._used[1]
        model = self._routes.pop(route, None)
        if model is None:
            model = next(reversed(self._routes.values())).for_another_route() if self._routes else LatencyModel()
        self._routes[route] = model
        self._used = route, model
        while len(self._routes) > ROUTES_KEPT:
            self._routes.pop(next(iter(self._routes)))
        return model

    def plan(self, route: Hashable, temperature: float, room: int) -> SpeculationPlan:
        """How many nodes to draft for the next sweep, at most `room`; 0: none, plain decoding is best."""
        model, gain = self.latency_model(route), self._gain_of(temperature)
        max_size = int(min(room, self.max_tree_nodes, model.max_nodes, model.max_unanswered_nodes))
        plain_ms = model.sweep_ms(0)
        if max_size < 1:
            return SpeculationPlan(0, plain_ms, "no room for a tree")
        if not gain.is_known or not model.is_expected:
            first = self._first_size(model, max_size)
            return SpeculationPlan(first, plain_ms, "nothing is known yet", is_whole=True)
        sizes = self._sizes(model, max_size)
        (rates,) = self._rates(sizes, model, gain.expected)
        place = max(range(len(sizes)), key=rates.__getitem__)
        size, rate, plain = sizes[place], rates[place], 1 / max(plain_ms, 1e-9)
        if rate >= plain:
            turn = {TRIAL_PERIOD // 2 - 1: 1, TRIAL_PERIOD - 1: -1}.get(model.sweeps % TRIAL_PERIOD, 0)
            if turn and 0 <= place + turn < len(sizes) and rates[place + turn] >= MIN_TRIED_SPEED * rate:
                tried = sizes[place + turn]
                return SpeculationPlan(tried, model.sweep_ms(tried), f"{size} seems best, {tried} is tried")
            reason = f"up to {_nodes(size)}: {_per_s(rate)} against {_per_s(plain)} plain"
            return SpeculationPlan(size, model.sweep_ms(size), reason)
        (uncorrected,) = self._rates(sizes, model, gain.expected, corrected=1.0)
        if gain.trees < FIRST_TREES and max(uncorrected) >= MIN_EXPECTED_SPEED * plain:
            first = self._first_size(model, max_size)
            return SpeculationPlan(first, model.sweep_ms(size), "little is known yet", is_whole=True)
        took = model.sweep_ms(size) + self.draft.at(size)
        if self._explored_ms + took <= MAX_EXPLORED * self._time_ms:
            self._explored_ms += took
            reason = "tries whether a tree is worth it by now"
            return SpeculationPlan(size, model.sweep_ms(size), reason, is_whole=True, is_trial=True)
        return SpeculationPlan(0, plain_ms, f"plain: {_per_s(plain)} against {_per_s(rate)} with {_nodes(size)}")

    def stop_rule(self, route: Hashable, temperature: float, planned: SpeculationPlan) -> StopRule:
        """When another round of drafting does not pay, for a tree that was planned."""
        model = self.latency_model(route)
        if planned.is_whole or not model.is_expected:
            return NO_LIMIT
        rate = self._value_time(model, temperature)
        round_ms = self.round.at(1) if self.round.is_known else 0.0
        per_ms = rate / self._correction.ratio
        least = per_ms * model.per_node_ms
        return StopRule(
            max(least, MIN_PROBABILITY) if model.edges else least,
            per_ms * round_ms,
            per_ms * model.price_ms(ROUND_NODES, self._others),
        )

    def patience_ms(self, route: Hashable, nodes: int) -> float:
        """How long a sweep should wait for a tree of so many nodes, or a reply for one that grows.

        As long as a sweep without a tree takes, so that a wait in vain at most doubles its time; longer where drafting
        usually takes longer and was chosen all the same.
        """
        model = self.latency_model(route)
        usual_ms = PATIENCE * self.draft.at(nodes) if self.draft.is_known else 0.0
        return max(model.sweep_ms(0), usual_ms) if model.is_expected else math.inf

    def trim(
        self, route: Hashable, temperature: float, probabilities: Sequence[float], planned: SpeculationPlan
    ) -> SpeculationPlan:
        """How many of a tree's nodes, best first, are worth sending."""
        model, partial_tree = self.latency_model(route), replace(planned, is_whole=False)
        threshold = self.stop_rule(route, temperature, partial_tree).min_probability
        nodes = sum(probability > threshold for probability in probabilities)
        predicted_ms = model.sweep_ms(nodes) if model.is_expected else None
        if planned.is_trial:
            return replace(planned, nodes=nodes, predicted_ms=predicted_ms)
        if not probabilities:
            reason = "no draft proposed a node that is worth its cost"
        elif model.edges:
            nodes, reason = self._fill(model, probabilities[:nodes], threshold)
            predicted_ms = model.sweep_ms(nodes)
        elif nodes == len(probabilities):
            reason = f"every proposed node is worth more than the {threshold:.3f} tokens that it costs"
        else:
            reason = (
                f"node {nodes + 1} has a probability of {probabilities[nodes]:.3f} and costs {threshold:.3f} tokens"
            )
        if nodes > MIN_CHUNKED and (chunk := model.chunk(nodes)) < nodes:
            return SpeculationPlan(nodes, model.sweep_ms(chunk), f"{reason}; in parts of {chunk}", chunk=chunk)
        return SpeculationPlan(nodes, predicted_ms, reason)

    def max_nodes(self, route: Hashable, temperature: float, room: int, pipeline: PipelineState) -> int:
        """How many nodes a further sweep may carry while others are in flight; 0 to wait for those.

        Where plain decoding is best, drafting may take the time that is left before the next reply.
        """
        model = self.latency_model(route)
        size = int(min(room, self.max_tree_nodes, model.max_nodes, model.max_unanswered_nodes - pipeline.nodes))
        if size < 1 or not self._gain_of(temperature).is_known:
            return 0
        if not model.is_expected:
            return min(size, FIRST_SIZE)
        is_late = self.round.is_known and self.round.at(1) > pipeline.reply_ms
        if is_late and self._value_time(model, temperature) <= 1 / max(model.sweep_ms(0), 1e-9):
            return 0  # the reply would wait for a draft that is not worth its time
        return model.chunk(size) if size > MIN_CHUNKED else size

    def min_probability(self, route: Hashable, temperature: float) -> float:
        """A node of a lower acceptance probability is not worth being in a further sweep, whatever else it has."""
        model = self.latency_model(route)
        rate = self._value_time(model, temperature)
        least = rate / self._correction.ratio * model.node_price_ms(self._others)
        return max(least, MIN_PROBABILITY) if model.edges else least

    def extend(self, route: Hashable, probabilities: Sequence[float], pipeline: PipelineState) -> SpeculationPlan:
        """How many of such nodes, best first, a further sweep carries; 0 where they are not worth the hops' time.

        A larger sweep costs more and is answered later; the latter matters only if the walk reaches its first node.
        Where many nodes are worth it, they go in parts.
        """
        if not probabilities:
            return SpeculationPlan(0, None, "there is nothing below the sweeps in flight")
        model, nodes = self.latency_model(route), 0
        if model.edges:
            return self._further(model, probabilities, pipeline)
        prices_ms = model.prices_ms(range(len(probabilities) + 1), self._others)
        price_ms, marginal_latency_ms = next(prices_ms), probabilities[0] * model.marginal_latency_ms
        gain = -self._running * price_ms
        for probability, next_ms in zip(probabilities, prices_ms, strict=True):  # costs of one more do not fall
            step_ms = next_ms - price_ms
            step = probability * self._correction.ratio - self._running * (step_ms + marginal_latency_ms)
            if step <= 0:
                break
            nodes, price_ms, gain = nodes + 1, price_ms + step_ms, gain + step
        if gain <= 0:
            return SpeculationPlan(0, None, "nothing below the sweeps in flight is worth another sweep")
        if nodes > MIN_CHUNKED:
            nodes = model.chunk(nodes)
        reason = f"goes on below the sweeps in flight, where the best node has a probability of {probabilities[0]:.3f}"
        return SpeculationPlan(nodes, pipeline.busy_ms + model.sweep_ms(nodes - 1), reason)

    def has_time(self, pipeline: PipelineState) -> bool:
        """Whether another round of drafting fits before hops can take another sweep."""
        return self.round.is_known and pipeline.busy_ms >= self.round.at(1)

    def occupancy(self, route: Hashable, nodes: int) -> Occupancy:
        """How long so many nodes keep hops and links busy."""
        model = self.latency_model(route)
        return Occupancy(model.service_interval_ms(nodes), model.load * model.compute.at(nodes) + model.links.b * nodes)

    def observe_draft(self, temperature: float, tree: DraftTree, planned: SpeculationPlan, draft_ms: float) -> None:
        """Learn from a tree that was drafted.

        A tree that came too early for a source does not show what later trees bring. One for which a source read the
        text first does not show what drafting takes. After `FIRST_TREES` such trees in a row they count all the same.
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
        """Learn from a sweep that came back."""
        assert sweep.is_finite, "a sweep's times were checked on the wire and cut to what the client's clock allows"
        model, self._valued = self.latency_model(route), None
        if sweep.is_prompt:
            model.learn_prompt(sweep)
            return
        model.learn(sweep)
        self._correction.learn(sweep)
        self._time_ms += sweep.total_ms

    def expect(self, route: Hashable, forecast: RouteForecast) -> None:
        """Take a forecast of a route of which nothing is known yet."""
        assert forecast.is_finite, "routing predicts numbers only"
        if route not in self._routes:
            self._routes[route] = LatencyModel(forecast)

    def _fill(self, model: LatencyModel, probabilities: Sequence[float], threshold: float) -> tuple[int, str]:
        """How many nodes go beside the pending token where rows are padded to buckets, and why.

        Args:
            model: of the route.
            probabilities: of nodes that are worth more than the threshold, falling.
            threshold: what a node costs in tokens where its row is free.
        """
        per_ms, compute = self._running / self._correction.ratio, model.compute
        nodes, _ = best_fill(
            model.edges, probabilities, lambda count: per_ms * compute.at(count + 1) + threshold * count, 1
        )
        if nodes == len(probabilities):
            return nodes, f"every proposed node is worth more than the {threshold:.3f} tokens that a free row costs"
        step_ms = compute.at(nodes + 2) - compute.at(nodes + 1)
        return nodes, f"the next bucket takes {step_ms:.2f} ms more than {nodes + 1} rows and brings less than that"

    def _further(self, model: LatencyModel, probabilities: Sequence[float], pipeline: PipelineState) -> SpeculationPlan:
        """How many nodes a further sweep carries where rows are padded to buckets."""
        per_ms = self._running / self._correction.ratio

        def price(count: int) -> float:
            return per_ms * (model.price_ms(count, self._others) + probabilities[0] * model.later_ms(count))

        nodes, gain = best_fill(model.edges, probabilities, price, 0)
        if nodes == 0 or gain <= 0:
            return SpeculationPlan(0, None, "nothing below the sweeps in flight is worth another sweep")
        if nodes > MIN_CHUNKED:
            nodes = model.chunk(nodes)
        reason = f"fills {nodes} rows below the sweeps in flight, where the best node has {probabilities[0]:.3f}"
        return SpeculationPlan(nodes, pipeline.busy_ms + model.sweep_ms(nodes - 1), reason)

    def _first_size(self, model: LatencyModel, max_size: int) -> int:
        """Nodes of a tree while nothing is known; with the pending token they fill the smallest bucket."""
        return min(max_size, model.edges[0] - 1 if model.edges and model.edges[0] > 1 else FIRST_SIZE)

    def _sizes(self, model: LatencyModel, max_size: int) -> list[int]:
        """Tree sizes that are weighed against each other."""
        if model.edges:
            return sizes_within(model.edges, SIZES, max_size)
        return sorted({min(size, max_size) for size in SIZES[1:]})

    def _gain_of(self, temperature: float) -> Gain:
        return self._gains[bisect_left(TEMPERATURES, temperature)]

    def _rates(
        self, sizes: Sequence[int], model: LatencyModel, *gains: Sequence[float], corrected: float | None = None
    ) -> list[list[float]]:
        """Tokens per millisecond with trees of such sizes.

        Args:
            sizes: of trees.
            model: of the route.
            gains: expected tokens per size, of `SIZES`.
            corrected: accepted tokens per expected one; None for that of late sweeps.

        Returns:
            A list per gain, with one rate per size.
        """
        draft_ms = self.draft.table(sizes) if self.draft.is_known else [0.0] * len(sizes)
        times = [
            max(ms + (more_ms if size else 0.0), 1e-9)
            for size, ms, more_ms in zip(sizes, model.sweeps_ms(sizes), draft_ms, strict=True)
        ]
        # Accepting more than expected makes time more valuable only where others share it.
        part = min(self._correction.ratio, model.load) if corrected is None else corrected
        places = [bisect_left(SIZES, size) for size in sizes]
        return [[(1 + gained[place] * part) / ms for place, ms in zip(places, times, strict=True)] for gained in gains]

    def _value_time(self, model: LatencyModel, temperature: float) -> float:
        """The running goodput in tokens per millisecond; also sets what a millisecond of others is worth."""
        gain = self._gain_of(temperature)
        if self._valued is None or self._valued[0] is not model or self._valued[1] is not gain:
            max_size = min(self.max_tree_nodes, model.max_nodes)
            sizes = (0, *self._sizes(model, max_size)) if model.edges else SIZES[: bisect_right(SIZES, max_size)]
            expected, whole = self._rates(sizes, model, gain.expected, gain.whole)
            self._running = max(expected)
            self._others = max(whole) / self._running
            self._valued = model, gain
        return self._running


def _per_s(rate_per_ms: float) -> str:
    return f"{rate_per_ms * 1e3:.1f} tokens/s"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
