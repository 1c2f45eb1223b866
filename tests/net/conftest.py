"""Machines that tests of this folder kill and replace."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.net.killable_nodes import CHAIN, KillableNodes, equally_fast_nodes, reset_client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[KillableNodes]:
    async with equally_fast_nodes() as everybody:
        yield everybody


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(pool: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KillableNodes]:
    """The pool, of which the first chain is listed; afterwards everything that was held is free again."""
    reset_client(pool.client, 20.0)
    with pool.patched(monkeypatch):
        await pool.announce(*CHAIN)
        yield pool
    await pool.clear()
