"""Hedging's pure parts: which routes and senders there are, whom a route takes as its replica, and when rows differ."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from random import Random

import pytest
import torch

from node.session.counters import NodeCounters
from node.session.upstreams import MAX_DIFFERENCE, ROWS, SWEEPS, HedgeRows, UpstreamSet, UpstreamStream
from swarm.base.errors import HopClosed, RemoteProtocolError
from swarm.base.ids import ModelIdentity, PeerId, SessionId, TreeNodeId
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.compute.row_codec import encode_rows
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.link.hedged_link import HedgedLink, follow, senders
from swarm.link.successor import SuccessorLink, SuccessorStream
from swarm.protocol.authority import place_in, replica_of
from swarm.protocol.messages import (
    Ack,
    Attach,
    Codec,
    Credits,
    Hedge,
    Open,
    Ready,
    Reroute,
    RouteHop,
    Sweep,
    SweepFrame,
)
from swarm.protocol.wire import decode_frame, encode_frame
from swarm.routing.route import RouteQuery, best_route, hedged

A, B, C, X = (PeerId(name) for name in "ABCX")
ROUTE = (RouteHop(A, Span(0, 4)), RouteHop(B, Span(4, 8)), RouteHop(C, Span(8, 12)))
HEDGE = Hedge(1, X)
OPEN = Open("f", 64, 4, 64, Codec.FP32, bytes(32))
CREDITS = Credits(64, 4, 64)


def to_c(generation: int, hedge: Hedge | None) -> Attach:
    """An attach that the tail gets, from B or from its replica."""
    return Attach(SessionId(bytes(16)), generation, ROUTE, 2, OPEN, hedge)


def test_a_replica_stands_in_its_hops_place() -> None:
    attach = to_hop_1(ROUTE, HEDGE)
    assert replica_of(attach) == RouteHop(X, Span(4, 8))
    assert [place_in(attach, peer) for peer in (A, B, X, C, PeerId("D"))] == [0, 1, 1, 2, None]
    assert (place_in(attach, X, Span(4, 8)), place_in(attach, X, Span(0, 4))) == (1, None)
    assert senders(ROUTE, 0, HEDGE) == ("",)
    assert senders(ROUTE, 1, HEDGE) == (A,)
    assert senders(ROUTE, 2, HEDGE) == (B, X)
    assert senders(ROUTE, 2, None) == (B,)
    assert senders(ROUTE, 1, Hedge(0, X)) == (A, X)


@pytest.mark.parametrize("replica", [A, B, C, ""])
def test_a_replica_that_stands_in_the_route_itself_is_refused(replica: str) -> None:
    frame = encode_frame(replace(to_hop_1(ROUTE, Hedge(1, PeerId(replica))), signature=bytes(64)))
    with pytest.raises(RemoteProtocolError) as refused:
        decode_frame(frame)
    assert refused.value.field == "replica"


def test_a_hedge_outside_the_route_is_refused() -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        decode_frame(encode_frame(Reroute(1, ROUTE, OPEN, Hedge(3, X), signature=bytes(64))))
    assert refused.value.field == "hedge"


class NotedLink(SuccessorLink):
    """Leads nowhere and notes what it is asked to do."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.at: RouteHop | None = None
        self.calls: list[object] = []

    @property
    def hop(self) -> RouteHop | None:
        return self.at

    def follow(self, attach: Attach, hop: RouteHop | None = None) -> None:
        self.at = hop or attach.route[attach.index]
        self.calls.append((attach.route, attach.hedge))

    def push(self, frame: SweepFrame) -> None:
        self.calls.append(frame)

    def sync(self) -> None:
        self.calls.append("sync")

    def desync(self) -> None:
        self.calls.append("desync")

    def leave(self) -> None:
        self.at = None
        self.calls.append("leave")

    def close(self, reason: str | None) -> None:
        self.calls.append(reason)


ROUTE_OF_X = (ROUTE[0], RouteHop(X, Span(4, 8)), ROUTE[2])


def to_hop_1(route: tuple[RouteHop, ...], hedge: Hedge | None = None) -> Attach:
    return Attach(SessionId(bytes(16)), 0, route, 1, OPEN, hedge)


@pytest.fixture
def plain() -> NotedLink:
    return NotedLink(None, None, None, None)


@pytest.fixture
def pair(plain: NotedLink) -> tuple[HedgedLink, NotedLink, NotedLink]:
    """A hedged link with the one to B and the one to X, none of which was asked for anything since."""
    link = follow(plain, to_hop_1(ROUTE, HEDGE))
    assert isinstance(link, HedgedLink)
    second = link._second
    assert isinstance(second, NotedLink)
    plain.calls.clear()
    second.calls.clear()
    return link, plain, second


