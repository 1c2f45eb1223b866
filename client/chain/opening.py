"""Opens one session over the first route that stands: beside one that is late, a second one is tried.

A machine may take a session and never be ready for it. Whoever knows nobody yet would wait for it in each session. So
at most two routes are opened at once, each in a task of its own; the first that stands is used, and the other one is
left. Chooses no routes.

What a machine claims is a prior: it fades with what this client measured, and comes back as measurements grow old. A
text counts once for every machine of its chain, as the ratio of what its sweeps took there to what was to be expected.

    slowness = (PRIOR + weight · mean ratio) / (PRIOR + weight)      weight: texts, halved every HALF_LIFE_S

A machine cannot shorten what was measured by reporting less: a sweep that was away for far longer than its hops account
for counts against all of them alike, and who is honest is soon measured in other company.

`PeerLatency` keeps delays and speeds that this client measured and failures that it saw, and makes route queries of
them."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from client.base.stats import Stats, SweepMeasurement
from client.chain.chain import Chain
from client.chain.doubts import Doubts
from swarm.base.errors import HopError, SwarmError
from swarm.base.ids import PeerId
from swarm.base.quota import UNKNOWN, address_key, is_private, site_key
from swarm.base.tasks import TaskScope
from swarm.directory.node_record import NodeRecord
from swarm.protocol.limits import REFUTED_S
from swarm.routing.costs import FAILURE_HALF_LIFE_S, HOP_OVERHEAD_MS, RouteForecast, sweep_ms, wait_ms
from swarm.routing.latency import TIMEOUT_S, measure_delays, worth_measuring
from swarm.routing.route import Route, RouteQuery

LATE_S, LATEST_S = 0.2, 2.0
"""A route that does not stand is late after so long at least, and at most."""
LATE_TIMES = 3.0
"""Of what routes of this client took to stand."""
DIALLED_LINKS = 4.0
"""All delays of a route together, so many times: each link is dialled, taken and ready, in several round trips."""
OPENINGS_KEPT = 16

logger = logging.getLogger(__name__)


class OpeningTimes:
    """How long routes of one client took to stand."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=OPENINGS_KEPT)

    def note(self, seconds: float) -> None:
        """One more stands."""
        self._seconds.append(seconds)

    def late_s(self, forecast: RouteForecast) -> float:
        """After how many seconds such a route is late."""
        usual_s = median(self._seconds) if self._seconds else 0.0
        return min(max(LATE_S, LATE_TIMES * usual_s, DIALLED_LINKS * forecast.links_ms / 1e3), LATEST_S)


class ChainOpening:
    """One chain that opens, and then stays open until it is left.

    Attributes:
        chain: may be used once `stands`.
        seconds: how long it took.
        error: why it cannot be opened.
        settled: done once one of both is known.
    """

    def __init__(self, scope: TaskScope, chain: Chain) -> None:
        """Begin to open; the scope owns the chain, and leaving the scope closes it."""
        self.chain = chain
        self.seconds = 0.0
        self.error: HopError | None = None
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began_s = time.monotonic()
        self._left = False
        self._task = scope.spawn(self._hold())

    @property
    def stands(self) -> bool:
        """Whether it is open."""
        return self.settled.done() and self.error is None

    @property
    def waited_s(self) -> float:
        """How long it has been opening."""
        return time.monotonic() - self._began_s

    @property
    def peers(self) -> frozenset[str]:
        """The machines of its route."""
        route = self.chain.route
        return frozenset(hop.peer for hop in (*route.hops, *route.replicas))

    def leave(self) -> None:
        """Close it everywhere, and wait for nobody."""
        self._left = True
        self._task.cancel()

    async def _hold(self) -> None:
        try:
            async with open_chain(self.chain, self._failed):
                self.seconds = self.waited_s
                self.settled.set_result(None)
                await asyncio.Event().wait()
        except SwarmError as error:
            if self.error is None and not self._left:
                raise
            logger.debug("an opening ended", exc_info=error)

    def _failed(self, error: HopError) -> None:
        self.error = error
        self.settled.set_result(None)


