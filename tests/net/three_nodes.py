"""Three running nodes for tests, and functions that wait for them, hold them and read their state."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from transformers import AutoTokenizer

from benchmarks.simulation.virtual_loop import VirtualLoop
from client import AsyncSwarm
from node.life.serve import Node
from node.life.span_host import SpanService
from node.session.scheduler import Batch, BatchResult, Engine, Schedulable
from swarm.demo import DRAFT, PASSAGES, TARGET
from swarm.protocol.messages import Counters, Fault, Ready, RouteHop
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.net.raw_client import RawLink, info, route_of

SPANS = ["0-4", "4-8", "8-12"]


@dataclass(frozen=True, slots=True)
class ThreeNodes:
    """Three nodes and a client that has generated once.

    Attributes:
        swarm: the nodes and their registry.
        client: a client of the swarm.
    """

    swarm: InProcessSwarm
    client: AsyncSwarm

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.swarm.nodes

    @property
    def route(self) -> tuple[RouteHop, ...]:
        return route_of(self.nodes, SPANS)


@asynccontextmanager
async def three_nodes() -> AsyncIterator[ThreeNodes]:
    """Start the nodes and all threads that live as long as they do."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    async with in_process_swarm(TARGET, SPANS) as swarm, swarm.client(draft=DRAFT) as client:
        await client.generate("It", max_new_tokens=3, nodes=1)
        yield ThreeNodes(swarm, client)


def prompt(line: int, tokens: int = 12) -> tuple[int, ...]:
    text = json.loads(PASSAGES.read_text().splitlines()[line])["text"]
    return tuple(AutoTokenizer.from_pretrained(TARGET)(text).input_ids[:tokens])


async def until(check: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Repeat a check until it is true; it usually asks a node over the network."""
    async with asyncio.timeout(timeout_s):
        while not await check():  # noqa: ASYNC110 - what it asks has no event
            await asyncio.sleep(0.002)  # leave the time to what is waited for


async def until_freed(nodes: Iterable[Node], timeout_s: float = 5.0) -> None:
    tables = [node.sessions for node in nodes]

    async def freed() -> bool:
        return all(len(one) == 0 and one.kv_tokens_free == one.kv_tokens for one in tables)

    await until(freed, timeout_s)


async def until_received(node: Node, frames: int) -> None:
    async def received() -> bool:
        return (await info(node)).counters.frames_in >= frames

    await until(received)


def service_of(node: Node) -> SpanService:
    service = node.running.host.service
    assert service is not None
    return service


def engine_of(node: Node) -> Engine:
    return service_of(node).engine


def server_of(node: Node) -> grpc.aio.Server:
    return service_of(node).server


@asynccontextmanager
async def thread_held(node: Node) -> AsyncIterator[None]:
    """Block a node's compute thread; sweeps that arrive meanwhile wait in its queues."""
    gate, began = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):  # there are no threads
        async with _turns_held(engine_of(node)):
            yield
        return

    def hold() -> None:
        loop.call_soon_threadsafe(began.set)
        assert gate.wait(15)

    async with asyncio.TaskGroup() as group:
        group.create_task(engine_of(node).on_thread(hold))
        await began.wait()
        try:
            yield
        finally:
            gate.set()


@asynccontextmanager
async def _turns_held(engine: Engine) -> AsyncIterator[None]:
    """Let no batch run that was scheduled, as if the compute thread was busy."""
    gate, run = asyncio.Event(), engine._run_batch

    async def held(batch: Batch[Schedulable]) -> BatchResult:
        await gate.wait()
        return await run(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_run_batch", held)
        try:
            yield
        finally:
            gate.set()


def grown(before: list[Counters], after: list[Counters], field: str) -> list[int]:
    return [getattr(b, field) - getattr(a, field) for a, b in zip(before, after, strict=True)]


async def refusal(link: RawLink) -> Fault:
    """The fault that ends a stream."""
    fault = await link.until(Fault)
    assert await link.read() is None
    assert await link.status() is grpc.StatusCode.OK
    return fault


@asynccontextmanager
async def raw_link_ready(link: RawLink) -> AsyncIterator[Ready]:
    yield await link.until(Ready)
