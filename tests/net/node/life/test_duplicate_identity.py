"""Two machines under one identity file: over the DHT and in memory, at the start and later."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import node.life.announcer
from node.life.duplicate_identity import check_alone, check_still_alone, next_expiry
from node.life.serve import Node
from node.model.config import ServeConfig
from swarm.base.errors import IdentityError, RegistryError
from swarm.base.layers import Span
from swarm.demo import TARGET
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord
from swarm.directory.registry import RECORD_TTL_S, Registry
from swarm.link.certificate import ServerCertificate
from swarm.link.endpoint import Endpoint
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.net.hello_server import answering
from tests.sample_records import sample_record

DEAD = "127.0.0.1:9"

Duplicates = Callable[[Path], AbstractAsyncContextManager[tuple[Registry, Registry]]]


@asynccontextmanager
async def memory_duplicates(_: Path) -> AsyncIterator[tuple[Registry, Registry]]:
    network, identity = MemoryNetwork(), Identity.ephemeral()
    async with MemoryRegistry(network, identity) as one, MemoryRegistry(network, identity) as two:
        yield one, two


@asynccontextmanager
async def dht_duplicates(folder: Path) -> AsyncIterator[tuple[Registry, Registry]]:
    """Copies of one file on two machines, where the file's lock does not reach."""
    paths = [folder / "one.key", folder / "two.key"]
    Identity.load_or_create(paths[0])
    shutil.copy(paths[0], paths[1])
    async with DhtRegistry.open(DhtConfig(host="127.0.0.1")) as third:
        configs = [DhtConfig(tuple(third.join_addresses()), "127.0.0.1", identity_path=path) for path in paths]
        async with DhtRegistry.open(configs[0]) as one, DhtRegistry.open(configs[1]) as two:
            yield one, two


def at(registry: Registry, address: str) -> Endpoint:
    """Somewhere, with a certificate with which nobody answers."""
    return Endpoint(registry.peer_id, address, ServerCertificate.fresh(registry.peer_id).der)


def record_of(registry: Registry, endpoint: Endpoint, sequence: int = 1, after_s: float = 0.0) -> NodeRecord:
    return sample_record(
        registry.peer_id,
        span=Span(0, 4),
        address=endpoint.address,
        certificate=endpoint.certificate,
        sequence=sequence,
        expires_at=time.time() + RECORD_TTL_S + after_s,
    )


ELSEWHERE = "192.0.2.9:4242"
"""Where a node of these tests says that it listens."""


@pytest.mark.parametrize("duplicates", [memory_duplicates, dht_duplicates])
async def test_a_second_machine_under_one_identity_is_found_by_both(duplicates: Duplicates, tmp_path: Path) -> None:
    async with duplicates(tmp_path) as (first, second), answering(first.identity) as here:
        assert first.peer_id == second.peer_id
        await check_alone(second, ELSEWHERE)
        own = record_of(first, here, sequence=7)
        await first.announce(own)
        await check_still_alone(first, lambda: own)
        with pytest.raises(IdentityError, match=f"another machine, at {here.address}") as caught:
            await check_alone(second, ELSEWHERE)
        assert "--identity" in str(caught.value)
        assert "\n" not in str(caught.value)
        later = record_of(second, at(second, "127.0.0.1:8"), sequence=2, after_s=1)
        await second.announce(later)
        await check_still_alone(second, lambda: later)
        await check_still_alone(first, lambda: own)  # it was here first and goes on
        await first.announce(record_of(first, here, sequence=8, after_s=2))
        with pytest.raises(IdentityError, match=f"another machine, at {here.address}"):
            await check_still_alone(second, lambda: later)


async def test_what_an_earlier_run_left_behind_is_no_namesake() -> None:
    async with memory_duplicates(Path()) as (first, second), answering(Identity.ephemeral()) as strangers:
        for number, address in enumerate((DEAD, strangers.address)):
            await first.announce(record_of(first, at(first, address), after_s=number))
            await check_alone(second, ELSEWHERE)


async def test_a_node_that_moves_while_the_directory_answers_is_not_its_own_duplicate() -> None:
    """Its relay was lost, so it announced another address between the question and the answer."""
    async with memory_duplicates(Path()) as (first, asked):
        newest = record_of(first, at(first, DEAD), sequence=7)
        await first.announce(newest)
        mine = asked.mine

        async def mine_later() -> NodeRecord | None:
            nonlocal newest
            newest = record_of(first, at(first, ELSEWHERE), sequence=8, after_s=5)
            await first.announce(newest)
            return await mine()

        asked.mine = mine_later  # type: ignore[method-assign]
        await check_still_alone(asked, lambda: newest)


