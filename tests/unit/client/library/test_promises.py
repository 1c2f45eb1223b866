"""Which machines a client uses that asks for reproducible texts, and what it says where there are none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import pytest

from client.base.target import Target
from client.chain.opening import PeerLatency
from client.library.session import SessionOpener
from swarm.base.errors import RouteError, UnsupportedModel
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord
from swarm.directory.registry import Registry
from swarm.link.dial import Dialer
from tests.sample_records import MODEL, sample_record

PLAIN, FIRST, SECOND, OTHER_CARD = (
    "cuda-bfloat16",
    "cuda-sm90-bfloat16-k1",
    "cuda-sm90-bfloat16-k2",
    "cuda-sm89-bfloat16-k1",
)
PEERS = [Identity.ephemeral().peer_id for _ in range(8)]
FAST, SLOW = 1.0, 50.0


class Listing:
    """A directory with these machines."""

    def __init__(self, *records: NodeRecord) -> None:
        self._records = records

    async def records(self, *_: object, **__: object) -> list[NodeRecord]:
        return list(self._records)


def machine(number: int, start: int, end: int, kind: str, ms: float = FAST) -> NodeRecord:
    kind, _, mark = kind.partition("~")
    more: dict[str, Any] = {"numeric_class": kind, "sweep_ms": ((1, ms),), "kv_tokens_free": 9_999, "rounding": mark}
    return sample_record(PEERS[number], span=Span(start, end), **more | {"kv_tokens_total": 9_999})


def opener(*records: NodeRecord, reproducible: bool = True) -> SessionOpener:
    async def unmeasured(_: Collection[NodeRecord]) -> dict[PeerId, float]:
        return {record.peer: 1.0 for record in records}

    target = cast("Target", type("Named", (), {"name": "demo", "hidden_size": 8, "needs_ids": False})())
    near = PeerLatency(probe=unmeasured)
    directory, dialer = cast("Registry", Listing(*records)), cast("Dialer", None)
    return SessionOpener(target, MODEL, directory, dialer, (), 4, nearby=near, reproducible=reproducible)


async def test_a_slower_chain_that_promises_is_taken_only_where_it_is_asked_for() -> None:
    records = (machine(0, 0, 12, PLAIN, FAST), machine(1, 0, 12, FIRST, SLOW))
    assert (await opener(*records).route()).numeric_class == FIRST
    assert (await opener(*records, reproducible=False).route()).numeric_class == PLAIN
    exact = (machine(0, 0, 12, PLAIN, FAST), machine(1, 0, 12, "cpu-float32", SLOW))
    assert (await opener(*exact).route()).numeric_class == "cpu-float32"


async def test_where_nobody_promises_the_error_says_what_there_is() -> None:
    with pytest.raises(
        RouteError, match=r"promise the same text.*layers 0…11.*also computes in cuda-bfloat16"
    ) as caught:
        await opener(machine(0, 0, 12, PLAIN)).route()
    assert caught.value.missing == ((0, 12),)
    half = (machine(0, 0, 12, PLAIN), machine(1, 0, 6, FIRST))
    with pytest.raises(RouteError, match=r"layers 6…11.*cuda-bfloat16: leave out --reproducible"):
        await opener(*half).route()
    mixed = (*half, machine(2, 6, 12, SECOND))
    with pytest.raises(RouteError, match="promise the same text covers demo; the swarm also"):
        await opener(*mixed).route()
    with pytest.raises(RouteError, match="nobody serves layers 6…11 of demo"):  # nothing is left out here
        await opener(machine(1, 0, 6, FIRST)).route()


@pytest.mark.parametrize("reproducible", [True, False])
async def test_a_repair_stays_in_its_class(*, reproducible: bool) -> None:
    """Version and architecture count: faster machines of every other class cannot take a dead one's place."""
    others = [machine(number, 0, 12, kind) for number, kind in enumerate((SECOND, OTHER_CARD, PLAIN), 2)]
    chain, spare = (machine(0, 0, 6, FIRST), machine(1, 6, 12, FIRST)), machine(5, 6, 12, FIRST, SLOW)
    first = await opener(*chain, reproducible=reproducible).route()
    opened = opener(*chain, *others, spare, reproducible=reproducible)
    repaired = await opened._detour((FIRST, ""), {PEERS[1]}, first.hops[:1], within_s=0.0)
    assert [record.peer for record in repaired.records] == [PEERS[0], PEERS[5]]
    opened = opener(*chain, *others, reproducible=reproducible)
    with pytest.raises(RouteError, match="no chain of"):
        await opened._detour((FIRST, ""), {PEERS[1]}, first.hops[:1], within_s=0.0)


