"""The query for a chain, and the cost of each part of one: predicted milliseconds of one sweep. Pure; searches nothing.

    client → hop 0 · per hop: queue + its layers + messages · hop → next hop: delay + hidden rows / rate · tail → client

An unmeasured delay between two machines is taken to be the larger of their delays to the client: the true one lies
between the difference and the sum of the two, and the larger is the middle. Between two machines that are reached
through relays it is the sum: what one sends to the other goes out of its own network and round by the other's relay.
Ids and picks are too small to count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeRecord, NodeState, Reach
from swarm.protocol.messages import RouteHop
from swarm.routing.staircase import BucketSteps, padded_ms

DEFAULT_DELAY_MS = 30.0
"""One-way delay between the client and a machine that it has not measured: a home link's."""
RELAYED_DELAY_MS = 2 * DEFAULT_DELAY_MS
"""The same to a machine that is reached through a relay: there and on."""
RELAYED_MS = 5.0
"""What a relay is worth: of chains that are as fast, the one that spares lenders is taken. No sweep takes it."""
DEFAULT_LAYER_MS = 10.0
"""One layer's time on a machine that announces none: slower than most, so that machines that do are preferred."""
HOP_OVERHEAD_MS = 1.5
"""Time of a sweep at a hop beside its layers. Without it, one delay that was measured too long could make a chain with
a further hop look cheaper. Source: `python -m benchmarks cells`."""
DEFAULT_LINK_MBIT_PER_S = 100.0
"""Uplink of a machine that announces none."""
DEFAULT_ROW_BYTES = 8_192
"""Size of a hidden row where no record has it: 4,096 values of two bytes."""
FAILURE_PENALTY_MS = 1_000.0
"""What a failure adds to a machine's cost at once: a route that is up to one second longer is preferred to it."""
FAILURE_HALF_LIFE_S = 60.0
"""After it, half of that penalty is left."""
SPEED_JITTER = 0.03
"""With a seed, machines are made to look slower by random parts up to this one, so that clients spread; the chosen
chain is slower than the fastest by at most as much."""
MAX_BUSY = 0.95
"""Greater announced occupancies are taken as this: the queue's formula diverges at 1."""
_MAX_MS = 1e7
"""Greater announced times (three hours) are taken as this."""
_MAX_COST_MS = 1e9
"""Greater costs are taken as this, and so is what is no number: it never wins."""

Floats = NDArray[np.floating]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RouteForecast:
    """What sweeps over a route should take before any was measured, in milliseconds.

    Attributes:
        links_ms: all delays together.
        compute_ms: of a sweep without a tree, at all hops together.
        row_ms: what one more node adds to `compute_ms`, where there are no `steps`.
        link_row_ms: what one more node adds on links, all of them together.
        waiting_ms: queueing behind other sessions' sweeps, at all hops together.
        hops: how many.
        bottleneck_share: the busiest hop's part of `compute_ms + waiting_ms`; 0 where it is unknown, then all hops
            are taken to be alike.
        steps: where every hop pads its rows to buckets, milliseconds at all hops together by the rows of a bucket; the
            first is `compute_ms`.
    """

    links_ms: float
    compute_ms: float
    row_ms: float
    link_row_ms: float = 0.0
    waiting_ms: float = 0.0
    hops: int = 1
    bottleneck_share: float = 0.0
    steps: BucketSteps = ()

    @property
    def is_finite(self) -> bool:
        """Whether all of it are numbers, none of them negative."""
        times_ms = (self.links_ms, self.compute_ms, self.row_ms, self.link_row_ms, self.waiting_ms)
        steps_ms = [ms for _, ms in self.steps]
        return all(0 <= number < math.inf for number in (*times_ms, *steps_ms, self.bottleneck_share))


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What a chain is needed for.

    Attributes:
        name: the model, as the user calls it.
        num_layers: layers of the whole model.
        nodes: expected tree nodes per sweep below the pending token; 0 is plain decoding.
        join: addresses of the swarm, for the command in an error.
        kv_tokens: what the session reserves on every hop.
        row_bytes: size of a hidden row on the wire, None for what the records have.
        delays_ms: one-way delays to machines, by peer, as the client measured them.
        avoid: peers that must not be used, and relays (`host:port`) behind which no hop may begin.
        failures: (peer, time in seconds) of machines that failed.
        now: the present, in seconds of the same clock.
        keep: hops that hold the session already; such a hop computes exactly its layers. Their records must be given.
        replay_layer_ms: cost of each layer that no kept hop computes.
        numeric_class: the only one that may be used, None for any.
        rounding: the mark of processors (`NodeRecord.rounding`) that goes before all others, None for any.
        alike: whether processors of one mark must compute the whole chain.
        seed: chooses among chains of nearly the same time, so that clients spread; None takes the fastest.
        slowness: by peer, how many times as long as it claims a machine takes, by what this client measured.
        newcomer: the same for machines that this client never measured.
    """

    name: str
    num_layers: int
    nodes: int = 16
    join: tuple[str, ...] = ()
    kv_tokens: int = 0
    row_bytes: int | None = None
    delays_ms: Mapping[PeerId, float] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()
    failures: tuple[tuple[str, float], ...] = ()
    now: float = 0.0
    keep: tuple[RouteHop, ...] = ()
    replay_layer_ms: float = 0.0
    numeric_class: str | None = None
    rounding: str | None = None
    alike: bool = False
    seed: int | None = None
    slowness: Mapping[PeerId, float] = field(default_factory=dict)
    newcomer: float = 1.0

    def slowness_of(self, peer: PeerId) -> float:
        """By what a machine's claimed times are multiplied."""
        return self.slowness.get(peer, self.newcomer)


