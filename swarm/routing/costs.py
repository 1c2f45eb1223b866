"""What a chain is wanted for, and what each part of it costs: predicted milliseconds of one sweep. Pure.

    client → hop 0 · per hop: queue + its layers + messages · hop → next hop: delay + hidden rows / rate · tail → client

A delay that nobody measured is taken to be the larger of the two machines' delays to the client: the two lie between
their difference and their sum apart, and that is the middle. Ids and picks are too small to count.
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

from swarm.discovery.node_record import NodeRecord, NodeState
from swarm.ids import PeerId
from swarm.layers import Span
from swarm.protocol.messages import RouteHop

HOP_MS = 30.0
"""One-way delay between the client and a machine that it has not measured: a home link's."""
LAYER_MS = 10.0
"""One layer's time on a machine that does not say: slower than most, so that those who do are preferred."""
MESSAGES_MS = 1.5
"""What a sweep takes a hop beside its layers. Without it a hop that saves nothing but a delay measured in a bad moment
would cost nothing. Source: `benchmarks.control.cells`, 5 ms for three hops and a network emulator."""
LINK_MBIT_PER_S = 100.0
ROW_BYTES = 8_192
"""A hidden row's size where no record says: 4,096 values of two bytes."""
FAILURE_MS = 1_000.0
"""What a failure of this moment adds to a machine's cost; so a detour of one second is preferred to it."""
FAILURE_HALF_LIFE_S = 60.0
NEARLY_EQUAL = 0.03
"""Chance makes a machine seem slower by up to this part: so a chain that it prefers is slower by at most as much."""
MOST_BUSY = 0.95
_MOST_MS = 1e7
"""A claim beyond it (three hours) is taken as this."""

Floats = NDArray[np.floating]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RouteForecast:
    """What sweeps over a route should take before any was measured, in milliseconds.

    Attributes:
        links_ms: all delays together.
        compute_ms: of a sweep without a tree, at all hops together.
        row_ms: what one more node adds there.
        link_row_ms: what one more node adds on links, all of them together.
        waiting_ms: behind others, at all hops together.
        hops: how many.
        bottleneck_share: the part of `compute_ms` and `waiting_ms` that one hop has at most; 0 where nobody says, then
            they are alike.
    """

    links_ms: float
    compute_ms: float
    row_ms: float
    link_row_ms: float = 0.0
    waiting_ms: float = 0.0
    hops: int = 1
    bottleneck_share: float = 0.0


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What a chain is wanted for.

    name: the model, as the user calls it. nodes: expected tree nodes per sweep, the pending token not counted, so 0 is
    plain decoding. kv_tokens: what the session reserves on every hop. row_bytes: of a hidden row on the wire, None for
    what the records say. delays_ms: one way, by peer, as the client measured them.

    avoid: never used. failures: (peer, when) of machines that failed; `now` and those times are of one clock, in
    seconds. keep: hops that hold the session already; their records must be among the given ones. Every layer that no
    kept hop computes costs `replay_layer_ms`, and a kept hop computes exactly its layers. numeric_class: the only one
    that will do. seed: picks among chains of nearly the same time, so that clients spread; None takes the fastest.
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
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class HopCost:
    """Predicted milliseconds of one hop of a sweep, in the order in which they pass.

    delay_ms, transfer_ms: the link into the hop; `is_measured` says whether somebody measured that delay. compute_ms:
    its layers and messages.
    """

    delay_ms: float
    is_measured: bool
    transfer_ms: float
    queue_ms: float
    compute_ms: float

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.delay_ms + self.transfer_ms + self.queue_ms + self.compute_ms


