"""Nodes that tests of this folder kill and replace, and what broken calls leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.net.killable_nodes import CHAIN, KillableNodes, equally_fast_nodes, reset_client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[KillableNodes]:
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
