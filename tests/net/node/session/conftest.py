"""Three nodes that all tests of a file share, and a session on them that must not notice what a test does."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from node.life.serve import Node
from tests.net.healthy_session import healthy_session, warm_nodes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[tuple[Node, ...]]:
    async with warm_nodes() as three:
        yield three


@pytest_asyncio.fixture(loop_scope="module")
async def other_session(nodes: tuple[Node, ...], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    async with healthy_session(nodes, monkeypatch):
        yield