async def test_classes_of_old_and_of_newer_releases() -> None:
    """Old names still route; a class that this version does not know is passed over, and named where it is alone."""
    newer = machine(0, 0, 12, "cuda-sm90-bfloat16-k1+w2", FAST)
    assert (await opener(newer, machine(1, 0, 12, PLAIN, SLOW), reproducible=False).route()).numeric_class == PLAIN
    with pytest.raises(UnsupportedModel, match=r"compute in cuda-sm90-bfloat16-k1\+w2; update it"):
        await opener(newer).route()


CPU = "cpu-bfloat16-k2+gguf"
HERE, THERE = f"{CPU}~0123abcd", f"{CPU}~89ab4567"
"""A class that leaves rounding to the processor, with the marks of two."""


def mark_of(kind: str) -> str:
    return kind.partition("~")[2]


@pytest.mark.parametrize(("slow", "is_taken"), [(1.5, True), (3.0, False)])
async def test_processors_that_round_alike_are_taken_unless_they_are_much_slower(slow: float, is_taken: bool) -> None:
    ms = 200.0
    mixed = [machine(0, 0, 6, HERE, ms), machine(1, 6, 12, THERE, ms)]
    alike = machine(2, 6, 12, HERE, 2 * slow * ms - ms)
    found = await opener(*mixed, alike, reproducible=False).route()
    assert found.rounding == (mark_of(HERE) if is_taken else None)
    assert [record.peer for record in found.records] == [PEERS[0], PEERS[2 if is_taken else 1]]
    assert (await opener(*mixed, alike).route()).rounding == mark_of(HERE), "who wants the promise waits for it"
    assert (await opener(*mixed, reproducible=False).route()).rounding is None
    with pytest.raises(RouteError, match=r"round alike, covers demo .*: leave out --reproducible to use them all"):
        await opener(*mixed).route()


@pytest.mark.parametrize("reproducible", [True, False])
async def test_a_repair_stays_with_processors_that_round_alike(*, reproducible: bool) -> None:
    """However slow they are: with any other the text may go on otherwise, and is not called reproducible then."""
    chain = (machine(0, 0, 6, HERE), machine(1, 6, 12, HERE))
    spare, other = machine(2, 6, 12, HERE, 99 * SLOW), machine(3, 6, 12, THERE)
    whole = machine(4, 0, 12, THERE)
    first = await opener(*chain, reproducible=reproducible).route()
    session = (CPU, first.rounding)
    opened = opener(*chain, spare, other, whole, reproducible=reproducible)
    repaired = await opened._detour(session, {PEERS[1]}, first.hops[:1], within_s=0.0)
    assert [record.peer for record in repaired.records] == [PEERS[0], PEERS[2]]
    opened = opener(*chain, other, reproducible=reproducible)
    if reproducible:
        with pytest.raises(RouteError, match="processors that round alike"):
            await opened._detour(session, {PEERS[1]}, first.hops[:1], within_s=0.0)
    else:
        repaired = await opened._detour(session, {PEERS[1]}, first.hops[:1], within_s=0.0)
        assert [record.peer for record in repaired.records] == [PEERS[0], PEERS[3]]


async def test_a_replica_rounds_as_the_machine_that_it_is_compared_with() -> None:
    chain = (machine(0, 0, 6, HERE), machine(1, 6, 12, HERE))
    fast, slow = machine(2, 6, 12, THERE), machine(3, 6, 12, HERE, SLOW)
    found = await replace(opener(*chain, fast, slow), hedge=True).route()
    assert found.replica is not None
    assert found.replica.peer == PEERS[3]
    assert (await replace(opener(*chain, fast), hedge=True).route()).replica is None
