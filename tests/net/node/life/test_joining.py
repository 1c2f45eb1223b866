"""`--layers auto`: two who join at once, a running node that moves, and what is read from disk for it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

import node.life.announcer
import node.life.joining
import node.life.span_host
from node.life.joining import Rebalance, SpanReservation, joiners_choice
from node.life.serve import Node
from node.model.checkpoint import Checkpoint
from node.model.config import ServeConfig
from node.model.loading import load
from node.model.span import SpanModel
from swarm.base.errors import NotEnoughSpace
from swarm.base.layers import Span
from swarm.compute.kv_pool import KvBlock, NamedText
from swarm.demo import DRAFT, TARGET
from swarm.directory.coverage import cover
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import RECORD_TTL_S, Registry, block_keys
from swarm.protocol.limits import BLOCK_TOKENS
from tests.in_process_swarm import InProcessSwarm
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.raw_client import info
from tests.sample_records import MODEL, sample_record


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.life.joining, "SETTLE_S", 0.0)


def joining(registry: Registry, span: Span, sequence: int) -> NodeRecord:
    fresh = {"state": NodeState.JOINING, "sweep_ms": (), "expires_at": time.time() + RECORD_TTL_S}
    return sample_record(registry.peer_id, span=span, sequence=sequence, **fresh)


async def reserve(registry: Registry, together: asyncio.Barrier) -> tuple[Span | None, list[Span]]:
    """Choose six layers: both look before either reserves, and the first reservation waits for the other's."""
    announced: list[Span] = []

    async def announce(span: Span) -> None:
        announced.append(span)
        if len(announced) == 1:
            await together.wait()
        await registry.announce(joining(registry, span, len(announced)))
        if len(announced) == 1:
            await together.wait()

    reservation = SpanReservation(registry, MODEL, announce)
    return await reservation.reserve(joiners_choice(registry.peer_id, 6, MODEL)), announced


async def two_at_once(one: Registry, two: Registry) -> None:
    together = asyncio.Barrier(2)
    found = dict(zip((one, two), await asyncio.gather(reserve(one, together), reserve(two, together)), strict=True))
    first, second = sorted((one, two), key=lambda registry: registry.peer_id)
    assert {span for span, _ in found.values()} == {Span(0, 6), Span(6, 12)}
    assert found[first] == (Span(0, 6), [Span(0, 6)]), "it goes first and chose once"
    assert found[second] == (Span(6, 12), [Span(0, 6), Span(6, 12)]), "it gave way"
    coverage = cover(MODEL, await one.records(MODEL.fingerprint, 12, within_s=0.0))
    assert coverage.missing == (Span(0, 12),), "who only reserves serves nobody"


async def test_two_who_join_at_once_over_a_real_dht_take_different_spans() -> None:
    async with DhtRegistry.open(DhtConfig(host="127.0.0.1")) as third:
        config = DhtConfig(tuple(third.join_addresses()), "127.0.0.1")
        async with DhtRegistry.open(config) as one, DhtRegistry.open(config) as two:
            await two_at_once(one, two)


async def test_and_in_memory() -> None:
    network = MemoryNetwork()
    await two_at_once(MemoryRegistry(network), MemoryRegistry(network))


async def test_who_comes_later_leaves_the_reserved_span_alone() -> None:
    network = MemoryNetwork()
    one, two = MemoryRegistry(network), MemoryRegistry(network)
    for registry, expected in ((one, Span(0, 6)), (two, Span(6, 12))):
        assert await reserve(registry, asyncio.Barrier(1)) == (expected, [expected])


def auto_node(
    network: MemoryNetwork, layers: str, num_layers: int | None = None, identity: Identity | None = None
) -> Node:
    config = ServeConfig(layers, str(TARGET), num_layers=num_layers, host="127.0.0.1", threads=1)
    return Node(config, lambda _: None, MemoryRegistry(network, identity))


async def test_an_auto_node_fills_the_gap_moves_when_needed_and_reads_only_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = MemoryNetwork()
    read: list[set[str]] = []
    as_stored = Checkpoint.read

    def counted(self: Checkpoint, names: Sequence[str]) -> object:
        read.append(set(names))
        return as_stored(self, read[-1])

    async with auto_node(network, "0-6") as fixed, auto_node(network, "auto", 8) as mover:
        assert span_of(mover, network) == Span(4, 12)
        async with auto_node(network, "4-12"):
            before = mover.registry
            monkeypatch.setattr(Checkpoint, "read", counted)
            await mover.move(Span(2, 10))
        assert mover.registry is before
        assert {layer_of(name) for name in read[0]} == {2, 3}
        assert span_of(mover, network) == Span(2, 10)
        async with auto_node(network, "8-12"):
            here = InProcessSwarm(TARGET, network, (fixed, mover))
            async with here.client(draft=DRAFT) as swarm:
                moved = await swarm.generate("It was a dark night", max_new_tokens=8, seed=3)
    async with (
        auto_node(network, "0-12") as whole,
        InProcessSwarm(TARGET, network, (whole,)).client(draft=DRAFT) as swarm,
    ):
        assert moved.tokens == (await swarm.generate("It was a dark night", max_new_tokens=8, seed=3)).tokens