async def test_a_restart_with_a_clock_that_was_set_back_is_no_duplicate() -> None:
    """What the crashed run left expires later than the new run's records, and has the higher sequence."""
    async with memory_duplicates(Path()) as (crashed, again):
        await crashed.announce(left := record_of(crashed, at(crashed, DEAD), sequence=50, after_s=20))
        assert await check_alone(again, ELSEWHERE) == left
        own = record_of(again, at(again, ELSEWHERE))
        with pytest.raises(IdentityError):
            await check_still_alone(again, lambda: own)
        await check_still_alone(again, lambda: own, left)
        own = replace(own, expires_at=next_expiry(time.time(), left))
        await again.announce(own)  # it is listed at once, not only when the old record has run out
        assert await again.mine() == own
        await check_still_alone(again, lambda: own, left)
        other = record_of(crashed, at(crashed, DEAD), sequence=51, after_s=25)
        await crashed.announce(other)
        with pytest.raises(IdentityError):
            await check_still_alone(again, lambda: own, left)


def test_each_record_lives_longer_than_the_last_and_none_too_long() -> None:
    registry = MemoryRegistry(MemoryNetwork())
    record = record_of(registry, at(registry, DEAD))
    now = 1_000.0
    assert next_expiry(now) == next_expiry(now, None) == now + RECORD_TTL_S
    for ahead in (0.0, 59.9, 60.0, 80.0):
        expiry = next_expiry(now, replace(record, expires_at=now + ahead), None)
        assert now + max(ahead, RECORD_TTL_S - 0.01) < expiry <= now + 90
    assert next_expiry(now, replace(record, expires_at=now + 3_600)) < now + 90


async def test_the_address_that_this_node_has_bound_itself_is_not_called() -> None:
    """Its socket does not answer yet: a node that starts again on its port would wait for itself."""
    async with memory_duplicates(Path()) as (first, second), answering(first.identity) as here:
        await first.announce(record_of(first, here))
        await check_alone(second, here.address)
        with pytest.raises(IdentityError):
            await check_alone(second, ELSEWHERE)


async def test_of_two_that_began_together_exactly_one_gives_way() -> None:
    async with memory_duplicates(Path()) as (first, second):
        records = [record_of(first, at(first, "127.0.0.1:8")), record_of(second, at(second, DEAD), after_s=1)]
        for record in records:
            await first.announce(record)
        with pytest.raises(IdentityError):
            await check_still_alone(first, lambda: records[0])
        await first.announce(later := replace(records[0], expires_at=records[1].expires_at + 1))
        await check_still_alone(second, lambda: replace(records[1], expires_at=later.expires_at - 1))


async def test_a_node_gives_its_name_up_and_leaves_the_others_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.life.announcer, "ANNOUNCE_S", 0.05)
    network, identity = MemoryNetwork(), Identity.ephemeral()
    other = MemoryRegistry(network, identity)
    config = ServeConfig(layers="8-12", model=str(TARGET), host="127.0.0.1", threads=1)

    async def serve() -> None:
        async with Node(config, lambda _: None, MemoryRegistry(network, identity)) as running:
            await other.announce(record_of(other, at(other, DEAD), sequence=10**6))
            await running.wait_failed()

    with pytest.raises(IdentityError, match=f"another machine, at {DEAD}"):
        await serve()
    found = await other.mine()
    assert found is not None
    assert found.address == DEAD


class HalfDeaf(MemoryRegistry):
    """Says of every second announcement that it failed, although it arrived."""

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(network)
        self.announced = 0
        self.often = asyncio.Event()

    async def announce(self, record: NodeRecord) -> None:
        await super().announce(record)
        self.announced += 1
        if self.announced == 6:
            self.often.set()
        if self.announced % 2 == 0:
            raise RegistryError("the DHT did not answer in time")


async def test_an_announcement_that_arrived_although_it_failed_is_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node.life.announcer, "ANNOUNCE_S", 0.02)
    registry = HalfDeaf(MemoryNetwork())
    config = ServeConfig(layers="8-12", model=str(TARGET), host="127.0.0.1", threads=1)
    async with Node(config, lambda _: None, registry), asyncio.timeout(10):
        await registry.often.wait()
