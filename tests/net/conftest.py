"""How nodes of tests talk: in memory on a virtual clock, or over gRPC; nodes that tests kill and replace.

What a fixture or a test starts below `links` talks in memory, unless it is marked `over_grpc`. gRPC, TLS and the wire
have tests of their own, and `client/chain/test_over_grpc.py` has one of each kind of behaviour.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from benchmarks.simulation.virtual_loop import TICK_S, VirtualLoop
from tests.memory_links import MemoryLinks
from tests.net.killable_nodes import CHAIN, KillableNodes, equally_fast_nodes, reset_client
from tests.virtual_time import virtual_time

LoopFactories = dict[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(
    config: pytest.Config,
    item: pytest.Item,
) -> LoopFactories:
    """A test below `links` has a virtual loop."""
    in_memory = "links" in getattr(item, "fixturenames", ()) and item.get_closest_marker("over_grpc") is None
    return {"memory": VirtualLoop} if in_memory else {"grpc": asyncio.new_event_loop}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def links() -> AsyncIterator[MemoryLinks | None]:
    """The links of a module that are in memory; None where they are gRPC's."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        yield None
        return
    with virtual_time(loop), MemoryLinks().in_place_of_grpc() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr("client.draft.loading.MEASURED_S", 4 * TICK_S)  # it computes until so much time has passed
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(links: MemoryLinks | None) -> AsyncIterator[KillableNodes]:
    async with equally_fast_nodes() as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(pool: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KillableNodes]:
    """The pool, of which the first chain is announced; afterwards all its nodes are alive and free again."""
    reset_client(pool.client, 20.0)
    with pool.patched(monkeypatch):
        await pool.announce(*CHAIN)
        yield pool
    await pool.clear()


@pytest.fixture
async def broken_calls() -> AsyncIterator[None]:
    """Ends the tasks that gRPC leaves to calls that broke while they were written to: only floods have so many."""
    yield
    for task in asyncio.all_tasks():
        if "_handle_status_once_received" in repr(task):
            task.cancel()