@dataclass(frozen=True, slots=True)
class HopCost:
    """Predicted milliseconds of one hop of a sweep, in the order in which they pass.

    Attributes:
        delay_ms: one-way delay of the link into the hop.
        is_measured: whether that delay was measured.
        transfer_ms: hidden rows on that link.
        queue_ms: waiting behind other sessions' sweeps.
        compute_ms: its layers and messages.
    """

    delay_ms: float
    is_measured: bool
    transfer_ms: float
    queue_ms: float
    compute_ms: float

    @property
    def total_ms(self) -> float:
        """Delay, transfer, queue and compute together."""
        return self.delay_ms + self.transfer_ms + self.queue_ms + self.compute_ms


def sweep_ms(record: NodeRecord, rows: int) -> float:
    """Time of a sweep through a machine's whole span, interpolated between the sizes that it measured.

    Args:
        record: the machine's. Where it pads rows to buckets, nothing is interpolated.
        rows: of the sweep; beyond the measured sizes the nearest slope continues, if it rises, or further forwards
            follow of the largest bucket.
    """
    if not record.sweep_ms:
        return DEFAULT_LAYER_MS * len(record.span)
    if record.bucketed:
        return min(padded_ms(record.sweep_ms, rows), _MAX_MS)
    points = sorted(record.sweep_ms)
    low = high = points[0]
    for point in points[1:]:
        low, high = high, point
        if rows <= high[0]:
            break
    slope_ms = (high[1] - low[1]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    if rows > high[0]:
        slope_ms = max(slope_ms, 0.0)
    return min(max(high[1] + slope_ms * (max(rows, low[0]) - high[0]), 0.0), _MAX_MS)


def expected_ms(record: NodeRecord, rows: int, query: RouteQuery) -> float:
    """Expected time of a sweep through a machine's whole span: what it claims, corrected by measurements."""
    return min(sweep_ms(record, rows) * query.slowness_of(record.peer), _MAX_MS)


def wait_ms(record: NodeRecord, whole_ms: float) -> float:
    """Expected wait behind other sessions' sweeps: a queue with one server and sweeps of `whole_ms` each (M/D/1)."""
    busy = min(record.busy, MAX_BUSY)
    return whole_ms * busy / (2 * (1 - busy))


def transfer_ms(record: NodeRecord, query: RouteQuery) -> float:
    """Time that the hidden rows of a sweep take on the machine's uplink."""
    rate_mbit = record.uplink_mbit_per_s or DEFAULT_LINK_MBIT_PER_S
    row_bytes = query.row_bytes or record.row_bytes or DEFAULT_ROW_BYTES
    return (query.nodes + 1) * row_bytes * 8 / (rate_mbit * 1e3)


def penalty_ms(peer: PeerId, query: RouteQuery) -> float:
    """What a machine's recent failures add to its cost; each penalty halves every `FAILURE_HALF_LIFE_S`."""
    ages_s = [max(query.now - at, 0.0) for failed, at in query.failures if failed == peer]
    return sum(FAILURE_PENALTY_MS * math.exp2(-age_s / FAILURE_HALF_LIFE_S) for age_s in ages_s)


def delay_ms(sender: NodeRecord, receiver: NodeRecord, query: RouteQuery) -> tuple[float, bool]:
    """One-way delay between two machines, and whether the sender measured it."""
    known = dict(sender.delays_ms).get(receiver.peer)
    if known is not None:
        return known, True
    delays_ms = client_delay_ms(sender, query)[0], client_delay_ms(receiver, query)[0]
    are_relayed = is_relayed(sender) and is_relayed(receiver)
    return sum(delays_ms) if are_relayed else max(delays_ms), False


def client_delay_ms(record: NodeRecord, query: RouteQuery) -> tuple[float, bool]:
    """One-way delay between a machine and the client, and whether it was measured."""
    known = query.delays_ms.get(record.peer)
    if known is not None:
        return known, True
    return RELAYED_DELAY_MS if is_relayed(record) else DEFAULT_DELAY_MS, False


def is_relayed(record: NodeRecord) -> bool:
    """Whether a machine is reached through a relay."""
    return record.reach is Reach.RELAYED


def can_join(record: NodeRecord, query: RouteQuery) -> bool:
    """Whether a machine takes a new session of this size."""
    return record.state is NodeState.SERVING and record.kv_tokens_free >= query.kv_tokens


class Candidate(NamedTuple):
    """A machine and the layers that it may compute.

    Attributes:
        record: the machine's.
        span: the layers.
        kept: it holds the session with exactly these layers, so its free KV room does not matter.
    """

    record: NodeRecord
    span: Span
    kept: bool = False


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of n candidates as arrays; a machine whose hop is kept may be two candidates.

    Attributes:
        machine: [n] number of the candidate's machine.
        start: [n] first layer.
        end: [n] the layer after the last one.
        kept: [n] whether it holds the session with exactly these layers.
        layer_ms: [n] per layer that is used.
        fixed_ms: [n] per use: queue, overhead, failures and relays.
        send_ms: [n] hidden rows to a next hop.
        client_ms: [n] delay to the client.
        links_ms: [n, n] delays from row to column; infinite between candidates of one machine.
    """

    machine: Ints
    start: Ints
    end: Ints
    kept: Bools
    layer_ms: Floats
    fixed_ms: Floats
    send_ms: Floats
    client_ms: Floats
    links_ms: Floats


def tabulate(candidates: Sequence[Candidate], query: RouteQuery) -> CostTable:
    """The costs of all candidates. A penalty and a replay, which a session pays once, count like a sweep's time."""
    records, rows = [candidate.record for candidate in candidates], query.nodes + 1
    number: dict[PeerId, int] = {}
    machine = np.array([number.setdefault(record.peer, len(number)) for record in records], np.intp)
    whole_ms = claims_ms(records, rows)
    if query.slowness or query.newcomer != 1.0:
        whole_ms = np.minimum(whole_ms * [query.slowness_of(record.peer) for record in records], _MAX_MS)
    busy = np.minimum([record.busy for record in records], MAX_BUSY)
    queue_ms = whole_ms * busy / (2 * (1 - busy))
    failed = {peer for peer, _ in query.failures}
    penalties_ms = [penalty_ms(record.peer, query) if record.peer in failed else 0.0 for record in records]
    replay_ms = [0.0 if one.kept else query.replay_layer_ms for one in candidates]
    client_ms = np.array([client_delay_ms(record, query)[0] for record in records])
    relayed = np.array([is_relayed(record) for record in records], np.bool_)
    links_ms = _links_ms(records, client_ms, relayed)
    jitter = np.ones(len(number))  # a factor per machine
    if query.seed is not None:
        jitter += SPEED_JITTER * np.random.default_rng(query.seed).random(len(number))
        links_ms *= jitter[machine].astype(np.float32)
    jitter = jitter[machine]
    table = CostTable(
        machine=machine,
        start=np.array([one.span.start for one in candidates], np.intp),
        end=np.array([one.span.end for one in candidates], np.intp),
        kept=np.array([one.kept for one in candidates], np.bool_),
        layer_ms=jitter * whole_ms / [len(record.span) for record in records] + replay_ms,
        fixed_ms=jitter * (queue_ms + HOP_OVERHEAD_MS + RELAYED_MS * relayed) + penalties_ms,
        send_ms=jitter * [transfer_ms(record, query) for record in records],
        client_ms=jitter * client_ms,
        links_ms=links_ms,
    )
    for costs in (table.layer_ms, table.fixed_ms, table.send_ms, table.client_ms):
        _bound(costs)
        assert np.isfinite(costs).all(), "a cost that is no number would win or crash the search"
    assert not np.isnan(links_ms).any(), "the delay of a machine to itself is infinite, any other one is a number"
    return table


def _bound(costs: Floats) -> None:
    """Clip costs in place."""
    np.nan_to_num(costs, copy=False, nan=_MAX_COST_MS, posinf=_MAX_COST_MS, neginf=0.0)
    np.clip(costs, 0.0, _MAX_COST_MS, out=costs)


def claims_ms(records: Sequence[NodeRecord], rows: int) -> Floats:
    """[n] `sweep_ms` of each; machines that measured the same sizes are computed together."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, record in enumerate(records):
        sizes = () if record.bucketed else tuple(map(itemgetter(0), record.sweep_ms))
        alike.setdefault(sizes, []).append(row)
    found = np.empty(len(records))
    for sizes, members in alike.items():
        if len(sizes) < 2 or any(low >= high for low, high in pairwise(sizes)):
            found[members] = [sweep_ms(records[row], rows) for row in members]
            continue
        place = next((place for place, size in enumerate(sizes[1:], 1) if rows <= size), len(sizes) - 1)
        points = np.array([[records[row].sweep_ms[at][1] for at in (place - 1, place)] for row in members])
        low_ms, high_ms = points[:, 0], points[:, 1]
        slope_ms = (high_ms - low_ms) / (sizes[place] - sizes[place - 1])
        if rows > sizes[place]:
            slope_ms = np.maximum(slope_ms, 0.0)
        found[members] = np.clip(high_ms + slope_ms * (max(rows, sizes[place - 1]) - sizes[place]), 0.0, _MAX_MS)
    return found


def _links_ms(records: Sequence[NodeRecord], client_ms: Floats, relayed: Bools) -> Floats:
    """[n, n] `delay_ms` of all pairs, as float32: 1,000 machines have a million pairs."""
    table: Floats = np.maximum.outer(client_ms.astype(np.float32), client_ms.astype(np.float32))
    behind = np.flatnonzero(relayed)
    if len(behind):
        sums: Floats = np.add.outer(client_ms[behind], client_ms[behind]).astype(np.float32)
        table[np.ix_(behind, behind)] = sums
    senders = np.repeat(np.arange(len(records)), [len(record.delays_ms) for record in records])
    pairs = list(chain.from_iterable(record.delays_ms for record in records))
    peers, delays_ms = zip(*pairs, strict=True) if pairs else ((), ())
    known_ms = np.array(delays_ms, np.float32)
    for row_of in _rows_of(records):
        receivers = np.fromiter(map(row_of.get, peers, repeat(-1)), np.intp, len(peers))
        known = receivers >= 0
        table[senders[known], receivers[known]] = known_ms[known]
        own = np.array([row_of.get(record.peer, -1) for record in records], np.intp)
        table[np.flatnonzero(own >= 0), own[own >= 0]] = np.inf
    return table


def _rows_of(records: Sequence[NodeRecord]) -> list[dict[PeerId, int]]:
    """Rows of the table by peer: first candidates, then second ones, if there are any."""
    first: dict[PeerId, int] = {}
    second: dict[PeerId, int] = {}
    for row, record in enumerate(records):
        if first.setdefault(record.peer, row) != row:
            second[record.peer] = row
    return [first, second] if second else [first]