def sweep_ms(record: NodeRecord, rows: int) -> float:
    """Time of a sweep of `rows` through the whole span: between measured sizes linear, beyond them the last slope."""
    if not record.sweep_ms:
        return LAYER_MS * len(record.span)
    points = sorted(record.sweep_ms)
    low = high = points[0]
    for point in points[1:]:
        low, high = high, point
        if rows <= high[0]:
            break
    slope_ms = (high[1] - low[1]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    if rows > high[0]:
        slope_ms = max(slope_ms, 0.0)
    return min(max(high[1] + slope_ms * (max(rows, low[0]) - high[0]), 0.0), _MOST_MS)


def wait_ms(record: NodeRecord, whole_ms: float) -> float:
    """Expected wait behind others' sweeps of `whole_ms` each: a queue with one server and equal sweeps (M/D/1)."""
    busy = min(record.busy, MOST_BUSY)
    return whole_ms * busy / (2 * (1 - busy))


def transfer_ms(record: NodeRecord, query: RouteQuery) -> float:
    """Time that the hidden rows of a sweep take on the machine's uplink."""
    rate_mbit = record.uplink_mbit_per_s or LINK_MBIT_PER_S
    row_bytes = query.row_bytes or record.row_bytes or ROW_BYTES
    return (query.nodes + 1) * row_bytes * 8 / (rate_mbit * 1e3)


def penalty_ms(peer: PeerId, query: RouteQuery) -> float:
    """What the machine's late failures add; each halves every `FAILURE_HALF_LIFE_S`."""
    ages_s = [max(query.now - at, 0.0) for failed, at in query.failures if failed == peer]
    return sum(FAILURE_MS * math.exp2(-age_s / FAILURE_HALF_LIFE_S) for age_s in ages_s)


def delay_ms(sender: NodeRecord, receiver: NodeRecord, query: RouteQuery) -> tuple[float, bool]:
    """One-way delay between two machines, and whether the sender measured it."""
    known = dict(sender.delays_ms).get(receiver.peer)
    if known is not None:
        return known, True
    return max(client_delay_ms(sender, query)[0], client_delay_ms(receiver, query)[0]), False


def client_delay_ms(record: NodeRecord, query: RouteQuery) -> tuple[float, bool]:
    """One-way delay between a machine and the client, and whether it was measured."""
    known = query.delays_ms.get(record.peer)
    return (HOP_MS, False) if known is None else (known, True)


def can_join(record: NodeRecord, query: RouteQuery) -> bool:
    """Whether a machine takes a new session of this size."""
    return record.state is NodeState.SERVING and record.kv_tokens_free >= query.kv_tokens


class Candidate(NamedTuple):
    """A machine and the layers that it offers. kept: it holds the session with exactly these, whatever room is left."""

    record: NodeRecord
    span: Span
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """The same as arrays, one row per candidate; a machine whose hop is kept may have a second row.

    machine: [n] its number. start, end, kept: [n]. layer_ms, fixed_ms, send_ms, client_ms: [n] per layer used, per use,
    for rows to a next hop, and the delay to the client. links_ms: [n, n] delays, infinite within a machine.
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


def tabulate(candidates: Sequence[Candidate], query: RouteQuery) -> Costs:
    """The costs of all candidates; what a session pays once, penalty and replay, counts like a sweep's time."""
    records, rows = [candidate.record for candidate in candidates], query.nodes + 1
    number: dict[PeerId, int] = {}
    machine = np.array([number.setdefault(record.peer, len(number)) for record in records], np.intp)
    whole_ms = _whole_ms(records, rows)
    busy = np.minimum([record.busy for record in records], MOST_BUSY)
    queue_ms = whole_ms * busy / (2 * (1 - busy))
    failed = {peer for peer, _ in query.failures}
    penalties_ms = [penalty_ms(record.peer, query) if record.peer in failed else 0.0 for record in records]
    replay_ms = [0.0 if one.kept else query.replay_layer_ms for one in candidates]
    client_ms = np.array([query.delays_ms.get(record.peer, HOP_MS) for record in records])
    links_ms = _links_ms(records, client_ms)
    seems = np.ones(len(number))
    if query.seed is not None:
        seems += NEARLY_EQUAL * np.random.default_rng(query.seed).random(len(number))
        links_ms *= seems[machine].astype(np.float32)
    seems = seems[machine]
    return Costs(
        machine=machine,
        start=np.array([one.span.start for one in candidates], np.intp),
        end=np.array([one.span.end for one in candidates], np.intp),
        kept=np.array([one.kept for one in candidates], np.bool_),
        layer_ms=seems * whole_ms / [len(record.span) for record in records] + replay_ms,
        fixed_ms=seems * (queue_ms + MESSAGES_MS) + penalties_ms,
        send_ms=seems * [transfer_ms(record, query) for record in records],
        client_ms=seems * client_ms,
        links_ms=links_ms,
    )


def _whole_ms(records: Sequence[NodeRecord], rows: int) -> Floats:
    """[n] what `sweep_ms` says of each; machines that measured the same sizes are taken together."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, record in enumerate(records):
        alike.setdefault(tuple(map(itemgetter(0), record.sweep_ms)), []).append(row)
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
        found[members] = np.clip(high_ms + slope_ms * (max(rows, sizes[place - 1]) - sizes[place]), 0.0, _MOST_MS)
    return found


def _links_ms(records: Sequence[NodeRecord], client_ms: Floats) -> Floats:
    """[n, n] delays as `delay_ms` says, for all pairs at once; in float32, since they are a million for 1,000 peers."""
    table: Floats = np.maximum.outer(client_ms.astype(np.float32), client_ms.astype(np.float32))
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
    """Rows by peer: the first one of each, then the second ones, if there are any."""
    first: dict[PeerId, int] = {}
    second: dict[PeerId, int] = {}
    for row, record in enumerate(records):
        if first.setdefault(record.peer, row) != row:
            second[record.peer] = row
    return [first, second] if second else [first]