@pytest.mark.parametrize("hedge", [None, Hedge(0, X), Hedge(2, X)], ids=["no hedge", "before", "behind"])
def test_an_unhedged_hop_has_one_plain_link(hedge: Hedge | None, plain: NotedLink) -> None:
    assert follow(plain, to_hop_1(ROUTE, hedge)) is plain
    assert plain.calls == [(ROUTE, hedge)]


def test_both_of_the_two_get_the_route_that_the_client_signed(plain: NotedLink) -> None:
    link = follow(plain, to_hop_1(ROUTE, HEDGE))
    assert isinstance(link, HedgedLink)
    assert isinstance(link._second, NotedLink)
    assert plain.calls == link._second.calls == [(ROUTE, HEDGE)]
    assert (plain.at, link._second.at) == (ROUTE[1], RouteHop(X, Span(4, 8)))


def test_both_get_everything(pair: tuple[HedgedLink, NotedLink, NotedLink]) -> None:
    link, first, second = pair
    sweep = frame(1, ROWS_OF_ONE)
    link.push(sweep)
    link.sync()
    link.desync()
    link.close("done")
    assert first.calls == second.calls == [sweep, "sync", "desync", "done"]


def test_a_route_without_a_hedge_drops_the_second(pair: tuple[HedgedLink, NotedLink, NotedLink]) -> None:
    link, first, second = pair
    assert follow(link, to_hop_1(ROUTE)) is first
    assert first.calls == [(ROUTE, None)]
    assert second.calls == ["leave"]


def test_when_the_first_dies_the_second_goes_on_in_its_place(pair: tuple[HedgedLink, NotedLink, NotedLink]) -> None:
    """Its stream stays, so nothing is replayed."""
    link, first, second = pair
    assert follow(link, to_hop_1(ROUTE_OF_X)) is second
    assert second.calls == [(ROUTE_OF_X, None)]
    assert first.calls == ["leave"]


@pytest.mark.parametrize("lost", [B, X])
def test_the_lost_one_of_two_is_replaced_and_the_other_one_stays(
    lost: PeerId, pair: tuple[HedgedLink, NotedLink, NotedLink]
) -> None:
    link, to_b, to_x = pair
    route = ROUTE_OF_X if lost == B else ROUTE
    assert follow(link, to_hop_1(route, Hedge(1, PeerId("D")))) is link
    kept, replaced = (to_x, to_b) if lost == B else (to_b, to_x)
    assert kept.calls == replaced.calls == [(route, Hedge(1, PeerId("D")))]
    assert (kept.at, replaced.at) == (route[1], RouteHop(PeerId("D"), Span(4, 8)))


async def test_the_streams_of_a_dropped_replica_are_waited_for(plain: NotedLink) -> None:
    """Or its goodbye might never leave."""
    said = asyncio.Event()

    async def goodbye() -> None:
        await said.wait()

    async def closed() -> None:
        await plain.gone()
        assert said.is_set()

    async with TaskScope() as scope:
        plain.beside()._open[scope.spawn(goodbye())] = SuccessorStream(RouteHop(PeerId("B"), Span(4, 8)))
        closing = scope.spawn(closed())
        await asyncio.sleep(0)
        assert not closing.done()
        said.set()
        await closing