async def test_a_node_that_moved_keeps_nothing_of_its_old_layers() -> None:
    network = MemoryNetwork()
    async with auto_node(network, "0-6"), auto_node(network, "6-12") as mover:
        old = mover.sessions
        kv = torch.zeros(1, BLOCK_TOKENS, 1)
        assert old.pool.add(NamedText(b"", (b"name",)), 0, [KvBlock((0,) * BLOCK_TOKENS, (kv,))], "me", old.room())
        await mover.move(Span(4, 12))
        assert mover.sessions is not old
        assert len(old.pool) == len(mover.sessions.pool) == 0
        await asyncio.wait([old._forgetting], timeout=1)
        assert old._forgetting.cancelled()


async def test_a_reservation_is_renewed_while_a_node_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.life.announcer, "ANNOUNCE_S", 0.02)
    network, renewed = MemoryNetwork(), threading.Event()
    records: list[NodeRecord] = []
    announce = MemoryRegistry.announce

    async def noted(self: MemoryRegistry, record: NodeRecord) -> None:
        await announce(self, record)
        records.append(record)
        if len(records) == 4:
            renewed.set()

    def slowly(*arguments: Any) -> SpanModel:  # noqa: ANN401
        assert renewed.wait(10)
        return load(*arguments)

    monkeypatch.setattr(MemoryRegistry, "announce", noted)
    monkeypatch.setattr(node.life.span_host, "load", slowly)
    async with auto_node(network, "auto", 6):
        assert [record.state for record in records[:4]] == [NodeState.JOINING] * 4
        assert {record.span for record in records} == {Span(0, 6)}
        assert records[0].expires_at < records[3].expires_at
        assert not any(record.movable for record in records), "it has only just come"


async def test_a_node_that_cannot_load_takes_its_reservation_back(monkeypatch: pytest.MonkeyPatch) -> None:
    network = MemoryNetwork()

    def broken(*_: object) -> SpanModel:
        assert network.models()
        raise NotEnoughSpace("the disk is full")

    monkeypatch.setattr(node.life.span_host, "load", broken)
    with pytest.raises(NotEnoughSpace):
        await auto_node(network, "auto", 6).__aenter__()
    assert not network.models()


async def test_a_running_node_closes_the_gap_that_somebody_left(monkeypatch: pytest.MonkeyPatch) -> None:
    network = MemoryNetwork()
    async with AsyncExitStack() as leaving, auto_node(network, "6-12"), auto_node(network, "6-12"):
        await leaving.enter_async_context(auto_node(network, "0-6"))
        await leaving.enter_async_context(auto_node(network, "0-6"))
        async with auto_node(network, "auto", 6) as mover:
            start = span_of(mover, network)
            rebalance = Rebalance(random.Random(0))
            monkeypatch.setattr(mover.running.announcer, "_rebalance", rebalance)
            await rebalance.look(reservation_of(mover), mover)
            assert span_of(mover, network) == start, "every layer has two holders"
            monkeypatch.setattr(mover.running.announcer, "_span", Span(6, 12))
            known = mover.serving().endpoint
            await mover.move(Span(6, 12))
            assert mover.serving().endpoint == known == mover.endpoint, "its certificate lives as long as its program"
            assert (await info(mover)).span == Span(6, 12)
            await leaving.aclose()
            await rebalance.look(reservation_of(mover), mover)
            assert span_of(mover, network) == Span(0, 6)
            assert not rebalance.may_move


async def test_a_node_whose_turn_it_is_no_more_goes_on_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = iter([Span(0, 6), Span(0, 6), None])
    monkeypatch.setattr(node.life.joining, "movers_choice", lambda _own: lambda _records: next(choices))
    network = MemoryNetwork()
    lower, higher = sorted((Identity.ephemeral(), Identity.ephemeral()), key=lambda identity: identity.peer_id)
    async with auto_node(network, "0-6"), auto_node(network, "auto", 6, higher) as mover:
        rival = MemoryRegistry(network, lower)
        reserve = reservation_of(mover).announce

        async def announce(span: Span) -> None:
            await reserve(span)
            assert rival.peer_id < mover.peer_id
            record = replace(mover.serving(), peer=rival.peer_id, certificate=b"")
            await rival.announce(replace(record, state=NodeState.JOINING, span=span))

        reservation = replace(reservation_of(mover), announce=announce)
        await Rebalance(random.Random(0)).look(reservation, mover)
        assert span_of(mover, network) == Span(6, 12)
        assert next(choices, "all asked") == "all asked"


def reservation_of(mover: Node) -> SpanReservation:
    reservation = mover.running.reservation
    assert reservation is not None, "it chooses its layers itself"
    return reservation


def span_of(running: Node, network: MemoryNetwork) -> Span:
    listed = network.get(block_keys(running.identity.fingerprint, 0, 12))
    [record] = [one for one in listed if one.peer == running.peer_id]
    assert record.state is NodeState.SERVING
    return record.span


def layer_of(tensor: str) -> int:
    return int(tensor.partition("layers.")[2].partition(".")[0])
