"""What a client knows of the machines around it: delays and speeds that it measured, failures that it saw.

Makes route queries.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from client.chain.opening import OpeningTimes
from client.chain.peer_speed import EXPLORED, PeerSpeeds
from client.stats import Stats
from swarm.discovery.node_record import NodeRecord
from swarm.errors import HopError
from swarm.ids import PeerId
from swarm.routing.costs import FAILURE_HALF_LIFE_S
from swarm.routing.latency import TIMEOUT_S, measure_delays, worth_measuring
from swarm.routing.route import Route, RouteQuery

KEPT_S = 60.0
"""How long measured delays are used before they are measured again."""
FAILURES_KEPT = 64


@dataclass(slots=True)
class PeerLatency:
    """One client's knowledge of one model's machines.

    Attributes:
        rng: chooses whom to measure where there are many, and this client's place among equal chains.
        probe: measures the delays to some machines, in milliseconds; those that do not answer are left out.
        clock: monotonic, in seconds.
        delays_ms: one-way delays that were measured last.
        failures: machines that failed and when, the newest `FAILURES_KEPT`.
        speeds: how fast machines were.
        openings: how long routes took to stand.
    """

    rng: random.Random = field(default_factory=random.SystemRandom)
    probe: Callable[[Sequence[NodeRecord]], Awaitable[dict[PeerId, float]]] = measure_delays
    clock: Callable[[], float] = time.monotonic
    delays_ms: dict[PeerId, float] = field(default_factory=dict)
    failures: tuple[tuple[str, float], ...] = ()
    speeds: PeerSpeeds = field(default_factory=PeerSpeeds)
    openings: OpeningTimes = field(default_factory=OpeningTimes)
    _seed: int = field(init=False)
    _measured_at: float | None = None

    def __post_init__(self) -> None:
        self._seed = self.rng.getrandbits(32)

    async def measure(self, records: Sequence[NodeRecord], num_layers: int) -> None:
        """Measure machines, those first that a chain may begin or end with, at most once in `KEPT_S`.

        It takes at most a second, or what `measure_delays` gives to relayed machines. A machine that does not answer
        counts as that second away, and as one that failed, as another machine says: it is passed over while others
        answer, also where the hop before has measured it while it lived.
        """
        now = self.clock()
        if self._measured_at is not None and now - self._measured_at < KEPT_S:
            return
        self._measured_at = now
        asked = worth_measuring(records, num_layers, self.rng)
        answered = await self.probe(asked)
        self.delays_ms = dict.fromkeys([record.peer for record in asked], TIMEOUT_S * 1e3) | answered
        for record in asked:
            if record.peer not in answered:
                self.failed(record.peer, is_hearsay=True)

    def failed(self, peer: str, *, is_hearsay: bool = False) -> None:
        """A machine failed: others are preferred for a while; half as much where another machine says so."""
        since_s = self.clock() - FAILURE_HALF_LIFE_S * is_hearsay
        self.failures = (*self.failures, (peer, since_s))[-FAILURES_KEPT:]
        if not is_hearsay:
            self.speeds.failed(PeerId(peer), self.clock())

    def blame(self, error: HopError) -> None:
        """A machine was in trouble, or a link: both of its ends carry it."""
        self.failed(error.peer, is_hearsay=error.other is not None)
        if error.other is not None:
            self.failed(error.other, is_hearsay=True)

    def served(self, route: Route, stats: Stats) -> None:
        """A text ended, well or not: learn how fast the machines of its chain were, and which had to be replaced."""
        for repair in stats.repairs:
            if not repair.is_move:
                for peer in repair.replaced:
                    self.failed(peer)
        if not stats.repairs:  # else some sweeps went over other machines
            self.speeds.learn(route, stats.sweeps, self.clock())

    def query(self, query: RouteQuery, *, may_explore: bool = False) -> RouteQuery:
        """The query with all that this client knows.

        Args:
            query: what is needed.
            may_explore: whether, now and then, machines that were never measured may be taken like others.
        """
        now, explore = self.clock(), may_explore and self.rng.random() < EXPLORED
        seed = self.rng.getrandbits(32) if explore else self._seed
        known = replace(query, delays_ms=self.delays_ms, failures=self.failures, now=now, seed=seed)
        newcomer = self.speeds.newcomer(now, explore=explore)
        return replace(known, slowness=self.speeds.slowness(now), newcomer=newcomer)