async def first_open(
    begin: Callable[[], Awaitable[ChainOpening]],
    beside: Callable[[ChainOpening], Awaitable[ChainOpening | None]],
    failed: Callable[[ChainOpening], SwarmError | None],
    late_s: Callable[[ChainOpening], float],
) -> tuple[ChainOpening, ChainOpening | None]:
    """Open routes until one stands; returns it, and the late one that was left for it.

    Args:
        begin: opens the best route.
        beside: opens another one beside a late one; None: there is none.
        failed: called with an opening that failed; the error that ends the search, if one does.
        late_s: after how long an opening is late.

    Raises:
        SwarmError: what ended the search.
    """
    running: list[ChainOpening] = []
    is_alone = False
    try:
        while True:
            if not running:
                running, is_alone = [await begin()], False
            may_add = not is_alone and len(running) == 1
            limit_s = max(late_s(running[0]) - running[0].waited_s, 0.0) if may_add else None
            await asyncio.wait([one.settled for one in running], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if won := next((one for one in running if one.stands), None):
                running.remove(won)
                return won, next(iter(running), None)
            broken = [one for one in running if one.settled.done()]
            running = [one for one in running if not one.settled.done()]
            for one in broken:
                if (error := failed(one)) is not None:
                    raise error from one.error
            if not broken and not is_alone:
                another = await beside(running[0])
                is_alone = another is None
                running += [] if another is None else [another]
    finally:
        for one in running:
            one.leave()


@asynccontextmanager
async def open_chain(chain: Chain, failed: Callable[[HopError], None] = lambda error: None) -> AsyncIterator[Chain]:
    """Attach every hop of the chain's route; leaving closes the session everywhere.

    Args:
        chain: to open.
        failed: told why it cannot be, before it is closed: that may take a second.

    Raises:
        SwarmError: a hop refused, or did not answer in time.
    """
    async with TaskScope() as scope:
        try:
            try:
                await chain.open(scope)
            except HopError as error:
                failed(error)
                raise
            yield chain
        finally:
            await chain.close()  # also when the generation is left or breaks: KV elsewhere is not ours to keep


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


KEPT_S = 60.0
"""How long measured delays are used before they are measured again."""
FAILURES_KEPT = 64


REFUTED_SHARE: Final = 0.5
"""Of texts over a machine that others say to have found wrong, audits of its part beside all others."""
CLOCK_SLACK_S: Final = 60.0
"""A finding may come from a clock that is so far ahead."""
CLEARED_S: Final = 3_600.0
"""For how long an own audit that agrees outweighs what others say."""


def refuters(records: Sequence[NodeRecord], now_s: float) -> dict[PeerId, int]:
    """By machine, how many others say that they computed its work again and found it wrong.

    One counts for its network and its name, and not if one of them is the machine's own. All addresses that name no
    public network are one: they may be anybody's. Names and networks are cheap, so this accuses nobody: it says whom
    to audit.

    Args:
        records: as the directory lists them.
        now_s: Unix seconds.
    """
    listed = {record.peer: record for record in records}
    said: dict[PeerId, list[set[str]]] = {}
    for record in records:
        for peer, at in record.refuted:
            if peer not in listed or not now_s - REFUTED_S < at < now_s + CLOCK_SLACK_S:
                continue
            known = said.setdefault(peer, [_marks(listed[peer]) - {ELSEWHERE}])
            if not any(_marks(record) & others for others in known):
                known.append(_marks(record))
    return {peer: len(known) - 1 for peer, known in said.items() if len(known) > 1}


ELSEWHERE: Final = f"network {UNKNOWN}"


def _marks(record: NodeRecord) -> set[str]:
    """By what machines of one owner are known: network and name."""
    address = address_key(record.address)
    network = ELSEWHERE if is_private(address) else f"network {site_key(address)}"
    return {network, *([] if record.name is None else [f"name {record.name}"])}


@dataclass(slots=True)
class PeerLatency:
    """One client's knowledge of one model's machines.

    Attributes:
        rng: chooses whom to measure where there are many, and this client's place among equal chains.
        probe: measures the delays to some machines, in milliseconds; those that do not answer are left out.
        clock: monotonic, in seconds.
        delays_ms: one-way delays that were measured last.
        failures: machines that failed and when, the newest `FAILURES_KEPT`.
        liars: machines that computed something else than two others, the newest `FAILURES_KEPT`.
        speeds: how fast machines were.
        openings: how long routes took to stand.
        doubts: whether routes pick what drafts let expect: an audit's probability rises with that.
        said: by machine, how many others say in their records that they found it wrong.
        cleared: machines that an own audit found right, and when.
    """

    rng: random.Random = field(default_factory=random.SystemRandom)
    probe: Callable[[Sequence[NodeRecord]], Awaitable[dict[PeerId, float]]] = measure_delays
    clock: Callable[[], float] = time.monotonic
    delays_ms: dict[PeerId, float] = field(default_factory=dict)
    failures: tuple[tuple[str, float], ...] = ()
    liars: tuple[str, ...] = ()
    speeds: PeerSpeeds = field(default_factory=PeerSpeeds)
    openings: OpeningTimes = field(default_factory=OpeningTimes)
    doubts: Doubts = field(default_factory=Doubts)
    said: dict[PeerId, int] = field(default_factory=dict)
    cleared: OrderedDict[str, float] = field(default_factory=OrderedDict)
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
        self.said = refuters(records, time.time())
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

    def lied(self, peer: str) -> None:
        """A machine computed something else than two others: routes do without it while others have its layers."""
        self.liars = (*(one for one in self.liars if one != peer), peer)[-FAILURES_KEPT:]

    def agreed(self, peer: str) -> None:
        """An own audit found a machine right: for a while nothing counts that others say of it."""
        self.cleared[peer] = self.clock()
        self.cleared.move_to_end(peer)
        while len(self.cleared) > FAILURES_KEPT:
            self.cleared.popitem(last=False)

    def _said(self, peer: PeerId) -> int:
        """How many others say that a machine is wrong, where that counts."""
        at = self.cleared.get(peer)
        return self.said.get(peer, 0) if at is None or self.clock() - at > CLEARED_S else 0

    def refuted(self, peer: PeerId) -> float:
        """How often to audit a machine because of what others say of it, 0 to 1."""
        return REFUTED_SHARE if self._said(peer) else 0.0

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
        heard = [(peer, now - FAILURE_HALF_LIFE_S * (many < 2)) for peer in self.said if (many := self._said(peer))]
        failures = (*self.failures, *heard)
        known = replace(query, delays_ms=self.delays_ms, failures=failures, now=now, seed=seed)
        newcomer = self.speeds.newcomer(now, explore=explore)
        return replace(known, slowness=self.speeds.slowness(now), newcomer=newcomer)
