"""How fast machines really were for this client, beside what they claim. Pure but for the clock of its caller.

What a machine claims is a prior: it fades with what this client measured, and comes back as measurements grow old. A
text counts once for every machine of its chain, as the ratio of what its sweeps took there to what was to be expected.

    slowness = (PRIOR + weight · mean ratio) / (PRIOR + weight)      weight: texts, halved every HALF_LIFE_S

A machine cannot shorten what was measured by reporting less: a sweep that was away for far longer than its hops account
for counts against all of them alike, and who is honest is soon measured in other company.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from client.stats import SweepMeasurement
from swarm.ids import PeerId
from swarm.routing.costs import HOP_OVERHEAD_MS, sweep_ms, wait_ms
from swarm.routing.route import Route

PRIOR: Final = 0.25
"""Weight of what a machine claims; a text has 1."""
HALF_LIFE_S: Final = 600.0
"""After it, a measurement has half of its weight."""
MAX_RATIO: Final = 1e3
MIN_RATIO: Final = 1 / 4
"""A machine is believed to be faster than it claims up to this part of its time."""
FAILED_RATIO: Final = 8.0
"""A failure counts as a text that took so many times as long as expected."""
MAX_USUAL: Final = 2.0
"""Claims of machines that were never measured are taken to be wrong by this factor at most: one liar shows nothing."""
NEWCOMER_PRICE: Final = 1.1
"""A machine that was never measured is taken to be slower by this factor while others were measured …"""
EXPLORED: Final = 1 / 16
"""… but in this part of all sessions, so that honest newcomers are found out."""
UNEXPLAINED: Final = 2.0
"""A sweep may be away for so many times what its hops and links account for; the rest counts against the hops."""
MACHINES_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """What was measured of one machine.

    Attributes:
        ratio: mean of measured to expected times.
        weight: how many texts that is; old ones count less.
        at_s: when the last one ended.
    """

    ratio: float
    weight: float
    at_s: float

    def weight_at(self, now_s: float) -> float:
        """The weight that is left."""
        return self.weight * math.exp2(-max(now_s - self.at_s, 0.0) / HALF_LIFE_S)

    def slowness_at(self, now_s: float) -> float:
        """By what claimed times are multiplied."""
        weight = self.weight_at(now_s)
        return (PRIOR + weight * self.ratio) / (PRIOR + weight)


class PeerSpeeds:
    """The measured speeds of the machines that were measured last, at most `MACHINES_KEPT`."""

    def __init__(self) -> None:
        self._measured: OrderedDict[PeerId, MeasuredSpeed] = OrderedDict()

    def learn(self, route: Route, sweeps: Sequence[SweepMeasurement], now_s: float) -> None:
        """Learn from the decode sweeps of one text, all of which went over this route."""
        fitting = [sweep for sweep in sweeps if len(sweep.hops) == len(route.hops)]
        usual = [sweep for sweep in fitting if sweep.is_alone and not sweep.is_part] or fitting
        for place, hop in enumerate(route.hops):
            if usual:
                self._note(hop.peer, median(_ratio(route, place, sweep) for sweep in usual), now_s)

    def failed(self, peer: PeerId, now_s: float) -> None:
        """A machine failed."""
        self._note(peer, FAILED_RATIO, now_s)

    def slowness(self, now_s: float) -> dict[PeerId, float]:
        """By machine, by what its claimed times are multiplied; machines that were never measured are not in it."""
        return {peer: speed.slowness_at(now_s) for peer, speed in self._measured.items()}

    def newcomer(self, now_s: float, *, explore: bool = False) -> float:
        """The same for machines that were never measured: as wrong as the others' claims usually are, and a little.

        Args:
            now_s: the present.
            explore: whether to do without the price of being new.
        """
        usual = min(median(self.slowness(now_s).values()), MAX_USUAL) if self._measured else 1.0
        return usual * (1.0 if explore or not self._measured else NEWCOMER_PRICE)

    def _note(self, peer: PeerId, ratio: float, now_s: float) -> None:
        ratio = min(max(ratio, MIN_RATIO), MAX_RATIO)
        known = self._measured.pop(peer, MeasuredSpeed(1.0, 0.0, now_s))
        weight = known.weight_at(now_s)
        self._measured[peer] = MeasuredSpeed((weight * known.ratio + ratio) / (weight + 1), weight + 1, now_s)
        while len(self._measured) > MACHINES_KEPT:
            self._measured.popitem(last=False)


def _ratio(route: Route, place: int, sweep: SweepMeasurement) -> float:
    """What a sweep took at a hop, to what its machine's claims let expect."""
    record, hop, time = route.records[place], route.hops[place], sweep.hops[place]
    whole_ms = sweep_ms(record, sweep.rows)
    expected_ms = wait_ms(record, whole_ms) + whole_ms * len(hop.span) / len(record.span) + HOP_OVERHEAD_MS
    known_ms = max(sweep.total_ms - sweep.other_ms, route.sweep_ms)
    hidden_ms = max(sweep.total_ms - UNEXPLAINED * known_ms, 0.0) / len(route.hops)
    return (time.queue_ms + time.compute_ms + time.other_ms + hidden_ms) / expected_ms