class Side(UpstreamStream):
    """One that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[object] = []

    def send(self, message: object) -> None:
        self.heard.append(message)


@pytest.fixture
def streams() -> UpstreamSet:
    return UpstreamSet(C, NodeCounters(), lambda parts: Ack(0, parts), lambda fault: fault)


async def test_both_replicas_of_the_newest_generation_are_heard(streams: UpstreamSet) -> None:
    one, two = Side(), Side()
    assert streams.attach(one, to_c(0, HEDGE), B, 0, CREDITS)
    assert not streams.attach(two, to_c(0, HEDGE), X, 0, CREDITS), "the replica brings no new generation"
    assert one in streams
    assert two in streams
    streams.be_ready(CREDITS)
    assert [side.heard.count(Ready(0, CREDITS)) for side in (one, two)] == [1, 1]


async def test_a_replica_that_comes_late_is_told_what_the_other_was(streams: UpstreamSet) -> None:
    one, two = Side(), Side()
    streams.attach(one, to_c(0, HEDGE), B, 0, CREDITS)
    streams.be_ready(CREDITS)
    streams.attach(two, to_c(0, HEDGE), X, 0, CREDITS)
    assert Ready(0, CREDITS) in two.heard


async def test_a_stranger_of_the_same_generation_is_refused(streams: UpstreamSet) -> None:
    streams.attach(Side(), to_c(3, HEDGE), B, 0, CREDITS)
    with pytest.raises(RemoteProtocolError, match="3 is attached already"):
        streams.attach(Side(), to_c(3, None), X, 0, CREDITS)
    with pytest.raises(HopClosed, match="generation 2 is not newer"):
        streams.attach(Side(), to_c(2, HEDGE), X, 0, CREDITS)


async def test_a_newer_generation_without_a_replica_ends_the_replicas_stream(streams: UpstreamSet) -> None:
    one, two = Side(), Side()
    streams.attach(one, to_c(0, HEDGE), B, 0, CREDITS)
    streams.attach(two, to_c(0, HEDGE), X, 0, CREDITS)
    assert streams.reroute(one, Reroute(1, ROUTE, OPEN), 2, CREDITS)
    assert one in streams
    assert two not in streams
    assert two.ended.is_set()


async def test_a_new_route_that_comes_by_the_replica_first_keeps_the_others_stream(streams: UpstreamSet) -> None:
    one, two = Side(), Side()
    streams.attach(one, to_c(0, None), B, 0, CREDITS)
    assert streams.attach(two, to_c(1, HEDGE), X, 0, CREDITS)
    assert one in streams, "its Reroute is on its way"
    assert not streams.reroute(one, Reroute(1, ROUTE, OPEN, HEDGE), 2, CREDITS)


def frame(sequence: int, rows: torch.Tensor, kept: tuple[bool, ...] | None = None) -> SweepFrame:
    count = len(rows) if kept is None else len(kept)
    parents = (None, *map(TreeNodeId, range(sequence * 100, sequence * 100 + count - 1)))
    sweep = Sweep(sequence, 0, TreeNodeId(sequence * 100), tuple(range(count)), parents, TreeNodeId(0))
    return SweepFrame(sweep, kept, encode_rows(rows, Codec.FP32))


ROWS_OF_ONE = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))


def test_equal_rows_do_not_differ_and_are_compared_once() -> None:
    rows = HedgeRows()
    rows.keep(frame(1, ROWS_OF_ONE))
    assert rows.compare(frame(1, ROWS_OF_ONE)) == 0.0
    assert rows.compare(frame(1, ROWS_OF_ONE)) is None
    assert rows.compare(frame(2, ROWS_OF_ONE)) is None


@pytest.mark.parametrize(("factor", "is_reported"), [(1 + 1e-5, False), (1 + 1e-2, True)])
def test_rounding_is_no_difference(factor: float, is_reported: bool) -> None:
    rows = HedgeRows()
    rows.keep(frame(1, ROWS_OF_ONE))
    difference = rows.compare(frame(1, ROWS_OF_ONE * factor))
    assert difference is not None
    assert (difference > MAX_DIFFERENCE[Codec.FP32]) == is_reported


def test_a_lie_beside_one_large_value_differs() -> None:
    """Many models have values that dwarf all others; what is relative to those alone hides a lie in the rest."""
    honest = ROWS_OF_ONE.clone()
    honest[0, 0] = 1e4
    lie = honest.clone()
    lie[1:] *= 1.05
    rows = HedgeRows()
    rows.keep(frame(1, honest))
    difference = rows.compare(frame(1, lie))
    assert difference is not None
    assert difference > MAX_DIFFERENCE[Codec.BF16]
    assert (honest - lie).abs().max() / honest.abs().max() < 1e-4, "what a maximum would say"


def test_each_part_of_a_wide_row_is_compared_by_itself() -> None:
    """Else a large row beside it would hide a lie."""
    beside = ROWS_OF_ONE * 1e4
    honest, lie = (torch.cat([rows, beside], dim=1) for rows in (ROWS_OF_ONE, ROWS_OF_ONE * 1.05))
    for row_parts, is_found in ((1, False), (2, True)):
        rows = HedgeRows(row_parts=row_parts)
        rows.keep(frame(1, honest))
        difference = rows.compare(frame(1, lie))
        assert difference is not None
        assert (difference > MAX_DIFFERENCE[Codec.FP32]) == is_found


def test_no_row_is_safe_from_being_compared() -> None:
    """A replica that is honest in some rows of each sweep, the last ones, say, is found before long."""
    lie = ROWS_OF_ONE.clone()
    lie[0] *= 2
    rows, found = HedgeRows(Random(1)), 0
    for sequence in range(1, 51):
        rows.keep(frame(sequence, ROWS_OF_ONE))
        found += (rows.compare(frame(sequence, lie)) or 0.0) > MAX_DIFFERENCE[Codec.FP32]
    assert 25 < found < 50, "16 of 20 rows are drawn, not always the same"


def test_a_value_that_is_no_number_differs() -> None:
    rows = HedgeRows()
    rows.keep(frame(1, ROWS_OF_ONE))
    assert rows.compare(frame(1, torch.full_like(ROWS_OF_ONE, math.nan))) == math.inf


def test_only_nodes_that_both_ran_are_compared() -> None:
    """One of them left out what had died by then."""
    rows = HedgeRows()
    rows.keep(frame(1, ROWS_OF_ONE[:3]))
    assert rows.compare(frame(1, ROWS_OF_ONE[[0, 2]], (True, False, True))) == 0.0
    rows.keep(frame(2, ROWS_OF_ONE[:1], (True, False)))
    assert rows.compare(frame(2, ROWS_OF_ONE[1:2], (False, True))) == 0.0, "none in common"


def test_what_is_kept_is_bounded() -> None:
    rows = HedgeRows()
    for sequence in range(1, SWEEPS + 3):
        rows.keep(frame(sequence, ROWS_OF_ONE))
    assert len(rows._kept) == SWEEPS
    assert {len(kept) for kept in rows._kept.values()} == {ROWS}
    assert rows.compare(frame(2, ROWS_OF_ONE)) is None


MODEL = ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 12)


def record(name: str, start: int, end: int, ms: float, numeric_class: str = "cpu-float32") -> NodeRecord:
    return NodeRecord(
        peer=PeerId(name),
        model=MODEL,
        span=Span(start, end),
        address=f"192.0.2.1:{1000 + ord(name[0])}",
        state=NodeState.SERVING,
        numeric_class=numeric_class,
        version="0",
        name=None,
        sweep_ms=((1, ms), (64, ms)),
        kv_tokens_free=100,
        kv_tokens_total=100,
        sequence=0,
        expires_at=2e9,
    )


CHAIN = [record("a", 0, 4, 10.0), record("b", 4, 8, 30.0), record("c", 8, 12, 20.0)]
QUERY = RouteQuery("demo", 12)


def test_the_slowest_hop_that_can_have_one_gets_the_fastest_replica() -> None:
    spares = [record("d", 0, 4, 90.0), record("e", 8, 12, 60.0), record("f", 8, 12, 50.0)]
    route = hedged(best_route([*CHAIN, *spares], QUERY), [*CHAIN, *spares], QUERY)
    assert [hop.peer for hop in route.hops] == ["a", "b", "c"]
    assert route.hedge == Hedge(2, PeerId("f")), "b is slower, but nobody else has its layers"
    assert route.replicas == (RouteHop(PeerId("f"), Span(8, 12)),)
    assert route.endpoint(PeerId("f")).address == "192.0.2.1:1102"


@pytest.mark.parametrize(
    "spare",
    [
        record("d", 5, 9, 20.0),
        record("d", 4, 8, 20.0, "cuda-bfloat16"),
        replace(record("d", 4, 8, 20.0), state=NodeState.DRAINING),
        replace(record("d", 4, 8, 20.0), kv_tokens_free=0),
    ],
    ids=["other layers", "other class", "leaving", "full"],
)
def test_a_machine_that_does_not_fit_is_no_replica(spare: NodeRecord) -> None:
    query = replace(QUERY, kv_tokens=10)
    route = best_route(CHAIN, query)
    assert hedged(route, [*CHAIN, spare], query) == route


def test_a_machine_to_avoid_is_no_replica_and_one_that_holds_the_session_comes_first() -> None:
    spares = [record("d", 4, 8, 31.0), record("e", 4, 12, 65.0)]
    route = best_route(CHAIN, QUERY)
    query = replace(QUERY, avoid=frozenset({"d"}), replay_layer_ms=10.0)
    assert hedged(route, [*CHAIN, *spares], query).hedge == Hedge(1, PeerId("e")), "a wider span will do"
    held = replace(QUERY, replay_layer_ms=10.0, keep=(RouteHop(PeerId("e"), Span(4, 8)),))
    assert hedged(route, [*CHAIN, *spares], held).hedge == Hedge(1, PeerId("e"))
    assert hedged(route, [*CHAIN, *spares], replace(held, keep=())).hedge == Hedge(1, PeerId("d"))


def test_any_hop_can_be_hedged_but_one_whose_replica_holds_the_session_goes_first() -> None:
    spares = [record("d", 0, 4, 30), record("e", 4, 8, 30), record("f", 8, 12, 30)]
    everybody = [*CHAIN, *spares]
    route = best_route(everybody, QUERY)
    for place, (hop, spare) in enumerate(zip(route.hops, spares, strict=True)):
        assert hedged(route, everybody, QUERY, place).hedge == Hedge(place, spare.peer)
        held = replace(QUERY, keep=(*route.hops, RouteHop(spare.peer, hop.span)))
        for first in (None, 0, 1, 2):
            assert hedged(route, everybody, held, first).hedge == Hedge(place, spare.peer)
